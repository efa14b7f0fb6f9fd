//! Tables for each rule, and random histories against a model that looks at the whole history.

use proptest::prelude::*;
use rstest::rstest;

use super::*;
use ObservationKind::{
    Answered, AnsweredWithoutFault, Failed, InventoryChanged, Lost, MigMode, NeedsReset, Xid,
};

const A: &str = "GPU-a";
const B: &str = "GPU-b";

fn uuid(text: &str) -> PhysicalId {
    text.parse().unwrap()
}

fn seconds(n: u64) -> Duration {
    Duration::from_secs(n)
}

fn of(device: &str, kind: ObservationKind) -> Observation {
    Observation {
        device: Some(uuid(device)),
        kind,
    }
}

fn failed() -> ObservationKind {
    Failed("no".to_owned())
}

fn two_devices() -> Health {
    Health::new(HealthPolicy::default(), [uuid(A), uuid(B)])
}

/// Observes `history` (seconds and what was seen) of device A and says its changes, each with its
/// time.
fn changes(health: &mut Health, history: &[(u64, ObservationKind)]) -> Vec<(u64, bool, String)> {
    let observe = |(at, kind): &(u64, ObservationKind)| {
        let change = health.observe(seconds(*at), &of(A, kind.clone()))?;
        assert_eq!(change.device, uuid(A));
        Some((*at, change.is_healthy, change.reason.to_string()))
    };
    history.iter().filter_map(observe).collect()
}

#[rstest]
#[case::critical_xid(Xid(92), Some(HealthReason::Xid(92)))]
#[case::unnamed_xid(Xid(999), Some(HealthReason::Xid(999)))]
#[case::graphics_exception(Xid(13), None)]
#[case::page_fault(Xid(31), None)]
#[case::stopped_processing(Xid(43), None)]
#[case::preemptive_cleanup(Xid(45), None)]
#[case::video_exception(Xid(68), None)]
#[case::preemption_timeout(Xid(109), None)]
#[case::lost(Lost, Some(HealthReason::Lost))]
#[case::failed(failed(), Some(HealthReason::ProbeFailed))]
#[case::needs_a_reset(NeedsReset("GPU reset".to_owned()), Some(HealthReason::NeedsReset))]
#[case::answered(Answered, None)]
#[case::sound(AnsweredWithoutFault, None)]
#[case::inventory(InventoryChanged, None)]
fn each_observation_of_a_healthy_device_has_its_reason(
    #[case] kind: ObservationKind,
    #[case] expected: Option<HealthReason>,
) {
    let mut health = two_devices();
    let change = health.observe(seconds(1), &of(A, kind));
    assert_eq!(
        change.map(|change| (change.device, change.is_healthy, change.reason)),
        expected.map(|reason| (uuid(A), false, reason))
    );
    assert_eq!(health.trouble(&uuid(A)), expected);
    assert_eq!(health.is_healthy(&uuid(A)), expected.is_none());
    assert!(health.is_healthy(&uuid(B)));
}

/// Neither takes the node's devices away: the watch probes them, and those that fail are sick.
#[rstest]
#[case::of_no_device(None)]
#[case::of_another_device(Some("GPU-elsewhere"))]
fn an_error_without_a_known_device_changes_no_health(#[case] device: Option<&str>) {
    let mut health = two_devices();
    for kind in [Xid(92), Lost, failed()] {
        assert_eq!(
            health.observe(
                seconds(1),
                &Observation {
                    device: device.map(uuid),
                    kind
                }
            ),
            None
        );
    }
    assert!(health.is_healthy(&uuid(A)) && health.is_healthy(&uuid(B)));
}

#[rstest]
#[case::enough_answers_and_quiet(&[30, 60, 90], Some(90))]
#[case::quiet_passes_between_answers(&[10, 20, 30, 59, 60], Some(60))]
#[case::not_quiet_for_long_enough(&[10, 20, 30, 59], None)]
#[case::too_few_answers(&[60, 120], None)]
#[case::late_answers(&[1000, 1001, 1002], Some(1002))]
fn recovery_needs_answers_and_a_quiet_time(#[case] answers: &[u64], #[case] recovered: Option<u64>) {
    for trouble in [Xid(92), Lost, failed()] {
        let mut health = two_devices();
        assert!(health.observe(seconds(0), &of(A, trouble)).is_some());
        let answers: Vec<_> = answers.iter().map(|at| (*at, Answered)).collect();
        let expected: Vec<_> = recovered
            .iter()
            .map(|at| (*at, true, "Recovered".to_owned()))
            .collect();
        assert_eq!(changes(&mut health, &answers), expected);
        assert_eq!(health.is_healthy(&uuid(A)), recovered.is_some());
    }
}

