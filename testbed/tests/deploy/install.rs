//! The scripts that install, change and uninstall: what they make `kubectl` do, which here is a script that answers from files.

use std::fs;
use std::process::{Command, Output};

use rstest::rstest;
use serde_json::Value;
use tempfile::TempDir;

use super::daemons::DEVICE_PLUGIN;
use super::render::{render, render_with};
use super::{deploy, find, read};

const PART_OF: &str = "app.kubernetes.io/part-of";

/// Writes down each call, and answers reading ones with the file of their name.
const KUBECTL: &str = r#"#!/bin/sh
# One write, as several of a pipe run at the same time.
printf '%s\n' "$(echo "$*" | tr -s ' \n\t' ' ')" >>"$SCENE/log"
answer() { if [ -f "$SCENE/$1" ]; then cat "$SCENE/$1"; fi; }
case "$*" in
    kustomize*) answer rendered ;;
    "get --raw /version") printf '{\n  "gitVersion": "%s"\n}\n' "$(answer version)" ;;
    create*containers*) answer attaching ;;
    create*) answer wanted ;;
    *"get deployment"*"-o name"*) echo deployment.apps/gpushare-scheduler ;;
    *"get deployment"*) answer attached ;;
    "get pods"*) answer pods ;;
    *"get pods"*) answer kube-schedulers ;;
    "get nodes"*) answer nodes ;;
    "get crd"*) answer crd ;;
    get*rolebindings.rbac*) answer found ;;
    *patch*|"apply -f -") cat >/dev/null ;;
    *"get daemonset"*) echo '{}' ;;
    "apply -f "*) cp "$3" "$SCENE/applied" ;;
esac
"#;

/// A cluster as `kubectl` shows it.
struct Scene(TempDir);

impl Scene {
    fn new(files: &[(&str, &str)]) -> Self {
        use std::os::unix::fs::PermissionsExt;
        let dir = tempfile::tempdir().unwrap();
        for (file, text) in files.iter().chain(&[("log", ""), ("kubectl", KUBECTL)]) {
            fs::write(dir.path().join(file), text).unwrap();
        }
        fs::set_permissions(dir.path().join("kubectl"), fs::Permissions::from_mode(0o755)).unwrap();
        Self(dir)
    }

    fn run(&self, script: &str, args: &[&str]) -> Output {
        self.run_in("gpushare-system", script, args)
    }

