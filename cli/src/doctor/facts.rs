//! The facts of an installation that the checks compare.

use std::collections::BTreeMap;

use proto::read_api::{Diagnosis, Node};
use serde_json::Value;

/// The objects of one list, or the reason that they could not be listed.
pub(super) type Objects = Result<Vec<Value>, String>;

/// One ready replica of the scheduler.
#[derive(Clone, Debug)]
pub(crate) struct AskedReplica {
    /// The name of its pod.
    pub(crate) pod: String,
    /// The replica's findings, or the reason that it did not answer.
    pub(crate) diagnosis: Result<Diagnosis, String>,
}

/// Everything that the checks need to know of an installation.
#[derive(Clone, Debug)]
pub(super) struct InstallationFacts {
    pub(super) namespace: String,
    /// The answer of the API server to `/version`.
    pub(super) version: Value,
    /// The objects of each kind, by the plural name of the kind.
    pub(super) objects: BTreeMap<&'static str, Objects>,
    /// The ready replicas of the scheduler.
    pub(super) replicas: Result<Vec<AskedReplica>, String>,
    /// The nodes as the scheduler's library understands the objects.
    pub(super) state: Result<Vec<Node>, String>,
}

impl InstallationFacts {
    /// The objects of a kind, or the reason that they could not be listed.
    pub(super) fn list(&self, kind: &str) -> Result<&[Value], String> {
        match self.objects.get(kind) {
            Some(objects) => objects.as_deref().map_err(String::clone),
            None => Err(format!("{kind} are not listed")),
        }
    }

    /// The ready replicas of the scheduler, or the reason that they are not known.
    pub(super) fn replicas(&self) -> Result<&[AskedReplica], String> {
        self.replicas.as_deref().map_err(String::clone)
    }

    /// The answers of the replicas that could be asked.
    pub(super) fn diagnoses(&self) -> impl Iterator<Item = (&str, &Diagnosis)> {
        let replicas = self.replicas.iter().flatten();
        replicas.filter_map(|replica| Some((replica.pod.as_str(), replica.diagnosis.as_ref().ok()?)))
    }
}