#[rstest]
#[case::xid_again(Xid(92), 3, 131)]
#[case::failed_probe(failed(), 3, 131)]
#[case::xid_of_an_application(Xid(31), 0, 73)]
fn an_error_during_recovery_restarts_it(
    #[case] trouble: ObservationKind,
    #[case] extra: u64,
    #[case] at: u64,
) {
    let mut health = two_devices();
    let answers = |from: u64, n: u64| (from..from + n).map(|at| (at, Answered));
    let history: Vec<_> = [(0, Xid(92)), (70, Answered)]
        .into_iter()
        .chain([(71, trouble)])
        .chain(answers(72, 2 + extra))
        .chain(answers(131, 1))
        .collect();
    let recovered: Vec<_> = changes(&mut health, &history)
        .into_iter()
        .filter(|(_, healthy, _)| *healthy)
        .collect();
    assert_eq!(recovered, [(at, true, "Recovered".to_owned())]);
}

/// One message per change: the old plugin sent one for every virtual device.
#[test]
fn a_repeated_error_is_reported_once_and_another_one_again() {
    let history = [(1, Xid(92)), (2, Xid(92)), (3, Lost), (4, Lost), (5, Xid(48))];
    let expected =
        [(1, "Xid92"), (3, "Lost"), (5, "Xid48")].map(|(at, reason)| (at, false, reason.to_owned()));
    assert_eq!(changes(&mut two_devices(), &history), expected);
}

#[test]
fn messages_name_the_fault_and_the_remedy() {
    let policy = HealthPolicy {
        quiet: seconds(5),
        ..HealthPolicy::default()
    };
    let mut health = Health::new(policy, [uuid(A)]);
    let mut message = |at, kind| {
        health
            .observe(seconds(at), &of(A, kind))
            .map(|change| change.message)
    };
    insta::assert_snapshot!(message(0, failed()).unwrap(), @"the device does not answer: no; if that lasts, see the node's kernel log; it is healthy again after 3 probes and 5 s without trouble");
    insta::assert_snapshot!(message(0, Lost).unwrap(), @"the device fell off the bus or is not listed any more; if it does not come back, restart the node; it is healthy again after 3 probes and 5 s without trouble");
    insta::assert_snapshot!(message(1, Xid(92)).unwrap(), @"the driver reported critical error XID 92; it is healthy again after 3 probes and 5 s without trouble");
    assert_eq!(message(5, Answered), None);
    assert_eq!(message(6, Answered), None);
    insta::assert_snapshot!(message(7, Answered).unwrap(), @"the device answered 3 probes in 6 s without trouble since Xid92");
}

#[test]
fn a_new_list_of_devices_keeps_the_health_of_those_that_stay() {
    let mut health = two_devices();
    health.observe(seconds(0), &of(A, Lost));
    health.observe(seconds(0), &of(B, Lost));
    health.set_devices([uuid(A), uuid("GPU-c")]);
    assert_eq!(health.trouble(&uuid(A)), Some(HealthReason::Lost));
    assert!(health.is_healthy(&uuid("GPU-c")));
    assert!(
        !health.is_healthy(&uuid(B)),
        "a device that is not there is not healthy"
    );
    health.set_devices([uuid(B)]);
    assert!(health.is_healthy(&uuid(B)), "its old state is forgotten");
}

#[test]
fn a_clock_that_goes_back_adds_no_quiet_time() {
    let history: Vec<_> = (0..5).map(|_| (10, Answered)).collect();
    let mut health = two_devices();
    health.observe(seconds(100), &of(A, Lost));
    assert_eq!(changes(&mut health, &history), []);
}

