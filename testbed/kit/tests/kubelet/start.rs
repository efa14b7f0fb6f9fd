//! Starting containers: `PreStartContainer`, the final environment, CDI.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use k8s_openapi::api::core::v1::Pod;
use proto::kubelet::deviceplugin::{CdiDevice, ContainerAllocateResponse};
use serde_json::json;
use tonic::Status;

use crate::node::{Node, container, pod, slot_pod};
use crate::plugin::{Call, SLOTS, envs, slots};

#[tokio::test]
async fn a_refused_start_is_repeated_until_it_succeeds() {
    let node = Node::start().await;
    let refusals = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&refusals);
    let script =
        slots(4)
            .with_pre_start()
            .answers_pre_start(move |_| match counted.fetch_add(1, Ordering::SeqCst) {
                0..3 => Err(Status::unavailable("whose is it?")),
                _ => Ok(()),
            });
    let plugin = node.plugin(script).await;
    node.create(slot_pod("p", 1)).await;
    let waiting = node
        .when("p", |pod| {
            let status = pod
                .status
                .as_ref()
                .and_then(|status| status.container_statuses.as_ref())
                .and_then(|all| all.first());
            let waiting = status
                .and_then(|status| status.state.as_ref())
                .and_then(|state| state.waiting.as_ref());
            waiting.and_then(|waiting| waiting.reason.as_deref()) == Some("CreateContainerConfigError")
        })
        .await;
    let status = waiting.status.unwrap();
    assert_eq!(status.phase.as_deref(), Some("Pending"));
    let message = status.container_statuses.unwrap()[0]
        .state
        .clone()
        .unwrap()
        .waiting
        .unwrap()
        .message
        .unwrap();
    assert_eq!(
        message,
        "device plugin PreStartContainer rpc failed with err: rpc error: code = Unavailable desc = whose is it?"
    );
    node.in_phase("p", "Running").await;
    let pre_starts = plugin
        .calls()
        .into_iter()
        .filter(|call| matches!(call, Call::PreStart(_)))
        .count();
    assert_eq!((pre_starts, plugin.allocated().len()), (4, 1));
}

#[tokio::test]
async fn a_refused_start_does_not_delay_the_next_pod() {
    let node = Node::start().await;
    let script = slots(4).with_pre_start().answers_pre_start(|ids| {
        if ids.len() == 2 {
            Err(Status::unknown("never"))
        } else {
            Ok(())
        }
    });
    let _plugin = node.plugin(script).await;
    node.create(slot_pod("stuck", 2)).await;
    node.run(slot_pod("fine", 1)).await;
    node.delete("stuck").await;
    node.when_gone("stuck").await;
}

#[tokio::test]
async fn one_app_container_that_cannot_start_does_not_stop_its_neighbour() {
    let node = Node::start().await;
    let script = slots(4).with_pre_start().answers_pre_start(|ids| {
        if ids.len() == 2 {
            Err(Status::unknown("never"))
        } else {
            Ok(())
        }
    });
    let _plugin = node.plugin(script).await;
    let both = json!([
        container("stuck", &[(SLOTS, "2")]),
        container("fine", &[(SLOTS, "1")])
    ]);
    node.create(pod("p", json!({"containers": both}))).await;
    node.until(|kubelet| {
        kubelet
            .container("default", "p", "fine")
            .is_some_and(|fine| fine.starts == 1)
    })
    .await;
    assert_eq!(node.kubelet.container("default", "p", "stuck").unwrap().starts, 0);
}

#[tokio::test]
async fn variables_of_cdi_override_those_of_the_pod_and_these_the_plugins() {
    let node = Node::start().await;
    let script = slots(4).answers(|_| {
        let names = ["example.com/slot=a", "example.com/slot=a"];
        Ok(ContainerAllocateResponse {
            envs: envs(&[("X", "plugin"), ("Y", "plugin"), ("Z", "plugin")]),
            cdi_devices: names
                .iter()
                .map(|name| CdiDevice {
                    name: (*name).to_owned(),
                })
                .collect(),
            ..Default::default()
        })
    });
    let _plugin = node.plugin(script).await;
    let mut main = container("main", &[(SLOTS, "1")]);
    main["env"] = json!([{"name": "Y", "value": "early"}, {"name": "Y", "value": "pod"}, {"name": "Z", "value": "pod"},
        {"name": "IGNORED", "valueFrom": {"fieldRef": {"fieldPath": "status.hostIP"}}}]);
    node.create(pod("p", json!({"containers": [main]}))).await;

    let unresolved = |kubelet: &kit::kubelet::Kubelet| {
        kubelet
            .container("default", "p", "main")
            .is_some_and(|main| match main.state {
                kit::kubelet::RunState::Waiting { reason, message } => {
                    reason == "CreateContainerError"
                        && message.ends_with("unresolvable CDI devices example.com/slot=a")
                }
                _ => false,
            })
    };
    node.until(unresolved).await;
    let dir = node.dir.path().join("cdi");
    std::fs::create_dir_all(&dir).unwrap();
    let spec = json!({"cdiVersion": "0.6.0", "kind": "example.com/slot", "containerEdits": {"env": ["ALL=spec"]},
        "devices": [{"name": "a", "containerEdits": {"env": ["Z=cdi"], "deviceNodes": [{"path": "/dev/slot-a"}]}}]});
    std::fs::write(dir.join("spec.tmp"), spec.to_string()).unwrap();
    std::fs::rename(dir.join("spec.tmp"), dir.join("spec.json")).unwrap();

    node.in_phase("p", "Running").await;
    let logged = node.logs.lock().unwrap().clone();
    assert_eq!(
        logged,
        [(
            "p/main".to_owned(),
            "ALL=spec\nX=plugin\nY=pod\nZ=cdi\n".to_owned()
        )]
    );
    let main = node.kubelet.container("default", "p", "main").unwrap();
    assert_eq!(
        (main.cdi_devices, main.device_nodes),
        (
            vec!["example.com/slot=a".to_owned()],
            vec!["/dev/slot-a".to_owned()]
        )
    );
}