    /// Runs a script for an installation in a namespace.
    fn run_in(&self, namespace: &str, script: &str, args: &[&str]) -> Output {
        let path = format!("{}:{}", self.0.path().display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("sh");
        command
            .arg(deploy().join(script))
            .args(args)
            .env("PATH", path)
            .env("GPUSHARE_NAMESPACE", namespace)
            .env("SCENE", self.0.path());
        command.output().unwrap()
    }

    /// The calls that change something, without their selectors.
    fn changes(&self) -> Vec<String> {
        let log = fs::read_to_string(self.0.path().join("log")).unwrap();
        let is_reading = |line: &str| {
            ["get ", "kustomize ", "create --dry-run", "patch --local"]
                .iter()
                .any(|verb| line.contains(verb))
        };
        let changes = log
            .lines()
            .map(str::trim)
            .filter(|line| !line.is_empty() && !is_reading(line));
        let temporary = self.0.path().parent().unwrap().display().to_string();
        changes
            .map(|line| {
                if line.contains(&temporary) {
                    "apply -f OBJECTS".to_owned()
                } else {
                    line.to_owned()
                }
            })
            .collect()
    }

    fn file(&self, name: &str) -> String {
        fs::read_to_string(self.0.path().join(name)).unwrap()
    }
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Every object that some folder or component makes.
fn everything() -> Vec<Value> {
    let mut objects = render("attach/second-scheduler");
    for entry in fs::read_dir(deploy().join("components")).unwrap() {
        let component = format!("components/{}", entry.unwrap().file_name().to_str().unwrap());
        // The one changes objects of another.
        let components = if ["guard-bindings", "fail-closed", "webhooks-cert-manager"]
            .iter()
            .any(|name| component.ends_with(name))
        {
            vec!["components/webhooks".to_owned(), component]
        } else {
            vec![component]
        };
        let components: Vec<&str> = components.iter().map(String::as_str).collect();
        if !components[0].ends_with("webhook-configurations") {
            objects.extend(render_with("base", &components));
        }
    }
    objects
}

/// An object without the label, or of a kind that no script knows, would be left behind.
#[test]
fn uninstall_finds_every_installed_object() {
    let (install, uninstall) = (read("install.sh").replace("\\\n", ""), read("uninstall.sh"));
    let kinds = install
        .lines()
        .find_map(|line| line.strip_prefix("kinds="))
        .unwrap();
    let kinds: Vec<&str> = kinds
        .split(',')
        .map(|kind| kind.split('.').next().unwrap())
        .collect();
    for object in everything() {
        let (kind, metadata) = (object["kind"].as_str().unwrap(), &object["metadata"]);
        assert_eq!(
            metadata["labels"][PART_OF], "gpushare",
            "{kind} {}",
            metadata["name"]
        );
        let singular = kind.to_lowercase();
        let plural = singular
            .strip_suffix('y')
            .map_or_else(|| format!("{singular}s"), |stem| format!("{stem}ies"));
        let is_kept = ["Namespace", "CustomResourceDefinition"].contains(&kind);
        assert_eq!(kinds.contains(&plural.as_str()), !is_kept, "install.sh: {plural}");
        if metadata["namespace"] != "gpushare-system" {
            let name = match kind {
                "Namespace" => "namespace \"$namespace\"".to_owned(),
                "CustomResourceDefinition" => "delete crd -l".to_owned(),
                _ => plural,
            };
            assert!(uninstall.contains(&name), "uninstall.sh: {name}");
        }
    }
}

fn rendered(image: &str) -> String {
    format!(
        "kind: Deployment\nspec:\n  containers:\n  - args:\n    - --misfit-nodes=unresolvable\n    image: {image}\n"
    )
}

#[rstest]
#[case::the_same(
    "v1.36.2",
    "registry.k8s.io/kube-scheduler:v1.36.0",
    Ok("kube-scheduler:v1.36.0")
)]
#[case::one_before(
    "v1.36.2",
    "registry.k8s.io/kube-scheduler:v1.35.3",
    Ok("kube-scheduler:v1.35.3")
)]
#[case::too_old(
    "v1.36.2",
    "registry.k8s.io/kube-scheduler:v1.33.6",
    Ok("kube-scheduler:v1.36.2")
)]
#[case::too_new(
    "v1.33.9-eks-0123456",
    "registry.k8s.io/kube-scheduler:v1.34.0",
    Ok("kube-scheduler:v1.33.9")
)]
#[case::of_k3s(
    "v1.37.1+k3s1",
    "registry.k8s.io/kube-scheduler:v1.33.6",
    Ok("kube-scheduler:v1.37.1")
)]
#[case::that_asks_about_nodes_without_victims(
    "v1.38.0",
    "registry.k8s.io/kube-scheduler:v1.33.6",
    Ok("kube-scheduler:v1.38.0")
)]
#[case::mirrored(
    "v1.36.2",
    "r.example.com/kube-scheduler:v1.36.0",
    Ok("r.example.com/kube-scheduler:v1.36.0")
)]
#[case::mirrored_and_old(
    "v1.36.2",
    "r.example.com/kube-scheduler:v1.33.6",
    Err("put v1.36.2 into your registry")
)]
#[case::unknown(
    "v1.36.2",
    "registry.k8s.io/kube-scheduler:latest",
    Ok("kube-scheduler:v1.36.2")
)]
fn the_image_of_the_second_kube_scheduler_has_the_version_of_the_api_server(
    #[case] server: &str,
    #[case] image: &str,
    #[case] expected: Result<&str, &str>,
) {
    let scene = Scene::new(&[
        ("version", server),
        ("rendered", &rendered(image)),
        ("wanted", "Deployment/n/d\n"),
    ]);
    let output = scene.run("install.sh", &["folder"]);
    match expected {
        Ok(expected) => {
            assert!(output.status.success(), "{}", said(&output));
            let applied = scene.file("applied");
            assert!(applied.contains(&format!("{expected}\n")), "{applied}");
            let misfit = if server.starts_with("v1.38") {
                "--misfit-nodes=resolvable"
            } else {
                "--misfit-nodes=unresolvable"
            };
            assert!(applied.contains(misfit), "{applied}");
        }
        Err(expected) => {
            assert!(
                !output.status.success() && said(&output).contains(expected),
                "{}",
                said(&output)
            );
            assert!(scene.changes().is_empty());
        }
    }
}

