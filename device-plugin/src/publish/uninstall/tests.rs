//! The removal, its order, and its obstacles.

use proto::node::NodeCondition;
use rstest::rstest;
use tempfile::TempDir;

use super::*;
use crate::node::pods::PodStage;
use crate::tests::api_server::ApiServer;
use crate::tests::builders::{pod, pods, units};

const SERVED: [&str; 2] = ["aliyun.com/gpu-mem", "koordinator.sh/gpu.shared"];

fn node(annotations: &Value, labels: &Value, amounts: &Value) -> Node {
    let status = json!({"capacity": amounts, "allocatable": amounts});
    serde_json::from_value(
        json!({"metadata": {"name": "n1", "annotations": annotations, "labels": labels}, "status": status}),
    )
    .unwrap()
}

/// As kubelet and the plugin leave it.
fn used() -> Node {
    node(
        &json!({"gpushare/devices-revision": "1", "aliyun.com/gpu-mem-unit": "GiB", "volumes.kubernetes.io/x": "true"}),
        &json!({"node.koordinator.sh/gpu-vendor": "nvidia", "gpushare": "uninstall", "kubernetes.io/os": "linux"}),
        &json!({
            "cpu": "2", "koordinator.sh/gpu-core": "200", "aliyun.com/gpu-mem": "0", "koordinator.sh/gpu.shared": "0", "nvidia.com/gpu": "2"
        }),
    )
}

fn clean() -> Node {
    node(
        &json!({"volumes.kubernetes.io/x": "true"}),
        &json!({"gpushare": "uninstall", "kubernetes.io/os": "linux"}),
        &json!({"cpu": "2", "nvidia.com/gpu": "2"}),
    )
}

#[test]
fn patches_remove_only_the_plugins_own_fields() {
    let names = ResourceNames::default();
    let metadata = json!({"metadata": {
        "annotations": {"gpushare/devices-revision": null, "aliyun.com/gpu-mem-unit": null},
        "labels": {"node.koordinator.sh/gpu-vendor": null}}});
    assert_eq!(metadata_patch(&used(), &names), Some(metadata));
    let amounts = json!({"koordinator.sh/gpu-core": null});
    assert_eq!(
        status_patch(&used(), &IN_NODE_STATUS),
        Some(json!({"status": {"capacity": amounts, "allocatable": amounts}}))
    );
    let mut without_devices = used();
    assert_eq!(condition_patch(&without_devices), None);
    without_devices.status.conditions.push(NodeCondition::default());
    let removal = json!({"type": "GPUSharingReady", "$patch": "delete"});
    assert_eq!(
        condition_patch(&without_devices),
        Some(json!({"status": {"conditions": [removal]}}))
    );
    assert_eq!(metadata_patch(&clean(), &names), None);
    assert_eq!(status_patch(&clean(), &IN_NODE_STATUS), None);
}

#[rstest]
#[case::bound(PodStage::Bound, true)]
#[case::admitted(PodStage::Admitted, true)]
#[case::running(PodStage::Running, true)]
#[case::ended(PodStage::Terminal, false)]
fn pods_hold_devices_until_they_end(#[case] stage: PodStage, #[case] holds: bool) {
    let all = pods([pod("a", 0, [units(1)]).at(stage)]);
    assert_eq!(!holders(&all).is_empty(), holds);
}

struct Scene {
    removal: Removal,
    server: ApiServer,
    pods: watch::Sender<NodePods>,
    node: watch::Sender<Option<Node>>,
    dir: TempDir,
}

impl Scene {
    /// A node as a plugin leaves it that has ended just now.
    fn new(now: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (client, server) = ApiServer::new();
        let (pods, pods_seen) = watch::channel(pods([]));
        let (node, node_seen) = watch::channel(Some(used()));
        let removal = Removal {
            now,
            node_writer: NodeWriter::new(client, "n1".to_owned()),
            names: ExtendedResourceNames::default(),
            device_plugin_dir: dir.path().to_owned(),
            specs: SpecDir::new(dir.path().join("cdi")),
            pods: pods_seen,
            node: node_seen,
        };
        let scene = Self {
            removal,
            server,
            pods,
            node,
            dir,
        };
        std::fs::create_dir_all(dir_of(&scene, "cdi/.gpushare.dev-new")).unwrap();
        for file in [
            "gpushare.dev-gpu_x.json",
            ".gpushare.dev-gpu_y.json",
            "gpushare.dev-gpu_z.retired",
            "nvidia.yaml",
        ] {
            std::fs::write(dir_of(&scene, "cdi").join(file), "{}").unwrap();
        }
        drop(
            std::os::unix::net::UnixListener::bind(dir_of(&scene, ExtendedResource::Memory.socket()))
                .unwrap(),
        );
        scene.kubelet_knows(&SERVED);
        scene
    }

