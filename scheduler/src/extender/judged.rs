//! The verdict on every node of a request, and how it is told.

use placement::{Asking, NodeId, Policies, Reason, Score};
use proto::extender::{ExtenderFilterResult, NodeList, WholeNode};

use super::question::{Names, Nodes};
use super::retries::Variation;
use super::roll::Roll;
use super::standing::{Contest, Order};
use super::wanted::{Fit, Miss, Wanted};
use crate::config::MisfitNodes;
use crate::index::Index;

/// Most bytes that one failed node's entry takes besides its name.
const ENTRY: usize = 96;

/// Nodes that have been judged; `'n` is how long their names last.
pub(super) struct Judged<'n> {
    n_fitting: usize,
    missed: Vec<(usize, Miss)>,
    told: Told<'n>,
}

/// The nodes that fit and are told of.
enum Told<'n> {
    /// All of them, and the last one's place in the fleet.
    All(Vec<usize>, Option<NodeId>),
    /// The best.
    Best(Contest<'n>),
}

/// The places, in a request, of nodes that an answer tells of.
pub(super) struct Verdict {
    fitting: Vec<usize>,
    missed: Vec<(usize, Miss)>,
}

/// The form in which filter reports nodes that do not fit.
#[derive(Clone, Copy, Default)]
pub(super) struct Report<'a> {
    /// The rule that the request breaks, which is reported in place of a reason.
    pub(super) rule: Option<&'a str>,
    /// The form of the report of nodes whose devices have no room: resolvable by eviction or not.
    pub(super) misfits: MisfitNodes,
    /// A node that eviction has helped already, and the reason for which it does not fit yet.
    pub(super) waiting: Option<(&'a str, &'a str)>,
    /// The text that is appended for one node, so that the refusal differs from the one before.
    pub(super) variation: Option<Variation>,
    /// The place of that node in the request.
    pub(super) varied: Option<usize>,
}

impl Report<'_> {
    /// Returns true if kube-scheduler may look for victims on a node.
    fn is_resolvable(&self, name: &str, miss: Miss) -> bool {
        miss.unknown
            || self.waits_for(name).is_some()
            || (self.misfits == MisfitNodes::Resolvable && miss.reason.is_for_want_of_room())
    }

    fn waits_for(&self, name: &str) -> Option<&str> {
        self.waiting
            .filter(|(node, _)| *node == name)
            .map(|(_, text)| text)
    }

    fn suffix(&self, at: usize) -> &'static str {
        self.variation
            .filter(|_| self.varied == Some(at))
            .map_or("", Variation::text)
    }

    fn text(&self, name: &str, miss: Miss) -> &str {
        self.rule
            .or_else(|| self.waits_for(name))
            .unwrap_or(miss.reason.as_str())
    }
}

/// Judges all nodes of a request; tells of all that fit, or of so many that stand first in this order.
pub(super) fn judge<'n>(
    index: &Index,
    wanted: &Wanted<'_>,
    nodes: &'n Nodes<'_>,
    roll: &Roll,
    best: Option<(Order<'_>, usize)>,
) -> Judged<'n> {
    let mut judge = Judge {
        index,
        wanted,
        asking: wanted.asking(index),
        order: None,
        judged: Judged::all(),
    };
    if let Some((order, n_most)) = best {
        judge.order = Some(order);
        judge.judged.told = Told::Best(Contest::of(n_most));
    }
    match nodes {
        Nodes::Names(names) => judge.names(names, roll.is_current(index.fleet())),
        Nodes::Whole(nodes) => judge.whole(nodes),
    }
    judge.judged
}

/// Judges one node after the other.
struct Judge<'q, 'n> {
    index: &'q Index,
    wanted: &'q Wanted<'q>,
    asking: Option<Asking<'q>>,
    order: Option<Order<'q>>,
    judged: Judged<'n>,
}

