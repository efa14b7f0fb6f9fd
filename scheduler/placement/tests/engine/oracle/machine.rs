//! Small random machines and requests.

use placement::{
    Constraints, Device, DeviceAttributes, DeviceConstraint, DeviceLocation, DeviceRef, DeviceRequest,
    DeviceType, DevicesOfType, Exclusion, Fleet, FunctionGroup, HeldMemory, HeldPart, Holdings, Inventory,
    JointAllocation, LabelCondition, Labels, LimitLevel, LinkGroup, NodeRequest, Partition,
    PartitionConstraint, PartitionTable, Placement, RequestedGpus, RequestedMemory, Requirement, Scope,
    Selector, Share, Strategy as Count, VirtualFunction,
};
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;

use crate::build::{GIB, ask, gpu};

/// A GPU or a NIC.
#[derive(Clone, Debug)]
pub(super) struct Part {
    /// NUMA node and switch.
    pub(super) place: (Option<u32>, Option<u32>),
    pub(super) label: bool,
    pub(super) healthy: bool,
    pub(super) n_functions: u32,
    pub(super) limits: LimitLevel,
}

/// A holding: percent of GPUs by minor, percent and perhaps a function of NICs by minor, and exclusive use.
#[derive(Clone, Debug)]
pub(super) struct Owner {
    pub(super) gpus: Vec<(u32, u32)>,
    pub(super) nics: Vec<(u32, u64, Option<u32>)>,
    pub(super) keeps: [Option<Exclusion>; 2],
    pub(super) is_hint: bool,
}

#[derive(Clone, Debug)]
pub(super) struct Asked {
    /// Number of GPUs, and percent of each: more than 100 means whole ones in the vendor's name.
    pub(super) gpus: Option<(u32, u32)>,
    pub(super) nics: Option<u64>,
    /// True if NICs lead; true if both types must share switches.
    pub(super) joint: Option<(bool, bool)>,
    /// True if restricted; the bandwidth.
    pub(super) partition: Option<(bool, Option<u64>)>,
    pub(super) gpu_label: Option<bool>,
    pub(super) nic_label: Option<bool>,
    pub(super) scope: Option<Scope>,
    pub(super) keeps: [Option<Exclusion>; 2],
    pub(super) strategy: Option<Count>,
    pub(super) functions: bool,
    limits: LimitLevel,
}

impl Asked {
    /// The weakest enforcement of memory limits on a GPU; whole ones in the vendor's name need none.
    pub(super) fn limits(&self) -> LimitLevel {
        let is_share = self.gpus.is_some_and(|(_, percent)| percent <= 100);
        if is_share { self.limits } else { LimitLevel::None }
    }
}

/// A partition: minors, bandwidth, score.
pub(super) type Row = (Vec<u32>, Option<u64>, i64);

#[derive(Clone, Debug)]
pub(super) struct Query {
    pub(super) gpus: Vec<Part>,
    pub(super) nics: Vec<Part>,
    pub(super) owners: Vec<Owner>,
    /// True if the table binds; its partitions.
    pub(super) table: Option<(bool, Vec<Row>)>,
    pub(super) links: Vec<(Vec<u32>, u32)>,
    pub(super) asked: Asked,
    constraints: Option<Constraints>,
}

fn part() -> impl Strategy<Value = Part> {
    let place = prop_oneof![
        12 => (0_u32..4).prop_map(|switch| (Some(switch % 2), Some(switch))),
        1 => (0_u32..2).prop_map(|switch| (None, Some(switch))),
        1 => (0_u32..2).prop_map(|numa| (Some(numa), None)),
        1 => Just((None, None)),
    ];
    let limits = prop::sample::select(vec![LimitLevel::None, LimitLevel::Library, LimitLevel::Driver]);
    (place, any::<bool>(), prop::bool::weighted(0.9), 0_u32..3, limits).prop_map(
        |(place, label, healthy, n_functions, limits)| Part {
            place,
            label,
            healthy,
            n_functions,
            limits,
        },
    )
}

fn exclusion() -> impl Strategy<Value = Option<Exclusion>> {
    prop_oneof![10 => Just(None), 1 => Just(Some(Exclusion::Device)), 1 => Just(Some(Exclusion::Switch))]
}

