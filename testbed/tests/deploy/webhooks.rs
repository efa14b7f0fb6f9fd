//! The webhooks' components: the API server finds the scheduler's endpoints and calls them for the right pods, and the
//! scheduler may write its own objects and no others.

use http::Method;
use kit::apiserver::ApiServer;
use kit::cluster::{PLUGIN_USER, user_client};
use kit::rbac::{Rbac, RbacTarget, SCHEDULER_CERTIFICATES, SCHEDULER_WEBHOOKS};
use kube::Client;
use proto::pod::ALL_DEVICES;
use proto::record::DEVICE_ALLOCATED;
use proto::resource::{
    GPU, GPU_CORE, GPU_MEM, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, RDMA, VENDOR_GPUS,
};
use rstest::rstest;
use serde_json::{Value, json};

use super::daemons::{DEVICE_PLUGIN, Daemon, SCHEDULER};
use super::render::{render, render_base_with, render_with};
use super::{find, flag, items, named, pod as pod_of, texts, workloads};

const ACCOUNT: &str = "system:serviceaccount:gpushare-system:gpushare-scheduler";
const OWN_CERTIFICATES: &str = "components/webhooks";
const CERT_MANAGER: &str = "components/webhooks-cert-manager";
const GUARD: &str = "components/guard-bindings";
const FAIL_CLOSED: &str = "components/fail-closed";
const KINDS: [&str; 2] = ["MutatingWebhookConfiguration", "ValidatingWebhookConfiguration"];

fn webhooks(objects: &[Value]) -> Vec<Value> {
    let configurations = KINDS.map(|kind| find(objects, kind, SCHEDULER.name));
    configurations
        .iter()
        .flat_map(|configuration| items(&configuration["webhooks"]))
        .cloned()
        .collect()
}

#[rstest]
#[case::own_certificates("base", OWN_CERTIFICATES)]
#[case::cert_manager("base", CERT_MANAGER)]
#[case::second_scheduler("attach/second-scheduler", OWN_CERTIFICATES)]
fn the_configured_webhooks_are_those_that_the_scheduler_serves(
    #[case] folder: &str,
    #[case] component: &str,
) {
    let objects = render_with(folder, &[component, GUARD]);
    let container = SCHEDULER.container(&objects);
    SCHEDULER.accepts(&texts(&container["args"])).unwrap();
    let port = named(&container["ports"], "webhook");
    let listen = format!("0.0.0.0:{}", port["containerPort"]);
    assert_eq!(flag(container, "--webhook-listen"), Some(listen.as_str()));

    let service = find(&objects, "Service", "gpushare-webhook");
    assert_eq!(service["spec"]["ports"][0]["targetPort"], port["name"]);
    assert_eq!(service["spec"]["type"], "ClusterIP");
    let policy = find(&objects, "NetworkPolicy", SCHEDULER.name);
    let for_all = json!({"ports": [{"port": port["containerPort"], "protocol": "TCP"}]});
    assert!(items(&policy["spec"]["ingress"]).contains(&for_all), "{policy:#}");

    let webhooks = webhooks(&objects);
    assert_eq!(webhooks.len(), 3);
    for (webhook, route) in webhooks.iter().zip(["mutate", "validate", "validate"]) {
        let expected = json!({
            "name": service["metadata"]["name"], "namespace": service["metadata"]["namespace"],
            "port": service["spec"]["ports"][0]["port"], "path": format!("/gpushare-scheduler/webhook/{route}"),
        });
        let client = &webhook["clientConfig"];
        assert_eq!(client["service"], expected);
        assert_eq!(
            client["caBundle"],
            Value::Null,
            "an apply would undo what the scheduler wrote"
        );
    }
}

