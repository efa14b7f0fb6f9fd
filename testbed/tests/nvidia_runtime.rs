//! The testbed's model of NVIDIA's container runtime, compared with recordings of the real program; and `gpu-probe`, the program
//! of the scenarios on real GPUs, with a stand-in for the driver's library.

#![expect(clippy::unwrap_used, reason = "a test that cannot go on should end")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use kit::kubelet::nvidia_runtime::{
    Created, Modification, NvidiaRuntime, RuntimeMode, VISIBLE_DEVICES, find_gpus,
};
use serde::Deserialize;
use serde_json::Value;
use tempfile::TempDir;

use super::cuda;

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

/// A folder with `gpu-probe`, device files, and the stand-in for libcuda.
struct ProbeFolder(TempDir);

impl ProbeFolder {
    fn new() -> Self {
        let folder = Self(tempfile::tempdir().unwrap());
        cuda::build(folder.0.path());
        std::fs::create_dir_all(folder.path("dev/nvidia-caps")).unwrap();
        for name in ["nvidiactl", "nvidia3", "null", "nvidia-caps/nvidia-cap1"] {
            std::fs::write(folder.path("dev").join(name), "").unwrap();
        }
        folder
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Runs commands with two GPUs of the stand-in, the first of 1 MiB; returns the exit status and the printed objects, without
    /// figures that differ from run to run.
    fn run(&self, commands: &str, env: &[(&str, &str)]) -> (Option<i32>, String) {
        let gpus = "000102030405060708090a0b0c0d0e0f:1048576 ffffffffffffffffffffffffffffffff:2097152";
        let ended = Command::new(self.path("gpu-probe"))
            .arg("--dev")
            .arg(self.path("dev"))
            .args(commands.split(' '))
            .env_clear()
            .env("LD_LIBRARY_PATH", self.path("lib"))
            .env("GPUS", gpus)
            .envs(env.iter().copied())
            .output()
            .unwrap();
        let mut lines = Vec::new();
        for line in String::from_utf8(ended.stdout).unwrap().lines() {
            let mut object: Value = serde_json::from_str(line).unwrap();
            for (key, value) in object.as_object_mut().unwrap() {
                if [
                    "contextMilliseconds",
                    "kernels",
                    "lateSeconds",
                    "longestMilliseconds",
                    "perSecond",
                ]
                .contains(&key.as_str())
                {
                    assert!(value.as_f64().unwrap() >= 0.0, "{line}");
                    *value = Value::Null;
                }
            }
            let folder = self.0.path().display().to_string();
            lines.push(object.to_string().replace(&folder, ""));
        }
        (ended.status.code(), lines.join("\n"))
    }
}

#[test]
fn the_probe_shows_and_uses_the_gpus_of_a_container() {
    let folder = ProbeFolder::new();
    let (status, printed) = folder.run(
        "see nvml memory nvml allocate=786432 fill nvml sum fill sum memory work=0.01 until=0 rate=0.01 hold=0",
        &[("NVIDIA_VISIBLE_DEVICES", "all"), ("CONTEXT", "4096")],
    );
    assert_eq!(status, Some(0), "{printed}");
    insta::assert_snapshot!(printed, @r###"
    {"command":"see","cudaVersion":"13.0","deniedFiles":[],"deviceFiles":["nvidia-caps/nvidia-cap1","nvidia3","nvidiactl"],"devices":[{"bytes":1048576,"name":"Stand-in \"0\"","uuid":"GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"},{"bytes":2097152,"name":"Stand-in \"1\"","uuid":"GPU-ffffffff-ffff-ffff-ffff-ffffffffffff"}],"library":"/lib/libcuda.so.1","variable":"all"}
    {"command":"nvml","processes":0,"reservedBytes":0,"totalBytes":1048576,"usedBytes":0}
    {"command":"memory","contextMilliseconds":null,"freeBytes":1044480,"totalBytes":1048576}
    {"command":"nvml","ownBytes":4096,"processes":1,"reservedBytes":0,"totalBytes":1048576,"usedBytes":4096}
    {"bytes":786432,"command":"allocate"}
    {"command":"fill","word":1}
    {"command":"nvml","ownBytes":790528,"processes":1,"reservedBytes":0,"totalBytes":1048576,"usedBytes":790528}
    {"command":"sum","expected":196608,"sum":196608}
    {"command":"fill","word":2}
    {"command":"sum","expected":393216,"sum":393216}
    {"command":"memory","contextMilliseconds":null,"freeBytes":258040,"totalBytes":1048576}
    {"command":"work","rounds":1,"wrong":0}
    {"command":"until","lateSeconds":null}
    {"command":"rate","kernels":null,"longestMilliseconds":null,"perSecond":null}
    {"command":"hold"}
    "###);
}

/// A machine may keep its kernel's log from programs without rights.
#[test]
fn the_probe_finds_lines_of_the_kernels_log_or_says_why_not() {
    let folder = ProbeFolder::new();
    let (status, printed) = folder.run("kernel-log=[ hold=0", &[]);
    assert_eq!(status, Some(0), "{printed}");
    let answer: Value = serde_json::from_str(printed.lines().next().unwrap()).unwrap();
    let lines = answer["lines"].as_array().unwrap();
    let is_read = answer.get("error").is_none();
    assert!(is_read || answer["error"]["call"] == "klogctl", "{printed}");
    assert!(
        lines.iter().all(|line| line.as_str().unwrap().contains('[')),
        "{printed}"
    );
    assert!(lines.len() <= 20 && (is_read || lines.is_empty()), "{printed}");
}

#[test]
fn the_probe_names_the_call_that_fails_and_its_error() {
    let folder = ProbeFolder::new();
    let mut lines = Vec::new();
    let cases: [(&str, &[(&str, &str)]); 10] = [
        ("see memory hold=9", &[("LD_LIBRARY_PATH", "/nowhere")]),
        ("see memory", &[("GPUS", "")]),
        ("allocate=2000000 fill", &[]),
        // NVML is for information alone, and a program goes on without it.
        ("nvml nvml fill", &[("NO_NVML", "1")]),
        ("fill", &[]),
        ("sum", &[]),
        ("allocate=4000 fill sum hold=9", &[("FLIPS", "1")]),
        ("allocate=4000 work=0.01", &[("FLIPS", "1")]),
        ("fault hold=9", &[]),
        ("files=/nowhere hold=9", &[]),
    ];
    for (commands, env) in cases {
        let (status, printed) = folder.run(commands, env);
        assert_eq!(status, Some(1), "{commands}: {printed}");
        lines.push(printed);
    }
    for misspelt in ["se", "allocate", "hold:9"] {
        assert_eq!(folder.run(misspelt, &[]), (Some(2), String::new()), "{misspelt}");
    }
    insta::assert_snapshot!(lines.join("\n"), @r###"
    {"command":"see","deniedFiles":[],"deviceFiles":["nvidia-caps/nvidia-cap1","nvidia3","nvidiactl"],"error":{"call":"dlopen","code":0,"name":"libcuda.so.1: cannot open shared object file: No such file or directory"}}
    {"command":"memory","error":{"call":"dlopen","code":0,"name":"libcuda.so.1: cannot open shared object file: No such file or directory"}}
    {"command":"see","deniedFiles":[],"deviceFiles":["nvidia-caps/nvidia-cap1","nvidia3","nvidiactl"],"error":{"call":"cuInit","code":100,"name":"CUDA_ERROR_NO_DEVICE"},"library":"/lib/libcuda.so.1"}
    {"command":"memory","error":{"call":"cuInit","code":100,"name":"CUDA_ERROR_NO_DEVICE"}}
    {"bytes":2000000,"command":"allocate","error":{"call":"cuMemAlloc_v2","code":2,"name":"CUDA_ERROR_OUT_OF_MEMORY"}}
    {"command":"nvml","error":{"call":"nvmlInit_v2","code":9,"name":"Driver Not Loaded"}}
    {"command":"nvml","error":{"call":"nvmlInit_v2","code":9,"name":"Driver Not Loaded"}}
    {"command":"fill","error":{"call":"fill","code":0,"name":"nothing is allocated"},"word":1}
    {"command":"fill","error":{"call":"fill","code":0,"name":"nothing is allocated"},"word":1}
    {"command":"sum","error":{"call":"sum","code":0,"name":"nothing is allocated"}}
    {"bytes":4000,"command":"allocate"}
    {"command":"fill","word":1}
    {"command":"sum","error":{"call":"sum","code":0,"name":"the memory has other words than were written"},"expected":1000,"sum":999}
    {"bytes":4000,"command":"allocate"}
    {"command":"work","rounds":1,"wrong":1}
    {"command":"fault","error":{"call":"cuCtxSynchronize","code":700,"name":"CUDA_ERROR_ILLEGAL_ADDRESS"}}
    {"command":"files","error":{"call":"opendir","code":2,"name":"No such file or directory"},"names":[]}
    "###);
}
