//! The answers of `gpu-probe` (`testbed/gpu-probe`) in one container, and their comparison with the pod's record. Pure.

use std::collections::BTreeSet;

use serde::Deserialize;

/// The answers in the order of the commands.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Answers(Vec<Answer>);

/// The answer to one command; a field is absent if the command does not have it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Answer {
    pub(super) command: String,
    pub(super) error: Option<ProbeError>,
    /// The value of `NVIDIA_VISIBLE_DEVICES`.
    pub(super) variable: Option<String>,
    /// The path of the driver's library.
    pub(super) library: Option<String>,
    pub(super) cuda_version: Option<String>,
    /// Names of NVIDIA's device files below `/dev`.
    pub(super) device_files: Vec<String>,
    /// The device files among these that cannot be opened.
    pub(super) denied_files: Vec<String>,
    /// The GPUs that CUDA lists.
    pub(super) devices: Vec<CudaDevice>,
    pub(super) context_milliseconds: Option<f64>,
    pub(super) free_bytes: Option<u64>,
    /// The memory of the GPU by NVML, that in use on it, and that of the program, which NVML may not list.
    pub(super) total_bytes: Option<u64>,
    pub(super) used_bytes: Option<u64>,
    pub(super) own_bytes: Option<u64>,
    /// The bytes that `allocate` has allocated.
    pub(super) bytes: Option<u64>,
    /// The times that `work` has filled its memory and added it up, and those of them with a wrong sum.
    pub(super) rounds: Option<u64>,
    pub(super) wrong: Option<u64>,
    /// The kernels that `rate` has run per second, and the longest time of one of them.
    pub(super) per_second: Option<f64>,
    pub(super) longest_milliseconds: Option<f64>,
    /// The seconds by which the program was ready after the time of `until`.
    pub(super) late_seconds: Option<f64>,
    /// The names of the files of a directory.
    pub(super) names: Vec<String>,
    /// The lines of the kernel's log that contain a text.
    pub(super) lines: Vec<String>,
}

/// The call of CUDA, NVML or the loader that failed in `gpu-probe`, with its result and the name of that.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize, thiserror::Error)]
#[error("{call}: {name}")]
pub(super) struct ProbeError {
    pub(super) call: String,
    pub(super) code: i64,
    pub(super) name: String,
}

/// A GPU as CUDA reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub(super) struct CudaDevice {
    pub(super) uuid: String,
    pub(super) bytes: u64,
}

