//! One decision on one node, from pools to devices.

use std::borrow::Cow;

use crate::class::DeviceShare;
use crate::fit::Hints;
use crate::miss::Miss;
use crate::node::Node;
use crate::rank::Order;
use crate::reason::Reason;
use crate::request::{Ask, GpuAsk};
use crate::shape::Spot;
use crate::topology::follow::Company;
use crate::topology::links::Links;
use crate::topology::partitions::{Choice, Tables};
use crate::topology::pool::Pool;
use crate::topology::problem::{Follower, Problem};
use crate::topology::rank::Rank;
use crate::topology::scene::{Part, Scene};
use crate::topology::sets::{MAX_MEMBERS, Set};
use crate::wishes::{Exclusion, Kind, Scope, Wishes};

/// Devices that were chosen.
#[derive(Debug, Default)]
pub(crate) struct Decision {
    /// Rows of GPUs, where they are chosen here.
    pub(crate) gpus: Vec<usize>,
    pub(crate) others: Vec<DeviceShare>,
}

/// A choice of devices of joined types, in the order of the types.
type Found = (Rank, Vec<Company>, Vec<Set>);

impl Node {
    /// The devices that a request gets, or the rule that none does not break.
    pub(crate) fn decide(&self, ask: Ask<'_>, order: Order<'_>, hints: Hints<'_>) -> Result<Decision, Miss> {
        self.fit_gpus(&ask.gpus, hints).map_err(Miss::Plain)?;
        let chooses = self
            .inventory
            .as_ref()
            .is_some_and(|inventory| inventory.serves_vendor);
        if matches!(ask.gpus, GpuAsk::Whole(_)) && !chooses && ask.wishes.is_some_and(Wishes::choose_gpus) {
            return Err(Miss::NotChosenHere);
        }
        let (Some(inventory), Some(shape)) = (&self.inventory, &self.shape) else {
            return Ok(Decision::default());
        };
        let scene = Scene {
            node: self,
            inventory,
            shape,
            uses: self.uses(hints),
            wishes: ask.wishes,
            order,
            hints,
        };
        if matches!(ask.gpus, GpuAsk::All { .. }) && scene.uses.gpus.iter().any(|one| one.is_kept) {
            return Err(Miss::SeesExclusive);
        }
        scene.decide(ask)
    }
}

impl Wishes {
    /// Whether they say anything of which GPUs are to be taken.
    fn choose_gpus(&self) -> bool {
        let joins = self
            .joint
            .as_ref()
            .is_some_and(|joint| joint.same_switch && joint.kinds.contains(&Kind::Gpu));
        let narrows = self.of(&Kind::Gpu).is_some_and(|wish| {
            let narrow_scope = wish.scope.is_some_and(|scope| scope < Scope::Machine);
            wish.selector.is_some()
                || wish.functions.is_some()
                || narrow_scope
                || wish.exclusion == Some(Exclusion::Switch)
        });
        self.partition.is_some() || joins || narrows
    }
}

