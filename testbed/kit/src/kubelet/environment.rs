//! The environment that a pod's author gives a container, as kubelet reads it at each start (`makeEnvironment`): `envFrom` first,
//! then `env`, and a later value replaces an earlier one.
//!
//! Values come from `ConfigMaps`, and by `fieldRef` from the pod's name and namespace. `Secrets`, references to other fields,
//! resources and files, optional references, and `$(NAME)` in values are left out.

use std::collections::BTreeMap;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::{ConfigMap, EnvVarSource};
use kube::{Api, Client};

use super::pod::{ContainerSpec, KubeletPod};

async fn entries_of(maps: &Api<ConfigMap>, name: &str) -> Result<BTreeMap<String, String>> {
    let map = maps.get_opt(name).await;
    let map = map.with_context(|| format!("cannot read configmap {name}"))?;
    let map = map.with_context(|| format!("configmap \"{name}\" not found"))?;
    Ok(map.data.unwrap_or_default())
}

/// Reads the environment that the author of a pod gives a container; kubelet tries again after an error.
pub(crate) async fn read(
    client: &Client,
    pod: &KubeletPod,
    container: &ContainerSpec,
) -> Result<BTreeMap<String, String>> {
    let maps: Api<ConfigMap> = Api::namespaced(client.clone(), &pod.namespace);
    let mut env = BTreeMap::new();
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
            None => variable.value.clone().unwrap_or_default(),
            Some(EnvVarSource {
                config_map_key_ref: Some(found),
                ..
            }) => {
                let (name, key) = (&found.name, &found.key);
                let value = entries_of(&maps, name).await?.remove(key);
                value.with_context(|| format!("couldn't find key {key} in configmap {name}"))?
            }
            Some(EnvVarSource {
                field_ref: Some(found),
                ..
            }) => match found.field_path.as_str() {
                "metadata.name" => pod.name.clone(),
                "metadata.namespace" => pod.namespace.clone(),
                _ => continue,
            },
            Some(_) => continue,
        };
        env.insert(variable.name.clone(), value);
    }
    Ok(env)
}