fn owner() -> impl Strategy<Value = Owner> {
    let gpus = proptest::collection::btree_map(0_u32..6, prop_oneof![Just(30), Just(100)], 0..2);
    let nics = proptest::collection::btree_map(
        0_u32..6,
        (prop_oneof![Just(1), Just(40), Just(100)], option::of(0_u32..2)),
        0..2,
    );
    (gpus, nics, [exclusion(), exclusion()], any::<bool>()).prop_map(|(gpus, nics, keeps, is_hint)| Owner {
        gpus: gpus.into_iter().collect(),
        nics: nics
            .into_iter()
            .map(|(minor, (amount, function))| (minor, amount, function))
            .collect(),
        keeps,
        is_hint,
    })
}

fn asked() -> impl Strategy<Value = Asked> {
    let gpus = option::weighted(
        0.85,
        (
            prop_oneof![3 => 1_u32..3, 1 => 3_u32..6],
            prop_oneof![1 => Just(40), 1 => Just(100), 3 => Just(101)],
        ),
    );
    let nics = option::weighted(
        0.75,
        prop_oneof![4 => Just(1), 1 => Just(2), 1 => Just(60), 1 => Just(100), 2 => Just(200)],
    );
    let joint = option::weighted(0.7, (prop::bool::weighted(0.3), any::<bool>()));
    let partition = option::weighted(0.2, (any::<bool>(), option::weighted(0.3, Just(2))));
    let label = || option::weighted(0.15, any::<bool>());
    let scope = prop_oneof![
        6 => Just(None),
        1 => prop::sample::select(vec![Scope::Device, Scope::Switch, Scope::Numa, Scope::Machine]).prop_map(Some)
    ];
    let strategy = prop_oneof![4 => Just(None), 1 => Just(Some(Count::ApplyForAll)), 1 => Just(Some(Count::RequestsAsCount))];
    let how = (
        partition,
        label(),
        label(),
        scope,
        [exclusion(), exclusion()],
        strategy,
        prop::bool::weighted(0.2),
        prop_oneof![6 => Just(LimitLevel::None), 1 => Just(LimitLevel::Driver)],
    );
    (gpus, nics, joint, how).prop_map(|(gpus, nics, joint, how)| {
        let nics = if gpus.is_none() { nics.or(Some(1)) } else { nics };
        let (partition, gpu_label, nic_label, scope, keeps, strategy, functions, limits) = how;
        Asked {
            gpus,
            nics,
            joint,
            partition,
            gpu_label,
            nic_label,
            scope,
            keeps,
            strategy,
            functions,
            limits,
        }
    })
}

pub(super) fn query() -> impl Strategy<Value = Query> {
    let minors = || btree_set(0_u32..6, 1..4).prop_map(|minors| minors.into_iter().collect::<Vec<u32>>());
    let partitions = vec((minors(), option::of(1_u64..4), 0_i64..3), 0..8);
    let table = option::weighted(0.4, (any::<bool>(), partitions));
    let links = prop_oneof![2 => Just(Vec::new()), 1 => vec((minors(), 1_u32..3), 0..4)];
    (
        vec(part(), 2..7),
        vec(part(), 1..7),
        vec(owner(), 0..3),
        table,
        links,
        asked(),
    )
        .prop_map(|(gpus, nics, owners, table, links, asked)| {
            let constraints = constraints(&asked);
            Query {
                gpus,
                nics,
                owners,
                table,
                links,
                asked,
                constraints,
            }
        })
}

fn labels(label: bool) -> Labels {
    [("type".into(), if label { "a" } else { "b" }.into())].into()
}

fn selector(label: bool) -> Selector {
    let test = if label {
        LabelCondition::In(vec!["a".into()])
    } else {
        LabelCondition::NotIn(vec!["a".into()])
    };
    Selector {
        requirements: vec![Requirement {
            key: "type".into(),
            test,
        }],
    }
}

