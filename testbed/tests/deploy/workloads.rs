//! The daemons' workloads: secure, reachable only where needed, and found where the code is.

use rstest::rstest;
use serde_json::{Value, json};

use super::daemons::{DEVICE_PLUGIN, Daemon, SCHEDULER};
use super::leader::LEADER_LABEL;
use super::render::{render, render_base_with, render_with};
use super::{all, find, flag, items, named, pod, texts, workloads};

const FOLDERS: [&str; 3] = ["base", "overlays/simulated", "attach/second-scheduler"];

#[rstest]
fn every_container_is_confined(#[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str) {
    let objects = render(folder);
    assert_eq!(workloads(&objects).len(), 2);
    for workload in workloads(&objects) {
        let (name, pod) = (&workload["metadata"]["name"], pod(workload));
        for field in ["hostNetwork", "hostPID", "hostIPC", "shareProcessNamespace"] {
            assert_eq!(pod[field], Value::Null, "{name}: {field}");
        }
        assert_eq!(
            pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault",
            "{name}"
        );
        let priority = pod["priorityClassName"].as_str().unwrap();
        assert!(
            ["system-node-critical", "system-cluster-critical"].contains(&priority),
            "{name}"
        );
        assert!(
            pod["terminationGracePeriodSeconds"]
                .as_i64()
                .is_some_and(|seconds| seconds > 0),
            "{name}"
        );
        for container in items(&pod["containers"]) {
            let expected = json!({
                "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]}});
            assert_eq!(container["securityContext"], expected, "{name}");
            assert!(container["resources"]["requests"]["memory"].is_string(), "{name}");
            assert!(
                container["image"].as_str().unwrap().contains(':'),
                "{name}: {}",
                container["image"]
            );
        }
    }
}

/// An unauthenticated `/bind` on every node's address let every client bind any pod anywhere (E15). The read API and the page
/// show the pods of all namespaces to every client.
#[rstest]
fn no_daemon_listens_on_addresses_of_the_nodes(#[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str) {
    let objects = render(folder);
    for service in all(&objects, "Service") {
        assert_eq!(service["spec"]["type"], "ClusterIP");
        assert!(
            items(&service["spec"]["ports"])
                .iter()
                .all(|port| port["nodePort"].is_null())
        );
    }
    for container in workloads(&objects)
        .iter()
        .flat_map(|workload| items(&pod(workload)["containers"]))
    {
        let mut ports = items(&container["ports"]).iter();
        assert!(ports.all(|port| port["hostPort"].is_null()), "{container:#}");
    }
    assert_eq!(all(&objects, "NetworkPolicy").len(), 2);
    assert_eq!(
        flag(SCHEDULER.container(&objects), "--read-listen"),
        Some("127.0.0.1:12346")
    );
}

#[test]
fn the_scheduler_is_not_root_and_needs_client_certificates() {
    let objects = render("base");
    let user = &SCHEDULER.pod(&objects)["securityContext"];
    assert_eq!(
        (&user["runAsNonRoot"], &user["runAsUser"]),
        (&json!(true), &json!(65532))
    );
    let container = SCHEDULER.container(&objects);
    assert_eq!(
        flag(container, "--certificate-secret"),
        Some("gpushare-scheduler-certificates")
    );
}

/// For users with an authority of their own: every file comes from the Secret that the script and cert-manager fill.
#[test]
fn certificates_from_files_replace_the_scheduler_s_own() {
    let objects = render_base_with("components/certificate-files");
    let container = SCHEDULER.container(&objects);
    SCHEDULER.accepts(&texts(&container["args"])).unwrap();
    assert_eq!(flag(container, "--tls-dir"), Some("/etc/gpushare/tls"));
    let secret = SCHEDULER.pod(&objects)["volumes"][0]["secret"]["secretName"]
        .as_str()
        .unwrap();
    let script = super::read("attach/kube-scheduler/certificates.sh");
    assert!(script.contains(&format!("secret generic {secret} ")));
}

#[test]
fn the_probes_and_the_service_of_the_scheduler_use_its_ports() {
    let objects = render("base");
    let deployment = SCHEDULER.workload(&objects);
    let container = SCHEDULER.container(&objects);
    let (port, health) = (&container["ports"][0], &container["ports"][1]);
    let listen = format!("0.0.0.0:{}", port["containerPort"]);
    assert_eq!(flag(container, "--listen"), Some(listen.as_str()));
    let extender = json!({"ports": [{"port": port["containerPort"], "protocol": "TCP"}]});
    assert_probed_in_the_clear(&objects, SCHEDULER, health, &[extender]);
    let service = find(&objects, "Service", SCHEDULER.name);
    assert_eq!(service["spec"]["ports"][0]["port"], port["containerPort"]);
    assert_eq!(service["spec"]["ports"][0]["targetPort"], port["name"]);
    let labels = &deployment["spec"]["template"]["metadata"]["labels"];
    let selectors = [
        &service["spec"]["selector"],
        &deployment["spec"]["selector"]["matchLabels"],
        &find(&objects, "NetworkPolicy", SCHEDULER.name)["spec"]["podSelector"]["matchLabels"],
    ];
    for selector in selectors {
        let mut own = selector
            .as_object()
            .unwrap()
            .iter()
            .filter(|(key, _)| *key != LEADER_LABEL);
        assert!(own.all(|(key, value)| labels[key] == *value), "{selector}");
    }
}

/// Health and metrics are served at this port without TLS, as kubelet shows no certificate and reaches the pod's address only.
/// The network policy admits Prometheus there, and `others` elsewhere.
fn assert_probed_in_the_clear(objects: &[Value], daemon: Daemon, port: &Value, others: &[Value]) {
    let container = daemon.container(objects);
    let listen = format!("0.0.0.0:{}", port["containerPort"]);
    assert_eq!(flag(container, "--health-listen"), Some(listen.as_str()));
    for (probe, path) in [("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
        assert_eq!(
            container[probe]["httpGet"],
            json!({"path": path, "port": port["name"]}),
            "{probe}"
        );
    }
    let labels = [
        json!({"kubernetes.io/metadata.name": "monitoring"}),
        json!({"gpushare/monitoring": "true"}),
    ];
    let peers = labels.map(|labels| json!({"namespaceSelector": {"matchLabels": labels}}));
    let monitoring = json!({"from": peers, "ports": [{"port": port["containerPort"], "protocol": "TCP"}]});
    let policy = &find(objects, "NetworkPolicy", daemon.name)["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress"]));
    assert_eq!(policy["ingress"], json!([others, &[monitoring]].concat()));
}

#[rstest]
#[case::simulated("overlays/simulated")]
#[case::attached("attach/second-scheduler")]
fn the_extender_of_the_second_scheduler_listens_on_loopback_only(#[case] folder: &str) {
    let objects = render(folder);
    assert!(all(&objects, "Service").is_empty());
    let extender = SCHEDULER.container(&objects);
    assert_eq!(flag(extender, "--listen"), Some("127.0.0.1:12345"));
    assert_eq!(extender["volumeMounts"], Value::Null);
    let ports = items(&extender["ports"]);
    assert_eq!(ports.len(), 1, "{ports:?}");
    assert_probed_in_the_clear(&objects, SCHEDULER, &ports[0], &[]);

    let pod = SCHEDULER.pod(&objects);
    let kube_scheduler = named(&pod["containers"], "kube-scheduler");
    let map = pod["volumes"][0]["configMap"]["name"].as_str().unwrap();
    let files = find(&objects, "ConfigMap", map)["data"].as_object().unwrap();
    let mount = kube_scheduler["volumeMounts"][0]["mountPath"].as_str().unwrap();
    let config = format!("--config={mount}/{}", files.keys().next().unwrap());
    assert!(texts(&kube_scheduler["command"]).contains(&config.as_str()));
}

#[test]
fn the_device_plugin_mounts_kubelets_directories_and_little_else() {
    let objects = render("base");
    let pod = DEVICE_PLUGIN.pod(&objects);
    assert_eq!(pod["securityContext"]["runAsUser"], 0);
    let container = DEVICE_PLUGIN.container(&objects);
    let seen: Vec<Value> = items(&pod["volumes"])
        .iter()
        .zip(items(&container["volumeMounts"]))
        .map(|(volume, mount)| {
            json!([
                volume["hostPath"]["path"],
                mount["mountPath"],
                mount["readOnly"] == true
            ])
        })
        .collect();
    let expected = [
        (
            "/var/lib/kubelet/device-plugins",
            "/var/lib/kubelet/device-plugins",
            false,
        ),
        (
            "/var/lib/kubelet/pod-resources",
            "/var/lib/kubelet/pod-resources",
            true,
        ),
        ("/var/run/cdi", "/var/run/cdi", false),
        ("/etc/cdi", "/etc/cdi", true),
        ("/sys", "/host/sys", true),
        ("/dev/infiniband", "/dev/infiniband", true),
    ];
    assert_eq!(json!(seen), json!(expected));
    assert_eq!(pod["nodeSelector"]["gpushare"], "true");
    for (variable, field) in [("NODE_NAME", "spec.nodeName"), ("POD_UID", "metadata.uid")] {
        assert_eq!(
            named(&container["env"], variable)["valueFrom"]["fieldRef"]["fieldPath"],
            field
        );
    }
    assert_eq!(named(&container["env"], "NVIDIA_VISIBLE_DEVICES")["value"], "all");
    assert_eq!(
        named(&container["env"], "NVIDIA_DRIVER_CAPABILITIES")["value"],
        "utility"
    );
    for taint in ["nvidia.com/gpu", "node.kubernetes.io/not-ready"] {
        let mut tolerations = items(&pod["tolerations"]).iter();
        assert!(
            tolerations.any(|toleration| toleration["key"] == taint),
            "{taint}"
        );
    }
}

#[test]
fn the_probes_of_the_device_plugin_use_its_port() {
    let objects = render("base");
    let port = &DEVICE_PLUGIN.container(&objects)["ports"][0];
    assert_probed_in_the_clear(&objects, DEVICE_PLUGIN, port, &[]);
}

/// A new plugin beside the old one would lose the resource when the old one ends (kubelet looks plugins up by resource).
#[test]
fn a_rollout_replaces_the_device_plugin_before_it_starts_another() {
    let objects = render("base");
    let strategy = &DEVICE_PLUGIN.workload(&objects)["spec"]["updateStrategy"];
    assert_eq!(
        *strategy,
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}})
    );
}