/// Whole minutes of quiet that recoveries took when trouble came `gap` after each of them.
#[rstest]
#[case::first(0, 0, &[1])]
#[case::doubled_for_each_relapse(300, 5, &[1, 2, 4, 8, 16, 32])]
#[case::at_most_an_hour(0, 8, &[1, 2, 4, 8, 16, 32, 60, 60, 60])]
#[case::a_day_later_is_a_relapse(24 * 3600, 2, &[1, 2, 4])]
#[case::forgotten_after_a_day(24 * 3600 + 1, 2, &[1, 1, 1])]
fn relapses_take_longer(#[case] gap: u64, #[case] relapses: usize, #[case] expected: &[u64]) {
    let mut health = two_devices();
    let (mut now, mut taken) = (0, Vec::new());
    for _ in 0..=relapses {
        now += gap;
        assert!(!health.observe(seconds(now), &of(A, Xid(92))).unwrap().is_healthy);
        let began = now;
        while health.trouble(&uuid(A)).is_some() {
            now += 1;
            health.observe(seconds(now), &of(A, Answered));
        }
        taken.push((now - began) / 60);
    }
    assert_eq!(taken, expected);
    assert!(health.is_healthy(&uuid(B)));
}

#[test]
fn errors_before_recovery_are_no_relapse_and_do_not_shorten_a_long_quiet_time() {
    let policy = HealthPolicy {
        quiet: LONGEST_QUIET * 2,
        answers: NonZeroU32::MIN,
        ..HealthPolicy::default()
    };
    let mut health = Health::new(policy, [uuid(A)]);
    for at in [0, 1, 2] {
        health.observe(seconds(at), &of(A, Xid(92)));
    }
    let recovery = changes(&mut health, &[(7201, Answered), (7202, Answered)]);
    assert_eq!(recovery, [(7202, true, "Recovered".to_owned())]);
    let change = health.observe(seconds(7300), &of(A, Lost)).unwrap();
    assert_eq!(
        change.message,
        "the device fell off the bus or is not listed any more; if it does not come back, restart the node; it is healthy again after 1 probes \
         and 7200 s without trouble (relapse 1)"
    );
}

/// The quiet time starts again with the process.
#[test]
fn an_xid_of_an_earlier_process_is_restored() {
    let mut health = two_devices();
    let change = health
        .load(seconds(5), &uuid(A), 92, "2026-01-01T00:00:00Z")
        .unwrap();
    insta::assert_snapshot!(change.message, @"the driver reported critical error XID 92 before this process began; unhealthy since 2026-01-01T00:00:00Z; it is healthy again after 3 probes and 60 s without trouble");
    assert_eq!(
        (change.is_healthy, health.trouble(&uuid(A))),
        (false, Some(HealthReason::Xid(92)))
    );
    let answers = [30, 60, 64, 65].map(|at| (at, Answered));
    assert_eq!(
        changes(&mut health, &answers),
        [(65, true, "Recovered".to_owned())]
    );
    assert_eq!(
        health.load(seconds(70), &uuid(B), 31, "then"),
        None,
        "an XID that applications cause by now"
    );
    assert_eq!(health.load(seconds(70), &uuid("GPU-gone"), 92, "then"), None);
}

#[rstest]
#[case("Xid92", Some(92))]
#[case("Xid", None)]
#[case("Lost", None)]
#[case("xid92", None)]
fn the_number_is_read_from_the_text_of_an_xid(#[case] word: &str, #[case] expected: Option<u64>) {
    assert_eq!(HealthReason::xid(word), expected);
}

/// The illness that a device's whole history amounts to: each recovery cuts off what came before it
/// and doubles the quiet time of what follows.
fn model(policy: &HealthPolicy, history: &[(Duration, ObservationKind)]) -> Option<HealthReason> {
    let (mut rest, mut policy) = (history, policy.clone());
    for end in 1..=history.len() {
        let now = rest.len() - (history.len() - end);
        let before = first_trouble(&policy, &rest[..now - 1]);
        if before.is_some() && first_trouble(&policy, &rest[..now]).is_none() {
            rest = &rest[now..];
            policy.quiet *= 2;
        }
    }
    first_trouble(&policy, rest)
}

