//! Room for a group of pods in one domain: a node, or the GPUs of one link group of a node.
//!
//! The members of a group are placed one after the other on a copy of the node, as pods are that come alone. If that leaves some
//! without room on a node of at most [`MAX_GPUS`] GPUs, sets of GPUs are tried for each member, so that room is found wherever
//! there is some, until a [`GroupSearch`] has no tries left. All members have the same request. The caller compares nodes.

use std::collections::BTreeMap;
use std::sync::Arc;

use rustc_hash::FxHashMap;

use crate::choice::cost::ChoiceContext;
use crate::choice::gpu_room::{free_whole, share_need};
use crate::choice::node_choice::{choose_devices, score};
use crate::data::holding::{Hints, Placement};
use crate::data::ident::{DeviceId, DeviceType, OwnerId};
use crate::data::inventory::GPUS;
use crate::data::policy::{Policies, Score};
use crate::data::request::{NodeRequest, RequestedGpus};
use crate::state::node::{Host, Node};

/// Most members for which room is looked for; a larger group is refused.
pub const MAX_GROUP: usize = 64;
/// Most GPUs of a node on which sets of GPUs are tried.
const MAX_GPUS: usize = 8;

/// The part of the cluster that all members of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SharedDomain {
    /// One node.
    Node,
    /// The GPUs of one link group of a node. The kinds of link groups, the fastest first, are GPUs that are linked to each other,
    /// of these the ones with more links first; GPUs of one PCIe switch; GPUs of one NUMA node. The first kind counts of which a
    /// link group can hold the group of pods on an empty node.
    Link,
}

/// Equal requests of several pods that have to share a domain.
#[derive(Clone, Copy, Debug)]
pub struct GroupRequest<'a> {
    /// The request of each member.
    pub member: NodeRequest<'a>,
    /// The number of members that need room, at least 1.
    pub n_members: usize,
    /// The number of members that a link group has to hold on an empty node, those that are bound included; it decides which kind
    /// of link group counts.
    pub n_in_link_group: usize,
    /// The domain.
    pub domain: SharedDomain,
    /// Members that hold devices already. Only the link group that has their GPUs has room for the others; the caller asks about
    /// their node alone.
    pub bound: &'a [OwnerId],
    /// The policies for the members' devices, and for the score.
    pub policies: Policies,
}

/// Room for all members of a group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupRoom {
    /// The GPUs of the link group, by minor; `None` if the domain is the whole node.
    pub gpus: Option<Vec<DeviceId>>,
    /// The devices of each member.
    pub placements: Vec<Placement>,
    /// The score of the node for the last member, with all others placed.
    pub score: Score,
}

/// The search for room for one group on many nodes, with the results that nodes share.
#[derive(Debug)]
pub struct GroupSearch {
    /// The number of sets of GPUs that may still be tried.
    n_tries_left: usize,
    /// The link groups of each hardware class, by the number of the class.
    links: FxHashMap<u64, Arc<LinkGroups>>,
}

/// The link groups of a hardware class that count for a group of pods, by the indices of their GPUs.
#[derive(Debug)]
struct LinkGroups {
    groups: Vec<Vec<usize>>,
    /// True if one of them can hold the group on an empty node.
    is_large_enough: bool,
}

impl Default for GroupSearch {
    fn default() -> Self {
        Self {
            n_tries_left: 20_000,
            links: FxHashMap::default(),
        }
    }
}

impl GroupSearch {
    /// The link groups of the fastest kind of which one, on an empty node like this one, has room for
    /// [`GroupRequest::n_in_link_group`] pods; those of all kinds if no kind has such a group.
    fn links_for(
        &mut self,
        node: &Node,
        request: &GroupRequest<'_>,
        context: ChoiceContext<'_>,
    ) -> Arc<LinkGroups> {
        let hardware = node.hardware.as_ref();
        let class = hardware.map_or(u64::MAX, |hardware| hardware.number);
        if let Some(known) = self.links.get(&class) {
            return Arc::clone(known);
        }
        let mut links = LinkGroups {
            groups: Vec::new(),
            is_large_enough: false,
        };
        let whole = GroupRequest {
            n_members: request.n_in_link_group,
            ..*request
        };
        let mut empty = node.emptied();
        // CPU and host memory differ between nodes of one class.
        empty.host = Host::default();
        // A slower kind counts only where the group of pods would not fit a faster one even on an empty node.
        for level in link_levels(node) {
            let fits = |gpus: &Vec<usize>| room_on_gpus(&empty, Some(gpus), &whole, context, self).is_ok();
            links.is_large_enough = level.iter().any(fits);
            if links.is_large_enough {
                links.groups = level;
                break;
            }
            links.groups.extend(level);
        }
        let links = Arc::new(links);
        self.links.insert(class, Arc::clone(&links));
        links
    }
}

