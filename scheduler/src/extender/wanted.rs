//! What a pod wants of every node, and whether a node will do.

use placement::{Asking, Fleet, GpuAsk, NodeId, Policies, Reason, Score};
use proto::node::Node;
use proto::pod::Pod;

use crate::accounting::PodFacts;
use crate::api_server::shorten;
use crate::index::{Index, NodeAsk};
use crate::inventory;

/// What a pod wants of every node.
#[derive(Clone, Debug)]
pub(super) enum Wanted<'a> {
    /// Nothing that is weighed here: every node will do.
    Nothing,
    /// This; of a pod without devices no more than CPU and memory, by which nodes differ and none is refused.
    Room(NodeAsk<'a>),
    /// Something that no node can give, by this rule.
    Impossible(Box<str>),
    /// This very node, which a decision names that is open still.
    Only(Box<str>),
}

/// A node that will do.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fit {
    /// Its place in the fleet, if that matters.
    pub(super) node: Option<NodeId>,
    /// How good it is by policy.
    pub(super) merit: Score,
}

/// Why a node does not do.
#[derive(Clone, Copy, Debug)]
pub(super) struct Miss {
    pub(super) reason: Reason,
    /// Whether we do not know the node: it may be new, and nothing is said about its devices.
    pub(super) unknown: bool,
}

impl<'a> Wanted<'a> {
    /// The rule that the request breaks.
    pub(super) fn rule(&self) -> Option<&str> {
        match self {
            Self::Impossible(rule) => Some(rule),
            _ => None,
        }
    }

    /// The room that it wants, if nodes are weighed by that.
    pub(super) const fn room(&self) -> Option<&NodeAsk<'a>> {
        match self {
            Self::Room(ask) => Some(ask),
            _ => None,
        }
    }

    /// What a pod wants.
    pub(super) fn of(index: &Index, pod: &'a Pod, facts: Option<&PodFacts>) -> Self {
        let ask = facts.map_or(Ok(None), |facts| index.ask(pod.uid(), facts));
        match ask {
            Ok(None) => index.host_ask(pod).map_or(Self::Nothing, Self::Room),
            Ok(Some(ask)) => Self::Room(ask),
            Err(error) => Self::Impossible(shorten(&error.to_string()).into()),
        }
    }

    /// The question, to be put to many nodes; none, if the answer does not depend on what they have.
    pub(super) fn asking<'q>(&'q self, index: &'q Index) -> Option<Asking<'q>> {
        match self {
            Self::Room(ask) => Some(index.asking(ask)),
            Self::Nothing | Self::Impossible(_) | Self::Only(_) => None,
        }
    }

    /// The policies, if the fleet alone says whether a node will do, provided that it has devices.
    pub(super) fn depends_on_the_fleet_alone(&self, index: &Index) -> Option<Policies> {
        match self {
            Self::Room(ask) if index.serves_all(ask) => Some(ask.policies),
            _ => None,
        }
    }

    /// Whether a node will do that has been looked up already.
    #[inline]
    pub(super) fn of_found(
        &self,
        index: &Index,
        name: &str,
        node: Option<NodeId>,
        asking: Option<&mut Asking<'_>>,
    ) -> Result<Fit, Miss> {
        match (self, asking) {
            (Self::Room(ask), Some(asking)) => index
                .judge(name, node, ask, asking)
                .map(|found| {
                    found.map_or_else(Fit::default, |(node, merit)| Fit {
                        node: Some(node),
                        merit,
                    })
                })
                .map_err(|reason| Miss {
                    reason,
                    unknown: reason == Reason::NoDevice && !index.knows_node(name),
                }),
            (Self::Nothing | Self::Room(_), _) => Ok(Fit::default()),
            (Self::Only(only), _) if **only == *name => Ok(Fit::default()),
            (Self::Only(_), _) => Err(Miss {
                reason: Reason::NoDevice,
                unknown: false,
            }),
            (Self::Impossible(_), _) => Err(Miss {
                reason: Reason::InvalidRequest,
                unknown: false,
            }),
        }
    }

    /// Whether a node will do that was sent whole.
    pub(super) fn of_whole(
        &self,
        index: &Index,
        name: &str,
        node: &Node,
        asking: Option<&mut Asking<'_>>,
    ) -> Result<Fit, Miss> {
        match self {
            Self::Room(ask) if !index.knows_node(name) => {
                of_template(index, node, ask).map(|()| Fit::default())
            }
            _ => self.of_found(index, name, index.fleet().node_id(name), asking),
        }
    }
}

/// Judges a node that does not exist yet: an empty one of its capacity.
fn of_template(index: &Index, node: &Node, ask: &NodeAsk<'_>) -> Result<(), Miss> {
    let miss = |reason| Miss {
        reason,
        unknown: true,
    };
    let Some(report) = inventory::of_template(node, index.names()) else {
        return if matches!(ask.gpus, GpuAsk::Share(_) | GpuAsk::All { .. }) {
            Err(miss(Reason::NoDevice))
        } else {
            Ok(())
        };
    };
    if report.opaque && !ask.in_units {
        return Err(miss(Reason::NotServed));
    }
    let mut empty = Fleet::new();
    empty.set_inventory("template", report.inventory);
    let id = empty.node_id("template").ok_or(miss(Reason::NoDevice))?;
    empty
        .fit(id, ask.devices(), placement::Hints::Ignore)
        .map_err(|reason| Miss {
            reason,
            unknown: false,
        })
}
