//! The writes of the leader's object and their order, and the effects of a refusal by the API server.

use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Request, Response};
use http_body_util::BodyExt;
use kube::client::Body;
use rstest::rstest;

use super::super::election::LeaseTimes;
use super::*;

/// An API server with the Lease, the object `SchedulerLeader`, and bindings.
#[derive(Debug, Default)]
struct Server {
    /// The holder in the Lease.
    lease: String,
    /// Version and holder of the object; `None` if it does not exist.
    object: Option<(u64, String)>,
    /// True if another replica has just written the object whenever it is read.
    is_contended: bool,
    /// The HTTP status of the answer to a binding.
    binding: u16,
    /// Requests in order, without those that read.
    written: Vec<String>,
}

type Shared = Arc<Mutex<Server>>;

impl Server {
    fn answer(&mut self, method: &Method, path: &str, body: &Value) -> (u16, Value) {
        if *method != Method::GET {
            self.written.push(format!(
                "{method} {}",
                path.rsplit('/').next().unwrap_or_default()
            ));
        }
        if path.contains("/leases/") {
            return (200, json!({"spec": {"holderIdentity": self.lease}}));
        }
        if path.contains("/binding") {
            return (self.binding, json!({"message": "so it is"}));
        }
        if path.ends_with("/events") {
            return (201, json!({}));
        }
        if *method == Method::GET {
            let Some((version, holder)) = self.object.clone() else {
                return (404, json!({}));
            };
            if self.is_contended {
                self.object = Some((version + 1, holder.clone()));
            }
            return (
                200,
                json!({"metadata": {"resourceVersion": version.to_string()}, "spec": {"holderIdentity": holder}}),
            );
        }
        let version = self.object.as_ref().map(|(version, _)| version.to_string());
        if body.pointer("/metadata/resourceVersion").and_then(Value::as_str) != version.as_deref() {
            return (409, json!({"message": "another version"}));
        }
        let holder = body
            .pointer("/spec/holderIdentity")
            .and_then(Value::as_str)
            .unwrap_or_default()
            .to_owned();
        self.object = Some((self.object.as_ref().map_or(1, |(version, _)| version + 1), holder));
        (200, body.clone())
    }
}

/// A fence of the pod ns/pod-1, which leads, and its server.
fn fence(server: Server) -> (Fence, Shared) {
    let shared = Arc::new(Mutex::new(server));
    let state = Arc::clone(&shared);
    let service = tower::service_fn(move |request: Request<Body>| {
        let state = Arc::clone(&state);
        async move {
            let (head, body) = request.into_parts();
            let body = body.collect().await.unwrap().to_bytes();
            let (status, answer) = state.lock().unwrap().answer(
                &head.method,
                head.uri.path(),
                &serde_json::from_slice(&body).unwrap_or_default(),
            );
            Ok::<_, Infallible>(
                Response::builder()
                    .status(status)
                    .body(Body::from(answer.to_string().into_bytes()))
                    .unwrap(),
            )
        }
    });
    let client = Client::new(service, "ns");
    let pod = PodName {
        namespace: "ns".to_owned(),
        name: "pod-1".to_owned(),
    };
    let leadership = Leadership::standby();
    let times = LeaseTimes {
        lease: Duration::from_secs(15),
        renew: Duration::from_secs(10),
        retry: Duration::from_secs(2),
    };
    leadership.lead(times, now(), true);
    let (recorder, writer) = daemon::events::recorder(&client.clone().into(), "test", None);
    tokio::spawn(writer.run());
    let fence = Fence {
        client,
        recorder,
        leadership,
        pod,
        holder: "pod-1_a".to_owned(),
        lease: "gpushare-scheduler".to_owned(),
        lease_holder: "pod-1_a".to_owned(),
    };
    (fence, shared)
}

/// A server whose Lease names the pod, and which lets it bind: a conflict, since the pod is bound already.
fn holding() -> Server {
    Server {
        lease: "pod-1_a".to_owned(),
        binding: 409,
        ..Server::default()
    }
}

#[rstest]
#[case::there_is_none(None, &["POST schedulerleaders"])]
#[case::another_is_named(Some("pod-0_b"), &["PUT gpushare-scheduler"])]
#[case::an_earlier_process_of_the_pod(Some("pod-1_0"), &["PUT gpushare-scheduler"])]
#[case::it_is_named_already(Some("pod-1_a"), &[])]
#[tokio::test]
async fn a_new_leader_writes_its_name_into_the_object(
    #[case] before: Option<&str>,
    #[case] expected: &[&str],
) {
    let (fence, server) = fence(Server {
        object: before.map(|holder| (7, holder.to_owned())),
        ..holding()
    });
    fence.name_this_replica().await;
    let server = server.lock().unwrap();
    assert_eq!(server.written, expected);
    assert_eq!(
        server.object.as_ref().map(|(_, holder)| holder.as_str()),
        Some("pod-1_a")
    );
}

