//! The wire form of the extender's `preempt` verb: the victims that kube-scheduler proposes, and those that it is to take.
//!
//! Go writes the fields by their own names, and a map that is not there as `null`. kube-scheduler sends UIDs to an extender
//! that is `nodeCacheCapable` and whole pods to any other; it reads UIDs from both.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::pod::{Pod, null_as_default};

/// The request of `preempt`.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderPreemptionArgs {
    /// The pod that finds no node.
    pub pod: Pod,
    /// The proposed victims of each node, as whole pods.
    #[serde(default)]
    pub node_name_to_victims: Option<BTreeMap<String, Victims>>,
    /// The proposed victims of each node, by UID.
    #[serde(default)]
    pub node_name_to_meta_victims: Option<BTreeMap<String, MetaVictims>>,
}

/// Victims on one node, as whole pods.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct Victims {
    /// The pods, by falling priority.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pods: Vec<Pod>,
    /// The number of these pods whose eviction violates a `PodDisruptionBudget`.
    #[serde(default, rename = "NumPDBViolations")]
    pub n_pdb_violations: i64,
}

/// Victims on one node, by UID.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct MetaVictims {
    /// The pods, by falling priority.
    #[serde(default, deserialize_with = "null_as_default")]
    pub pods: Vec<MetaPod>,
    /// The number of these pods whose eviction violates a `PodDisruptionBudget`.
    #[serde(default, rename = "NumPDBViolations")]
    pub n_pdb_violations: i64,
}

/// One victim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MetaPod {
    /// Its UID.
    #[serde(rename = "UID")]
    pub uid: String,
}

/// The answer of `preempt`. A node that is left out is no candidate; one that is kept has at least one victim.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
pub struct ExtenderPreemptionResult {
    /// The victims of each node that stays a candidate.
    pub node_name_to_meta_victims: BTreeMap<String, MetaVictims>,
}

impl ExtenderPreemptionArgs {
    /// The proposed victims of each node by UID, in whichever form they came.
    pub fn into_proposals(self) -> (Pod, BTreeMap<String, MetaVictims>) {
        let proposals = match (self.node_name_to_meta_victims, self.node_name_to_victims) {
            (Some(by_uid), _) => by_uid,
            (None, whole) => whole
                .into_iter()
                .flatten()
                .map(|(node, victims)| (node, victims.into()))
                .collect(),
        };
        (self.pod, proposals)
    }
}

impl MetaVictims {
    /// Returns true if both name the same pods, in whichever order.
    pub fn are_same_pods(&self, other: &Self) -> bool {
        self.pods.len() == other.pods.len() && self.pods.iter().all(|pod| other.pods.contains(pod))
    }
}

impl From<Victims> for MetaVictims {
    fn from(victims: Victims) -> Self {
        let pods = victims.pods.into_iter().map(|pod| MetaPod {
            uid: pod.metadata.uid.unwrap_or_default(),
        });
        Self {
            pods: pods.collect(),
            n_pdb_violations: victims.n_pdb_violations,
        }
    }
}

/// The demands of a pod on the other pods of its node, as far as evicting some of them may meet them: host ports, volumes
/// that one pod or one node may use at a time, and required rules about pods near by.
#[derive(Debug, Default, Deserialize)]
struct Neighbours {
    #[serde(default, deserialize_with = "null_as_default")]
    containers: Vec<Ports>,
    #[serde(default, rename = "initContainers", deserialize_with = "null_as_default")]
    init_containers: Vec<Ports>,
    #[serde(default, deserialize_with = "null_as_default")]
    volumes: Vec<serde_json::Map<String, serde_json::Value>>,
}

#[derive(Debug, Default, Deserialize)]
struct Ports {
    #[serde(default, deserialize_with = "null_as_default")]
    ports: Vec<Port>,
}

#[derive(Debug, Default, Deserialize)]
struct Port {
    #[serde(default, rename = "hostPort")]
    host_port: Option<i32>,
}

/// Volumes that belong to one pod alone, so that no other pod stands in their way.
const OWN_VOLUMES: [&str; 6] = [
    "name",
    "configMap",
    "downwardAPI",
    "emptyDir",
    "projected",
    "secret",
];

