//! The filter of a member of a group that wishes to be in one domain: on one node, or on one *link group*, GPUs of a node that
//! are linked to each other. A wish requires the domain, or prefers it.
//!
//! At the first member of a scheduling cycle room for the whole group is chosen: the nodes are ranked as for the member alone,
//! and of the first that have room for the group the best is taken, by the score for the last member. Later members take
//! their places from that room. A group that prefers a domain and finds none is placed like any group.

use std::sync::Arc;

use placement::{GroupRequest, GroupRoom, GroupSearch, Hints, NodeId, Reason, Score, SharedDomain};
use proto::pod_group::{DomainPolicy, GroupDomain};

use super::evaluation::{
    Demand, Evaluation, FilterRequest, NodeMisfit, RankKey, Ranker, ReportedNode, evaluate_all,
};
use crate::index::{ChosenRoom, GroupOfPod, Index, MemberOutcome, MemberStep, ResourceDemand, group_members};

/// Most nodes with room for a group that are compared: for each the engine places all members.
const MAX_ROOMS: usize = 16;

/// A node of the request that fits the member alone, and its rank.
type Candidate<'n> = (RankKey<'n>, ReportedNode<'n>);

struct FoundRoom<'n> {
    /// Higher is better: first nodes on which the member has not failed, then those that it does not avoid, then the score.
    rank: (bool, bool, Score),
    reported: ReportedNode<'n>,
    node: NodeId,
    room: GroupRoom,
}

/// The verdict on a member: the evaluation of all nodes, or `None` if they are evaluated as for any pod; the outcome to keep for
/// later members; and the metrics label of the decision for the whole group, unless it was made for an earlier member.
pub(super) type MemberVerdict<'n> = (Option<Evaluation<'n>>, MemberOutcome, Option<&'static str>);

/// A filter request for a member of a group with a wish.
pub(super) struct MemberFilter<'a, 'n> {
    pub(super) index: &'a Index,
    pub(super) request: &'n FilterRequest<'n>,
    pub(super) group: &'a GroupOfPod,
    pub(super) demand: &'a Demand<'a>,
    pub(super) resources: &'a ResourceDemand<'a>,
}

