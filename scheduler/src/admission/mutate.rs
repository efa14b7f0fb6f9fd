//! The mutating webhook: completes the device requests of a pod at its creation.
//!
//! A second run of the webhook on its own result changes nothing. It leaves requests that it does not understand as they are: the
//! validating webhook and the filter refuse them with a reason. Only the annotation to see all devices is refused here already,
//! if its value cannot be read or is not allowed.

use proto::admission::{AdmissionRequest, Operation, PatchOperation};
use proto::pod::{ALL_DEVICES, Pod};
use proto::quantity::Quantity;
use proto::resource::{GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO, GPU_SHARED, OLD_NAMES, WHOLE_PERCENT};
use serde::Deserialize;
use serde_json::{Map, Value};

use super::requested_kinds::{RECORD_ANNOTATIONS, RequestedKinds, is_mirror};
use super::{Refusal, Rules, Unreadable, Verdict, read, validate};

/// The scheduler name that the API server has written into pods without one, before it calls webhooks.
const DEFAULT_SCHEDULER: &str = "default-scheduler";

/// Decides about a request: a pod is changed or refused only at its creation.
pub(super) fn review(rules: &Rules, request: &AdmissionRequest) -> Result<Verdict, Unreadable> {
    let resource = &request.resource;
    let is_pod = resource.group.is_empty() && resource.resource == "pods" && request.sub_resource.is_empty();
    if !is_pod || request.operation != Operation::Create {
        return Ok(Verdict::ALLOWED);
    }
    let pod: Pod = read(request)?;
    let object = request.object.clone().unwrap_or_default();
    Ok(Verdict::of(mutate(rules, &pod, object)))
}

/// Completes the device requests of a pod, and sets its scheduler; `object` is the pod with all its fields. Returns the patch,
/// and the warnings for the user.
fn mutate(rules: &Rules, pod: &Pod, object: Value) -> Result<(Vec<PatchOperation>, Vec<String>), Refusal> {
    let kinds = RequestedKinds::of_pod(pod, &rules.names);
    let sees_all = pod.annotation(ALL_DEVICES) == Some("true");
    let mut draft = Draft {
        object,
        patch: Vec::new(),
    };
    if is_mirror(pod) || (kinds.is_empty() && !sees_all) {
        return Ok((draft.patch, Vec::new()));
    }
    validate::refuse_all_devices(rules, pod)?;
    for list in ["/spec/initContainers", "/spec/containers"] {
        for idx in 0..draft.len(list) {
            let container = format!("{list}/{idx}");
            rename_old_resources(&mut draft, &container);
            // A pod that mixes ways to request GPUs is refused whatever is added to it; its author recognises the unchanged pod
            // in the refusal.
            if !kinds.mixes_gpu_requests() {
                split_gpu(&mut draft, &container);
                add_shared(&mut draft, &container);
            }
            // A pod that sees all devices requests none, and kubelet calls the device plugin only for a requested resource.
            if kinds.is_empty() && list == "/spec/containers" {
                set_amount(&mut draft, &container, GPU_SHARED, &Value::from("1"));
            }
        }
    }
    name_scheduler(&mut draft, rules.scheduler_name.as_deref());
    let warnings = remove_record(&mut draft);
    Ok((draft.patch, warnings))
}

/// The JSON pointers to the limits and to the requests of the container at this JSON pointer.
fn resource_lists(container: &str) -> [String; 2] {
    ["limits", "requests"].map(|list| format!("{container}/resources/{list}"))
}

/// The limit of a resource, or the request if there is no limit.
fn amount_of<'a>(draft: &'a Draft, container: &str, resource: &str) -> Option<&'a Value> {
    let [limits, requests] = resource_lists(container);
    draft.get(&limits, resource).or(draft.get(&requests, resource))
}

/// Sets limit and request of a resource.
fn set_amount(draft: &mut Draft, container: &str, resource: &str, value: &Value) {
    // Kubernetes demands extended resources in both.
    for list in resource_lists(container) {
        draft.put(&list, resource, value.clone());
    }
}

/// Gives resources with names of the proposal "Fine-grained device scheduling" their current names.
fn rename_old_resources(draft: &mut Draft, container: &str) {
    for (old, new) in OLD_NAMES {
        // With both names the author's intent is not known; the validating webhook refuses the pod.
        if amount_of(draft, container, new).is_none() {
            replace(draft, container, old, &[new]);
        }
    }
}

/// Replaces `koordinator.sh/gpu` by `gpu-core` and `gpu-memory-ratio`, its meaning, unless the container has other amounts too.
fn split_gpu(draft: &mut Draft, container: &str) {
    let old_names = OLD_NAMES.iter().map(|(old, _)| old);
    for amount in [GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO].iter().chain(old_names) {
        if amount_of(draft, container, amount).is_some() {
            return;
        }
    }
    replace(draft, container, GPU, &[GPU_CORE, GPU_MEMORY_RATIO]);
}

