//! Every kind of node with every value of `--inject`: the devices of a pod with a GPU, and of a container that asks for
//! none while its image asks for all. `docs/nvidia.md` has the table.
//!
//! One cluster holds a node for each cell. The images are those of CUDA, which set `NVIDIA_VISIBLE_DEVICES=all`.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use kit::cluster::{ClusterSpec, LocalCluster, NodeKind, NodeSetup, RUNTIME_CLASS, RuntimeSpec};
use kit::invariants;
use kit::kubelet::{ContainerStart, RunState, RuntimeContainer, StartHook};
use kit::observer::ClusterSnapshot;
use kit::pod_fields::{is_running, unscheduled_because};
use kit::pods::{NamespacePods, PodBuilder};
use proto::device::{CONDITION_INJECTABLE, CONDITION_ISOLATED, DeviceCondition};
use proto::record::GPU_DEVICES;
use proto::resource::GPU_MEM;

const DEADLINE: Duration = Duration::from_secs(120);
const IMAGE: &str = "nvidia/cuda:12.4.1-base-ubuntu22.04";
/// A container that asks for nothing.
const SIDECAR: &str = "sidecar";
const MODES: [&str; 3] = ["auto", "cdi", "envvar"];

/// The outcome of a pod with a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Outcome {
    /// It sees the GPU of its record, with the driver, and is given it in this way.
    Works(&'static str),
    /// The node offers nothing, with this reason of the condition `Injectable`.
    Refused(&'static str),
    /// The first container starts without a GPU, by which the node finds out, and offers nothing from then on.
    FirstWithout(&'static str),
    /// It starts without a GPU: the plugin has not seen the chosen mode work, as the condition says with this reason.
    Without(&'static str),
    /// The container runtime makes no container, in these words.
    NotMade(&'static str),
}

use Outcome::{FirstWithout, NotMade, Refused, Without, Works};

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Works(way) => write!(f, "works, by {way}"),
            Refused(reason) => write!(f, "refused: `Injectable=False {reason}`"),
            FirstWithout(reason) => write!(
                f,
                "first container without a GPU, then refused: `Injectable=False {reason}`"
            ),
            Without(reason) => write!(f, "without a GPU: `Injectable=Unknown {reason}`"),
            NotMade(words) => write!(f, "container not made: `{words}`"),
        }
    }
}

/// The GPUs that a container sees which asks for none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Uncounted {
    None,
    /// All of them, which the condition `Isolated` says.
    All,
    /// All of them in pods with the `RuntimeClass`, which the condition `Isolated` says.
    AllOfClass,
}

impl fmt::Display for Uncounted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "none",
            Self::All => "all: `Isolated=False ImageVariable`",
            Self::AllOfClass => "none; with the RuntimeClass all: `Isolated=False ImageVariable`",
        })
    }
}

/// A row of the table.
struct Row {
    kind: NodeKind,
    /// By the value of `--inject`.
    outcomes: [Outcome; 3],
    /// In a pod with the `RuntimeClass`, where there is one, by the value of `--inject`.
    with_class: Option<[Outcome; 3]>,
    /// Without and with the runtime hook.
    uncounted: Uncounted,
}

const UNRESOLVABLE: &str = "unresolvable CDI devices management.nvidia.com/gpu=GPU-";
const NOT_ENABLED: &str = "CDI devices are requested, and CDI is not enabled";

fn rows() -> Vec<Row> {
    let row = |kind, outcomes, uncounted| Row {
        kind,
        outcomes,
        with_class: None,
        uncounted,
    };
    let cdi = || Works("CDI");
    let variable = || Works("the variable");
    vec![
        row(
            NodeKind::Variable,
            [variable(), Refused("NoDriverSpec"), variable()],
            Uncounted::All,
        ),
        row(
            NodeKind::VariableWithSpec,
            [cdi(), cdi(), variable()],
            Uncounted::All,
        ),
        row(NodeKind::JitCdi, [cdi(), cdi(), variable()], Uncounted::All),
        Row {
            with_class: Some([cdi(), cdi(), variable()]),
            ..row(
                NodeKind::RuntimeClass,
                [cdi(), cdi(), Without("VariableAssumed")],
                Uncounted::AllOfClass,
            )
        },
        Row {
            with_class: Some([cdi(), cdi(), NotMade(UNRESOLVABLE)]),
            ..row(
                NodeKind::Operator,
                [cdi(), cdi(), Without("VariableAssumed")],
                Uncounted::AllOfClass,
            )
        },
        row(
            NodeKind::OperatorDefaultRuntime,
            [cdi(), cdi(), NotMade(UNRESOLVABLE)],
            Uncounted::All,
        ),
        row(
            NodeKind::Hardened,
            [cdi(), cdi(), Without("VariableAssumed")],
            Uncounted::None,
        ),
        row(
            NodeKind::PlainCdi,
            [cdi(), cdi(), Without("VariableAssumed")],
            Uncounted::None,
        ),
        row(
            NodeKind::CdiDroppedVariable,
            [variable(), FirstWithout("CdiOff"), variable()],
            Uncounted::All,
        ),
        row(
            NodeKind::CdiDropped,
            [
                FirstWithout("CdiOff"),
                FirstWithout("CdiOff"),
                Without("VariableAssumed"),
            ],
            Uncounted::None,
        ),
        row(
            NodeKind::CdiRefused,
            [
                NotMade(NOT_ENABLED),
                NotMade(NOT_ENABLED),
                Without("VariableAssumed"),
            ],
            Uncounted::None,
        ),
        row(
            NodeKind::NoDriverSpec,
            [
                Refused("NoDriverSpec"),
                Refused("NoDriverSpec"),
                Without("VariableAssumed"),
            ],
            Uncounted::None,
        ),
    ]
}

