//! The `CustomResourceDefinition` is generated from the Rust type, never written by hand.

use std::fs;

use kube::CustomResourceExt;
use proto::device::Device;

use super::{deploy, read};

const PATH: &str = "base/crd.yaml";

/// Run with `UPDATE_CRD=1` after a change of `proto::device`.
#[test]
fn the_crd_is_generated_from_the_type() {
    let mut crd = Device::crd();
    // deploy/uninstall.sh distinguishes the definition from Koordinator's by this label.
    crd.metadata.labels = Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into());
    let yaml = serde_yaml_ng::to_string(&crd).unwrap();
    let head = "# Generated from proto::device::Device: UPDATE_CRD=1 cargo test --package testbed --test main deploy::crd\n";
    let generated = format!("{head}{yaml}");
    if std::env::var_os("UPDATE_CRD").is_some() {
        fs::write(deploy().join(PATH), &generated).unwrap();
    }
    assert!(
        read(PATH) == generated,
        "deploy/{PATH} differs from proto::device; its first line has the command that writes it"
    );
}

#[test]
fn the_crd_has_the_names_of_koordinator() {
    let crd = Device::crd();
    assert_eq!(
        crd.metadata.name.as_deref(),
        Some("devices.scheduling.koordinator.sh")
    );
    assert_eq!(crd.spec.scope, "Cluster");
    let version = &crd.spec.versions[0];
    assert_eq!((crd.spec.versions.len(), version.name.as_str()), (1, "v1alpha1"));
    assert!(
        version
            .subresources
            .as_ref()
            .is_some_and(|subresources| subresources.status.is_some())
    );
}
