//! Documents name tests, scenarios, files and headings that exist.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should end"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proto::memory_overrun::OVERRUN_TOLERANCE_PERCENT;
use proto::pod::Pod;
use proto::request::PodRequest;
use proto::resource::{HAMI_NODE, ISOLATION_PROVIDER, ResourceNames};
use regex::Regex;
use serde::Deserialize;
use serde_json::{Value, json};

mod commands;
mod contributing;
mod quotas;
mod texts;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// All files below a folder with this extension, without build outputs.
fn files(folder: &Path, extension: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if path.is_dir() && name != "target" && !name.starts_with('.') {
            found.extend(files(&path, extension));
        } else if path.extension().is_some_and(|found| found == extension) {
            found.push(path);
        }
    }
    found
}

/// The texts in backticks.
fn code_spans(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

/// The last cell of a row of a table.
fn last_cell(row: &str) -> &str {
    let row = row.trim().trim_end_matches('|');
    row.rsplit_once(" | ").map_or("", |(_, cell)| cell)
}

/// `docs/failure-modes.md` names a test, a test file, a module, a scenario or a fault of chaos for each row.
#[test]
fn every_failure_mode_names_an_existing_test() {
    let sources: String = files(&root(), "rs").iter().map(|path| read(path)).collect();
    let mut missing = Vec::new();
    let document = read(&root().join("docs/failure-modes.md"));
    let rows = document
        .lines()
        .skip_while(|line| !line.ends_with("| Shown by |"))
        .take_while(|line| !line.starts_with("## Pods lost"))
        .filter(|line| line.starts_with("| ") && !line.ends_with("| Shown by |"));
    let mut n_rows = 0;
    for row in rows.filter(|row| row.matches(" | ").count() == 3) {
        let spans = code_spans(last_cell(row));
        if spans.is_empty() && !row.contains("chaos") {
            missing.push(format!("no test: {row}"));
        }
        for span in spans {
            if !exists(span, &sources) {
                missing.push(span.to_owned());
            }
        }
        n_rows += 1;
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n_rows > 50, "{n_rows} rows");
}

/// A test as `folder/tests/file::name` or `crate::module::name`, a module, a file, a scenario, or a fault of chaos.
fn exists(span: &str, sources: &str) -> bool {
    let (place, name) = span.rsplit_once("::").unwrap_or(("", span));
    let file = span.split("::").next().unwrap_or_default();
    if span.starts_with("cargo ") {
        return true;
    }
    if file.contains('/') {
        let file = root().join(file);
        return (file.exists() || file.with_extension("rs").exists())
            && (place.is_empty() || is_defined(name, sources));
    }
    if !place.is_empty() && place != "…" {
        return is_module(place) && (is_module(span) || is_defined(name, sources));
    }
    // A scenario may stand behind the command that runs it.
    let scenario = name.rsplit(' ').next().unwrap_or_default();
    is_defined(name, sources) || sources.contains(&format!("\"{scenario}\""))
}

fn is_defined(name: &str, sources: &str) -> bool {
    let is_variant = name.starts_with(char::is_uppercase) && sources.contains(&format!("::{name}"));
    is_variant
        || [format!("fn {name}("), format!("mod {name} {{")]
            .iter()
            .any(|text| sources.contains(text))
}

/// `crate::module::module`, as far as modules are files.
fn is_module(path: &str) -> bool {
    let mut segments = path.split("::").filter(|segment| *segment != "tests");
    let mut folder = root().join(segments.next().unwrap_or_default()).join("src");
    folder.exists()
        && segments.all(|segment| {
            folder.push(segment);
            folder.exists() || folder.with_extension("rs").exists()
        })
}

/// The code map of `docs/architecture.md` names modules that exist.
#[test]
fn the_code_map_is_current() {
    let mut missing = Vec::new();
    let mut folder = PathBuf::new();
    let mut n_modules = 0;
    for line in read(&root().join("docs/architecture.md")).lines() {
        let cell = line
            .trim_start_matches("| ")
            .split(" |")
            .next()
            .unwrap_or_default();
        if let Some(path) = cell.strip_prefix("in `") {
            folder = root().join(path.trim_end_matches('`'));
        } else if line.is_empty() {
            folder.clear();
        }
        if !line.starts_with("| `") || folder.as_os_str().is_empty() {
            continue;
        }
        for module in code_spans(cell) {
            n_modules += 1;
            let path = folder.join(module);
            if !path.exists() && !path.with_extension("rs").exists() {
                missing.push(path);
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n_modules > 30, "{n_modules} modules");
}

/// The code map lists the folders of the device plugin in the order of their dependencies.
#[test]
fn folders_of_the_device_plugin_use_only_those_below() {
    let document = read(&root().join("docs/architecture.md"));
    let map = document.split("| in `device-plugin/src` |").nth(1).unwrap();
    let rows = map.lines().take_while(|line| !line.is_empty());
    let rows: Vec<Vec<&str>> = rows
        .filter_map(|row| row.strip_prefix("| ")?.split(" |").next())
        .map(code_spans)
        .collect();
    assert!(rows.len() > 5, "{rows:?}");
    let source = root().join("device-plugin/src");
    let mut upward = Vec::new();
    for (row, folders) in rows.iter().enumerate() {
        let above = rows[..row].concat();
        for folder in folders {
            let mut paths = files(&source.join(folder), "rs");
            paths.push(source.join(folder).with_extension("rs"));
            for path in paths.iter().filter(|path| !is_test(path)) {
                let text = read(path);
                let code = text.lines().take_while(|line| *line != "mod tests {");
                for line in code.filter(|line| !line.trim_start().starts_with("//")) {
                    let mut used = line.split("crate::").skip(1);
                    if used.any(|path| above.contains(&path.split(&[':', ';', ' ']).next().unwrap())) {
                        upward.push(format!("{}: {line}", path.display()));
                    }
                }
            }
        }
    }
    assert!(upward.is_empty(), "{upward:#?}");
}

/// The anchor that a heading gets: lower case, without punctuation, with hyphens for spaces.
fn anchor(heading: &str) -> String {
    let heading = heading.trim_start_matches('#').trim().to_lowercase();
    let kept = heading
        .chars()
        .filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[test]
fn every_link_has_a_target() {
    let documents = documents_for_readers();
    let mut anchors = BTreeMap::new();
    for document in &documents {
        let text = read(document);
        let headings = text.lines().filter(|line| line.starts_with('#'));
        anchors.insert(
            document.canonicalize().unwrap(),
            headings.map(anchor).collect::<Vec<_>>(),
        );
    }
    let mut broken = Vec::new();
    for document in &documents {
        let text = read(document);
        for rest in text.split("](").skip(1) {
            let link = rest.split(')').next().unwrap_or_default();
            if link.starts_with("http") {
                continue;
            }
            let (file, heading) = link.split_once('#').unwrap_or((link, ""));
            let target = if file.is_empty() {
                document.clone()
            } else {
                document.parent().unwrap().join(file)
            };
            let is_known = target.canonicalize().is_ok_and(|target| {
                let headings = anchors.get(&target);
                heading.is_empty() || headings.is_some_and(|found| found.iter().any(|found| found == heading))
            });
            if !is_known {
                broken.push(format!("{}: {link}", document.display()));
            }
        }
    }
    assert!(broken.is_empty(), "{broken:#?}");
}

/// The blocks of code in a language, with what they are indented by taken away.
fn blocks(text: &str, language: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut open: Option<(usize, Vec<&str>)> = None;
    for line in text.lines() {
        let indent = line.len() - line.trim_start().len();
        match &mut open {
            Some((_, lines)) if line.trim() == "```" => {
                found.push(lines.join("\n"));
                open = None;
            }
            Some((indent, lines)) => lines.push(line.get(*indent..).unwrap_or_default()),
            None if line.trim() == format!("```{language}") => open = Some((indent, Vec::new())),
            None => {}
        }
    }
    found
}

fn documents_for_readers() -> Vec<PathBuf> {
    let mut documents = files(&root().join("docs"), "md");
    documents.extend(
        ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"].map(|name| root().join(name)),
    );
    documents
}

#[test]
fn every_block_of_yaml_is_yaml() {
    let mut n_blocks = 0;
    for document in documents_for_readers() {
        for block in blocks(&read(&document), "yaml") {
            n_blocks += 1;
            for part in serde_yaml_ng::Deserializer::from_str(&block) {
                let parsed = Value::deserialize(part);
                assert!(parsed.is_ok(), "{}: {parsed:?}\n{block}", document.display());
            }
        }
    }
    assert!(n_blocks > 20, "{n_blocks} blocks");
}

/// Scripts and folders that commands name exist.
#[test]
fn commands_name_files_that_exist() {
    let mut missing = Vec::new();
    let mut n_named = 0;
    for document in documents_for_readers() {
        for block in blocks(&read(&document), "sh") {
            for word in block.split_whitespace() {
                let path = word.trim_start_matches("../gpushare/");
                if path.starts_with("deploy/") || path.starts_with(".ci/") {
                    n_named += 1;
                    if !root().join(path).exists() {
                        missing.push(format!("{}: {word}", document.display()));
                    }
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n_named > 10, "{n_named} files");
}

/// Errors, alerts, scripts and comments name documents that exist.
#[test]
fn documents_that_sources_name_exist() {
    let mut missing = Vec::new();
    let mut n_named = 0;
    for file in ["rs", "yaml", "sh", "txt"]
        .iter()
        .flat_map(|kind| files(&root(), kind))
    {
        let text = read(&file);
        for rest in text.split("docs/").skip(1) {
            let is_of_name = |letter: char| letter.is_ascii_alphanumeric() || "-_.".contains(letter);
            let length = rest.find(|letter| !is_of_name(letter)).unwrap_or(rest.len());
            let Some((name, _)) = rest.get(..length).and_then(|name| name.split_once(".md")) else {
                continue;
            };
            n_named += 1;
            if !root().join("docs").join(format!("{name}.md")).exists() {
                missing.push(format!("{}: docs/{name}.md", file.display()));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n_named > 50, "{n_named} names");
}

/// Each example is the limits of a container that asks for something.
#[test]
fn the_cookbook_s_pods_are_understood() {
    let blocks = blocks(&read(&root().join("docs/cookbook.md")), "yaml");
    assert!(blocks.len() > 5);
    for block in blocks {
        let limits: Value = serde_yaml_ng::from_str(&block).unwrap();
        let pod = json!({"metadata": {"name": "p"}, "spec": {"containers": [{"name": "c", "resources": {"limits": limits}}]}});
        let request = PodRequest::read_new(&Pod::deserialize(pod).unwrap(), &ResourceNames::default());
        assert!(matches!(request, Ok(Some(_))), "{request:?}\n{block}");
    }
}

/// The book has every page once.
#[test]
fn the_summary_lists_every_page() {
    let summary = read(&root().join("docs/SUMMARY.md"));
    let mut listed: Vec<&str> = summary
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .collect();
    listed.sort_unstable();
    let pages = files(&root().join("docs"), "md");
    let names = pages
        .iter()
        .map(|page| page.file_name().unwrap().to_str().unwrap());
    let mut pages: Vec<&str> = names.filter(|name| *name != "SUMMARY.md").collect();
    pages.sort_unstable();
    assert_eq!(listed, pages);
}

/// The first sentence of each page says for whom it is.
#[test]
fn every_page_names_its_readers() {
    let pages = files(&root().join("docs"), "md");
    let is_named = |page: &PathBuf| {
        read(page)
            .split("\n\n")
            .nth(1)
            .is_some_and(|first| first.starts_with("For "))
    };
    let missing: Vec<PathBuf> = pages
        .into_iter()
        .filter(|page| !page.ends_with("SUMMARY.md") && !is_named(page))
        .collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// Every alert has its section in the runbook, and a test.
#[test]
fn every_alert_is_explained_and_tested() {
    let monitoring = root().join("deploy/monitoring");
    let rules: Value = serde_yaml_ng::from_str(&read(&monitoring.join("alerts.yaml"))).unwrap();
    let (runbook, tests) = (
        read(&root().join("docs/monitoring.md")),
        read(&monitoring.join("alerts.test.yaml")),
    );
    let rules = rules.pointer("/groups/0/rules").unwrap().as_array().unwrap();
    assert!(rules.len() > 10);
    let chart = root().join("deploy/helm/gpushare");
    let values: Value = serde_yaml_ng::from_str(&read(&chart.join("values.yaml"))).unwrap();
    let book = values.pointer("/alerts/runbookUrl").unwrap().as_str().unwrap();
    assert!(
        book.starts_with("https://") && book.ends_with("/monitoring.html"),
        "{book}"
    );
    let mut naming_pods = Vec::new();
    for rule in rules {
        let name = rule.get("alert").unwrap().as_str().unwrap();
        assert!(runbook.contains(&format!("\n### {name}\n")), "{name}");
        assert!(tests.contains(&format!("alertname: {name}\n")), "{name}");
        let description = rule
            .pointer("/annotations/description")
            .unwrap()
            .as_str()
            .unwrap();
        let expression = rule.get("expr").unwrap().as_str().unwrap();
        if name == "GpushareLimitOverrun" {
            // The alert and the event on the pod have one limit.
            let limit = format!("given_bytes * 1.{OVERRUN_TOLERANCE_PERCENT:02}");
            assert!(expression.contains(&limit), "{expression}");
        }
        // The value of the others is always the same.
        let is_figure = !["== 0", "== 1"].iter().any(|end| expression.ends_with(end));
        assert_eq!(is_figure, description.contains("$value"), "{name}: {description}");
        if description.contains("{{ $labels.namespace }}/{{ $labels.pod }}") {
            naming_pods.push(name);
        }
        let link = rule.pointer("/annotations/runbook_url").unwrap();
        assert_eq!(link, &format!("{book}#{}", name.to_lowercase()));
    }
    let with_pod_labels = [
        "GpushareWatchStale",
        "GpushareLimitOverrun",
        "GpushareLeaderRefused",
    ];
    assert_eq!(naming_pods, with_pod_labels);
    // The chart puts its value in place of the default address, in a link to the same file.
    let template = read(&chart.join("templates/gpushare-prometheusrule.yaml"));
    assert!(template.contains(&format!("replace {book:?} .Values.alerts.runbookUrl")));
    assert_eq!(
        read(&chart.join("files/alerts.yaml")),
        read(&monitoring.join("alerts.yaml"))
    );
}

/// Alerts, dashboards and documents name metrics that the daemons serve.
#[test]
fn metrics_exist() {
    let mut sources = String::new();
    for folder in ["scheduler/src", "device-plugin/src", "daemon/src"] {
        for path in files(&root().join(folder), "rs") {
            sources += &read(&path);
        }
    }
    let mut texts = documents_for_readers();
    texts.extend(files(&root().join("deploy/monitoring"), "json"));
    texts.push(root().join("deploy/monitoring/alerts.yaml"));
    let mut missing = Vec::new();
    for path in texts {
        let text = read(&path);
        for prefix in ["gpushare_scheduler_", "gpushare_device_plugin_"] {
            for rest in text.split(prefix).skip(1) {
                let length = rest.find(|c: char| !(c.is_ascii_lowercase() || c == '_'));
                let name = rest.get(..length.unwrap_or(rest.len())).unwrap_or_default();
                // A family of metrics is written with an asterisk, and ends with an underscore.
                if !name.ends_with('_') && !is_metric(name, prefix, &sources) {
                    missing.push(format!("{}: {prefix}{name}", path.display()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// The registry adds the endings.
fn is_metric(name: &str, prefix: &str, sources: &str) -> bool {
    let mut names = vec![name];
    for ending in [
        "_total",
        "_seconds",
        "_info",
        "_bucket",
        "_count",
        "_sum",
        "_seconds_bucket",
    ] {
        names.extend(name.strip_suffix(ending));
    }
    names.iter().any(|name| {
        sources.contains(&format!("\"{name}\"")) || sources.contains(&format!("\"{prefix}{name}\""))
    })
}

/// A user who searches the documents for the words of a refusal, or for an event, finds them in troubleshooting.
#[test]
fn every_refusal_and_event_is_explained() {
    let document = read(&root().join("docs/troubleshooting.md"));
    let reasons = read(&root().join("scheduler/placement/src/data/reason.rs"));
    let texts = reasons.split("pub const fn as_str").nth(1).unwrap();
    let texts = texts.split("pub const fn").next().unwrap();
    let mut expected: Vec<String> = texts.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(expected.len() > 10, "{expected:?}");
    for folder in ["scheduler/src", "device-plugin/src"] {
        for path in files(&root().join(folder), "rs") {
            if !is_test(&path) {
                expected.extend(event_reasons(&read(&path)));
            }
        }
    }
    assert!(expected.len() > 25, "{expected:?}");
    expected.retain(|words| !document.contains(&format!("`{words}`")));
    assert!(expected.is_empty(), "{expected:#?}");
}

/// kube-scheduler refuses a node for its sum of any resource that gpushare counts: each has its row in troubleshooting.
#[test]
fn every_insufficient_resource_is_explained() {
    let document = read(&root().join("docs/troubleshooting.md"));
    let source = read(&root().join("proto/src/resource.rs"));
    let names = source.split('"').skip(1).step_by(2);
    // Old names become current ones before kube-scheduler sees the pod.
    let is_resource = |name: &&str| {
        name.contains('/')
            && !name.starts_with("kubernetes.io/")
            && ![ISOLATION_PROVIDER, HAMI_NODE].contains(name)
    };
    let is_row = |name: &str| document.contains(&format!("\n| `Insufficient {name}` | "));
    let (found, missing): (Vec<&str>, Vec<&str>) = names.filter(is_resource).partition(|name| is_row(name));
    assert!(missing.is_empty(), "{missing:?}");
    assert!(
        found.contains(&"aliyun.com/gpu-mem") && found.len() >= 12,
        "{found:?}"
    );
}

/// True for a source of tests alone.
fn is_test(path: &Path) -> bool {
    path.ends_with("tests.rs") || path.components().any(|part| part.as_os_str() == "tests")
}

/// The reasons of events that a source writes: the plugin's begin with `GPU`, or stand in a constant that says so; the
/// scheduler's follow the pod of the event.
fn event_reasons(source: &str) -> Vec<String> {
    static EVENT: LazyLock<Regex> = LazyLock::new(|| {
        Regex::new(concat!(
            r#""(GPU[A-Z][A-Za-z]+)"|\.warn\([^"\n]+, "([A-Z][A-Za-z]+)"|"#,
            r#"/// The event reason [^\n]*\nconst \w+: &str = "(\w+)""#,
        ))
        .unwrap()
    });
    let found = EVENT.captures_iter(source);
    found
        .filter_map(|groups| groups.iter().skip(1).flatten().next())
        .map(|reason| reason.as_str().to_owned())
        .collect()
}