/// The table as `docs/nvidia.md` has it.
fn table() -> String {
    let mut lines = vec![
        "| node | `--inject=auto` | `--inject=cdi` | `--inject=envvar` | GPUs of a container that asks for none | with the runtime hook |"
            .to_owned(),
        "|---|---|---|---|---|---|".to_owned(),
    ];
    for Row {
        kind,
        outcomes,
        with_class,
        uncounted,
    } in rows()
    {
        let cells = |outcomes: &[Outcome]| {
            outcomes
                .iter()
                .map(ToString::to_string)
                .collect::<Vec<_>>()
                .join(" | ")
        };
        lines.push(format!(
            "| `{}` | {} | {uncounted} | none |",
            kind.name(),
            cells(&outcomes)
        ));
        if let Some(outcomes) = with_class {
            lines.push(format!(
                "| `{}`, pod with `runtimeClassName: nvidia` | {} | see above | none |",
                kind.name(),
                cells(&outcomes)
            ));
        }
    }
    lines.join("\n")
}

/// Every start of a container, by node.
#[derive(Clone, Debug, Default)]
struct Starts(Arc<Mutex<Vec<(String, RuntimeContainer)>>>);

impl Starts {
    fn hook(&self, node: &str) -> StartHook {
        let (starts, node) = (self.clone(), node.to_owned());
        StartHook::new(move |start: &ContainerStart| {
            starts
                .0
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
                .push((node.clone(), start.container.clone()));
        })
    }

    fn all(&self) -> Vec<(String, RuntimeContainer)> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

fn node_name(kind: NodeKind, inject: &str) -> String {
    format!("{}-{inject}", kind.name())
}

fn nodes(starts: &Starts) -> Vec<NodeSetup> {
    let node = |kind: NodeKind, inject: &'static str, suffix: &str, runtime: RuntimeSpec| {
        let name = node_name(kind, suffix);
        NodeSetup {
            inject,
            runtime,
            started: starts.hook(&name),
            ..NodeSetup::of_kind(kind, &name, &[16384, 16384])
        }
    };
    let mut nodes = Vec::new();
    for kind in NodeKind::ALL {
        nodes.extend(MODES.map(|inject| node(kind, inject, inject, RuntimeSpec::Plain)));
        nodes.push(node(kind, "auto", "hook", RuntimeSpec::Plugins));
    }
    nodes
}

/// A pod whose first container asks for a GPU if `units` are more than none, and whose sidecar asks for nothing.
fn pod(name: &str, node: &str, units: u64, class: Option<&str>) -> Result<Pod> {
    let spec = if units > 0 {
        PodBuilder::units(name, units)
    } else {
        PodBuilder::new(name, &[])
    };
    let mut pod = spec.on(node).container(SIDECAR, &[]).pod()?;
    let spec = pod.spec.as_mut().context("no spec")?;
    spec.runtime_class_name = class.map(str::to_owned);
    spec.containers
        .iter_mut()
        .for_each(|container| container.image = Some(IMAGE.to_owned()));
    Ok(pod)
}

struct Scene {
    cluster: LocalCluster,
    pods: NamespacePods,
    starts: Starts,
}

impl Scene {
    async fn create(&self, name: &str, node: &str, units: u64, class: Option<&str>) -> Result<()> {
        self.pods
            .api()
            .create(&kube::api::PostParams::default(), &pod(name, node, units, class)?)
            .await?;
        Ok(())
    }

