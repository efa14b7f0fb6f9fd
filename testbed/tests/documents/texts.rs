//! All texts that reach a person, from the sources into one file, and rules for them.
//!
//! The sources of [`SECTIONS`] have sentences for people alone: each string literal of three words or more is one, but for log
//! messages and tests. A text without a row fails; `UPDATE_DOCUMENTS=1` writes the file again.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use regex::Regex;

use super::{event_reasons, files, is_test, read, root};

/// The file with all texts.
const FILE: &str = "testbed/tests/documents/texts.txt";

/// The demand on texts that stand alone: those of `#[error(…)]`, and of failures of the command.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Demand {
    /// None: other tests have the amounts and steps of these texts.
    None,
    /// The object, and a step, unless the text says that something is not known yet: kubelet tries again.
    ObjectAndStep,
    /// A step.
    Step,
}

/// Texts of one kind.
struct Section {
    heading: &'static str,
    demand: Demand,
    /// Files and folders.
    sources: &'static [&'static str],
}

const SECTIONS: [Section; 8] = [
    Section {
        heading: "Why a node does not take a pod: condition and event of the pod, explain, fits, page",
        demand: Demand::None,
        sources: &[
            "scheduler/placement/src/data/reason.rs",
            "scheduler/src/index/resource_demand.rs",
            "scheduler/src/index/node_filter.rs",
            "scheduler/src/verdict/words.rs",
            "scheduler/src/read_api/explain/summary.rs",
            "scheduler/src/read_api/fit.rs",
            "scheduler/src/extender/group.rs",
        ],
    },
    Section {
        heading: "Mistakes in a pod: webhooks, and the filter without them",
        demand: Demand::None,
        sources: &[
            "proto/src/annotation",
            "proto/src/annotation.rs",
            "proto/src/record.rs",
            "proto/src/request",
            "proto/src/request.rs",
            "proto/src/topology.rs",
            "scheduler/src/admission/binding.rs",
            "scheduler/src/admission/validate.rs",
            "scheduler/src/admission/visible_devices.rs",
        ],
    },
    Section {
        heading: "Events on pods: a container does not start, or a record is not that of its containers",
        demand: Demand::ObjectAndStep,
        sources: &[
            "device-plugin/src/devices/fleet.rs",
            "device-plugin/src/inject/cdi/dir.rs",
            "device-plugin/src/node/pods.rs",
            "device-plugin/src/node/pods/placement.rs",
            "device-plugin/src/start.rs",
            "device-plugin/src/start/adopt.rs",
            "device-plugin/src/start/blocked.rs",
            "device-plugin/src/start/reconcile.rs",
            "device-plugin/src/start/verify.rs",
            "device-plugin/src/start/verify/capacity.rs",
            "device-plugin/src/start/verify/owner.rs",
        ],
    },
    Section {
        heading: "Events on pods and nodes: health, claims, GPUs that are not shared, and the node's report",
        demand: Demand::None,
        sources: &[
            "device-plugin/src/devices/health.rs",
            "device-plugin/src/devices/inventory.rs",
            "device-plugin/src/devices/inventory/error.rs",
            "device-plugin/src/publish/application_faults.rs",
            "device-plugin/src/publish/health_reaction.rs",
            "device-plugin/src/publish/memory_use/overrun.rs",
            "device-plugin/src/publish/report_problem.rs",
            "device-plugin/src/publish/vendor/warnings.rs",
            "device-plugin/src/run/devices.rs",
        ],
    },
    Section {
        heading: "Events on the scheduler's pod; events of the scheduler on nodes",
        demand: Demand::None,
        sources: &[
            "scheduler/src/closing_events.rs",
            "scheduler/src/leader/fence.rs",
            "scheduler/src/leader/version_check.rs",
        ],
    },
    Section {
        heading: "Conditions of devices: Injectable, Isolated, Limited; events on nodes about injection",
        demand: Demand::None,
        sources: &[
            "device-plugin/src/inject/cdi/vendor.rs",
            "device-plugin/src/inject/enforcement/decide.rs",
            "device-plugin/src/inject/injection/decide.rs",
            "device-plugin/src/inject/injection/detect.rs",
            "device-plugin/src/inject/own_container.rs",
            "device-plugin/src/publish/device_object.rs",
        ],
    },
    Section {
        heading: "Findings of doctor, each with its remedy behind it",
        demand: Demand::None,
        sources: &[
            "cli/src/doctor",
            "scheduler/src/read_api/doctor.rs",
            "scheduler/src/read_api/node_findings.rs",
        ],
    },
    Section {
        heading: "Answers and errors of the command",
        demand: Demand::Step,
        sources: &["cli/src"],
    },
];