/// The extender beside a kube-scheduler leads by the Lease of that one, whose holder has the pod's name and a number.
#[rstest]
#[case::of_the_own_pod("pod-1_4711", true)]
#[case::of_another_pod("pod-10_4711", false)]
#[tokio::test]
async fn an_extender_writes_its_name_while_the_kube_scheduler_of_its_pod_holds_the_lease(
    #[case] lease: &str,
    #[case] expected: bool,
) {
    let (mut fence, server) = fence(Server {
        lease: lease.to_owned(),
        ..holding()
    });
    fence.lease_holder = crate::leader::kube_scheduler_lease::holder_prefix("pod-1");
    assert_eq!(fence.write_holder().await.is_ok(), expected);
    assert_eq!(server.lock().unwrap().object.is_some(), expected);
}

/// A replica that has lost the Lease, by its own clock or by the API server's answer, leaves the object to the holder.
#[rstest]
#[case::the_lease_names_another("pod-0_b", true, false, "does not name this replica any more")]
#[case::the_time_is_over("pod-1_a", false, false, "not the leader")]
#[case::another_has_written_meanwhile("pod-1_a", true, true, "another version")]
#[tokio::test]
async fn a_replica_that_lost_the_lease_leaves_the_object_alone(
    #[case] lease: &str,
    #[case] leads: bool,
    #[case] is_contended: bool,
    #[case] problem: &str,
) {
    let object = Some((7, "pod-0_b".to_owned()));
    let (fence, server) = fence(Server {
        lease: lease.to_owned(),
        object,
        is_contended,
        ..holding()
    });
    if !leads {
        fence.leadership.stand_by();
    }
    let error = fence.write_holder().await.unwrap_err();
    assert!(error.contains(problem), "{error}");
    assert_eq!(
        server
            .lock()
            .unwrap()
            .object
            .as_ref()
            .map(|(_, holder)| holder.as_str()),
        Some("pod-0_b")
    );
}

#[rstest]
#[case::bound_already(409, Ok(()))]
#[case::pod_is_gone(404, Ok(()))]
#[case::refused(403, Err("so it is"))]
#[case::refused_for_want_of_a_parameter(422, Err("so it is"))]
#[case::trouble(500, Err("500 Internal Server Error: so it is"))]
#[tokio::test]
async fn the_probe_finds_out_if_the_api_server_accepts_bindings(
    #[case] binding: u16,
    #[case] expected: Result<(), &str>,
) {
    let (fence, _) = fence(Server { binding, ..holding() });
    assert_eq!(fence.probe().await, expected.map_err(str::to_owned));
}

/// As after the informer of kube-apiserver has died: the object names this replica, and its bindings are refused all the same.
#[tokio::test(start_paused = true)]
async fn a_refusal_that_lasts_is_reported_once_and_ends() {
    let object = Some((7, "pod-1_a".to_owned()));
    let (fence, server) = fence(Server {
        object,
        binding: 403,
        ..holding()
    });
    let leadership = fence.leadership.clone();
    let waiting = tokio::spawn(async move { fence.wait_until_accepted().await });
    sleep(REPORT_AFTER / 2).await;
    assert_eq!(leadership.refused(), None, "a new holder is seen a moment later");
    sleep(REPORT_AFTER).await;
    assert_eq!(leadership.refused().as_deref(), Some("so it is"));
    sleep(REPORT_AFTER).await;
    assert_eq!(
        server
            .lock()
            .unwrap()
            .written
            .iter()
            .filter(|line| *line == "POST events")
            .count(),
        1
    );
    assert!(!waiting.is_finished());
    server.lock().unwrap().binding = 409;
    waiting.await.unwrap();
    assert_eq!(leadership.refused(), None);
}

/// A user deletes the object: the next binding is refused, and the leader writes the object again.
#[tokio::test(start_paused = true)]
async fn a_refused_binding_makes_the_leader_restore_the_object() {
    let (fence, server) = fence(Server {
        object: Some((7, "pod-1_a".to_owned())),
        ..holding()
    });
    let leadership = fence.leadership.clone();
    let keeping = tokio::spawn(async move { fence.keep().await });
    sleep(Duration::from_secs(1)).await;
    {
        let mut server = server.lock().unwrap();
        (server.object, server.binding) = (None, 422);
    }
    leadership.note_bind_refused();
    sleep(Duration::from_millis(100)).await;
    assert_eq!(server.lock().unwrap().object, Some((1, "pod-1_a".to_owned())));
    keeping.abort();
}
