//! A container's devices, and the calls to the plugin for them.

use std::collections::BTreeSet;

use proto::kubelet::deviceplugin::ContainerAllocateResponse;
use serde_json::json;
use tonic::Status;

use crate::node::{Node, container, pod, refusal, slot_pod};
use crate::plugin::{Call, SLOTS, envs, slots};

#[tokio::test]
async fn an_init_and_an_app_container_share_one_device_as_on_a_real_kubelet() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(200).with_preference().with_pre_start()).await;
    node.run(pod("p", json!({"initContainers": [container("init", &[(SLOTS, "1")])], "containers": [container("app", &[(SLOTS, "1")])]})))
        .await;
    let one = vec!["d0".to_owned()];
    let preferred = Call::Preferred {
        n_available: 200,
        must_include: vec![],
        size: 1,
    };
    let expected = [
        preferred,
        Call::Allocate(one.clone()),
        Call::Allocate(one.clone()),
        Call::PreStart(one.clone()),
        Call::PreStart(one),
    ];
    assert_eq!(plugin.calls(), expected);
}

#[tokio::test]
async fn devices_of_init_containers_are_reused_and_the_rest_allocated() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(20).with_preference()).await;
    let init = json!([container("i", &[(SLOTS, "4")])]);
    let less = node
        .run(pod(
            "less",
            json!({"initContainers": init, "containers": [container("a", &[(SLOTS, "2")])]}),
        ))
        .await;
    let (initial, app) = (node.slots(&less, "i"), node.slots(&less, "a"));
    assert_eq!(initial, ["d0", "d1", "d2", "d3"]);
    assert!(
        app.len() == 2 && app.iter().all(|id| initial.contains(id)),
        "{app:?}"
    );
    assert_eq!(
        plugin.calls().len(),
        3,
        "one preference, two allocations: {:?}",
        plugin.calls()
    );

    let more = node
        .run(pod(
            "more",
            json!({"initContainers": init, "containers": [container("a", &[(SLOTS, "6")])]}),
        ))
        .await;
    let initial = node.slots(&more, "i");
    let asked = plugin
        .calls()
        .into_iter()
        .rev()
        .find(|call| matches!(call, Call::Preferred { .. }))
        .unwrap();
    // Available counts what may still be taken and what already was: 20 less the four of the first pod.
    assert_eq!(
        asked,
        Call::Preferred {
            n_available: 16,
            must_include: initial.clone(),
            size: 6
        }
    );
    let app: BTreeSet<_> = node.slots(&more, "a").into_iter().collect();
    assert!(
        app.len() == 6 && initial.iter().all(|id| app.contains(id)),
        "{app:?} has {initial:?}"
    );
}

#[tokio::test]
async fn a_sidecar_keeps_its_devices_and_app_containers_share_none() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(10)).await;
    let sidecar = json!({"name": "s", "image": "work", "restartPolicy": "Always", "resources": {"limits": {SLOTS: "2"}, "requests": {SLOTS: "2"}}});
    let spec = json!({"initContainers": [container("i", &[(SLOTS, "3")]), sidecar], "containers": [
        container("a", &[(SLOTS, "2")]), container("b", &[(SLOTS, "2")])]});
    let created = node.run(pod("p", spec)).await;
    let [i, s, a, b] =
        ["i", "s", "a", "b"].map(|name| node.slots(&created, name).into_iter().collect::<BTreeSet<_>>());
    assert!(
        s.is_subset(&i),
        "the sidecar reuses the init container's {i:?}: {s:?}"
    );
    assert!(
        s.is_disjoint(&a) && s.is_disjoint(&b) && a.is_disjoint(&b),
        "{s:?} {a:?} {b:?}"
    );
    assert!(!a.is_disjoint(&i), "what the sidecar left is reused first: {a:?}");
}

#[tokio::test]
async fn preferred_devices_are_cut_to_the_available_ones_and_completed() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(8).prefers(&["d5", "nonsense", "d2"])).await;
    let first = node.run(slot_pod("first", 2)).await;
    assert_eq!(node.slots(&first, "main"), ["d2", "d5"]);
    let second = node.run(slot_pod("second", 3)).await;
    let got = node.slots(&second, "main");
    assert!(
        got.len() == 3 && !got.contains(&"d2".to_owned()) && !got.contains(&"d5".to_owned()),
        "{got:?}"
    );
    assert_eq!(plugin.allocated().len(), 2);
}

#[tokio::test]
async fn without_the_option_kubelet_asks_for_no_preferred_allocation() {
    let node = Node::start().await;
    let plugin = node.plugin(slots(8)).await;
    node.run(slot_pod("p", 3)).await;
    assert!(
        plugin
            .calls()
            .iter()
            .all(|call| !matches!(call, Call::Preferred { .. })),
        "{:?}",
        plugin.calls()
    );
}

