//! Who may bind what.

use rstest::rstest;
use serde_json::{Value, json};

use super::{Asking, refusal, request};
use crate::admission::{Rules, Verdict};

const ASKING: Asking = Asking(&[("default", "p")]);

fn rules() -> Rules {
    Rules { binders: Some(vec!["ours".to_owned()]), ..Rules::default() }
}

fn binding(user: &str, name: &str, annotations: &Value) -> proto::admission::AdmissionRequest {
    let object = json!({"metadata": {"name": name, "annotations": annotations}, "target": {"kind": "Node", "name": "n1"}});
    let mut request = request("CREATE", "pods", "binding", &object, &Value::Null);
    user.clone_into(&mut request.user_info.username);
    name.clone_into(&mut request.name);
    request
}

#[rstest]
#[case::ours("ours", "p", Value::Null)]
#[case::ours_with_devices("ours", "p", json!({"scheduling.koordinator.sh/device-allocated": "{}"}))]
#[case::pod_without_devices("other", "q", Value::Null)]
#[case::other_annotations("other", "q", json!({"a": "b"}))]
fn may(#[case] user: &str, #[case] pod: &str, #[case] annotations: Value) {
    assert_eq!(rules().validate(&binding(user, pod, &annotations), &ASKING).unwrap(), Verdict::ALLOWED);
}

#[rstest]
#[case::pod_with_devices("p", Value::Null)]
#[case::brings_devices_itself("q", json!({"scheduling.koordinator.sh/device-allocated": "{}"}))]
fn may_not(#[case] pod: &str, #[case] annotations: Value) {
    let message = refusal(rules().validate(&binding("other", pod, &annotations), &ASKING).unwrap());
    assert_eq!(message, format!("pod default/{pod} asks for devices, which \"other\" does not choose; only ours may bind it"));
    let off = Rules::default().validate(&binding("other", pod, &annotations), &ASKING).unwrap();
    assert_eq!(off, Verdict::ALLOWED, "the guard is off");
}
