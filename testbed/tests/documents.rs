//! Documents name tests, scenarios, files and headings that exist.

#![expect(
    clippy::unwrap_used,
    clippy::panic,
    reason = "a test that cannot go on should end"
)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

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
    let mut documents = files(&root().join("docs"), "md");
    documents.push(root().join("README.md"));
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