impl<'n> MemberFilter<'_, 'n> {
    /// Evaluates the member by the decision for its group, which is made at the first member.
    pub(super) fn evaluate(&self, ranker: &Ranker<'_>) -> MemberVerdict<'n> {
        match self.index.hints().step(self.group, self.resources.uid) {
            MemberStep::AsAny => (None, MemberOutcome::Unplaced(None), None),
            MemberStep::Refuse(text) => {
                let refused = self.misfits(Arc::clone(&text));
                (Some(refused), MemberOutcome::Unplaced(Some(text)), None)
            }
            MemberStep::Join(node) => self.join(node),
            MemberStep::Choose => self.choose(ranker),
        }
    }

    /// Returns true if members are refused where the group has no room in one domain.
    fn is_required(&self) -> bool {
        self.group.wish.policy == DomainPolicy::Required
    }

    /// The evaluation of a member that fits no node.
    fn misfits(&self, text: Arc<str>) -> Evaluation<'n> {
        let misfit = NodeMisfit::of_known_node(Reason::Together);
        let mut refused = Evaluation {
            is_ranked: true,
            group_text: Some(text),
            ..Evaluation::default()
        };
        for idx in 0..self.request.names.len() {
            refused.refuse(idx, misfit);
        }
        refused
    }

    /// Answers a member with the node on which room is kept for its group.
    fn join(&self, node: NodeId) -> MemberVerdict<'n> {
        let named = self.node_of_request(node);
        if let Some(reported) = named
            && let Some(place) = self.index.place_in_group(self.group, self.resources)
        {
            return (Some(only(reported)), MemberOutcome::Joined(node, place), None);
        }
        if !self.is_required() {
            return (None, MemberOutcome::Unplaced(None), None);
        }
        let domain = self.domain_words();
        let text = match named {
            Some(_) => format!("the {domain} on which the pod's group has room has none for this pod"),
            None => format!(
                "the node on which the pod's group has room on one {domain} is not among those asked about"
            ),
        };
        // An outcome without a text refuses this member alone.
        (
            Some(self.misfits(text.into())),
            MemberOutcome::Unplaced(None),
            None,
        )
    }

    /// The node in the request, if the request names it and its device plugin can serve the member.
    fn node_of_request(&self, node: NodeId) -> Option<ReportedNode<'n>> {
        let view = self.index.fleet().view(node)?;
        let mut names = self.request.names.iter().enumerate();
        let (idx, name) = names.find(|(_, name)| *name == view.name())?;
        self.index.filter().check_served(name, self.resources).ok()?;
        Some(ReportedNode {
            idx,
            name,
            node: Some(node),
            score: Score::default(),
        })
    }

    /// Chooses room for the whole group in the first of [`Self::domains`] for which any node has room, on the best such node.
    fn choose(&self, ranker: &Ranker<'_>) -> MemberVerdict<'n> {
        let members = group_members::to_place(self.index, self.group, self.resources);
        let mut most = 0;
        // Members that are bound on several nodes can share no domain any more.
        if !members.is_apart {
            let candidates = self.candidates(ranker, members.node.as_deref());
            let mut search = GroupSearch::default();
            for (domain, decision) in self.domains() {
                let request = GroupRequest {
                    member: self.resources.devices(),
                    n_members: members.n_alike,
                    n_in_link_group: members.n_in_link_group,
                    domain,
                    bound: &members.bound,
                    policies: self.resources.policies,
                };
                match self.best_room(&candidates, &request, &mut search) {
                    Ok(found) => {
                        let chosen = ChosenRoom {
                            node: found.node,
                            room: found.room,
                            is_for_alike: members.are_known,
                        };
                        let evaluation = Some(only(found.reported));
                        return (evaluation, MemberOutcome::Chosen(chosen), Some(decision));
                    }
                    Err(n_members) => most = most.max(n_members),
                }
            }
        }
        if !self.is_required() {
            return (None, MemberOutcome::Unplaced(None), Some("any"));
        }
        let (domain, asked, n) = (self.domain_words(), self.resources.asked(), members.n_alike);
        let text: Arc<str> = if members.is_apart {
            format!("the members of the pod's group that are bound are not on one {domain}").into()
        } else {
            format!("no {domain} has room for {n} pods of {asked}; the largest has room for {most}").into()
        };
        let refused = self.misfits(Arc::clone(&text));
        (
            Some(refused),
            MemberOutcome::Unplaced(Some(text)),
            Some("refused"),
        )
    }

    /// The domains in which room is looked for, each with its name in metrics as the outcome.
    fn domains(&self) -> Vec<(SharedDomain, &'static str)> {
        let (link, node) = (SharedDomain::Link, SharedDomain::Node);
        match (self.group.wish.domain, self.is_required()) {
            (GroupDomain::Any, _) => Vec::new(),
            (GroupDomain::Node, _) => vec![(node, "node")],
            (GroupDomain::Link, true) => vec![(link, "link")],
            // Where no link group has room, one node is nearer to the wish than several.
            (GroupDomain::Link, false) => vec![(link, "link"), (node, "node")],
        }
    }

    /// The wished domain in texts of refusals.
    fn domain_words(&self) -> &'static str {
        match self.group.wish.domain {
            GroupDomain::Link => "link group",
            GroupDomain::Node | GroupDomain::Any => "node",
        }
    }

    /// The nodes that fit the member alone, best first; only the node on which members are bound, if there are any. Without nodes
    /// whose device plugin has just come back, which take few pods at a time.
    fn candidates(&self, ranker: &Ranker<'_>, only_node: Option<&str>) -> Vec<Candidate<'n>> {
        let mut candidates = Vec::new();
        for reported in evaluate_all(self.index, self.demand, self.request, None).reported {
            let is_allowed = only_node.is_none_or(|only| only == reported.name);
            if is_allowed && reported.node.is_some() && !self.index.filter().is_on_trial(reported.name) {
                candidates.push((ranker.rank(reported.name, reported.score), reported));
            }
        }
        // Unstable, since no two nodes have the same rank.
        candidates.sort_unstable_by_key(|(rank, _)| *rank);
        candidates
    }

    /// The best room of the first candidates that have any, or else the most members for which one domain has room.
    fn best_room(
        &self,
        candidates: &[Candidate<'n>],
        request: &GroupRequest<'_>,
        search: &mut GroupSearch,
    ) -> Result<FoundRoom<'n>, usize> {
        let hints = Hints::RespectOthers(self.resources.uid);
        let mut best: Option<FoundRoom<'n>> = None;
        let (mut n_rooms, mut most) = (0, 0);
        for (rank, reported) in candidates {
            let Some(node) = reported.node else { continue };
            let room = match self.index.fleet().room_for_group(node, request, hints, search) {
                Ok(room) => room,
                Err(n_members) => {
                    most = most.max(n_members);
                    continue;
                }
            };
            let found = FoundRoom {
                rank: (!rank.has_failed, !rank.is_avoided, room.score),
                reported: *reported,
                node,
                room,
            };
            // Of equal rooms the first stays, which is the better node for the member alone.
            if best.as_ref().is_none_or(|best| best.rank < found.rank) {
                best = Some(found);
            }
            n_rooms += 1;
            if n_rooms == MAX_ROOMS {
                break;
            }
        }
        best.ok_or(most)
    }
}

/// The evaluation with one node that fits.
fn only(reported: ReportedNode<'_>) -> Evaluation<'_> {
    Evaluation {
        n_fitting: 1,
        reported: vec![reported],
        is_ranked: true,
        ..Evaluation::default()
    }
}
