//! Requests and answers of the verbs, as JSON.

use http::StatusCode;
use insta::{assert_json_snapshot, assert_snapshot};
use proto::read_api::FitRequest;
use rstest::rstest;
use scheduler::config::Serving;
use scheduler::read_api::{explain, fit};
use serde_json::{Value, json};

use crate::objects::{device, node, old_node, on, pod, shared, units};
use crate::world::World;

/// The proposal's filter figure: two GPUs of 16,276 MiB on each of three nodes.
pub(crate) async fn filter_figure() -> World {
    let world = ["n1", "n2", "n3"].into_iter().fold(World::new(), |world, name| {
        world.with_node(name, &[16_276, 16_276])
    });
    for (name, node, mib) in [
        ("a", "n1", 16_276),
        ("b", "n1", 12_207),
        ("c", "n2", 12_207),
        ("d", "n2", 12_207),
        ("e", "n3", 16_276),
        ("f", "n3", 8138),
    ] {
        world.place(&units(name, mib), node).await;
    }
    world
}

#[tokio::test]
async fn filter_gives_a_reason_for_every_node_if_none_fits() {
    let world = filter_figure().await;
    world.apply_node(&json!({"metadata": {"name": "cpu-only"}}));
    let answer = world
        .filter(&units("new", 9000), &["n1", "n2", "n3", "cpu-only", "unknown"])
        .await;
    assert_json_snapshot!(answer, @r#"
    {
      "Error": "",
      "FailedAndUnresolvableNodes": {
        "cpu-only": "node is not known to gpushare or offers no shareable GPU",
        "n1": "not enough free GPU memory on any one GPU of the node (asked: 8.8 GiB (9000 units of 1 MiB) of one GPU)",
        "n2": "not enough free GPU memory on any one GPU of the node (asked: 8.8 GiB (9000 units of 1 MiB) of one GPU)",
        "n3": "not enough free GPU memory on any one GPU of the node (asked: 8.8 GiB (9000 units of 1 MiB) of one GPU)"
      },
      "FailedNodes": {
        "unknown": "node is not known to gpushare or offers no shareable GPU"
      },
      "NodeNames": [],
      "Nodes": null
    }
    "#);
}

#[tokio::test]
async fn filter_keeps_the_form_and_order_of_the_request() {
    let world = World::with_answer_nodes("all")
        .with_node("a", &[100])
        .with_node("b", &[100])
        .with_node("c", &[10]);
    let pod = units("new", 50);
    let (_, text) = world
        .send(
            "POST",
            "/gpushare-scheduler/filter",
            json!({"Pod": pod, "NodeNames": ["c", "b", "a"]}).to_string(),
        )
        .await;
    assert_snapshot!(text, @r#"{"Nodes":null,"NodeNames":["b","a"],"FailedNodes":{},"FailedAndUnresolvableNodes":{},"Error":""}"#);
}

#[tokio::test]
async fn filter_returns_whole_nodes_unchanged() {
    let world = World::new().with_node("a", &[100]).with_node("b", &[10]);
    let mut whole = node("a", "MiB");
    whole["spec"] = json!({"taints": [{"key": "x", "effect": "NoSchedule"}], "podCIDR": "10.0.0.0/24"});
    whole["status"]["images"] = json!([{"names": ["image"], "sizeBytes": 5}]);
    let answer = world
        .filter_whole(&units("new", 50), &[whole.clone(), node("b", "MiB")])
        .await;
    assert_eq!(answer["Nodes"]["items"], json!([whole]));
    assert_eq!(answer["NodeNames"], Value::Null);
}

/// A node that an autoscaler asks about does not exist yet, and is evaluated by its template.
#[rstest]
#[case::room(old_node("template", 2, 32), 16, Ok(()))]
#[case::too_large(old_node("template", 2, 32), 17, Err(("FailedAndUnresolvableNodes", "request is larger than the node's GPUs even when they are empty (asked: 17 memory units of one GPU)")))]
#[case::no_gpu(json!({"metadata": {"name": "template"}}), 1, Err(("FailedNodes", "node is not known to gpushare or offers no shareable GPU")))]
#[tokio::test]
async fn an_unknown_node_is_evaluated_by_its_template(
    #[case] template: Value,
    #[case] ask: u64,
    #[case] expected: Result<(), (&str, &str)>,
) {
    let world = World::new();
    let answer = world.filter_whole(&units("new", ask), &[template]).await;
    match expected {
        Ok(()) => assert_eq!(answer["Nodes"]["items"][0]["metadata"]["name"], "template"),
        Err((list, reason)) => assert_eq!(answer[list]["template"], reason, "{answer}"),
    }
}

#[tokio::test]
async fn a_template_with_the_resources_of_our_plugin_is_evaluated() {
    let world = World::new();
    let template = json!({
        "metadata": {"name": "template"},
        "status": {"capacity": {"aliyun.com/gpu-count": "2", "koordinator.sh/gpu-memory": "32Gi", "koordinator.sh/gpu.shared": "200"}},
    });
    let answer = world
        .filter_whole(&shared("fits", 2, 32 * 1024), std::slice::from_ref(&template))
        .await;
    assert_eq!(answer["Nodes"]["items"].as_array().unwrap().len(), 1);
    let answer = world
        .filter_whole(&shared("does not", 1, 17 * 1024), &[template])
        .await;
    assert_eq!(answer["Nodes"]["items"], json!([]));
}

/// No plugin has found the enforcement level of a node that does not exist: the template's label says it.
#[rstest]
#[case::driver(json!({"gpushare/enforcement": "driver"}), true)]
#[case::library(json!({"gpushare/enforcement": "hami-core"}), false)]
#[case::no_label(json!({}), false)]
#[tokio::test]
async fn a_template_has_the_enforcement_level_of_its_label(#[case] labels: Value, #[case] fits: bool) {
    let template = json!({
        "metadata": {"name": "template", "labels": labels},
        "status": {"capacity": {"aliyun.com/gpu-count": "2", "koordinator.sh/gpu-memory": "32Gi"}},
    });
    let mut demanding = shared("p", 1, 1024);
    demanding["metadata"]["annotations"] = json!({"gpushare/enforcement": "driver"});
    let answer = World::new().filter_whole(&demanding, &[template]).await;
    assert_eq!(
        answer["Nodes"]["items"].as_array().unwrap().len() == 1,
        fits,
        "{answer}"
    );
}

#[tokio::test]
async fn a_cpu_only_pod_fits_everywhere() {
    for name in ["a", "b"] {
        let answer = World::new()
            .filter(&pod("p", &json!({"cpu": "1"})), &[name])
            .await;
        assert_eq!(answer["NodeNames"], json!([name]));
    }
}

/// CPU-only pods go to nodes without GPUs, or to nodes with CPU to spare beside their GPUs.
#[tokio::test]
async fn a_cpu_only_pod_avoids_the_cpu_that_gpus_need() {
    let world = World::new();
    let with_cpus = |name: &str, cpus: u32| {
        let mut node = node(name, "MiB");
        node["status"]["allocatable"] = json!({"cpu": cpus, "memory": "64Gi"});
        node
    };
    world.apply_node(&with_cpus("plain", 8));
    for (name, cpus) in [("scarce", 8), ("plenty", 64)] {
        world.apply_node(&with_cpus(name, cpus));
        world.apply_device(&device(name, &[100, 100]));
    }
    // The workload: pods with a whole GPU and four CPUs.
    let typical = |at: u32| {
        pod(
            &format!("typical-{at}"),
            &json!({"aliyun.com/gpu-mem": "100", "cpu": "4"}),
        )
    };
    for at in 0..20 {
        world.apply_pod(&on(typical(at), "elsewhere"));
    }
    let plain = |name| pod(name, &json!({"cpu": "6"}));
    assert_eq!(
        world.fitting(&plain("p"), &["scarce", "plenty"]).await,
        ["plenty"]
    );
    assert_eq!(
        world.fitting(&plain("q"), &["scarce", "plain", "plenty"]).await,
        ["plain"]
    );
}

/// A request that breaks a rule is refused on every node, with the text of the rule.
#[rstest]
#[case::amounts_alone(json!({"koordinator.sh/gpu-memory": "1Gi"}), "container \"main\" asks for koordinator.sh/gpu-memory (1Gi) but not for koordinator.sh/gpu.shared, without which kubelet gives it no device: add koordinator.sh/gpu.shared: 1, or the number of GPUs")]
#[case::two_dialects(json!({"aliyun.com/gpu-mem": "1", "koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory": "1Gi"}), "the pod asks for both aliyun.com/gpu-mem (1) and koordinator.sh/gpu.shared (1); use the resources of one dialect only")]
#[case::negative(json!({"aliyun.com/gpu-mem": "-1"}), "container \"main\": aliyun.com/gpu-mem is \"-1\", which is not a whole number up to 1125899906842624")]
#[case::absurd(json!({"aliyun.com/gpu-mem": "9223372036854775807"}), "container \"main\": aliyun.com/gpu-mem is \"9223372036854775807\", which is not a whole number up to 1125899906842624")]
#[case::no_number(json!({"aliyun.com/gpu-mem": {"a": 1}}), "container \"main\": aliyun.com/gpu-mem is \"{\\\"a\\\":1}\", which is not a whole number up to 1125899906842624")]
#[case::other_unit(json!({"aliyun.com/gpu-mem": "8192M"}), "the pod: aliyun.com/gpu-mem is 8000000 GiB (8192000000 units of 1 MiB), and the largest GPU of the cluster has 100 MiB (100 units of 1 MiB); the amount is a number of units: did you mean 8192?")]
#[case::old_gpu(json!({"kubernetes.io/gpu": "50"}), "container \"main\" asks for kubernetes.io/gpu, an old name of koordinator.sh/gpu; write koordinator.sh/gpu alone")]
#[case::old_core(json!({"kubernetes.io/gpu-core": "50"}), "container \"main\" asks for kubernetes.io/gpu-core, an old name of koordinator.sh/gpu-core; write koordinator.sh/gpu-core alone")]
#[case::old_memory(json!({"kubernetes.io/gpu-memory": "4Gi"}), "container \"main\" asks for kubernetes.io/gpu-memory, an old name of koordinator.sh/gpu-memory; write koordinator.sh/gpu-memory alone")]
#[case::old_ratio(json!({"kubernetes.io/gpu-memory-ratio": "60"}), "container \"main\" asks for kubernetes.io/gpu-memory-ratio, an old name of koordinator.sh/gpu-memory-ratio; write koordinator.sh/gpu-memory-ratio alone")]
#[case::old_rdma(json!({"kubernetes.io/rdma": "100"}), "container \"main\" asks for kubernetes.io/rdma, an old name of koordinator.sh/rdma; write koordinator.sh/rdma alone")]
#[case::old_fpga(json!({"kubernetes.io/fpga": "100"}), "container \"main\" asks for kubernetes.io/fpga, an old name of koordinator.sh/fpga; write koordinator.sh/fpga alone")]
#[tokio::test]
async fn an_invalid_request_is_refused_on_every_node(#[case] limits: Value, #[case] reason: &str) {
    let world = World::new().with_node("n1", &[100]);
    let pod = pod("p", &limits);
    let answer = world.filter(&pod, &["n1"]).await;
    assert_eq!(answer["FailedAndUnresolvableNodes"]["n1"], reason, "{answer}");
    world.apply_pod(&pod);
    let error = world.bind(&pod, "n1").await;
    assert!(error.starts_with(reason), "{error}");
    let shown = explain(&world.index, "default", "p", true).unwrap();
    assert!(
        shown
            .invalid
            .as_ref()
            .is_some_and(|sentence| error.ends_with(sentence)),
        "{shown:?}"
    );
    let pod = serde_json::from_value(pod).unwrap();
    let request = FitRequest {
        pod,
        replicas: 2,
        ..FitRequest::default()
    };
    let fitting = fit(&world.index, &request).unwrap();
    assert_eq!((fitting.fitting, fitting.invalid), (0, shown.invalid));
}

/// Charts write zeros for unused resources.
#[rstest]
#[case::units(json!({"aliyun.com/gpu-mem": "0"}))]
#[case::vendor(json!({"nvidia.com/gpu": "0"}))]
#[case::shares(json!({"koordinator.sh/gpu.shared": "0", "koordinator.sh/gpu-memory": "0", "koordinator.sh/rdma": "0"}))]
#[tokio::test]
async fn a_request_for_zero_fits_every_node(#[case] zeros: Value) {
    let world = World::new().with_node("full", &[100]);
    world.apply_node(&node("plain", "MiB"));
    world.place(&units("a", 100), "full").await;
    let pod = pod("p", &zeros);
    for name in ["full", "plain"] {
        assert_eq!(world.fitting(&pod, &[name]).await, [name]);
    }
    world.api.put(&pod);
    world.apply_pod(&pod);
    assert_eq!(world.bind(&pod, "plain").await, "");
    assert_eq!(
        world.api.pod(&pod)["metadata"]["annotations"],
        Value::Null,
        "nothing is recorded"
    );
}

/// The proposal's bind figure: 12207, 8138, 4069 and 16276 MiB free; 8138 goes to the second.
#[tokio::test]
async fn bind_writes_the_record_of_both_dialects() {
    let world = World::new().with_node("n1", &[16_276; 4]);
    for (minor, mib) in [(0, 4069), (1, 8138), (2, 12_207)] {
        let filler = crate::objects::placed_by_old_extender(
            units(&format!("filler-{minor}"), mib),
            "n1",
            minor,
            mib,
            16_276,
        );
        world.apply_pod(&filler);
    }
    let pod = units("p", 8138);
    world.place(&pod, "n1").await;
    let mut binding = world.api.bindings()[0].clone();
    let annotations = &mut binding["metadata"]["annotations"];
    let time = annotations["ALIYUN_COM_GPU_MEM_ASSUME_TIME"].take();
    assert_eq!(
        time,
        annotations["scheduling.koordinator.sh/bind-timestamp"].take()
    );
    assert!(time.as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000_000_000_000);
    assert_json_snapshot!(binding, @r#"
    {
      "apiVersion": "v1",
      "kind": "Binding",
      "metadata": {
        "annotations": {
          "ALIYUN_COM_GPU_MEM_ASSIGNED": "false",
          "ALIYUN_COM_GPU_MEM_ASSUME_TIME": null,
          "ALIYUN_COM_GPU_MEM_DEV": "16276",
          "ALIYUN_COM_GPU_MEM_IDX": "1",
          "ALIYUN_COM_GPU_MEM_POD": "8138",
          "scheduling.koordinator.sh/bind-timestamp": null,
          "scheduling.koordinator.sh/device-allocated": "{\"gpu\":[{\"minor\":1,\"resources\":{\"koordinator.sh/gpu-memory\":\"8138Mi\",\"koordinator.sh/gpu-memory-ratio\":\"50\"},\"id\":\"GPU-n1-1\"}]}",
          "scheduling.koordinator.sh/gpu-minors": "1"
        },
        "name": "p",
        "namespace": "default",
        "uid": "uid-p"
      },
      "target": {
        "apiVersion": "v1",
        "kind": "Node",
        "name": "n1"
      }
    }
    "#);
}

#[tokio::test]
async fn bind_divides_memory_up_to_the_byte() {
    let world = World::new().with_node("n1", &[1000, 1000, 1000]);
    let pod = pod(
        "p",
        &json!({"koordinator.sh/gpu.shared": "3", "koordinator.sh/gpu-memory": "100", "koordinator.sh/gpu-core": "150"}),
    );
    world.place(&pod, "n1").await;
    let record =
        world.api.bindings()[0]["metadata"]["annotations"]["scheduling.koordinator.sh/device-allocated"]
            .clone();
    let record: Value = serde_json::from_str(record.as_str().unwrap()).unwrap();
    let amounts: Vec<&Value> = record["gpu"]
        .as_array()
        .unwrap()
        .iter()
        .map(|gpu| &gpu["resources"])
        .collect();
    let share = json!({"koordinator.sh/gpu-core": "50", "koordinator.sh/gpu-memory": "34", "koordinator.sh/gpu-memory-ratio": "1"});
    assert_eq!(amounts, [&share, &share, &share]);
    assert_eq!(
        world.api.bindings()[0]["metadata"]["annotations"].get("ALIYUN_COM_GPU_MEM_IDX"),
        None
    );
}

/// A ratio is exact: three thirds of a device fit, whatever its size.
#[tokio::test]
async fn three_thirds_of_a_gpu_fit_on_it() {
    let world = World::new().with_node("n1", &[16_277]);
    for (name, ratio) in [("a", "33"), ("b", "33"), ("c", "34")] {
        let limits = json!({"koordinator.sh/gpu.shared": "1", "koordinator.sh/gpu-memory-ratio": ratio});
        world.place(&pod(name, &limits), "n1").await;
    }
    assert_eq!(world.used("n1").await, [16_277]);
    assert_eq!(world.fitting(&units("d", 1), &["n1"]).await, Vec::<String>::new());
}

#[tokio::test]
async fn a_hint_keeps_room_until_the_pod_is_bound() {
    let world = World::new().with_node("n1", &[100]).with_node("n2", &[60]);
    let (first, second, third) = (units("first", 80), units("second", 50), units("third", 60));
    assert_eq!(world.fitting(&first, &["n1", "n2"]).await, ["n1"]);
    assert_eq!(
        world.fitting(&first, &["n1"]).await,
        ["n1"],
        "its own hint does not stand in its way"
    );
    assert_eq!(
        world.fitting(&second, &["n1"]).await,
        Vec::<String>::new(),
        "room is kept"
    );
    assert_eq!(world.used("n1").await, [0], "but not taken");
    let third = {
        world.api.put(&third);
        third
    };
    assert_eq!(world.bind(&third, "n1").await, "", "a bind ignores hints");
}

#[tokio::test(start_paused = true)]
async fn a_hint_ends_with_its_time_its_pod_or_a_new_hint() {
    let world = World::with_answer_nodes("all")
        .with_node("n1", &[100])
        .with_node("n2", &[10]);
    let (first, second) = (units("first", 80), units("second", 50));
    let is_free = async || world.fitting(&second, &["n1"]).await == ["n1"];
    world.fitting(&first, &["n1"]).await;
    assert!(!is_free().await);
    tokio::time::sleep(crate::world::HINT).await;
    assert!(is_free().await, "by time");
    world.delete_pod(&second);
    world.fitting(&first, &["n1"]).await;
    assert!(is_free().await, "and for as long again");
    world.delete_pod(&second);
    tokio::time::sleep(crate::world::HINT).await;

    world.apply_pod(&first);
    world.fitting(&first, &["n1"]).await;
    assert!(!is_free().await);
    world.delete_pod(&first);
    assert!(is_free().await, "by deletion");
    world.delete_pod(&second);

    world.fitting(&first, &["n1"]).await;
    assert!(!is_free().await);
    world.apply_device(&device("n2", &[1000]));
    assert_eq!(world.fitting(&first, &["n1", "n2"]).await.len(), 2);
    assert!(is_free().await, "by a new answer");
}

#[rstest]
#[case::not_json("filter", "nonsense", "filter request: expected ident at line 1 column 2")]
#[case::cut_off("filter", r#"{"Pod": {"#, "filter request: EOF while parsing")]
#[case::no_pod("filter", "{}", "filter request: missing field `Pod`")]
#[case::no_nodes(
    "filter",
    r#"{"Pod": {}}"#,
    "filter request: neither NodeNames nor Nodes is given"
)]
#[case::name_is_no_text(
    "filter",
    r#"{"Pod": {}, "NodeNames": [1]}"#,
    "filter request: invalid type: integer `1`, expected a string"
)]
#[case::no_uid(
    "bind",
    r#"{"PodName": "a", "PodNamespace": "b", "Node": "c"}"#,
    "bind request: missing field `PodUID`"
)]
#[case::empty_node(
    "bind",
    r#"{"PodName": "a", "PodNamespace": "b", "PodUID": "c", "Node": ""}"#,
    "bind request: Node is empty"
)]
#[case::no_nodes_to_score(
    "prioritize",
    r#"{"Pod": {}}"#,
    "prioritize request: neither NodeNames nor Nodes is given"
)]
#[tokio::test]
async fn malformed_bodies_are_refused(
    #[case] verb: &str,
    #[case] body: &'static str,
    #[case] expected: &str,
) {
    let world = World::new();
    let (status, text) = world
        .send("POST", &format!("/gpushare-scheduler/{verb}"), body)
        .await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(text.starts_with(expected), "{text}");
}

#[tokio::test]
async fn oversized_bodies_are_refused() {
    let serving = Serving {
        max_body: 1024,
        ..Serving::default()
    };
    let world = World::unsynced(&serving);
    let (status, text) = world
        .send("POST", "/gpushare-scheduler/filter", "x".repeat(1025))
        .await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(
        text,
        "the request's body is larger than 1024 bytes; send node names only (nodeCacheCapable)\n"
    );
}
