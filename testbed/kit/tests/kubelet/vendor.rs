//! The stand-in for a vendor's plugin, under a kubelet.

use kit::vendor_plugin::{NVIDIA_GPU, VendorPlugin};
use serde_json::json;

use crate::node::{Node, refusal};

fn whole(name: &str, gpus: u32) -> serde_json::Value {
    let limits = json!({NVIDIA_GPU: gpus.to_string()});
    json!({"metadata": {"name": name}, "spec": {"nodeName": "n1", "containers": [{"name": "main", "image": "x", "resources": {"limits": limits}}]}})
}

#[tokio::test]
async fn kubelet_allocates_whole_gpus_and_the_container_gets_their_uuids() {
    let node = Node::start().await;
    let uuids = vec!["GPU-a".to_owned(), "GPU-b".to_owned(), "GPU-c".to_owned()];
    let _vendor = VendorPlugin::start(&node.kubelet.config().plugin_dir(), NVIDIA_GPU, uuids)
        .await
        .unwrap();
    node.node_lists(NVIDIA_GPU, "3", "3").await;
    node.run(whole("two", 2)).await;
    node.run(whole("one", 1)).await;
    let sees = |pod: &str| {
        node.kubelet.container("default", pod, "main").unwrap().env["NVIDIA_VISIBLE_DEVICES"].clone()
    };
    let mut all: Vec<String> = [sees("two"), sees("one")]
        .join(",")
        .split(',')
        .map(str::to_owned)
        .collect();
    all.sort();
    assert_eq!(all, ["GPU-a", "GPU-b", "GPU-c"]);
    node.create(whole("none-left", 1)).await;
    assert_eq!(
        refusal(&node.in_phase("none-left", "Failed").await).0,
        "UnexpectedAdmissionError"
    );
}
