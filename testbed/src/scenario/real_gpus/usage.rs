//! The memory that a program uses: that of its context, and its whole use by NVML and by the node's plugin.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use proto::device::{ENFORCED_BY_DRIVER, ENFORCEMENT};
use serde_json::json;

use super::GpuScenario;
use super::answers::{Answer, Answers};
use super::plugin;
use super::target::{MIB, allocate_most};
use super::trial::{Finding, Trial, mib};

pub(super) const SCENARIOS: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-context" => context,
        "memory of a CUDA context";
    "gpu-measured" => measured,
        "the memory of two programs by the plugin and by NVML";
};

/// Most bytes that a program may use beyond its context and its block. The driver rounds the block up to pages of 2 MiB; the rest
/// is for tables that it makes at a first allocation.
const PAGES: u64 = 32 * MIB;

/// The memory that a program uses on its GPU, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ProgramMemory {
    /// With a CUDA context and nothing else.
    context: u64,
    /// The size of the block that it has allocated.
    allocated: u64,
    /// With the context and the block.
    used: u64,
    /// True if NVML lists the program. Otherwise the figures are differences of the memory in use on the whole GPU.
    is_listed: bool,
}

impl ProgramMemory {
    /// The memory of the program with these answers: of NVML before its context, with the context, and with the block.
    ///
    /// # Errors
    /// The reason for which it is not known.
    fn of(answers: &Answers) -> Result<Self, String> {
        let by_nvml: Vec<_> = answers.all("nvml").collect();
        if let Some(error) = by_nvml.iter().find_map(|answer| answer.error.as_ref()) {
            return Err(format!("NVML does not answer in the container: {error}"));
        }
        let [before, with_context, with_block, ..] = by_nvml[..] else {
            return Err("the program has not asked NVML three times".to_owned());
        };
        let allocated = answers.last("allocate").and_then(|answer| answer.bytes);
        let allocated = allocated.ok_or("the program has allocated nothing")?;
        let listed = with_context.own_bytes.zip(with_block.own_bytes);
        let of_gpu = || {
            let before = before.used_bytes?;
            let beyond = |answer: &Answer| answer.used_bytes?.checked_sub(before);
            Some((beyond(with_context)?, beyond(with_block)?))
        };
        let (context, used) = listed
            .or_else(of_gpu)
            .ok_or("NVML does not list the program, and less of the GPU is in use than before it")?;
        Ok(Self {
            context,
            allocated,
            used,
            is_listed: listed.is_some(),
        })
    }

    /// The source of the figures, for people.
    fn source(self) -> &'static str {
        if self.is_listed {
            "by NVML in the container"
        } else {
            "by the memory in use on the GPU, as NVML does not list the program in the container"
        }
    }
}

/// Starts a pod that allocates most of its share, and holds it; returns its memory, or the reason that it is not known.
async fn hold_memory(trial: &Trial, name: &str) -> Result<Result<ProgramMemory, String>> {
    let share = trial.gpu.part(16);
    let commands = [
        "see",
        "nvml",
        "memory",
        "nvml",
        &allocate_most(share),
        "nvml",
        "hold=3600",
    ];
    trial.start(name, &commands, share).await?;
    let answers = trial.compared(name, "hold").await?;
    Ok(ProgramMemory::of(&answers))
}

async fn context(trial: &mut Trial) -> Result<Finding> {
    let memory = match hold_memory(trial, "context").await? {
        Ok(memory) => memory,
        Err(reason) => return Ok(Finding::not_run(reason)),
    };
    let text = format!(
        "{} of the pod's share; with a block of {} the program uses {}, {}",
        mib(memory.context),
        mib(memory.allocated),
        mib(memory.used),
        memory.source()
    );
    // Other programs change the figures of the whole GPU.
    if memory.is_listed {
        let beyond = memory.used.checked_sub(memory.context + memory.allocated);
        ensure!(beyond.is_some_and(|beyond| beyond <= PAGES), "{text}");
    }
    Ok(Finding::new(text)
        .figure("contextBytes", memory.context)
        .figure("allocatedBytes", memory.allocated)
        .figure("usedBytes", memory.used)
        .figure("listedByNvml", memory.is_listed))
}

/// The longest wait for the plugin's figure: it measures every 15 s.
const MEASURED_WITHIN: Duration = Duration::from_secs(45);

/// The reason that the plugin of the GPU's node has no figure of a program's memory, if it has none.
async fn not_measured(trial: &Trial) -> Result<Option<String>> {
    let metrics = match plugin::metrics(trial).await {
        Ok(metrics) => metrics,
        Err(error) => return Ok(Some(format!("{error:#}"))),
    };
    let level = trial.device()?.labels.remove(ENFORCEMENT);
    let is_measured = metrics.has_processes() || level.is_some_and(|level| level == ENFORCED_BY_DRIVER);
    let reason = "the plugin does not measure memory: it lacks the component measure-memory";
    Ok((!is_measured).then(|| reason.to_owned()))
}

