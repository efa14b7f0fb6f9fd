//! A runtime at the other end of a real socket.

use std::time::Duration;

use prometheus_client::registry::Registry;
use prost::Message as _;
use proto::nri::api::{
    ConfigureRequest, ConfigureResponse, CreateContainerRequest, CreateContainerResponse,
    RegisterPluginRequest, SynchronizeRequest, SynchronizeResponse,
};
use proto::nri::ttrpc::{Request, Response, Status};
use proto::nri::wire::{ConnectionId, Decoder, Kind, Message};
use proto::nri::{PLUGIN_SERVICE, RUNTIME_SERVICE, code};
use proto::record::DEVICE_ALLOCATED;
use rstest::rstest;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio::time::timeout;

use super::*;
use crate::node::pods::NodePod;
use crate::tests::builders::{fleet, gpu, pod, pods, settings, whole};

/// Nothing here takes long, but the machine may be busy.
const LIMIT: Duration = Duration::from_secs(30);

/// A node whose hook connects to a socket of a temporary directory.
struct Scene {
    _dir: tempfile::TempDir,
    listener: UnixListener,
    pods: watch::Sender<NodePods>,
    seen: watch::Receiver<SeenGpus>,
    _fleet: watch::Sender<Arc<NodeFleet>>,
    hook: JoinHandle<()>,
}

impl Drop for Scene {
    fn drop(&mut self) {
        self.hook.abort();
    }
}

fn hook(
    fleet: watch::Receiver<Arc<NodeFleet>>,
    pods: watch::Receiver<NodePods>,
    seen: watch::Sender<SeenGpus>,
) -> RuntimeHook {
    RuntimeHook {
        settings: settings(),
        fleet,
        pods,
        injection: watch::channel(None).1,
        enforcements: watch::channel(Arc::default()).1,
        metrics: Metrics::register(&mut Registry::default()),
        seen,
        unrestricted: Vec::new(),
    }
}