#[test]
fn the_webhooks_do_not_block_pods_or_system_namespaces() {
    for webhook in webhooks(&render_with("base", &[OWN_CERTIFICATES, GUARD])) {
        let name = webhook["name"].as_str().unwrap();
        assert!(
            name.split('.').count() >= 3,
            "{name}: the API server demands three parts"
        );
        let fields = ["failurePolicy", "sideEffects", "timeoutSeconds"].map(|field| webhook[field].clone());
        let expected = [json!("Ignore"), json!("None"), json!(2)];
        assert_eq!(fields, expected, "{name}: a hung scheduler holds up two of them");
        let expected = json!([{"key": "kubernetes.io/metadata.name", "operator": "NotIn", "values": ["kube-system", "gpushare-system"]}]);
        assert_eq!(
            webhook["namespaceSelector"]["matchExpressions"], expected,
            "{name}"
        );
        assert_eq!(items(&webhook["matchConditions"]).len(), 1, "{name}");
    }
}

/// The condition names every resource by which a pod may ask for devices, and nothing that other pods have.
#[test]
fn the_webhooks_match_every_pod_that_requests_devices() {
    for webhook in webhooks(&render_base_with(OWN_CERTIFICATES)) {
        let condition = webhook["matchConditions"][0]["expression"].as_str().unwrap();
        let names_mark = [
            format!("'{ALL_DEVICES}' in object.metadata"),
            format!("key == '{ALL_DEVICES}'"),
        ];
        assert!(
            names_mark.iter().any(|part| condition.contains(part)),
            "{condition}"
        );
        let exact = OLD_NAMES.map(|(old, _)| old).into_iter().chain(VENDOR_GPUS);
        for name in exact {
            assert!(condition.contains(&format!("'{name}'")), "{name}: {condition}");
        }
        for name in [
            GPU,
            GPU_CORE,
            GPU_MEM,
            GPU_MEMORY,
            GPU_MEMORY_RATIO,
            GPU_SHARED,
            RDMA,
        ] {
            let domain = name.split_once('/').unwrap().0;
            assert!(
                condition.contains(&format!("name.startsWith('{domain}/')")),
                "{name}: {condition}"
            );
        }
        assert!(!condition.contains("startsWith('kubernetes.io"), "{condition}");
    }
}

/// The API server does not call the webhook in namespaces whose pods may see every GPU, and both daemons report the same list.
#[test]
fn unrestricted_namespaces_are_the_same_everywhere() {
    let webhooks = webhooks(&render_base_with(OWN_CERTIFICATES));
    let mut webhooks = webhooks.iter();
    let validating = webhooks
        .find(|webhook| webhook["name"] == "validate.pods.gpushare")
        .unwrap();
    let selected = texts(&validating["namespaceSelector"]["matchExpressions"][0]["values"]).join(",");
    for daemon in [SCHEDULER, DEVICE_PLUGIN] {
        let help = daemon.help();
        let (_, flag) = help.split_once("--unrestricted-namespaces <NAMESPACES>").unwrap();
        let (_, default) = flag.split_once("[default: ").unwrap();
        assert_eq!(default.split_once(']').unwrap().0, selected, "{}", daemon.name);
    }
    let objects = render_with("base", &["components/whole-gpus", "components/gpu-operator"]);
    assert_eq!(workloads(&objects).len(), 3);
    for workload in workloads(&objects) {
        let container = &pod_of(workload)["containers"][0];
        assert_eq!(
            flag(container, "--unrestricted-namespaces"),
            Some("kube-system,gpu-operator,gpushare-system"),
            "{}",
            workload["metadata"]["name"]
        );
    }
}

/// The API server asks about pods that ask for nothing only where they say themselves which GPUs they see. The expression has
/// been tried on kube-apiserver 1.36.2, also on a pod of 100 containers with 100 variables each; here there is no CEL.
#[test]
fn the_webhooks_match_pods_that_set_visible_devices() {
    for webhook in webhooks(&render_base_with(OWN_CERTIFICATES)) {
        let condition = webhook["matchConditions"][0]["expression"].as_str().unwrap();
        let is_validating = webhook["name"] == "validate.pods.gpushare";
        for part in [
            "key == 'nvidia.cdi.k8s.io'",
            "key.startsWith('nvidia.cdi.k8s.io/')",
            "key.startsWith('cdi.k8s.io/')",
            "object.spec.?ephemeralContainers.orValue([])",
            "variable.name == 'NVIDIA_VISIBLE_DEVICES'",
            "has(variable.valueFrom) || !(variable.?value.orValue('') in ['', 'void', 'none'])",
        ] {
            assert_eq!(condition.contains(part), is_validating, "{part}: {condition}");
        }
    }
}