/// Sources that name the reason of an event whose text is made elsewhere, or that have no texts for people.
const ELSEWHERE: [&str; 3] = [
    "device-plugin/src/run.rs",
    "cli/src/pictures.rs",
    "cli/src/main.rs",
];

/// The objects that a text may be about.
const OBJECTS: &str = r"(?i)\b(pods?|containers?|GPUs?|devices?|annotations?|kubelet|records?|spec)\b";
/// The words of a step, or of a state that passes by itself.
const STEPS: &str = r"(?i)`|--[a-z]|\b(delete|remove|check|ask for|ask an|name|names|correct|upgrade|write|wait|see|leave out|set|run|trying again|it starts once|not known|yet)\b";
/// Texts that need no step of their own: it follows in their field or stands around them, kubelet tries again by itself, or
/// nothing helps.
const WITHOUT_STEP: [&str; 14] = [
    "annotation {key} is missing: the pod was not placed by gpushare-scheduler",
    "cannot reach the read API at {at}: {reason}",
    "cannot read which pods have swapped their records",
    "cannot write to standard output: {0}",
    "cannot {action}: {reason}",
    "kubelet allocated the devices of pod {other} to pod {pod}, and their records could not be swapped",
    "pod {pod}: its CDI spec is not in place",
    "pod {pod}: this node cannot inject devices: {problem}",
    "pod {pod}: {refusal}",
    "standard output is closed",
    "cannot read {}: {error}",
    "document {number} ({of}): {error}",
    "document {}: {error}",
    "there is no pod {pod:?} that asks for devices",
];

/// One text of a source, and true if it stands alone.
struct Text {
    words: String,
    is_whole: bool,
}

/// A string literal with the words in front of it that decide about it, or the begin or end of a log message.
static LITERAL: LazyLock<Regex> = LazyLock::new(|| {
    Regex::new(concat!(
        r"(?P<log>\b(?:info|warn|debug|error|trace)!\()|(?P<end>\);)|",
        r"(?P<before>\breason = |#\[error\(\s*|(?:Input|Refused)\(\s*(?:format!\(\s*)?)?",
        r#"(?:'"'|"(?P<text>(?:[^"\\]|\\(?s:.))*)")"#,
    ))
    .unwrap()
});
static CONTINUED: LazyLock<Regex> = LazyLock::new(|| Regex::new(r"\\\n\s*").unwrap());

/// The texts of a source, in its order.
fn texts(source: &str) -> Vec<Text> {
    let code = source.split("#[cfg(test)]\nmod tests").next().unwrap_or_default();
    let is_code = |line: &&str| !line.trim_start().starts_with("//");
    let source = code.lines().filter(is_code).collect::<Vec<_>>().join("\n");
    let (mut found, mut is_log): (Vec<Text>, bool) = (Vec::new(), false);
    for groups in LITERAL.captures_iter(&source) {
        // A log message ends with its statement.
        is_log = groups.name("log").is_some() || (is_log && groups.name("end").is_none());
        let before = groups.name("before").map_or("", |before| before.as_str());
        let Some(text) = groups
            .name("text")
            .filter(|_| !is_log && !before.starts_with("reason"))
        else {
            continue;
        };
        let words = CONTINUED.replace_all(text.as_str(), "");
        let words = words.replace("\\\"", "\"").replace("\\n", " ").trim().to_owned();
        let is_known = found.iter().any(|known| known.words == words);
        if words.split_whitespace().count() >= 3 && !is_known {
            let is_whole = !before.is_empty();
            found.push(Text { words, is_whole });
        }
    }
    found
}