/// That of the last trouble, unless later some answer was at least the `answers`th since then and came
/// after the quiet time. Answers count from the moment at which no reset is needed.
fn first_trouble(policy: &HealthPolicy, history: &[(Duration, ObservationKind)]) -> Option<HealthReason> {
    let reason = |kind: &ObservationKind| match kind {
        Xid(xid) if policy.xids.class(*xid) != XidClass::Application => Some(HealthReason::Xid(*xid)),
        Lost => Some(HealthReason::Lost),
        Failed(_) => Some(HealthReason::ProbeFailed),
        MigMode => Some(HealthReason::MigMode),
        NeedsReset(_) => Some(HealthReason::NeedsReset),
        _ => None,
    };
    let last = history.iter().rposition(|(_, kind)| reason(kind).is_some())?;
    let asks = |kind: &ObservationKind| match reason(kind) {
        Some(HealthReason::Xid(xid)) => policy.xids.class(xid) == XidClass::Reset,
        other => other == Some(HealthReason::NeedsReset),
    };
    let asked = history.iter().rposition(|(_, kind)| asks(kind));
    let is_proof = |kind: &ObservationKind| matches!(kind, AnsweredWithoutFault | Lost);
    let proven = asked.map(|asked| {
        let later = history.iter().enumerate().skip(asked + 1);
        later
            .filter(|(_, (_, kind))| is_proof(kind))
            .map(|(at, _)| at)
            .next()
    });
    let counted_from = match proven {
        None => last + 1,
        Some(Some(at)) => at.max(last + 1),
        Some(None) => history.len(),
    };
    let is_answer = |kind: &ObservationKind| matches!(kind, Answered | AnsweredWithoutFault);
    let answers = history[counted_from..].iter().filter(|(_, kind)| is_answer(kind));
    let since = history[last].0;
    if answers
        .skip(policy.answers.get() as usize - 1)
        .any(|(at, _)| *at >= since + policy.quiet)
    {
        return None;
    }
    // The need of a reset does not hide the XID right before it.
    let troubles = history[..=last].iter().rev().filter_map(|(_, kind)| reason(kind));
    troubles
        .clone()
        .find(|reason| *reason != HealthReason::NeedsReset)
        .filter(|cause| matches!(cause, HealthReason::Xid(_)))
        .or_else(|| {
            let mut troubles = troubles;
            troubles.next()
        })
}

fn any_kind() -> impl Strategy<Value = ObservationKind> {
    prop_oneof![
        8 => Just(Answered),
        1 => Just(AnsweredWithoutFault),
        1 => Just(NeedsReset("GPU reset".to_owned())),
        1 => prop::sample::select(vec![13, 31, 48, 92, 999]).prop_map(Xid),
        1 => Just(Lost),
        1 => Just(failed()),
        1 => Just(InventoryChanged),
    ]
}

proptest! {
    #[test]
    fn health_agrees_with_a_model_of_the_whole_history(
        steps in prop::collection::vec((0..20_u64, prop::option::weighted(0.9, 0..3_usize), any_kind()), 0..80),
        answers in 1..4_u32,
        quiet in 0..40_u64,
        xids in prop::sample::select(vec!["all=application", "all=critical,48=reset", "92=application"]),
    ) {
        let policy = HealthPolicy {
            xids: xids.parse().unwrap(),
            answers: NonZeroU32::new(answers).unwrap(),
            quiet: seconds(quiet),
        };
        // The third device is not ours.
        let uuids = [uuid(A), uuid(B), uuid("GPU-c")];
        let mut health = Health::new(policy.clone(), uuids[..2].iter().cloned());
        let mut histories = vec![Vec::new(); 3];
        let mut now = Duration::ZERO;
        for (wait, device, kind) in steps {
            now += seconds(wait);
            let before = uuids.clone().map(|uuid| health.trouble(&uuid));
            let observation = Observation { device: device.map(|at| uuids[at].clone()), kind: kind.clone() };
            let change = health.observe(now, &observation);
            if let Some(at) = device {
                histories[at].push((now, kind));
            }
            for at in 0..2 {
                prop_assert_eq!(health.trouble(&uuids[at]), model(&policy, &histories[at]));
            }
            let changed = (0..3).find(|at| health.trouble(&uuids[*at]) != before[*at]);
            prop_assert_eq!(change.as_ref().map(|change| &change.device), changed.map(|at| &uuids[at]));
            if let Some(change) = change {
                let illness = health.trouble(&change.device);
                prop_assert_eq!(change.is_healthy, illness.is_none());
                prop_assert_eq!(change.reason, illness.unwrap_or(HealthReason::Recovered));
            }
        }
    }
}

