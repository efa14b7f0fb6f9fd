//! `CONTRIBUTING.md` names files that exist, and in its lists words that are in these files.

use std::fs;
use std::process::Command;

use regex::Regex;

use super::{blocks, code_spans, files, is_test, read, root};

/// The document.
const CONTRIBUTING: &str = "CONTRIBUTING.md";
/// The heading in front of the lists, whose items are `` - `file`: `words in it`. Text ``.
const LISTS: &str = "\n## Where something new goes\n";

/// The file that a text in backticks names; `None` if it is none of the repository, or a pattern or command.
fn named_file(span: &str) -> Option<&str> {
    let (folder, _) = span.split_once('/')?;
    let is_path = span
        .chars()
        .all(|c| c.is_ascii_alphanumeric() || "-_./".contains(c));
    (is_path && !folder.contains('.') && root().join(folder).is_dir()
        || span.starts_with(".ci/")
        || span.starts_with(".github/"))
    .then_some(span)
}

/// The words of an item that its file must have: those up to the first full stop behind a backtick.
fn words(item: &str) -> Vec<&str> {
    let names = item.split("`. ").next().unwrap_or_default();
    // The end of the last one is the separator.
    names.split('`').skip(1).step_by(2).collect()
}

#[test]
fn the_files_and_names_of_each_list_exist() {
    let document = read(&root().join(CONTRIBUTING));
    let mut missing = Vec::new();
    for span in code_spans(&document) {
        if let Some(file) = named_file(span)
            && !root().join(file).exists()
        {
            missing.push(format!("no file {file}"));
        }
    }
    let lists = document.split(LISTS).nth(1).unwrap();
    let lists = lists.split("\n## ").next().unwrap();
    let mut n_names = 0;
    for item in lists.lines().filter_map(|line| line.strip_prefix("- ")) {
        let (file, names) = words(item)
            .split_first()
            .map(|(file, names)| (*file, names.to_vec()))
            .unwrap();
        assert!(named_file(file).is_some(), "an item begins with no file: {item}");
        let text = read(&root().join(file));
        for name in names {
            n_names += 1;
            if !text.contains(name) {
                missing.push(format!("{file} has no {name}"));
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
    assert!(n_names > 60, "{n_names} names");
}

/// A name in the text of an item, such as a function or type, is in some source.
#[test]
fn the_names_in_the_text_of_each_list_exist() {
    let document = read(&root().join(CONTRIBUTING));
    let lists = document.split(LISTS).nth(1).unwrap();
    let lists = lists.split("\n## ").next().unwrap();
    let mut sources = String::new();
    for extension in ["rs", "js"] {
        for path in files(&root(), extension) {
            sources += &read(&path);
        }
    }
    let name = Regex::new("^(fn |pub )?([A-Z][A-Za-z]+|[A-Z_]{4,}|[a-z]+(_[a-z]+)+)$").unwrap();
    let spans = code_spans(lists);
    let names = spans.iter().filter(|span| name.is_match(span));
    let missing: Vec<_> = names.filter(|name| !sources.contains(**name)).collect();
    assert!(missing.is_empty(), "no source has {missing:?}");
}

/// A command that brings a bug back would change nothing if its pattern were not in the file.
#[test]
fn the_patterns_of_sed_are_in_their_files() {
    let document = read(&root().join(CONTRIBUTING));
    let command = Regex::new(r"sed -i 's/([^/]+)/[^/]+/' (\S+)").unwrap();
    let mut n_commands = 0;
    for [pattern, file] in command.captures_iter(&document).map(|found| found.extract().1) {
        n_commands += 1;
        assert!(
            read(&root().join(file)).contains(pattern),
            "{file} has no {pattern}"
        );
    }
    assert!(n_commands > 0, "no command");
}

/// The headings of lists with the example of each: all sources that name it are in the list.
const EXAMPLES: [(&str, &str); 2] = [
    ("### A refusal reason\n", r"\bReason::PartitionsUnreadable\b"),
    ("### A device type\n", r"\b(TYPE_)?FPGA\b|\bFpga\b"),
];

/// A source that names the example of a list, and that the list lacks, would be forgotten by its readers.
#[test]
fn every_source_that_names_an_example_is_in_its_list() {
    let document = read(&root().join(CONTRIBUTING));
    let mut missing = Vec::new();
    for (heading, example) in EXAMPLES {
        let list = document.split(heading).nth(1).unwrap();
        let list = list.split("\n### ").next().unwrap();
        let example = Regex::new(example).unwrap();
        for folder in [
            "proto/src",
            "scheduler/placement/src",
            "scheduler/src",
            "device-plugin/src",
            "cli/src",
        ] {
            for path in files(&root().join(folder), "rs") {
                let text = read(&path);
                let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
                let code = code.take_while(|line| *line != "mod tests {");
                let name = path.strip_prefix(root()).unwrap().display().to_string();
                if !is_test(&path)
                    && code.into_iter().any(|line| example.is_match(line))
                    && !list.contains(&name)
                {
                    missing.push(format!("{} lacks {name}", heading.trim()));
                }
            }
        }
    }
    assert!(missing.is_empty(), "{missing:#?}");
}

/// Each script of `.ci` is in the list of commands, and in CONTRIBUTING.md.
#[test]
fn every_script_is_a_command_of_the_lists() {
    let document = read(&root().join(CONTRIBUTING));
    let recipes = read(&root().join("justfile"));
    let mut n_scripts = 0;
    for entry in fs::read_dir(root().join(".ci")).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "txt") {
            continue;
        }
        let name = format!(".ci/{}", path.file_name().unwrap().to_string_lossy());
        n_scripts += 1;
        assert!(
            document.contains(&format!("`{name}`")),
            "{CONTRIBUTING} lacks {name}"
        );
        // A workflow alone has archives to name.
        let is_listed = recipes
            .lines()
            .any(|line| line.trim().split(' ').next() == Some(&name));
        assert!(is_listed || name == ".ci/krew", "justfile lacks {name}");
    }
    assert!(n_scripts > 7, "{n_scripts} scripts");
}

/// The packages, tests and flags of cargo that commands name.
#[test]
fn commands_of_cargo_name_packages_and_tests_that_exist() {
    let document = read(&root().join(CONTRIBUTING));
    let metadata = Command::new(env!("CARGO"))
        .args([
            "metadata",
            "--no-deps",
            "--locked",
            "--offline",
            "--format-version=1",
        ])
        .current_dir(root())
        .output()
        .unwrap();
    let metadata: serde_json::Value = serde_json::from_slice(&metadata.stdout).unwrap();
    let packages = metadata.pointer("/packages").unwrap().as_array().unwrap();
    let blocks = blocks(&document, "sh").join("\n");
    let commands = code_spans(&document).into_iter().chain(blocks.lines());
    let mut n_commands = 0;
    for command in commands.filter(|command| command.trim_start().starts_with("cargo ")) {
        let args: Vec<&str> = command.split_whitespace().collect();
        let behind = |flags: &[&str]| {
            let pairs = args.windows(2).filter(|pair| flags.contains(&pair[0]));
            pairs.map(|pair| pair[1]).collect::<Vec<_>>()
        };
        for name in behind(&["--package", "-p"]) {
            n_commands += 1;
            let package = packages.iter().find(|package| package["name"] == name);
            let package = package.unwrap_or_else(|| panic!("{command}: no package {name}"));
            let targets = package["targets"].as_array().unwrap();
            for test in behind(&["--test"]) {
                let is_there = targets
                    .iter()
                    .any(|target| target["name"] == test && target["kind"][0] == "test");
                assert!(is_there, "{command}: {name} has no test {test}");
            }
        }
    }
    assert!(n_commands > 10, "{n_commands} commands");
}
