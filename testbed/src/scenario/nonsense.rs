//! A Device object that is edited by hand.

use anyhow::{Context, Result, ensure};
use proto::device::CONDITION_HEALTHY;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};
use serde_json::{Value, json};

use super::{DEVICES, ScenarioEntry, World};
use kit::apiserver::{Fault, Matching};
use kit::pod_fields::node_of;
use kit::polling;

pub(super) const SCENARIOS: &[ScenarioEntry] = scenarios! {
    "device-nonsense" => device_nonsense,
        "with any nonsense in a Device object nothing crashes or is given twice, and the plugin repairs it";
};

/// Node with two GPUs of 16 GiB.
pub(super) const EDITED: &str = "edited";

/// A GPU as an entry of `spec.devices`.
fn gpu(minor: &Value, id: &Value, resources: &Value) -> Value {
    json!({"type": "gpu", "id": id, "minor": minor, "health": true, "resources": resources})
}

/// The resources of a GPU with this memory.
fn amounts(memory: &str) -> Value {
    json!({GPU_CORE: "100", GPU_MEMORY_RATIO: "100", GPU_MEMORY: memory})
}

fn id(minor: i32) -> Value {
    json!(format!("GPU-{EDITED}-{minor}"))
}

/// One of the node's GPUs, as far as the scheduler needs to know it.
fn sound_gpu(minor: i32) -> Value {
    gpu(&json!(minor), &id(minor), &amounts("16Gi"))
}

/// Replacements of `spec.devices`; none of them says that more is free than is.
fn edits() -> Vec<(&'static str, Value)> {
    let sound = sound_gpu;
    let with = |field: &str, value: Value| {
        let mut gpu = sound(1);
        kit::pods::set(&mut gpu, field, value);
        gpu
    };
    let (toaster, unlabelled) = (with("type", json!("toaster")), with("labels", json!(["a", "b"])));
    vec![
        ("no list", json!("none of your business")),
        ("nothing", Value::Null),
        ("an empty list", json!([])),
        ("a list of lists", json!([[], 7, "GPU"])),
        ("an unknown type", json!([sound(0), toaster])),
        (
            "no types",
            json!([{"id": "GPU-x", "minor": 0, "health": true}, {}]),
        ),
        (
            "negative amounts",
            json!([sound(0), gpu(&json!(1), &id(1), &amounts("-16Gi"))]),
        ),
        (
            "amounts that are none",
            json!([gpu(&json!(0), &id(0), &json!("a lot")), sound(1)]),
        ),
        (
            "no IDs",
            json!([
                gpu(&json!(0), &json!(""), &amounts("16Gi")),
                gpu(&json!(1), &Value::Null, &amounts("16Gi"))
            ]),
        ),
        (
            "a minor that is negative",
            json!([gpu(&json!(-1), &id(0), &amounts("16Gi")), sound(1)]),
        ),
        (
            "a minor twice",
            json!([sound(0), gpu(&json!(0), &id(1), &amounts("16Gi"))]),
        ),
        ("a GPU twice", json!([sound(0), sound(0)])),
        ("labels that are a list", json!([sound(0), unlabelled])),
    ]
}

/// Writes nonsense into a Device object: no edit makes the scheduler place a pod that does not fit, and the plugin
/// repairs the object.
async fn device_nonsense(world: &mut World) -> Result<()> {
    for minor in 0..2 {
        // 12 of the 16 units of each GPU are held, so a pod of 5 units never fits and one of 4 always does.
        world.start_units(&format!("holder-{minor}"), 12, EDITED).await?;
    }
    let sound = read_devices(world)?;
    let faults = world.cluster()?.api().faults().clone();
    let patches = Matching::requests("patch", "devices").name(|name| name == EDITED);
    let blocked = faults.inject(patches, Fault::Refuse(500));
    for (idx, (what, devices)) in edits().into_iter().enumerate() {
        try_edit(world, idx, &devices)
            .await
            .with_context(|| format!("spec.devices is {what}"))?;
    }
    // A pod that fits is refused only because the object is wrong, and runs once it is repaired.
    write_devices(world, &json!([]))?;
    world.create_units("patient", "4", EDITED).await?;
    world.until_refused("patient", "nodes are available").await?;
    blocked.remove();
    // The plugin retries after a pause or at the next change of the object; a change makes it retry now.
    write_devices(world, &json!([sound_gpu(0)]))?;
    until_repaired(world, &sound).await?;
    world.until_running(&["patient"]).await?;
    world.verify().await?;
    // The plugin corrects an object that claims more than there is.
    let more = |minor: i32| gpu(&json!(minor), &id(minor), &amounts("160Gi"));
    write_devices(world, &json!([more(0), more(1)]))?;
    until_repaired(world, &sound).await?;
    world.create_units("too-much", "5", EDITED).await?;
    world.until_refused("too-much", "nodes are available").await?;
    world.start_units("just-right", "4", EDITED).await.map(|_| ())
}

/// Writes nonsense into `spec.devices`, which the plugin cannot undo while its patches are refused, and checks that a pod of 5
/// units, of which each GPU has 4 free, is refused, and that the running pods stay.
async fn try_edit(world: &mut World, idx: usize, devices: &Value) -> Result<()> {
    write_devices(world, devices)?;
    let name = format!("greedy-{idx}");
    world.create_units(&name, "5", EDITED).await?;
    world.until_refused(&name, "nodes are available").await?;
    let is_bound = world.pod(&name).is_ok_and(|pod| node_of(&pod).is_some());
    ensure!(!is_bound, "a pod was bound that does not fit");
    world.delete(&name).await?;
    world.until_running(&["holder-0", "holder-1"]).await
}

/// The devices of the Device object with their condition Healthy alone: the plugin changes the others once a first container has
/// shown that it gets its devices.
fn read_devices(world: &mut World) -> Result<Value> {
    let device = world.cluster()?.api().objects().get(DEVICES, "", EDITED)?;
    let mut devices = device.pointer("/spec/devices").cloned().unwrap_or_default();
    for conditions in devices
        .as_array_mut()
        .into_iter()
        .flatten()
        .filter_map(|device| device.get_mut("conditions")?.as_array_mut())
    {
        conditions
            .retain(|condition| condition.get("type").and_then(Value::as_str) == Some(CONDITION_HEALTHY));
    }
    Ok(devices)
}

/// Writes `spec.devices` without the check by the `CustomResourceDefinition`'s schema, since a cluster may have an older schema
/// or another project's.
fn write_devices(world: &mut World, devices: &Value) -> Result<()> {
    let api = world.cluster()?.api().objects().clone();
    let mut device = Value::clone(&*api.get(DEVICES, "", EDITED)?);
    let spec = device.get_mut("spec").context("a Device object without spec")?;
    kit::pods::set(spec, "devices", devices.clone());
    api.update(DEVICES, device)?;
    Ok(())
}

/// Waits until the devices in the object are as they were before the edits.
async fn until_repaired(world: &mut World, sound: &Value) -> Result<()> {
    let is_repaired = || std::future::ready(read_devices(world).is_ok_and(|now| now == *sound));
    polling::until(super::DEADLINE, "the plugin does not repair it", is_repaired).await
}
