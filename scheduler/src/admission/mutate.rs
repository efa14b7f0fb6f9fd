//! The mutating webhook: completes the device requests of a pod at its creation.
//!
//! A second run changes nothing more. Leaves requests that it does not understand as they are: the validating webhook and the
//! filter refuse them with a reason.

use proto::admission::{AdmissionRequest, Operation, PatchOperation};
use proto::pod::Pod;
use proto::quantity::Quantity;
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::asks::{Asks, RECORD, all_devices, is_mirror};
use super::{Refusal, Rules, Unreadable, Verdict, read, validate};

/// The scheduler name that the API server writes into pods without one.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Changes pods at their creation alone.
pub(super) fn review(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let resource = &request.resource;
    let is_pod = resource.group.is_empty() && resource.resource == "pods" && request.sub_resource.is_empty();
    if !is_pod || request.operation != Operation::Create {
        return Ok(Verdict::ALLOWED);
    }
    let pod: Pod = read(request, "object", "Pod", request.object.as_ref())?;
    let object = request.object.clone().unwrap_or_default();
    Ok(match mutate(rules, &pod, object) {
        Ok((draft, warnings)) => Verdict::Allowed {
            patch: draft.patch,
            warnings,
        },
        Err(refusal) => Verdict::Refused(refusal),
    })
}

/// Changes a pod; `object` is `pod` with all its fields.
fn mutate(rules: &Rules, pod: &Pod, object: Value) -> Result<(Draft, Vec<String>), Refusal> {
    let mut draft = Draft {
        object,
        patch: Vec::new(),
    };
    let asks = Asks::of(pod, &rules.names);
    let all = all_devices(pod) == Some("true");
    if is_mirror(pod) || (asks.is_empty() && !all) {
        return Ok((draft, Vec::new()));
    }
    validate::refuse_all_devices(rules, pod)?;
    for container in containers(&draft) {
        rename(&mut draft, &container);
        if !asks.mixes() {
            split_gpu(&mut draft, &container);
            add_shared(&mut draft, &container);
        }
    }
    if asks.is_empty() {
        for idx in 0..draft.len("/spec/containers") {
            put(
                &mut draft,
                &format!("/spec/containers/{idx}"),
                GPU_SHARED,
                &Value::from("1"),
            );
        }
    }
    name_scheduler(&mut draft, rules.scheduler_name.as_deref());
    let warnings = remove_record(&mut draft);
    Ok((draft, warnings))
}

/// JSON pointers to all containers.
fn containers(draft: &Draft) -> Vec<String> {
    let lists = ["/spec/initContainers", "/spec/containers"];
    lists
        .iter()
        .flat_map(|list| (0..draft.len(list)).map(move |idx| format!("{list}/{idx}")))
        .collect()
}

/// JSON pointers to a container's limits and requests.
fn amounts(container: &str) -> [String; 2] {
    ["limits", "requests"].map(|amounts| format!("{container}/resources/{amounts}"))
}

fn get<'a>(draft: &'a Draft, container: &str, resource: &str) -> Option<&'a Value> {
    amounts(container)
        .iter()
        .find_map(|amounts| draft.get(amounts, resource))
}

fn put(draft: &mut Draft, container: &str, resource: &str, value: &Value) {
    for amounts in amounts(container) {
        draft.put(&amounts, resource, value.clone());
    }
}

/// Renames resources of the proposals' first version.
fn rename(draft: &mut Draft, container: &str) {
    for (old, new) in OLD_NAMES {
        if get(draft, container, new).is_none() {
            replace(draft, container, old, &[new]);
        }
    }
}

/// Replaces `koordinator.sh/gpu` by the two amounts that it stands for, unless the container requests other amounts too.
fn split_gpu(draft: &mut Draft, container: &str) {
    let others = [GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO]
        .into_iter()
        .chain(OLD_NAMES.map(|(old, _)| old));
    if others
        .into_iter()
        .all(|amount| get(draft, container, amount).is_none())
    {
        replace(draft, container, GPU, &[GPU_CORE, GPU_MEMORY_RATIO]);
    }
}