    fn kubelet_knows(&self, resources: &[&str]) {
        let registered: Map<String, Value> = resources
            .iter()
            .map(|name| ((*name).to_owned(), json!([])))
            .collect();
        kubelet_checkpoint::tests::write(self.dir.path(), &Value::Null, &registered.into());
    }

    /// One attempt, whose requests are accepted: its outcome, and the requests.
    async fn attempt(&mut self) -> (String, Vec<String>) {
        let mut lines = Vec::new();
        let Self { removal, server, .. } = self;
        let mut attempt = std::pin::pin!(removal.attempt());
        loop {
            tokio::select! {
                biased;
                outcome = &mut attempt => return (outcome.map_or_else(|obstacle| obstacle.to_string(), |()| "removed".to_owned()), lines),
                (line, body, answer) = server.next() => {
                    lines.push(format!("{line} {body}"));
                    answer.send(200, &json!(clean()));
                }
            }
        }
    }

    fn files(&self) -> Vec<String> {
        let listed =
            [dir_of(self, "cdi"), self.dir.path().to_owned()].map(|dir| std::fs::read_dir(dir).unwrap());
        let mut names: Vec<_> = listed
            .into_iter()
            .flatten()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    }
}

fn dir_of(scene: &Scene, file: &str) -> PathBuf {
    scene.dir.path().join(file)
}

#[tokio::test]
async fn extended_resources_are_removed_last_as_kubelet_writes_them_again() {
    let mut scene = Scene::new(false);
    let (outcome, lines) = scene.attempt().await;
    assert_eq!(
        outcome,
        "kubelet remembers the plugin until five minutes after its end: koordinator.sh/gpu.shared, aliyun.com/gpu-mem"
    );
    assert_eq!(lines.len(), 2);
    assert!(
        lines[0].starts_with("PATCH /api/v1/nodes/n1 ")
            && lines[1].starts_with("PATCH /api/v1/nodes/n1/status "),
        "{lines:#?}"
    );
    assert!(
        lines
            .iter()
            .all(|line| !line.contains(SERVED[0]) || line.contains("gpu-mem-unit")),
        "{lines:#?}"
    );
    assert_eq!(scene.files(), ["cdi", kubelet_checkpoint::FILE, "nvidia.yaml"]);

    scene.kubelet_knows(&["nvidia.com/gpu"]);
    let (outcome, lines) = scene.attempt().await;
    assert_eq!(outcome, "the API server does not show the node's changes yet");
    assert!(
        SERVED
            .iter()
            .all(|name| lines[2].contains(&format!("\"{name}\":null"))),
        "{lines:#?}"
    );
    scene.node.send_replace(Some(clean()));
    assert_eq!(scene.attempt().await, ("removed".to_owned(), Vec::new()));
}

#[tokio::test]
async fn uninstall_waits_until_no_pod_holds_devices() {
    let mut scene = Scene::new(false);
    let all = scene.files();
    scene.pods.send_replace(NodePods::default());
    assert_eq!(scene.attempt().await.0, "the pods of this node are not known yet");
    scene
        .pods
        .send_replace(pods([pod("a", 0, [units(1)]).at(PodStage::Running)]));
    let (outcome, lines) = scene.attempt().await;
    assert!(
        outcome.starts_with("pods hold devices: ") && outcome.ends_with("/a"),
        "{outcome}"
    );
    assert_eq!((lines, scene.files()), (Vec::new(), all));
    scene.removal.now = true;
    assert_eq!(scene.attempt().await.1.len(), 2);
}

#[tokio::test]
async fn uninstall_waits_until_the_plugin_has_ended() {
    let mut scene = Scene::new(true);
    let socket = dir_of(&scene, ExtendedResource::Shared.socket());
    let listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let (outcome, lines) = scene.attempt().await;
    assert_eq!(
        (outcome, lines),
        (
            format!("another process of the plugin serves {}", socket.display()),
            Vec::new()
        )
    );
    drop(listener);
    assert_eq!(scene.attempt().await.1.len(), 2);
}
