//! Amounts of resources: requests, allocatable amounts, and the shortages and scores of `NodeResourcesFit`.
//!
//! Amounts are thousandths of every resource's unit, so that `cpu: 100m` is exact. All other resources count in whole units, rounded
//! up. Requests count as the spec has them: a resize in place, which shows in the statuses of containers, is not modelled.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{Container, Node, Pod, PodSpec};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;

const THOUSAND: i128 = 1000;
const CPU: &str = "cpu";
const PODS: &str = "pods";
/// The amounts that a pod without requests counts as when nodes are scored (`GetNonzeroRequests`).
const DEFAULT_SCORED: [(&str, i128); 2] = [("cpu", 100), ("memory", 200 * 1024 * 1024 * THOUSAND)];

/// Thousandths by resource name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResourceAmounts(BTreeMap<String, i128>);

/// The error of a quantity that does not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{resource} is {value:?}, which is not a quantity")]
pub struct AmountError {
    resource: String,
    value: String,
}

impl ResourceAmounts {
    /// The requests of a pod: the sum of its containers and sidecars, or the largest init container if that is more, or the
    /// pod's own requests in their place, plus its overhead.
    pub fn of_pod(pod: &Pod) -> Result<Self, AmountError> {
        let mut total = match &pod.spec {
            Some(spec) => of_spec(spec)?,
            None => Self::default(),
        };
        total.0.insert(PODS.to_owned(), THOUSAND);
        Ok(total.rounded())
    }

    /// Thousandths of every resource but CPU and memory.
    pub fn besides_cpu_and_memory(&self) -> impl Iterator<Item = (&str, i128)> {
        let all = self.0.iter().map(|(name, amount)| (name.as_str(), *amount));
        all.filter(|(name, _)| !matches!(*name, "cpu" | "memory"))
    }

    /// A node's allocatable; amounts that do not parse count as none.
    pub fn allocatable(node: &Node) -> Self {
        let mut amounts = Self::default();
        for (name, quantity) in node
            .status
            .iter()
            .flat_map(|status| status.allocatable.iter().flatten())
        {
            if let Ok(amount) = thousandths(name, quantity) {
                amounts.0.insert(name.clone(), amount);
            }
        }
        amounts.rounded()
    }

    /// The amounts in whole units, rounded up, except CPU (`Resource.SetMaxResource`).
    fn rounded(mut self) -> Self {
        for (name, amount) in &mut self.0 {
            if name != CPU {
                *amount += (-*amount).rem_euclid(THOUSAND);
            }
        }
        self
    }

    /// Thousandths of one resource.
    pub fn get(&self, resource: &str) -> i128 {
        self.0.get(resource).copied().unwrap_or(0)
    }

    pub(super) fn add(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            *self.0.entry(name.clone()).or_default() += amount;
        }
    }

    pub(super) fn subtract(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            *self.0.entry(name.clone()).or_default() -= amount;
        }
    }

    /// Raises each amount to that of `other` if that is larger.
    fn raise_to(&mut self, other: &Self) {
        for (name, amount) in &other.0 {
            let entry = self.0.entry(name.clone()).or_default();
            *entry = (*entry).max(*amount);
        }
    }

    /// Returns kube-scheduler's message for each resource of which the node has too little left, and true if
    /// even the empty node has too little.
    pub(super) fn shortages(
        &self,
        allocatable: &Self,
        used: &Self,
        ignored: &BTreeSet<String>,
    ) -> (Vec<String>, bool) {
        let (mut reasons, mut hopeless) = (Vec::new(), false);
        for (name, amount) in &self.0 {
            let total = allocatable.get(name);
            let is_counted = *amount > 0 && is_counted(name) && !ignored.contains(name);
            if !is_counted || *amount <= total - used.get(name) {
                continue;
            }
            // The number of pods is never called unresolvable.
            hopeless |= *amount > total && name != PODS;
            reasons.push(match name.as_str() {
                PODS => "Too many pods".to_owned(),
                name => format!("Insufficient {name}"),
            });
        }
        (reasons, hopeless)
    }

    /// The score from 0 to 100 (`LeastAllocated`): the share of a node's CPU and memory that this pod would
    /// leave free.
    pub(super) fn score(&self, allocatable: &Self, used: &Self) -> i64 {
        let pods = used.get(PODS) / THOUSAND + 1;
        let (mut sum, mut n_shares) = (0, 0);
        for (name, default) in DEFAULT_SCORED {
            let total = allocatable.get(name);
            if total > 0 {
                let taken = (used.get(name) + self.get(name)).max(default * pods).min(total);
                sum += (total - taken) * 100 / total;
                n_shares += 1;
            }
        }
        i64::try_from(sum / n_shares.max(1)).unwrap_or(0)
    }
}

