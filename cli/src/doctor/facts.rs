//! The facts of an installation that the checks compare.

use std::collections::BTreeMap;

use proto::read_api::{Diagnosis, Node};
use serde_json::Value;

pub(super) type Objects = Result<Vec<Value>, String>;

#[derive(Clone, Debug)]
pub(crate) struct AskedReplica {
    pub(crate) pod: String,
    /// The replica's findings, or the reason that it did not answer.
    pub(crate) diagnosis: Result<Diagnosis, String>,
}

#[derive(Clone, Debug)]
pub(super) struct InstallationFacts {
    pub(super) namespace: String,
    pub(super) version: Value,
    /// The objects of each kind, by the plural name of the kind.
    pub(super) objects: BTreeMap<&'static str, Objects>,
    pub(super) replicas: Result<Vec<AskedReplica>, String>,
    /// The nodes as the scheduler's library understands the objects.
    pub(super) state: Result<Vec<Node>, String>,
}

impl InstallationFacts {
    /// The objects of a kind, or the reason that they could not be listed.
    pub(super) fn list(&self, kind: &str) -> Result<&[Value], String> {
        let objects = self
            .objects
            .get(kind)
            .ok_or_else(|| format!("{kind} are not listed"))?;
        objects.as_deref().map_err(String::clone)
    }

    /// The ready replicas of the scheduler, or the reason that they are not known.
    pub(super) fn replicas(&self) -> Result<&[AskedReplica], String> {
        self.replicas.as_deref().map_err(String::clone)
    }

    pub(super) fn diagnoses(&self) -> impl Iterator<Item = (&str, &Diagnosis)> {
        let replicas = self.replicas.iter().flatten();
        replicas.filter_map(|replica| Some((replica.pod.as_str(), replica.diagnosis.as_ref().ok()?)))
    }
}
