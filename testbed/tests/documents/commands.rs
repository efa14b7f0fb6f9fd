//! The commands of documents for users are run against the demo, and their outputs are those of the documents.
//!
//! The convention, for each of [`DOCUMENTS`]:
//!
//! - A block ```` ```console ```` holds commands, each in a line that begins with `$ `, and their outputs behind them.
//! - A block ```` ```sh ```` holds commands alone, which must succeed.
//! - A command line in backticks that begins with `kubectl ` must succeed too. `NODE` and `POD` stand for names of the demo.
//! - A block ```` ```yaml ```` behind a line `<!-- file: NAME -->` is a file in the folder in which commands run.
//! - A block, or a command in backticks, that cannot run against the demo has a mark with the reason in its document:
//!   `<!-- not run: REASON -->` in front of the block, `<!-- not run: COMMAND: REASON -->` anywhere for a command.
//!
//! Outputs are compared without what differs from run to run: ages, times, ports, UIDs, and the width of columns. With
//! `UPDATE_DOCUMENTS=1` the outputs are written into the documents instead:
//!
//! ```sh
//! UPDATE_DOCUMENTS=1 cargo test --package testbed --test main documents::commands
//! ```

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use regex::Regex;

use super::{code_spans, read, root};

/// The documents, in the order in which they are run.
const DOCUMENTS: [&str; 4] = ["quick-start.md", "cookbook.md", "troubleshooting.md", "cli.md"];
/// Names of the demo that stand in commands for the reader's own.
const NAMES: [(&str, &str); 2] = [("NODE", "n1"), ("POD", "large-model-2")];
/// Arguments in the table of subcommands, which stand for the reader's own.
const ARGUMENTS: [(&str, &str); 4] = [
    ("FILE", "deploy/samples/02-koordinator-memory.yaml"),
    ("N", "2"),
    ("NAME", "large-model-2"),
    ("SHELL", "bash"),
];
/// The longest time until the demo runs, or a command that only reads prints what is expected. The use of memory is measured every
/// 15 s, and the scheduler keeps it for 10 s.
const DEADLINE: Duration = Duration::from_secs(60);
const SETTLED: Duration = Duration::from_secs(30);
/// Pause between two runs of a command that only reads.
const PAUSE: Duration = Duration::from_millis(500);
const MARK: &str = "<!-- not run: ";

/// A running demo; dropped, it ends.
struct Demo {
    process: Child,
    folder: tempfile::TempDir,
    kubeconfig: String,
    programs: String,
    page: String,
}

impl Demo {
    /// Starts the demo, and reads from what it prints how a user goes on.
    fn start() -> Self {
        let mut process = Command::new("sh")
            .args([
                "-c",
                r#"exec "$0" demo --keep 2>&1"#,
                env!("CARGO_BIN_EXE_testbed"),
            ])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let (lines, printed) = mpsc::channel();
        let out = BufReader::new(process.stdout.take().unwrap());
        thread::spawn(move || {
            out.lines()
                .map_while(Result::ok)
                .try_for_each(|line| lines.send(line))
        });
        let mut demo = Self {
            process,
            folder: tempfile::tempdir().unwrap(),
            kubeconfig: String::new(),
            programs: String::new(),
            page: String::new(),
        };
        let mut all = String::new();
        loop {
            // The first run builds the daemons.
            let line = printed.recv_timeout(10 * DEADLINE);
            let line = line.unwrap_or_else(|_| panic!("the demo does not start:\n{all}"));
            for (start, field) in [
                ("export KUBECONFIG=", &mut demo.kubeconfig),
                ("export PATH=$PATH:", &mut demo.programs),
                ("The page: http://", &mut demo.page),
            ] {
                if let Some(value) = line.strip_prefix(start) {
                    value.trim_end_matches('/').clone_into(field);
                }
            }
            if line.starts_with("Ctrl-C") {
                break;
            }
            all += &(line + "\n");
        }
        std::os::unix::fs::symlink(root().join("deploy"), demo.folder.path().join("deploy")).unwrap();
        demo
    }

    /// Runs a script as the user's shell would; returns its exit code and everything that it prints.
    fn run(&self, script: &str) -> (Option<i32>, String) {
        let path = std::env::var("PATH").unwrap();
        let output = Command::new("timeout")
            .args(["60", "sh", "-c", &format!("exec 2>&1\n{script}")])
            .current_dir(self.folder.path())
            .env("KUBECONFIG", &self.kubeconfig)
            .env("GPUSHARE_PAGE", &self.page)
            .env("PATH", format!("{path}:{}", self.programs))
            .env("LANG", "C.UTF-8")
            .output()
            .unwrap();
        (
            output.status.code(),
            String::from_utf8_lossy(&output.stdout).into_owned(),
        )
    }