/// The scheduler knows the plugin's pods by their label, and the plugin serves for up to 9 s after SIGTERM.
#[test]
fn the_device_plugin_has_its_label_and_time_to_shut_down() {
    let objects = render_base_with("components/whole-gpus");
    for daemon_set in all(&objects, "DaemonSet") {
        let labels = &daemon_set["spec"]["template"]["metadata"]["labels"];
        assert_eq!(labels["app.kubernetes.io/name"], daemon_set["metadata"]["name"]);
        let grace = pod(daemon_set)["terminationGracePeriodSeconds"].as_u64().unwrap();
        assert!(grace >= 15, "and up to 5 s to close everything");
    }
}

/// The file that a flag of the plugin names, from the map that the container mounts there.
fn mounted(objects: &[Value], file: &str, volume: &str, map: &str) -> Value {
    let mount = &named(&DEVICE_PLUGIN.container(objects)["volumeMounts"], volume)["mountPath"];
    let key = file
        .strip_prefix(mount.as_str().unwrap())
        .unwrap()
        .trim_start_matches('/');
    serde_yaml_ng::from_str(find(objects, "ConfigMap", map)["data"][key].as_str().unwrap()).unwrap()
}

#[test]
fn the_plugin_gets_the_simulated_devices() {
    let objects = render("overlays/simulated");
    let file = flag(DEVICE_PLUGIN.container(&objects), "--inventory").unwrap();
    let file = file.strip_prefix("file:").unwrap();
    let inventory = mounted(&objects, file, "inventory", "gpushare-inventory");
    let gpus = items(&inventory["gpus"]);
    assert_eq!(gpus.len(), 4);
    // A UUID says which device of the cluster it is.
    assert!(
        gpus.iter()
            .all(|gpu| gpu["uuid"].as_str().unwrap().contains("{node}"))
    );
}

