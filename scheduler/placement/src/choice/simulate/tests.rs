//! Compares the simulation with a naive one, pod by pod over plain lists.

use proptest::prelude::*;
use proptest::sample::select;
use rstest::rstest;

use super::{
    FreeGpus, GpuPart, MAX_GPUS, Simulation, WHOLE, requested_part, thousandths_down, thousandths_up,
};
use crate::data::amounts::{HostAmounts, Memory};
use crate::data::inventory::GpuModel;
use crate::data::request::{RequestedGpus, RequestedMemory, ShareRequest};
use crate::data::workload::PodProfile;

const MODEL: GpuModel = GpuModel {
    memory: Memory::from_bytes(1000),
    unit_bytes: Some(10),
};

/// The thousandths that a sequence takes, placed again and again until nothing fits, without any shortcut.
fn naive(profiles: &[PodProfile], largest_first: bool, gpus: &[GpuPart], host: HostAmounts) -> u32 {
    let mut profiles = profiles.to_vec();
    if largest_first {
        profiles.retain(PodProfile::asks_for_gpus);
        let size = |profile: &PodProfile| {
            requested_part(profile.gpus, MODEL)
                .map_or(0, |(part, n)| u32::from(n) * u32::try_from(part.size()).unwrap())
        };
        profiles.sort_by_key(|profile| std::cmp::Reverse(size(profile)));
    }
    let (mut gpus, mut host, mut taken, mut before) = (gpus.to_vec(), host, 0, None);
    while before.replace(taken) != Some(taken) {
        taken += naive_once(&profiles, &mut gpus, &mut host);
    }
    taken
}

fn naive_once(profiles: &[PodProfile], gpus: &mut [GpuPart], host: &mut HostAmounts) -> u32 {
    let mut taken = 0;
    for profile in profiles {
        let of_none = Some((GpuPart::default(), 0)).filter(|_| !profile.asks_for_gpus());
        let Some((part, n)) = of_none.or_else(|| requested_part(profile.gpus, MODEL)) else {
            continue;
        };
        if profile.host.cpu_milli > host.cpu_milli || profile.host.memory > host.memory {
            continue;
        }
        let mut fitting: Vec<usize> = (0..gpus.len())
            .filter(|at| gpus[*at].memory >= part.memory && gpus[*at].core >= part.core)
            .collect();
        fitting.sort_by_key(|at| (gpus[*at].memory + gpus[*at].core, *at));
        if fitting.len() < usize::from(n) {
            continue;
        }
        for at in fitting.iter().take(usize::from(n)) {
            gpus[*at] = GpuPart {
                memory: gpus[*at].memory - part.memory,
                core: gpus[*at].core - part.core,
            };
            taken += u32::try_from(part.memory.max(part.core)).unwrap();
        }
        *host = host.less(profile.host);
    }
    taken
}

/// The unusable capacity, pod by pod.
fn naive_unusable(profiles: &[PodProfile], gpus: &[GpuPart], host: HostAmounts) -> u32 {
    let idle = |gpu: &GpuPart| u64::try_from(gpu.memory.min(gpu.core)).unwrap();
    let (mut sum, mut n_pods) = (0, 0);
    for profile in profiles.iter().filter(|profile| profile.asks_for_gpus()) {
        let Some((part, n)) = requested_part(profile.gpus, MODEL) else {
            continue;
        };
        let (fitting, others): (Vec<&GpuPart>, Vec<&GpuPart>) = gpus
            .iter()
            .partition(|gpu| gpu.memory >= part.memory && gpu.core >= part.core);
        let has_host = profile.host.cpu_milli <= host.cpu_milli && profile.host.memory <= host.memory;
        let unusable = if has_host && fitting.len() >= usize::from(n) {
            others
        } else {
            gpus.iter().collect()
        };
        sum += unusable.into_iter().map(idle).sum::<u64>();
        n_pods += 1;
    }
    u32::try_from((sum * 8).checked_div(n_pods).unwrap_or(0)).unwrap()
}

fn requested_gpus() -> impl Strategy<Value = RequestedGpus> {
    let memory = prop_oneof![
        (1_u32..=100).prop_map(RequestedMemory::Ratio),
        (1_u64..1100).prop_map(RequestedMemory::Bytes),
        (1_u64..110).prop_map(RequestedMemory::Units),
    ];
    let share = (1_u32..4, memory, select(vec![0_u32, 10, 50, 100])).prop_map(|(devices, memory, core)| {
        ShareRequest {
            devices,
            memory,
            core,
            slots: 1,
        }
    });
    prop_oneof![5 => share.prop_map(RequestedGpus::Share), 1 => (0_u32..4).prop_map(RequestedGpus::Whole), 1 => Just(RequestedGpus::Nothing)]
}

fn profile() -> impl Strategy<Value = PodProfile> {
    let host = (0_u64..4000, 0_u64..5).prop_map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory });
    (requested_gpus(), host).prop_map(|(gpus, host)| PodProfile { gpus, host })
}

