//! Sequences, played pod by pod in the plainest way.

use proptest::prelude::*;
use proptest::sample::select;
use rstest::rstest;

use super::{Forecast, Lanes, MAX_GPUS, Model, Part, WHOLE, part_of, thousandths_down, thousandths_up};
use crate::host::HostAmounts;
use crate::memory::Memory;
use crate::request::{GpuAsk, MemoryAsk, Request};
use crate::workload::Spec;

const MODEL: Model = Model {
    memory: Memory::from_bytes(1000),
    unit_bytes: Some(10),
};

/// What a sequence takes that is played again and again until it takes nothing: plain lists, nothing left out, nothing decided
/// early.
fn naive(specs: &[Spec], largest_first: bool, gpus: &[Part], host: HostAmounts) -> u32 {
    let mut specs = specs.to_vec();
    if largest_first {
        specs.retain(Spec::asks_for_gpus);
        let size = |spec: &Spec| {
            part_of(spec.gpus, MODEL)
                .map_or(0, |(part, n)| u32::from(n) * u32::try_from(part.size()).unwrap())
        };
        specs.sort_by_key(|spec| std::cmp::Reverse(size(spec)));
    }
    let (mut gpus, mut host, mut taken, mut before) = (gpus.to_vec(), host, 0, None);
    while before.replace(taken) != Some(taken) {
        taken += naive_once(&specs, &mut gpus, &mut host);
    }
    taken
}

fn naive_once(specs: &[Spec], gpus: &mut [Part], host: &mut HostAmounts) -> u32 {
    let mut taken = 0;
    for spec in specs {
        let of_none = Some((Part::default(), 0)).filter(|_| !spec.asks_for_gpus());
        let Some((part, n)) = of_none.or_else(|| part_of(spec.gpus, MODEL)) else {
            continue;
        };
        if spec.host.cpu_milli > host.cpu_milli || spec.host.memory > host.memory {
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
            gpus[*at] = Part {
                memory: gpus[*at].memory - part.memory,
                core: gpus[*at].core - part.core,
            };
            taken += u32::try_from(part.memory.max(part.core)).unwrap();
        }
        *host = host.less(spec.host);
    }
    taken
}

/// What is useless to pods, one by one.
fn naive_fragment(specs: &[Spec], gpus: &[Part], host: HostAmounts) -> u32 {
    let idle = |gpu: &Part| u64::try_from(gpu.memory.min(gpu.core)).unwrap();
    let (mut sum, mut n_pods) = (0, 0);
    for spec in specs.iter().filter(|spec| spec.asks_for_gpus()) {
        let Some((part, n)) = part_of(spec.gpus, MODEL) else {
            continue;
        };
        let (fitting, others): (Vec<&Part>, Vec<&Part>) = gpus
            .iter()
            .partition(|gpu| gpu.memory >= part.memory && gpu.core >= part.core);
        let has_host = spec.host.cpu_milli <= host.cpu_milli && spec.host.memory <= host.memory;
        let useless = if has_host && fitting.len() >= usize::from(n) {
            others
        } else {
            gpus.iter().collect()
        };
        sum += useless.into_iter().map(idle).sum::<u64>();
        n_pods += 1;
    }
    u32::try_from((sum * 8).checked_div(n_pods).unwrap_or(0)).unwrap()
}

fn gpu_ask() -> impl Strategy<Value = GpuAsk> {
    let memory = prop_oneof![
        (1_u32..=100).prop_map(MemoryAsk::Ratio),
        (1_u64..1100).prop_map(MemoryAsk::Bytes),
        (1_u64..110).prop_map(MemoryAsk::Units),
    ];
    let share =
        (1_u32..4, memory, select(vec![0_u32, 10, 50, 100])).prop_map(|(devices, memory, core)| Request {
            devices,
            memory,
            core,
            slots: 1,
        });
    prop_oneof![5 => share.prop_map(GpuAsk::Share), 1 => (0_u32..4).prop_map(GpuAsk::Whole), 1 => Just(GpuAsk::Nothing)]
}

