//! The rules and the rank, for whole sets.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use placement::{DevicePolicy, Exclusion, Scope, Strategy};

use super::machine::{Part, Query, Row, function};

/// Devices, holdings and request of one type.
struct Devices<'a> {
    parts: &'a [Part],
    is_gpu: bool,
    /// Requested number, and percent of each.
    n: usize,
    each: i64,
    takes_all: bool,
    /// Holdings: percent by minor.
    held: Vec<BTreeMap<u32, i64>>,
    keeps: Vec<Option<Exclusion>>,
    used_functions: BTreeSet<String>,
}

/// The switch of a device; an unknown one is the device's own.
fn switch(part: &Part, at: u32, is_gpu: bool) -> String {
    match part.place {
        (numa, Some(switch)) => format!("{numa:?} {switch}"),
        (_, None) => format!("own {is_gpu} {at}"),
    }
}

fn numa(part: &Part, at: u32, is_gpu: bool) -> String {
    match part.place {
        (Some(numa), _) => format!("numa {numa}"),
        (None, Some(switch)) => format!("of {switch}"),
        (None, None) => format!("own {is_gpu} {at}"),
    }
}

impl Devices<'_> {
    fn part(&self, at: u32) -> &Part {
        &self.parts[at as usize]
    }

    fn minors(&self) -> std::ops::Range<u32> {
        0..u32::try_from(self.parts.len()).unwrap()
    }

    fn switch(&self, at: u32) -> String {
        switch(self.part(at), at, self.is_gpu)
    }

    fn numa(&self, at: u32) -> String {
        numa(self.part(at), at, self.is_gpu)
    }

    fn free(&self, at: u32) -> i64 {
        (100 - self.held.iter().filter_map(|held| held.get(&at)).sum::<i64>()).max(0)
    }

    fn is_held(&self, at: u32) -> bool {
        self.held.iter().any(|held| held.contains_key(&at))
    }

    /// Returns true if exclusive use leaves a device.
    fn is_permitted(&self, at: u32, own: Option<Exclusion>) -> bool {
        let touches = |held: &BTreeMap<u32, i64>, exclusion| {
            held.keys()
                .filter(|other| self.minors().contains(*other))
                .any(|other| match exclusion {
                    Exclusion::Device => *other == at,
                    Exclusion::Switch => self.switch(*other) == self.switch(at),
                })
        };
        let kept = self
            .held
            .iter()
            .zip(&self.keeps)
            .any(|(held, keeps)| keeps.is_some_and(|keeps| touches(held, keeps)));
        !kept && own.is_none_or(|own| !self.held.iter().any(|held| touches(held, own)))
    }

    fn free_function(&self, at: u32) -> Option<String> {
        (0..self.part(at).n_functions)
            .map(|nth| function(at, nth))
            .find(|function| !self.used_functions.contains(function))
    }

    fn has_room(&self, at: u32) -> bool {
        self.part(at).healthy && self.free(at) >= self.each && (self.each > 0 || !self.is_held(at))
    }
}

pub(super) fn best(query: &Query, policy: DevicePolicy) -> Option<super::Choice> {
    let gpus = Machine::gpus(query);
    let nics = Machine::nics(query)?;
    let (asked, mut gpu_choice, mut nic_choice) = (&query.asked, Vec::new(), Vec::new());
    let gpu_label = asked.gpu_label;
    let gpu_candidates: Vec<u32> = gpus
        .minors()
        .filter(|at| gpus.has_room(*at) && gpu_label.is_none_or(|label| gpus.part(*at).label == label))
        .filter(|at| gpus.is_permitted(*at, asked.keeps[0]) && gpus.part(*at).limits >= asked.limits())
        .collect();
    let selected: Vec<u32> = nics
        .minors()
        .filter(|at| asked.nic_label.is_none_or(|label| nics.part(*at).label == label))
        .collect();
    let usable = |at: &u32| {
        nics.has_room(*at)
            && nics.is_permitted(*at, asked.keeps[1])
            && (!asked.functions || nics.free_function(*at).is_some())
    };
    let nic_candidates: Vec<u32> = selected.iter().copied().filter(usable).collect();
    let asks = (asked.gpus.is_some(), asked.nics.is_some());
    let machine = Machine { query, policy };
    let choices = if asks.0 {
        machine.choices(&gpus, &gpu_candidates)
    } else {
        Vec::new()
    };
    let is_joint = asks == (true, true) && asked.joint.is_some() && !nics.takes_all;
    if asks.1 && nics.takes_all {
        if selected.is_empty() || selected != nic_candidates {
            return None;
        }
        nic_choice = selected;
    }
    if is_joint {
        let (nics_lead, same_switch) = asked.joint?;
        let (lead, follow) = if nics_lead { (&nics, &gpus) } else { (&gpus, &nics) };
        let best = machine.joint(lead, follow, &nic_candidates, &choices, same_switch)?;
        (gpu_choice, nic_choice) = if nics_lead { (best.1, best.0) } else { best };
    } else {
        if asks.0 {
            gpu_choice = machine.alone(&gpus, &choices)?;
        }
        if asks.1 && !nics.takes_all {
            let all = [Allowed {
                of: nic_candidates,
                score: 0,
                partition: None,
            }];
            nic_choice = machine.alone(&nics, &all)?;
        }
    }
    let function = |at: &u32| (*at, nics.free_function(*at).filter(|_| asked.functions));
    Some((gpu_choice, nic_choice.iter().map(function).collect()))
}