/// The sources of a section, by name; a file that an earlier section has is left out.
fn sources(section: &Section, seen: &mut BTreeSet<String>) -> Vec<String> {
    let mut found = Vec::new();
    for source in section.sources {
        let path = root().join(source);
        let paths = if path.is_dir() {
            files(&path, "rs")
        } else {
            vec![path]
        };
        let names = paths.iter().filter(|path| !is_test(path)).map(|path| name(path));
        found.extend(names.filter(|name| !ELSEWHERE.contains(&name.as_str()) && seen.insert(name.clone())));
    }
    found.sort();
    found
}

/// The path of a source in the repository.
fn name(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

#[test]
fn every_text_has_a_row_and_what_its_kind_demands() {
    let (objects, steps) = (Regex::new(OBJECTS).unwrap(), Regex::new(STEPS).unwrap());
    let (mut seen, mut faults) = (BTreeSet::new(), Vec::new());
    let mut file = "The texts that people read, by the sources that make them. A field in braces stands for a name or an amount.\n".to_owned();
    for section in &SECTIONS {
        writeln!(file, "\n# {}", section.heading).unwrap();
        for source in sources(section, &mut seen) {
            let content = read(&root().join(&source));
            let texts = texts(&content);
            let reasons: BTreeSet<String> = event_reasons(&content).into_iter().collect();
            if texts.is_empty() && reasons.is_empty() {
                continue;
            }
            let reasons: Vec<String> = reasons.into_iter().collect();
            write!(file, "\n{source} {}", reasons.join(" ")).unwrap();
            file.truncate(file.trim_end().len());
            file += "\n";
            for Text { words, is_whole } in texts {
                writeln!(file, "- {words}").unwrap();
                let is_exempt =
                    !is_whole || section.demand == Demand::None || WITHOUT_STEP.contains(&words.as_str());
                // A text of placeholders alone is that of its source.
                if is_exempt || !words.contains(char::is_alphabetic) {
                    continue;
                }
                if section.demand == Demand::ObjectAndStep && !objects.is_match(&words) {
                    faults.push(format!("{source}: no object: {words}"));
                }
                if !steps.is_match(&words) {
                    faults.push(format!("{source}: no step: {words}"));
                }
            }
        }
    }
    for folder in ["scheduler/src", "device-plugin/src"] {
        for path in files(&root().join(folder), "rs")
            .iter()
            .filter(|path| !is_test(path))
        {
            let name = name(path);
            let is_missing = !seen.contains(&name) && !ELSEWHERE.contains(&name.as_str());
            if is_missing && !event_reasons(&read(path)).is_empty() {
                faults.push(format!("{name} writes events, and is in no section"));
            }
        }
    }
    if std::env::var_os("UPDATE_DOCUMENTS").is_some() {
        fs::write(root().join(FILE), &file).unwrap();
    }
    let rows = fs::read_to_string(root().join(FILE)).unwrap_or_default();
    let rows: BTreeSet<&str> = rows.lines().collect();
    for line in file.lines().filter(|line| !rows.contains(line)) {
        faults.push(format!("{FILE} lacks: {line}"));
    }
    let lines: BTreeSet<&str> = file.lines().collect();
    for row in rows.difference(&lines) {
        faults.push(format!("{FILE} has a text that no source has: {row}"));
    }
    assert!(
        faults.is_empty(),
        "{}\nUPDATE_DOCUMENTS=1 writes the file again",
        faults.join("\n")
    );
}
