//! `fits`: the number of equal pods that fit now.

use std::path::{Path, PathBuf};

use k8s_openapi::api::core::v1::Node;
use proto::pod::Pod;
use proto::pod_group::GroupDomain;
use proto::read_api::{AddedNodes, FitAnswer, FitRequest, MAX_REPLICAS, State};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::args::FitsArgs;
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult, code_of_answer};
use crate::fields::{INSTANCE_TYPE, name, pod_template, text as field};
use crate::format::count;
use crate::output::{Colour, Screen, TextTable, number, text};
use crate::source::AnswerSource;

#[derive(Clone, Debug, PartialEq)]
struct ManifestPods {
    /// Kind and name of the document, such as `Deployment/web`.
    of: String,
    pod: Pod,
    replicas: u32,
}

/// A manifest: its pods, and the documents without pods.
#[derive(Clone, Debug, Default, PartialEq)]
struct Manifest {
    pods: Vec<ManifestPods>,
    /// The documents without pods, each as number, kind and name for a note.
    others: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct AskedPods {
    /// Kind and name of the document; for a folder of manifests, after the name of the file.
    of: String,
    #[serde(flatten)]
    answer: FitAnswer,
}

/// Shows how many pods of each document of a manifest fit; the answer, in the exit code, is no if not all do.
pub(crate) async fn run(connection: &ClusterConnection, screen: &Screen, args: &FitsArgs) -> CommandResult {
    let manifest = Manifest::read(&args.filename)?;
    if let Some(namespace) = &connection.args.namespace {
        connection.check_namespace(namespace).await?;
    }
    // A manifest usually has Services and ConfigMaps beside its workloads.
    if !manifest.others.is_empty() && !manifest.pods.is_empty() {
        screen.complain(&format!(
            "note: no pods in {}; left out",
            manifest.others.join(", ")
        ));
    }
    if manifest.pods.is_empty() {
        return Err(CommandFailure::Input(format!(
            "{}: no document has a pod, or a template of pods; name the manifest of a Pod, a Deployment or another workload",
            args.filename.display()
        )));
    }
    let mut source = AnswerSource::open(connection, screen).await?;
    let add_nodes = added_nodes(connection, &mut source, &args.add_nodes).await?;
    let mut answers = Vec::new();
    for pods in manifest.pods {
        let request = FitRequest {
            pod: pods.pod,
            // One request has at most `MAX_REPLICAS` pods, so a larger Deployment is tried with that number.
            replicas: args.replicas.unwrap_or(pods.replicas).min(MAX_REPLICAS),
            add_nodes: add_nodes.clone(),
            domain: args.domain,
        };
        // Each document is tried alone, without the pods of the others.
        let answer = source.fit(&request).await?;
        check_domain(args.domain, &answer)?;
        answers.push(AskedPods { of: pods.of, answer });
    }
    let (mut names, mut texts, mut all_fit) = (Vec::new(), Vec::new(), true);
    for AskedPods { of, answer } in &answers {
        for placement in &answer.placements {
            names.push(format!("node/{}", placement.node));
        }
        texts.push(render(of, answer, screen));
        all_fit &= answer.invalid.is_none() && answer.fitting == answer.replicas;
    }
    screen.show(&answers, names, |_| texts.join("\n"))?;
    Ok(code_of_answer(all_fit))
}

/// Refuses an answer that is not about the domain of the flag: a scheduler of an older version does not read it.
fn check_domain(asked: Option<GroupDomain>, answer: &FitAnswer) -> Result<(), CommandFailure> {
    match asked {
        // An invalid request may be refused before its domain is read.
        Some(domain) if answer.invalid.is_none() && domain != answer.domain => Err(CommandFailure::Refused(
            "this scheduler is older than the command, and does not know --domain".to_owned(),
        )),
        _ => Ok(()),
    }
}

fn read(path: &Path) -> Result<String, CommandFailure> {
    let read = if path == Path::new("-") {
        std::io::read_to_string(std::io::stdin().lock())
    } else {
        std::fs::read_to_string(path)
    };
    read.map_err(|error| CommandFailure::Input(format!("cannot read {}: {error}", path.display())))
}

fn files_of(folder: &Path) -> Result<Vec<PathBuf>, CommandFailure> {
    let cannot_read = |error| CommandFailure::Input(format!("cannot read {}: {error}", folder.display()));
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(cannot_read)? {
        let path = entry.map_err(cannot_read)?.path();
        let extension = path.extension().unwrap_or_default().to_str();
        // The extensions that kubectl reads; folders in the folder are left out, as kubectl does without -R.
        if matches!(extension, Some("yaml" | "yml" | "json")) && path.is_file() {
            files.push(path);
        }
    }
    // File systems list a folder in any order.
    files.sort_unstable();
    Ok(files)
}

/// The nodes of `--add-nodes`, each like a node that shares GPUs: that of the name, or else one of that instance type.
async fn added_nodes(
    connection: &ClusterConnection,
    source: &mut AnswerSource,
    asked: &[(String, u32)],
) -> Result<Vec<AddedNodes>, CommandFailure> {
    let mut added = Vec::new();
    if asked.is_empty() {
        return Ok(added);
    }
    let state = source.state(false).await?;
    for (kind, count) in asked {
        // A node of the name wins over an instance type of the same name.
        let mut candidates = vec![kind.clone()];
        if !is_shared(kind, &state) {
            let selector = format!("{INSTANCE_TYPE}={kind}");
            for node in connection.list::<Node>(None, Some(&selector)).await? {
                candidates.extend(node.metadata.name);
            }
        }
        let Some(like) = candidates.into_iter().find(|name| is_shared(name, &state)) else {
            return Err(CommandFailure::Input(format!(
                "--add-nodes {kind}={count}: no node that shares GPUs has this name or instance type; name a node like the ones to add"
            )));
        };
        added.push(AddedNodes { like, count: *count });
    }
    Ok(added)
}

fn or_unknown(name: &str) -> &str {
    if name.is_empty() { "?" } else { name }
}

fn is_shared(name: &str, state: &State) -> bool {
    state.nodes.iter().any(|node| node.name == name)
}

impl Manifest {
    /// Reads a file, standard input, or all manifests of a folder, whose documents are then named with their file.
    fn read(path: &Path) -> Result<Self, CommandFailure> {
        if !path.is_dir() {
            return Self::parse(&read(path)?);
        }
        let mut all = Self::default();
        for file in files_of(path)? {
            let found = Self::parse(&read(&file)?)
                .map_err(|failure| CommandFailure::Input(format!("{}: {failure}", file.display())))?;
            let file = file.file_name().unwrap_or_default().to_string_lossy();
            for pods in found.pods {
                let of = format!("{file}: {}", pods.of);
                all.pods.push(ManifestPods { of, ..pods });
            }
            for other in &found.others {
                all.others.push(format!("{file}: {other}"));
            }
        }
        Ok(all)
    }

