//! `POST plan`: the moves by which GPUs become empty, or free memory comes together.
//!
//! A plan takes up to seconds, and a read lock as long would hold up watches and with them filters. So the nodes are copied into
//! a fleet of their own under many short read locks, and searched without a lock. A pod that moves meanwhile may be on two nodes
//! of the copy, or on none: the answer has the number of changes before and after. Each move is checked again when it is made.
//!
//! A move ends a *holder*, a pod that holds devices, and its controller creates a *successor*. kube-scheduler's sums of other
//! resources than CPU and memory, ports, spreading and affinity to pods are not evaluated.

use std::collections::BTreeMap;
use std::hash::{Hash, Hasher};
use std::sync::Arc;

use placement::{Fleet, Goal, Holder, Limits, NodeId, NodeView, Obstacle, OwnerId, Plan, PlanError};
use proto::memory_text::memory_text;
use proto::pod::NodeSelector;
use proto::read_api::{
    LeftPod, MAX_AFFINITY_PARTS, MAX_PLANNED_MOVES, MAX_PODS_WITH_VOLUMES, PlanAnswer, PlanGoal, PlanPrice,
    PlanRequest, PlannedMove, PodVolumes, VERSION,
};
use rustc_hash::{FxHashMap, FxHasher};
use rustix::process::setpriority_process;
use tracing::debug;

use crate::index::{HolderFacts, Index, ResourceDemand, Shared, plan_facts};
use crate::kube_scheduler::PodRules;

const NODES_PER_LOCK: usize = 4;
const HOLDERS_PER_LOCK: usize = 16;
/// Pairs of nodes and kinds of successors that are compared under one read lock, if no volume has node affinity.
const PAIRS_PER_LOCK: usize = 256;
/// The number of such pairs that take as long as one part of a volume's node affinity, which goes through the labels of the node.
const PAIRS_PER_PART: usize = 4;
/// The niceness of a thread that searches, of 0 to 19.
const SEARCH_NICENESS: i32 = 10;

/// The reason for which a plan request is not answered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanRequestError {
    /// A part of the request breaks a limit, names a node that does not exist, or no plan can exist for the goal.
    #[error("{0}")]
    Refused(String),
    /// The caller has left before the plan was made.
    #[error("the caller has left")]
    CallerLeft,
}

/// The text of an error of the engine, with amounts as people read them.
fn text(error: &PlanError) -> String {
    match error {
        PlanError::TooLarge { bytes, largest } => format!(
            "{} is more than any GPU has: the largest has {}",
            memory_text(*bytes),
            memory_text(*largest)
        ),
        PlanError::TooMany { n_gpus, bytes, most } => format!(
            "no node has {n_gpus} GPUs of {}: the most is {most}",
            memory_text(*bytes)
        ),
        PlanError::Nothing { largest } => format!(
            "0 bytes or 0 GPUs are asked for: the largest GPU has {}",
            memory_text(*largest)
        ),
        other => other.to_string(),
    }
}

struct PlanInput {
    fleet: Fleet,
    /// Each node by its identifier in the index and in the copy.
    nodes: Vec<(NodeId, NodeId)>,
    holders: Vec<HolderFacts>,
}

/// The key of holders whose successors may go to the same nodes.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct SuccessorKind<'a> {
    /// The address of the [`PodRules`], which pods of one controller share.
    rules: usize,
    isolation: Option<Box<str>>,
    in_units: bool,
    volumes: &'a [NodeSelector],
}

/// The nodes that successors of one kind may go to.
struct AllowedNodes<'a> {
    rules: &'a PodRules,
    demand: &'a ResourceDemand<'static>,
    volumes: &'a [NodeSelector],
    /// In rising order.
    nodes: Vec<NodeId>,
}

/// The plan for a goal. `now` is in unix seconds; `before_search` runs between the last lock and the search (`give_way`).
pub fn plan(
    index: &Shared<Index>,
    request: &PlanRequest,
    now: u64,
    has_left: &dyn Fn() -> bool,
    before_search: impl FnOnce(),
) -> Result<PlanAnswer, PlanRequestError> {
    let max_moves = request.limits.max_moves;
    if max_moves > MAX_PLANNED_MOVES {
        return Err(PlanRequestError::Refused(format!(
            "maxMoves: {max_moves} is more than {MAX_PLANNED_MOVES}, the most of one plan"
        )));
    }
    check_volumes(&request.limits.volumes)?;
    let generation = index.read().fleet().n_changes();
    let reader = Reader { index, has_left };
    let input = PlanInput::read(reader, request, i64::try_from(now).unwrap_or(i64::MAX))?;
    let kinds = input.allowed_nodes(reader, &request.limits.volumes)?;
    let generation_after = index.read().fleet().n_changes();
    let mut holders = Vec::with_capacity(input.holders.len());
    for facts in &input.holders {
        holders.push(input.holder(facts, &kinds, &request.limits.volumes));
    }
    let limits = Limits {
        max_moves,
        min_run_seconds: request.limits.min_run_seconds,
    };
    before_search();
    let found = input.plan(&request.goal, &holders, limits)?;
    let mut answer = input.answer(&found);
    (answer.generation, answer.generation_after) = (generation, generation_after);
    answer.plan_id = plan_id(&request.goal, &answer);
    Ok(answer)
}

