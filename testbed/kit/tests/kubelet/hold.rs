//! Pods that are kept waiting and released in an order, and the start hook.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use kit::kubelet::{OrderRule, StartHook};

use crate::node::{Node, slot_pod};
use crate::plugin::slots;

#[tokio::test]
async fn held_pods_are_admitted_as_one_batch_in_the_given_order() {
    let mut node = Node::start().await;
    let plugin = node.plugin(slots(20)).await;
    node.run(slot_pod("before", 1)).await;
    node.kubelet.hold();
    for name in ["a", "b", "c", "d"] {
        node.create(slot_pod(name, 1)).await;
    }
    node.until(|kubelet| kubelet.n_held() == 4).await;
    node.delete("b").await;
    node.when_gone("b").await;
    node.until(|kubelet| kubelet.n_held() == 3).await;
    node.kubelet.restart().await.unwrap();
    // The restarted kubelet lists `before` too.
    node.until(|kubelet| kubelet.n_held() == 4).await;
    drop(plugin);
    let _plugin = node.plugin(slots(20)).await;
    node.kubelet.release(OrderRule::Reversed, 0);
    node.until(|kubelet| kubelet.n_admissions() == 5).await;
    let admitted = node
        .kubelet
        .admissions()
        .into_iter()
        .map(|admission| admission.pod.replace("default/", ""));
    let order: Vec<_> = admitted.filter(|pod| pod != "before").collect();
    assert_eq!(order, ["d", "c", "a"]);
    assert_eq!((node.kubelet.n_held(), node.kubelet.n_allocate_calls()), (0, 4));
    node.run(slot_pod("after", 1)).await;
}

#[tokio::test]
async fn the_start_hook_gets_the_earlier_refusals() {
    let starts = Arc::<Mutex<Vec<_>>>::default();
    let noted = Arc::clone(&starts);
    let hook = StartHook::new(move |start| {
        noted.lock().unwrap().push((
            start.container.pod.clone(),
            start.refusals.len(),
            start.container.starts,
        ));
    });
    let node = Node::start_with(|config| config.started = hook).await;
    let n_refusals = AtomicUsize::new(2);
    let refuse = move |_| {
        let refused = n_refusals.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |n| n.checked_sub(1));
        refused.map_or(Ok(()), |_| Err(tonic::Status::unavailable("not yet")))
    };
    let _plugin = node
        .plugin(slots(3).with_pre_start().answers_pre_start(refuse))
        .await;
    node.run(slot_pod("a", 1)).await;
    node.run(slot_pod("b", 1)).await;
    assert_eq!(
        *starts.lock().unwrap(),
        [("a".to_owned(), 2, 1), ("b".to_owned(), 0, 1)]
    );
}