#[test]
fn bindings_are_reviewed_unless_they_are_the_schedulers_own() {
    let objects = render_with("base", &[OWN_CERTIFICATES, GUARD]);
    assert_eq!(
        flag(SCHEDULER.container(&objects), "--webhook-guard-bindings"),
        Some(ACCOUNT)
    );
    let webhooks = webhooks(&objects);
    let guard = webhooks
        .iter()
        .find(|webhook| webhook["rules"][0]["resources"] == json!(["pods/binding", "bindings"]))
        .unwrap();
    assert_eq!(
        guard["matchConditions"][0]["expression"],
        format!("request.userInfo.username != '{ACCOUNT}'")
    );
}

#[rstest]
#[case::attached("base")]
#[case::second_scheduler("attach/second-scheduler")]
fn the_scheduler_may_write_its_secret_and_its_configurations(#[case] folder: &str) {
    let objects = render_with(folder, &[OWN_CERTIFICATES]);
    let without = Rbac::of(&render(folder)).unwrap();
    let mut used = without.granted(ACCOUNT);
    assert!(used.is_disjoint(&SCHEDULER_WEBHOOKS.iter().copied().collect()));
    used.extend(SCHEDULER_WEBHOOKS);
    let rbac = Rbac::of(&objects).unwrap();
    assert_eq!(rbac.granted(ACCOUNT), used);
    assert!(flag(SCHEDULER.container(&objects), "--certificate-secret").is_some());
    for access in SCHEDULER_WEBHOOKS {
        let allows = |name| rbac.allows(ACCOUNT, *access, RbacTarget { namespace: "", name });
        assert!(allows(SCHEDULER.name), "{access}");
        assert!(!allows("other"), "{access} of another name");
    }
}

/// cert-manager fills the Secret that the component mounts; the scheduler may write no Secret then.
#[test]
fn cert_manager_issues_the_certificate_instead_of_the_scheduler() {
    let objects = render_base_with(CERT_MANAGER);
    for kind in KINDS {
        let annotations = &find(&objects, kind, SCHEDULER.name)["metadata"]["annotations"];
        assert_eq!(
            annotations["cert-manager.io/inject-ca-from"],
            "gpushare-system/gpushare-scheduler"
        );
    }
    let container = SCHEDULER.container(&objects);
    assert!(flag(container, "--certificate-secret").is_none() && flag(container, "--tls-dir").is_some());
    let base = Rbac::of(&render("base")).unwrap();
    let mut used = base.granted(ACCOUNT);
    used.retain(|access| !SCHEDULER_CERTIFICATES.contains(access));
    assert_eq!(Rbac::of(&objects).unwrap().granted(ACCOUNT), used);
}

/// An API server with the component `fail-closed` and no scheduler, a pod with a GPU that was made before, and clients of an
/// administrator and of a node's plugin.
async fn server_without_a_scheduler(objects: &[Value]) -> (ApiServer, [Client; 2]) {
    let server = ApiServer::start().await.unwrap();
    let dir = tempfile::tempdir().unwrap();
    let client = async |user| user_client(&server, dir.path(), user, &[]).await.unwrap();
    let (admin, plugin) = (client("admin").await, client(PLUGIN_USER).await);
    let namespace = json!({"metadata": {"name": "gpushare-system"}});
    server.objects().create("namespaces", namespace).unwrap();
    send(&admin, Method::POST, PODS, &pod("before", ON_A_GPU))
        .await
        .unwrap();
    for kind in KINDS {
        let configuration = find(objects, kind, SCHEDULER.name).clone();
        server
            .objects()
            .create(&format!("{}s", kind.to_lowercase()), configuration)
            .unwrap();
    }
    (server, [admin, plugin])
}