/// Raises the niceness of this thread, which must hold no lock then: others would wait for it.
pub(super) fn give_way() {
    if let Err(error) = setpriority_process(None, SEARCH_NICENESS) {
        debug!(%error, "a plan is searched for at the priority of filters");
    }
}

/// Refuses volumes of more pods, or with longer node affinity, than can be compared with all nodes in a short time.
fn check_volumes(volumes: &PodVolumes) -> Result<(), PlanRequestError> {
    if volumes.len() > MAX_PODS_WITH_VOLUMES {
        return Err(PlanRequestError::Refused(format!(
            "volumes: {} pods are more than {MAX_PODS_WITH_VOLUMES}, the most of one plan",
            volumes.len()
        )));
    }
    let parts = volumes.iter().map(|(uid, selectors)| (uid, n_parts(selectors)));
    match parts.max_by_key(|(_, n_parts)| *n_parts) {
        Some((uid, n_parts)) if n_parts > MAX_AFFINITY_PARTS => Err(PlanRequestError::Refused(format!(
            "volumes: the node affinity of pod {uid:?} has {n_parts} selectors, terms, requirements and values, and at \
             most {MAX_AFFINITY_PARTS} may be"
        ))),
        _ => Ok(()),
    }
}

fn n_parts(selectors: &[NodeSelector]) -> usize {
    selectors.iter().map(NodeSelector::n_parts).sum()
}

/// A number that equal plans have in common.
fn plan_id(goal: &PlanGoal, answer: &PlanAnswer) -> String {
    let mut hasher = FxHasher::default();
    format!("{goal:?} {:?} {:?}", answer.moves, answer.left).hash(&mut hasher);
    format!("{:016x}", hasher.finish())
}

/// Returns true if a plan for the goal may move holders of the node of this name.
fn concerns(goal: &PlanGoal, name: &str) -> bool {
    match goal {
        PlanGoal::EmptyNode { node } | PlanGoal::EmptyGpus { node, .. } => node == name,
        PlanGoal::Free { nodes: None, .. } | PlanGoal::Join {} => true,
        PlanGoal::Free {
            nodes: Some(nodes), ..
        } => nodes.iter().any(|node| node == name),
    }
}

/// Reads the index under short locks, until the caller leaves.
#[derive(Clone, Copy)]
struct Reader<'a> {
    index: &'a Shared<Index>,
    has_left: &'a dyn Fn() -> bool,
}

impl Reader<'_> {
    /// Runs `read` under a lock of its own; an error if the caller has left.
    fn read<T>(self, read: impl FnOnce(&Index) -> T) -> Result<T, PlanRequestError> {
        if (self.has_left)() {
            return Err(PlanRequestError::CallerLeft);
        }
        Ok(read(&self.index.read()))
    }
}

