//! The names of pods that a client sees: those of all namespaces, or of the namespaces whose pods the client may list.

use std::collections::BTreeSet;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use parking_lot::Mutex;
use proto::read_api::{Node, PendingPod};
use rustc_hash::FxHasher;

use super::json;

/// Most forms of one node's JSON that are kept: clients that see the same names share one.
const MAX_FORMS: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct Viewer {
    /// The client whose requests `computing_slot` limits: a hash of its token, the name in its certificate, or its address.
    pub(super) caller: Arc<str>,
    pub(super) names: SeenNames,
    /// The header with the client's bearer token, for later reviews; `None` if it needs none, or has shown a certificate.
    pub(super) credentials: Option<HeaderMap>,
}

#[derive(Clone, Debug)]
pub(super) enum SeenNames {
    /// The names in all namespaces.
    All,
    /// The names in these namespaces.
    OfNamespaces(Arc<BTreeSet<Arc<str>>>),
}

impl SeenNames {
    pub(super) fn are_all(&self) -> bool {
        matches!(self, Self::All)
    }

    pub(super) fn include(&self, namespace: &str) -> bool {
        match self {
            Self::All => true,
            Self::OfNamespaces(namespaces) => namespaces.contains(namespace),
        }
    }

    /// The end of the `ETag`: a cache between must keep answers to clients that see other names apart.
    pub(super) fn tag(&self) -> String {
        let Self::OfNamespaces(namespaces) = self else {
            return String::new();
        };
        let mut hasher = FxHasher::default();
        // A sorted set, so that equal rights have equal hashes.
        namespaces.hash(&mut hasher);
        format!("-{:x}", hasher.finish())
    }

    pub(super) fn pending(&self, pods: &[PendingPod]) -> Vec<PendingPod> {
        let seen = pods.iter().filter(|pod| self.include(&pod.namespace));
        seen.cloned().collect()
    }
}

/// The forms of one node's JSON in which some names of pods are hidden, each with the namespaces whose names it shows.
#[derive(Debug, Default)]
pub(super) struct HiddenForms(Mutex<Vec<(Vec<Arc<str>>, Bytes)>>);

impl HiddenForms {
    /// The JSON of a node for a client that sees these names, from `whole`, which has all; its pods are in `namespaces`.
    pub(super) fn get(&self, names: &SeenNames, namespaces: &[Arc<str>], whole: &Bytes) -> Bytes {
        if names.are_all() {
            return whole.clone();
        }
        let mut seen = namespaces.to_vec();
        seen.retain(|namespace| names.include(namespace));
        if seen.len() == namespaces.len() {
            return whole.clone();
        }
        // Hiding parses and writes the node again, so that each form is made once for all clients that need it.
        let mut forms = self.0.lock();
        if let Some((_, form)) = forms.iter().find(|(namespaces, _)| *namespaces == seen) {
            return form.clone();
        }
        let mut node: Node = serde_json::from_slice(whole).unwrap_or_default();
        node.hide_names(|namespace| names.include(namespace));
        let form = Bytes::from(json(&node));
        // The oldest form is dropped; for a client that still needs it, it is made again.
        if forms.len() >= MAX_FORMS {
            forms.remove(0);
        }
        forms.push((seen, form.clone()));
        form
    }
}