/// The text of the API server's refusal, if there is one.
async fn send(client: &Client, method: Method, path: &str, body: &Value) -> Result<(), String> {
    let content = if method == Method::PATCH {
        "application/merge-patch+json"
    } else {
        "application/json"
    };
    let request = http::Request::builder()
        .method(method)
        .uri(path)
        .header("content-type", content);
    let request = request.body(body.to_string().into_bytes()).unwrap();
    match client.request_text(request).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) => Err(status.message.clone()),
        Err(error) => panic!("{path}: {error}"),
    }
}

const PODS: &str = "/api/v1/namespaces/default/pods";
const OWN_PODS: &str = "/api/v1/namespaces/gpushare-system/pods";
/// Fields of a container.
const ON_A_GPU: &str = r#"{"resources": {"limits": {"aliyun.com/gpu-mem": "1"}}}"#;
const SEES_ALL: &str = r#"{"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}"#;
const SEES_NONE: &str = r#"{"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "void"}]}"#;

/// A pod whose one container has these fields beside its name and image.
fn pod(name: &str, fields: &str) -> Value {
    let mut container: Value = serde_json::from_str(fields).unwrap();
    container["name"] = json!("c");
    container["image"] = json!("busybox");
    json!({"metadata": {"name": name}, "spec": {"containers": [container]}})
}

fn annotation(key: &str) -> Value {
    json!({"metadata": {"annotations": {key: "x"}}})
}

/// While no replica answers, new pods that a webhook would review are refused, and nothing else is.
#[tokio::test]
async fn with_fail_closed_only_pods_that_are_reviewed_wait_for_the_scheduler() {
    let objects = render_with("base", &[OWN_CERTIFICATES, GUARD, FAIL_CLOSED]);
    let (_server, [admin, plugin]) = server_without_a_scheduler(&objects).await;
    let own = |daemon: Daemon| json!({"metadata": {"name": daemon.name}, "spec": daemon.pod(&objects)});
    let (running, bind) = (format!("{PODS}/before"), format!("{PODS}/plain/binding"));
    let (running, bind, system) = (
        running.as_str(),
        bind.as_str(),
        "/api/v1/namespaces/kube-system/pods",
    );
    let binding = json!({"metadata": {"name": "plain"}, "target": {"kind": "Node", "name": "n1"}});
    let label = json!({"metadata": {"labels": {"a": "b"}}});
    let finalizers = json!({"metadata": {"finalizers": ["a/b"]}});
    let (post, patch) = (Method::POST, Method::PATCH);
    let rows = [
        (&admin, &post, PODS, pod("plain", "{}"), true),
        (&admin, &post, PODS, pod("blind", SEES_NONE), true),
        (&admin, &post, PODS, pod("asks", ON_A_GPU), false),
        (&admin, &post, PODS, pod("sees", SEES_ALL), false),
        (&admin, &post, system, pod("a", SEES_ALL), true),
        (&admin, &post, OWN_PODS, own(SCHEDULER), true),
        (&admin, &post, OWN_PODS, own(DEVICE_PLUGIN), true),
        (&admin, &post, bind, binding, true),
        (&admin, &patch, running, label, true),
        (&admin, &patch, running, finalizers, true),
        (&admin, &patch, running, annotation("cni.example.com/ip"), true),
        (&admin, &patch, running, annotation("cdi.k8s.io/gpu"), false),
        (&admin, &patch, running, annotation(ALL_DEVICES), false),
        (&admin, &patch, running, annotation(DEVICE_ALLOCATED), false),
        (&plugin, &patch, running, annotation(DEVICE_ALLOCATED), true),
        (&admin, &Method::DELETE, running, json!({}), true),
    ];
    for (client, method, path, body, passes) in rows {
        let answer = send(client, method.clone(), path, &body).await;
        let is_expected = match &answer {
            Ok(()) => passes,
            Err(text) => !passes && text.contains("failed calling webhook"),
        };
        assert!(is_expected, "{method} {path}: {answer:?}\n{body}");
    }
}