impl<'n> Judge<'_, 'n> {
    fn names(&mut self, names: &'n Names<'_>, is_current: bool) {
        let policies = self
            .wanted
            .depends_on_the_fleet_alone(self.index)
            .filter(|_| is_current);
        for at in 0..names.len() {
            match policies.and_then(|policies| self.remembered(names, at, policies)) {
                Some(Ok(merit)) if self.has_lost(names, at, merit) => {
                    self.judged.n_fitting += 1;
                    continue;
                }
                // Of nodes without devices more is to be said.
                Some(Err(reason)) if reason != Reason::NoDevice => {
                    self.judged.missed.push((
                        at,
                        Miss {
                            reason,
                            unknown: false,
                        },
                    ));
                    continue;
                }
                _ => {}
            }
            let Some(name) = names.get(at) else { continue };
            let node = if self.asking.is_some() {
                names.node(at, is_current, self.index.fleet())
            } else {
                None
            };
            let verdict = self.wanted.of_found(self.index, name, node, self.asking.as_mut());
            self.push(at, name, verdict);
        }
    }

    /// The verdict on a node, if it is known already.
    #[inline]
    fn remembered(&self, names: &Names<'_>, at: usize, policies: Policies) -> Option<Result<Score, Reason>> {
        self.asking
            .as_ref()?
            .remembered(names.known(at)?.index()?, policies)
    }

    /// Whether a node that is so good stands behind as many as can win.
    #[inline]
    fn has_lost(&self, names: &Names<'_>, at: usize, merit: Score) -> bool {
        match &self.judged.told {
            Told::Best(contest) => contest.is_lost(merit, |last| names.is_behind(at, last)),
            Told::All(..) => false,
        }
    }

    fn whole(&mut self, nodes: &'n NodeList) {
        for (at, node) in nodes.items.iter().enumerate() {
            let name = name_of(node);
            let verdict = self
                .wanted
                .of_whole(self.index, name, &node.node, self.asking.as_mut());
            self.push(at, name, verdict);
        }
    }

    #[inline]
    fn push(&mut self, at: usize, name: &'n str, verdict: Result<Fit, Miss>) {
        let Fit { node, merit } = match verdict {
            Ok(fit) => fit,
            Err(miss) => return self.judged.missed.push((at, miss)),
        };
        self.judged.n_fitting += 1;
        match (&mut self.judged.told, &self.order) {
            (Told::Best(contest), Some(order)) => contest.enter(order.standing(name, merit), at, node),
            (Told::All(fitting, last), _) => {
                fitting.push(at);
                *last = node;
            }
            (Told::Best(_), None) => {}
        }
    }
}

impl Judged<'_> {
    fn all() -> Self {
        Self {
            n_fitting: 0,
            missed: Vec::new(),
            told: Told::All(Vec::new(), None),
        }
    }

    /// Whether no node fits.
    pub(super) fn is_empty(&self) -> bool {
        self.n_fitting == 0
    }

    /// Where room is to be kept: on the node that was picked, or the only one that fits.
    pub(super) fn hinted(&self) -> Option<NodeId> {
        match &self.told {
            Told::All(_, last) => last.filter(|_| self.n_fitting == 1),
            Told::Best(contest) => contest.winner()?.1,
        }
    }

    /// The node that was picked, if others fit that are not told of.
    pub(super) fn picked(&self) -> Option<&str> {
        match &self.told {
            Told::Best(contest) if self.n_fitting > contest.places().count() => Some(contest.winner()?.0),
            _ => None,
        }
    }

    /// What is told, by places alone.
    pub(super) fn verdict(self) -> Verdict {
        let fitting = match self.told {
            Told::All(fitting, _) => fitting,
            Told::Best(contest) => contest.places().collect(),
        };
        Verdict {
            fitting,
            missed: self.missed,
        }
    }
}

impl Verdict {
    /// The answer in the form of the request, and the nodes that do not fit.
    ///
    /// They are listed only if none fits: no caller needs them otherwise. A variation changes the text of one of them.
    pub(super) fn told(
        self,
        nodes: Nodes<'_>,
        size: usize,
        report: Report<'_>,
    ) -> (Vec<u8>, Vec<(usize, Miss)>) {
        let listed = if self.fitting.is_empty() {
            self.missed.as_slice()
        } else {
            &[]
        };
        let varied = listed.iter().find(|(_, miss)| !miss.unknown).map(|(at, _)| *at);
        let report = Report { varied, ..report };
        let json = match nodes {
            Nodes::Names(names) => json_of_names(&names, &self.fitting, listed, size, report),
            Nodes::Whole(nodes) => json_of_nodes(nodes, &self.fitting, listed, report),
        };
        (json, self.missed)
    }
}