/// Devices to choose from, and the rank of their partition.
struct Allowed {
    of: Vec<u32>,
    score: usize,
    /// Place among the partitions.
    partition: Option<usize>,
}

struct Machine<'a> {
    query: &'a Query,
    policy: DevicePolicy,
}

fn subsets(of: &[u32]) -> impl Iterator<Item = Vec<u32>> {
    (0_u32..1 << of.len()).map(move |bits| {
        (0..)
            .zip(of)
            .filter(|(at, _)| bits >> at & 1 == 1)
            .map(|(_, one)| *one)
            .collect()
    })
}

fn groups<K: Ord>(of: &[u32], key: impl Fn(u32) -> K) -> BTreeSet<K> {
    of.iter().map(|at| key(*at)).collect()
}

type Alone = (Reverse<u32>, Reverse<u32>, usize, usize, usize, Vec<u32>);

impl Machine<'_> {
    fn gpus(query: &Query) -> Devices<'_> {
        let (n, each) = query.asked.gpus.map_or((0, 0), |(n, percent)| {
            (n as usize, if percent > 100 { 0 } else { i64::from(percent) })
        });
        let held = query.owners.iter().map(|owner| {
            owner
                .gpus
                .iter()
                .map(|(at, percent)| (*at, i64::from(*percent)))
                .collect()
        });
        let keeps = query.owners.iter().map(|owner| owner.keeps[0]).collect();
        let used_functions = BTreeSet::new();
        Devices {
            parts: &query.gpus,
            is_gpu: true,
            n,
            each,
            takes_all: false,
            held: held.collect(),
            keeps,
            used_functions,
        }
    }

    /// `None` if the amount is neither a part of a NIC nor a number of whole ones.
    fn nics(query: &Query) -> Option<Devices<'_>> {
        let amount = i64::try_from(query.asked.nics.unwrap_or(0)).ok()?;
        let (n, each, takes_all) = match query.asked.strategy {
            _ if amount > 100 => (amount / 100, 100, false),
            Some(Strategy::ApplyForAll) => (0, amount, true),
            Some(Strategy::RequestsAsCount) if query.asked.keeps[1] == Some(Exclusion::Device) => {
                (amount, 100, false)
            }
            Some(Strategy::RequestsAsCount) => (amount, 1, false),
            None => (1, amount, false),
        };
        let held = |owner: &super::machine::Owner| {
            owner
                .nics
                .iter()
                .map(|(at, amount, _)| (*at, i64::try_from(*amount).unwrap()))
                .collect()
        };
        let functions = query.owners.iter().flat_map(|owner| &owner.nics);
        Some(Devices {
            parts: &query.nics,
            is_gpu: false,
            n: usize::try_from(n).ok()?,
            each,
            takes_all,
            held: query.owners.iter().map(held).collect(),
            keeps: query.owners.iter().map(|owner| owner.keeps[1]).collect(),
            used_functions: functions
                .filter_map(|(nic, _, at)| Some(function(*nic, (*at)?)))
                .collect(),
        })
    }

    fn is_whole(&self) -> bool {
        self.query.asked.gpus.is_some_and(|(_, percent)| percent >= 100)
    }

    /// Partitions whose GPUs all exist, are healthy and unused.
    fn whole_partitions(&self, gpus: &Devices<'_>) -> Vec<&Row> {
        let is_free = |at: &u32| gpus.minors().contains(at) && gpus.part(*at).healthy && !gpus.is_held(*at);
        let all = self.query.table.iter().flat_map(|(_, all)| all);
        all.filter(|(minors, ..)| minors.iter().all(is_free)).collect()
    }

    fn scopes(&self, gpus: &Devices<'_>, candidates: &[u32]) -> Vec<Vec<u32>> {
        let known: Vec<u32> = candidates
            .iter()
            .copied()
            .filter(|at| gpus.part(*at).place != (None, None))
            .collect();
        let by = |key: &dyn Fn(u32) -> String, of: &[u32]| -> Vec<Vec<u32>> {
            groups(of, key)
                .iter()
                .map(|group| of.iter().copied().filter(|at| key(*at) == *group).collect())
                .collect()
        };
        let with_switch: Vec<u32> = known
            .iter()
            .copied()
            .filter(|at| gpus.part(*at).place.1.is_some())
            .collect();
        match self.query.asked.scope {
            None | Some(Scope::Machine) => vec![candidates.to_vec()],
            Some(Scope::Numa) => by(&|at| gpus.numa(at), &known),
            Some(Scope::Switch) => by(&|at| gpus.switch(at), &with_switch),
            Some(Scope::Device) => known.into_iter().map(|at| vec![at]).collect(),
        }
    }

    /// The sets of GPUs to choose from.
    fn choices(&self, gpus: &Devices<'_>, candidates: &[u32]) -> Vec<Allowed> {
        let scopes = self.scopes(gpus, candidates);
        let (asked, table) = (&self.query.asked, self.query.table.as_ref());
        let is_binding = self.is_whole()
            && (asked.partition.is_some() || table.is_some_and(|(is_binding, _)| *is_binding));
        let mut choices = Vec::new();
        if let Some((_, all)) = table.filter(|_| self.is_whole()) {
            let of_size: Vec<_> = all.iter().filter(|(minors, ..)| minors.len() == gpus.n).collect();
            let best = of_size.iter().map(|(.., score)| *score).max();
            let (restricted, least) = asked.partition.unwrap_or((false, None));
            let whole = self.whole_partitions(gpus);
            let mut usable: Vec<_> = of_size
                .into_iter()
                .filter(|one| whole.contains(one) && one.0.iter().all(|at| candidates.contains(at)))
                .filter(|(_, bandwidth, _)| {
                    least.is_none_or(|least| bandwidth.is_some_and(|bandwidth| bandwidth >= least))
                })
                .filter(|(.., score)| !restricted || Some(*score) == best)
                .collect();
            usable.sort_by_cached_key(|one| (Reverse(one.2), Self::left(&whole, &one.0)));
            let distinct: BTreeSet<Reverse<i64>> = usable.iter().map(|one| Reverse(one.2)).collect();
            for (place, one) in usable.iter().enumerate() {
                if scopes
                    .iter()
                    .any(|scope| one.0.iter().all(|at| scope.contains(at)))
                {
                    let score = distinct.iter().position(|score| score.0 == one.2).unwrap();
                    choices.push(Allowed {
                        of: one.0.clone(),
                        score,
                        partition: Some(place),
                    });
                }
            }
        }
        if !is_binding {
            choices.extend(scopes.into_iter().map(|of| Allowed {
                of,
                score: usize::MAX,
                partition: None,
            }));
        }
        choices
    }

    /// The rank of a table without a partition: size and bandwidth of the largest one left, and the number of each size.
    fn left(whole: &[&Row], given: &[u32]) -> impl Ord + use<> {
        let left: Vec<_> = whole
            .iter()
            .filter(|(minors, ..)| minors.iter().all(|at| !given.contains(at)))
            .collect();
        let largest = left
            .iter()
            .map(|(minors, bandwidth, _)| (minors.len(), *bandwidth))
            .max();
        let n_of = |size: usize| Reverse(left.iter().filter(|(minors, ..)| minors.len() == size).count());
        (Reverse(largest), (1..7).rev().map(n_of).collect::<Vec<_>>())
    }

    /// Place of each candidate in the order of preference.
    fn levels(&self, devices: &Devices<'_>, candidates: &[u32]) -> BTreeMap<u32, usize> {
        let is_free = |at: u32| !devices.is_held(at);
        let in_order = self.policy == DevicePolicy::InOrder && !(devices.is_gpu && devices.each == 0);
        let key = |at: u32| {
            let n_sharers = devices.held.iter().filter(|held| held.contains_key(&at)).count();
            let left = if devices.each == 0 {
                (0, 0)
            } else {
                (devices.free(at), if devices.is_gpu { 100 - n_sharers } else { 0 })
            };
            let is_whole = |group: Vec<u32>| group.len() > 1 && group.iter().all(|at| is_free(*at));
            let numa = is_whole(
                devices
                    .minors()
                    .filter(|other| devices.numa(*other) == devices.numa(at))
                    .collect(),
            );
            let switch = is_whole(
                devices
                    .minors()
                    .filter(|other| devices.switch(*other) == devices.switch(at))
                    .collect(),
            );
            let policy = if in_order { (0, 0, at) } else { (left.0, left.1, 0) };
            (policy, self.largest(devices, at), numa, switch)
        };
        let order: BTreeSet<_> = candidates.iter().map(|at| key(*at)).collect();
        candidates
            .iter()
            .map(|at| (*at, order.iter().position(|other| *other == key(*at)).unwrap()))
            .collect()
    }

    /// Size of the largest whole partition or linked group with a GPU, and the number of these.
    fn largest(&self, devices: &Devices<'_>, at: u32) -> (usize, usize) {
        if !devices.is_gpu {
            return (0, 0);
        }
        let there = |minors: &[u32]| -> Vec<u32> {
            minors
                .iter()
                .copied()
                .filter(|at| devices.minors().contains(at))
                .collect()
        };
        let linked = self.query.links.iter().map(|(minors, _)| there(minors));
        let linked = linked.filter(|minors| minors.iter().all(|at| !devices.is_held(*at)));
        let whole = self.whole_partitions(devices);
        let sets = whole.iter().map(|(minors, ..)| minors.clone()).chain(linked);
        let sizes: Vec<usize> = sets
            .filter(|set| set.len() > 1 && set.contains(&at))
            .map(|set| set.len())
            .collect();
        let largest = sizes.iter().max().copied().unwrap_or(0);
        (largest, sizes.iter().filter(|size| **size == largest).count())
    }

    fn rank(&self, devices: &Devices<'_>, set: &[u32], levels: &BTreeMap<u32, usize>) -> Alone {
        let between = |one: &u32, other: &u32| -> u32 {
            let both = self
                .query
                .links
                .iter()
                .filter(|(minors, _)| minors.contains(one) && minors.contains(other));
            both.map(|(_, n)| n).sum()
        };
        let pairs: Vec<u32> = set
            .iter()
            .flat_map(|one| {
                set.iter()
                    .filter(move |other| *other > one)
                    .map(move |other| between(one, other))
            })
            .collect();
        let pairs = if devices.is_gpu { pairs } else { Vec::new() };
        let (numas, switches) = (
            groups(set, |at| devices.numa(at)),
            groups(set, |at| devices.switch(at)),
        );
        let level = set.iter().map(|at| levels[at]).sum();
        let fewest = pairs.iter().min().copied().unwrap_or(0);
        (
            Reverse(fewest),
            Reverse(pairs.iter().sum()),
            numas.len(),
            switches.len(),
            level,
            set.to_vec(),
        )
    }

    fn all(choices: &[Allowed]) -> Vec<u32> {
        choices
            .iter()
            .flat_map(|choice| &choice.of)
            .copied()
            .collect::<BTreeSet<u32>>()
            .into_iter()
            .collect()
    }

    fn alone(&self, devices: &Devices<'_>, choices: &[Allowed]) -> Option<Vec<u32>> {
        let levels = self.levels(devices, &self.candidates(devices, choices));
        let sets = choices.iter().flat_map(|choice| {
            let of_size = subsets(&choice.of).filter(|set| set.len() == devices.n);
            of_size.map(|set| {
                (
                    (
                        choice.score,
                        choice.partition.unwrap_or(usize::MAX),
                        self.rank(devices, &set, &levels),
                    ),
                    set,
                )
            })
        });
        sets.min().map(|(_, set)| set)
    }

    /// All devices that may be taken, of all sets.
    fn candidates(&self, devices: &Devices<'_>, choices: &[Allowed]) -> Vec<u32> {
        if !devices.is_gpu {
            return Self::all(choices);
        }
        let asked = &self.query.asked;
        let usable = |at: &u32| {
            devices.has_room(*at)
                && asked
                    .gpu_label
                    .is_none_or(|label| devices.part(*at).label == label)
                && devices.is_permitted(*at, asked.keeps[0])
                && devices.part(*at).limits >= asked.limits()
        };
        devices.minors().filter(usable).collect()
    }

    /// The best leading devices, and those that follow.
    fn joint(
        &self,
        lead: &Devices<'_>,
        follow: &Devices<'_>,
        nics: &[u32],
        choices: &[Allowed],
        same_switch: bool,
    ) -> Option<(Vec<u32>, Vec<u32>)> {
        let gpu_candidates = self.candidates(if lead.is_gpu { lead } else { follow }, choices);
        let of = |devices: &Devices<'_>| {
            if devices.is_gpu {
                gpu_candidates.clone()
            } else {
                nics.to_vec()
            }
        };
        let is_binding = choices.iter().all(|choice| choice.partition.is_some());
        let (lead_levels, follow_levels) = (self.levels(lead, &of(lead)), self.levels(follow, &of(follow)));
        let mut best = None;
        for choice in choices {
            let allowed = |devices: &Devices<'_>| {
                if devices.is_gpu {
                    choice.of.clone()
                } else {
                    nics.to_vec()
                }
            };
            for leading in subsets(&allowed(lead)).filter(|set| set.len() == lead.n) {
                let switches = groups(&leading, |at| lead.switch(at));
                let on = |at: u32| switches.contains(&follow.switch(at));
                let covered = groups(&allowed(follow), |at| follow.switch(at))
                    .intersection(&switches)
                    .count();
                // No more GPUs follow than are requested.
                let n_coming = if follow.is_gpu {
                    follow.n
                } else {
                    follow.n.max(covered)
                };
                for coming in subsets(&allowed(follow)).filter(|set| set.len() == n_coming) {
                    let reached = groups(&coming, |at| follow.switch(at))
                        .intersection(&switches)
                        .count();
                    if reached != covered.min(n_coming)
                        || same_switch && (reached != switches.len() || !coming.iter().all(|at| on(*at)))
                    {
                        continue;
                    }
                    let mut far: Vec<u8> = coming
                        .iter()
                        .map(|at| distance(lead, &leading, follow, *at))
                        .collect();
                    far.sort_unstable();
                    let asked_for = far[follow.n - 1];
                    far.reverse();
                    let numas = groups(&leading, |at| lead.numa(at));
                    let numas_of_followers = groups(&allowed(follow), |at| follow.numa(at));
                    let bare = (
                        switches.len() - covered,
                        numas.difference(&numas_of_followers).count(),
                    );
                    let (fewest, links, n_numas, n_switches, preferences, minors) =
                        self.rank(lead, &leading, &lead_levels);
                    let closeness = (fewest, links, n_numas, n_switches);
                    let level: usize = coming.iter().map(|at| follow_levels[at]).sum();
                    let gpus_lead = lead.is_gpu.then_some((choice.score, closeness));
                    let binding_score = is_binding.then_some(choice.score);
                    let key = (
                        (binding_score, gpus_lead),
                        (asked_for, bare),
                        choice.partition.unwrap_or(usize::MAX),
                        (closeness, preferences, minors),
                        (far, level, coming.clone()),
                    );
                    if best.as_ref().is_none_or(|(other, _)| key < *other) {
                        best = Some((key, leading.clone()));
                    }
                }
            }
        }
        best.map(|((.., (_, _, coming)), leading)| (leading, coming))
    }
}

fn distance(lead: &Devices<'_>, leading: &[u32], follow: &Devices<'_>, at: u32) -> u8 {
    match () {
        () if leading.iter().any(|one| lead.switch(*one) == follow.switch(at)) => 0,
        () if leading.iter().any(|one| lead.numa(*one) == follow.numa(at)) => 1,
        () => 2,
    }
}
