//! Gauges of the node's state: devices, injection, registration, containers whose start is blocked, and memory in use. A scrape
//! reads the state itself, so the gauges cannot differ from it. A gauge whose value is not known is absent, never 0.

use std::fmt;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use tokio::sync::watch;

use crate::devices::extended_resource::Registrations;
use crate::devices::fleet::NodeFleet;
use crate::inject::mode::{Exposure, Injection};
use crate::metrics::Metrics;
use crate::publish::memory_use::{MeasuredMemory, memory_of_containers};
use crate::start::blocked::BlockedStarts;
use crate::start::node_state::NodeState;

/// The gauges; there are none before the devices of the node are found. Clones share them.
#[derive(Clone, Debug, Default)]
pub(crate) struct NodeGauges(Arc<OnceLock<GaugeSources>>);

/// The state that a scrape reads.
#[derive(Debug)]
pub(crate) struct GaugeSources {
    pub(crate) node: Arc<NodeState>,
    pub(crate) registered: watch::Receiver<Registrations>,
    pub(crate) blocked: BlockedStarts,
    pub(crate) memory_use: watch::Receiver<Option<Arc<MeasuredMemory>>>,
    pub(crate) metrics: Metrics,
}

impl NodeGauges {
    /// Registers the gauges.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let gauges = Self::default();
        registry.register_collector(Box::new(gauges.clone()));
        gauges
    }

    /// Exports the gauges from now on. Each scrape reads these sources.
    pub(crate) fn show(&self, sources: GaugeSources) {
        let _ = self.0.set(sources);
    }
}

impl Collector for NodeGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        // A scrape may come before the devices are found.
        let Some(sources) = self.0.get() else {
            return Ok(());
        };
        let node = &sources.node;
        let fleet = node.fleet.borrow().clone();
        let mut devices = Vec::new();
        for entry in fleet.all_entries() {
            let reason = entry.reason.map(|reason| reason.to_string()).unwrap_or_default();
            let labels = [
                ("type", entry.device_type.to_owned()),
                ("device", entry.key.id.to_string()),
                ("minor", entry.key.minor.to_string()),
                ("reason", reason),
            ];
            devices.push((labels, i64::from(entry.is_healthy)));
        }
        let help = "1 while pods may be placed on the device; the reason is that of its condition in the Device object";
        write(&mut encoder, "device_healthy", help, devices)?;
        let (enforcements, mut levels) = (node.enforcements.borrow().clone(), Vec::new());
        for entry in &fleet.gpus {
            if let Some(found) = enforcements.get(&entry.device.uuid) {
                let labels = [
                    ("device", entry.device.uuid.to_string()),
                    ("minor", entry.device.minor.to_string()),
                    ("level", found.level.as_str().to_owned()),
                    ("reason", found.reason.to_owned()),
                ];
                levels.push((labels, 1));
            }
        }
        let help = "1 for the present enforcement level of memory limits on the GPU (driver, hami-core, none), with the reason that \
                    it is no better";
        write(&mut encoder, "enforcement", help, levels)?;
        if let Some(injection) = node.injection.borrow().as_ref() {
            write_injection(&mut encoder, injection)?;
        }
        if node.settings.has_runtime_hook {
            let help = "1 while the container runtime is connected to the runtime hook";
            let is_connected = sources.metrics.is_hook_connected();
            write_one(&mut encoder, "runtime_hook_connected", help, is_connected)?;
        }
        // Zeros would say that no container uses memory where it is not measured.
        if let Some(measured) = sources.memory_use.borrow().clone() {
            write_memory_use(&mut encoder, node, &fleet, &measured)?;
        }
        let mut registered = Vec::new();
        for (resource, is_registered) in sources.registered.borrow().iter() {
            // A resource without devices is not registered, and that is no fault.
            if let Some(name) = node.settings.names.of(*resource)
                && fleet.advertises(*resource, &node.settings.names)
            {
                registered.push(([("resource", name.to_owned())], i64::from(*is_registered)));
            }
        }
        let help = "1 while kubelet has the resource registered";
        write(&mut encoder, "registered", help, registered)?;
        let mut blocked = Vec::new();
        for (reason, n_blocked) in sources.blocked.count() {
            let n_blocked = i64::try_from(n_blocked).unwrap_or(i64::MAX);
            blocked.push(([("reason", reason.to_owned())], n_blocked));
        }
        let help = "Containers whose start the plugin holds at present, by the reason";
        write(&mut encoder, "held_containers", help, blocked)
    }
}