    /// The names of the pods of the namespace `default`.
    fn pods(&self) -> BTreeSet<String> {
        let (code, names) = self.run("kubectl get pods -o name");
        assert_eq!(code, Some(0), "{names}");
        names.lines().map(str::to_owned).collect()
    }

    /// Deletes pods that a document has made.
    fn delete_all_but(&self, pods: &BTreeSet<String>) {
        let made: Vec<String> = self.pods().difference(pods).cloned().collect();
        if !made.is_empty() {
            let (code, text) = self.run(&format!("kubectl delete {}", made.join(" ")));
            assert_eq!(code, Some(0), "{text}");
        }
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        // A demo that is killed leaves its daemons behind.
        let _ = Command::new("kill")
            .args(["-INT", &self.process.id().to_string()])
            .status();
        let _ = self.process.wait();
    }
}

/// A part of a document.
#[derive(Debug)]
enum Part {
    Text(String),
    Block(Block),
}

/// A block of code.
#[derive(Debug)]
struct Block {
    language: String,
    indent: String,
    lines: Vec<String>,
    /// The line in front of it, if that is a comment.
    comment: String,
}

impl Block {
    /// The reason that it is not run.
    fn mark(&self) -> Option<&str> {
        self.comment.strip_prefix(MARK)
    }

    /// The name of the file that it shows.
    fn file(&self) -> Option<&str> {
        let name = self.comment.strip_prefix("<!-- file: ")?;
        Some(name.trim_end_matches("-->").trim())
    }
}

/// The parts of a document in its order; joined again they are the document.
fn parts(text: &str) -> Vec<Part> {
    let (mut parts, mut plain, mut open) = (Vec::new(), String::new(), None::<Block>);
    for line in text.lines() {
        match &mut open {
            Some(_) if line.trim() == "```" => parts.extend(open.take().map(Part::Block)),
            Some(block) => {
                let inside = line
                    .strip_prefix(block.indent.as_str())
                    .unwrap_or(line.trim_start());
                block.lines.push(inside.to_owned());
            }
            None => {
                let Some(language) = line.trim_start().strip_prefix("```") else {
                    plain += line;
                    plain.push('\n');
                    continue;
                };
                let before = plain.lines().rev().map(str::trim).find(|line| !line.is_empty());
                let comment = before.filter(|line| line.starts_with("<!--"));
                let comment = comment.unwrap_or_default().to_owned();
                parts.push(Part::Text(std::mem::take(&mut plain)));
                open = Some(Block {
                    language: language.to_owned(),
                    indent: " ".repeat(line.len() - line.trim_start().len()),
                    lines: Vec::new(),
                    comment,
                });
            }
        }
    }
    assert!(open.is_none(), "a block of code does not end");
    parts.push(Part::Text(plain));
    parts
}

/// The text of a document's parts.
fn joined(parts: &[Part]) -> String {
    let mut text = String::new();
    for part in parts {
        match part {
            Part::Text(plain) => text += plain,
            Part::Block(block) => {
                let Block {
                    language,
                    indent,
                    lines,
                    ..
                } = block;
                writeln!(text, "{indent}```{language}").unwrap();
                for line in lines {
                    let line = format!("{indent}{line}");
                    writeln!(text, "{}", line.trim_end()).unwrap();
                }
                writeln!(text, "{indent}```").unwrap();
            }
        }
    }
    text
}

