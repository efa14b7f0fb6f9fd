//! Amounts of resources: requests, allocatable amounts, and the shortages and scores of `NodeResourcesFit`.
//!
//! Amounts are thousandths of every resource's unit, so that `cpu: 100m` is exact; all but those of CPU are rounded up to whole
//! units. Requests count as the spec has them: a resize in place, which shows in the statuses of containers, is not modelled.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use k8s_openapi::api::core::v1::{Container, Node, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const THOUSAND: i128 = 1000;
const CPU: &str = "cpu";
const PODS: &str = "pods";
const MEMORY: &str = "memory";
/// The resources that nodes are scored by, and the request that a container without one counts as (`GetNonzeroRequests`).
const SCORED: [(&str, i128); 2] = [(CPU, 100), (MEMORY, 200 * 1024 * 1024 * THOUSAND)];
/// The best score that a plugin gives (`MaxNodeScore`).
const MAX_NODE_SCORE: i64 = 100;

/// Thousandths by resource name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceAmounts {
    amounts: BTreeMap<String, i128>,
    /// CPU and memory as `LeastAllocated` counts them (`NonZeroRequested`): a container without a request counts too.
    non_zero_requested: [i128; 2],
}

impl ResourceAmounts {
    /// The requests of a pod: the sum of its containers and sidecars, or the largest init container if that is more, or the
    /// pod's own requests in their place, plus its overhead.
    pub fn of_pod(pod: &Pod) -> Result<Self> {
        let mut total = match &pod.spec {
            Some(spec) => of_spec(spec)?,
            None => Self::default(),
        };
        total.amounts.insert(PODS.to_owned(), THOUSAND);
        Ok(total.rounded())
    }

    /// A node's allocatable; amounts that do not parse count as none.
    pub fn allocatable(node: &Node) -> Self {
        let status = node.status.iter();
        let allocatable = status.flat_map(|status| status.allocatable.iter().flatten());
        Self::of_texts(allocatable.map(|(name, quantity)| (name, quantity.0.as_str())))
    }

    /// Amounts by their text; those that do not parse count as none.
    pub(crate) fn of_texts<'a>(texts: impl IntoIterator<Item = (&'a String, &'a str)>) -> Self {
        let mut amounts = Self::default();
        for (name, text) in texts {
            if let Ok(amount) = thousandths(name, text) {
                amounts.amounts.insert(name.clone(), amount);
            }
        }
        amounts.rounded()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (&str, i128)> {
        self.amounts.iter().map(|(name, amount)| (name.as_str(), *amount))
    }

    /// True if there is an amount of this resource, zero included.
    pub(crate) fn has(&self, resource: &str) -> bool {
        self.amounts.contains_key(resource)
    }

    /// Raises the amount of one resource to at least this many whole units.
    pub(crate) fn raise(&mut self, resource: &str, units: usize) {
        let floor = i128::try_from(units).unwrap_or(i128::MAX / THOUSAND) * THOUSAND;
        let amount = self.amounts.entry(resource.to_owned()).or_default();
        *amount = (*amount).max(floor);
    }

    /// The amounts in whole units, rounded up, except CPU (`Resource.SetMaxResource`).
    fn rounded(mut self) -> Self {
        for (name, amount) in &mut self.amounts {
            if name != CPU {
                *amount += (-*amount).rem_euclid(THOUSAND);
            }
        }
        self
    }

    /// Thousandths of one resource.
    pub fn get(&self, resource: &str) -> i128 {
        self.amounts.get(resource).copied().unwrap_or(0)
    }

    pub(crate) fn add(&mut self, other: &Self) {
        self.combine(other, |own, amount| own + amount);
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        self.combine(other, |own, amount| own - amount);
    }

    fn raise_to(&mut self, other: &Self) {
        self.combine(other, i128::max);
    }

    /// Sets each amount that `other` has to the result of `operation` on the own amount and the other one.
    fn combine(&mut self, other: &Self, operation: fn(i128, i128) -> i128) {
        for (name, amount) in &other.amounts {
            match self.amounts.get_mut(name) {
                Some(own) => *own = operation(*own, *amount),
                None => drop(self.amounts.insert(name.clone(), operation(0, *amount))),
            }
        }
        for (own, amount) in self.non_zero_requested.iter_mut().zip(other.non_zero_requested) {
            *own = operation(*own, amount);
        }
    }