    fn container(&self, node: &str, pod: &str, container: &str) -> Option<RuntimeContainer> {
        let node = self.cluster.nodes().find(|known| known.name() == node)?;
        node.kubelet().container("default", pod, container)
    }

    /// Returns the outcome of a pod with a GPU by now, in the words of an [`Outcome`].
    fn observed(
        &self,
        snapshot: &ClusterSnapshot,
        node: &str,
        name: &str,
        second: Option<&str>,
    ) -> Result<String, String> {
        let pod = snapshot.pod(name).ok_or_else(|| format!("{name} is not there"))?;
        let injectable = condition(snapshot, node, CONDITION_INJECTABLE)
            .ok_or_else(|| format!("{node} has no condition"))?;
        if let Some(words) = unscheduled_because(pod) {
            return match injectable.status.as_str() {
                "False" if words.contains(&format!("1 Insufficient {GPU_MEM}")) => {
                    Ok(format!("refused: `Injectable=False {}`", injectable.reason))
                }
                _ => Err(format!("{name} is unscheduled: {words}")),
            };
        }
        let main = self
            .container(node, name, "main")
            .ok_or_else(|| format!("{name} has not been tried"))?;
        match &main.state {
            RunState::Waiting { reason, message }
                if reason == "CreateContainerError" || reason == "RunContainerError" =>
            {
                let words = [UNRESOLVABLE, NOT_ENABLED]
                    .into_iter()
                    .find(|words| message.contains(words));
                return words
                    .map(|words| format!("container not made: `{words}`"))
                    .ok_or_else(|| format!("{name}: {reason}: {message}"));
            }
            RunState::Running { .. } if is_running(pod) => {}
            other => return Err(format!("{name}: {other:?}")),
        }
        let device = snapshot.devices.get(node);
        if !main.gpus.is_empty() {
            let recorded = invariants::should_see(pod, device, "main");
            let is_right = main.gpus == recorded
                && main
                    .env
                    .get(GPU_DEVICES)
                    .is_some_and(|named| invariants::devices_of(named) == recorded);
            let has_driver = main.mounts.iter().any(|path| path.contains("/libcuda.so"))
                && main.device_nodes.iter().any(|path| path == "/dev/nvidiactl");
            let way = if main.cdi_devices.is_empty() {
                "the variable"
            } else {
                "CDI"
            };
            return if is_right && has_driver && injectable.status != "False" {
                Ok(format!("works, by {way}"))
            } else {
                Err(format!(
                    "{name} sees {:?} of {recorded:?}, driver {has_driver}, {injectable:?}",
                    main.gpus
                ))
            };
        }
        match second.map(|second| self.observed(snapshot, node, second, None)) {
            Some(Ok(refused)) if refused.starts_with("refused") => {
                Ok(format!("first container without a GPU, then {refused}"))
            }
            _ if injectable.status == "Unknown" => Ok(format!(
                "without a GPU: `Injectable=Unknown {}`",
                injectable.reason
            )),
            _ => Err(format!("{name} has no GPU, {injectable:?}")),
        }
    }
}

fn condition(snapshot: &ClusterSnapshot, node: &str, condition_type: &str) -> Option<DeviceCondition> {
    let devices = &snapshot.devices.get(node)?.spec.devices;
    devices
        .first()?
        .conditions
        .iter()
        .find(|condition| condition.condition_type == condition_type)
        .cloned()
}

/// A pod, its node, the `RuntimeClass` it has, and what is to come of it.
struct Case {
    pod: String,
    node: String,
    class: Option<&'static str>,
    expected: Outcome,
}

impl Case {
    /// The pod that comes when the first has shown that the node gives no GPU.
    fn second(&self) -> Option<String> {
        matches!(self.expected, FirstWithout(_)).then(|| format!("{}-second", self.pod))
    }
}

fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for Row {
        kind,
        outcomes,
        with_class,
        ..
    } in rows()
    {
        let of = |class: Option<&'static str>, outcomes: [Outcome; 3]| {
            let case = move |(inject, expected): (&str, Outcome)| {
                let node = node_name(kind, inject);
                Case {
                    pod: format!("gpu-{node}{}", class.map_or("", |_| "-class")),
                    node,
                    class,
                    expected,
                }
            };
            MODES.into_iter().zip(outcomes).map(case).collect::<Vec<_>>()
        };
        cases.extend(of(None, outcomes));
        cases.extend(
            with_class
                .into_iter()
                .flat_map(|outcomes| of(Some(RUNTIME_CLASS), outcomes)),
        );
    }
    cases
}

