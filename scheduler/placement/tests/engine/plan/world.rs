//! Small fleets with pods, made by hand or at random, and the plan for a goal on them.

use placement::{
    Device, DevicePolicy, Fleet, Goal, HeldMemory, HeldPart, Holder, Holdings, HostAmounts, Inventory,
    Limits, Memory, NodeId, NodePolicy, NodeRequest, Obstacle, Plan, PlanError, PodProfile, Policies,
    RequestedMemory, ShareRequest, plan,
};
use placement::{DeviceRef, DeviceType};
use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};
use proptest::test_runner::TestCaseError;

use crate::build::{GIB, gpus};

/// One node.
#[derive(Clone, Debug, Default)]
pub(super) struct Machine {
    /// GiB of each GPU.
    pub(super) gpus: Vec<u64>,
    /// Minors of closed GPUs.
    pub(super) closed: Vec<u32>,
    /// CPUs besides those of its pods; `None` if its CPU is not known.
    pub(super) cpus: Option<u64>,
}

impl Machine {
    pub(super) fn of(gpus: &[u64]) -> Self {
        Self {
            gpus: gpus.to_vec(),
            ..Self::default()
        }
    }
}

/// A pod with one CPU and the same share of each of its GPUs.
#[derive(Clone, Debug)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) node: usize,
    pub(super) minors: Vec<u32>,
    pub(super) gib: u64,
    pub(super) run_seconds: u64,
    pub(super) stays: Option<Obstacle>,
    pub(super) is_unknown: bool,
    /// The nodes to which it may go; `None` for all.
    pub(super) nodes: Option<Vec<usize>>,
    pub(super) policies: Policies,
}

impl Default for Pod {
    fn default() -> Self {
        Self {
            name: String::new(),
            node: 0,
            minors: Vec::new(),
            gib: 0,
            run_seconds: 3600,
            stays: None,
            is_unknown: false,
            nodes: None,
            policies: Policies {
                node: NodePolicy::Binpack,
                device: DevicePolicy::Binpack,
            },
        }
    }
}

/// A goal, by the number of its node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) enum Aim {
    #[default]
    Join,
    Node(usize),
    Gpus(usize, Vec<u32>),
    /// GiB and number of GPUs.
    Free(u64, usize),
    /// The same on one node.
    FreeOn(usize, u64, usize),
}

#[derive(Clone, Debug, Default)]
pub(super) struct World {
    pub(super) nodes: Vec<Machine>,
    pub(super) pods: Vec<Pod>,
    pub(super) max_moves: usize,
    pub(super) aim: Aim,
    /// True if nodes and pods enter the fleet in reverse order.
    pub(super) is_reversed: bool,
}

pub(super) fn name(node: usize) -> String {
    format!("n{node}")
}

impl World {
    pub(super) fn inventory(&self, node: usize) -> Inventory {
        let machine = &self.nodes[node];
        let gpu = |(minor, gib): (u32, &u64)| Device {
            closed: machine.closed.contains(&minor),
            ..crate::build::gpu(&name(node), minor, gib * GIB)
        };
        Inventory {
            gpus: (0..).zip(&machine.gpus).map(gpu).collect(),
            ..Inventory::default()
        }
    }

    pub(super) fn fleet(&self) -> Fleet {
        let mut fleet = Fleet::new();
        let ordered = |n: usize| -> Vec<usize> {
            if self.is_reversed {
                (0..n).rev().collect()
            } else {
                (0..n).collect()
            }
        };
        for node in ordered(self.nodes.len()) {
            fleet.set_inventory(&name(node), self.inventory(node));
            let n_pods = self.pods.iter().filter(|pod| pod.node == node).count() as u64;
            let total = self.nodes[node].cpus.map(|cpus| HostAmounts {
                cpu_milli: (cpus + n_pods) * 1000,
                memory: 64 * GIB,
            });
            fleet.set_host(&name(node), total);
        }
        for at in ordered(self.pods.len()) {
            self.put(&mut fleet, at);
            let NodeRequest { gpus, host, .. } = self.request(at);
            fleet.workload_mut().add(PodProfile { gpus, host });
        }
        // The policy `fill` looks ahead by the pods that there are.
        fleet.refresh_workload_model();
        fleet
    }

