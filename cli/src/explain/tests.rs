//! Explanations, as a terminal shows them.

use proto::pod_group::DomainPolicy;
use proto::read_api::{ExplainedRoom, GpuVerdict, PodName};
use rstest::rstest;

use super::*;

const GIB: u64 = 1 << 30;
const REASON: &str = "not enough free GPU memory on any one GPU of the node (asked: 8 GiB of one GPU)";

#[rstest]
#[case::name(&["web"], "default/web")]
#[case::kind_and_name(&["pod", "web"], "default/web")]
#[case::kind_slash_name(&["pod/web"], "default/web")]
#[case::namespace(&["train/web"], "train/web")]
#[case::two_names(&["web", "api"], "\"web api\" is no pod: write NAME, or pod NAME")]
#[case::path(&["../../state"], "\"../../state\" is no name of a pod: write NAME, or NAMESPACE/NAME")]
fn names(#[case] words: &[&str], #[case] expected: &str) {
    let words: Vec<String> = words.iter().map(ToString::to_string).collect();
    let found = match pod_name(&words, "default") {
        Ok((namespace, name)) => format!("{namespace}/{name}"),
        Err(failure) => failure.to_string(),
    };
    assert_eq!(found, expected);
}

fn waiting() -> Explanation {
    let gpu = GpuVerdict {
        minor: 3,
        reason: "has too little memory free".to_owned(),
        lacks: "lacks 2 GiB".to_owned(),
        needed: 8 * GIB,
        free: 6 * GIB,
        ..GpuVerdict::default()
    };
    Explanation {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        asked: "8 GiB".to_owned(),
        nodes: 41,
        summary: vec![
            "Nearest: n17: GPU 3 lacks 2 GiB.".to_owned(),
            "It fits on n17 when train/job-1 ends.".to_owned(),
        ],
        kube_scheduler: Some(
            "0/41 nodes are available: 1 Insufficient cpu, 40 not enough free GPU memory on any one GPU of the node (asked: 8 GiB of one GPU)."
                .to_owned(),
        ),
        reasons: [(REASON.to_owned(), 40), ("Insufficient cpu".to_owned(), 1)].into(),
        verdicts: vec![NodeVerdict {
            node: "n17".to_owned(),
            reason: REASON.to_owned(),
            would_fit_without: vec![PodName {
                namespace: "train".to_owned(),
                name: "job-1".to_owned(),
            }],
            gpus: vec![gpu],
            ..NodeVerdict::default()
        }],
        ..Explanation::default()
    }
}

#[test]
fn the_nearest_miss() {
    insta::assert_snapshot!(render(&waiting(), &Screen::plain(100), false));
}

#[test]
fn other_states() {
    let bound = Explanation {
        node: Some("n1".to_owned()),
        warning: Some("koordinator.sh/gpu-memory is 8192 bytes; did you mean 8192Mi?".to_owned()),
        ..waiting()
    };
    let rule = "the pod asks for memory units and for bytes";
    let invalid = Explanation {
        invalid: Some(rule.to_owned()),
        summary: vec![format!(
            "It fits no node, whatever is free: {rule}. Correct the pod's manifest, or its controller's template, and create the pod again."
        )],
        kube_scheduler: None,
        ..waiting()
    };
    let mut invalid_of_an_old_scheduler = invalid.clone();
    invalid_of_an_old_scheduler.summary.clear();
    let mut fitting = waiting();
    (fitting.fitting, fitting.kube_scheduler) = (1, None);
    fitting.summary = vec!["n2 takes it: kube-scheduler has not tried it yet.".to_owned()];
    fitting.verdicts.truncate(0);
    fitting.verdicts.push(NodeVerdict {
        node: "n2".to_owned(),
        fits: true,
        ..NodeVerdict::default()
    });
    fitting.reasons.clear();
    let no_nodes = Explanation {
        nodes: 0,
        summary: vec![
            "The cluster has no node that the scheduler knows: see `kubectl get nodes`.".to_owned(),
        ],
        kube_scheduler: None,
        reasons: [].into(),
        verdicts: Vec::new(),
        ..waiting()
    };
    let texts: Vec<String> = [bound, invalid, invalid_of_an_old_scheduler, fitting, no_nodes]
        .iter()
        .map(|explanation| render(explanation, &Screen::plain(100), false))
        .collect();
    insta::assert_snapshot!(texts.join("---\n"));
}

#[test]
fn a_node_that_refuses_by_a_rule_hides_gpus_with_room() {
    let mut tainted = waiting();
    (tainted.nodes, tainted.verdicts[0].detail) =
        (1, Some("the pod does not tolerate taint a:NoSchedule".to_owned()));
    tainted.verdicts[0].gpus[0].fits = true;
    let shown = [false, true].map(|all| render(&tainted, &Screen::plain(100), all));
    assert!(shown[0].contains("--all shows every one") && !shown[0].contains("has room"));
    assert!(!shown[1].contains("--all shows every one") && shown[1].contains("has room"));
}

fn place(name: &str, gpus: &[u32]) -> MemberPlace {
    MemberPlace {
        name: name.to_owned(),
        node: "n2".to_owned(),
        gpus: gpus.to_vec(),
    }
}

#[test]
fn groups() {
    let plain = ExplainedGroup {
        name: "train".to_owned(),
        size: 4,
        ..ExplainedGroup::default()
    };
    let differing = ExplainedGroup {
        differing: vec!["train-2".to_owned(), "train-3".to_owned()],
        ..plain.clone()
    };
    let with_wish = ExplainedGroup {
        domain: GroupDomain::Link,
        policy: DomainPolicy::Required,
        kind: GroupKind::Koordinator,
        ..plain.clone()
    };
    let refused = ExplainedGroup {
        refused: Some(
            "no link group has room for 4 pods of 8 GiB of one GPU; the largest has room for 3".to_owned(),
        ),
        ..with_wish.clone()
    };
    let kept = ExplainedGroup {
        bound: vec![place("train-0", &[0])],
        room: Some(ExplainedRoom {
            node: "n2".to_owned(),
            members: vec![place("train-1", &[1, 2]), place("train-2", &[])],
            open: 1,
            open_gpus: vec![3],
        }),
        ..with_wish.clone()
    };
    let placed = ExplainedGroup {
        size: 1,
        room: None,
        ..kept.clone()
    };
    let shown = |group: &ExplainedGroup, node: Option<&str>| {
        let explanation = Explanation {
            node: node.map(ToOwned::to_owned),
            group: Some(group.clone()),
            verdicts: Vec::new(),
            reasons: [].into(),
            ..waiting()
        };
        render(&explanation, &Screen::plain(100), false)
    };
    let texts = [
        shown(&plain, None),
        shown(&differing, None),
        shown(&with_wish, None),
        shown(&refused, None),
        shown(&kept, None),
        shown(&placed, Some("n2")),
    ];
    insta::assert_snapshot!(texts.join("---\n"));
}
