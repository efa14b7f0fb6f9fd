//! `PodDisruptionBudget`s as watches show them: the number of pods of a selection that may still be evicted.
//!
//! Without the right to watch budgets the index has none, and kube-scheduler's own count of violations stands.

use std::collections::BTreeMap;
use std::hash::BuildHasher;

use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::core::{Selector, SelectorExt};
use rustc_hash::{FxBuildHasher, FxHashMap, FxHashSet};

use super::pods::PodEntry;

/// All budgets. A cluster may have as many as applications, so that those of a pod are looked up by its labels.
#[derive(Debug, Default)]
pub(super) struct Budgets {
    /// By [`Budget::hash_of_label`].
    by_label: FxHashMap<u64, Vec<Budget>>,
    /// The keys of `by_label`, by namespace and name.
    labels: FxHashMap<(Box<str>, Box<str>), u64>,
}

/// The fields of a budget by which kube-scheduler counts violations.
#[derive(Debug)]
pub(super) struct Budget {
    namespace: Box<str>,
    pub(super) name: Box<str>,
    /// Key and value of the first label in `matchLabels`, which all pods of the selection have; empty if there is none.
    label: (String, String),
    /// `None` if the budget has no selector that can be read.
    selector: Option<Selector>,
    /// The number of evictions that its status allows.
    pub(super) allowed: i64,
    /// Names of pods whose eviction the API server has counted already.
    disrupted: FxHashSet<Box<str>>,
    /// The serial number of the newest list when a list or a watch event last showed it.
    list: u32,
}

impl Budgets {
    /// Adds a budget, or replaces an earlier state of it.
    pub(super) fn insert(&mut self, budget: Budget) {
        let key = (budget.namespace.clone(), budget.name.clone());
        self.remove(&key);
        let label = Budget::hash_of_label(&budget.namespace, (&budget.label.0, &budget.label.1));
        self.labels.insert(key, label);
        self.by_label.entry(label).or_default().push(budget);
    }

    /// Removes a budget, by its [`namespace_and_name`].
    pub(super) fn remove(&mut self, key: &(Box<str>, Box<str>)) {
        let Some(label) = self.labels.remove(key) else {
            return;
        };
        if let Some(budgets) = self.by_label.get_mut(&label) {
            budgets.retain(|budget| (&budget.namespace, &budget.name) != (&key.0, &key.1));
            if budgets.is_empty() {
                self.by_label.remove(&label);
            }
        }
    }

    /// Forgets the budgets that the list of this number, and watches after it, have not shown.
    pub(super) fn retain_shown(&mut self, list: u32) {
        let mut gone = Vec::new();
        for budget in self.by_label.values().flatten() {
            if budget.list != list {
                gone.push((budget.namespace.clone(), budget.name.clone()));
            }
        }
        for key in &gone {
            self.remove(key);
        }
    }

    /// The budgets that the Eviction API asks about a pod.
    pub(super) fn guarding(&self, pod: &PodEntry) -> Vec<&Budget> {
        let (namespace, labels) = (&*pod.facts.namespace, &pod.preemption.labels);
        let mut guarding = Vec::new();
        let pairs = labels.iter().map(|(key, value)| (key.as_str(), value.as_str()));
        // Budgets whose selectors have no `matchLabels` are kept under an empty label.
        for label in pairs.chain([("", "")]) {
            let same = self.by_label.get(&Budget::hash_of_label(namespace, label));
            for budget in same.into_iter().flatten() {
                let of_budget = (&*budget.label.0, &*budget.label.1);
                // Budgets of another label may have the same hash.
                if *budget.namespace == *namespace && of_budget == label && budget.guards(labels) {
                    guarding.push(budget);
                }
            }
        }
        guarding
    }
}

impl Budget {
    /// Reads a budget that the list of this number, or a watch after it, shows.
    pub(super) fn of(budget: PodDisruptionBudget, list: u32) -> Self {
        let (namespace, name) = namespace_and_name(&budget);
        let selector = budget.spec.unwrap_or_default().selector;
        let labels = selector.clone().unwrap_or_default().match_labels;
        let status = budget.status.unwrap_or_default();
        let disrupted = status.disrupted_pods.unwrap_or_default().into_keys();
        Self {
            namespace,
            name,
            label: labels.unwrap_or_default().pop_first().unwrap_or_default(),
            selector: selector.and_then(|selector| Selector::try_from(selector).ok()),
            // Until the disruption controller has written a status, no eviction is allowed.
            allowed: status.disruptions_allowed.unwrap_or(0).into(),
            disrupted: disrupted.map(Into::into).collect(),
            list,
        }
    }

    /// Returns true if the eviction of a pod of the budget's namespace draws on the budget, by kube-scheduler's rules.
    pub(super) fn counts(&self, name: &str, labels: &BTreeMap<String, String>) -> bool {
        let Some(selector) = &self.selector else {
            return false;
        };
        // kube-scheduler takes the empty selector of a budget for one that selects no pod.
        let selects = !labels.is_empty() && !selector.selects_all() && selector.matches(labels);
        selects && !self.disrupted.contains(name)
    }

    /// The key of budgets of a namespace with this label, under which [`Budgets`] keeps them.
    fn hash_of_label(namespace: &str, label: (&str, &str)) -> u64 {
        FxBuildHasher.hash_one((namespace, label))
    }

    /// Returns true if the Eviction API asks the budget about a pod of its namespace: the empty selector selects all pods there.
    fn guards(&self, labels: &BTreeMap<String, String>) -> bool {
        let selector = self.selector.as_ref();
        selector.is_some_and(|selector| selector.selects_all() || selector.matches(labels))
    }
}

/// Namespace and name of a budget.
pub(super) fn namespace_and_name(budget: &PodDisruptionBudget) -> (Box<str>, Box<str>) {
    let namespace = budget.metadata.namespace.as_deref().unwrap_or_default();
    let name = budget.metadata.name.as_deref().unwrap_or_default();
    (namespace.into(), name.into())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    #[rstest]
    #[case::by_label(json!({"matchLabels": {"app": "a"}}), json!({}), true)]
    #[case::by_another_label(json!({"matchLabels": {"app": "b"}}), json!({}), false)]
    #[case::by_expression(json!({"matchExpressions": [{"key": "tier", "operator": "NotIn", "values": ["x"]}]}), json!({}), true)]
    #[case::by_nothing(json!({}), json!({}), false)]
    #[case::by_nonsense(json!({"matchExpressions": [{"key": "app", "operator": "Near", "values": ["x"]}]}), json!({}), false)]
    #[case::counted_already(json!({"matchLabels": {"app": "a"}}), json!({"p": "2026-01-01T00:00:00Z"}), false)]
    fn which_pods_count(#[case] selector: Value, #[case] disrupted: Value, #[case] expected: bool) {
        let status = json!({"disruptionsAllowed": 1, "disruptedPods": disrupted, "currentHealthy": 1, "desiredHealthy": 1, "expectedPods": 1});
        let budget = json!({"metadata": {"name": "b", "namespace": "d"}, "spec": {"selector": selector}, "status": status});
        let budget = Budget::of(serde_json::from_value(budget).unwrap(), 1);
        assert_eq!(
            budget.counts("p", &[("app".to_owned(), "a".to_owned())].into()),
            expected
        );
        assert!(
            !budget.counts("p", &BTreeMap::new()),
            "a pod without labels is in no budget"
        );
    }
}