/// Replaces the resource `old` by the resources `new`, each with the same amount, in limits and requests.
fn replace(draft: &mut Draft, container: &str, old: &str, new: &[&str]) {
    let Some(present) = amount_of(draft, container, old).cloned() else {
        return;
    };
    for list in resource_lists(container) {
        let value = draft.remove(&list, old).unwrap_or_default();
        // For a limit without a request, the API server sets the request to the limit; a copy does the same.
        let value = if value.is_null() { present.clone() } else { value };
        for name in new {
            draft.put(&list, name, value.clone());
        }
    }
}

/// Adds `gpu.shared`, the number of GPUs over which a container's amounts are divided, if it is missing: the rule of the proposal
/// "Enhance the GPU Share API".
fn add_shared(draft: &mut Draft, container: &str) {
    if amount_of(draft, container, GPU_SHARED).is_some() {
        return;
    }
    // Applied to `gpu-core` too where there is no ratio, as Koordinator does.
    let percent = if has_amount(draft, container, GPU_MEMORY_RATIO) {
        amount_of(draft, container, GPU_MEMORY_RATIO)
    } else {
        amount_of(draft, container, GPU_CORE)
    };
    let percent = percent.and_then(|value| Quantity::deserialize(value).ok()?.unsigned());
    let n_devices = match percent {
        Some(percent) if percent > 0 && percent.is_multiple_of(WHOLE_PERCENT) => percent / WHOLE_PERCENT,
        // A part of one GPU. The validating webhook refuses amounts such as 150 %.
        _ => 1,
    };
    for resource in [GPU, GPU_CORE, GPU_MEMORY, GPU_MEMORY_RATIO] {
        if has_amount(draft, container, resource) {
            set_amount(draft, container, GPU_SHARED, &Value::from(n_devices.to_string()));
            return;
        }
    }
}

/// Returns true if a container has an amount of a resource that is not zero.
fn has_amount(draft: &Draft, container: &str, resource: &str) -> bool {
    let amount = amount_of(draft, container, resource).map(Quantity::deserialize);
    // One that cannot be read counts: the validating webhook then refuses the amount, and not the lack of `gpu.shared`.
    amount.is_some_and(|amount| amount.ok() != Some(Quantity::default()))
}

/// Sets the scheduler of an unbound pod that names none.
fn name_scheduler(draft: &mut Draft, name: Option<&str>) {
    // The API server writes the default name before it calls webhooks, so that name counts as none.
    if let Some(name) = name
        && is_one_of(draft.get("/spec", "schedulerName"), &["", DEFAULT_SCHEDULER])
        && is_one_of(draft.get("/spec", "nodeName"), &[""])
    {
        draft.put("/spec", "schedulerName", Value::from(name));
    }
}

/// Returns true if a field is absent, or has one of these texts.
fn is_one_of(field: Option<&Value>, texts: &[&str]) -> bool {
    field.is_none_or(|value| value.as_str().is_some_and(|text| texts.contains(&text)))
}

/// Removes the annotations of the allocation record, which no user writes, and returns a warning for each.
fn remove_record(draft: &mut Draft) -> Vec<String> {
    let mut warnings = Vec::new();
    for key in RECORD_ANNOTATIONS {
        // Manifests that were copied from running pods have these annotations, so the pod is mended and not refused.
        if draft.get("/metadata/annotations", key).is_some() {
            draft.remove("/metadata/annotations", key);
            warnings.push(format!(
                "annotation {key} was removed: only the scheduler writes it"
            ));
        }
    }
    warnings
}

/// A JSON object that is being changed, and the patch that makes the same changes.
#[derive(Debug)]
struct Draft {
    object: Value,
    patch: Vec<PatchOperation>,
}

impl Draft {
    /// A field by the JSON pointer of its parent and its name; `None` if it is absent or null.
    fn get(&self, parent: &str, key: &str) -> Option<&Value> {
        let field = self.object.pointer(parent)?.get(key);
        field.filter(|value| !value.is_null())
    }

    fn len(&self, list: &str) -> usize {
        let list = self.object.pointer(list).and_then(Value::as_array);
        list.map_or(0, Vec::len)
    }

    /// Sets a field, and creates its parents where they are missing.
    fn put(&mut self, parent: &str, key: &str, value: Value) {
        self.make_object(parent);
        // The API server may run the webhook again after others (`reinvocationPolicy`): then nothing is left to add.
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

    /// Removes a field, and returns the value that it had; `None` if there was none.
    fn remove(&mut self, parent: &str, key: &str) -> Option<Value> {
        let removed = self.object.pointer_mut(parent)?.as_object_mut()?.remove(key)?;
        self.patch.push(PatchOperation::Remove {
            path: format!("{parent}/{}", escape(key)),
        });
        Some(removed)
    }

    /// Creates the object at a JSON pointer, and its parents, where they are missing.
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

/// A key as part of a JSON pointer, with its special characters escaped.
fn escape(key: &str) -> String {
    // The tilde first, so that the tilde of `~1` is not escaped again.
    key.replace('~', "~0").replace('/', "~1")
}
