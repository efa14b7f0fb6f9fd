//! The naive model: plain lists, summed for each query, and choices by trying every set of GPUs.
//!
//! Written from the rules, not from the engine: whole sets instead of greedy picks, and reasons by trying which change
//! would make the request fit.

use std::collections::{BTreeMap, BTreeSet};

use placement::{
    Device, DevicePolicy, DeviceRef, DeviceType, HeldMemory, HeldPart, Hints, Holdings, Inventory,
    NodePolicy, Placement, Policies, Reason, RequestedMemory, ShareRequest,
};

/// Memory in hundredths of a byte, core, slots.
pub(crate) type Triple = [i128; 3];

#[derive(Clone, Debug, Default)]
pub(crate) struct Model {
    pub(crate) inventories: BTreeMap<String, Inventory>,
    pub(crate) holdings: BTreeMap<String, (String, Holdings)>,
    pub(crate) hints: BTreeMap<String, (String, Placement)>,
}

/// The total and free amounts of a GPU.
#[derive(Clone, Debug)]
struct Candidate {
    gpu: Device,
    total: Triple,
    free: Triple,
    need: Triple,
}

impl Model {
    /// Amounts that are certainly held of each GPU, and amounts that may be.
    pub(crate) fn used(&self, node: &str) -> Vec<(Device, Triple, Triple)> {
        let Some(inventory) = self.inventories.get(node) else {
            return Vec::new();
        };
        let holdings = self
            .holdings
            .values()
            .filter(|(at, _)| at == node)
            .map(|(_, holding)| holding);
        let shares: Vec<(HeldPart, bool)> = holdings.flat_map(flatten).collect();
        let used = |gpu: &Device| {
            let (mut certain, mut suspect) = ([0; 3], [0; 3]);
            for (share, known_gpu) in &shares {
                let is_here = match &share.device {
                    DeviceRef::Id(uuid) => gpu.id == *uuid,
                    DeviceRef::Minor(minor) => gpu.minor == *minor,
                    DeviceRef::Any => false,
                };
                let is_nowhere = match &share.device {
                    DeviceRef::Id(_) | DeviceRef::Any => false,
                    DeviceRef::Minor(minor) => !inventory.gpus.iter().any(|gpu| gpu.minor == *minor),
                };
                let (amounts, is_guess) = held_on(gpu, share, inventory.unit_bytes);
                if *known_gpu && is_here && share.trusted && !is_guess {
                    certain = plus(certain, amounts);
                } else if !known_gpu || is_here || is_nowhere {
                    suspect = plus(suspect, amounts);
                }
            }
            (gpu.clone(), certain, suspect)
        };
        let mut used: Vec<(Device, Triple, Triple)> = inventory.gpus.iter().map(used).collect();
        let holdings = self
            .holdings
            .values()
            .filter(|(at, _)| at == node)
            .map(|(_, holding)| holding);
        for holding in holdings {
            let Some(request) = &holding.pending else { continue };
            place_pending(request, &mut used, inventory.unit_bytes);
        }
        used
    }

    fn devices(
        &self,
        node: &str,
        request: &ShareRequest,
        hints: Hints<'_>,
    ) -> Result<Vec<Candidate>, Reason> {
        let Some(inventory) = self
            .inventories
            .get(node)
            .filter(|inventory| !inventory.gpus.is_empty())
        else {
            return Err(Reason::NoDevice);
        };
        if request.devices == 0
            || matches!(
                request.memory,
                RequestedMemory::Bytes(0) | RequestedMemory::Units(0) | RequestedMemory::Ratio(0)
            )
        {
            return Err(Reason::InvalidRequest);
        }
        if matches!(request.memory, RequestedMemory::Units(_)) && inventory.unit_bytes.is_none() {
            return Err(Reason::UnitUnknown);
        }
        let device = |(gpu, certain, suspect): (Device, Triple, Triple)| {
            let total = total_of(&gpu);
            let (core, slots) = (request.core.into(), request.slots.into());
            let need = [
                asked(&gpu, request.memory, inventory.unit_bytes).unwrap(),
                core,
                slots,
            ];
            let mut free = minus(total, plus(certain, suspect)).map(|left| left.max(0));
            for (owner, (at, placement)) in &self.hints {
                let counts = match hints {
                    Hints::Ignore => false,
                    Hints::Respect => true,
                    Hints::RespectOthers(own) => owner != own,
                };
                for share in placement
                    .gpus()
                    .filter(|share| counts && at == node && share.id == gpu.id)
                {
                    let amounts = share.amounts;
                    let taken = [
                        amounts.memory.hundredths().into(),
                        amounts.core.into(),
                        amounts.slots.into(),
                    ];
                    free = minus(free, taken).map(|left| left.max(0));
                }
            }
            Candidate {
                gpu,
                total,
                free,
                need,
            }
        };
        Ok(self.used(node).into_iter().map(device).collect())
    }