#[test]
fn the_component_for_a_runtime_class_sets_it() {
    let objects = render_base_with("components/nvidia-runtime-class");
    assert_eq!(DEVICE_PLUGIN.pod(&objects)["runtimeClassName"], "nvidia");
}

/// One component is privileged, and says so; with it the runtime adds nothing, and each directory of a driver is mounted.
#[test]
fn the_component_for_a_driver_root_mounts_it() {
    let components = ["driver-root", "gpu-operator", "selinux", "read-only-etc"];
    let folders = components.map(|component| format!("components/{component}"));
    let objects = render_with("base", &folders.each_ref().map(String::as_str));
    let (pod, container) = (DEVICE_PLUGIN.pod(&objects), DEVICE_PLUGIN.container(&objects));
    DEVICE_PLUGIN.accepts(&texts(&container["args"])).unwrap();
    let roots = flag(container, "--driver-root").unwrap();
    let mounts = items(&container["volumeMounts"]).iter();
    let mounts: Vec<&str> = mounts.map(|mount| mount["mountPath"].as_str().unwrap()).collect();
    assert!(
        roots.split(',').all(|root| root.starts_with("/host")) && mounts.contains(&"/host"),
        "{roots}"
    );
    assert!(!mounts.contains(&"/etc/cdi"), "{mounts:?}");
    assert_eq!(
        items(&pod["volumes"]).len(),
        mounts.len(),
        "each volume is mounted"
    );
    let expected =
        json!({"privileged": true, "readOnlyRootFilesystem": true, "seLinuxOptions": {"type": "spc_t"}});
    assert_eq!(container["securityContext"], expected);
    assert_eq!(
        named(&container["env"], "NVIDIA_VISIBLE_DEVICES")["value"],
        "void"
    );
    assert_eq!(pod["nodeSelector"]["nvidia.com/gpu.deploy.client"], "true");
    assert!(super::read("components/driver-root/kustomization.yaml").contains("PRIVILEGED"));
}

