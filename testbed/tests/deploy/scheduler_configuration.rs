//! The two configurations of kube-scheduler name the extender as it is.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kit::kube_scheduler::SchedulerConfiguration;
use proto::resource::{
    FPGA, GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, RDMA, VENDOR_GPUS,
};
use rstest::rstest;
use scheduler::leader::BIND_TIMEOUT;
use serde::Deserialize;
use serde_json::{Value, json};

use super::daemons::SCHEDULER;
use super::render::{documents, render};
use super::{deploy, find, read};

const OWN: &str = "attach/kube-scheduler/kube-scheduler-config.yaml";
const SECOND: &str = "components/second-scheduler/kube-scheduler-config.yaml";

/// kube-scheduler refuses fields that it does not know, so these are all that may occur.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Extender {
    url_prefix: String,
    filter_verb: String,
    preempt_verb: String,
    prioritize_verb: String,
    bind_verb: String,
    weight: i64,
    #[serde(rename = "enableHTTPS")]
    enable_https: bool,
    tls_config: Option<Tls>,
    http_timeout: String,
    node_cache_capable: bool,
    ignorable: bool,
    managed_resources: Vec<Managed>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Tls {
    insecure: bool,
    ca_file: String,
    cert_file: String,
    key_file: String,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Managed {
    name: String,
    ignored_by_scheduler: bool,
}

fn configuration(path: &str) -> Value {
    let configuration = documents(&read(path)).remove(0);
    assert_eq!(configuration["apiVersion"], "kubescheduler.config.k8s.io/v1");
    assert_eq!(configuration["kind"], "KubeSchedulerConfiguration");
    configuration
}

fn extender(path: &str) -> Extender {
    let extenders = &configuration(path)["extenders"];
    assert_eq!(extenders.as_array().unwrap().len(), 1);
    Extender::deserialize(&extenders[0]).unwrap()
}

#[rstest]
#[case::own(OWN)]
#[case::second(SECOND)]
fn the_extender_manages_all_resources_of_gpushare(#[case] path: &str) {
    let extender = extender(path);
    let managed: Vec<&str> = extender
        .managed_resources
        .iter()
        .map(|resource| resource.name.as_str())
        .collect();
    let ours = [
        GPU_MEM,
        GPU_SHARED,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        GPU_CORE,
        GPU,
        RDMA,
        FPGA,
    ];
    assert_eq!(managed, [&ours[..], &VENDOR_GPUS].concat());
    assert!(
        extender
            .managed_resources
            .iter()
            .all(|resource| !resource.ignored_by_scheduler)
    );
    assert!(extender.node_cache_capable && !extender.ignorable);
    assert!(extender.weight > 0, "a prioritize verb needs a weight");
    let timeout: u64 = extender.http_timeout.strip_suffix('s').unwrap().parse().unwrap();
    assert!(
        (2..=3).contains(&timeout),
        "kube-scheduler places no other pod while it waits for a hung extender"
    );
    assert!(
        Duration::from_secs(timeout) > BIND_TIMEOUT,
        "longer than the extender's own limit for a bind, {BIND_TIMEOUT:?}"
    );
}

/// Without an authority kube-scheduler takes any server's word and does not say so.
#[test]
fn the_own_kube_scheduler_verifies_the_extender() {
    let extender = extender(OWN);
    assert!(extender.enable_https);
    let tls = extender.tls_config.unwrap();
    assert!(!tls.insecure);
    let objects = render("base");
    let service = find(&objects, "Service", SCHEDULER.name);
    let text = |field: &str| service["metadata"][field].as_str().unwrap();
    let host = format!("{}.{}.svc", text("name"), text("namespace"));
    let port = &service["spec"]["ports"][0]["port"];
    assert!(
        extender
            .url_prefix
            .starts_with(&format!("https://{host}:{port}/")),
        "{}",
        extender.url_prefix
    );

    let script = read("attach/kube-scheduler/certificates.sh");
    assert!(script.contains(&format!("service={host}\n")));
    let patch = read("attach/kube-scheduler/patches/kube-scheduler+json.yaml");
    assert!(patch.contains(&format!("hostnames: [{host}]")));
    for file in [tls.ca_file, tls.cert_file, tls.key_file] {
        let (folder, name) = file.rsplit_once('/').unwrap();
        assert!(patch.contains(&format!("mountPath: {folder}\n")), "{folder}");
        assert!(script.contains(name), "{name}");
    }
}

/// A manifest as kubeadm writes it takes the patch.
#[test]
fn the_patch_fits_the_manifest_of_kubeadm() {
    let mut manifest = json!({"spec": {"hostNetwork": true,
        "containers": [{"name": "kube-scheduler", "command": ["kube-scheduler", "--kubeconfig=/etc/kubernetes/scheduler.conf"],
            "volumeMounts": [{"name": "kubeconfig", "mountPath": "/etc/kubernetes/scheduler.conf"}]}],
        "volumes": [{"name": "kubeconfig", "hostPath": {"path": "/etc/kubernetes/scheduler.conf"}}]}});
    let operations = documents(&read("attach/kube-scheduler/patches/kube-scheduler+json.yaml")).remove(0);
    let patch: json_patch::Patch = serde_json::from_value(operations).unwrap();
    json_patch::patch(&mut manifest, &patch).unwrap();
    let spec = &manifest["spec"];
    let config = spec["containers"][0]["command"][2].as_str().unwrap();
    let folder = spec["volumes"][1]["hostPath"]["path"].as_str().unwrap();
    assert_eq!(spec["containers"][0]["volumeMounts"][1]["mountPath"], folder);
    assert_eq!(
        config,
        format!("--config={folder}/{}", OWN.rsplit('/').next().unwrap())
    );
    // The configuration replaces the flag.
    assert_eq!(
        configuration(OWN)["clientConnection"]["kubeconfig"],
        "/etc/kubernetes/scheduler.conf"
    );
}

#[test]
fn the_second_scheduler_uses_loopback_and_its_own_lease() {
    let extender = extender(SECOND);
    assert!(!extender.enable_https && extender.tls_config.is_none());
    assert!(
        extender.url_prefix.starts_with("http://127.0.0.1:12345/"),
        "{}",
        extender.url_prefix
    );
    let election = &configuration(SECOND)["leaderElection"];
    assert_eq!(
        *election,
        json!({"leaderElect": true, "resourceName": "gpushare-kube-scheduler", "resourceNamespace": "gpushare-system"})
    );
}

/// The files as the testbed's own loop reads them. All nodes are scored, as kube-scheduler takes the refusal of a sample for one
/// of all nodes.
#[rstest]
#[case::own(OWN, "default-scheduler")]
#[case::second(SECOND, "gpushare-scheduler")]
fn the_model_of_kube_scheduler_reads_the_configuration(#[case] path: &str, #[case] scheduler: &str) {
    let configuration = SchedulerConfiguration::read(&deploy().join(path)).unwrap();
    assert_eq!(configuration.schedulers.iter().collect::<Vec<_>>(), [scheduler]);
    assert_eq!(configuration.extenders[0].url_prefix, extender(path).url_prefix);
    assert_eq!(configuration.percentage_of_nodes_to_score, 100);
}

/// The real scheduler, without an API server, knows the paths that the configurations and the probes name.
#[rstest]
#[case::own(OWN)]
#[case::second(SECOND)]
fn the_scheduler_serves_the_configured_paths(#[case] path: &str) {
    let extender = extender(path);
    let prefix = format!("/{}", extender.url_prefix.splitn(4, '/').nth(3).unwrap());
    let scheduler = Running::start();
    for verb in [
        &extender.filter_verb,
        &extender.preempt_verb,
        &extender.prioritize_verb,
        &extender.bind_verb,
    ] {
        let path = format!("{prefix}/{verb}");
        assert_eq!(status(scheduler.address, "POST", &format!("{path}-unknown")), 404);
        let known = status(scheduler.address, "POST", &path);
        assert!(![404, 405].contains(&known), "{path}: {known}");
    }
    for address in [scheduler.address, scheduler.health] {
        assert_eq!(status(address, "GET", "/healthz"), 200);
        assert_eq!(status(address, "GET", "/metrics"), 200);
        // It has seen nothing of the cluster yet.
        assert_eq!(status(address, "GET", "/readyz"), 503);
    }
    let bind = format!("{prefix}/{}", extender.bind_verb);
    assert_eq!(status(scheduler.health, "POST", &bind), 404);
}

struct Running {
    child: Child,
    address: SocketAddr,
    health: SocketAddr,
    _folder: tempfile::TempDir,
}

impl Running {
    fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        let kubeconfig = folder.path().join("kubeconfig");
        std::fs::write(&kubeconfig, KUBECONFIG).unwrap();
        // It is free now; a program that takes it in between fails this test, not another one.
        let [address, health] = [(); 2]
            .map(|()| TcpListener::bind("127.0.0.1:0").unwrap())
            .map(|free| free.local_addr().unwrap());
        let child = SCHEDULER
            .command()
            .args([format!("--listen={address}"), format!("--health-listen={health}")])
            .env("KUBECONFIG", &kubeconfig)
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let running = Self {
            child,
            address,
            health,
            _folder: folder,
        };
        running.await_ports();
        running
    }

    /// Waits until both ports are open, in whichever order.
    fn await_ports(&self) {
        let deadline = Instant::now() + Duration::from_secs(20);
        for address in [self.address, self.health] {
            while TcpStream::connect(address).is_err() {
                assert!(Instant::now() < deadline, "the scheduler does not listen");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn status(address: SocketAddr, method: &str, path: &str) -> u16 {
    let mut stream = TcpStream::connect(address).unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: extender\r\nContent-Type: application/json\r\n");
    write!(stream, "{head}Content-Length: 2\r\nConnection: close\r\n\r\n{{}}").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
        .split(' ')
        .nth(1)
        .unwrap_or_else(|| panic!("{path}: {answer:?}"))
        .parse()
        .unwrap()
}

impl Drop for Running {
    fn drop(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

/// Nothing listens there.
const KUBECONFIG: &str = r"
apiVersion: v1
kind: Config
clusters: [{name: none, cluster: {server: 'http://127.0.0.1:9'}}]
users: [{name: none, user: {}}]
contexts: [{name: none, context: {cluster: none, user: none}}]
current-context: none
";