/// Waits until `accepts` takes the plugin's figure of a pod's memory; returns it, or the last one after [`MEASURED_WITHIN`].
async fn until_figure(trial: &Trial, pod: &str, accepts: impl Fn(u64) -> bool) -> Result<u64> {
    let began = Instant::now();
    loop {
        // The figure is absent until the plugin has measured the container.
        let metrics = plugin::metrics(trial).await.unwrap_or_default();
        let used = metrics.used((&trial.world.namespace, pod), &trial.gpu.uuid);
        if used.is_some_and(&accepts) || began.elapsed() > MEASURED_WITHIN {
            return used
                .with_context(|| format!("the plugin has no figure for {pod} after {MEASURED_WITHIN:?}"));
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
}

/// The plugin's figure of the memory of a pod that uses more than its share; none on a node whose plugin does not measure.
pub(super) async fn beyond_share(trial: &Trial, pod: &str, share: u64) -> Result<Option<u64>> {
    match not_measured(trial).await? {
        Some(_) => Ok(None),
        None => Ok(Some(until_figure(trial, pod, |used| used > share).await?)),
    }
}

async fn measured(trial: &mut Trial) -> Result<Finding> {
    if let Some(reason) = not_measured(trial).await? {
        return Ok(Finding::not_run(reason));
    }
    let mut programs = Vec::new();
    for name in ["measured-0", "measured-1"] {
        match hold_memory(trial, name).await? {
            Ok(memory) => programs.push((name, memory)),
            Err(reason) => return Ok(Finding::not_run(reason)),
        }
    }
    let (mut texts, mut figures) = (Vec::new(), Vec::new());
    for (name, memory) in programs {
        // Both figures are the driver's count of one process, which holds still; one of them may be in whole MiB.
        let tolerance = if memory.is_listed { MIB } else { PAGES };
        let is_equal = |used: u64| used.abs_diff(memory.used) <= tolerance;
        let by_plugin = until_figure(trial, name, is_equal).await?;
        let text = format!(
            "{} by the plugin, and {} {}: {} of the context, and a block of {}",
            mib(by_plugin),
            mib(memory.used),
            memory.source(),
            mib(memory.context),
            mib(memory.allocated)
        );
        let difference = by_plugin.abs_diff(memory.used);
        ensure!(is_equal(by_plugin), "{text}; they differ by {difference} bytes");
        texts.push(text);
        figures.push(json!({
            "pluginBytes": by_plugin, "nvmlBytes": memory.used, "contextBytes": memory.context,
            "allocatedBytes": memory.allocated, "listedByNvml": memory.is_listed,
        }));
    }
    Ok(Finding::new(texts.join("; ")).figure("pods", figures))
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    /// NVML's answers: the GPU's memory in use, and the program's own if it is listed.
    fn log(answers: &[(u64, Option<u64>)]) -> String {
        let mut lines = vec![r#"{"command":"allocate","bytes":700}"#.to_owned()];
        for (used, own) in answers {
            let own = own.map_or(String::new(), |own| format!(r#","ownBytes":{own}"#));
            lines.push(format!(r#"{{"command":"nvml","usedBytes":{used}{own}}}"#));
        }
        lines.join("\n")
    }

    #[rstest]
    #[case::listed(&[(5, None), (525, Some(520)), (1300, Some(1220))], Ok((520, 1220, true)))]
    #[case::not_listed(&[(5, None), (525, None), (1225, None)], Ok((520, 1220, false)))]
    #[case::listed_once(&[(5, None), (525, Some(520)), (1225, None)], Ok((520, 1220, false)))]
    #[case::others_ended(&[(900, None), (525, None), (1225, None)], Err("less of the GPU is in use"))]
    #[case::ended_early(&[(5, None), (525, Some(520))], Err("three times"))]
    fn the_memory_of_a_program_is_its_own_or_that_which_came_with_it(
        #[case] answers: &[(u64, Option<u64>)],
        #[case] expected: Result<(u64, u64, bool), &str>,
    ) {
        let found = ProgramMemory::of(&Answers::parse(&log(answers)));
        match (found, expected) {
            (Ok(found), Ok(expected)) => {
                assert_eq!((found.context, found.used, found.is_listed), expected);
                assert_eq!(found.allocated, 700);
            }
            (Err(reason), Err(words)) => assert!(reason.contains(words), "{reason}"),
            (found, _) => panic!("{found:?}"),
        }
    }

    #[test]
    fn an_error_of_nvml_is_the_reason() {
        let error = r#"{"command":"nvml","error":{"call":"dlopen","code":0,"name":"none"}}"#;
        let reason = ProgramMemory::of(&Answers::parse(error)).unwrap_err();
        assert_eq!(reason, "NVML does not answer in the container: dlopen: none");
    }
}
