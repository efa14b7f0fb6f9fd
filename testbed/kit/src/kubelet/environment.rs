//! The environment that a pod's author gives a container, as kubelet reads it at each start (`makeEnvironment`): `envFrom` first,
//! then `env`, and a later value replaces an earlier one.
//!
//! Values come from `ConfigMaps`, and by `fieldRef` from the pod's name and namespace. `Secrets`, references to other fields,
//! resources and files, optional references, and `$(NAME)` in values are left out.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::{ConfigMap, EnvVarSource};
use kube::{Api, Client};

use super::pod::{ContainerSpec, KubeletPod};

/// The reason for which the environment of a container cannot be read; kubelet tries again.
#[derive(Debug, thiserror::Error)]
pub(crate) enum EnvironmentError {
    #[error("configmap \"{0}\" not found")]
    NotFound(String),
    #[error("couldn't find key {key} in configmap {name}")]
    NoKey { name: String, key: String },
    #[error("cannot read configmap {name}")]
    Read {
        name: String,
        #[source]
        source: kube::Error,
    },
}

/// Names of variables or keys, with their values.
type Entries = BTreeMap<String, String>;

/// The entries of a `ConfigMap`.
async fn entries_of(maps: &Api<ConfigMap>, name: &str) -> Result<Entries, EnvironmentError> {
    match maps.get_opt(name).await {
        Ok(Some(map)) => Ok(map.data.unwrap_or_default()),
        Ok(None) => Err(EnvironmentError::NotFound(name.to_owned())),
        Err(source) => Err(EnvironmentError::Read {
            name: name.to_owned(),
            source,
        }),
    }
}

/// Reads the environment that the author of a pod gives a container.
pub(crate) async fn read(
    client: &Client,
    pod: &KubeletPod,
    container: &ContainerSpec,
) -> Result<Entries, EnvironmentError> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &pod.namespace);
    let mut env = Entries::new();
    for from in &container.env_from {
        let prefix = from.prefix.as_deref().unwrap_or_default();
        if let Some(map) = &from.config_map_ref {
            for (key, value) in entries_of(&maps, &map.name).await? {
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
                let value = entries_of(&maps, &found.name).await?.remove(&found.key);
                Some(value.ok_or_else(|| EnvironmentError::NoKey {
                    name: found.name.clone(),
                    key: found.key.clone(),
                })?)
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