/// A text without what differs from run to run.
fn comparable(text: &str) -> String {
    let rules = [
        (r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "UID"),
        (r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?Z", "TIME"),
        (
            r"[A-Z][a-z]{2}, \d\d [A-Z][a-z]{2} \d{4} \d\d:\d\d:\d\d [+-]\d{4}",
            "TIME",
        ),
        (r"127\.0\.0\.1:\d+", "ADDRESS"),
        (r"/tmp/gpushare-testbed-\w+", "FOLDER"),
        (r"\b(\d+d)?(\d+h)?(\d+m)?\d+ ?s\b|\b\d+ ?(d|h|min|m)\b", "AGE"),
        (r"\(x\d+ over AGE\)", ""),
        (r"\b\d+ (filter )?requests?\b", "N requests"),
        (r"(?m)^(resourceVersion: ).*$", "$1N"),
        (r"[ \t]+", " "),
        (r"(?m) +$", ""),
    ];
    let mut text = text.trim_end().to_owned();
    for (pattern, replacement) in rules {
        text = Regex::new(pattern)
            .unwrap()
            .replace_all(&text, replacement)
            .into_owned();
    }
    text
}

/// A command with names of the demo in place of the reader's.
fn with_names(command: &str) -> String {
    with(&NAMES, command)
}

/// A command with these names in place of the reader's.
fn with(names: &[(&str, &str)], command: &str) -> String {
    let mut command = command.to_owned();
    for (placeholder, name) in names {
        let word = Regex::new(&format!(r"\b{placeholder}\b")).unwrap();
        command = word.replace_all(&command, *name).into_owned();
    }
    command
}

/// True if a command changes nothing, so that it may be run again until its output is as expected.
fn only_reads(command: &str) -> bool {
    let reading = ["gpushare", "get", "describe", "logs", "exec", "top"];
    let mut words = command.split_whitespace();
    words.next() == Some("kubectl") && words.any(|word| reading.contains(&word))
}

/// The number of commands that were run, and of those that are marked.
#[derive(Debug, Default)]
struct Counts {
    run: usize,
    marked: usize,
}

/// The run of one document.
struct DocumentRun<'a> {
    demo: &'a Demo,
    name: &'static str,
    is_update: bool,
    /// The time of the last command that changes something.
    changed: Instant,
    counts: Counts,
    problems: Vec<String>,
}

impl DocumentRun<'_> {
    fn problem(&mut self, text: &str) {
        self.problems.push(format!("docs/{}: {text}", self.name));
    }

    /// Runs the blocks and the commands in backticks; changes outputs if the document is to be updated.
    fn run(&mut self, parts: &mut [Part]) {
        let marks: Vec<String> = parts
            .iter()
            .filter_map(Part::text)
            .flat_map(marks_of_commands)
            .collect();
        for part in parts {
            match part {
                Part::Text(text) => self.run_spans(text, &marks),
                Part::Block(block) => self.run_block(block),
            }
        }
    }

    fn run_block(&mut self, block: &mut Block) {
        if let Some(name) = block.file() {
            fs::write(self.demo.folder.path().join(name), block.lines.join("\n")).unwrap();
            return;
        }
        if block.mark().is_some() {
            self.counts.marked += 1;
            return;
        }
        match block.language.as_str() {
            "sh" => {
                for line in block.lines.iter().filter(|line| !line.is_empty()) {
                    self.must_succeed(line);
                }
            }
            "console" => {
                let mut lines = Vec::new();
                for (command, expected) in commands(&block.lines) {
                    lines.push(format!("$ {command}"));
                    let output = self.compare(&command, &expected.join("\n"));
                    lines.extend(output.lines().map(str::to_owned));
                }
                if self.is_update {
                    block.lines = lines;
                }
            }
            _ => {}
        }
    }

    /// Runs the commands in backticks of a text.
    fn run_spans(&mut self, text: &str, marks: &[String]) {
        let shown: String = text
            .lines()
            .filter(|line| !line.trim_start().starts_with("<!--"))
            .collect::<Vec<_>>()
            .join("\n");
        let spans = code_spans(&shown).into_iter();
        let mut commands: Vec<String> = spans
            .filter(|span| span.starts_with("kubectl "))
            .map(str::to_owned)
            .collect();
        commands.extend(self.subcommands(&shown));
        for command in commands {
            if marks.contains(&command) {
                self.counts.marked += 1;
            } else {
                self.must_succeed(&command);
            }
        }
    }

    /// The commands of the table of subcommands in a text, which has a row for each that the help names.
    fn subcommands(&mut self, text: &str) -> Vec<String> {
        let rows = text.lines().skip_while(|line| *line != "| command | shows |");
        let rows = rows.skip(2).take_while(|line| line.starts_with("| `"));
        let rows = rows.filter_map(|row| code_spans(row).first().copied());
        let found: Vec<String> = rows
            .map(|command| with(&ARGUMENTS, &format!("kubectl gpushare {command}")))
            .collect();
        if !found.is_empty() {
            let (_, help) = self.demo.run("kubectl gpushare help");
            let names = help.lines().skip_while(|line| *line != "Commands:").skip(1);
            let names = names.map_while(|line| line.split_whitespace().next());
            for name in names.filter(|name| *name != "help") {
                let command = format!("kubectl gpushare {name}");
                if !found.iter().any(|found| found.starts_with(&command)) {
                    self.problem(&format!("the table of subcommands lacks {name}"));
                }
            }
        }
        found
    }

    /// Runs a command whose output no document shows.
    fn must_succeed(&mut self, command: &str) {
        self.counts.run += 1;
        let (code, output) = self.demo.run(&with_names(command));
        if !only_reads(command) {
            self.changed = Instant::now();
        }
        // A command of gpushare that answers "no" exits with 2.
        if code != Some(0) && !(command.contains("gpushare") && code == Some(2)) {
            self.problem(&format!("`{command}` exits with {code:?}:\n{output}"));
        }
    }

    /// Runs a command, if it only reads until it prints what is expected, and returns the output for the document.
    fn compare(&mut self, command: &str, expected: &str) -> String {
        self.counts.run += 1;
        let script = with_names(command);
        if !only_reads(command) {
            self.changed = Instant::now();
        }
        let (began, wanted) = (Instant::now(), comparable(expected));
        let mut output;
        loop {
            output = self.demo.run(&script).1;
            if comparable(&output) == wanted {
                return expected.to_owned();
            }
            // An output that differs goes into the document once nothing changes any more.
            let is_last = if self.is_update {
                self.changed.elapsed() > SETTLED
            } else {
                began.elapsed() > DEADLINE
            };
            if !only_reads(command) || is_last {
                break;
            }
            thread::sleep(PAUSE);
        }
        if !self.is_update {
            let shown = format!(
                "`{command}` does not print what the document shows.\nshown:\n{expected}\nprinted:\n{output}"
            );
            self.problem(&shown);
        }
        output.trim_end().to_owned()
    }
}