    /// Reads documents of YAML or JSON, and the items of lists.
    fn parse(text: &str) -> Result<Self, CommandFailure> {
        let mut manifest = Self::default();
        for (idx, document) in serde_yaml_ng::Deserializer::from_str(text).enumerate() {
            let document = Value::deserialize(document)
                .map_err(|error| CommandFailure::Input(format!("document {}: {error}", idx + 1)))?;
            match document.get("items").and_then(Value::as_array) {
                Some(items) => {
                    for item in items {
                        manifest.add(item, idx + 1)?;
                    }
                }
                // Two separators (`---`) in a row make an empty document.
                None if document.is_null() => {}
                None => manifest.add(&document, idx + 1)?,
            }
        }
        Ok(manifest)
    }

    /// Adds the pods of a document, or notes that it has none; `number` is its place in the file, from 1.
    fn add(&mut self, document: &Value, number: usize) -> Result<(), CommandFailure> {
        let kind = field(document, "/kind");
        let of = format!("{}/{}", or_unknown(kind), or_unknown(name(document)));
        // Kinds other than workloads may have templates too, but without containers.
        let Some(template) =
            pod_template(document).filter(|template| template.pointer("/spec/containers").is_some())
        else {
            self.others.push(format!("document {number} ({of})"));
            return Ok(());
        };
        let pod = serde_json::from_value(template.clone())
            .map_err(|error| CommandFailure::Input(format!("document {number} ({of}): {error}")))?;
        let replicas = [
            "/spec/replicas",
            "/spec/parallelism",
            "/spec/jobTemplate/spec/parallelism",
        ]
        .into_iter()
        .find_map(|pointer| document.pointer(pointer)?.as_u64());
        self.pods.push(ManifestPods {
            of,
            pod,
            // A StatefulSet without the field has one pod, and a DaemonSet one on each node, of which one is tried.
            replicas: u32::try_from(replicas.unwrap_or(1)).unwrap_or(MAX_REPLICAS),
        });
        Ok(())
    }
}

/// The answer in a few words: how many pods fit, or whether one domain has room for all of them.
fn verdict(answer: &FitAnswer) -> String {
    let fitting = answer.fitting;
    let pods = count(answer.replicas, "pod");
    let domain = match answer.domain {
        GroupDomain::Any => return format!("{fitting} of {pods} fit"),
        GroupDomain::Node => "node",
        GroupDomain::Link => "link group",
    };
    if fitting == answer.replicas {
        let has = if answer.nodes_with_room == 1 {
            "has"
        } else {
            "have"
        };
        let nodes = count(answer.nodes_with_room, "node");
        format!("{pods} fit on one {domain}; {nodes} {has} room for them")
    } else {
        format!("no {domain} has room for {pods}; the largest has room for {fitting}")
    }
}

/// The answer about the pods of the document `of` as text.
fn render(of: &str, answer: &FitAnswer, screen: &Screen) -> String {
    if let Some(rule) = &answer.invalid {
        return screen.paint(Colour::Red, &screen.wrap(0, &format!("{of}: {rule}\n")));
    }
    let all_fit = answer.fitting == answer.replicas;
    let colour = if all_fit { Colour::Green } else { Colour::Yellow };
    let verdict = screen.paint(colour, &verdict(answer));
    let mut lines = screen.wrap(0, &format!("{of} ({} each): {verdict}.\n", answer.asked));
    if !answer.placements.is_empty() {
        let mut table = TextTable::new([text("NODE", 0), number("PODS", 0), text("GPUS", 1)]);
        for placement in &answer.placements {
            let mut gpus = Vec::new();
            for (minor, pods) in &placement.gpus {
                gpus.push(match pods {
                    1 => minor.to_string(),
                    pods => format!("{minor} ({pods})"),
                });
            }
            table.push([
                placement.node.as_str().into(),
                placement.pods.to_string().into(),
                gpus.join(", ").into(),
            ]);
        }
        lines += &table.render(screen);
    }
    if !answer.blocked.is_empty() {
        lines += match answer.domain {
            GroupDomain::Any => "The next pod is refused by\n",
            GroupDomain::Node | GroupDomain::Link => "The group is refused by\n",
        };
    }
    for (reason, n) in &answer.blocked {
        lines += &screen.wrap(4, &format!("  {}: {reason}\n", count(*n, "node")));
    }
    lines
}

#[cfg(test)]
mod tests;