impl Scene<'_> {
    fn decide(&self, ask: Ask<'_>) -> Result<Decision, Miss> {
        // Nobody may have said what other devices there are: kube-scheduler knows what kubelet offers.
        let requests = if self.inventory.classes.is_some() {
            ask.others
        } else {
            &[]
        };
        let parts: Vec<(Part<'_>, Pool)> = requests
            .iter()
            .map(|request| self.others(request))
            .collect::<Result<_, _>>()?;
        let gpus = self.gpus(ask.gpus)?;
        let choices = gpus
            .as_ref()
            .map(|pool| self.gpu_choices(pool, self.is_whole(ask.gpus, pool)))
            .transpose()?;
        let (parts, pools): (Vec<Part<'_>>, Vec<Pool>) = parts.into_iter().unzip();
        let joint = self.joint(gpus.as_ref(), &parts, &pools);
        let mut chosen: Vec<(&Kind, Vec<usize>)> =
            self.choose_joint(&joint, choices.as_deref().unwrap_or_default())?;
        let settled = self.settled_gpus(ask.gpus);
        for pool in gpus.iter().chain(&pools) {
            if chosen.iter().any(|(kind, _)| **kind == pool.kind) {
                continue;
            }
            match settled.as_ref().filter(|_| self.follows_gpus(pool)) {
                Some(gpus) => chosen.push((&pool.kind, beside(pool, gpus))),
                None => chosen.extend(self.choose(&[pool], choices.as_deref().unwrap_or_default(), false)?),
            }
        }
        let of = |kind: &Kind| {
            chosen
                .iter()
                .find(|(of, _)| *of == kind)
                .map(|(_, devices)| devices.clone())
                .unwrap_or_default()
        };
        let others = parts
            .iter()
            .zip(&pools)
            .flat_map(|(part, pool)| part.shares(&of(&pool.kind)))
            .collect();
        Ok(Decision {
            gpus: of(&Kind::Gpu),
            others,
        })
    }

    /// The spots of the GPUs that the vendor's plugin will choose, if the pod takes all that are free.
    fn settled_gpus(&self, ask: GpuAsk) -> Option<Vec<Spot>> {
        let GpuAsk::Whole(n) = ask else { return None };
        let free: Vec<usize> = self.node.whole_rows(self.hints).map(|(at, _)| at).collect();
        let is_settled = !self.inventory.serves_vendor && usize::try_from(n).is_ok_and(|n| n == free.len());
        is_settled.then(|| {
            free.iter()
                .filter_map(|at| self.shape.spots.gpus.get(*at).copied())
                .collect()
        })
    }

    /// Returns true if devices of this pool come along with GPUs.
    fn follows_gpus(&self, pool: &Pool) -> bool {
        let kinds = self
            .wishes
            .and_then(|wishes| wishes.joint.as_ref())
            .map_or(&[][..], |joint| &joint.kinds);
        kinds.first() == Some(&Kind::Gpu) && kinds.contains(&pool.kind) && pool.n <= MAX_MEMBERS
    }

    /// The types that are joined and asked for, the leading one first; less than two are none.
    fn joint<'p>(&self, gpus: Option<&'p Pool>, parts: &[Part<'_>], pools: &'p [Pool]) -> Vec<&'p Pool> {
        let kinds = self
            .wishes
            .and_then(|wishes| wishes.joint.as_ref())
            .map_or(&[][..], |joint| &joint.kinds);
        let counted = parts
            .iter()
            .zip(pools)
            .filter(|(part, _)| !part.takes_all)
            .map(|(_, pool)| pool);
        let pools: Vec<&Pool> = gpus.into_iter().chain(counted).collect();
        let mut joint: Vec<&Pool> = Vec::new();
        for kind in kinds {
            let pool = pools.iter().find(|pool| pool.kind == *kind);
            joint.extend(pool.filter(|_| joint.iter().all(|known| known.kind != *kind)));
        }
        if joint.len() < 2 { Vec::new() } else { joint }
    }

    fn choose_joint<'p>(
        &self,
        joint: &[&'p Pool],
        choices: &[Choice],
    ) -> Result<Vec<(&'p Kind, Vec<usize>)>, Miss> {
        let same_switch = self
            .wishes
            .and_then(|wishes| wishes.joint.as_ref())
            .is_some_and(|joint| joint.same_switch);
        let is_too_much = joint.iter().any(|pool| pool.n > MAX_MEMBERS);
        if joint.is_empty() || (is_too_much && !same_switch) {
            return Ok(Vec::new());
        }
        self.choose(joint, choices, same_switch)
    }

    /// Devices of types that belong together, or of one type.
    fn choose<'p>(
        &self,
        pools: &[&'p Pool],
        choices: &[Choice],
        same_switch: bool,
    ) -> Result<Vec<(&'p Kind, Vec<usize>)>, Miss> {
        let Some(lead) = pools.first() else {
            return Ok(Vec::new());
        };
        if let [alone] = pools {
            let is_simple = *choices == [Choice::of(alone.all())] || alone.kind != Kind::Gpu;
            if alone.n > MAX_MEMBERS
                || (alone.n == 1 && is_simple)
                || alone.n == alone.candidates.len() && alone.kind != Kind::Gpu
            {
                return Ok(vec![(&alone.kind, alone.best())]);
            }
        }
        let narrow: Vec<Cow<'_, Pool>> = pools.iter().map(|pool| pool.narrowed()).collect();
        let narrow: Vec<&Pool> = narrow.iter().map(AsRef::as_ref).collect();
        let links = (lead.kind == Kind::Gpu).then(|| narrow.first()).flatten();
        let links = links.and_then(|pool| Links::of(&self.inventory.links, &self.inventory.gpus, pool));
        let found = find(&narrow, choices, same_switch, links.as_ref());
        let Some((.., sets)) = found else {
            return Err(self.apart(&narrow));
        };
        Ok(pools
            .iter()
            .zip(&narrow)
            .zip(sets)
            .map(|((pool, narrow), set)| (&pool.kind, narrow.devices(set)))
            .collect())
    }

    /// The sets of GPUs to choose from, each of which breaks no rule.
    fn gpu_choices(&self, pool: &Pool, is_whole: bool) -> Result<Vec<Choice>, Miss> {
        let pool = &*pool.narrowed();
        let scope = self
            .wishes
            .and_then(|wishes| wishes.of(&Kind::Gpu))
            .and_then(|wish| wish.scope)
            .unwrap_or(Scope::Machine);
        let mut scopes = scopes(pool, scope);
        let most = scopes.iter().map(|set| set.len()).max().unwrap_or(0);
        let least = if scope == Scope::Machine {
            pool.n.min(MAX_MEMBERS)
        } else {
            pool.n
        };
        scopes.retain(|set| set.len() >= least);
        if scopes.is_empty() {
            return Err(Miss::Scope {
                needed: pool.n,
                scope,
                most,
            });
        }
        let wish = self.wishes.and_then(|wishes| wishes.partition);
        let (table, gpus, uses) = (
            self.inventory.partitions.as_ref(),
            &self.inventory.gpus[..],
            &self.uses.gpus[..],
        );
        let tables = Tables {
            table,
            wish,
            gpus,
            uses,
            pool,
        };
        // Partitions are of whole GPUs; parts of them are taken as if there were no table.
        if !is_whole || (table.is_none() && wish.is_none()) {
            return Ok(scopes.into_iter().map(Choice::of).collect());
        }
        let is_binding = tables.is_binding();
        let mut choices = match tables.choices() {
            Err(miss) if is_binding => return Err(miss),
            choices => choices.unwrap_or_default(),
        };
        choices.retain(|choice| scopes.iter().any(|scope| choice.allowed.is_within(*scope)));
        if is_binding && choices.is_empty() {
            return Err(Miss::Scope {
                needed: pool.n,
                scope,
                most,
            });
        }
        if !is_binding {
            choices.extend(scopes.into_iter().map(Choice::of));
        }
        Ok(choices)
    }

    /// Why devices of several types are not close enough: what is missing where they nearly are.
    fn apart(&self, pools: &[&Pool]) -> Miss {
        let plain = || Miss::Plain(Reason::Together);
        let Some((lead, rest)) = pools.split_first() else {
            return plain();
        };
        let followers = rest
            .iter()
            .map(|pool| Follower {
                pool,
                allowed: pool.all(),
            })
            .collect();
        let problem = Problem::new(lead, lead.all(), followers, false, None);
        let Some((nearest, _)) = problem.search() else {
            return plain();
        };
        let used = problem
            .numas
            .iter()
            .flat_map(|numa| &numa.switches)
            .filter(|switch| !switch.lead.and(nearest).is_empty());
        let mut bare = used.flat_map(|switch| {
            rest.iter()
                .zip(&switch.n_near)
                .filter(|(_, n)| **n == 0)
                .map(move |(pool, _)| (switch, pool))
        });
        let (lacking, switch) = match bare.next() {
            Some((switch, pool)) => {
                let at = switch
                    .lead
                    .members()
                    .next()
                    .and_then(|at| lead.devices(Set::EMPTY.with(at)).first().copied());
                (pool, at.and_then(|at| self.switch_of(&lead.kind, at)))
            }
            None => match rest.first() {
                Some(pool) => (pool, None),
                None => return plain(),
            },
        };
        Miss::Together {
            lead: lead.kind.clone(),
            needed: lead.n,
            lacking: lacking.kind.clone(),
            switch,
        }
    }

    fn switch_of(&self, kind: &Kind, at: usize) -> Option<crate::ident::SwitchId> {
        let traits = match kind {
            Kind::Gpu => self.inventory.gpus.get(at).map(|gpu| &gpu.traits),
            Kind::Other(kind) => {
                let class = self.node.classes().iter().find(|class| class.kind == *kind)?;
                class.devices.get(at).map(|device| &device.traits)
            }
        };
        traits?.place.as_ref()?.switch.clone()
    }
}

