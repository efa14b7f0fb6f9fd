//! Every text of a refusal, in one snapshot that a person can read.

use std::collections::BTreeMap;

use placement::{DeviceRequest, DeviceType, Reason, RequestedGpus, RequestedMemory, ShareRequest};
use proto::pod::Taint;
use serde_json::json;

use super::{kube_scheduler_texts, obstacle, shortage, step_by_devices};
use crate::index::ResourceDemand;
use crate::kube_scheduler::{NodeRefusal, PodRules, Shortage};

fn share(devices: u32, memory: RequestedMemory, core: u32) -> RequestedGpus {
    RequestedGpus::Share(ShareRequest {
        devices,
        memory,
        core,
        slots: 1,
    })
}

/// A demand in whose texts the reason has every amount that it names.
fn demand(reason: Reason) -> ResourceDemand<'static> {
    let gpus = match reason {
        Reason::Core => share(1, RequestedMemory::Ratio(50), 60),
        Reason::TooFew | Reason::Unhealthy | Reason::Closed => share(2, RequestedMemory::Bytes(8 << 30), 0),
        Reason::Partition | Reason::PartitionsUnreadable | Reason::Together => RequestedGpus::Whole(2),
        Reason::OtherDevices => RequestedGpus::Nothing,
        Reason::TooLarge => share(1, RequestedMemory::Units(20_480), 0),
        _ => share(1, RequestedMemory::Bytes(20 << 30), 0),
    };
    let amounts = BTreeMap::from([("koordinator.sh/rdma".into(), 50)]);
    let rdma = DeviceRequest {
        kind: DeviceType::from("rdma"),
        amounts,
        whole: Some(100),
    };
    ResourceDemand {
        gpus,
        others: if reason == Reason::OtherDevices {
            vec![rdma]
        } else {
            Vec::new()
        },
        isolation: Some("HAMi-core".into()),
        ..ResourceDemand::default()
    }
}

fn short(resource: &str, asked: u64, allocatable: u64, requested: u128) -> Shortage {
    Shortage {
        resource: resource.into(),
        asked,
        allocatable,
        requested,
    }
}

/// Each reason with its text and the step that helps; a text about an amount has the amount.
#[test]
fn every_refusal_has_its_amounts_and_a_step() {
    let mut lines = vec!["By devices".to_owned()];
    for reason in Reason::ALL {
        let demand = demand(reason);
        let text = demand.refusal(reason);
        lines.push(format!("{}: {text}", reason.label()));
        let step = step_by_devices(reason, "n1", &demand);
        if !step.is_empty() {
            lines.push(format!("  {step}"));
        }
        // The end of a pod, or a smaller request, helps against a lack of room. Any other refusal takes a step.
        let speaks_of_amounts = reason.is_lack_of_room() || reason == Reason::TooLarge;
        assert_eq!(text.contains("(asked: "), !EXEMPT.contains(&reason), "{text}");
        assert!(
            speaks_of_amounts || !step.is_empty() || NAMES_ITS_RULE.contains(&reason),
            "{text}"
        );
    }
    lines.push("By kube-scheduler".to_owned());
    let taint: Taint =
        serde_json::from_value(json!({"key": "team", "value": "vision", "effect": "NoSchedule"})).unwrap();
    let rules = PodRules {
        node_selector: BTreeMap::from([("zone".to_owned(), "b".to_owned())]),
        node_name: Some("n2".into()),
        ..PodRules::default()
    };
    let refusals = [
        NodeRefusal::Unschedulable,
        NodeRefusal::OtherNode,
        NodeRefusal::Taint(taint),
        NodeRefusal::Affinity,
        NodeRefusal::Insufficient(vec![
            short("aliyun.com/gpu-mem", 20, 16, 7),
            short("pods", 1, 3, 3),
        ]),
    ];
    for refusal in refusals {
        lines.push(kube_scheduler_texts(&refusal).join(", "));
        lines.push(format!("  {}", obstacle(&refusal, &rules, "n1")));
    }
    lines.push("Amounts".to_owned());
    for one in [
        short("cpu", 1500, 8000, 7000),
        short("memory", 9 << 30, 64 << 30, 60 << 30),
        short("koordinator.sh/gpu-memory", 8192, 0, 0),
        short("koordinator.sh/gpu-memory", 8 << 30, 32 << 30, 30 << 30),
        short("nvidia.com/gpu", 3, 2, 0),
        short("pods", 1, 110, 110),
    ] {
        lines.push(format!("{}: {}", one.resource, shortage(&one)));
    }
    insta::assert_snapshot!(lines.join("\n"));
}

/// Reasons that name no amount.
const EXEMPT: [Reason; 7] = [
    Reason::NoDevice,
    Reason::UnitUnknown,
    Reason::PartitionsUnreadable,
    Reason::Unlimited,
    Reason::LimitedByLibrary,
    Reason::PluginAway,
    Reason::InvalidRequest,
];

/// Reasons whose text, as a node gives it, names the object and field to correct.
const NAMES_ITS_RULE: [Reason; 2] = [Reason::PartitionsUnreadable, Reason::InvalidRequest];