#[tokio::test]
async fn a_crashed_container_restarts_with_the_same_answer_and_a_new_prestart_call() {
    let node = Node::start().await;
    let n_answers = AtomicUsize::new(0);
    let script = slots(4).with_pre_start().answers(move |_| {
        let n = n_answers.fetch_add(1, Ordering::SeqCst).to_string();
        Ok(ContainerAllocateResponse {
            envs: envs(&[("ANSWER", &n)]),
            ..Default::default()
        })
    });
    let plugin = node.plugin(script).await;
    node.run(slot_pod("p", 2)).await;
    node.kubelet.restart_container("default", "p", "main").unwrap();
    let restarted = node
        .when("p", |pod| {
            let statuses = pod
                .status
                .as_ref()
                .and_then(|status| status.container_statuses.as_ref());
            statuses
                .and_then(|all| all.first())
                .is_some_and(|status| status.restart_count == 1 && status.ready)
        })
        .await;
    assert_eq!(node.env("p", "main")["ANSWER"], "0");
    let ids = node.slots(&restarted, "main");
    assert_eq!(
        plugin.calls(),
        [
            Call::Allocate(ids.clone()),
            Call::PreStart(ids.clone()),
            Call::PreStart(ids)
        ]
    );
    assert_eq!(
        node.kubelet
            .restart_container("default", "p", "missing")
            .unwrap_err()
            .to_string(),
        "pod default/p has no container missing on this node"
    );
}

/// `envFrom` comes before `env`, a later source before an earlier one; a container waits for an object that is missing.
#[tokio::test]
async fn the_environment_comes_from_objects_and_from_the_pod() {
    let node = Node::start().await;
    let spec = json!({"containers": [{
        "name": "main", "image": "work",
        "envFrom": [
            {"configMapRef": {"name": "first"}},
            {"prefix": "P_", "secretRef": {"name": "second"}},
            {"configMapRef": {"name": "absent", "optional": true}},
        ],
        "env": [
            {"name": "B", "value": "pod"},
            {"name": "KEY", "valueFrom": {"configMapKeyRef": {"name": "first", "key": "A"}}},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        ],
    }]});
    node.create(pod("p", spec)).await;
    let waits = |pod: &Pod| {
        let status = pod
            .status
            .as_ref()
            .and_then(|status| status.container_statuses.as_ref());
        let state = status.and_then(|all| all.first()?.state.clone()?.waiting);
        state.is_some_and(|waiting| {
            waiting.reason.as_deref() == Some("CreateContainerConfigError")
                && waiting.message.as_deref() == Some("configmap \"first\" not found")
        })
    };
    node.when("p", waits).await;
    let objects = node.api.objects();
    let map =
        json!({"metadata": {"name": "first", "namespace": "default"}, "data": {"A": "map", "B": "map"}});
    objects.create("configmaps", map).unwrap();
    let secret =
        json!({"metadata": {"name": "second", "namespace": "default"}, "stringData": {"A": "secret"}});
    objects.create("secrets", secret).unwrap();
    node.in_phase("p", "Running").await;
    let env = node.env("p", "main");
    let found = ["A", "B", "P_A", "KEY", "NAME"].map(|name| env.get(name).map(String::as_str));
    assert_eq!(found, ["map", "pod", "secret", "map", "p"].map(Some));
}

/// kubelet runs static pods by files of the node; a pod that only says that it is the copy of one is deleted.
#[tokio::test]
async fn a_mirror_pod_without_a_static_pod_is_deleted() {
    let node = Node::start().await;
    let mut mirror = slot_pod("p", 1);
    mirror["metadata"]["annotations"] = json!({"kubernetes.io/config.mirror": "x"});
    node.create(mirror).await;
    node.when_gone("p").await;
    assert!(node.kubelet.admissions().is_empty());
}