/// Devices that come along with GPUs that sit there.
fn beside(pool: &Pool, gpus: &[Spot]) -> Vec<usize> {
    let pool = &*pool.narrowed();
    let (chosen, _) = Follower {
        pool,
        allowed: pool.all(),
    }
    .follow(gpus);
    pool.devices(chosen)
}

/// The best choice of devices of all types, with the GPUs from one of the sets to choose from.
fn find(pools: &[&Pool], choices: &[Choice], same_switch: bool, links: Option<&Links>) -> Option<Found> {
    let (lead, rest) = pools.split_first()?;
    let all = [Choice::of(Set::EMPTY)];
    let choices = if pools.iter().any(|pool| pool.kind == Kind::Gpu) {
        choices
    } else {
        &all
    };
    let mut best: Option<Found> = None;
    for choice in choices {
        let allowed = |pool: &Pool| {
            if pool.kind == Kind::Gpu {
                choice.allowed
            } else {
                pool.all()
            }
        };
        let followers = rest
            .iter()
            .map(|pool| Follower {
                pool,
                allowed: allowed(pool),
            })
            .collect();
        let problem = Problem::new(lead, allowed(lead), followers, same_switch, links);
        let found = if problem.allowed.len() == lead.n {
            problem.rank(problem.allowed).map(|rank| (problem.allowed, rank))
        } else {
            problem.search()
        };
        let Some((chosen, rank)) = found else { continue };
        let rank = Rank {
            score: choice.score,
            partition: choice.partition,
            ..rank
        };
        if best.as_ref().is_some_and(|(best, ..)| *best < rank) {
            continue;
        }
        let (sets, companies): (Vec<Set>, Vec<Company>) = problem.follow(chosen).into_iter().unzip();
        if best
            .as_ref()
            .is_none_or(|(best_rank, best, _)| (&rank, &companies) < (best_rank, best))
        {
            best = Some((rank, companies, [chosen].into_iter().chain(sets).collect()));
        }
    }
    best
}