/// From 1.38 on kube-scheduler evicts for such pods itself, and the scheduler would not start with both flags.
#[rstest]
#[case::up_to_1_37("v1.37.1", true)]
#[case::from_1_38("v1.38.0", false)]
fn room_is_made_only_up_to_the_version_that_does_it_itself(#[case] server: &str, #[case] is_applied: bool) {
    let objects = rendered("registry.k8s.io/kube-scheduler:v1.33.6");
    let scene = Scene::new(&[
        ("version", server),
        ("rendered", &format!("{objects}        - --make-room=evict\n")),
        ("wanted", "Deployment/n/d\n"),
    ]);
    let output = scene.run("install.sh", &["folder"]);
    assert_eq!(output.status.success(), is_applied, "{}", said(&output));
    assert_eq!(
        said(&output).contains("remove the component make-room"),
        !is_applied
    );
}

const FROM_BASE: [(&str, &str); 6] = [
    ("version", "v1.36.2"),
    ("rendered", "kind: Service\n"),
    ("attached", "gpushare-scheduler kube-scheduler"),
    ("attaching", "Deployment gpushare-scheduler\nService \n"),
    (
        "found",
        "ClusterRoleBinding//gpushare-second-kube-scheduler\nDeployment/n/d\nRoleBinding/kube-system/reader\n",
    ),
    ("wanted", "Deployment/n/d\nService/n/s\n"),
];