/// Waits until each node's condition says what it is to say before a pod comes.
async fn until_decided(cluster: &LocalCluster, cases: &[Case]) -> Result<()> {
    let decided = |snapshot: &ClusterSnapshot| {
        let open: Vec<String> = cases
            .iter()
            .filter_map(|case| {
                let Some(found) = condition(snapshot, &case.node, CONDITION_INJECTABLE) else {
                    return Some(format!("{} says nothing", case.node));
                };
                let is_so = match &case.expected {
                    // A pod with the class finds the mode of the node.
                    _ if case.class.is_some() => true,
                    Works("CDI") => found.reason == "Cdi",
                    Works(_) => found.reason == "Variable",
                    Refused(reason) => found.reason == *reason,
                    NotMade(_) | Without(_) | FirstWithout(_) => found.status == "Unknown",
                };
                (!is_so).then(|| format!("{} says {} {}", case.node, found.status, found.reason))
            })
            .collect();
        if open.is_empty() {
            Ok(())
        } else {
            Err(open.join("; "))
        }
    };
    cluster
        .until("every node to say how containers get GPUs", DEADLINE, decided)
        .await
}

/// Every cell of the table: a pod sees its record's GPU with the driver, or there is a reason to read; no container sees more,
/// but where the condition `Isolated` says so; none starts with the content of a spec that is not there any more.
#[tokio::test(flavor = "multi_thread")]
async fn on_every_kind_of_node_a_container_gets_the_recorded_gpu_or_a_reason() -> Result<()> {
    let starts = Starts::default();
    let cluster = LocalCluster::launch(ClusterSpec::of(nodes(&starts))).await?;
    let pods = NamespacePods::of(cluster.client(), "default");
    let scene = Scene {
        cluster,
        pods,
        starts,
    };
    let cases = cases();
    until_decided(&scene.cluster, &cases).await?;
    scene.cluster.until_scheduler_ready(DEADLINE).await?;
    for node in scene
        .cluster
        .nodes()
        .filter(|node| node.name().ends_with("-hook"))
    {
        ensure!(
            node.kubelet().until_nri_registered(1, DEADLINE).await,
            "no hook on {}",
            node.name()
        );
    }
    for case in &cases {
        scene.create(&case.pod, &case.node, 4, case.class).await?;
    }
    let bare = scene.create_bare().await?;
    scene.create_seconds(&cases).await?;
    let settled = |snapshot: &ClusterSnapshot| {
        let open: Vec<String> = cases
            .iter()
            .filter_map(|case| {
                match scene.observed(snapshot, &case.node, &case.pod, case.second().as_deref()) {
                    Ok(found) if found == case.expected.to_string() => None,
                    Ok(found) => Some(format!("{}: {found}", case.pod)),
                    Err(problem) => Some(problem),
                }
            })
            .collect();
        let waiting = bare
            .keys()
            .filter(|name| !snapshot.pod(name).is_some_and(is_running))
            .map(|name| format!("{name} does not run"));
        let open: Vec<String> = open.into_iter().chain(waiting).collect();
        if open.is_empty() {
            Ok(())
        } else {
            Err(open.join("; "))
        }
    };
    scene
        .cluster
        .until("every cell of the table", DEADLINE, settled)
        .await?;
    scene.check_uncounted(&bare)?;
    scene.check_events(&cases)?;
    scene.check_starts()?;
    scene.cluster.stop().await
}

impl Scene {
    /// Pods that ask for nothing: on each node with `--inject=auto`, with and without the hook, and of the `RuntimeClass` too.
    /// By name: the row, true if the node has the hook, true if the pod has the class. Pods with a GPU on nodes with the hook
    /// come too, whose sidecars count.
    async fn create_bare(&self) -> Result<BTreeMap<String, (NodeKind, bool, bool)>> {
        let mut bare = BTreeMap::new();
        for Row { kind, with_class, .. } in rows() {
            for (suffix, class) in [
                ("auto", None),
                ("hook", None),
                ("auto", Some(RUNTIME_CLASS)),
                ("hook", Some(RUNTIME_CLASS)),
            ] {
                if class.is_some() && with_class.is_none() {
                    continue;
                }
                let node = node_name(kind, suffix);
                let name = format!("bare-{node}{}", class.map_or("", |_| "-class"));
                self.create(&name, &node, 0, class).await?;
                if suffix == "hook" {
                    self.create(&name.replacen("bare", "gpu", 1), &node, 4, class)
                        .await?;
                }
                bare.insert(name, (kind, suffix == "hook", class.is_some()));
            }
        }
        Ok(bare)
    }