/// Returns true if the pod may find no node for another reason than amounts of resources, so that it may need the eviction
/// of every victim that kube-scheduler proposes.
///
/// # Errors
/// The request cannot be read.
pub fn minds_neighbours(request: &[u8], pod: &Pod) -> Result<bool, serde_json::Error> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Request {
        pod: Spec,
    }
    #[derive(Deserialize)]
    struct Spec {
        #[serde(default)]
        spec: Neighbours,
    }
    let Request { pod: Spec { spec } } = serde_json::from_slice(request)?;
    let mut ports = spec
        .containers
        .iter()
        .chain(&spec.init_containers)
        .flat_map(|container| &container.ports);
    let shares_volumes = spec
        .volumes
        .iter()
        .any(|volume| volume.keys().any(|key| !OWN_VOLUMES.contains(&key.as_str())));
    Ok(ports.any(|port| port.host_port.is_some_and(|port| port > 0))
        || shares_volumes
        || pod.spec.demands_neighbours())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::{Value, json};

    use super::*;

    /// As kube-scheduler 1.36 writes it to an extender that is `nodeCacheCapable`.
    #[test]
    fn victims_by_uid_and_whole_come_to_the_same() {
        let by_uid = json!({
            "Pod": {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": null}, "status": {}},
            "NodeNameToVictims": null,
            "NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}, {"UID": "b"}], "NumPDBViolations": 1}, "n2": {"Pods": null, "NumPDBViolations": 0}},
        });
        let pod = |uid: &str| json!({"metadata": {"name": uid, "uid": uid}, "spec": {"containers": []}, "status": {}});
        let whole = json!({
            "Pod": {"metadata": {"name": "p", "uid": "u"}, "spec": {"containers": null}, "status": {}},
            "NodeNameToVictims": {"n1": {"Pods": [pod("a"), pod("b")], "NumPDBViolations": 1}, "n2": {"Pods": null, "NumPDBViolations": 0}},
            "NodeNameToMetaVictims": null,
        });
        let read = |args: Value| {
            serde_json::from_value::<ExtenderPreemptionArgs>(args)
                .unwrap()
                .into_proposals()
                .1
        };
        assert_eq!(read(by_uid.clone()), read(whole));
        let victims = read(by_uid);
        assert_eq!(
            victims["n1"]
                .pods
                .iter()
                .map(|pod| pod.uid.as_str())
                .collect::<Vec<_>>(),
            ["a", "b"]
        );
        assert_eq!((victims["n1"].n_pdb_violations, victims["n2"].pods.len()), (1, 0));
    }

    #[test]
    fn an_answer_has_the_names_that_go_reads() {
        let victims = MetaVictims {
            pods: vec![MetaPod { uid: "a".to_owned() }],
            n_pdb_violations: 2,
        };
        let result = ExtenderPreemptionResult {
            node_name_to_meta_victims: [("n1".to_owned(), victims)].into(),
        };
        let expected =
            json!({"NodeNameToMetaVictims": {"n1": {"Pods": [{"UID": "a"}], "NumPDBViolations": 2}}});
        assert_eq!(serde_json::to_value(result).unwrap(), expected);
    }

    #[rstest]
    #[case::nothing(json!({"containers": [{"name": "c"}]}), false)]
    #[case::a_port_of_its_own(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80}]}]}), false)]
    #[case::a_port_of_the_node(json!({"containers": [{"name": "c", "ports": [{"containerPort": 80, "hostPort": 80}]}]}), true)]
    #[case::volumes_of_its_own(json!({"volumes": [{"name": "v", "emptyDir": {}}, {"name": "token", "projected": {"sources": []}}]}), false)]
    #[case::a_claim(json!({"volumes": [{"name": "v", "persistentVolumeClaim": {"claimName": "c"}}]}), true)]
    #[case::away_from_pods(json!({"affinity": {"podAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}), true)]
    #[case::near_pods(json!({"affinity": {"podAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [{}]}}}), true)]
    #[case::on_nodes(json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": []}}}}), false)]
    #[case::spread(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "DoNotSchedule"}]}), true)]
    #[case::spread_unless(json!({"topologySpreadConstraints": [{"whenUnsatisfiable": "ScheduleAnyway"}]}), false)]
    fn demands_of_neighbours(#[case] spec: Value, #[case] expected: bool) {
        let pod = json!({"metadata": {"name": "p"}, "spec": spec});
        let request = json!({"Pod": pod, "NodeNameToMetaVictims": {}}).to_string();
        let pod: Pod = serde_json::from_value(pod).unwrap();
        assert_eq!(minds_neighbours(request.as_bytes(), &pod).unwrap(), expected);
    }
}