    /// Puts a pod on its first place.
    pub(super) fn put(&self, fleet: &mut Fleet, at: usize) {
        let pod = &self.pods[at];
        let (owner, node) = (pod.name.as_str().into(), name(pod.node));
        let parts: Vec<HeldPart> = pod.minors.iter().map(|minor| share(pod, *minor)).collect();
        fleet.hold(&owner, &node, Holdings::from(parts));
        fleet.set_host_use(&owner, &node, self.request(at).host, false);
    }

    /// The GPUs that the goal empties are closed before the first move.
    pub(super) fn close(&self, fleet: &mut Fleet) {
        let (node, minors) = match &self.aim {
            Aim::Node(node) => (*node, (0..).take(self.nodes[*node].gpus.len()).collect()),
            Aim::Gpus(node, minors) => (*node, minors.clone()),
            Aim::Join | Aim::Free(..) | Aim::FreeOn(..) => return,
        };
        let mut inventory = self.inventory(node);
        for gpu in inventory.gpus.iter_mut() {
            gpu.closed |= minors.contains(&gpu.minor);
        }
        fleet.set_inventory(&name(node), inventory);
    }

    pub(super) fn id(&self, fleet: &Fleet, node: usize) -> NodeId {
        fleet
            .node_id(&name(node))
            .unwrap_or_else(|| panic!("no node {node} in {self:?}"))
    }