fn constraints(asked: &Asked) -> Option<Constraints> {
    let nic = || DeviceType::from("rdma");
    let joint = asked.joint.map(|(nics_lead, same_switch)| {
        let kinds = if nics_lead {
            vec![nic(), DeviceType::Gpu]
        } else {
            vec![DeviceType::Gpu, DeviceType::from("fpga"), nic()]
        };
        JointAllocation { kinds, same_switch }
    });
    let partition = asked
        .partition
        .map(|(restricted, bandwidth)| PartitionConstraint {
            restricted,
            bandwidth,
        });
    let [keeps_gpus, keeps_nics] = asked.keeps;
    let gpu = DeviceConstraint {
        selector: asked.gpu_label.map(selector),
        exclusion: keeps_gpus,
        scope: asked.scope,
        ..DeviceConstraint::default()
    };
    let virtual_functions = asked.functions.then(Selector::default);
    let (selector, strategy) = (asked.nic_label.map(selector), asked.strategy);
    let nics = DeviceConstraint {
        selector,
        virtual_functions,
        strategy,
        exclusion: keeps_nics,
        scope: None,
    };
    let constraints = Constraints {
        joint,
        partition,
        limits: asked.limits,
        by_kind: vec![(DeviceType::Gpu, gpu), (nic(), nics)],
    };
    let nothing = Constraints {
        by_kind: vec![
            (DeviceType::Gpu, DeviceConstraint::default()),
            (nic(), DeviceConstraint::default()),
        ],
        ..Constraints::default()
    };
    (constraints != nothing).then_some(constraints)
}

fn attributes(part: &Part, minor: u32) -> DeviceAttributes {
    let (numa, switch) = part.place;
    let place = (numa.is_some() || switch.is_some()).then(|| DeviceLocation {
        numa,
        switch: switch.map(|switch| format!("s{switch}").into()),
    });
    let functions = (0..part.n_functions)
        .map(|at| VirtualFunction {
            id: function(minor, at).as_str().into(),
            minor: 0,
        })
        .collect();
    DeviceAttributes {
        labels: labels(part.label),
        location: place,
        function_groups: vec![FunctionGroup {
            labels: Labels::new(),
            functions,
        }],
        limits: part.limits,
    }
}

/// Name of a virtual function of a NIC.
pub(super) fn function(nic: u32, at: u32) -> String {
    format!("f{nic}-{at}")
}

fn held_gpu((minor, percent): (u32, u32)) -> HeldPart {
    HeldPart {
        memory: HeldMemory::Requested(RequestedMemory::Ratio(percent)),
        slots: 1,
        ..HeldPart::new(
            DeviceType::Gpu,
            DeviceRef::Id(format!("n-{minor}").as_str().into()),
        )
    }
}

impl Query {
    fn inventory(&self) -> Inventory {
        let gpus = (0..).zip(&self.gpus).map(|(minor, part)| {
            let attributes = DeviceAttributes {
                function_groups: Vec::new(),
                ..attributes(part, minor)
            };
            Device {
                attributes,
                healthy: part.healthy || minor % 2 == 0,
                // To a request, a closed device is as an unhealthy one.
                closed: !part.healthy && minor % 2 == 0,
                ..gpu("n", minor, GIB)
            }
        });
        let nics = (0..).zip(&self.nics).map(|(minor, part)| Device {
            resources: [("rdma".into(), 100)].into(),
            healthy: part.healthy || minor % 2 == 0,
            closed: !part.healthy && minor % 2 == 0,
            attributes: attributes(part, minor),
            ..Device::new(format!("nic{minor}"), minor)
        });
        let partition = |(minors, bandwidth, score): &Row| Partition {
            minors: minors.clone(),
            bandwidth: *bandwidth,
            score: *score,
        };
        let table = self.table.as_ref();
        Inventory {
            gpus: gpus.collect(),
            unit_bytes: None,
            serves_vendor: true,
            other_devices: Some(vec![DevicesOfType {
                kind: "rdma".into(),
                devices: nics.collect(),
            }]),
            partitions: table.map(|(is_binding, all)| PartitionTable {
                is_binding: *is_binding,
                partitions: all.iter().map(partition).collect(),
            }),
            has_unreadable_partitions: false,
            links: self
                .links
                .iter()
                .map(|(minors, n_links)| LinkGroup {
                    minors: minors.clone(),
                    n_links: *n_links,
                })
                .collect(),
        }
    }