impl PlanInput {
    /// Copies all nodes, and reads the holders of those that the goal is about.
    fn read(reader: Reader<'_>, request: &PlanRequest, now: i64) -> Result<Self, PlanRequestError> {
        let (fleet, ids) = reader.read(|index| {
            let ids: Vec<NodeId> = index.fleet().node_versions().map(|(id, _)| id).collect();
            (index.fleet().without_nodes(), ids)
        })?;
        let mut input = Self {
            fleet,
            nodes: Vec::with_capacity(ids.len()),
            holders: Vec::new(),
        };
        let frees_memory = matches!(request.goal, PlanGoal::Free { .. } | PlanGoal::Join {});
        for chunk in ids.chunks(NODES_PER_LOCK) {
            let copies = reader.read(|index| {
                let mut copies = Vec::with_capacity(chunk.len());
                for id in chunk {
                    let (Some(mut copy), Some(view)) =
                        (index.fleet().copy_node(*id), index.fleet().view(*id))
                    else {
                        continue;
                    };
                    // Free memory of a node that takes no pods is of no use to them.
                    if frees_memory && index.takes_no_pods(view.name()) {
                        copy.close_gpus();
                    }
                    copies.push((*id, copy));
                }
                copies
            })?;
            for (id, copy) in copies {
                input.nodes.push((id, input.fleet.insert(copy)));
            }
        }
        let nodes = input.fleet.nodes();
        let concerned = nodes.filter(|view| concerns(&request.goal, view.name()));
        let held = concerned.flat_map(NodeView::held);
        let mut owners: Vec<OwnerId> = held.map(|held| held.owner.clone()).collect();
        owners.sort_unstable();
        owners.dedup();
        for chunk in owners.chunks(HOLDERS_PER_LOCK) {
            input.holders.extend(reader.read(|index| {
                let holder = |owner: &OwnerId| plan_facts::holder(index, owner.as_str(), now);
                chunk.iter().filter_map(holder).collect::<Vec<_>>()
            })?);
        }
        // A pod whose volumes the caller does not name, or whose disruption budgets are used up, stays too.
        for holder in &mut input.holders {
            if holder.stays.is_some() {
                continue;
            }
            let volumes = request.limits.volumes.get(holder.owner.as_str());
            holder.stays = if holder.has_claims && volumes.is_none() {
                Some(Obstacle::Volume)
            } else {
                holder.protection.take()
            };
        }
        Ok(input)
    }