    pub(super) fn request(&self, at: usize) -> NodeRequest<'static> {
        let pod = &self.pods[at];
        let share = ShareRequest {
            devices: u32::try_from(pod.minors.len()).unwrap(),
            memory: RequestedMemory::Bytes(pod.gib * GIB),
            core: 0,
            slots: 1,
        };
        NodeRequest {
            host: HostAmounts {
                cpu_milli: 1000,
                memory: GIB,
            },
            ..NodeRequest::from(&share)
        }
    }

    /// The same beside copies of its nodes, each with a pod fewer than the one before; for one move at most.
    pub(super) fn with_copies(mut self, n: usize) -> Self {
        let (nodes, pods) = (self.nodes.clone(), self.pods.clone());
        for copy in 1..=n {
            self.nodes.extend(nodes.iter().cloned());
            self.pods.extend(pods.iter().skip(copy).map(|pod| Pod {
                name: format!("{}-{copy}", pod.name),
                node: pod.node + copy * nodes.len(),
                ..pod.clone()
            }));
        }
        self.max_moves = self.max_moves.min(1);
        self
    }

    /// True if a pod may move before a place is looked for.
    pub(super) fn may_move(&self, at: usize) -> bool {
        let pod = &self.pods[at];
        pod.stays.is_none() && !pod.is_unknown && pod.run_seconds >= 300
    }

    /// A holder like the first pod, or without request, of another name.
    pub(super) fn holder_named(&self, name: &str) -> Holder<'static> {
        let request = if self.pods.is_empty() {
            NodeRequest::default()
        } else {
            self.request(0)
        };
        Holder {
            owner: name.into(),
            request,
            policies: Policies::default(),
            nodes: None,
            priority: 0,
            run_seconds: 3600,
            stays: None,
        }
    }

    pub(super) fn plan(&self, fleet: &Fleet) -> Result<Plan, PlanError> {
        let ids = |nodes: &Vec<usize>| {
            let mut ids: Vec<NodeId> = nodes.iter().map(|node| self.id(fleet, *node)).collect();
            ids.sort_unstable();
            ids
        };
        let allowed: Vec<Option<Vec<NodeId>>> =
            self.pods.iter().map(|pod| pod.nodes.as_ref().map(ids)).collect();
        let mut holders = Vec::new();
        for (at, (pod, allowed)) in self.pods.iter().zip(&allowed).enumerate() {
            let holder = Holder {
                owner: pod.name.as_str().into(),
                request: self.request(at),
                policies: pod.policies,
                nodes: allowed.as_deref(),
                priority: 0,
                run_seconds: pod.run_seconds,
                stays: pod.stays.clone(),
            };
            if !pod.is_unknown {
                holders.push(holder);
            }
        }
        let all: Vec<NodeId> = (0..self.nodes.len()).map(|node| self.id(fleet, node)).collect();
        let free = |gib: u64, n_gpus| Goal::Free {
            bytes: gib * GIB,
            n_gpus,
            nodes: &all,
        };
        let one;
        let goal = match &self.aim {
            Aim::Join => Goal::Join,
            Aim::Node(node) => Goal::EmptyNode(all[*node]),
            Aim::Gpus(node, minors) => Goal::EmptyGpus(all[*node], minors),
            Aim::Free(gib, n_gpus) => free(*gib, *n_gpus),
            Aim::FreeOn(node, gib, n_gpus) => {
                one = [all[*node]];
                Goal::Free {
                    bytes: gib * GIB,
                    n_gpus: *n_gpus,
                    nodes: &one,
                }
            }
        };
        let limits = Limits {
            max_moves: self.max_moves,
            min_run_seconds: 300,
        };
        plan(fleet, goal, &holders, limits)
    }

    /// The sum over all nodes of the bytes of their largest free block.
    pub(super) fn joined(&self, fleet: &Fleet) -> u64 {
        let mut sum = 0;
        for node in 0..self.nodes.len() {
            let gpus = gpus(fleet, self.id(fleet, node)).into_iter();
            let free = gpus
                .filter(|gpu| !gpu.device.closed)
                .map(|gpu| gpu.free.memory.bytes_floor());
            sum += free.max().unwrap_or(0);
        }
        sum
    }

    /// Every holder of GPUs that become empty is moved or left, and every pod that must not move is left for that.
    pub(super) fn check_left(&self, plan: &Plan) -> Result<(), TestCaseError> {
        let (node, minors): (usize, Vec<u32>) = match &self.aim {
            Aim::Node(node) => (*node, (0..4).collect()),
            Aim::Gpus(node, minors) => (*node, minors.clone()),
            Aim::Join | Aim::Free(..) | Aim::FreeOn(..) => return Ok(()),
        };
        for (at, pod) in self.pods.iter().enumerate() {
            let is_here = pod.node == node && pod.minors.iter().any(|minor| minors.contains(minor));
            let is_moved = plan.moves.iter().any(|made| made.owner.as_str() == pod.name);
            let left = plan.left.iter().find(|(owner, _)| owner.as_str() == pod.name);
            prop_assert_eq!(is_here, is_moved || left.is_some());
            prop_assert!(!(is_moved && (left.is_some() || !self.may_move(at))));
            let searched = [Obstacle::NoPlace, Obstacle::Returns, Obstacle::Limit];
            if let Some((_, obstacle)) = left {
                prop_assert_eq!(searched.contains(obstacle), self.may_move(at), "{:?}", obstacle);
                let is_limit = plan.moves.len() >= self.max_moves;
                prop_assert_eq!(*obstacle == Obstacle::Limit, is_limit && self.may_move(at));
            }
        }
        Ok(())
    }
}

/// The share that a pod holds of a GPU.
fn share(pod: &Pod, minor: u32) -> HeldPart {
    HeldPart {
        memory: HeldMemory::Exact(Memory::from_bytes(pod.gib * GIB)),
        slots: 1,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Minor(minor))
    }
}

fn machine() -> impl Strategy<Value = Machine> {
    let closed = prop_oneof![4 => Just(Vec::new()), 1 => vec(0_u32..4, 1..3)];
    let cpus = prop_oneof![2 => Just(None), 1 => (0_u64..4).prop_map(Some)];
    (vec(select(vec![8_u64, 8, 12]), 1..=4), closed, cpus).prop_map(|(gpus, closed, cpus)| Machine {
        gpus,
        closed,
        cpus,
    })
}