    /// A message for each resource of which the node has too little left, and true if even the empty node has too little.
    pub(super) fn shortages(&self, allocatable: &Self, used: &Self) -> (Vec<String>, bool) {
        let (mut reasons, mut is_unresolvable) = (Vec::new(), false);
        for (name, amount) in &self.amounts {
            let total = allocatable.get(name);
            let is_short = *amount > 0 && is_counted(name) && *amount > total - used.get(name);
            if !is_short {
                continue;
            }
            // The number of pods is never called unresolvable.
            is_unresolvable |= *amount > total && name != PODS;
            reasons.push(match name.as_str() {
                PODS => "Too many pods".to_owned(),
                name => format!("Insufficient {name}"),
            });
        }
        (reasons, is_unresolvable)
    }

    /// The score of a node for this pod by both plugins, each with its default weight of 1.
    pub(super) fn score(&self, allocatable: &Self, used: &Self) -> i64 {
        // LeastAllocated: from 0 to 100, the share of the node's CPU and memory that this pod would leave free.
        let least_allocated = self.mean_score(allocatable, used, |total, asked| (total - asked).max(0));
        least_allocated + self.balanced_allocation(allocatable, used)
    }

    /// The score from 0 to 100 (`MostAllocated`): the share of the CPU and memory of several nodes that is used with these pods.
    pub(super) fn most_allocated(&self, allocatable: &Self, used: &Self) -> i64 {
        self.mean_score(allocatable, used, |total, asked| asked.min(total))
    }

    /// The mean score of CPU and memory: `part` returns the amount that scores, from the total and the use with this pod.
    fn mean_score(&self, allocatable: &Self, used: &Self, part: fn(i128, i128) -> i128) -> i64 {
        let (mut sum, mut n_shares) = (0, 0);
        for (((name, _), used), own) in SCORED
            .into_iter()
            .zip(used.non_zero_requested)
            .zip(self.non_zero_requested)
        {
            let total = allocatable.get(name);
            if total > 0 {
                sum += part(total, used + own) * i128::from(MAX_NODE_SCORE) / total;
                n_shares += 1;
            }
        }
        i64::try_from(sum / n_shares.max(1)).unwrap_or(0)
    }

    /// The score from 0 to 100 (`NodeResourcesBalancedAllocation`): since 1.36 the change that the pod makes to the balance of
    /// a node's CPU and memory.
    fn balanced_allocation(&self, allocatable: &Self, used: &Self) -> i64 {
        let own = SCORED.map(|(name, _)| self.get(name));
        // The plugin skips pods that request neither.
        if own == [0; 2] {
            return 0;
        }
        let [total, before] = [allocatable, used].map(|amounts| SCORED.map(|(name, _)| amounts.get(name)));
        let after = [before[0] + own[0], before[1] + own[1]];
        MAX_NODE_SCORE / 2 + (MAX_NODE_SCORE / 2 + balance(total, after) - balance(total, before)) / 2
    }
}

/// The balance of a node from 0 to 100: the closer the used parts of its CPU and memory are, the larger.
#[expect(
    clippy::cast_precision_loss,
    clippy::cast_possible_truncation,
    reason = "amounts of a node are far below 2^52, and scores are at most 100"
)]
fn balance(total: [i128; 2], used: [i128; 2]) -> i64 {
    if total.contains(&0) {
        return MAX_NODE_SCORE;
    }
    let part = |used: i128, total: i128| (used as f64 / total as f64).min(1.0);
    let deviation = (part(used[0], total[0]) - part(used[1], total[1])).abs() / 2.0;
    ((1.0 - deviation) * 100.0).floor() as i64
}

/// Returns true if `NodeResourcesFit` counts a resource (`IsScalarResourceName`, and those with a field of their own).
fn is_counted(resource: &str) -> bool {
    matches!(resource, CPU | MEMORY | "ephemeral-storage" | PODS)
        || resource.contains('/')
        || is_hugepages(resource)
        || resource.starts_with("attachable-volumes-")
}

fn is_hugepages(resource: &str) -> bool {
    resource.starts_with("hugepages-")
}