    /// The nodes that the successors of the holders may go to, by kind.
    fn allowed_nodes<'a>(
        &'a self,
        reader: Reader<'_>,
        volumes: &'a PodVolumes,
    ) -> Result<FxHashMap<SuccessorKind<'a>, AllowedNodes<'a>>, PlanRequestError> {
        let mut kinds = FxHashMap::default();
        for facts in &self.holders {
            if let (Some(kind), Some(rules)) = (kind(facts, volumes), &facts.rules) {
                kinds.entry(kind).or_insert(AllowedNodes {
                    rules,
                    demand: &facts.demand,
                    volumes: volumes_of(facts, volumes),
                    nodes: Vec::new(),
                });
            }
        }
        let mut all: Vec<&mut AllowedNodes<'a>> = kinds.values_mut().collect();
        let longest = all.iter().map(|allowed| n_parts(allowed.volumes)).max();
        let n_pairs = (PAIRS_PER_LOCK / (1 + PAIRS_PER_PART * longest.unwrap_or(0))).max(1);
        for some in all.chunks_mut(n_pairs) {
            for chunk in self.nodes.chunks((n_pairs / some.len()).max(1)) {
                reader.read(|index| {
                    for (id, copied) in chunk {
                        let Some(view) = index.fleet().view(*id) else {
                            continue;
                        };
                        for allowed in &mut *some {
                            if plan_facts::allows_successor(
                                index,
                                view.name(),
                                allowed.rules,
                                allowed.demand,
                                allowed.volumes,
                            ) {
                                allowed.nodes.push(*copied);
                            }
                        }
                    }
                })?;
            }
        }
        for allowed in all {
            allowed.nodes.sort_unstable();
        }
        Ok(kinds)
    }

    /// A holder in the engine's terms, with the nodes that its successor may go to.
    fn holder<'a>(
        &self,
        facts: &'a HolderFacts,
        kinds: &'a FxHashMap<SuccessorKind<'a>, AllowedNodes<'a>>,
        volumes: &'a PodVolumes,
    ) -> Holder<'a> {
        let allowed = kind(facts, volumes).and_then(|kind| kinds.get(&kind));
        let nodes = allowed.map_or(&[][..], |allowed| &allowed.nodes);
        let is_own = |id: &NodeId| {
            let mut held = self.fleet.view(*id).into_iter().flat_map(NodeView::held);
            held.any(|held| held.owner == facts.owner)
        };
        let has_volumes = !volumes_of(facts, volumes).is_empty();
        let is_bound = has_volumes && nodes.iter().all(is_own);
        Holder {
            owner: facts.owner.clone(),
            request: facts.demand.devices(),
            policies: facts.demand.policies,
            // The engine compares lists of nodes, and all of them are none.
            nodes: (nodes.len() < self.nodes.len()).then_some(nodes),
            priority: facts.priority,
            run_seconds: facts.run_seconds,
            stays: match &facts.stays {
                // No room in the budget lets such a pod move.
                None | Some(Obstacle::Budget { .. }) if is_bound => Some(Obstacle::BoundVolume),
                stays => stays.clone(),
            },
        }
    }

    fn plan(
        &self,
        goal: &PlanGoal,
        holders: &[Holder<'_>],
        limits: Limits,
    ) -> Result<Plan, PlanRequestError> {
        let all: Vec<NodeId>;
        let goal = match goal {
            PlanGoal::EmptyNode { node } => Goal::EmptyNode(self.node(node)?),
            PlanGoal::EmptyGpus { node, gpus } => Goal::EmptyGpus(self.node(node)?, gpus),
            PlanGoal::Free { bytes, gpus, nodes } => {
                all = match nodes {
                    // A selection may have nodes without GPUs.
                    Some(nodes) => nodes.iter().filter_map(|name| self.node(name).ok()).collect(),
                    None => self.nodes.iter().map(|(_, copied)| *copied).collect(),
                };
                Goal::Free {
                    bytes: *bytes,
                    n_gpus: *gpus,
                    nodes: &all,
                }
            }
            PlanGoal::Join {} => Goal::Join,
        };
        let found = placement::plan(&self.fleet, goal, holders, limits);
        found.map_err(|error| PlanRequestError::Refused(text(&error)))
    }

    fn node(&self, name: &str) -> Result<NodeId, PlanRequestError> {
        let view = self.fleet.node_id(name).and_then(|id| self.fleet.view(id));
        match view.and_then(|view| Some((view.id(), view.inventory()?))) {
            Some((id, inventory)) if !inventory.gpus.is_empty() => Ok(id),
            _ => Err(PlanRequestError::Refused(format!(
                "there is no node {name:?} with GPUs; {}",
                placement::nodes_with_gpus(&self.fleet)
            ))),
        }
    }

    fn answer(&self, plan: &Plan) -> PlanAnswer {
        let pods: BTreeMap<&OwnerId, &HolderFacts> =
            self.holders.iter().map(|facts| (&facts.owner, facts)).collect();
        let name_of = |owner: &OwnerId| match pods.get(owner) {
            Some(facts) => (facts.namespace.to_string(), facts.name.to_string()),
            None => Default::default(),
        };
        let node_name = |id: NodeId| self.fleet.view(id).map_or("", NodeView::name).to_owned();
        let mut answer = PlanAnswer {
            api_version: VERSION.to_owned(),
            reached: plan.is_reached,
            gain: plan.gain_bytes,
            price: PlanPrice {
                restarts: plan.price.n_restarts,
                gib_hours: plan.price.gib_hours(),
            },
            ..PlanAnswer::default()
        };
        for made in &plan.moves {
            let (namespace, name) = name_of(&made.owner);
            let mut to_gpus: Vec<u32> = made.placement.gpus().map(|share| share.minor).collect();
            to_gpus.sort_unstable();
            answer.moves.push(PlannedMove {
                namespace,
                name,
                uid: made.owner.to_string(),
                from: node_name(made.from),
                from_gpus: made.from_gpus.clone(),
                to: node_name(made.to),
                to_gpus,
            });
        }
        for (owner, obstacle) in &plan.left {
            let (namespace, name) = name_of(owner);
            answer.left.push(LeftPod {
                namespace,
                name,
                uid: owner.to_string(),
                reason: obstacle.to_string(),
                volumes: *obstacle == Obstacle::Volume,
                temporary: matches!(
                    obstacle,
                    Obstacle::Budget { .. } | Obstacle::Leaving | Obstacle::Binding
                ),
            });
        }
        answer
    }
}

/// The kind of a holder; `None` for one that stays.
fn kind<'a>(facts: &HolderFacts, volumes: &'a PodVolumes) -> Option<SuccessorKind<'a>> {
    let rules = facts.rules.as_ref()?;
    Some(SuccessorKind {
        rules: Arc::as_ptr(rules).addr(),
        isolation: facts.demand.isolation.clone(),
        in_units: facts.demand.in_units,
        volumes: volumes_of(facts, volumes),
    })
}

/// The node affinity of the volumes of a holder, as far as the request names it.
fn volumes_of<'a>(facts: &HolderFacts, volumes: &'a PodVolumes) -> &'a [NodeSelector] {
    let known = volumes.get(facts.owner.as_str()).filter(|_| facts.has_claims);
    known.map_or(&[], Vec::as_slice)
}

#[cfg(test)]
mod tests {
    use rustix::process::getpriority_process;

    use super::*;

    #[test]
    fn a_thread_gives_way() {
        let niceness = std::thread::spawn(|| {
            give_way();
            getpriority_process(None).unwrap()
        });
        assert_eq!(niceness.join().unwrap(), SEARCH_NICENESS);
    }
}