/// Replaces a resource by others of the same amount, in limits and requests: Kubernetes demands extended resources in both.
fn replace(draft: &mut Draft, container: &str, old: &str, new: &[&str]) {
    let Some(any) = get(draft, container, old).cloned() else {
        return;
    };
    for amounts in amounts(container) {
        let value = draft
            .remove(&amounts, old)
            .filter(|value| !value.is_null())
            .unwrap_or_else(|| any.clone());
        for name in new {
            draft.put(&amounts, name, value.clone());
        }
    }
}

/// Adds the number of devices that a container's amounts are for, if it is missing.
fn add_shared(draft: &mut Draft, container: &str) {
    let is_zero =
        |value: &Value| Quantity::deserialize(value).is_ok_and(|quantity| quantity == Quantity::default());
    let has = |resource| get(draft, container, resource).is_some_and(|value| !is_zero(value));
    if get(draft, container, GPU_SHARED).is_some()
        || ![GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO].into_iter().any(has)
    {
        return;
    }
    let number = |resource| {
        get(draft, container, resource).and_then(|value| Quantity::deserialize(value).ok()?.unsigned())
    };
    let percent = if has(GPU_MEMORY_RATIO) {
        number(GPU_MEMORY_RATIO)
    } else {
        number(GPU_CORE)
    };
    put(
        draft,
        container,
        GPU_SHARED,
        &Value::from(devices(percent.unwrap_or_default()).to_string()),
    );
}

/// The number of devices that a percentage stands for.
fn devices(percent: u64) -> u64 {
    if percent > 0 && percent.is_multiple_of(100) {
        percent / 100
    } else {
        1
    }
}

/// Sets the scheduler of an unbound pod that names none. The API server has written the default name by then.
fn name_scheduler(draft: &mut Draft, name: Option<&str>) {
    let is = |field, values: &[&str]| {
        draft
            .get("/spec", field)
            .is_none_or(|value| value.as_str().is_some_and(|text| values.contains(&text)))
    };
    if let Some(name) = name
        && is("schedulerName", &["", DEFAULT_SCHEDULER])
        && is("nodeName", &[""])
    {
        draft.put("/spec", "schedulerName", Value::from(name));
    }
}

/// Removes annotations that only a scheduler writes: they come with pods that were copied from others.
fn remove_record(draft: &mut Draft) -> Vec<String> {
    let present = RECORD
        .into_iter()
        .filter(|key| draft.get("/metadata/annotations", key).is_some())
        .collect::<Vec<_>>();
    for key in &present {
        draft.remove("/metadata/annotations", key);
    }
    present
        .iter()
        .map(|key| format!("annotation {key} was removed: only the scheduler writes it"))
        .collect()
}

/// A JSON object that is being changed, and the patch that makes the same changes.
#[derive(Debug)]
struct Draft {
    object: Value,
    patch: Vec<PatchOperation>,
}

impl Draft {
    /// A field, by the JSON pointer of its parent and its name.
    fn get(&self, parent: &str, key: &str) -> Option<&Value> {
        self.object
            .pointer(parent)?
            .get(key)
            .filter(|value| !value.is_null())
    }

    /// The length of a list.
    fn len(&self, list: &str) -> usize {
        self.object
            .pointer(list)
            .and_then(Value::as_array)
            .map_or(0, Vec::len)
    }

    /// Sets a field, and creates its parents.
    fn put(&mut self, parent: &str, key: &str, value: Value) {
        self.make_object(parent);
        if let Some(Value::Object(fields)) = self.object.pointer_mut(parent)
            && fields.get(key) != Some(&value)
        {
            fields.insert(key.to_owned(), value.clone());
            self.patch.push(PatchOperation::Add {
                path: format!("{parent}/{}", escape(key)),
                value,
            });
        }
    }

    /// Removes a field, and returns its value.
    fn remove(&mut self, parent: &str, key: &str) -> Option<Value> {
        let removed = self.object.pointer_mut(parent)?.as_object_mut()?.remove(key)?;
        self.patch.push(PatchOperation::Remove {
            path: format!("{parent}/{}", escape(key)),
        });
        Some(removed)
    }

    fn make_object(&mut self, pointer: &str) {
        if self.object.pointer(pointer).is_some_and(Value::is_object) {
            return;
        }
        // Only the last part of a path has escapes, so this key needs none.
        if let Some((parent, key)) = pointer.rsplit_once('/') {
            self.put(parent, key, Value::Object(Map::new()));
        }
    }
}

/// A key as part of a JSON pointer.
fn escape(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}