/// An XID that an application causes is a fault for its pods and leaves the device healthy.
#[rstest]
#[case::application(31, Some(31), false)]
#[case::device(92, None, true)]
fn xids_of_applications_leave_the_device_healthy(
    #[case] xid: u64,
    #[case] fault: Option<u64>,
    #[case] is_sick: bool,
) {
    let mut health = Health::new(HealthPolicy::default(), [uuid(A)]);
    let seen = |device: Option<PhysicalId>| Observation {
        device,
        kind: Xid(xid),
    };
    assert_eq!(
        health
            .application_fault(&seen(Some(uuid(A))))
            .map(|fault| fault.xid),
        fault
    );
    assert_eq!(health.application_fault(&seen(None)), None, "of no device");
    assert_eq!(
        health.application_fault(&seen(Some(uuid("GPU-c")))),
        None,
        "of another's device"
    );
    health.observe(Duration::ZERO, &seen(Some(uuid(A))));
    assert_eq!(health.is_healthy(&uuid(A)), !is_sick);
}

/// Time does not heal what needs a reset; each way in which a reset is seen does, or an operator.
#[rstest]
#[case::by_xid(Xid(48))]
#[case::by_driver(NeedsReset("GPU reset".to_owned()))]
fn a_device_that_needs_a_reset_recovers_only_after_it(#[case] trouble: ObservationKind) {
    let sick = || {
        let mut health = two_devices();
        let change = health.observe(seconds(0), &of(A, trouble.clone())).unwrap();
        assert!(
            change
                .message
                .ends_with("until it has been reset (`nvidia-smi --gpu-reset`), the node has booted, or an operator clears it"),
            "{}",
            change.message
        );
        assert_eq!(changes(&mut health, &[(30, Answered), (9_000, Answered)]), []);
        health
    };
    let answers = |kind: ObservationKind| [9_001, 9_002, 9_003].map(|at| (at, kind.clone()));
    assert_eq!(changes(&mut sick(), &answers(Answered)), [], "time alone");
    assert_eq!(
        changes(&mut sick(), &answers(AnsweredWithoutFault)),
        [(9_003, true, "Recovered".to_owned())]
    );
    let mut lost = sick();
    assert_eq!(
        changes(&mut lost, &[(9_000, Lost)]),
        [(9_000, false, "Lost".to_owned())]
    );
    let found = [9_050, 9_060, 9_070].map(|at| (at, Answered));
    assert_eq!(
        changes(&mut lost, &found),
        [(9_070, true, "Recovered".to_owned())],
        "lost and found"
    );
    let mut cleared = sick();
    assert_eq!(
        cleared.clear(seconds(9_001), &uuid(A)).unwrap().reason,
        HealthReason::Cleared
    );
    assert!(cleared.is_healthy(&uuid(A)));
    assert_eq!(
        cleared.clear(seconds(9_002), &uuid(A)),
        None,
        "nothing is left to be cleared"
    );
    let again = cleared.observe(seconds(9_003), &of(A, trouble)).unwrap();
    assert!(
        again.message.contains("relapse 1"),
        "an operator's word lasts until the next trouble: {}",
        again.message
    );
}

/// Other trouble meanwhile does not make the device forget that it needs a reset.
#[test]
fn a_failed_probe_does_not_replace_the_need_for_a_reset() {
    let history = [(0, Xid(95)), (1, failed())];
    let mut health = two_devices();
    assert_eq!(changes(&mut health, &history).len(), 2);
    let answers: Vec<_> = (70..80).map(|at| (at, Answered)).collect();
    assert_eq!(changes(&mut health, &answers), []);
}

/// The driver's own word comes after its XID, and does not hide it.
#[test]
fn the_recovery_action_of_the_driver_does_not_replace_the_xid() {
    let history = [(0, Xid(95)), (1, NeedsReset("GPU reset".to_owned()))];
    assert_eq!(
        changes(&mut two_devices(), &history),
        [(0, false, "Xid95".to_owned())]
    );
}
