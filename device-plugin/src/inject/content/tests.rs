//! Answers and specs, in each mode.

use std::fs;

use insta::assert_json_snapshot;
use serde_json::Value;

use super::*;
use crate::inject::cdi::vendor::VendorSpecs;
use crate::inject::enforcement::{Level, same_level};
use crate::node::pods::{NodePod, RecordedAmounts};
use crate::tests::builders::{adapter, gpu, init, pod, rdma, recipient, settings, shares, units};

fn environment(settings: &NodeSettings, pod: &NodePod, resource: ExtendedResource, minors: &[u32]) -> Value {
    let gpus: Vec<_> = minors.iter().map(|minor| gpu(*minor)).collect();
    let answer = variable_answer(
        settings,
        Some(&recipient(pod)),
        resource,
        &AssignedDevices::Gpus(gpus.iter().collect()),
    );
    serde_json::to_value(answer.envs).unwrap()
}

/// Old records may lack the amounts; then they follow from the pod and the GPU.
#[test]
fn missing_amounts_of_a_record_follow_from_the_pod_and_the_gpu() {
    let pod = pod("a", 1, [init(units(9)), units(2), units(3)]);
    assert_json_snapshot!(environment(&settings(), &pod, ExtendedResource::Memory, &[1]), @r#"
    {
      "ALIYUN_COM_GPU_MEM_CONTAINER": "9",
      "ALIYUN_COM_GPU_MEM_DEV": "16",
      "ALIYUN_COM_GPU_MEM_IDX": "1",
      "ALIYUN_COM_GPU_MEM_POD": "9",
      "GPUSHARE_GPU_DEVICES": "GPU-00000001-aaaa-bbbb-cccc-000000000001",
      "NVIDIA_VISIBLE_DEVICES": "GPU-00000001-aaaa-bbbb-cccc-000000000001"
    }
    "#);
}

#[test]
fn the_variables_of_shares_of_two_gpus() {
    assert_json_snapshot!(environment(&settings(), &pod("a", 1, [shares(2)]), ExtendedResource::Shared, &[3, 1]), @r#"
    {
      "GPUSHARE_GPU_DEVICES": "GPU-00000003-aaaa-bbbb-cccc-000000000003,GPU-00000001-aaaa-bbbb-cccc-000000000001",
      "NVIDIA_VISIBLE_DEVICES": "GPU-00000003-aaaa-bbbb-cccc-000000000003,GPU-00000001-aaaa-bbbb-cccc-000000000001"
    }
    "#);
}

#[test]
fn shares_beside_memory_units_add_no_variables() {
    let both = ContainerRequest {
        shared: 1,
        ..units(2)
    };
    assert_json_snapshot!(environment(&settings(), &pod("a", 1, [both]), ExtendedResource::Shared, &[0]), @"{}");
}

/// Each limit is that of the device at its place; a device that is all the pod's has none.
#[test]
fn each_limit_is_that_of_the_device_at_its_index() {
    let mut limited = NodePod {
        is_limited: true,
        ..pod("a", 1, [shares(3)]).on([2, 0, 1])
    };
    let placement = limited.placement.as_mut().unwrap();
    let held = |bytes, ratio| RecordedAmounts {
        bytes,
        ratio,
        core: 30,
    };
    placement.held = vec![
        held(Some(4 << 30), None),
        held(None, Some(50)),
        held(Some(16 << 30), None),
    ];
    assert_json_snapshot!(environment(&settings(), &limited, ExtendedResource::Shared, &[2, 0, 1]), @r#"
    {
      "CUDA_DEVICE_MEMORY_LIMIT_0": "4096m",
      "CUDA_DEVICE_MEMORY_LIMIT_1": "8192m",
      "CUDA_DEVICE_SM_LIMIT": "30",
      "GPUSHARE_GPU_DEVICES": "GPU-00000002-aaaa-bbbb-cccc-000000000002,GPU-00000000-aaaa-bbbb-cccc-000000000000,GPU-00000001-aaaa-bbbb-cccc-000000000001",
      "NVIDIA_VISIBLE_DEVICES": "GPU-00000002-aaaa-bbbb-cccc-000000000002,GPU-00000000-aaaa-bbbb-cccc-000000000000,GPU-00000001-aaaa-bbbb-cccc-000000000001"
    }
    "#);
    limited.placement.as_mut().unwrap().held[0] = held(Some(1000), None);
    assert_eq!(
        environment(&settings(), &limited, ExtendedResource::Shared, &[2, 0, 1])["CUDA_DEVICE_MEMORY_LIMIT_0"],
        "1m",
        "zero would be no limit"
    );
    let unlimited = NodePod {
        is_limited: false,
        ..limited
    };
    assert_eq!(
        environment(&settings(), &unlimited, ExtendedResource::Shared, &[2])
            .as_object()
            .unwrap()
            .len(),
        2
    );
}

/// NVIDIA's runtime finds the nodes of GPUs itself, so an answer has those of other devices alone.
#[test]
fn only_existing_device_nodes_are_injected() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("dev/infiniband")).unwrap();
    for name in ["nvidiactl", "nvidia1", "infiniband/uverbs0"] {
        fs::write(root.path().join("dev").join(name), "").unwrap();
    }
    let mut settings = settings();
    root.path().clone_into(&mut settings.device_root);
    let one = gpu(1);
    let adapter = OtherDevice {
        device_nodes: vec!["/dev/infiniband/uverbs0".into(), "/dev/infiniband/rdma_cm".into()],
        ..adapter(0)
    };
    let nodes = |resource, assigned| {
        let answer = variable_answer(&settings, None, resource, &assigned);
        let node = |device: DeviceSpec| (device.container_path, device.host_path, device.permissions);
        answer.devices.into_iter().map(node).collect::<Vec<_>>()
    };
    assert_eq!(
        nodes(ExtendedResource::Shared, AssignedDevices::Gpus(vec![&one])),
        []
    );
    let path = "/dev/infiniband/uverbs0".to_owned();
    assert_eq!(
        nodes(ExtendedResource::Rdma, AssignedDevices::Others(vec![&adapter])),
        [(path.clone(), path, "rw".to_owned())],
        "a path of the host, wherever it is seen from"
    );
    let pod = pod("a", 1, [shares(2)]);
    assert_eq!(
        cdi_edits(
            &settings,
            &recipient(&pod),
            ExtendedResource::Shared,
            &AssignedDevices::Gpus(vec![&one])
        )
        .device_nodes
        .len(),
        1,
        "the control node comes with the driver"
    );
}

/// With CDI the vendor's variable shows nothing, the driver is a device of its own, and the UUIDs are in a variable of ours.
#[test]
fn with_cdi_the_answer_depends_on_the_ids_only() {
    let ids = ["a".to_owned(), "b".to_owned()];
    let answer = cdi_answer(ExtendedResource::Shared, &ids, 1);
    let devices: Vec<_> = answer
        .cdi_devices
        .iter()
        .map(|device| device.name.as_str())
        .collect();
    assert_eq!(
        devices,
        [
            "gpushare.dev/driver=all",
            &cdi::container_device(ExtendedResource::Shared, &ids, 1)
        ]
    );
    assert_eq!(
        answer.envs,
        [("NVIDIA_VISIBLE_DEVICES".to_owned(), "void".to_owned())].into()
    );
    let of_adapters = cdi_answer(ExtendedResource::Rdma, &ids, 1);
    assert_eq!(
        (of_adapters.cdi_devices.len(), of_adapters.envs.len()),
        (1, 0),
        "they need no driver"
    );
    let pod = pod("a", 1, [shares(1)]);
    let gpu = gpu(1);
    let edits = cdi_edits(
        &settings(),
        &recipient(&pod),
        ExtendedResource::Shared,
        &AssignedDevices::Gpus(vec![&gpu]),
    );
    assert_eq!(edits.env["NVIDIA_VISIBLE_DEVICES"], "void");
    assert_eq!(edits.env["GPUSHARE_GPU_DEVICES"], gpu.uuid.as_str());
    assert!(
        edits.others.is_empty(),
        "libraries and hooks come from the driver's device"
    );
}

/// The hook that acts on the variables comes with them, of the container's GPUs alone.
#[test]
fn a_spec_with_limits_brings_the_hook_of_its_gpu() {
    let specs = tempfile::tempdir().unwrap();
    let hook = |minor: u32| {
        let args = [
            "nvidia-cdi-hook",
            "apply-cuda-memory-limits",
            "--gpu-id",
            gpu(minor).uuid.as_str(),
        ]
        .map(str::to_owned);
        json!({"hookName": "createRuntime", "path": "/usr/bin/nvidia-cdi-hook", "args": args})
    };
    let devices: Vec<Value> = (0..2)
        .map(|minor| json!({"name": minor.to_string(), "containerEdits": {"hooks": [hook(minor)]}}))
        .collect();
    let spec = json!({"cdiVersion": "0.7.0", "kind": "nvidia.com/gpu", "devices": devices});
    fs::write(specs.path().join("nvidia.json"), spec.to_string()).unwrap();
    let mut settings = settings();
    settings.vendor_specs = VendorSpecs::new(vec![specs.path().to_owned()]);
    let half = ContainerRequest {
        memory_ratio: 50,
        ..shares(1)
    };
    let pod = pod("a", 1, [half]).on([1]);
    let edits = |level| {
        let enforcements = same_level(level, [gpu(1)]);
        let recipient = Recipient {
            enforcements: &enforcements,
            ..recipient(&pod)
        };
        cdi_edits(
            &settings,
            &recipient,
            ExtendedResource::Shared,
            &AssignedDevices::Gpus(vec![&gpu(1)]),
        )
    };
    let limited = edits(Level::Driver);
    assert_eq!(limited.others["hooks"], json!([hook(1)]));
    assert_eq!(limited.version.as_deref(), Some("0.7.0"));
    assert_eq!(limited.env["NVIDIA_GPU_MEMORY_LIMIT"], "8192");
    assert_eq!(limited.env["NVIDIA_GPU_MEMORY_REQUEST"], "0");
    let free = edits(Level::None);
    assert!(free.others.is_empty() && !free.env.contains_key("NVIDIA_GPU_MEMORY_LIMIT"));
}

/// The operator's library goes to pods that ask for it, as their limits do.
#[test]
fn hami_core_s_files_go_with_its_limits() {
    let library = tempfile::tempdir().unwrap();
    for name in ["libvgpu.so", "ld.so.preload"] {
        fs::write(library.path().join(name), "").unwrap();
    }
    let settings = NodeSettings {
        hami_core: Some(HamiCore::new(library.path().to_owned())),
        ..settings()
    };
    let half = ContainerRequest {
        memory_ratio: 50,
        ..shares(1)
    };
    for (is_limited, n_files) in [(true, 2), (false, 0)] {
        let pod = NodePod {
            is_limited,
            ..pod("a", 1, [half.clone()])
        };
        let gpu = gpu(0);
        let assigned = AssignedDevices::Gpus(vec![&gpu]);
        let edits = cdi_edits(&settings, &recipient(&pod), ExtendedResource::Shared, &assigned);
        let in_spec = edits
            .others
            .get("mounts")
            .and_then(Value::as_array)
            .map_or(0, Vec::len);
        let answer = variable_answer(
            &settings,
            Some(&recipient(&pod)),
            ExtendedResource::Shared,
            &assigned,
        );
        assert_eq!((in_spec, answer.mounts.len()), (n_files, n_files));
    }
}

/// The spec of a container with one function of one adapter and all of another: their files, each once, and no others.
#[test]
fn the_spec_of_virtual_functions_has_their_files() {
    let root = tempfile::tempdir().unwrap();
    fs::create_dir_all(root.path().join("dev/infiniband")).unwrap();
    let path = |name: &str| PathBuf::from("/dev/infiniband").join(name);
    for name in ["rdma_cm", "uverbs0", "uverbs1", "uverbs2"] {
        fs::write(root.path().join("dev/infiniband").join(name), "").unwrap();
    }
    let adapter = |minor: u32, own: &str| OtherDevice {
        device_nodes: vec![path("rdma_cm"), path(own)],
        ..adapter(minor)
    };
    let functions = [("0000:00:00.1", "uverbs2"), ("0000:00:00.2", "uverbs3")];
    let function_nodes = functions
        .map(|(address, own)| (address.to_owned(), vec![path("rdma_cm"), path(own)]))
        .into();
    let (first, second) = (
        OtherDevice {
            function_nodes,
            ..adapter(0, "uverbs0")
        },
        adapter(1, "uverbs1"),
    );
    let pod = pod("a", 1, [rdma(1)]).recorded(
        1,
        json!({"rdma": [
            {"minor": 0, "id": "0000:00:00.0", "resources": {}, "extension": {"vfs": [{"minor": 0, "busID": "0000:00:00.1"}]}},
            {"minor": 1, "id": "0000:01:00.0", "resources": {}},
        ]}),
    );
    let mut settings = settings();
    settings.device_root = root.path().to_owned();
    let edits = cdi_edits(
        &settings,
        &recipient(&pod),
        ExtendedResource::Rdma,
        &AssignedDevices::Others(vec![&first, &second]),
    );
    let nodes: Vec<_> = edits
        .device_nodes
        .iter()
        .map(|node| node["path"].as_str().unwrap().rsplit('/').next().unwrap())
        .collect();
    assert_eq!(nodes, ["rdma_cm", "uverbs2", "uverbs1"]);
    let env: Vec<_> = edits
        .env
        .iter()
        .map(|(name, value)| format!("{name}={value}"))
        .collect();
    assert_eq!(
        env,
        [
            "GPUSHARE_RDMA_DEVICES=0000:00:00.0,0000:01:00.0",
            "GPUSHARE_RDMA_FUNCTIONS=0000:00:00.1"
        ]
    );
}
