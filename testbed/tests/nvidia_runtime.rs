//! The testbed's model of NVIDIA's container runtime, compared with recordings of the real program.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;
use serde_json::Value;
use testbed::kubelet::nvidia_runtime::{
    Created, Modification, NvidiaRuntime, RuntimeMode, VISIBLE_DEVICES, find_gpus,
};

#[derive(Deserialize)]
struct Recorded {
    program: String,
    gpus: Vec<String>,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    mode: String,
    kind: String,
    trust: String,
    privileged: bool,
    specs: String,
    env: BTreeMap<String, String>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
    outcome: Value,
}

impl Case {
    fn runtime(&self) -> NvidiaRuntime {
        let mode = match self.mode.as_str() {
            "legacy" => RuntimeMode::Legacy,
            "jit-cdi" => RuntimeMode::JitCdi,
            "cdi" => RuntimeMode::Cdi,
            _ => RuntimeMode::Auto,
        };
        let default_kind = if self.kind.starts_with("management") {
            "management.nvidia.com/gpu"
        } else {
            "nvidia.com/gpu"
        };
        NvidiaRuntime {
            mode,
            default_kind,
            accepts_unprivileged: self.trust == "open",
        }
    }

    /// The GPUs of a device of the specs that this machine has: those of the toolkit name each GPU, that of GPU Operator all.
    fn in_specs(&self, name: &str, uuids: &[String]) -> Option<Vec<usize>> {
        let (kind, device) = name.split_once('=')?;
        let has = |specs: &str| self.specs == specs || self.specs == "both";
        match kind {
            "nvidia.com/gpu" if has("toolkit") => find_gpus(&[device.to_owned()], uuids).ok(),
            "management.nvidia.com/gpu" if has("management") && device == "all" => {
                Some((0..uuids.len()).collect())
            }
            _ => None,
        }
    }

    /// The model's outcome, in the words of the recording.
    fn modelled(&self, uuids: &[String]) -> Value {
        let unchanged = || self.env.get(VISIBLE_DEVICES).cloned();
        let injected =
            |gpus: Vec<usize>| serde_json::json!({"gpus": gpus, "driver": true, "visible": "void"});
        let created = Created {
            env: &self.env,
            annotations: &self.annotations,
            is_privileged: self.privileged,
        };
        match self.runtime().modify(created) {
            Err(error) => serde_json::json!({"error": error.to_string()}),
            Ok(Modification::None) => {
                serde_json::json!({"gpus": [], "driver": false, "visible": unchanged()})
            }
            Ok(Modification::Cli(names)) => {
                serde_json::json!({"cli": names.join(","), "visible": unchanged()})
            }
            Ok(Modification::InMemory(names)) => match find_gpus(&names, uuids) {
                Ok(gpus) => injected(gpus),
                Err(name) => {
                    serde_json::json!({"error": if name.starts_with("GPU-") { "Not Found" } else { "Invalid Argument" }})
                }
            },
            Ok(Modification::Specs(names)) => {
                let missing: Vec<&str> = names
                    .iter()
                    .filter(|name| self.in_specs(name, uuids).is_none())
                    .map(String::as_str)
                    .collect();
                if !missing.is_empty() {
                    return serde_json::json!({"error": format!("unresolvable CDI devices {}", missing.join(", "))});
                }
                let mut gpus: Vec<usize> = names
                    .iter()
                    .filter_map(|name| self.in_specs(name, uuids))
                    .flatten()
                    .collect();
                gpus.sort_unstable();
                gpus.dedup();
                injected(gpus)
            }
        }
    }
}

#[test]
fn the_model_does_what_nvidias_runtime_did() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/recorded/nvidia_container_runtime.json");
    let Recorded { program, gpus, cases } = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    assert!(cases.len() >= 600, "{program}: {} cases", cases.len());
    let differs = |case: &&Case| case.modelled(&gpus) != case.outcome;
    let different: Vec<String> = cases
        .iter()
        .filter(differs)
        .map(|case| {
            let (mode, kind, trust, specs) = (&case.mode, &case.kind, &case.trust, &case.specs);
            format!(
                "{mode} {kind} {trust} {specs} {:?} {:?}: {} is modelled as {}",
                case.env,
                case.annotations,
                case.outcome,
                case.modelled(&gpus)
            )
        })
        .collect();
    assert!(
        different.is_empty(),
        "{} of {} cases of {program}:\n{}",
        different.len(),
        cases.len(),
        different.join("\n")
    );
}
