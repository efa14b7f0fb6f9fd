use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

const LIMIT: usize = 5;

#[test]
fn the_refusal_text_alternates_so_that_kube_scheduler_retries() {
    let (mut retries, now) = (SampleRetries::default(), Instant::now());
    let texts: Vec<&str> = (0..3)
        .filter_map(|_| retries.refuse("a", LIMIT, 0, now))
        .collect();
    assert!(texts.len() == 3 && texts[0] != texts[1] && texts[0] == texts[2]);
}

#[test]
fn the_refusal_text_differs_after_room_has_opened() {
    let (mut retries, now) = (SampleRetries::default(), Instant::now());
    let texts: Vec<&str> = (0..4)
        .filter_map(|nth| retries.refuse("a", LIMIT, nth, now))
        .collect();
    assert!(
        texts.len() == 4 && texts.windows(2).all(|pair| pair[0] != pair[1]),
        "{texts:?}"
    );
}

#[test]
fn a_limited_number_of_pods_is_retried() {
    let (mut retries, now) = (SampleRetries::default(), Instant::now());
    let n_retried = (0..MAX_RETRIED + 10)
        .filter(|nth| retries.refuse(&nth.to_string(), LIMIT, 0, now).is_some())
        .count();
    assert_eq!(n_retried, MAX_RETRIED);
    retries.forget("0");
    let mut is_retried = |uid: &str, at| retries.refuse(uid, LIMIT, 0, at).is_some();
    assert!(is_retried("another", now) && !is_retried("a third", now));
    assert!(
        is_retried("a third", now + RETRIED_WITHIN),
        "the others have gone"
    );
}

/// kube-scheduler with nothing else to do tries a pod again at once, without a back-off.
#[test]
fn retries_end_until_room_opens() {
    let (mut retries, now) = (SampleRetries::default(), Instant::now());
    let mut n_retried = |n_openings, at| {
        (0..20)
            .filter(|_| retries.refuse("a", LIMIT, n_openings, at).is_some())
            .count()
    };
    assert_eq!(
        [n_retried(1, now), n_retried(1, now), n_retried(2, now)],
        [5, 0, 5]
    );
    assert_eq!(
        n_retried(2, now + RETRIED_WITHIN),
        5,
        "kube-scheduler itself tries the pod after five minutes"
    );
    assert_eq!(
        [SampleRetries::limit(500, 230), SampleRetries::limit(15_000, 750)],
        [14, 48]
    );
}

#[test]
fn a_request_about_the_same_nodes_is_not_a_sample() {
    let mut retries = SampleRetries::default();
    let is_sample = [1, 2, 2, 1].map(|nodes| retries.is_sample("a", nodes));
    assert_eq!(is_sample, [true, true, false, true]);
}

const fn openings(all: u64, silent: u64) -> Openings {
    Openings { all, silent }
}

/// No waiting pods, after the first announcement that each new leader makes.
fn waiting(began: Instant) -> WaitingPods {
    let mut waiting = WaitingPods::default();
    waiting.announced(Openings::default(), began);
    waiting
}

/// Another process may have kept room, and refused pods for it.
#[test]
fn a_new_leader_announces_once() {
    let (mut waiting, now) = (WaitingPods::default(), Instant::now());
    assert!(waiting.is_due(Openings::default(), now));
    waiting.announced(Openings::default(), now);
    assert!(!waiting.is_due(Openings::default(), now + 60 * SECOND));
    waiting.refuse("a", openings(0, 0), now);
    waiting.clear();
    assert!(waiting.is_due(Openings::default(), now + SECOND) && waiting.pods.is_empty());
}

#[test]
fn a_pod_without_an_entry_is_not_forgotten() {
    let began = Instant::now();
    let mut waiting = waiting(began);
    for at in 0..=MAX_WAITING {
        waiting.refuse(&at.to_string(), openings(1, u64::from(at < MAX_WAITING)), began);
    }
    assert_eq!(waiting.pods.len(), MAX_WAITING);
    assert!(
        waiting.is_due(openings(1, 1), began + SECOND),
        "one of them was refused before that"
    );
    waiting.announced(openings(1, 1), began + SECOND);
    assert!(!waiting.is_due(openings(1, 1), began + 60 * SECOND));
}