/// Returns true if `NodeResourcesFit` counts a resource (`IsScalarResourceName`, and those with a field of their own).
fn is_counted(resource: &str) -> bool {
    matches!(resource, CPU | "memory" | "ephemeral-storage" | PODS)
        || resource.contains('/')
        || is_hugepages(resource)
        || resource.starts_with("attachable-volumes-")
}

fn is_hugepages(resource: &str) -> bool {
    resource.starts_with("hugepages-")
}

/// The amounts that the scheduler counts for a pod: the sum of its containers or the peak of its init containers, with
/// overhead.
fn of_spec(spec: &PodSpec) -> Result<ResourceAmounts, AmountError> {
    let (mut running, mut sidecars, mut init_peak) = (
        ResourceAmounts::default(),
        ResourceAmounts::default(),
        ResourceAmounts::default(),
    );
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
    // The feature PodLevelResources, on by default from 1.34 on.
    let own = spec
        .resources
        .iter()
        .flat_map(|own| own.requests.iter().flatten());
    for (name, amount) in read(own)?.0 {
        if matches!(name.as_str(), CPU | "memory") || is_hugepages(&name) {
            running.0.insert(name, amount);
        }
    }
    running.add(&read(spec.overhead.iter().flatten())?);
    Ok(running)
}

/// Requests, and limits where nothing is requested, as the API server fills them in.
fn of_container(container: &Container) -> Result<ResourceAmounts, AmountError> {
    let Some(resources) = &container.resources else {
        return Ok(ResourceAmounts::default());
    };
    let mut amounts = read(resources.limits.iter().flatten())?;
    amounts.0.extend(read(resources.requests.iter().flatten())?.0);
    Ok(amounts)
}

/// Parses amounts of resources into thousandths.
fn read<'a>(
    quantities: impl Iterator<Item = (&'a String, &'a Quantity)>,
) -> Result<ResourceAmounts, AmountError> {
    let parsed = quantities.map(|(name, quantity)| Ok((name.clone(), thousandths(name, quantity)?)));
    Ok(ResourceAmounts(parsed.collect::<Result<_, _>>()?))
}

/// Parses one amount into thousandths.
fn thousandths(resource: &str, quantity: &Quantity) -> Result<i128, AmountError> {
    let fail = |_| AmountError {
        resource: resource.to_owned(),
        value: quantity.0.chars().take(64).collect(),
    };
    let parsed: proto::quantity::Quantity = quantity.0.parse().map_err(fail)?;
    Ok(parsed.thousandths())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(spec: &serde_json::Value) -> Pod {
        serde_json::from_value(json!({"metadata": {"name": "p"}, "spec": spec})).unwrap()
    }

    fn container(limits: &serde_json::Value) -> serde_json::Value {
        json!({"name": "c", "resources": {"limits": limits}})
    }

    fn amounts(entries: &[(&str, i128)]) -> ResourceAmounts {
        ResourceAmounts(
            entries
                .iter()
                .map(|(name, amount)| ((*name).to_owned(), amount * THOUSAND))
                .collect(),
        )
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
        let none = BTreeSet::new();
        let short = |request: &[(&str, i128)]| amounts(request).shortages(&allocatable, &used, &none);
        assert_eq!(short(&[("a/b", 2), ("cpu", 4)]), (vec![], false));
        assert_eq!(short(&[("a/b", 3)]), (vec!["Insufficient a/b".to_owned()], false));
        assert_eq!(
            short(&[("a/b", 11)]),
            (vec!["Insufficient a/b".to_owned()], true),
            "no victim can help"
        );
        assert_eq!(short(&[("pods", 1)]), (vec!["Too many pods".to_owned()], false));
        let full = amounts(&[("pods", 1)]).shortages(&ResourceAmounts::default(), &used, &none);
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
        let ignored = BTreeSet::from(["a/b".to_owned()]);
        assert_eq!(
            amounts(&[("a/b", 99)]).shortages(&allocatable, &used, &ignored),
            (vec![], false)
        );
    }

    #[test]
    fn the_emptier_node_scores_higher() {
        let allocatable = amounts(&[("cpu", 10), ("memory", 1 << 40)]);
        let request = amounts(&[("cpu", 1)]);
        let score = |used: &[(&str, i128)]| request.score(&allocatable, &amounts(used));
        assert!(score(&[]) > score(&[("cpu", 5)]));
        assert!(
            score(&[]) > score(&[("pods", 50)]),
            "pods without requests count as something"
        );
        assert_eq!(
            request.score(&ResourceAmounts::default(), &ResourceAmounts::default()),
            0
        );
    }
}