fn write_injection(encoder: &mut DescriptorEncoder<'_>, injection: &Injection) -> Result<(), fmt::Error> {
    let labels = [
        ("mode", injection.mode.as_str().to_owned()),
        ("certainty", injection.certainty.as_str().to_owned()),
        ("reason", injection.reason.to_owned()),
    ];
    let help =
        "1 for the present injection mode, with its certainty (proven, assumed, impossible) and the reason";
    write(encoder, "injection", help, vec![(labels, 1)])?;
    let is_exposed = match injection.exposure {
        None => false,
        Some(Exposure::EveryPod | Exposure::RuntimeClass(_)) => true,
        // A value of 0 would pass for proof that no image sees the GPUs.
        Some(Exposure::Unknown(_)) => return Ok(()),
    };
    let help =
        "1 if a container that requests no GPU sees all of them when its image sets the vendor's variable";
    write_one(encoder, "gpus_exposed", help, is_exposed)
}

fn write_memory_use(
    encoder: &mut DescriptorEncoder<'_>,
    node: &NodeState,
    fleet: &NodeFleet,
    measured: &MeasuredMemory,
) -> Result<(), fmt::Error> {
    let (mut used, mut given, mut limits) = (Vec::new(), Vec::new(), Vec::new());
    let pods = node.pods.borrow();
    for memory in memory_of_containers(&pods, fleet, node.settings.memory_unit, measured) {
        let labels = [
            ("namespace", memory.pod.namespace.clone()),
            ("pod", memory.pod.name.clone()),
            ("container", memory.key.container.clone()),
            ("device", memory.gpu.uuid.to_string()),
        ];
        for (values, bytes) in [
            (&mut given, memory.given),
            (&mut limits, measured.limits.get(&memory.key).copied()),
            (&mut used, memory.used),
        ] {
            values.extend(bytes.map(|bytes| (labels.clone(), gauge_value(bytes))));
        }
    }
    let help = "GPU memory that the container's processes use";
    write(encoder, "container_memory_used_bytes", help, used)?;
    let help = "GPU memory that the container was given";
    write(encoder, "container_memory_given_bytes", help, given)?;
    let help = "GPU memory to which the driver limits the container, as read back from the driver";
    write(encoder, "container_memory_limit_bytes", help, limits)?;
    let Some(by_gpu) = &measured.unattributed else {
        return Ok(());
    };
    let mut unattributed = Vec::new();
    for entry in &fleet.gpus {
        let bytes = by_gpu.get(&entry.device.uuid).copied();
        let labels = [("device", entry.device.uuid.to_string())];
        unattributed.push((labels, gauge_value(bytes.unwrap_or_default())));
    }
    let help = "GPU memory of processes in no container of a pod that requests devices";
    write(encoder, "unattributed_memory_used_bytes", help, unattributed)
}

fn gauge_value(bytes: u64) -> i64 {
    i64::try_from(bytes).unwrap_or(i64::MAX)
}

/// Writes a gauge without labels, whose name begins with that of the plugin.
fn write_one(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    value: bool,
) -> Result<(), fmt::Error> {
    let name = format!("gpushare_device_plugin_{name}");
    let metric = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
    ConstGauge::new(i64::from(value)).encode(metric)
}

