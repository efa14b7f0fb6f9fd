//! The sample pods: gpushare understands them, and they fit the simulated GPUs with any memory unit of the node.

use std::fs;

use proto::memory_unit::MemoryUnit;
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::request::{GpuRequest, Memory, PodRequest};
use proto::resource::ResourceNames;
use rstest::rstest;
use serde::Deserialize;
use serde_json::Value;

use super::render::{documents, render};
use super::{deploy, read, texts};

fn request(pod: &Value) -> GpuRequest {
    let typed = Pod::deserialize(pod).unwrap();
    let request = PodRequest::read_new(&typed, &ResourceNames::default()).unwrap();
    request
        .and_then(|request| request.gpus)
        .unwrap_or_else(|| panic!("{} asks for no GPU", typed.display_name()))
}

#[test]
fn samples_request_the_documented_amounts() {
    let lines: Vec<String> = render("samples")
        .iter()
        .map(|pod| format!("{}: {}", pod["metadata"]["name"].as_str().unwrap(), request(pod)))
        .collect();
    insta::assert_snapshot!(lines.join("\n"), @r"
    gpushare-memory: 4 memory units on 1 device
    koordinator-memory: 4 GiB of memory on 1 device
    koordinator-ratio-core: 50 % of memory and 33 % of core on 1 device
    koordinator-two-gpus: 2 GiB of memory and 100 % of core on 2 devices
    gpushare-many-containers: 4 memory units on 1 device
    gpushare-beside-a: 1 memory units on 1 device
    gpushare-beside-b: 1 memory units on 1 device
    koordinator-percent: 25 % of memory and 25 % of core on 1 device
    ");
}

/// Those need something that a node with our plugin alone has not; only the webhooks' is refused without it.
#[test]
fn special_samples_request_the_documented_devices() {
    let mut lines = Vec::new();
    for entry in fs::read_dir(deploy().join("samples/special")).unwrap() {
        for pod in documents(&fs::read_to_string(entry.unwrap().path()).unwrap()) {
            let pod = Pod::deserialize(&pod).unwrap();
            let request = PodRequest::read(&pod, &ResourceNames::default())
                .unwrap()
                .unwrap();
            let refusal = PodRequest::read_new(&pod, &ResourceNames::default())
                .err()
                .map(|error| format!(" ({error})"));
            lines.push(format!(
                "{}: {request}{}",
                pod.metadata.name.unwrap_or_default(),
                refusal.unwrap_or_default()
            ));
        }
    }
    lines.sort();
    insta::assert_snapshot!(lines.join("\n"), @r#"
    all-devices: all GPUs of the node and no amounts of them
    hami-core: 50 % of memory and 50 % of core on 1 device
    other-device: example.com/npu-core 6
    rdma-and-fpga: 50 % of memory on 1 device, koordinator.sh/fpga 100, koordinator.sh/rdma 50
    whole-gpu: 2 whole GPUs
    with-webhooks: 200 % of memory and 200 % of core on 2 devices (container "main" asks for koordinator.sh/gpu-memory-ratio (200) but not for koordinator.sh/gpu.shared, without which kubelet gives it no device: add koordinator.sh/gpu.shared: 1, or the number of GPUs)
    "#);
}

/// Nodes of the demo count in MiB, nodes of a cluster in GiB.
#[rstest]
#[case::gib(MemoryUnit::GIB)]
#[case::mib(MemoryUnit::MIB)]
fn samples_fit_the_simulated_gpus(#[case] unit: MemoryUnit) {
    let inventory: Value = serde_json::from_str(&read("components/simulated/inventory.json")).unwrap();
    let gpus = inventory["gpus"].as_array().unwrap();
    let memory: Vec<u64> = gpus
        .iter()
        .map(|gpu| {
            gpu["memory"]
                .as_str()
                .unwrap()
                .parse::<Quantity>()
                .unwrap()
                .unsigned()
                .unwrap()
        })
        .collect();
    let smallest = *memory.iter().min().unwrap();
    let mut total = 0;
    for pod in render("samples") {
        let request = request(&pod);
        assert!(gpus.len() >= request.devices as usize);
        let bytes = match request.memory {
            Memory::Bytes(bytes) => bytes,
            Memory::Units(units) => unit.bytes_of(units).unwrap(),
            Memory::Ratio(percent) => smallest * percent / 100,
        };
        assert!(
            bytes / u64::from(request.devices) <= smallest,
            "{}",
            pod["metadata"]["name"]
        );
        total += bytes;
    }
    assert!(total <= memory.iter().sum(), "all of them on one node");
}

#[test]
fn samples_are_small_and_print_their_environment() {
    for pod in render("samples") {
        let spec = &pod["spec"];
        assert!(spec["schedulerName"].is_null() && spec["nodeName"].is_null());
        for list in ["initContainers", "containers"] {
            for container in spec[list].as_array().into_iter().flatten() {
                assert_eq!(container["image"], "busybox:1.36");
                assert!(
                    texts(&container["command"])
                        .last()
                        .unwrap()
                        .starts_with("env | sort"),
                    "{container}"
                );
                assert!(
                    container["resources"]["requests"].is_null(),
                    "the API server fills requests in from limits"
                );
            }
        }
    }
}

/// `kubectl apply -f deploy/samples` reads what ends with `.yaml`; kustomize reads its own list.
#[test]
fn every_sample_file_is_tested() {
    let mut from_files = Vec::new();
    for entry in fs::read_dir(deploy().join("samples")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "yaml") {
            from_files.extend(documents(&fs::read_to_string(path).unwrap()));
        }
    }
    let sorted = |mut pods: Vec<Value>| {
        pods.sort_by_key(|pod| pod["metadata"]["name"].to_string());
        pods
    };
    assert_eq!(sorted(from_files), sorted(render("samples")));
}

#[test]
fn samples_name_the_second_scheduler_in_its_overlay() {
    let configuration = documents(&read("components/second-scheduler/kube-scheduler-config.yaml")).remove(0);
    let profile = &configuration["profiles"][0]["schedulerName"];
    assert!(profile.is_string());
    for pod in render("attach/second-scheduler/samples") {
        assert_eq!(pod["spec"]["schedulerName"], *profile);
    }
}
