//! Gauges of the node's state: devices, registration, held containers. A scrape reads the state itself, so that they cannot differ
//! from it.

use std::fmt;
use std::sync::{Arc, OnceLock};

use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;
use proto::device::TYPE_GPU;
use tokio::sync::watch;

use crate::enforcement::Enforcements;
use crate::extended_resource::Registrations;
use crate::fleet::Fleet;
use crate::node_state::NodeState;
use crate::start::blocked::BlockedStarts;

/// The gauges; there are none before the devices of the node are found. Clones share them.
#[derive(Clone, Debug, Default)]
pub struct NodeGauges(Arc<OnceLock<GaugeSources>>);

/// The state that the gauges show.
#[derive(Debug)]
struct GaugeSources {
    node: Arc<NodeState>,
    registered: watch::Receiver<Registrations>,
    blocked: BlockedStarts,
}

impl NodeGauges {
    /// Registers the gauges.
    pub fn register(registry: &mut Registry) -> Self {
        let gauges = Self::default();
        registry.register_collector(Box::new(gauges.clone()));
        gauges
    }

    /// Shows this node from now on, the resources that kubelet has registered, and the containers that do not start.
    pub fn show(
        &self,
        node: Arc<NodeState>,
        registered: watch::Receiver<Registrations>,
        blocked: BlockedStarts,
    ) {
        self.0.get_or_init(|| GaugeSources {
            node,
            registered,
            blocked,
        });
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeviceLabels {
    r#type: String,
    device: String,
    minor: u32,
    reason: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EnforcementLabels {
    device: String,
    minor: u32,
    level: &'static str,
    reason: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResourceLabels {
    resource: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    reason: &'static str,
}

impl Collector for NodeGauges {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), fmt::Error> {
        let Some(GaugeSources {
            node,
            registered,
            blocked,
        }) = self.0.get()
        else {
            return Ok(());
        };
        let fleet = node.fleet.borrow().clone();
        encode_devices(&mut encoder, &fleet)?;
        encode_enforcement(&mut encoder, &fleet, &node.enforcements.borrow())?;
        let help = "1 while kubelet has the resource registered";
        let mut family =
            encoder.encode_descriptor("gpushare_device_plugin_registered", help, None, MetricType::Gauge)?;
        for (resource, is_registered) in registered.borrow().iter() {
            if !fleet.advertises(*resource, &node.settings.names) {
                continue;
            }
            let labels = ResourceLabels {
                resource: node.settings.names.of(*resource).unwrap_or_default().to_owned(),
            };
            ConstGauge::new(i64::from(*is_registered)).encode(family.encode_family(&labels)?)?;
        }
        let help = "Containers whose start the plugin holds at present, by the reason";
        let mut family = encoder.encode_descriptor(
            "gpushare_device_plugin_held_containers",
            help,
            None,
            MetricType::Gauge,
        )?;
        for (reason, n_blocked) in blocked.count() {
            let gauge = ConstGauge::new(i64::try_from(n_blocked).unwrap_or(i64::MAX));
            gauge.encode(family.encode_family(&ReasonLabels { reason })?)?;
        }
        Ok(())
    }
}

fn encode_devices(encoder: &mut DescriptorEncoder<'_>, fleet: &Fleet) -> Result<(), fmt::Error> {
    let help =
        "1 while pods may be placed on the device; the reason is that of its condition in the Device object";
    let mut family = encoder.encode_descriptor(
        "gpushare_device_plugin_device_healthy",
        help,
        None,
        MetricType::Gauge,
    )?;
    let gpus = fleet.gpus.iter().map(|entry| {
        (
            TYPE_GPU,
            &entry.gpu.uuid,
            entry.gpu.minor,
            entry.is_healthy,
            entry.reason,
        )
    });
    let others = fleet.others.iter().map(|entry| {
        let device = &entry.device;
        (
            device.device_type.as_str(),
            &device.id,
            device.minor,
            entry.is_healthy,
            entry.reason,
        )
    });
    for (device_type, id, minor, is_healthy, reason) in gpus.chain(others) {
        let reason = reason.map(|reason| reason.to_string()).unwrap_or_default();
        let labels = DeviceLabels {
            r#type: device_type.to_owned(),
            device: id.to_string(),
            minor,
            reason,
        };
        ConstGauge::new(i64::from(is_healthy)).encode(family.encode_family(&labels)?)?;
    }
    Ok(())
}

fn encode_enforcement(
    encoder: &mut DescriptorEncoder<'_>,
    fleet: &Fleet,
    enforcements: &Enforcements,
) -> Result<(), fmt::Error> {
    let help = "1 for the present enforcement level of memory limits on the GPU (driver, hami-core, none), with the reason that it is \
                no better";
    let name = "gpushare_device_plugin_enforcement";
    let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
    for entry in &fleet.gpus {
        if let Some(found) = enforcements.of(&entry.gpu.uuid) {
            let labels = EnforcementLabels {
                device: entry.gpu.uuid.to_string(),
                minor: entry.gpu.minor,
                level: found.level.as_str(),
                reason: found.reason,
            };
            ConstGauge::new(1_i64).encode(family.encode_family(&labels)?)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use proto::memory_unit::MemoryUnit;
    use proto::resource::ResourceNames;

    use super::*;
    use crate::builders;
    use crate::enforcement::Level;
    use crate::extended_resource::ExtendedResource;
    use crate::health::HealthReason;
    use crate::pods::Pods;
    use crate::settings::Settings;

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
        let (_fleet, fleet) = watch::channel(Arc::new(fleet));
        let (_pods, pods) = watch::channel(Pods::default());
        let settings = Settings::plain(ResourceNames::default(), MemoryUnit::GIB, Duration::from_secs(1));
        let levels = Enforcements::all(Level::Driver, [builders::gpu(1)]);
        let (_levels, levels) = watch::channel(Arc::new(levels));
        let node = NodeState::new(settings, fleet, pods, Path::new("/nonexistent"));
        let node = Arc::new(node.with_enforcements(levels));
        let registrations = [
            (ExtendedResource::Shared, true),
            (ExtendedResource::Memory, false),
            (ExtendedResource::Rdma, true),
        ];
        let (_registered, registered) = watch::channel(registrations.into());
        gauges.show(node, registered, BlockedStarts::default());
        insta::assert_snapshot!(text(&registry));
    }
}