/// An attempt without a known cause was made for room that the watch shows a moment later. An announcement is such a cause.
#[test]
fn attempts_without_a_cause_are_for_room_that_is_shown_later() {
    let began = Instant::now();
    for (is_announced, seconds, is_due) in [(false, 2, true), (false, 6, false), (true, 2, false)] {
        let mut waiting = waiting(began);
        waiting.refuse("a", openings(1, 0), began);
        if is_announced {
            waiting.announced(openings(1, 0), began + SECOND);
        }
        let again = began + 2 * SECOND;
        waiting.refuse("a", openings(1, 0), again);
        assert_eq!(waiting.is_due(openings(2, 0), again + seconds * SECOND), is_due);
    }
}

#[test]
fn a_refusal_is_repeated_if_no_room_has_opened_since_the_last_one() {
    let began = Instant::now();
    let mut waiting = waiting(began);
    let is_repeated = [("a", 1), ("a", 1), ("a", 2), ("b", 2)]
        .map(|(uid, all)| waiting.refuse(uid, openings(all, 0), began));
    assert_eq!(is_repeated, [false, true, false, false]);
}

/// Something that happens to three pods, and a look after each that comes a quarter of a second later.
#[derive(Clone, Copy, Debug)]
enum Step {
    Refuse(u8),
    Bind(u8),
    Open,
    OpenSilently,
    Look,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => (0..3_u8).prop_map(Step::Refuse),
        1 => (0..3_u8).prop_map(Step::Bind),
        1 => Just(Step::Open),
        1 => Just(Step::OpenSilently),
        4 => Just(Step::Look),
    ]
}

/// A refused pod: the count at its refusal, and the times from which on each count was ahead of that.
type Expected = (Openings, Option<Instant>, Option<Instant>);

proptest! {
    /// Announcements are a second apart at least; none is made unless a pod waits that was refused before room opened; room that
    /// opens silently is announced within a second, and any other within fifteen unless the pod is asked about or bound.
    #[test]
    fn announcements_are_timely_and_only_made_for_waiting_pods(steps in prop::collection::vec(step(), 1..400)) {
        let look = Duration::from_millis(250);
        let began = Instant::now();
        let (mut waiting, mut now, mut count, mut last) = (waiting(began), began, Openings::default(), began);
        let mut refused: [Option<Expected>; 3] = [None; 3];
        for step in steps {
            match step {
                Step::Refuse(pod) => {
                    waiting.refuse(&pod.to_string(), count, now);
                    refused[usize::from(pod)] = Some((count, None, None));
                }
                Step::Bind(pod) => {
                    waiting.forget(&pod.to_string());
                    refused[usize::from(pod)] = None;
                }
                Step::Open => count.all += 1,
                Step::OpenSilently => count = Openings { all: count.all + 1, silent: count.silent + 1 },
                Step::Look => {}
            }
            for (at, all, silent) in refused.iter_mut().flatten() {
                if at.all < count.all { all.get_or_insert(now); }
                if at.silent < count.silent { silent.get_or_insert(now); }
            }
            if waiting.is_due(count, now) {
                prop_assert!(now - last >= ANNOUNCEMENT_INTERVAL);
                prop_assert!(refused.iter().flatten().any(|(at, ..)| at.is_before(count)), "for nothing");
                waiting.announced(count, now);
                last = now;
                for pod in &mut refused {
                    pod.take_if(|(at, ..)| at.is_before(count));
                }
            }
            for (_, all, silent) in refused.iter().flatten() {
                prop_assert!(silent.is_none_or(|since| now - since < ANNOUNCEMENT_INTERVAL), "too late");
                prop_assert!(all.is_none_or(|since| now - since < TRIED_WITHIN + ANNOUNCEMENT_INTERVAL), "missed");
            }
            now += look;
        }
    }
}
