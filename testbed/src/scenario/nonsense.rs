//! A Device object that is edited by hand.

use anyhow::{Context, Result, ensure};
use proto::device::CONDITION_HEALTHY;
use proto::resource::{GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO};
use serde::Serialize;
use serde_json::{Value, json};

use super::{DEVICES, Scenario, World};
use kit::apiserver::{Fault, Matching};
use kit::pod_fields::node_of;
use kit::pods::set;
use kit::polling;

pub(super) const SCENARIOS: &[Scenario] = scenarios! { needs "nodes of other kinds", on [Mixed]:
    "device-nonsense" => device_nonsense,
        "with any nonsense in a Device object nothing crashes or is given twice, and the plugin repairs it";
};

/// Node with two GPUs of 16 GiB.
pub(super) const EDITED: &str = "edited";

/// A GPU as an entry of `spec.devices`.
fn gpu(minor: impl Serialize, id: impl Serialize, resources: &Value) -> Value {
    json!({"type": "gpu", "id": id, "minor": minor, "health": true, "resources": resources})
}

/// The resources of a GPU with this memory.
fn amounts(memory: &str) -> Value {
    json!({GPU_CORE: "100", GPU_MEMORY_RATIO: "100", GPU_MEMORY: memory})
}

fn id(minor: i32) -> String {
    format!("GPU-{EDITED}-{minor}")
}

/// One of the node's GPUs, as far as the scheduler needs to know it.
fn sound(minor: i32) -> Value {
    gpu(minor, id(minor), &amounts("16Gi"))
}

/// Replacements of `spec.devices`; none of them says that more is free than is.
fn edits() -> Vec<(&'static str, Value)> {
    let whole = amounts("16Gi");
    let (mut toaster, mut unlabelled) = (sound(1), sound(1));
    set(&mut toaster, "type", json!("toaster"));
    set(&mut unlabelled, "labels", json!(["a", "b"]));
    let negative = gpu(1, id(1), &amounts("-16Gi"));
    let wordy = gpu(0, id(0), &json!("a lot"));
    let nameless = [gpu(0, "", &whole), gpu(1, Value::Null, &whole)];
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
        ("negative amounts", json!([sound(0), negative])),
        ("amounts that are none", json!([wordy, sound(1)])),
        ("no IDs", json!(nameless)),
        ("a negative minor", json!([gpu(-1, id(0), &whole), sound(1)])),
        ("a minor twice", json!([sound(0), gpu(0, id(1), &whole)])),
        ("a GPU twice", json!([sound(0), sound(0)])),
        ("labels that are a list", json!([sound(0), unlabelled])),
    ]
}

async fn device_nonsense(world: &mut World) -> Result<()> {
    for minor in 0..2 {
        // 12 of the 16 units of each GPU are held, so a pod of 5 units never fits and one of 4 always does.
        world.start_units(&format!("holder-{minor}"), 12, EDITED).await?;
    }
    let before = read_devices(world)?;
    let faults = world.cluster()?.api().faults().clone();
    let patches = Matching::requests("patch", "devices").name(EDITED);
    let blocked = faults.inject(patches, Fault::Refuse(500));
    for (idx, (what, devices)) in edits().into_iter().enumerate() {
        let tried = try_edit(world, idx, &devices).await;
        tried.with_context(|| format!("spec.devices is {what}"))?;
    }
    // A pod that fits is refused only because the object is wrong, and runs once it is repaired.
    write_devices(world, &json!([]))?;
    world.create_waiting_units("patient", 4, EDITED).await?;
    blocked.remove();
    // The plugin retries after a pause or at the next change of the object; a change makes it retry now.
    write_devices(world, &json!([sound(0)]))?;
    until_repaired(world, &before).await?;
    world.until_running(&["patient"]).await?;
    world.verify().await?;
    // The plugin corrects an object that claims more than there is.
    let more = |minor: i32| gpu(minor, id(minor), &amounts("160Gi"));
    write_devices(world, &json!([more(0), more(1)]))?;
    until_repaired(world, &before).await?;
    world.create_waiting_units("too-much", 5, EDITED).await?;
    world.start_units("just-right", "4", EDITED).await.map(drop)
}

/// Writes nonsense into `spec.devices`, which the plugin cannot undo while its patches are refused, and checks that a pod of 5
/// units, of which each GPU has 4 free, is refused, and that the running pods stay.
async fn try_edit(world: &mut World, idx: usize, devices: &Value) -> Result<()> {
    write_devices(world, devices)?;
    let name = format!("greedy-{idx}");
    world.create_waiting_units(&name, 5, EDITED).await?;
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
    for device in devices.as_array_mut().into_iter().flatten() {
        if let Some(Value::Array(conditions)) = device.get_mut("conditions") {
            conditions.retain(|condition| condition["type"] == CONDITION_HEALTHY);
        }
    }
    Ok(devices)
}

/// Writes `spec.devices` without the check by the `CustomResourceDefinition`'s schema, since a cluster may have an older schema
/// or another project's.
fn write_devices(world: &mut World, devices: &Value) -> Result<()> {
    let api = world.cluster()?.api().objects().clone();
    let mut device = Value::clone(&*api.get(DEVICES, "", EDITED)?);
    let spec = device.get_mut("spec").context("a Device object without spec")?;
    set(spec, "devices", devices.clone());
    api.update(DEVICES, device)?;
    Ok(())
}

/// Waits until the devices in the object are as they were before the edits.
async fn until_repaired(world: &mut World, sound: &Value) -> Result<()> {
    let is_repaired = || std::future::ready(read_devices(world).is_ok_and(|now| now == *sound));
    polling::until(super::DEADLINE, "the plugin does not repair it", is_repaired).await
}