    /// The reason for which a request does not fit, if so.
    pub(crate) fn fit(&self, node: &str, request: &ShareRequest, hints: Hints<'_>) -> Result<(), Reason> {
        let devices = self.devices(node, request, hints)?;
        let wanted = request.devices as usize;
        let fits_if = |change: &dyn Fn(&mut Candidate)| {
            let mut changed = devices.clone();
            changed.iter_mut().for_each(change);
            changed.iter().filter(|device| device.has_room()).count()
        };
        if fits_if(&|_| ()) >= wanted {
            return Ok(());
        }
        if fits_if(&|device| {
            (device.free, device.gpu.healthy, device.gpu.closed) = (device.total, true, false);
        }) < wanted
        {
            return Err(Reason::TooLarge);
        }
        if fits_if(&|device| (device.free, device.gpu.closed) = (device.total, false)) < wanted {
            return Err(Reason::Unhealthy);
        }
        if fits_if(&|device| device.free = device.total) < wanted {
            return Err(Reason::Closed);
        }
        if fits_if(&|_| ()) > 0 {
            return Err(Reason::TooFew);
        }
        let reasons = [Reason::Memory, Reason::Core, Reason::Slots];
        for emptied in [&[0][..], &[1], &[2], &[0, 1], &[0, 2], &[1, 2], &[0, 1, 2]] {
            if fits_if(&|device| emptied.iter().for_each(|&at| device.free[at] = device.total[at])) > 0 {
                return Err(reasons[emptied[0]]);
            }
        }
        unreachable!("an empty device has room")
    }

    /// Minors of the GPUs that a request should take, of all sets.
    pub(crate) fn choose_devices(
        &self,
        node: &str,
        request: &ShareRequest,
        policy: DevicePolicy,
        hints: Hints<'_>,
    ) -> Option<Vec<u32>> {
        let sign = if policy == DevicePolicy::Binpack { 1 } else { -1 };
        let key = |device: &Candidate| {
            (
                minus(device.free, device.need).map(|left| left * sign),
                device.gpu.minor,
            )
        };
        let sets = self.sets(node, request, hints);
        let keyed = sets.into_iter().map(|set| {
            let mut keys: Vec<_> = set.iter().map(key).collect();
            keys.sort_unstable();
            (
                keys,
                set.iter()
                    .map(|device| device.gpu.minor)
                    .collect::<BTreeSet<u32>>(),
            )
        });
        keyed.min().map(|(_, minors)| minors.into_iter().collect())
    }

    /// The score in millionths; 0 if there is no room.
    pub(crate) fn score(
        &self,
        node: &str,
        request: &ShareRequest,
        policies: Policies,
        hints: Hints<'_>,
    ) -> i128 {
        let Some(chosen) = self.choose_devices(node, request, policies.device, hints) else {
            return 0;
        };
        let devices = self.devices(node, request, hints).unwrap();
        let (mut free, mut total) = (0, 0);
        for device in devices
            .iter()
            .filter(|device| device.gpu.healthy && !device.gpu.closed)
        {
            let taken = if chosen.contains(&device.gpu.minor) {
                device.need[0]
            } else {
                0
            };
            free += device.free[0] - taken;
            total += device.total[0];
        }
        let part = if policies.node == NodePolicy::Binpack {
            total - free
        } else {
            free
        };
        part * 1_000_000 / total
    }

    /// Every set of the requested number of GPUs, all with room.
    fn sets(&self, node: &str, request: &ShareRequest, hints: Hints<'_>) -> Vec<Vec<Candidate>> {
        let devices = self.devices(node, request, hints).unwrap_or_default();
        let subsets = (0_u32..1 << devices.len()).filter(|bits| bits.count_ones() == request.devices);
        let subsets = subsets.map(|bits| {
            (0..)
                .zip(&devices)
                .filter(move |(at, _)| bits >> at & 1 == 1)
                .map(|(_, device)| device.clone())
        });
        subsets
            .map(Iterator::collect)
            .filter(|set: &Vec<Candidate>| !set.is_empty() && set.iter().all(Candidate::has_room))
            .collect()
    }