/// Room for a group on a node, or else the most members for which one domain of it has room.
pub(crate) fn room_for_group(
    node: &Node,
    request: &GroupRequest<'_>,
    context: ChoiceContext<'_>,
    search: &mut GroupSearch,
) -> Result<GroupRoom, usize> {
    let is_about_gpus = gpus_of_each(request.member.gpus).is_some();
    if request.domain == SharedDomain::Node || !is_about_gpus {
        return room_on_gpus(node, None, request, context, search);
    }
    let links = search.links_for(node, request, context);
    let (mut best, mut most) = (None::<GroupRoom>, 0);
    for gpus in &links.groups {
        if !has_all_bound(node, gpus, request.bound) {
            continue;
        }
        match room_on_gpus(node, Some(gpus), request, context, search) {
            // Room for the members that need it, where none could hold the bound ones too if the node were empty.
            Ok(_) if !links.is_large_enough => most = most.max(request.n_members),
            // Of equal scores the first group wins, so that equal requests get equal answers.
            Ok(room) if best.as_ref().is_none_or(|best| best.score < room.score) => best = Some(room),
            Ok(_) => {}
            Err(n_members) => most = most.max(n_members),
        }
    }
    best.ok_or(most)
}

/// Room for a group on the GPUs at these indices, or on all of a node; else the most members that have room there.
fn room_on_gpus(
    node: &Node,
    gpus: Option<&[usize]>,
    request: &GroupRequest<'_>,
    context: ChoiceContext<'_>,
    search: &mut GroupSearch,
) -> Result<GroupRoom, usize> {
    let n = request.n_members.clamp(1, MAX_GROUP);
    let limit = most_by_amounts(node, gpus, n, context);
    // Free amounts alone decide about most nodes, which need not be copied. A group that is too large is refused anyway.
    if (limit < n && are_amounts_enough(node, request.member)) || request.n_members > MAX_GROUP {
        return Err(limit);
    }
    let mut copy = node.copy_with_hints(|owner| context.hints.counts(owner));
    if let Some(gpus) = gpus {
        copy.offer_only(gpus);
    }
    let (placements, score) = place_members(&copy, limit, request, context, search)?;
    let mut ids = Vec::new();
    for gpu in gpus.into_iter().flatten().filter_map(|at| node.gpus().get(*at)) {
        ids.push(gpu.id.clone());
    }
    Ok(GroupRoom {
        gpus: gpus.is_some().then_some(ids),
        placements,
        score,
    })
}

/// Returns true if all GPUs that bound members hold on the node are among those at the indices `gpus`.
fn has_all_bound(node: &Node, gpus: &[usize], bound: &[OwnerId]) -> bool {
    for held in bound.iter().filter_map(|owner| node.held_by(owner.as_str())) {
        for part in &held.holdings.parts {
            let mut among = gpus.iter().filter_map(|at| node.gpus().get(*at));
            // A part of an unknown GPU may be outside of the group.
            if part.kind == DeviceType::Gpu && !among.any(|gpu| part.device.identifies(gpu)) {
                return false;
            }
        }
    }
    true
}

/// The link groups of a node, by the indices of their GPUs: a list for each kind of link, the fastest kind first.
fn link_levels(node: &Node) -> Vec<Vec<Vec<usize>>> {
    let inventory = &node.inventory;
    let Some(hardware) = &node.hardware else {
        return Vec::new();
    };
    let mut levels = Vec::new();
    let mut n_links: Vec<u32> = inventory.links.iter().map(|group| group.n_links).collect();
    n_links.sort_unstable_by_key(|n| std::cmp::Reverse(*n));
    n_links.dedup();
    for n in n_links {
        let mut level: Vec<Vec<usize>> = Vec::new();
        for group in inventory.links.iter().filter(|group| group.n_links == n) {
            level.push(inventory.indices_of(&group.minors).into_iter().collect());
        }
        levels.push(level);
    }
    let mut switches: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    let mut numas: BTreeMap<u16, Vec<usize>> = BTreeMap::new();
    for (at, location) in hardware.locations_of(GPUS).iter().enumerate() {
        if location.knows_switch {
            switches.entry(location.switch).or_default().push(at);
        }
        if location.knows_numa {
            numas.entry(location.numa).or_default().push(at);
        }
    }
    // Slower than any link, and of both the faster one first: see `SharedDomain::Link`.
    levels.push(switches.into_values().collect());
    levels.push(numas.into_values().collect());
    // The same order for every request, whatever the order of the node's report.
    for level in &mut levels {
        level.sort_unstable();
    }
    levels
}

/// The devices of each member on a copy of a node whose amounts allow `limit` members, and the score for the last one; else the
/// most members that find room one after the other.
fn place_members(
    copy: &Node,
    limit: usize,
    request: &GroupRequest<'_>,
    context: ChoiceContext<'_>,
    search: &mut GroupSearch,
) -> Result<(Vec<Placement>, Score), usize> {
    let n = request.n_members.clamp(1, MAX_GROUP);
    let (host, policy) = (request.member.host, request.policies.node);
    let mut filling = copy.copy();
    let mut placements = Vec::with_capacity(n);
    let mut last_score = Score::default();
    while placements.len() < limit {
        if placements.len() + 1 == n {
            last_score = score(&filling, policy, context).unwrap_or_default();
        }
        let Ok(placement) = choose_devices(&filling, context) else {
            break;
        };
        filling.put_on_copy(&placement, host);
        placements.push(placement);
    }
    if limit < n {
        return Err(placements.len());
    }
    if placements.len() == n {
        return Ok((placements, last_score));
    }
    let Some(placements) = place_on_sets(copy, context, n, 1, search) else {
        return Err(placements.len());
    };
    let mut filling = copy.copy();
    for placement in placements.iter().take(n - 1) {
        filling.put_on_copy(placement, host);
    }
    let last_score = score(&filling, policy, context).unwrap_or_default();
    Ok((placements, last_score))
}