/// The plugin's argument for the socket lies in the directory that is mounted.
#[test]
fn the_component_for_the_runtime_hook_mounts_its_socket() {
    let objects = render_base_with("components/nri");
    let (pod, container) = (DEVICE_PLUGIN.pod(&objects), DEVICE_PLUGIN.container(&objects));
    DEVICE_PLUGIN.accepts(&texts(&container["args"])).unwrap();
    assert_eq!(flag(container, "--nri-socket"), Some(proto::nri::SOCKET));
    let mount = &named(&container["volumeMounts"], "nri")["mountPath"];
    assert_eq!(*mount, named(&pod["volumes"], "nri")["hostPath"]["path"]);
    let dir = std::path::Path::new(proto::nri::SOCKET).parent().unwrap();
    assert_eq!(*mount, dir.to_str().unwrap());
}

/// Neither daemon believes the annotation without it, and the base leaves it out.
#[rstest]
#[case::base("base")]
#[case::second_scheduler("attach/second-scheduler")]
fn the_component_for_all_devices_sets_the_flags_of_both_daemons(#[case] folder: &str) {
    let flagged = |objects: &[Value]| {
        [SCHEDULER, DEVICE_PLUGIN].map(|daemon| {
            let args = texts(&daemon.container(objects)["args"]);
            daemon.accepts(&args).unwrap();
            args.contains(&"--allow-all-devices")
        })
    };
    assert_eq!(flagged(&render(folder)), [false; 2]);
    assert_eq!(
        flagged(&render_with(folder, &["components/all-devices"])),
        [true; 2]
    );
}

