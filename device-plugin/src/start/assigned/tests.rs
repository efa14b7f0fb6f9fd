//! The pods to mark.

use rstest::rstest;
use serde_json::{Value, json};

use super::*;
use crate::devices::extended_resource::ExtendedResource;
use crate::node::pods::{PodStage, PodUid};
use crate::tests::api_server::{ApiServer, failure};
use crate::tests::builders::{pod, pods, units};

/// True if a pod is to be marked.
fn is_due(stage: PodStage, has_started: bool, is_assigned: bool) -> bool {
    let mut log = AllocateLog::default();
    if has_started {
        log.note_start(&PodUid::from("a"), ExtendedResource::Memory, &[]);
    }
    let now = pod("a", 1, [units(1), units(2)]).at(stage).assigned(is_assigned);
    !unmarked(&pods([now]), &log).is_empty()
}

#[rstest]
#[case::not_started(PodStage::Admitted, false, false, false)]
#[case::let_start(PodStage::Bound, true, false, true)]
#[case::reported_meanwhile(PodStage::Admitted, true, false, true)]
#[case::unmarked_by_an_earlier_process(PodStage::Running, false, false, true)]
#[case::marked_already(PodStage::Running, true, true, false)]
#[case::failed(PodStage::Terminal, true, false, false)]
fn the_assigned_annotation_is_due_once_a_container_may_start(
    #[case] stage: PodStage,
    #[case] has_started: bool,
    #[case] marked: bool,
    #[case] expected: bool,
) {
    assert_eq!(is_due(stage, has_started, marked), expected);
}

/// Assigned is derived, not written, for pods of the other dialect.
#[test]
fn koordinator_pods_get_no_assigned_annotation() {
    let mut running = pod("a", 1, [units(1)]).at(PodStage::Running);
    running.placement.as_mut().unwrap().gpushare = None;
    assert_eq!(unmarked(&pods([running]), &AllocateLog::default()), []);
}

/// Marks a pod at an API server that answers with `code`; what was sent, and whether that counts as done.
async fn mark_with(code: u16, message: &str) -> (String, Value, bool) {
    let (client, mut server) = ApiServer::new();
    let due = NodePod {
        uid: PodUid::from("u1"),
        namespace: "team".to_owned(),
        ..pod("p", 1, [units(1)])
    };
    let mark = [(MEM_ASSIGNED.to_owned(), "true".to_owned())].into();
    let marking = tokio::spawn(async move { annotate(&client, &due, &mark).await });
    let object = match code {
        200 => json!({"metadata": {"name": "p"}}),
        _ => failure(code, "x", message),
    };
    let (line, body) = server.answer(code, &object).await;
    (line, body, marking.await.unwrap().is_ok())
}

/// The assume time is the order of the pods and stays as it is; the UID guards against a successor of the same name.
#[tokio::test]
async fn the_patch_writes_one_annotation_of_the_pod_with_that_uid() {
    let (line, body, is_done) = mark_with(200, "").await;
    assert_eq!(
        (line.as_str(), is_done),
        ("PATCH /api/v1/namespaces/team/pods/p", true)
    );
    assert_eq!(
        body,
        json!({"metadata": {"uid": "u1", "annotations": {"ALIYUN_COM_GPU_MEM_ASSIGNED": "true"}}})
    );
}

#[rstest]
#[case::gone(404, "pods \"p\" not found", true)]
#[case::replaced(
    409,
    "Precondition failed: UID in precondition: u1, UID in object meta: u2",
    true
)]
#[case::conflict(409, "the object has been modified", false)]
#[case::too_many(429, "later", false)]
#[case::broken(500, "etcd", false)]
#[tokio::test]
async fn a_failed_patch_is_repeated_unless_the_pod_is_gone(
    #[case] code: u16,
    #[case] message: &str,
    #[case] is_done: bool,
) {
    assert_eq!(mark_with(code, message).await.2, is_done);
}