fn scene(known: impl IntoIterator<Item = NodePod>) -> Scene {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("nri.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let (fleet_sender, fleet) = watch::channel(Arc::new(fleet(4)));
    let (pods_sender, pods) = watch::channel(pods(known));
    let (seen_sender, seen) = watch::channel(SeenGpus::default());
    let hook = tokio::spawn(serve_runtime(hook(fleet, pods, seen_sender), socket));
    Scene {
        _dir: dir,
        listener,
        pods: pods_sender,
        seen,
        _fleet: fleet_sender,
        hook,
    }
}

/// The runtime's end of a connection.
struct Runtime {
    stream: UnixStream,
    decoder: Decoder,
    come: Vec<Message>,
    next_call: u32,
}

impl Scene {
    async fn accept(&self) -> Runtime {
        let (stream, _) = timeout(LIMIT, self.listener.accept())
            .await
            .expect("no connection")
            .unwrap();
        Runtime {
            stream,
            decoder: Decoder::default(),
            come: Vec::new(),
            next_call: 1,
        }
    }

    /// A connection that is ready for calls.
    async fn connected(&self) -> Runtime {
        let mut runtime = self.accept().await;
        runtime.take_registration(Response::default()).await;
        let configured: ConfigureResponse = runtime
            .call("Configure", &ConfigureRequest::default())
            .await
            .unwrap();
        assert_eq!(configured.events, 8, "CreateContainer is event 4");
        runtime
    }
}

impl Runtime {
    /// The next message; none when the other side has closed.
    async fn next(&mut self) -> Option<Message> {
        let mut buffer = [0; 4096];
        while self.come.is_empty() {
            let n_read = timeout(LIMIT, self.stream.read(&mut buffer))
                .await
                .expect("nothing comes")
                .unwrap_or(0);
            if n_read == 0 {
                return None;
            }
            self.come = self.decoder.feed(&buffer[..n_read]).unwrap();
        }
        Some(self.come.remove(0))
    }

    async fn send(&mut self, message: &Message) {
        self.stream.write_all(&message.encode().unwrap()).await.unwrap();
    }

    async fn take_registration(&mut self, response: Response) {
        let message = self.next().await.unwrap();
        assert_eq!(
            (message.connection, message.kind),
            (ConnectionId::Runtime, Kind::Request)
        );
        let request = Request::decode(message.payload.as_slice()).unwrap();
        assert_eq!(
            (request.service.as_str(), request.method.as_str()),
            (RUNTIME_SERVICE, "RegisterPlugin")
        );
        let plugin = RegisterPluginRequest::decode(request.payload.as_slice()).unwrap();
        assert_eq!(
            (plugin.plugin_name.as_str(), plugin.plugin_idx.as_str()),
            ("gpushare", "90")
        );
        self.send(&Message {
            kind: Kind::Response,
            payload: response.encode_to_vec(),
            ..message
        })
        .await;
    }

    async fn begin(&mut self, payload: Vec<u8>) -> u32 {
        let call = self.next_call;
        self.next_call += 2;
        self.send(&Message {
            connection: ConnectionId::Plugin,
            call,
            kind: Kind::Request,
            payload,
        })
        .await;
        call
    }

    async fn answer(&mut self, call: u32) -> Result<Vec<u8>, Status> {
        let message = self.next().await.expect("the plugin has closed");
        assert_eq!(
            (message.connection, message.call, message.kind),
            (ConnectionId::Plugin, call, Kind::Response)
        );
        let response = Response::decode(message.payload.as_slice()).unwrap();
        response.status.map_or(Ok(response.payload), Err)
    }

    async fn call<A: prost::Message + Default>(
        &mut self,
        method: &str,
        message: &impl prost::Message,
    ) -> Result<A, Status> {
        let call = self.begin(request(method, message, Duration::from_secs(2))).await;
        self.answer(call)
            .await
            .map(|payload| A::decode(payload.as_slice()).unwrap())
    }
}

fn request(method: &str, message: &impl prost::Message, timeout: Duration) -> Vec<u8> {
    let (service, timeout_nano) = (
        PLUGIN_SERVICE.to_owned(),
        i64::try_from(timeout.as_nanos()).unwrap(),
    );
    Request {
        service,
        method: method.to_owned(),
        payload: message.encode_to_vec(),
        timeout_nano,
    }
    .encode_to_vec()
}

fn sees(minor: u32) -> Vec<String> {
    vec![format!("NVIDIA_VISIBLE_DEVICES={}", gpu(minor).uuid)]
}

/// Container `w1` of the pod, to which the vendor's plugin gave GPU 0.
fn making(pod: &str) -> CreateContainerRequest {
    let annotations = [(DEVICE_ALLOCATED.to_owned(), "{}".to_owned())].into();
    let sandbox = PodSandbox {
        uid: pod.to_owned(),
        name: pod.to_owned(),
        namespace: "default".to_owned(),
        annotations,
        ..PodSandbox::default()
    };
    let container = Container {
        name: "w1".to_owned(),
        env: sees(0),
        ..Container::default()
    };
    CreateContainerRequest {
        pod: Some(sandbox),
        container: Some(container),
    }
}

fn visible(response: CreateContainerResponse) -> Option<String> {
    response
        .adjust?
        .env
        .into_iter()
        .find(|pair| pair.key == "NVIDIA_VISIBLE_DEVICES")
        .map(|pair| pair.value)
}

#[tokio::test]
async fn a_container_gets_the_devices_of_its_record() {
    let scene = scene([pod("p", 1, [whole(1)]).on([2])]);
    let mut runtime = scene.connected().await;
    let made: CreateContainerResponse = runtime.call("CreateContainer", &making("p")).await.unwrap();
    assert_eq!(visible(made), Some(gpu(2).uuid.to_string()));
    assert_eq!(scene.seen.borrow().n_containers(), 1);
    let _: proto::nri::api::Empty = runtime
        .call("StateChange", &proto::nri::api::Empty {})
        .await
        .unwrap();
    let _: proto::nri::api::Empty = runtime
        .call("Shutdown", &proto::nri::api::Empty {})
        .await
        .unwrap();
}

#[tokio::test]
async fn a_container_waits_until_its_pod_is_known() {
    let scene = scene([]);
    let mut runtime = scene.connected().await;
    let call = runtime
        .begin(request("CreateContainer", &making("p"), Duration::from_secs(60)))
        .await;
    // Answered while the other one waits.
    let other = runtime
        .begin(request(
            "StopContainer",
            &proto::nri::api::Empty {},
            Duration::from_secs(2),
        ))
        .await;
    runtime.answer(other).await.unwrap();
    scene.pods.send_modify(|pods| {
        pods.apply(pod("p", 1, [whole(1)]).on([3]));
    });
    let made = CreateContainerResponse::decode(runtime.answer(call).await.unwrap().as_slice()).unwrap();
    assert_eq!(visible(made), Some(gpu(3).uuid.to_string()));
}

/// And no longer than half of the time that the runtime allows.
#[tokio::test]
async fn a_container_of_an_unknown_pod_is_refused_in_time() {
    let scene = scene([]);
    let mut runtime = scene.connected().await;
    let began = Instant::now();
    let call = runtime
        .begin(request(
            "CreateContainer",
            &making("p"),
            Duration::from_millis(100),
        ))
        .await;
    let refused = runtime.answer(call).await.unwrap_err();
    assert!(began.elapsed() >= Duration::from_millis(50));
    assert_eq!(refused.code, code::UNAVAILABLE);
    assert_eq!(
        refused.message,
        "pod default/p: it has a record, and this node's plugin has not received the pod from the API server yet; trying again may help"
    );
}

#[tokio::test]
async fn running_containers_become_known_on_connection() {
    let mut scene = scene([]);
    let mut runtime = scene.connected().await;
    let container = Container {
        name: "c".to_owned(),
        pod_sandbox_id: "s".to_owned(),
        env: sees(1),
        ..Container::default()
    };
    let first = SynchronizeRequest {
        containers: vec![container],
        more: true,
        ..SynchronizeRequest::default()
    };
    let answer: SynchronizeResponse = runtime.call("Synchronize", &first).await.unwrap();
    assert!(answer.more && !scene.seen.borrow().is_synced());
    let sandbox = PodSandbox {
        id: "s".to_owned(),
        uid: "u".to_owned(),
        ..PodSandbox::default()
    };
    let last = SynchronizeRequest {
        pods: vec![sandbox],
        ..SynchronizeRequest::default()
    };
    let answer: SynchronizeResponse = runtime.call("Synchronize", &last).await.unwrap();
    assert!(!answer.more);
    let seen = timeout(LIMIT, scene.seen.wait_for(SeenGpus::is_synced))
        .await
        .unwrap()
        .unwrap();
    assert_eq!(seen.n_containers(), 1);
}

/// A call without an implementation gets an error, and the next one its answer.
#[tokio::test]
async fn an_unknown_call_gets_an_error_and_the_next_one_its_answer() {
    let scene = scene([pod("p", 1, [whole(1)]).on([2])]);
    let mut runtime = scene.connected().await;
    let call = runtime.begin(vec![0xff; 7]).await;
    assert_eq!(
        runtime.answer(call).await.unwrap_err().code,
        code::INVALID_ARGUMENT
    );
    let broken = Request {
        service: PLUGIN_SERVICE.to_owned(),
        method: "CreateContainer".to_owned(),
        payload: vec![0xff],
        timeout_nano: -5,
    };
    let call = runtime.begin(broken.encode_to_vec()).await;
    assert_eq!(
        runtime.answer(call).await.unwrap_err().code,
        code::INVALID_ARGUMENT
    );
    let unknown = runtime
        .call::<proto::nri::api::Empty>("Fly", &proto::nri::api::Empty {})
        .await
        .unwrap_err();
    assert_eq!(
        (unknown.code, unknown.message.as_str()),
        (
            code::UNIMPLEMENTED,
            "this plugin has no Fly of service nri.pkg.api.v1alpha1.Plugin"
        )
    );
    let stray = Message {
        connection: ConnectionId::Plugin,
        call: 99,
        kind: Kind::Other(3),
        payload: vec![1],
    };
    runtime.send(&stray).await;
    let made: CreateContainerResponse = runtime.call("CreateContainer", &making("p")).await.unwrap();
    assert_eq!(visible(made), Some(gpu(2).uuid.to_string()));
}

/// A runtime that restarts, refuses the plugin, or talks nonsense finds the plugin again.
#[tokio::test]
async fn the_plugin_reconnects_to_the_runtime() {
    let scene = scene([]);
    drop(scene.connected().await);
    let mut refusing = scene.accept().await;
    let status = Some(Status {
        code: code::FAILED_PRECONDITION,
        message: "no".to_owned(),
    });
    refusing
        .take_registration(Response {
            status,
            payload: Vec::new(),
        })
        .await;
    assert_eq!(refusing.next().await, None, "the plugin closes");
    let mut babbling = scene.connected().await;
    babbling.stream.write_all(&[0xff; 64]).await.unwrap();
    assert_eq!(babbling.next().await, None, "the plugin closes");
    scene.connected().await;
}

/// The answer to the registration, if one comes, has a status with this code.
#[rstest]
#[case::silent(None, "the runtime has not configured this plugin within 10s")]
#[case::accepts_and_is_silent(Some(0), "the runtime has not configured this plugin within 10s")]
#[case::refuses(Some(code::FAILED_PRECONDITION), "the runtime refuses this plugin: no")]
#[tokio::test(start_paused = true)]
async fn a_runtime_that_does_not_configure_the_plugin(#[case] code: Option<i32>, #[case] expected: &str) {
    let (ours, mut theirs) = tokio::io::duplex(64 << 10);
    if let Some(code) = code {
        let message = "no".to_owned();
        let response = Response {
            status: Some(Status { code, message }),
            payload: Vec::new(),
        };
        let answer = Message {
            connection: ConnectionId::Runtime,
            call: 1,
            kind: Kind::Response,
            payload: response.encode_to_vec(),
        };
        theirs.write_all(&answer.encode().unwrap()).await.unwrap();
    }
    let (_fleet, fleet) = watch::channel(Arc::new(fleet(1)));
    let (_pods, pods) = watch::channel(pods([]));
    let hook = hook(fleet, pods, watch::channel(SeenGpus::default()).0);
    let error = session::run(ours, &hook).await.unwrap_err();
    assert_eq!(error.to_string(), expected);
    drop(theirs);
}