/// The plugin's argument for the file is in the mounted map, in the expected form.
#[test]
fn the_component_for_device_labels_mounts_the_file() {
    let objects = render_base_with("components/device-labels");
    let container = DEVICE_PLUGIN.container(&objects);
    DEVICE_PLUGIN.accepts(&texts(&container["args"])).unwrap();
    let file = flag(container, "--device-labels").unwrap();
    let labels = mounted(&objects, file, "device-labels", "gpushare-device-labels");
    assert_eq!(labels["devices"]["rdma"]["fabric"], "default");
}

/// The binaries take the arguments and the environment that the manifests give them.
#[rstest]
fn the_daemons_accept_their_arguments(
    #[values(SCHEDULER, DEVICE_PLUGIN)] daemon: Daemon,
    #[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str,
) {
    let objects = render(folder);
    let container = daemon.container(&objects);
    daemon.accepts(&texts(&container["args"])).unwrap();
    let names = items(&container["env"])
        .iter()
        .map(|entry| entry["name"].as_str().unwrap());
    for name in names.filter(|name| !name.starts_with("NVIDIA_")) {
        let documented = format!("[env: {name}");
        assert!(
            daemon.help().contains(&documented),
            "{} does not read {name}",
            daemon.name
        );
    }
}

/// The `DaemonSet` for nodes where our plugin serves whole GPUs is a copy, as kustomize cannot make one.
#[test]
fn whole_gpus_differ_from_the_base_by_a_label_and_a_flag() {
    let objects = render_base_with("components/whole-gpus");
    let whole_name = format!("{}-whole-gpus", DEVICE_PLUGIN.name);
    for kind in ["DaemonSet", "NetworkPolicy"] {
        let (plain, whole) = (
            find(&objects, kind, DEVICE_PLUGIN.name),
            find(&objects, kind, &whole_name),
        );
        let mut expected = plain.clone();
        if kind == "DaemonSet" {
            let pod = &mut expected["spec"]["template"]["spec"];
            let affinity = pod.as_object_mut().unwrap().remove("affinity").unwrap();
            let terms = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
            assert_eq!(
                terms[0]["matchExpressions"],
                json!([{"key": "gpushare/whole-gpus", "operator": "NotIn", "values": ["true"]}])
            );
            pod["nodeSelector"]["gpushare/whole-gpus"] = json!("true");
            let args = pod["containers"][0]["args"].as_array_mut().unwrap();
            args.insert(1, json!("--vendor-resource=nvidia.com/gpu=ours"));
            DEVICE_PLUGIN
                .accepts(&texts(&pod["containers"][0]["args"]))
                .unwrap();
        }
        let label = format!("app.kubernetes.io/name\":\"{}\"", DEVICE_PLUGIN.name);
        let expected = expected
            .to_string()
            .replace(&label, &format!("app.kubernetes.io/name\":\"{whole_name}\""));
        let mut expected: Value = serde_json::from_str(&expected).unwrap();
        expected["metadata"]["name"] = json!(whole_name);
        assert_eq!(*whole, expected, "{kind}");
    }
}

/// A component that changes the plugin changes it on all nodes.
#[test]
fn components_change_both_daemon_sets() {
    for component in [
        "components/all-devices",
        "components/nri",
        "components/nvidia-runtime-class",
        "components/driver-root",
        "components/gpu-operator",
        "components/simulated",
        "components/device-labels",
        "components/driver-limits",
        "components/hami-core",
        "components/measure-memory",
    ] {
        let (plain, whole) = (
            render("base"),
            render_with("base", &["components/whole-gpus", component]),
        );
        let before = find(&plain, "DaemonSet", DEVICE_PLUGIN.name).to_string().len();
        for daemon_set in all(&whole, "DaemonSet") {
            assert!(daemon_set.to_string().len() > before, "{component}");
        }
        assert_eq!(all(&whole, "DaemonSet").len(), 2);
    }
}