impl Part {
    fn text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Block(_) => None,
        }
    }
}

/// The commands in backticks that a text marks as not run.
fn marks_of_commands(text: &str) -> Vec<String> {
    let marks = text.lines().filter_map(|line| line.trim().strip_prefix(MARK));
    let commands = marks.filter_map(|mark| mark.split_once(": "));
    commands.map(|(command, _)| command.to_owned()).collect()
}

/// The commands of a block, each with its output.
fn commands(lines: &[String]) -> Vec<(String, Vec<String>)> {
    let mut commands: Vec<(String, Vec<String>)> = Vec::new();
    for line in lines {
        match (line.strip_prefix("$ "), commands.last_mut()) {
            (Some(command), _) => commands.push((command.to_owned(), Vec::new())),
            (None, Some((_, output))) => output.push(line.clone()),
            (None, None) => panic!("a block of console begins with an output: {line}"),
        }
    }
    commands
}

/// CI has kubectl; a machine without it runs the other tests of documents.
fn has_kubectl() -> bool {
    let version = Command::new("kubectl").args(["version", "--client"]).output();
    version.is_ok_and(|output| output.status.success())
}

#[test]
#[expect(
    clippy::print_stdout,
    reason = "a reader of the test's output learns how much was run"
)]
fn commands_print_what_the_documents_show() {
    if !has_kubectl() {
        assert!(
            std::env::var_os("CI").is_none(),
            "CI needs kubectl for the commands of documents"
        );
        println!("no command of a document is run: there is no kubectl");
        return;
    }
    let demo = Demo::start();
    let own = demo.pods();
    let is_update = std::env::var_os("UPDATE_DOCUMENTS").is_some();
    let mut problems = Vec::new();
    for name in DOCUMENTS {
        let path: PathBuf = root().join("docs").join(name);
        let mut parts = parts(&read(&path));
        let mut run = DocumentRun {
            demo: &demo,
            name,
            is_update,
            changed: Instant::now(),
            counts: Counts::default(),
            problems: Vec::new(),
        };
        run.run(&mut parts);
        let Counts { run: n_run, marked } = run.counts;
        println!("docs/{name}: {n_run} commands run, {marked} marked");
        problems.extend(run.problems);
        if is_update {
            fs::write(&path, joined(&parts)).unwrap();
        }
        demo.delete_all_but(&own);
    }
    assert!(problems.is_empty(), "{}", problems.join("\n"));
}

#[test]
fn documents_are_written_as_they_were_read() {
    for name in DOCUMENTS {
        let text = read(&Path::new(&root()).join("docs").join(name));
        assert_eq!(joined(&parts(&text)), text, "{name}");
    }
}

#[test]
fn outputs_are_compared_without_what_differs_from_run_to_run() {
    let same = [
        ("NAME   AGE\np      5s", "NAME AGE\np   12m3s\n"),
        ("at 127.0.0.1:1", "at 127.0.0.1:20"),
        (
            "44 filter requests, the last 8 s ago",
            "3 filter requests, the last 1 s ago",
        ),
    ];
    for (one, other) in same {
        assert_eq!(comparable(one), comparable(other));
    }
    assert_ne!(comparable("12 GiB"), comparable("13 GiB"));
    assert_ne!(comparable("n1 GPU 0"), comparable("n1 GPU 1"));
}