fn part() -> impl Strategy<Value = GpuPart> {
    let amount = || prop_oneof![Just(0_i16), Just(WHOLE), 0..=WHOLE];
    (amount(), amount()).prop_map(|(memory, core)| GpuPart { memory, core })
}

proptest! {
    #[test]
    fn value_and_unusable_capacity_are_those_of_a_naive_simulation(
        profiles in proptest::collection::vec(profile(), 1..144),
        gpus in prop_oneof![4 => proptest::collection::vec(part(), 0..10), 1 => proptest::collection::vec(part(), MAX_GPUS)],
        host in (0_u64..30_000, 0_u64..40).prop_map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory }),
    ) {
        let expected: u32 = profiles.chunks(36).flat_map(|profiles| [false, true].map(|largest_first| naive(profiles, largest_first, &gpus, host))).sum();
        let simulation = Simulation::new(&profiles, MODEL);
        let free = FreeGpus::new(gpus.iter().copied());
        prop_assert_eq!(simulation.value(&free, host), expected);
        prop_assert!(simulation.most_value(&free) >= expected);
        prop_assert_eq!(simulation.unusable(&free, host), naive_unusable(&profiles, &gpus, host));
    }
}

#[rstest]
#[case::nothing_taken([1000; 8], 8000)]
#[case::one_broken([900, 1000, 1000, 1000, 1000, 1000, 1000, 1000], 6125)]
#[case::half([0, 0, 0, 0, 1000, 1000, 1000, 1000], 2000)]
#[case::all_broken([999; 8], 0)]
fn idle_gpus_are_worth_more_together(#[case] free: [i16; 8], #[case] expected: u64) {
    assert_eq!(
        FreeGpus::new(free.map(|memory| GpuPart { memory, core: WHOLE }).into_iter()).idle_value(),
        expected
    );
}

#[rstest]
#[case::enough(Some((8000, 80)), 300)]
#[case::too_little_cpu(Some((7999, 80)), 150)]
#[case::too_little_memory(Some((8000, 79)), 150)]
#[case::not_known(None, 300)]
fn idle_weight_halves_where_cpu_or_memory_run_out_before_gpus(
    #[case] host: Option<(u64, u64)>,
    #[case] expected: u64,
) {
    let profile = |gpus, cpu_milli, memory| PodProfile {
        gpus,
        host: HostAmounts { cpu_milli, memory },
    };
    // Two GPUs, and 2000 m and 20 bytes beside them.
    let sample = vec![
        profile(RequestedGpus::Whole(2), 1500, 10),
        profile(RequestedGpus::Nothing, 500, 10),
    ];
    let host = host.map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory });
    assert_eq!(Simulation::new(&sample, MODEL).idle_weight(8, host), expected);
}

#[rstest]
#[case::percent(RequestedMemory::Ratio(33), 0, Some((330, 0)))]
#[case::rounded_up(RequestedMemory::Bytes(331), 7, Some((331, 70)))]
#[case::units(RequestedMemory::Units(5), 0, Some((50, 0)))]
#[case::whole(RequestedMemory::Ratio(100), 100, Some((1000, 1000)))]
#[case::too_much_memory(RequestedMemory::Bytes(1001), 0, None)]
#[case::too_much_core(RequestedMemory::Bytes(1), 101, None)]
#[case::nothing(RequestedMemory::Bytes(0), 50, None)]
#[case::absurd(RequestedMemory::Units(u64::MAX), u32::MAX, None)]
fn requests_become_thousandths_of_a_gpu(
    #[case] memory: RequestedMemory,
    #[case] core: u32,
    #[case] expected: Option<(i16, i16)>,
) {
    let part = requested_part(
        RequestedGpus::Share(ShareRequest {
            devices: 1,
            memory,
            core,
            slots: 1,
        }),
        MODEL,
    );
    assert_eq!(
        part.map(|(part, n)| (part.memory, part.core, n)),
        expected.map(|(memory, core)| (memory, core, 1))
    );
}

#[rstest]
#[case::exact(500, 1000, 500, 500)]
#[case::between(1, 3, 334, 333)]
#[case::more_than_there_is(7, 3, 2334, 1000)]
#[case::huge(1 << 60, 1 << 60, 1000, 999)]
fn thousandths_are_rounded_so_that_nothing_fits_by_rounding(
    #[case] amount: u64,
    #[case] total: u64,
    #[case] up: i16,
    #[case] down: i16,
) {
    assert_eq!(
        thousandths_up(Memory::from_hundredths(amount), Memory::from_hundredths(total)),
        Some(up)
    );
    assert_eq!(thousandths_down(amount, total), down);
}

#[test]
fn a_gpu_without_memory_has_no_thousandths() {
    assert_eq!(
        (thousandths_up(Memory::ZERO, Memory::ZERO), thousandths_down(1, 0)),
        (None, 0)
    );
}