    /// Returns true if a reservation is possible: every share exists once, on healthy open GPUs, for a new owner.
    pub(crate) fn admits(&self, owner: &str, node: &str, placement: &Placement) -> bool {
        let used = self.used(node);
        let distinct: BTreeSet<_> = placement.gpus().map(|share| &share.id).collect();
        let has_room = |share: &placement::Share| {
            let amounts = share.amounts;
            let taken = [
                amounts.memory.hundredths().into(),
                amounts.core.into(),
                amounts.slots.into(),
            ];
            used.iter().any(|(gpu, certain, suspect)| {
                let left = minus(total_of(gpu), plus(plus(*certain, *suspect), taken));
                let fits = (0..3).all(|at| left[at] >= 0 || taken[at] == 0);
                gpu.id == share.id && gpu.healthy && !gpu.closed && fits
            })
        };
        !self.holdings.contains_key(owner)
            && distinct.len() == placement.shares.len()
            && placement.gpus().all(has_room)
    }
}

impl Candidate {
    fn has_room(&self) -> bool {
        self.gpu.healthy && !self.gpu.closed && (0..3).all(|at| self.need[at] <= self.free[at])
    }
}

/// Adds a pending request: GPUs with room first, of these the one with most free memory.
fn place_pending(request: &ShareRequest, used: &mut [(Device, Triple, Triple)], unit_bytes: Option<u64>) {
    let share = HeldPart {
        memory: HeldMemory::Requested(request.memory),
        core: request.core,
        slots: request.slots,
        trusted: false,
        ..HeldPart::new(DeviceType::Gpu, DeviceRef::Minor(u32::MAX))
    };
    let mut order: Vec<usize> = (0..used.len()).collect();
    order.sort_by_key(|&at| {
        let (gpu, certain, suspect) = &used[at];
        let left = minus(total_of(gpu), plus(*certain, *suspect)).map(|left| {
            if gpu.healthy && !gpu.closed {
                left.max(0)
            } else {
                0
            }
        });
        let asked = held_on(gpu, &share, unit_bytes).0;
        (
            (0..3).any(|dimension| asked[dimension] > left[dimension]),
            -left[0],
            at,
        )
    });
    for at in order.into_iter().take(request.devices as usize) {
        let asked = held_on(&used[at].0, &share, unit_bytes).0;
        used[at].2 = plus(used[at].2, asked);
    }
}

/// The shares of a holding, each with false if its GPU is unknown. Pending ones are placed once all others are.
fn flatten(holding: &Holdings) -> Vec<(HeldPart, bool)> {
    let known = |part: &HeldPart| (part.clone(), part.device != DeviceRef::Any);
    holding.parts.iter().map(known).collect()
}

/// Amounts of a share on a GPU, with true if they are a guess.
fn held_on(gpu: &Device, share: &HeldPart, unit_bytes: Option<u64>) -> (Triple, bool) {
    let memory = match share.memory {
        HeldMemory::Exact(memory) => Some(memory.hundredths().into()),
        HeldMemory::Requested(ask) => asked(gpu, ask, unit_bytes),
    };
    (
        [
            memory.unwrap_or(total_of(gpu)[0]),
            share.core.into(),
            share.slots.into(),
        ],
        memory.is_none(),
    )
}

fn asked(gpu: &Device, ask: RequestedMemory, unit_bytes: Option<u64>) -> Option<i128> {
    match ask {
        RequestedMemory::Bytes(bytes) => Some(i128::from(bytes) * 100),
        RequestedMemory::Units(units) => unit_bytes.map(|unit| i128::from(units) * i128::from(unit) * 100),
        RequestedMemory::Ratio(percent) => Some(i128::from(percent) * i128::from(gpu.memory_bytes)),
    }
}

pub(crate) fn total_of(gpu: &Device) -> Triple {
    [
        i128::from(gpu.memory_bytes) * 100,
        gpu.core.into(),
        gpu.slots.into(),
    ]
}

fn plus(one: Triple, other: Triple) -> Triple {
    [0, 1, 2].map(|at| one[at] + other[at])
}

fn minus(one: Triple, other: Triple) -> Triple {
    [0, 1, 2].map(|at| one[at] - other[at])
}