#[tokio::test]
async fn a_failing_preferred_allocation_fails_the_pod() {
    let node = Node::start().await;
    let mut script = slots(8).with_preference();
    script.preferred = std::sync::Arc::new(|_| Err(Status::internal("no idea")));
    let plugin = node.plugin(script).await;
    node.create(slot_pod("p", 1)).await;
    let failed = node.in_phase("p", "Failed").await;
    let message = "Pod was rejected: Allocate failed due to rpc error: code = Internal desc = no idea, which is unexpected";
    assert_eq!(
        refusal(&failed),
        ("UnexpectedAdmissionError".to_owned(), message.to_owned())
    );
    assert!(plugin.allocated().is_empty());
}

#[tokio::test]
async fn a_failing_allocate_fails_the_pod_for_good_and_frees_its_devices() {
    let node = Node::start().await;
    let plugin = node
        .plugin(slots(2).answers(|ids| {
            if ids.len() == 2 {
                Err(Status::unknown("not mine"))
            } else {
                Ok(ContainerAllocateResponse::default())
            }
        }))
        .await;
    node.create(slot_pod("bad", 2)).await;
    let failed = node.in_phase("bad", "Failed").await;
    let message = "Allocate failed due to rpc error: code = Unknown desc = not mine, which is unexpected";
    assert_eq!(
        refusal(&failed),
        (
            "UnexpectedAdmissionError".to_owned(),
            format!("Pod was rejected: {message}")
        )
    );
    node.run(slot_pod("good", 1)).await;
    node.run(slot_pod("also", 1)).await;
    assert_eq!(plugin.allocated().len(), 3, "the failed pod is not tried again");
    let events = node.events().await;
    let is_reported = events.iter().any(|event| {
        event.reason.as_deref() == Some("UnexpectedAdmissionError")
            && event.message.as_deref() == Some(message)
            && event.involved_object.name.as_deref() == Some("bad")
    });
    assert!(is_reported, "{events:#?}");
}

#[tokio::test]
async fn too_few_devices_fail_the_pod() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(4)).await;
    node.run(slot_pod("first", 3)).await;
    node.create(slot_pod("second", 2)).await;
    let message = "Pod was rejected: Allocate failed due to requested number of devices unavailable for example.com/slot. \
                   Requested: 2, Available: 1, which is unexpected";
    assert_eq!(refusal(&node.in_phase("second", "Failed").await).1, message);
}

#[tokio::test]
async fn devices_are_free_again_when_their_pod_is_deleted_or_finished() {
    let node = Node::start().await;
    let _plugin = node.plugin(slots(2)).await;
    node.run(slot_pod("deleted", 2)).await;
    node.delete("deleted").await;
    node.when_gone("deleted").await;
    let mut finishing = slot_pod("finishing", 2);
    finishing["spec"]["restartPolicy"] = "Never".into();
    finishing["metadata"]["annotations"] = json!({kit::kubelet::EXIT_AFTER: "0s"});
    node.create(finishing).await;
    node.in_phase("finishing", "Succeeded").await;
    node.run(slot_pod("last", 2)).await;
}

#[tokio::test]
async fn of_two_resources_the_first_sets_a_conflicting_variable() {
    let mut winners = BTreeSet::new();
    let mut orders = BTreeSet::new();
    let node = Node::start().await;
    let answer = |value: &'static str| {
        move |_| {
            Ok(ContainerAllocateResponse {
                envs: envs(&[("WHO", value)]),
                ..Default::default()
            })
        }
    };
    let _plugin = node.plugin(slots(100).answers(answer("slot"))).await;
    let mut units = slots(100).answers(answer("unit"));
    units.resource = "example.com/unit";
    let _units = node.plugin(units).await;
    for i in 0..12 {
        let name = format!("p{i}");
        let both = container("main", &[(SLOTS, "1"), ("example.com/unit", "1")]);
        node.run(pod(&name, json!({"containers": [both]}))).await;
        winners.insert(node.env(&name, "main")["WHO"].clone());
        orders.insert(winners.len());
    }
    assert_eq!(
        winners.into_iter().collect::<Vec<_>>(),
        ["slot", "unit"],
        "each resource wins at times"
    );
}

#[tokio::test]
async fn a_seed_determines_the_choice_of_devices() {
    let mut choices = Vec::new();
    for seed in [7, 7, 8] {
        let node = Node::start_with(|config| config.seed = seed).await;
        let _plugin = node.plugin(slots(1000)).await;
        let created = node.run(slot_pod("p", 5)).await;
        choices.push(node.slots(&created, "main"));
    }
    assert_eq!(choices[0], choices[1]);
    assert_ne!(choices[0], choices[2]);
}