/// The requests of a pod's spec by the rules of [`ResourceAmounts::of_pod`], before they are rounded.
fn of_spec(spec: &PodSpec) -> Result<ResourceAmounts> {
    let mut running = ResourceAmounts::default();
    let mut sidecars = ResourceAmounts::default();
    let mut init_peak = ResourceAmounts::default();
    for container in spec.init_containers.iter().flatten() {
        let mut amounts = of_container(container)?;
        if container.restart_policy.as_deref() == Some("Always") {
            running.add(&amounts);
            sidecars.add(&amounts);
            // A sidecar keeps running, so it counts beside every init container that starts after it.
            init_peak.raise_to(&sidecars);
        } else {
            amounts.add(&sidecars);
            init_peak.raise_to(&amounts);
        }
    }
    for container in &spec.containers {
        running.add(&of_container(container)?);
    }
    running.raise_to(&init_peak);
    // The pod's own requests (PodLevelResources, on by default from 1.34 on) replace the sums over its containers.
    let pod_level = spec
        .resources
        .iter()
        .filter_map(|pod_level| pod_level.requests.as_ref());
    let pod_level = parse_amounts(pod_level.flatten())?;
    let own = SCORED.into_iter().zip(pod_level.non_zero_requested);
    for (((name, _), own), total) in own.zip(&mut running.non_zero_requested) {
        if pod_level.has(name) {
            *total = own;
        }
    }
    for (name, amount) in pod_level.amounts {
        if matches!(name.as_str(), CPU | MEMORY) || is_hugepages(&name) {
            running.amounts.insert(name, amount);
        }
    }
    running.add(&parse_amounts(spec.overhead.iter().flatten())?);
    Ok(running)
}

/// Requests, and limits where nothing is requested, as the API server fills them in.
fn of_container(container: &Container) -> Result<ResourceAmounts> {
    let resources = container.resources.clone().unwrap_or_default();
    let mut merged = resources.limits.unwrap_or_default();
    merged.extend(resources.requests.unwrap_or_default());
    let mut amounts = parse_amounts(&merged)?;
    for ((name, default), non_zero_requested) in SCORED.into_iter().zip(&mut amounts.non_zero_requested) {
        if !amounts.amounts.contains_key(name) {
            *non_zero_requested = default;
        }
    }
    Ok(amounts)
}

fn parse_amounts<'a>(
    quantities: impl IntoIterator<Item = (&'a String, &'a Quantity)>,
) -> Result<ResourceAmounts> {
    let mut amounts = BTreeMap::new();
    for (name, quantity) in quantities {
        amounts.insert(name.clone(), thousandths(name, &quantity.0)?);
    }
    let non_zero_requested = SCORED.map(|(name, _)| amounts.get(name).copied().unwrap_or(0));
    Ok(ResourceAmounts {
        amounts,
        non_zero_requested,
    })
}