#[test]
fn a_change_of_the_attachment_leaves_no_objects() {
    let scene = Scene::new(&FROM_BASE);
    let output = scene.run("install.sh", &["folder"]);
    assert!(output.status.success(), "{}", said(&output));
    insta::assert_snapshot!(scene.changes().join("\n"), @r"
    -n gpushare-system scale deployment gpushare-scheduler --replicas=0
    -n gpushare-system wait --for=delete pod -l app.kubernetes.io/name=gpushare-scheduler --timeout=120s
    -n gpushare-system delete lease gpushare-scheduler gpushare-kube-scheduler --ignore-not-found
    apply -f OBJECTS
    delete ClusterRoleBinding gpushare-second-kube-scheduler --ignore-not-found
    delete RoleBinding reader --namespace=kube-system --ignore-not-found
    ");
}

#[test]
fn a_dry_run_changes_nothing() {
    let scene = Scene::new(&FROM_BASE);
    let output = scene.run("install.sh", &["--dry-run", "folder"]);
    assert!(scene.changes().is_empty());
    insta::assert_snapshot!(said(&output), @r"
    would end the scheduler first, as its attachment changes (containers gpushare-scheduler kube-scheduler, then gpushare-scheduler)
    would apply Deployment/n/d
    would apply Service/n/s
    would delete ClusterRoleBinding//gpushare-second-kube-scheduler
    would delete RoleBinding/kube-system/reader
    ");
}

const HOLDING: &str = "a/by-record\tn1\t[{}]\t\na/by-request\tn2\t\t{\"koordinator.sh/gpu.shared\":\"1\"}\na/other\tn1\t\t{\"cpu\":\"1\"}\n";
const KUBE_SCHEDULERS: &str =
    "cp1 /etc/kubernetes/scheduler.conf /etc/kubernetes/gpushare\ncp2 /etc/kubernetes/scheduler.conf\n";
const NODES: &str = "n1\ttrue0123\nn2\t\nn3\t0123\n";

#[rstest]
#[case::pods(&[], &[("pods", HOLDING)], "  a/by-record on n1\n  a/by-request on n2\n")]
#[case::pods_of_one_node(&["n1"], &[("pods", HOLDING)], "hold devices:\n  a/by-record on n1\nDelete")]
#[case::kube_scheduler(&[], &[("kube-schedulers", KUBE_SCHEDULERS)], "still calls the extender on: cp1\n")]
fn uninstalling_is_refused(#[case] args: &[&str], #[case] files: &[(&str, &str)], #[case] expected: &str) {
    let scene = Scene::new(&[files, &[("nodes", NODES)]].concat());
    let output = scene.run("uninstall.sh", args);
    assert!(
        !output.status.success() && said(&output).contains(expected),
        "{}",
        said(&output)
    );
    assert_eq!(scene.changes(), Vec::<String>::new());
    assert!(
        scene
            .run("uninstall.sh", &[&["--force"], args].concat())
            .status
            .success()
    );
    assert_ne!(scene.changes(), Vec::<String>::new());
}

#[test]
fn nodes_are_cleaned_up_before_the_rights_to_do_so_are_deleted() {
    let scene = Scene::new(&[("nodes", NODES), ("crd", "gpushare")]);
    let output = scene.run("uninstall.sh", &[]);
    assert!(output.status.success(), "{}", said(&output));
    insta::assert_snapshot!(scene.changes().join("\n"));
}

/// A namespace that others use too stays, and loses every object of ours.
#[test]
fn a_namespace_of_others_is_not_deleted() {
    let scene = Scene::new(&[("nodes", NODES), ("crd", "gpushare")]);
    let output = scene.run_in("gpu", "uninstall.sh", &[]);
    assert!(output.status.success(), "{}", said(&output));
    let changes = scene.changes().join("\n");
    assert!(
        !changes.contains("gpushare-system") && !changes.contains("delete namespace "),
        "{changes}"
    );
    assert!(
        changes.contains("\ndelete namespaces -l app.kubernetes.io/part-of=gpushare"),
        "{changes}"
    );
    let deleting: Vec<&str> = changes
        .lines()
        .filter(|line| line.starts_with("-n gpu delete "))
        .collect();
    let deleted = deleting.join(",").replace([',', '.', ' '], "\n");
    let deleted: Vec<&str> = deleted.lines().collect();
    for object in everything() {
        let kind = object["kind"].as_str().unwrap().to_lowercase();
        let plural = kind
            .strip_suffix('y')
            .map_or_else(|| format!("{kind}s"), |stem| format!("{stem}ies"));
        if object["metadata"]["namespace"] == "gpushare-system" {
            assert!(deleted.contains(&plural.as_str()), "{plural}: {changes}");
        }
    }
}

#[test]
fn one_node_can_be_uninstalled() {
    let scene = Scene::new(&[("nodes", NODES), ("crd", "gpushare"), ("pods", HOLDING)]);
    let output = scene.run("uninstall.sh", &["n3"]);
    assert!(output.status.success(), "{}", said(&output));
    insta::assert_snapshot!(scene.changes().join("\n"), @r"
    apply -f -
    label node n3 gpushare=uninstall --overwrite
    -n gpushare-system rollout status daemonset/gpushare-uninstall --timeout=15m
    -n gpushare-system delete daemonset gpushare-uninstall
    label node n3 gpushare- gpushare/whole-gpus- gpushare/moved-
    delete devices.scheduling.koordinator.sh n3 --ignore-not-found
    ");
}

/// The unit of the host runs the plugin with flags that it knows, before kubelet.
#[test]
fn the_boot_service_of_the_host_runs_the_plugin() {
    let unit = read("host/gpushare-boot.service");
    let command = unit
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart=/usr/local/bin/gpushare-device-plugin "))
        .unwrap();
    let args: Vec<String> = command.split(' ').map(|arg| arg.replace("%H", "node")).collect();
    DEVICE_PLUGIN
        .accepts(&args.iter().map(String::as_str).collect::<Vec<_>>())
        .unwrap();
    assert!(args.contains(&"at-boot".to_owned()) && unit.contains("\nBefore=kubelet.service\n"));
}

/// The script changes the plugin's `DaemonSet` by paths, which have to be there.
#[test]
fn the_daemon_set_has_the_fields_that_the_script_changes() {
    let objects = render("base");
    let daemon_set = find(&objects, "DaemonSet", "gpushare-device-plugin");
    let script = read("uninstall.sh");
    for path in [
        "/metadata",
        "/spec/selector",
        "/spec/template/metadata/labels",
        "/spec/template/spec/containers/0/args",
    ] {
        assert!(
            script.contains(path) && daemon_set.pointer(path).is_some(),
            "{path}"
        );
    }
    for arg in ["uninstall", "--now"] {
        assert!(script.contains(&format!("\"value\": \"{arg}\"")), "{arg}");
    }
    DEVICE_PLUGIN
        .accepts(&["--node-name=node", "uninstall", "--now"])
        .unwrap();
}