/// Writes a gauge, whose name begins with that of the plugin, with a value for each set of labels.
fn write<const N: usize>(
    encoder: &mut DescriptorEncoder<'_>,
    name: &str,
    help: &str,
    values: Vec<([(&'static str, String); N], i64)>,
) -> Result<(), fmt::Error> {
    let name = format!("gpushare_device_plugin_{name}");
    let mut family = encoder.encode_descriptor(&name, help, None, MetricType::Gauge)?;
    for (labels, value) in values {
        ConstGauge::new(value).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::extended_resource::ExtendedResource;
    use crate::devices::health::HealthReason;
    use crate::inject::enforcement::{Level, same_level};
    use crate::inject::mode::{Certainty, Mode};
    use crate::node::pods::{NodePod, PodUid};
    use crate::publish::memory_use::ContainerGpu;
    use crate::tests::builders;

    fn text(registry: &Registry) -> String {
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, registry).unwrap();
        text
    }

    #[test]
    fn gauges_show_devices_and_registration() {
        let mut registry = Registry::default();
        let gauges = NodeGauges::register(&mut registry);
        assert_eq!(
            text(&registry),
            "# EOF\n",
            "nothing is known before the devices are found"
        );
        let mut fleet = builders::fleet(2);
        fleet.gpus[1].is_healthy = false;
        fleet.gpus[1].reason = Some(HealthReason::Xid(79));
        let pods = builders::pods([
            NodePod {
                created: vec![("id".to_owned(), "u3".to_owned())],
                ..builders::pod("a", 1, [builders::units(3)])
            },
            builders::pod("not-created", 2, [builders::units(2)]),
        ]);
        let levels = same_level(Level::Driver, [builders::gpu(1)]);
        let mut node = builders::node_state(fleet, pods);
        node.enforcements = watch::channel(Arc::new(levels)).1;
        let node = Arc::new(node);
        let registrations = [
            (ExtendedResource::Shared, true),
            (ExtendedResource::Memory, false),
            (ExtendedResource::Rdma, true),
        ];
        let (_registered, registered) = watch::channel(registrations.into());
        let of = ContainerGpu {
            pod: PodUid::from("a"),
            container: "u3".to_owned(),
            gpu: builders::gpu(0).uuid,
        };
        let measured = MeasuredMemory {
            by_container: [(of.clone(), 7)].into(),
            unattributed: Some([(builders::gpu(1).uuid, 5)].into()),
            containers: ["id".to_owned()].into(),
            limits: [(of, 3 << 30)].into(),
            ..MeasuredMemory::default()
        };
        let (_measured, measured) = watch::channel(Some(Arc::new(measured)));
        let metrics = Metrics::register(&mut Registry::default());
        gauges.show(GaugeSources {
            node,
            registered,
            blocked: BlockedStarts::default(),
            memory_use: measured,
            metrics,
        });
        insta::assert_snapshot!(text(&registry));
    }

    /// The gauges `gpus_exposed` and `runtime_hook_connected` of a node.
    fn of_node(injection: Option<Injection>, has_runtime_hook: bool) -> (Option<String>, Option<String>) {
        let mut registry = Registry::default();
        let gauges = NodeGauges::register(&mut registry);
        let mut node = builders::node_state(builders::fleet(1), builders::pods([]));
        node.settings.has_runtime_hook = has_runtime_hook;
        node.injection = watch::channel(injection).1;
        let (registered, measured) = (watch::channel(Registrations::new()).1, watch::channel(None).1);
        let metrics = Metrics::register(&mut Registry::default());
        gauges.show(GaugeSources {
            node: Arc::new(node),
            registered,
            blocked: BlockedStarts::default(),
            memory_use: measured,
            metrics,
        });
        let text = text(&registry);
        let value = |name: &str| {
            let mut lines = text.lines();
            let line = lines.find_map(|line| line.strip_prefix(&format!("gpushare_device_plugin_{name} ")));
            line.map(str::to_owned)
        };
        (value("gpus_exposed"), value("runtime_hook_connected"))
    }

    #[test]
    fn a_gauge_whose_value_is_not_known_is_absent() {
        let with = |exposure| {
            Some(Injection {
                mode: Mode::Cdi,
                certainty: Certainty::Proven,
                reason: "Cdi",
                message: String::new(),
                exposure,
            })
        };
        let exposed = |injection| of_node(injection, false).0;
        assert_eq!(exposed(None), None, "it is not decided yet");
        assert_eq!(exposed(with(Some(Exposure::Unknown("privileged")))), None);
        assert_eq!(exposed(with(None)), Some("0".to_owned()));
        assert_eq!(exposed(with(Some(Exposure::EveryPod))), Some("1".to_owned()));
        assert_eq!(of_node(None, false).1, None, "there is no hook to be connected");
        assert_eq!(of_node(None, true).1, Some("0".to_owned()));
    }
}