/// Places `n` members on a copy of a node by trying sets of GPUs for each; `None` if there is no room, or no try is left.
///
/// A set is a number with a bit for each of its GPUs. Members are equal, so that each takes a set that is no smaller a number
/// than that of the member before, from `first` on.
fn place_on_sets(
    copy: &Node,
    context: ChoiceContext<'_>,
    n: usize,
    first: u64,
    search: &mut GroupSearch,
) -> Option<Vec<Placement>> {
    if n == 0 {
        return Some(Vec::new());
    }
    let n_gpus = copy.gpus().len();
    let size = gpus_of_each(context.request.gpus)?;
    if n_gpus > MAX_GPUS || most_by_amounts(copy, None, n, context) < n {
        return None;
    }
    let need = match context.request.gpus {
        RequestedGpus::Share(share) => Some(share_need(copy, &share).ok()?),
        RequestedGpus::Whole(_) | RequestedGpus::All { .. } | RequestedGpus::Nothing => None,
    };
    // The GPUs with the free amounts for a share, as a set; all of them if no shares are requested.
    let mut fitting = 0_u64;
    // A copy has only hints that count.
    for (at, row) in copy.rows_with(Hints::Respect).enumerate() {
        let fits = need.is_none_or(|need| need.amounts_on(row.total).within(row.free));
        fitting |= u64::from(fits) << at;
    }
    for set in first..1 << n_gpus {
        if set.count_ones() as usize != size || set & fitting != set {
            continue;
        }
        search.n_tries_left = search.n_tries_left.checked_sub(1)?;
        let mut on_set = copy.copy();
        let indices: Vec<usize> = (0..n_gpus).filter(|at| set & (1 << at) != 0).collect();
        on_set.offer_only(&indices);
        let chosen = choose_devices(&on_set, context);
        let Ok(placement) = chosen else { continue };
        let mut rest = copy.copy();
        rest.put_on_copy(&placement, context.request.host);
        if let Some(mut placements) = place_on_sets(&rest, context, n - 1, set, search) {
            placements.insert(0, placement);
            return Some(placements);
        }
    }
    None
}

/// The number of GPUs of each member; `None` if it takes none.
fn gpus_of_each(gpus: RequestedGpus) -> Option<usize> {
    usize::try_from(gpus.n_gpus()?).ok().filter(|n| *n > 0)
}

/// Returns true if a member fits a node wherever its amounts do: no rule decides about it.
fn are_amounts_enough(node: &Node, request: NodeRequest<'_>) -> bool {
    !node.has_rules && request.constraints.is_none() && request.others.is_empty()
}

/// The most members, up to `n`, that the free CPU and memory of a node and the free amounts of the GPUs at these indices, or of
/// all GPUs, allow. Rules may leave room for fewer.
///
/// `n` members with shares of `k` GPUs each fit if and only if the GPUs together have room for `n * k` shares, where no GPU
/// counts with more than `n` shares: a member takes distinct GPUs.
fn most_by_amounts(node: &Node, gpus: Option<&[usize]>, n: usize, context: ChoiceContext<'_>) -> usize {
    let ChoiceContext { request, hints, .. } = context;
    let n = n.min(request.host.n_within(node.host.free()));
    let is_within = |at: &usize| gpus.is_none_or(|gpus| gpus.contains(at));
    match request.gpus {
        RequestedGpus::Share(share) => {
            let Ok(need) = share_need(node, &share) else {
                return 0;
            };
            let mut n_shares = Vec::with_capacity(node.rows.len());
            for (at, row) in node.rows_with(hints).enumerate() {
                if is_within(&at) {
                    n_shares.push(need.amounts_on(row.total).n_within(row.free));
                }
            }
            for n in (1..=n).rev() {
                let most = n_shares.iter().map(|of_gpu| n.min(*of_gpu));
                if most.sum::<usize>() >= n.saturating_mul(need.devices) {
                    return n;
                }
            }
            0
        }
        RequestedGpus::Whole(each) if node.inventory.serves_vendor => {
            let each = usize::try_from(each.max(1)).unwrap_or(usize::MAX);
            n.min(free_whole(node, hints).filter(is_within).count() / each)
        }
        // The vendor's plugin chooses among all GPUs of the node.
        RequestedGpus::Whole(_) if gpus.is_some() => 0,
        RequestedGpus::Whole(_) | RequestedGpus::All { .. } | RequestedGpus::Nothing => n,
    }
}