impl Answers {
    /// The answers in a container's log. Other lines, and a last one that is not complete yet, are left out.
    pub(super) fn parse(log: &str) -> Self {
        let lines = log.lines().filter(|line| line.starts_with('{'));
        Self(lines.filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// The last answer to a command.
    pub(super) fn last(&self, command: &str) -> Option<&Answer> {
        self.0.iter().rev().find(|answer| answer.command == command)
    }

    /// The answers to a command.
    pub(super) fn all<'a>(&'a self, command: &'a str) -> impl Iterator<Item = &'a Answer> {
        self.0.iter().filter(move |answer| answer.command == command)
    }

    /// The first error of a command, but for commands that show what a container sees: their errors are a result.
    pub(super) fn failed(&self) -> Option<(&Answer, &ProbeError)> {
        let fails = |answer: &&Answer| !["see", "nvml", "kernel-log"].contains(&answer.command.as_str());
        let mut failed = self.0.iter().filter(fails);
        failed.find_map(|answer| Some((answer, answer.error.as_ref()?)))
    }
}

impl Answer {
    /// Compares what a container sees with the GPUs of its pod's record: minor numbers and UUIDs.
    ///
    /// # Errors
    /// A sentence about the difference.
    pub(super) fn compare_view(&self, recorded: &[(i32, String)]) -> Result<(), String> {
        let minors: BTreeSet<i32> = self.minors().collect();
        let expected: BTreeSet<i32> = recorded.iter().map(|(minor, _)| *minor).collect();
        if minors != expected {
            return Err(format!(
                "its record has the minors {expected:?}, it has the device files {minors:?}"
            ));
        }
        let denied: Vec<&str> = self
            .denied_files
            .iter()
            .map(String::as_str)
            .filter(|name| is_needed(name))
            .collect();
        if !denied.is_empty() {
            return Err(format!("it cannot open {}", denied.join(", ")));
        }
        if let Some(error) = &self.error {
            return Err(format!("CUDA does not start: {error}"));
        }
        if self.library.is_none() {
            return Err("the driver's library is not there".to_owned());
        }
        let uuids: BTreeSet<&str> = self.devices.iter().map(|device| device.uuid.as_str()).collect();
        let expected: BTreeSet<&str> = recorded.iter().map(|(_, uuid)| uuid.as_str()).collect();
        if uuids != expected {
            return Err(format!("its record has {expected:?}, CUDA has {uuids:?}"));
        }
        Ok(())
    }

    /// The minor numbers of the GPUs whose device files are there.
    fn minors(&self) -> impl Iterator<Item = i32> {
        let names = self.device_files.iter();
        names.filter_map(|name| name.strip_prefix("nvidia")?.parse().ok())
    }

    /// True if any GPU can be reached: by its device file, or by CUDA.
    pub(super) fn sees_gpu(&self) -> bool {
        self.minors().next().is_some() || !self.devices.is_empty()
    }
}

/// Returns true if CUDA opens the device file: that of a GPU, or one of two others. Further files, such as those below
/// `nvidia-caps`, may be for root alone.
fn is_needed(file: &str) -> bool {
    let minor = file.strip_prefix("nvidia").unwrap_or_default();
    ["nvidiactl", "nvidia-uvm"].contains(&file) || minor.parse::<i32>().is_ok()
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    const SEEN: &str = r#"{"command":"see","variable":"void","deviceFiles":["nvidia1","nvidiactl","nvidia-uvm"],"library":"/lib/libcuda.so.1","devices":[{"uuid":"GPU-b","name":"H200","bytes":9}]}"#;

    #[rstest]
    #[case::as_recorded(SEEN, &[(1, "GPU-b")], None)]
    #[case::another_gpu(SEEN, &[(0, "GPU-b")], Some("has the device files {1}"))]
    #[case::one_of_two(SEEN, &[(0, "GPU-a"), (1, "GPU-b")], Some("has the minors {0, 1}"))]
    #[case::another_uuid(SEEN, &[(1, "GPU-a")], Some(r#"CUDA has {"GPU-b"}"#))]
    #[case::closed_file(r#"{"command":"see","deviceFiles":["nvidia1"],"deniedFiles":["nvidia1"]}"#, &[(1, "GPU-b")], Some("cannot open nvidia1"))]
    #[case::closed_capability(r#"{"command":"see","deviceFiles":["nvidia1","nvidia-caps/nvidia-cap1"],"deniedFiles":["nvidia-caps/nvidia-cap1"],"library":"l","devices":[{"uuid":"GPU-b","bytes":9}]}"#, &[(1, "GPU-b")], None)]
    #[case::no_library(r#"{"command":"see","deviceFiles":["nvidia1"],"error":{"call":"dlopen","code":0,"name":"none"}}"#, &[(1, "GPU-b")], Some("dlopen: none"))]
    fn a_container_sees_the_gpus_of_its_record(
        #[case] line: &str,
        #[case] recorded: &[(i32, &str)],
        #[case] expected: Option<&str>,
    ) {
        let recorded: Vec<(i32, String)> = recorded
            .iter()
            .map(|(minor, id)| (*minor, (*id).to_owned()))
            .collect();
        let answers = Answers::parse(line);
        let difference = answers.last("see").unwrap().compare_view(&recorded).err();
        match (difference, expected) {
            (None, None) => {}
            (Some(text), Some(words)) => assert!(text.contains(words), "{text}"),
            (difference, _) => panic!("{difference:?}"),
        }
    }

    #[test]
    fn answers_are_read_from_a_log_that_is_still_written() {
        let log = format!(
            "DEVICE_NODES=/dev/nvidia1\n{SEEN}\n{}\n{}\n{}",
            r#"{"command":"work","rounds":1,"wrong":0}"#,
            r#"{"command":"work","rounds":5,"wrong":0,"error":{"call":"cuCtxSynchronize","code":700,"name":"CUDA_ERROR_ILLEGAL_ADDRESS"}}"#,
            r#"{"command":"rate","kern"#
        );
        let answers = Answers::parse(&log);
        assert_eq!(answers.last("work").unwrap().rounds, Some(5));
        assert_eq!(answers.last("rate"), None);
        let (answer, error) = answers.failed().unwrap();
        assert_eq!(
            (answer.command.as_str(), error.to_string().as_str()),
            ("work", "cuCtxSynchronize: CUDA_ERROR_ILLEGAL_ADDRESS")
        );
    }

    #[rstest]
    #[case::nothing(
        r#"{"command":"see","variable":"all","error":{"call":"dlopen","code":0,"name":"none"}}"#,
        false
    )]
    #[case::control_file(
        r#"{"command":"see","deviceFiles":["nvidiactl","nvidia-caps/nvidia-cap1"]}"#,
        false
    )]
    #[case::device_file(r#"{"command":"see","deviceFiles":["nvidia0"]}"#, true)]
    #[case::by_cuda(r#"{"command":"see","devices":[{"uuid":"GPU-a","bytes":1}]}"#, true)]
    fn a_gpu_is_seen_by_its_device_file_or_by_cuda(#[case] line: &str, #[case] expected: bool) {
        assert_eq!(Answers::parse(line).last("see").unwrap().sees_gpu(), expected);
        assert!(Answers::parse(line).failed().is_none());
    }
}