    pub(super) fn fleet(&self) -> Fleet {
        let mut fleet = Fleet::new();
        fleet.set_inventory("n", self.inventory());
        let id = fleet.node_id("n");
        for (at, owner) in self.owners.iter().enumerate() {
            let name = format!("o{at}").as_str().into();
            match id.filter(|_| owner.is_hint) {
                Some(id) => drop(fleet.hint(&name, id, &self.hint(owner))),
                None => fleet.hold(&name, "n", Self::holdings(owner)),
            }
        }
        fleet
    }

    fn exclusions(owner: &Owner) -> Vec<(DeviceType, Exclusion)> {
        let [gpus, nics] = owner.keeps;
        let (gpus, nics) = (
            gpus.map(|one| (DeviceType::Gpu, one)),
            nics.map(|one| (DeviceType::from("rdma"), one)),
        );
        gpus.into_iter().chain(nics).collect()
    }

    fn holdings(owner: &Owner) -> Holdings {
        let nics = owner.nics.iter().map(|(minor, amount, at)| HeldPart {
            resources: [("rdma".into(), *amount)].into(),
            virtual_functions: at
                .map(|at| function(*minor, at).as_str().into())
                .into_iter()
                .collect(),
            trusted: true,
            ..HeldPart::new(
                "rdma".into(),
                DeviceRef::Id(format!("nic{minor}").as_str().into()),
            )
        });
        Holdings {
            parts: owner.gpus.iter().copied().map(held_gpu).chain(nics).collect(),
            exclusions: Self::exclusions(owner),
            ..Holdings::default()
        }
    }

    fn hint(&self, owner: &Owner) -> Placement {
        let memory = |percent| {
            RequestedMemory::Ratio(percent)
                .on(placement::Memory::from_bytes(GIB), None)
                .unwrap_or_default()
        };
        let share = |(minor, percent): &(u32, u32)| {
            let amounts = placement::Amounts {
                memory: memory(*percent),
                core: 0,
                slots: 1,
            };
            Share {
                id: format!("n-{minor}").as_str().into(),
                minor: *minor,
                amounts,
                kind: DeviceType::Gpu,
                resources: [].into(),
                virtual_functions: Vec::new(),
            }
        };
        let nic = |(minor, amount, at): &(u32, u64, Option<u32>)| Share {
            kind: "rdma".into(),
            id: format!("nic{minor}").as_str().into(),
            minor: *minor,
            resources: [("rdma".into(), *amount)].into(),
            virtual_functions: at
                .map(|at| VirtualFunction {
                    id: function(*minor, at).as_str().into(),
                    minor: 0,
                })
                .into_iter()
                .collect(),
            amounts: placement::Amounts::ZERO,
        };
        let n_gpus = u32::try_from(self.gpus.len()).unwrap_or(0);
        let gpus = owner.gpus.iter().filter(|(minor, _)| *minor < n_gpus);
        Placement {
            shares: gpus.map(share).chain(owner.nics.iter().map(nic)).collect(),
            exclusions: Self::exclusions(owner),
            ..Placement::default()
        }
    }

    pub(super) fn requests(&self) -> Vec<DeviceRequest> {
        let request = |amount| DeviceRequest {
            kind: "rdma".into(),
            amounts: [("rdma".into(), amount)].into(),
            whole: Some(100),
        };
        self.asked.nics.map(request).into_iter().collect()
    }

    pub(super) fn ask<'a>(&'a self, requests: &'a [DeviceRequest]) -> NodeRequest<'a> {
        let gpus = match self.asked.gpus {
            None => RequestedGpus::Nothing,
            Some((n, percent)) if percent > 100 => RequestedGpus::Whole(n),
            Some((n, percent)) => RequestedGpus::from(&ask(n, RequestedMemory::Ratio(percent))),
        };
        NodeRequest {
            gpus,
            others: requests,
            constraints: self.constraints.as_ref(),
            ..NodeRequest::default()
        }
    }
}