fn spec() -> impl Strategy<Value = Spec> {
    let host = (0_u64..4000, 0_u64..5).prop_map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory });
    (gpu_ask(), host).prop_map(|(gpus, host)| Spec { gpus, host })
}

fn part() -> impl Strategy<Value = Part> {
    let amount = || prop_oneof![Just(0_i16), Just(WHOLE), 0..=WHOLE];
    (amount(), amount()).prop_map(|(memory, core)| Part { memory, core })
}

proptest! {
    #[test]
    fn a_node_is_worth_what_plain_play_takes(
        specs in proptest::collection::vec(spec(), 1..144),
        gpus in prop_oneof![4 => proptest::collection::vec(part(), 0..10), 1 => proptest::collection::vec(part(), MAX_GPUS)],
        host in (0_u64..30_000, 0_u64..40).prop_map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory }),
    ) {
        let expected: u32 = specs.chunks(36).flat_map(|specs| [false, true].map(|largest_first| naive(specs, largest_first, &gpus, host))).sum();
        let forecast = Forecast::of(&specs, MODEL);
        let lanes = Lanes::of(gpus.iter().copied());
        prop_assert_eq!(forecast.worth(&lanes, host), expected);
        prop_assert_eq!(forecast.fragment(&lanes, host), naive_fragment(&specs, &gpus, host));
    }
}

#[rstest]
#[case::nothing_taken([1000; 8], 8000)]
#[case::one_broken([900, 1000, 1000, 1000, 1000, 1000, 1000, 1000], 6125)]
#[case::half([0, 0, 0, 0, 1000, 1000, 1000, 1000], 2000)]
#[case::all_broken([999; 8], 0)]
fn idle_gpus_are_worth_more_together(#[case] free: [i16; 8], #[case] expected: u64) {
    assert_eq!(
        Lanes::of(free.map(|memory| Part { memory, core: WHOLE }).into_iter()).idle(),
        expected
    );
}

#[rstest]
#[case::enough(Some((8000, 80)), 300)]
#[case::too_little_cpu(Some((7999, 80)), 150)]
#[case::too_little_memory(Some((8000, 79)), 150)]
#[case::not_known(None, 300)]
fn caution_halves_where_cpu_or_memory_run_out_before_gpus(
    #[case] host: Option<(u64, u64)>,
    #[case] expected: u64,
) {
    let spec = |gpus, cpu_milli, memory| Spec {
        gpus,
        host: HostAmounts { cpu_milli, memory },
    };
    // Two GPUs, and 2000 m and 20 bytes beside them.
    let sample = vec![spec(GpuAsk::Whole(2), 1500, 10), spec(GpuAsk::Nothing, 500, 10)];
    let host = host.map(|(cpu_milli, memory)| HostAmounts { cpu_milli, memory });
    assert_eq!(Forecast::of(&sample, MODEL).caution(8, host), expected);
}

#[rstest]
#[case::percent(MemoryAsk::Ratio(33), 0, Some((330, 0)))]
#[case::rounded_up(MemoryAsk::Bytes(331), 7, Some((331, 70)))]
#[case::units(MemoryAsk::Units(5), 0, Some((50, 0)))]
#[case::whole(MemoryAsk::Ratio(100), 100, Some((1000, 1000)))]
#[case::too_much_memory(MemoryAsk::Bytes(1001), 0, None)]
#[case::too_much_core(MemoryAsk::Bytes(1), 101, None)]
#[case::nothing(MemoryAsk::Bytes(0), 50, None)]
#[case::absurd(MemoryAsk::Units(u64::MAX), u32::MAX, None)]
fn shares_in_thousandths(#[case] memory: MemoryAsk, #[case] core: u32, #[case] expected: Option<(i16, i16)>) {
    let part = part_of(
        GpuAsk::Share(Request {
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
fn nothing_is_of_nothing() {
    assert_eq!(
        (thousandths_up(Memory::ZERO, Memory::ZERO), thousandths_down(1, 0)),
        (None, 0)
    );
}