fn thousandths(resource: &str, text: &str) -> Result<i128> {
    let Ok(parsed) = text.parse::<proto::quantity::Quantity>() else {
        let start: String = text.chars().take(64).collect();
        bail!("{resource} is {start:?}, which is not a quantity");
    };
    Ok(parsed.thousandths())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    fn pod(spec: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn container(limits: &serde_json::Value) -> serde_json::Value {
        json!({"name": "c", "resources": {"limits": limits}})
    }

    fn amounts(entries: &[(&str, i128)]) -> ResourceAmounts {
        ResourceAmounts {
            amounts: entries
                .iter()
                .map(|(name, amount)| ((*name).to_owned(), amount * THOUSAND))
                .collect(),
            non_zero_requested: [0; 2],
        }
    }

    /// A sidecar runs beside the init containers after it and beside the app containers.
    #[test]
    fn a_pod_requests_the_peak_of_its_containers() {
        let mut sidecar = container(&json!({"a/b": 3}));
        sidecar["restartPolicy"] = json!("Always");
        let inits = json!([
            container(&json!({"a/b": 9})),
            sidecar,
            container(&json!({"a/b": 8}))
        ]);
        let apps = json!([
            container(&json!({"a/b": 1})),
            container(&json!({"a/b": 2, "x/y": 1}))
        ]);
        let requested = ResourceAmounts::of_pod(&pod(
            &json!({"initContainers": inits, "containers": apps, "overhead": {"cpu": "250m"}}),
        ))
        .unwrap();
        assert_eq!(
            (requested.get("a/b"), requested.get("x/y"), requested.get("cpu")),
            (11_000, 1_000, 250)
        );
    }

    #[test]
    fn requests_of_the_pod_itself_replace_the_sums_of_its_containers() {
        let requests = json!({"cpu": "7", "memory": "100m", "a/b": "9"});
        let requested = ResourceAmounts::of_pod(&pod(&json!({
            "containers": [container(&json!({"cpu": "1", "memory": "1Gi", "a/b": 2}))],
            "resources": {"requests": requests}, "overhead": {"cpu": "250m", "memory": "1"},
        })))
        .unwrap();
        assert_eq!(
            (
                requested.get("cpu"),
                requested.get("memory"),
                requested.get("a/b")
            ),
            (7_250, 2_000, 2_000)
        );
    }

    #[test]
    fn the_error_of_a_malformed_quantity_names_the_resource() {
        let error =
            ResourceAmounts::of_pod(&pod(&json!({"containers": [container(&json!({"a/b": "lots"}))]})))
                .unwrap_err();
        assert_eq!(error.to_string(), r#"a/b is "lots", which is not a quantity"#);
    }

    #[test]
    fn shortages_have_the_messages_of_kube_scheduler() {
        let allocatable = amounts(&[("cpu", 4), ("a/b", 10), ("pods", 1)]);
        let used = amounts(&[("a/b", 8), ("pods", 1)]);
        let short = |request: &[(&str, i128)]| amounts(request).shortages(&allocatable, &used);
        assert_eq!(short(&[("a/b", 2), ("cpu", 4)]), (vec![], false));
        assert_eq!(short(&[("a/b", 3)]), (vec!["Insufficient a/b".to_owned()], false));
        assert_eq!(
            short(&[("a/b", 11)]),
            (vec!["Insufficient a/b".to_owned()], true),
            "no victim can help"
        );
        assert_eq!(short(&[("pods", 1)]), (vec!["Too many pods".to_owned()], false));
        let full = amounts(&[("pods", 1)]).shortages(&ResourceAmounts::default(), &used);
        assert_eq!(
            full,
            (vec!["Too many pods".to_owned()], false),
            "a node that takes no pods"
        );
        assert_eq!(short(&[("storage", 1)]), (vec![], false), "no resource of nodes");
        assert_eq!(
            short(&[("x/y", 0)]),
            (vec![], false),
            "zero of an unknown resource fits"
        );
    }

    /// Cases: used before, requested, and the sum of the two scores of kube-scheduler 1.36, in CPUs and GiB of a node with ten
    /// each.
    #[rstest]
    #[case::empty((0, 0), (1, 1), 90 + 75)]
    #[case::half_full((5, 5), (1, 1), 40 + 75)]
    #[case::towards_balance((4, 0), (0, 4), 59 + 85)]
    #[case::out_of_balance((0, 0), (4, 0), 79 + 65)]
    #[case::asks_for_nothing((0, 0), (0, 0), 98)]
    fn nodes_are_scored_as_by_kube_scheduler(
        #[case] used: (u32, u32),
        #[case] asked: (u32, u32),
        #[case] score: i64,
    ) {
        let allocatable = amounts(&[(CPU, 10), (MEMORY, 10 << 30)]);
        let of = |(cpu, memory): (u32, u32), with_zeros: bool| {
            let mut requests = json!({});
            for (name, amount) in [(CPU, cpu.to_string()), (MEMORY, format!("{memory}Gi"))] {
                if with_zeros || !amount.starts_with('0') {
                    requests[name] = json!(amount);
                }
            }
            let container = json!({"name": "c", "resources": {"requests": requests}});
            ResourceAmounts::of_pod(&pod(&json!({"containers": [container]}))).unwrap()
        };
        assert_eq!(of(asked, false).score(&allocatable, &of(used, true)), score);
    }

    #[test]
    fn pods_without_requests_count_when_nodes_are_scored() {
        let plain = ResourceAmounts::of_pod(&pod(&json!({"containers": [{"name": "c"}]}))).unwrap();
        let allocatable = amounts(&[(CPU, 1), (MEMORY, 1 << 30)]);
        assert!(plain.score(&allocatable, &plain) < plain.score(&allocatable, &ResourceAmounts::default()));
        assert_eq!(plain.score(&ResourceAmounts::default(), &plain), 0);
    }
}