    /// If the first pod shows that no container gets a GPU, a second pod follows.
    async fn create_seconds(&self, cases: &[Case]) -> Result<()> {
        for case in cases {
            let Some(second) = case.second() else { continue };
            let is_off = |snapshot: &ClusterSnapshot| {
                let found = condition(snapshot, &case.node, CONDITION_INJECTABLE);
                if found.as_ref().is_some_and(|found| found.status == "False") {
                    Ok(())
                } else {
                    Err(format!("{found:?}"))
                }
            };
            self.cluster
                .until(
                    &format!("{} to find out that CDI is off", case.node),
                    DEADLINE,
                    is_off,
                )
                .await?;
            self.create(&second, &case.node, 4, None).await?;
        }
        Ok(())
    }

    /// A node that offers nothing says in an event which setting to change.
    fn check_events(&self, cases: &[Case]) -> Result<()> {
        let events = self.cluster.api().objects().list("events", None)?;
        for case in cases {
            let (Refused(reason) | FirstWithout(reason)) = case.expected else {
                continue;
            };
            let advice = if reason == "CdiOff" {
                "set enable_cdi = true"
            } else {
                "enable nvidia-cdi-refresh.service"
            };
            let is_it = |event: &serde_json::Value| {
                let text = |pointer: &str| {
                    event
                        .pointer(pointer)
                        .and_then(serde_json::Value::as_str)
                        .unwrap_or_default()
                };
                text("/reason") == "GPUInjectionImpossible"
                    && text("/involvedObject/name") == case.node
                    && text("/message").contains(advice)
            };
            ensure!(
                events.iter().any(|event| is_it(event)),
                "no event on {} says {advice:?}",
                case.node
            );
        }
        Ok(())
    }

    /// Containers that ask for nothing see what the table says, and the condition says it too.
    fn check_uncounted(&self, bare: &BTreeMap<String, (NodeKind, bool, bool)>) -> Result<()> {
        let snapshot = self.cluster.observer().now();
        for (name, (kind, has_hook, has_class)) in bare {
            let row = rows()
                .into_iter()
                .find(|row| row.kind == *kind)
                .context("a row")?;
            let node = node_name(*kind, if *has_hook { "hook" } else { "auto" });
            let is_exposed = !has_hook && row.uncounted != Uncounted::None;
            let sees_all = is_exposed && (row.uncounted == Uncounted::All || *has_class);
            let isolated = condition(&snapshot, &node, CONDITION_ISOLATED);
            ensure!(
                isolated.as_ref().is_some_and(|found| found.status == "False") == is_exposed,
                "{node} says {isolated:?}"
            );
            // Nothing on such a node shows what the runtime does for a container that has no GPU by other means.
            let is_unknown = !has_hook && row.uncounted == Uncounted::None;
            ensure!(
                isolated.as_ref().is_some_and(|found| found.status == "Unknown") == is_unknown,
                "{node} says {isolated:?}"
            );
            let sidecar = (name.replacen("bare", "gpu", 1), SIDECAR);
            for (pod, container) in [(name.clone(), "main"), (name.clone(), SIDECAR), sidecar] {
                let Some(found) = self
                    .container(&node, &pod, container)
                    .filter(|found| found.starts > 0)
                else {
                    continue;
                };
                ensure!(
                    found.gpus.len() == if sees_all { 2 } else { 0 },
                    "{pod}/{container} sees {:?}",
                    found.gpus
                );
            }
        }
        Ok(())
    }

    /// No container that asks for a GPU has ever seen another than its record's, or was given a spec that was not there.
    fn check_starts(&self) -> Result<()> {
        let snapshot = self.cluster.observer().now();
        for (node, container) in self.starts.all() {
            ensure!(
                container.stale_devices.is_empty(),
                "{}/{} has {:?}",
                container.pod,
                container.name,
                container.stale_devices
            );
            if container.name == "main" && container.pod.starts_with("gpu-") && !container.gpus.is_empty() {
                let pod = snapshot.pod(&container.pod).context("a pod is gone")?;
                let recorded = invariants::should_see(pod, snapshot.devices.get(&node), "main");
                ensure!(
                    container.gpus == recorded,
                    "{} sees {:?}, its record is {recorded:?}",
                    container.pod,
                    container.gpus
                );
            }
        }
        Ok(())
    }
}

/// The table of the documentation is the one that the test above has tried.
#[test]
fn the_table_in_the_documentation_is_current() {
    let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/nvidia.md");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        text.contains(&table()),
        "docs/nvidia.md lacks this table:\n{}",
        table()
    );
}
