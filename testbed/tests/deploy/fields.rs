//! Every field in the manifests is one that Kubernetes has: the API server drops a misspelt one with a warning at most.

use k8s_openapi::api::admissionregistration::v1::{
    MutatingWebhookConfiguration, ValidatingAdmissionPolicy, ValidatingAdmissionPolicyBinding,
    ValidatingWebhookConfiguration,
};
use k8s_openapi::api::apps::v1::{DaemonSet, Deployment};
use k8s_openapi::api::core::v1::{ConfigMap, Namespace, Pod, ResourceQuota, Service, ServiceAccount};
use k8s_openapi::api::flowcontrol::v1::{FlowSchema, PriorityLevelConfiguration};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use k8s_openapi::api::rbac::v1::{ClusterRole, ClusterRoleBinding, Role, RoleBinding};
use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use k8s_openapi::{Metadata, Resource};
use rstest::rstest;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::render::{render, render_base_with, render_with};

/// An object without the fields that its type does not know.
type Known = fn(&Value) -> Value;

fn known<T: Metadata + Serialize + DeserializeOwned>(object: &Value) -> Value {
    serde_json::to_value(T::deserialize(object).unwrap_or_else(|error| panic!("{error}: {object:#}")))
        .unwrap()
}

fn entry<T: Resource + Metadata + Serialize + DeserializeOwned>() -> (&'static str, &'static str, Known) {
    (T::API_VERSION, T::KIND, known::<T>)
}

fn kinds() -> Vec<(&'static str, &'static str, Known)> {
    vec![
        entry::<ClusterRole>(),
        entry::<ClusterRoleBinding>(),
        entry::<ConfigMap>(),
        entry::<CustomResourceDefinition>(),
        entry::<DaemonSet>(),
        entry::<Deployment>(),
        entry::<FlowSchema>(),
        entry::<MutatingWebhookConfiguration>(),
        entry::<Namespace>(),
        entry::<NetworkPolicy>(),
        entry::<Pod>(),
        entry::<PodDisruptionBudget>(),
        entry::<PriorityLevelConfiguration>(),
        entry::<ResourceQuota>(),
        entry::<Role>(),
        entry::<RoleBinding>(),
        entry::<Service>(),
        entry::<ServiceAccount>(),
        entry::<ValidatingAdmissionPolicy>(),
        entry::<ValidatingAdmissionPolicyBinding>(),
        entry::<ValidatingWebhookConfiguration>(),
    ]
}

#[rstest]
#[case::base(render("base"))]
#[case::simulated(render("overlays/simulated"))]
#[case::second_scheduler(render("attach/second-scheduler"))]
#[case::samples(render("attach/second-scheduler/samples"))]
#[case::webhooks(render_with("base", &["components/webhooks", "components/guard-bindings", "components/fail-closed"]))]
#[case::webhooks_cert_manager(render_base_with("components/webhooks-cert-manager"))]
#[case::evict_pods(render_base_with("components/evict-pods"))]
#[case::make_room(render_base_with("components/make-room"))]
#[case::runtime_class(render_base_with("components/nvidia-runtime-class"))]
#[case::driver_root(render_with("base", &["components/driver-root", "components/gpu-operator", "components/selinux", "components/read-only-etc"]))]
#[case::runtime_hook(render_base_with("components/nri"))]
#[case::record_writers(render_base_with("components/record-writers"))]
#[case::all_devices(render_base_with("components/all-devices"))]
#[case::enforcement(render_with("base", &["components/driver-limits", "components/hami-core", "components/measure-memory"]))]
#[case::device_labels(render_base_with("components/device-labels"))]
fn every_field_is_known(#[case] objects: Vec<Value>) {
    for object in objects {
        let found = kinds()
            .into_iter()
            .find(|(version, kind, _)| object["apiVersion"] == *version && object["kind"] == *kind);
        let (_, _, known) =
            found.unwrap_or_else(|| panic!("no type for {} {}", object["apiVersion"], object["kind"]));
        let place = format!("{} {}", object["kind"], object["metadata"]["name"]);
        assert_kept(&object, &known(&object), &place);
    }
}

fn assert_kept(written: &Value, kept: &Value, place: &str) {
    match (written, kept) {
        (Value::Object(written), Value::Object(kept)) => {
            for (key, value) in written {
                let place = format!("{place}.{key}");
                assert_kept(
                    value,
                    kept.get(key)
                        .unwrap_or_else(|| panic!("Kubernetes knows no {place}")),
                    &place,
                );
            }
        }
        (Value::Array(written), Value::Array(kept)) => {
            assert_eq!(written.len(), kept.len(), "{place}");
            written
                .iter()
                .zip(kept)
                .for_each(|(written, kept)| assert_kept(written, kept, place));
        }
        // A quantity may be written as a bare number.
        (Value::Number(number), Value::String(text)) => assert_eq!(number.to_string(), *text, "{place}"),
        _ => assert_eq!(written, kept, "{place}"),
    }
}