fn policies() -> impl Strategy<Value = Policies> {
    let binpack = Policies {
        node: NodePolicy::Binpack,
        device: DevicePolicy::Binpack,
    };
    let spread = Policies {
        node: NodePolicy::Spread,
        device: DevicePolicy::Spread,
    };
    prop_oneof![3 => Just(binpack), 1 => Just(spread), 3 => Just(Policies::default())]
}

fn pod_anywhere() -> impl Strategy<Value = Pod> {
    let minors = prop_oneof![5 => vec(0_u32..4, 1), 1 => Just(vec![0_u32, 1])];
    let gib = prop_oneof![3 => 1_u64..=4, 1 => 5_u64..=12];
    let stays = prop_oneof![8 => Just(None), 1 => Just(Some(Obstacle::NoController))];
    let nodes = prop_oneof![6 => Just(None), 1 => subsequence(vec![0_usize, 1, 2], 1..=2).prop_map(Some)];
    (0_usize..3, minors, gib, 0_u64..20, stays, nodes, policies()).prop_map(
        |(node, minors, gib, run, stays, nodes, policies)| Pod {
            node,
            minors,
            gib,
            run_seconds: run * 1000 + 200,
            stays,
            nodes,
            policies,
            ..Pod::default()
        },
    )
}

fn aim() -> impl Strategy<Value = Aim> {
    let gib = prop_oneof![1_u64..=12, 6_u64..=12, Just(8), Just(12)];
    let free = (gib, prop_oneof![2 => Just(1_usize), 1 => 2_usize..=3]);
    prop_oneof![
        2 => (0_usize..3).prop_map(Aim::Node),
        2 => (0_usize..3, subsequence(vec![0_u32, 1, 2, 3], 1..=2)).prop_map(|(node, minors)| Aim::Gpus(node, minors)),
        4 => free.prop_map(|(gib, n)| Aim::Free(gib, n)),
        1 => Just(Aim::Join),
    ]
}

/// Up to 3 nodes with up to 4 GPUs and some pods that have room, and a goal.
pub(super) fn world(n_pods: std::ops::RangeInclusive<usize>) -> impl Strategy<Value = World> {
    let most = *n_pods.end();
    let max_moves = prop_oneof![3 => Just(10_usize), 1 => 0_usize..4];
    (
        prop_oneof![1 => vec(machine(), 1..=3), 3 => vec(machine(), 3)],
        prop_oneof![1 => vec(pod_anywhere(), n_pods), 3 => vec(pod_anywhere(), most)],
        max_moves,
        aim(),
    )
        .prop_map(|(nodes, pods, max_moves, aim)| {
            let n = nodes.len();
            let aim = match aim {
                Aim::Node(node) => Aim::Node(node % n),
                Aim::Gpus(node, mut minors) => {
                    let node = node % n;
                    minors.retain(|minor| (*minor as usize) < nodes[node].gpus.len());
                    minors.extend(minors.is_empty().then_some(0));
                    Aim::Gpus(node, minors)
                }
                other => other,
            };
            let mut world = World {
                nodes,
                max_moves,
                aim,
                ..World::default()
            };
            for (at, mut pod) in pods.into_iter().enumerate() {
                pod.name = format!("p{at}");
                pod.node %= n;
                let n_gpus = u32::try_from(world.nodes[pod.node].gpus.len()).unwrap();
                pod.minors.iter_mut().for_each(|minor| *minor %= n_gpus);
                pod.minors.dedup();
                if let Some(nodes) = &mut pod.nodes {
                    nodes.retain(|node| *node < n);
                }
                world.pods.push(pod);
                if !world.has_room_for_last() {
                    world.pods.pop();
                }
            }
            world
        })
}

impl World {
    /// True if the GPUs of the last pod exist and have room for all their pods.
    fn has_room_for_last(&self) -> bool {
        let Some(last) = self.pods.last() else { return true };
        last.minors.iter().all(|minor| {
            let total = self.nodes[last.node].gpus.get(*minor as usize);
            let here = self
                .pods
                .iter()
                .filter(|pod| pod.node == last.node && pod.minors.contains(minor));
            let taken: u64 = here.map(|pod| pod.gib).sum();
            total.is_some_and(|total| taken <= *total)
        })
    }
}
