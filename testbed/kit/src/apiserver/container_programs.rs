//! Programs that `kubectl exec` runs in containers: the testbed runs none, and answers for a few by what the container runtime
//! has injected.

use serde_json::Value;

use super::api_objects::ApiObjects;
use super::object;
use crate::kubelet::DEVICE_NODES;

/// The output of a program that succeeds, or the exit code and error output of one that fails.
pub(crate) type ProgramResult = Result<String, (u8, String)>;

/// The devices and variables that a container sees.
#[derive(Debug, Default)]
pub(crate) struct ContainerView {
    env: Vec<(String, String)>,
    gpus: Vec<SeenGpu>,
}

/// A GPU whose device node a container has.
#[derive(Debug)]
struct SeenGpu {
    model: String,
    uuid: String,
    mib: u64,
}

impl ContainerView {
    /// The view of a container of a pod, read from its log: the container prints it at each start.
    pub(crate) fn of(objects: &ApiObjects, pod: &Value, container: &str) -> Self {
        let text = |pointer| object::text(pod, pointer);
        let log = objects.log(text("/metadata/uid"), container);
        let mut view = Self::default();
        for line in log.lines() {
            match line.split_once('=') {
                // The first line of each start.
                Some((DEVICE_NODES, nodes)) => {
                    view = Self {
                        env: Vec::new(),
                        gpus: seen_gpus(objects, text("/spec/nodeName"), nodes),
                    };
                }
                Some((name, value)) => view.env.push((name.to_owned(), value.to_owned())),
                None => {}
            }
        }
        view
    }
}

/// The GPUs of a node behind these device nodes, which are separated by commas.
fn seen_gpus(objects: &ApiObjects, node: &str, device_nodes: &str) -> Vec<SeenGpu> {
    let device = objects.get("devices.scheduling.koordinator.sh", "", node);
    let node = objects.get("nodes", "", node);
    let (Ok(device), Ok(node)) = (device, node) else {
        return Vec::new();
    };
    let model = object::text(&node, "/metadata/labels/node.koordinator.sh~1gpu-model");
    let minors = device_nodes
        .split(',')
        .filter_map(|path| path.strip_prefix("/dev/nvidia")?.parse().ok());
    let gpu = |minor: i64| {
        let mut gpus = object::array(&device, "/spec/devices").iter();
        let found = gpus.find(|gpu| {
            object::text(gpu, "/type") == "gpu" && object::integer(gpu, "/minor") == Some(minor)
        })?;
        let memory = object::text(found, "/resources/koordinator.sh~1gpu-memory");
        let bytes = memory.parse::<proto::quantity::Quantity>().ok()?.unsigned()?;
        Some(SeenGpu {
            model: model.to_owned(),
            uuid: object::text(found, "/id").to_owned(),
            mib: bytes >> 20,
        })
    };
    minors.filter_map(gpu).collect()
}

/// Answers as a program in a container would, from the container's devices and variables.
pub(crate) fn run(view: &ContainerView, command: &[&str]) -> ProgramResult {
    let mut lines = Vec::new();
    match command {
        ["env" | "printenv"] => {
            for (name, value) in &view.env {
                lines.push(format!("{name}={value}"));
            }
        }
        ["printenv", variable] => match view.env.iter().find(|(name, _)| name == variable) {
            Some((_, value)) => lines.push(value.clone()),
            None => return Err((1, String::new())),
        },
        // The driver's files come with the devices.
        ["nvidia-smi", ..] if view.gpus.is_empty() => {
            let text = "nvidia-smi: not found: the container sees no GPU\n";
            return Err((127, text.to_owned()));
        }
        ["nvidia-smi", "-L" | "--list-gpus"] => {
            for (index, SeenGpu { model, uuid, .. }) in view.gpus.iter().enumerate() {
                lines.push(format!("GPU {index}: {model} (UUID: {uuid})"));
            }
        }
        ["nvidia-smi"] => {
            lines.push(format!("{:<5}{:<20}{:<16}{}", "GPU", "Name", "UUID", "Memory"));
            for (index, SeenGpu { model, uuid, mib }) in view.gpus.iter().enumerate() {
                lines.push(format!("{index:<5}{model:<20}{uuid:<16}{mib} MiB"));
            }
        }
        _ => {
            let name = command.first().copied().unwrap_or_default();
            let text = format!(
                "{name}: not found: containers of the testbed are simulated, and answer for env, printenv, nvidia-smi and \
                 nvidia-smi -L alone\n"
            );
            return Err((127, text));
        }
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn programs_show_what_was_injected() {
        let gpu = |uuid: &str| SeenGpu {
            model: "T4".to_owned(),
            uuid: uuid.to_owned(),
            mib: 16_384,
        };
        let view = ContainerView {
            env: vec![("A".to_owned(), "1".to_owned())],
            gpus: vec![gpu("GPU-a"), gpu("GPU-b")],
        };
        let out = |command: &[&str]| run(&view, command).unwrap();
        assert_eq!(
            out(&["nvidia-smi", "-L"]),
            "GPU 0: T4 (UUID: GPU-a)\nGPU 1: T4 (UUID: GPU-b)\n"
        );
        assert!(out(&["nvidia-smi"]).contains("16384 MiB"));
        assert_eq!(
            (out(&["env"]), out(&["printenv", "A"])),
            ("A=1\n".into(), "1\n".into())
        );
        for (command, code) in [(&["printenv", "B"][..], 1), (&["ls"], 127), (&[], 127)] {
            assert_eq!(run(&view, command).unwrap_err().0, code, "{command:?}");
        }
        let without = run(&ContainerView::default(), &["nvidia-smi", "-L"]);
        assert_eq!(without.unwrap_err().0, 127);
    }
}