fn json_of_names(
    names: &Names<'_>,
    fitting: &[usize],
    listed: &[(usize, Miss)],
    size: usize,
    report: Report<'_>,
) -> Vec<u8> {
    let per_name = size / names.len().max(1) + 3;
    let mut json = Vec::with_capacity(128 + per_name * (fitting.len() + listed.len()) + ENTRY * listed.len());
    json.extend_from_slice(br#"{"Nodes":null,"NodeNames":["#);
    if fitting.iter().copied().eq(0..names.len()) {
        names.write_all(&mut json);
    } else {
        names.write_some(fitting.iter().copied(), &mut json);
    }
    json.extend_from_slice(br#"],"FailedNodes":{"#);
    let is_resolvable =
        |(at, miss): &&(usize, Miss)| report.is_resolvable(names.get(*at).unwrap_or_default(), *miss);
    push_missed(&mut json, names, listed.iter().filter(is_resolvable), report);
    json.extend_from_slice(br#"},"FailedAndUnresolvableNodes":{"#);
    push_missed(
        &mut json,
        names,
        listed.iter().filter(|entry| !is_resolvable(entry)),
        report,
    );
    json.extend_from_slice(br#"},"Error":""}"#);
    json
}

fn push_missed<'m>(
    json: &mut Vec<u8>,
    names: &Names<'_>,
    missed: impl Iterator<Item = &'m (usize, Miss)>,
    report: Report<'_>,
) {
    let rule = report.rule.map(|rule| serde_json::Value::from(rule).to_string());
    let rule = rule
        .as_deref()
        .and_then(|rule| rule.strip_prefix('"')?.strip_suffix('"'));
    for (nth, (at, miss)) in missed.enumerate() {
        if nth > 0 {
            json.push(b',');
        }
        names.write(*at, json);
        json.push(b':');
        // Reasons are our own texts and have nothing in them that JSON would escape.
        json.push(b'"');
        json.extend_from_slice(
            rule.unwrap_or_else(|| report.text(names.get(*at).unwrap_or_default(), *miss))
                .as_bytes(),
        );
        json.extend_from_slice(report.suffix(*at).as_bytes());
        json.push(b'"');
    }
}

/// Nodes that were sent whole go back as they came.
fn json_of_nodes(
    nodes: NodeList,
    fitting: &[usize],
    listed: &[(usize, Miss)],
    report: Report<'_>,
) -> Vec<u8> {
    let names: Vec<String> = nodes.items.iter().map(|node| name_of(node).to_owned()).collect();
    let text = |(at, miss): &(usize, Miss)| {
        let name = names.get(*at).map(String::as_str).unwrap_or_default();
        format!("{}{}", report.text(name, *miss), report.suffix(*at))
    };
    let texts: Vec<String> = listed.iter().map(text).collect();
    let mut result = ExtenderFilterResult::default();
    for ((at, miss), text) in listed.iter().zip(&texts) {
        let Some(name) = names.get(*at) else { continue };
        let is_resolvable = report.is_resolvable(name, *miss);
        let failed = if is_resolvable {
            &mut result.failed_nodes
        } else {
            &mut result.failed_and_unresolvable_nodes
        };
        failed.insert(name, text.as_str());
    }
    let mut items: Vec<Option<WholeNode>> = nodes.items.into_iter().map(Some).collect();
    let items = fitting.iter().filter_map(|at| items.get_mut(*at)?.take());
    result.nodes = Some(NodeList {
        items: items.collect(),
    });
    serde_json::to_vec(&result).unwrap_or_default()
}

fn name_of(node: &WholeNode) -> &str {
    node.node.metadata.name.as_deref().unwrap_or_default()
}
