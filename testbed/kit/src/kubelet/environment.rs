//! The environment that a pod's author gives a container, as kubelet reads it at each start (`makeEnvironment`): `envFrom` first,
//! then `env`, and a later value replaces an earlier one.
//!
//! Of `fieldRef` it knows the pod's name and namespace. References to other fields, resources and files, and `$(NAME)` in values,
//! are left out.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, EnvVarSource, Secret};
use kube::{Api, Client};

use super::pod::{ContainerSpec, KubeletPod};

/// The reason for which the environment of a container cannot be read; kubelet tries again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentError {
    #[error("{kind} \"{name}\" not found")]
    NotFound { kind: &'static str, name: String },
    #[error("couldn't find key {key} in {kind} {name}")]
    NoKey {
        kind: &'static str,
        name: String,
        key: String,
    },
    #[error("cannot read {kind} {name}")]
    Read {
        kind: &'static str,
        name: String,
        #[source]
        source: kube::Error,
    },
}

/// The entries of a `ConfigMap` or a `Secret`.
type Entries = BTreeMap<String, String>;

/// A `ConfigMap` or `Secret` that has values of variables.
struct ValueSource<'a> {
    client: &'a Client,
    namespace: &'a str,
    kind: &'static str,
    name: &'a str,
    is_optional: bool,
}

impl ValueSource<'_> {
    /// The entries of the object; none if it is missing and optional.
    async fn entries(&self) -> Result<Option<Entries>, EnvironmentError> {
        let (client, namespace) = (self.client.clone(), self.namespace);
        let read = if self.kind == CONFIG_MAP {
            let maps: Api<ConfigMap> = Api::namespaced(client, namespace);
            let found = maps.get_opt(self.name).await;
            found.map(|map| map.map(|map| map.data.unwrap_or_default()))
        } else {
            let secrets: Api<Secret> = Api::namespaced(client, namespace);
            let found = secrets.get_opt(self.name).await;
            found.map(|secret| secret.map(|secret| texts(secret.data.unwrap_or_default())))
        };
        let name = self.name.to_owned();
        match read {
            Ok(None) if !self.is_optional => Err(EnvironmentError::NotFound {
                kind: self.kind,
                name,
            }),
            Ok(found) => Ok(found),
            Err(source) => Err(EnvironmentError::Read {
                kind: self.kind,
                name,
                source,
            }),
        }
    }

    /// One entry of the object; none if it is missing and optional.
    async fn entry(&self, key: &str) -> Result<Option<String>, EnvironmentError> {
        let entries = self.entries().await?;
        let value = entries.and_then(|mut entries| entries.remove(key));
        if value.is_none() && !self.is_optional {
            return Err(EnvironmentError::NoKey {
                kind: self.kind,
                name: self.name.to_owned(),
                key: key.to_owned(),
            });
        }
        Ok(value)
    }
}

const CONFIG_MAP: &str = "configmap";
const SECRET: &str = "secret";

/// The data of a `Secret` as text.
fn texts(data: BTreeMap<String, k8s_openapi::ByteString>) -> Entries {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    data.into_iter()
        .map(|(key, value)| (key, text(&value.0)))
        .collect()
}

/// Reads the environment that the author of a pod gives a container.
pub(crate) async fn read(
    client: &Client,
    pod: &KubeletPod,
    container: &ContainerSpec,
) -> Result<Entries, EnvironmentError> {
    let mut env = Entries::new();
    let source = |kind, name, is_optional: Option<bool>| ValueSource {
        client,
        namespace: &pod.namespace,
        kind,
        name,
        is_optional: is_optional == Some(true),
    };
    for from in &container.env_from {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        let mut sources = Vec::new();
        if let Some(found) = &from.config_map_ref {
            sources.push(source(CONFIG_MAP, &found.name, found.optional));
        }
        if let Some(found) = &from.secret_ref {
            sources.push(source(SECRET, &found.name, found.optional));
        }
        for source in sources {
            for (key, value) in source.entries().await?.into_iter().flatten() {
                env.insert(format!("{prefix}{key}"), value);
            }
        }
    }
    for variable in &container.env {
        let value = match &variable.value_from {
            None => Some(variable.value.clone().unwrap_or_default()),
            Some(EnvVarSource {
                config_map_key_ref: Some(found),
                ..
            }) => {
                source(CONFIG_MAP, &found.name, found.optional)
                    .entry(&found.key)
                    .await?
            }
            Some(EnvVarSource {
                secret_key_ref: Some(found),
                ..
            }) => {
                source(SECRET, &found.name, found.optional)
                    .entry(&found.key)
                    .await?
            }
            Some(EnvVarSource {
                field_ref: Some(found),
                ..
            }) => match found.field_path.as_str() {
                "metadata.name" => Some(pod.name.clone()),
                "metadata.namespace" => Some(pod.namespace.clone()),
                _ => None,
            },
            Some(_) => None,
        };
        if let Some(value) = value {
            env.insert(variable.name.clone(), value);
        }
    }
    Ok(env)
}
