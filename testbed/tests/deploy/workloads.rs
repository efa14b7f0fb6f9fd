//! The daemons' workloads: secure, reachable only where needed, and found where the code is.

use std::collections::BTreeMap;

use proto::resource::GPU_MEM;
use rstest::rstest;
use serde_json::{Value, json};

use crate::daemons::{DEVICE_PLUGIN, Daemon, SCHEDULER};
use crate::leader::LEADER_LABEL;
use crate::render::{render, render_base_with, render_with};
use crate::{all, find, texts};

const FOLDERS: [&str; 3] = ["base", "overlays/simulated", "attach/second-scheduler"];

fn pod(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]
}

fn workloads(objects: &[Value]) -> Vec<&Value> {
    [all(objects, "Deployment"), all(objects, "DaemonSet")].concat()
}

fn container<'a>(workload: &'a Value, name: &str) -> &'a Value {
    let containers = pod(workload)["containers"].as_array().unwrap();
    containers
        .iter()
        .find(|container| container["name"] == name)
        .unwrap_or_else(|| panic!("no container {name}"))
}

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
        for container in pod["containers"].as_array().unwrap() {
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

/// An unauthenticated `/bind` on every node's address let every client bind any pod anywhere (E15).
#[rstest]
fn no_daemon_listens_on_addresses_of_the_nodes(#[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str) {
    let objects = render(folder);
    for service in all(&objects, "Service") {
        assert_eq!(service["spec"]["type"], "ClusterIP");
        assert!(
            service["spec"]["ports"]
                .as_array()
                .unwrap()
                .iter()
                .all(|port| port["nodePort"].is_null())
        );
    }
    for workload in workloads(&objects) {
        for container in pod(workload)["containers"].as_array().unwrap() {
            let ports = container["ports"].as_array().into_iter().flatten();
            assert!(
                ports.clone().all(|port| port["hostPort"].is_null()),
                "{container:#}"
            );
        }
    }
    assert_eq!(all(&objects, "NetworkPolicy").len(), 2);
}

#[test]
fn the_scheduler_is_not_root_and_needs_client_certificates() {
    let objects = render("base");
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    let user = &pod(deployment)["securityContext"];
    assert_eq!(
        (&user["runAsNonRoot"], &user["runAsUser"]),
        (&json!(true), &json!(65532))
    );
    let args = texts(&container(deployment, SCHEDULER.name)["args"]);
    for flag in [
        "--listen=0.0.0.0:12345",
        "--certificate-secret=gpushare-scheduler-certificates",
    ] {
        assert!(args.contains(&flag), "{args:?}");
    }
}

/// For users with an authority of their own: every file comes from the Secret that the script and cert-manager fill.
#[test]
fn certificates_from_files_replace_the_scheduler_s_own() {
    let objects = render_base_with("components/certificate-files");
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    let args = texts(&container(deployment, SCHEDULER.name)["args"]);
    SCHEDULER.accepts(&args).unwrap();
    assert!(args.contains(&"--tls-dir=/etc/gpushare/tls"), "{args:?}");
    let secret = pod(deployment)["volumes"][0]["secret"]["secretName"]
        .as_str()
        .unwrap();
    assert!(
        crate::read("attach/kube-scheduler/certificates.sh").contains(&format!("secret generic {secret} "))
    );
}

#[test]
fn the_probes_and_the_service_of_the_scheduler_use_its_ports() {
    let objects = render("base");
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    let container = container(deployment, SCHEDULER.name);
    let (port, health) = (&container["ports"][0], &container["ports"][1]);
    let listen = texts(&container["args"])
        .into_iter()
        .find_map(|arg| arg.strip_prefix("--listen="))
        .unwrap();
    assert_eq!(listen, format!("0.0.0.0:{}", port["containerPort"]));
    assert_probed_in_the_clear(container, health);
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
    let policy = find(&objects, "NetworkPolicy", SCHEDULER.name);
    let extender = json!({"ports": [{"port": port["containerPort"], "protocol": "TCP"}]});
    assert_eq!(
        policy["spec"]["ingress"],
        json!([extender, for_monitoring(health)])
    );
}

/// They show the pods of all namespaces to every client.
#[rstest]
fn the_read_api_and_the_page_listen_on_loopback_only(
    #[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str,
) {
    let objects = render(folder);
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    let args = texts(&container(deployment, SCHEDULER.name)["args"]);
    let listen = args.iter().find_map(|arg| arg.strip_prefix("--read-listen="));
    assert_eq!(listen, Some("127.0.0.1:12346"));
}

/// kubelet shows no certificate, and reaches the pod's address only.
fn assert_probed_in_the_clear(container: &Value, port: &Value) {
    let listen = texts(&container["args"])
        .into_iter()
        .find_map(|arg| arg.strip_prefix("--health-listen="))
        .unwrap();
    assert_eq!(listen, format!("0.0.0.0:{}", port["containerPort"]));
    for (probe, path) in [("livenessProbe", "/healthz"), ("readinessProbe", "/readyz")] {
        assert_eq!(
            container[probe]["httpGet"],
            json!({"path": path, "port": port["name"]}),
            "{probe}"
        );
    }
}

#[rstest]
#[case::simulated("overlays/simulated")]
#[case::attached("attach/second-scheduler")]
fn the_extender_of_the_second_scheduler_listens_on_loopback_only(#[case] folder: &str) {
    let objects = render(folder);
    assert!(all(&objects, "Service").is_empty());
    let deployment = find(&objects, "Deployment", SCHEDULER.name);
    let extender = container(deployment, SCHEDULER.name);
    assert!(texts(&extender["args"]).contains(&"--listen=127.0.0.1:12345"));
    assert_eq!(extender["volumeMounts"], Value::Null);
    let ports = extender["ports"].as_array().unwrap();
    assert_eq!(ports.len(), 1, "{ports:?}");
    assert_probed_in_the_clear(extender, &ports[0]);
    let policy = find(&objects, "NetworkPolicy", SCHEDULER.name);
    assert_eq!(policy["spec"]["ingress"], json!([for_monitoring(&ports[0])]));
    let kube_scheduler = container(deployment, "kube-scheduler");
    let volume = &pod(deployment)["volumes"][0];
    let map = find(
        &objects,
        "ConfigMap",
        volume["configMap"]["name"].as_str().unwrap(),
    );
    let mount = kube_scheduler["volumeMounts"][0]["mountPath"].as_str().unwrap();
    let file = map["data"].as_object().unwrap().keys().next().unwrap();
    assert!(texts(&kube_scheduler["command"]).contains(&format!("--config={mount}/{file}").as_str()));
}

#[test]
fn the_device_plugin_mounts_kubelets_directories_and_little_else() {
    let objects = render("base");
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    let pod = pod(daemon_set);
    assert_eq!(pod["securityContext"]["runAsUser"], 0);
    let container = container(daemon_set, DEVICE_PLUGIN.name);
    let (volumes, mounts) = (
        pod["volumes"].as_array().unwrap(),
        container["volumeMounts"].as_array().unwrap(),
    );
    let seen: Vec<Value> = volumes
        .iter()
        .zip(mounts)
        .map(|(volume, mount)| {
            json!([
                volume["hostPath"]["path"],
                mount["mountPath"],
                mount["readOnly"].as_bool().unwrap_or(false)
            ])
        })
        .collect();
    let expected = [
        json!([
            "/var/lib/kubelet/device-plugins",
            "/var/lib/kubelet/device-plugins",
            false
        ]),
        json!([
            "/var/lib/kubelet/pod-resources",
            "/var/lib/kubelet/pod-resources",
            true
        ]),
        json!(["/var/run/cdi", "/var/run/cdi", false]),
        json!(["/etc/cdi", "/etc/cdi", true]),
        json!(["/sys", "/host/sys", true]),
        json!(["/dev/infiniband", "/dev/infiniband", true]),
    ];
    assert_eq!(seen, expected);
    assert_eq!(pod["nodeSelector"]["gpushare"], "true");
    let env: BTreeMap<&str, &Value> = container["env"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry["name"].as_str().unwrap(), entry))
        .collect();
    assert_eq!(
        env["NODE_NAME"]["valueFrom"]["fieldRef"]["fieldPath"],
        "spec.nodeName"
    );
    assert_eq!(
        env["POD_UID"]["valueFrom"]["fieldRef"]["fieldPath"],
        "metadata.uid"
    );
    assert_eq!(env["NVIDIA_VISIBLE_DEVICES"]["value"], "all");
    assert_eq!(env["NVIDIA_DRIVER_CAPABILITIES"]["value"], "utility");
    let tolerated: Vec<&str> = pod["tolerations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|t| t["key"].as_str().unwrap())
        .collect();
    assert!(
        ["nvidia.com/gpu", "node.kubernetes.io/not-ready"]
            .iter()
            .all(|key| tolerated.contains(key)),
        "{tolerated:?}"
    );
}

#[test]
fn the_probes_of_the_device_plugin_use_its_port() {
    let objects = render("base");
    let container = container(
        find(&objects, "DaemonSet", DEVICE_PLUGIN.name),
        DEVICE_PLUGIN.name,
    );
    assert_probed_in_the_clear(container, &container["ports"][0]);
    let policy = find(&objects, "NetworkPolicy", DEVICE_PLUGIN.name);
    assert_eq!(policy["spec"]["policyTypes"], json!(["Ingress"]));
    assert_eq!(
        policy["spec"]["ingress"],
        json!([for_monitoring(&container["ports"][0])])
    );
}

/// A new plugin beside the old one would lose the resource when the old one ends (kubelet looks plugins up by resource).
#[test]
fn a_rollout_replaces_the_device_plugin_before_it_starts_another() {
    let objects = render("base");
    let strategy = &find(&objects, "DaemonSet", DEVICE_PLUGIN.name)["spec"]["updateStrategy"];
    assert_eq!(
        *strategy,
        json!({"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 1}})
    );
}

/// The scheduler knows the plugin's pods by their label, and the plugin serves for up to 9 s after SIGTERM.
#[test]
fn the_device_plugin_has_its_label_and_time_to_shut_down() {
    let objects = render_base_with("components/whole-gpus");
    let whole_name = format!("{}-whole-gpus", DEVICE_PLUGIN.name);
    for name in [DEVICE_PLUGIN.name, &whole_name] {
        let template = &find(&objects, "DaemonSet", name)["spec"]["template"];
        assert_eq!(template["metadata"]["labels"]["app.kubernetes.io/name"], name);
        assert!(
            template["spec"]["terminationGracePeriodSeconds"]
                .as_u64()
                .unwrap()
                >= 15,
            "and up to 5 s to close everything"
        );
    }
}

#[test]
fn the_plugin_gets_the_simulated_devices() {
    let objects = render("overlays/simulated");
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    let container = container(daemon_set, DEVICE_PLUGIN.name);
    let args = texts(&container["args"]);
    let file = args
        .iter()
        .find_map(|arg| arg.strip_prefix("--inventory=file:"))
        .unwrap();
    let mounts = container["volumeMounts"].as_array().unwrap();
    let mount = mounts.iter().find(|mount| mount["name"] == "inventory").unwrap()["mountPath"]
        .as_str()
        .unwrap();
    let key = file.strip_prefix(mount).unwrap().trim_start_matches('/');
    let map = find(&objects, "ConfigMap", "gpushare-inventory");
    let inventory: Value = serde_json::from_str(map["data"][key].as_str().unwrap()).unwrap();
    let gpus = inventory["gpus"].as_array().unwrap();
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
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    assert_eq!(pod(daemon_set)["runtimeClassName"], "nvidia");
}

/// One component is privileged, and says so; with it the runtime adds nothing, and each directory of a driver is mounted.
#[test]
fn the_component_for_a_driver_root_mounts_it() {
    let objects = render_with(
        "base",
        &[
            "components/driver-root",
            "components/gpu-operator",
            "components/selinux",
            "components/read-only-etc",
        ],
    );
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    let container = container(daemon_set, DEVICE_PLUGIN.name);
    let args = texts(&container["args"]);
    DEVICE_PLUGIN.accepts(&args).unwrap();
    let roots = args
        .iter()
        .find_map(|arg| arg.strip_prefix("--driver-root="))
        .unwrap();
    let mounts: Vec<_> = container["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|mount| mount["mountPath"].as_str().unwrap())
        .collect();
    assert!(
        roots.split(',').all(|root| root.starts_with("/host")) && mounts.contains(&"/host"),
        "{roots}"
    );
    assert!(!mounts.contains(&"/etc/cdi"), "{mounts:?}");
    let volumes = pod(daemon_set)["volumes"].as_array().unwrap();
    assert_eq!(volumes.len(), mounts.len(), "each volume is mounted");
    let expected =
        json!({"privileged": true, "readOnlyRootFilesystem": true, "seLinuxOptions": {"type": "spc_t"}});
    assert_eq!(container["securityContext"], expected);
    let variable = container["env"]
        .as_array()
        .unwrap()
        .iter()
        .find(|variable| variable["name"] == "NVIDIA_VISIBLE_DEVICES")
        .unwrap();
    assert_eq!(variable["value"], "void");
    assert_eq!(
        pod(daemon_set)["nodeSelector"]["nvidia.com/gpu.deploy.client"],
        "true"
    );
    assert!(crate::read("components/driver-root/kustomization.yaml").contains("PRIVILEGED"));
}

/// The plugin's argument for the socket lies in the directory that is mounted.
#[test]
fn the_component_for_the_runtime_hook_mounts_its_socket() {
    let objects = render_base_with("components/nri");
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    let container = container(daemon_set, DEVICE_PLUGIN.name);
    let args = texts(&container["args"]);
    DEVICE_PLUGIN.accepts(&args).unwrap();
    let expected = format!("--nri-socket={}", proto::nri::SOCKET);
    assert!(args.contains(&expected.as_str()), "{args:?}");
    let named = |list: &Value| {
        list.as_array()
            .unwrap()
            .iter()
            .find(|entry| entry["name"] == "nri")
            .cloned()
            .unwrap()
    };
    let (mount, volume) = (
        named(&container["volumeMounts"]),
        named(&pod(daemon_set)["volumes"]),
    );
    assert_eq!(mount["mountPath"], volume["hostPath"]["path"]);
    let dir = std::path::Path::new(proto::nri::SOCKET).parent().unwrap();
    assert_eq!(mount["mountPath"], dir.to_str().unwrap());
}

/// Neither daemon believes the annotation without it, and the base leaves it out.
#[rstest]
#[case::base("base")]
#[case::second_scheduler("attach/second-scheduler")]
fn the_component_for_all_devices_sets_the_flags_of_both_daemons(#[case] folder: &str) {
    const FLAG: &str = "--allow-all-devices";
    let flagged = |objects: &[Value]| {
        let workloads = [("Deployment", SCHEDULER), ("DaemonSet", DEVICE_PLUGIN)];
        workloads.map(|(kind, daemon)| {
            let args = container(find(objects, kind, daemon.name), daemon.name)["args"].clone();
            daemon.accepts(&texts(&args)).unwrap();
            texts(&args).contains(&FLAG)
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
    let daemon_set = find(&objects, "DaemonSet", DEVICE_PLUGIN.name);
    let container = container(daemon_set, DEVICE_PLUGIN.name);
    let args = texts(&container["args"]);
    DEVICE_PLUGIN.accepts(&args).unwrap();
    let file = args
        .iter()
        .find_map(|arg| arg.strip_prefix("--device-labels="))
        .unwrap();
    let mount = container["volumeMounts"]
        .as_array()
        .unwrap()
        .iter()
        .find(|mount| mount["name"] == "device-labels")
        .unwrap();
    let name = file
        .strip_prefix(mount["mountPath"].as_str().unwrap())
        .unwrap()
        .trim_start_matches('/');
    let map = find(&objects, "ConfigMap", "gpushare-device-labels");
    let labels: Value = serde_yaml_ng::from_str(map["data"][name].as_str().unwrap()).unwrap();
    assert_eq!(labels["devices"]["rdma"]["fabric"], "default");
}

/// The binaries take the arguments and the environment that the manifests give them.
#[rstest]
fn the_daemons_accept_their_arguments(
    #[values(SCHEDULER, DEVICE_PLUGIN)] daemon: Daemon,
    #[values(FOLDERS[0], FOLDERS[1], FOLDERS[2])] folder: &str,
) {
    let objects = render(folder);
    let workload = workloads(&objects)
        .into_iter()
        .find(|workload| workload["metadata"]["name"] == daemon.name)
        .unwrap();
    let container = container(workload, daemon.name);
    daemon.accepts(&texts(&container["args"])).unwrap();
    let own = |name: &&str| !name.starts_with("NVIDIA_");
    for name in container["env"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|entry| entry["name"].as_str().unwrap())
        .filter(own)
    {
        assert!(
            daemon.help().contains(&format!("[env: {name}")),
            "{} does not read {name}",
            daemon.name
        );
    }
}

/// The rules for which name is whose hold for the names in use.
#[test]
fn the_policy_covers_all_resources_that_the_plugin_publishes() {
    use proto::resource::{GPU, GPU_CORE, GPU_COUNT, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED};
    let objects = render("base");
    let policy = find(
        &objects,
        "ValidatingAdmissionPolicy",
        "gpushare-device-plugin-nodes",
    );
    let text = policy["spec"]["validations"].to_string();
    for name in [
        GPU,
        GPU_CORE,
        GPU_COUNT,
        GPU_MEMORY,
        GPU_MEMORY_RATIO,
        GPU_SHARED,
        GPU_MEM,
    ] {
        let domain = name.split_once('/').unwrap().0;
        assert!(text.contains(&format!("name.startsWith('{domain}/')")), "{name}");
    }
}

/// The rule of a network policy that admits Prometheus, and no other pod, to the port of health and metrics.
fn for_monitoring(port: &Value) -> Value {
    let labels = [
        json!({"kubernetes.io/metadata.name": "monitoring"}),
        json!({"gpushare/monitoring": "true"}),
    ];
    let peers = labels.map(|labels| json!({"namespaceSelector": {"matchLabels": labels}}));
    json!({"from": peers, "ports": [{"port": port["containerPort"], "protocol": "TCP"}]})
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
            let affinity = expected["spec"]["template"]["spec"]
                .as_object_mut()
                .unwrap()
                .remove("affinity")
                .unwrap();
            let terms = &affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"];
            assert_eq!(
                terms[0]["matchExpressions"],
                json!([{"key": "gpushare/whole-gpus", "operator": "NotIn", "values": ["true"]}])
            );
            let pod = &mut expected["spec"]["template"]["spec"];
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
