//! Explanations, as a terminal shows them.

use proto::read_api::PodName;
use rstest::rstest;

use super::*;
use crate::args::Format;

const GIB: u64 = 1 << 30;
const SCREEN: Screen = Screen {
    width: Some(100),
    has_colour: false,
    has_blocks: false,
    has_headers: true,
    format: Format::Table,
};

#[rstest]
#[case::name(&["web"], "default/web")]
#[case::kind_and_name(&["pod", "web"], "default/web")]
#[case::kind_slash_name(&["pod/web"], "default/web")]
#[case::namespace(&["train/web"], "train/web")]
#[case::two_names(&["web", "api"], "\"web api\" is no pod: write NAME, or pod NAME")]
#[case::path(&["../../state"], "\"../../state\" is no name of a pod")]
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
        reason: "not enough free GPU memory on any one GPU of the node".to_owned(),
        needed: 8 * GIB,
        free: 6 * GIB,
        ..GpuVerdict::default()
    };
    Explanation {
        namespace: "default".to_owned(),
        name: "web".to_owned(),
        asked: "8 GiB".to_owned(),
        nodes: 41,
        reasons: [
            (gpu.reason.clone(), 40),
            ("too few healthy GPUs on the node".to_owned(), 1),
        ]
        .into(),
        verdicts: vec![NodeVerdict {
            node: "n17".to_owned(),
            reason: gpu.reason.clone(),
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
    insta::assert_snapshot!(render(&waiting(), &SCREEN, false));
}

#[test]
fn other_states() {
    let bound = Explanation {
        node: Some("n1".to_owned()),
        ..waiting()
    };
    let invalid = Explanation {
        invalid: Some("the pod asks for memory units and for bytes".to_owned()),
        ..waiting()
    };
    let mut fitting = waiting();
    fitting.fitting = 1;
    fitting.verdicts.truncate(0);
    fitting.verdicts.push(NodeVerdict {
        node: "n2".to_owned(),
        fits: true,
        ..NodeVerdict::default()
    });
    fitting.reasons.clear();
    let no_nodes = Explanation {
        nodes: 0,
        reasons: [].into(),
        verdicts: Vec::new(),
        ..waiting()
    };
    let texts: Vec<String> = [bound, invalid, fitting, no_nodes]
        .iter()
        .map(|explanation| render(explanation, &SCREEN, false))
        .collect();
    insta::assert_snapshot!(texts.join("---\n"));
}