/// Sets of candidates that lie within one scope each.
fn scopes(pool: &Pool, scope: Scope) -> Vec<Set> {
    let by = |place: &dyn Fn(usize) -> Option<u16>| {
        let mut places: Vec<u16> = pool.all().members().filter_map(place).collect();
        places.sort_unstable();
        places.dedup();
        let within = |which: &u16| {
            let members = pool
                .all()
                .members()
                .filter(|member| place(*member) == Some(*which));
            members.fold(Set::EMPTY, Set::with)
        };
        places.iter().map(within).collect::<Vec<Set>>()
    };
    match scope {
        Scope::Machine => vec![pool.all()],
        Scope::Numa => by(&|at| {
            Some(pool.spot(at))
                .filter(|spot| spot.knows_numa)
                .map(|spot| spot.numa)
        }),
        Scope::Switch => by(&|at| {
            Some(pool.spot(at))
                .filter(|spot| spot.knows_switch)
                .map(|spot| spot.switch)
        }),
        Scope::Device if pool.n > 1 => Vec::new(),
        Scope::Device => {
            let placed = pool.those(|candidate| candidate.spot.is_placed);
            placed.members().map(|at| Set::EMPTY.with(at)).collect()
        }
    }
}

impl Part<'_> {
    fn shares(&self, devices: &[usize]) -> Vec<DeviceShare> {
        let devices = devices.iter().filter_map(|at| self.class.devices.get(*at));
        let share = |device| self.share(device);
        devices.map(share).collect()
    }

    fn share(&self, device: &crate::class::Device) -> DeviceShare {
        let functions = self.function(device).cloned().into_iter().collect();
        let (kind, id, minor) = (self.class.kind.clone(), device.id.clone(), device.minor);
        DeviceShare {
            kind,
            id,
            minor,
            amounts: self.amounts.clone(),
            functions,
        }
    }
}
