//! Writes a tree as a template of Helm, with the chart's values at the places that users set.

use serde_json::Value;

use super::conditions::Condition;
use super::tree::Tree;

/// The texts in place of which a template has an expression.
const SETTINGS: [(&str, &str); 5] = [
    (
        "ghcr.io/gpushare/gpushare-scheduler:0.1.0",
        r#"{{ include "gpushare.image" (list . "scheduler") }}"#,
    ),
    (
        "ghcr.io/gpushare/gpushare-device-plugin:0.1.0",
        r#"{{ include "gpushare.image" (list . "devicePlugin") }}"#,
    ),
    (
        "registry.k8s.io/kube-scheduler:v1.33.6",
        r#"{{ include "gpushare.kubeSchedulerImage" . }}"#,
    ),
    (
        "--misfit-nodes=unresolvable",
        r#"--misfit-nodes={{ include "gpushare.misfitNodes" . }}"#,
    ),
    // With the hash of its content, as kustomize names it: another content starts the scheduler again.
    (
        "gpushare-kube-scheduler-config",
        r#"{{ include "gpushare.kubeSchedulerConfig" . }}"#,
    ),
];
/// The containers whose arguments and resources users set, and the values for them.
const CONTAINERS: [(&str, &str); 3] = [
    ("gpushare-scheduler", "scheduler"),
    ("gpushare-device-plugin", "devicePlugin"),
    ("kube-scheduler", "kubeScheduler"),
];

/// The namespace of all objects in the kustomize tree, and the value that takes its place.
const NAMESPACE: &str = "gpushare-system";
const NAMESPACE_VALUE: &str = "{{ .Values.namespace }}";

/// Fields of a workload, and of its pods, that have the content of a value of the same name. The value's default is the content
/// in the kustomize tree.
pub(super) const POD_FIELDS: [&str; 3] = ["priorityClassName", "tolerations", "topologySpreadConstraints"];
/// The labels of nodes that are in the default of a value; others of the kustomize tree belong to components.
pub(super) const NODE_LABELS: [&str; 2] = ["gpushare", "kubernetes.io/os"];

/// The template of an object that exists under a condition.
pub(super) fn template(condition: &Condition, object: &Tree) -> String {
    let mut lines = Lines(Vec::new());
    let kind = object.get("kind").and_then(Tree::text).unwrap();
    let name = object
        .get("metadata")
        .and_then(|metadata| metadata.get("name")?.text())
        .unwrap();
    let guard = match kind {
        "Namespace" => Some("ne .Release.Namespace .Values.namespace".to_owned()),
        "CustomResourceDefinition" => Some(format!(r#"include "gpushare.installsDefinition" {name:?}"#)),
        _ => None,
    };
    assert!(guard.is_none() || condition.expression().is_none());
    let guard = guard.or_else(|| condition.expression());
    lines.add(
        0,
        "{{- /* Generated from deploy/base and deploy/components: see docs/install.md. */}}",
    );
    if kind == "Deployment" {
        lines.add(0, r#"{{- include "gpushare.validate" . }}"#);
    }
    lines.within(guard.as_deref(), 0, |lines| {
        lines.tree(
            object,
            0,
            Place {
                kind,
                workload: match (kind, name) {
                    ("Deployment", "gpushare-scheduler") => "scheduler",
                    ("DaemonSet", _) => "devicePlugin",
                    _ => "",
                },
                parent: "",
                field: "",
                container: "",
            },
        );
    });
    lines.0.join("\n") + "\n"
}

/// The place of a value in an object.
#[derive(Clone, Copy)]
struct Place<'a> {
    kind: &'a str,
    /// The values of the workload that it belongs to; empty for other objects.
    workload: &'a str,
    /// The path of the object that has the field.
    parent: &'a str,
    /// The field that holds it.
    field: &'a str,
    /// The name of the container that it belongs to.
    container: &'a str,
}

impl Place<'_> {
    /// True for a field of the specification of a workload's pods.
    fn is_in_pod(self) -> bool {
        !self.workload.is_empty() && self.parent == "template" && self.field == "spec"
    }

    /// The value that is the content of a field of a workload.
    fn value_of(self, key: &str) -> Option<String> {
        let workload = self.workload;
        let is_strategy = ["strategy", "updateStrategy"].contains(&key) && self.parent.is_empty();
        if is_strategy && self.field == "spec" {
            return Some(format!("{workload}.updateStrategy"));
        }
        (self.is_in_pod() && POD_FIELDS.contains(&key)).then(|| format!("{workload}.{key}"))
    }
}

struct Lines(Vec<String>);

impl Lines {
    fn add(&mut self, indent: usize, text: &str) {
        self.0.push(format!("{}{text}", " ".repeat(indent)));
    }

    fn within(&mut self, condition: Option<&str>, indent: usize, write: impl FnOnce(&mut Self)) {
        let Some(condition) = condition else {
            return write(self);
        };
        let at = " ".repeat(indent);
        let (begin, end) = (
            format!("{at}{{{{- if {condition} }}}}"),
            format!("{at}{{{{- end }}}}"),
        );
        // What follows something with the same condition shares its lines.
        let is_last = |line: &&String| line.starts_with(&format!("{at}{{{{-"));
        let mut controls = self.0.iter().rev().filter(is_last);
        let is_shared =
            self.0.last() == Some(&end) && controls.next() == Some(&end) && controls.next() == Some(&begin);
        if is_shared {
            self.0.pop();
        } else {
            self.0.push(begin);
        }
        write(self);
        self.0.push(end);
    }

    fn tree(&mut self, tree: &Tree, indent: usize, place: Place<'_>) {
        match tree {
            Tree::Map(fields) => {
                for (key, condition, value) in fields {
                    let condition = condition.expression();
                    self.within(condition.as_deref(), indent, |lines| {
                        lines.field(key, value, indent, place);
                    });
                }
                if fields.iter().any(|(key, _, _)| key == "containers") {
                    self.with_optional("affinity", &format!("{}.affinity", place.workload), indent);
                    self.with_optional("imagePullSecrets", "imagePullSecrets", indent);
                }
                if place.parent == "template" && place.field == "metadata" {
                    assert!(fields.iter().all(|(key, _, _)| key != "annotations"));
                    self.with_optional(
                        "annotations",
                        &format!("{}.podAnnotations", place.workload),
                        indent,
                    );
                }
            }
            Tree::List(items) => {
                for (condition, item) in items {
                    let condition = condition.expression();
                    self.within(condition.as_deref(), indent, |lines| {
                        lines.item(item, indent, place);
                    });
                }
                if let Some((_, values)) = CONTAINERS.iter().find(|(name, _)| *name == place.container)
                    && place.field == "args"
                {
                    // The flag's default names the usual namespace; the component names one more, and ours.
                    let is_other = format!(
                        r#"and (ne .Values.namespace "{NAMESPACE}") (not .Values.components.gpuOperator)"#
                    );
                    self.add(indent, &format!("{{{{- if {is_other} }}}}"));
                    let flag = format!("- --unrestricted-namespaces=kube-system,{NAMESPACE_VALUE}");
                    self.add(indent, &flag);
                    self.add(indent, "{{- end }}");
                    self.add(indent, &format!("{{{{- range .Values.{values}.extraArgs }}}}"));
                    self.add(indent, "- {{ . | quote }}");
                    self.add(indent, "{{- end }}");
                }
                if place.field == "env" && !place.workload.is_empty() {
                    self.with_more_of(&format!("{}.extraEnv", place.workload), indent);
                }
            }
            Tree::Same(_) | Tree::Either(_) => unreachable!("written with the field or item that holds it"),
        }
    }

    /// A field with the content of a value.
    fn with_content_of(&mut self, key: &str, value: &str, indent: usize) {
        self.add(indent, &format!("{key}:"));
        let text = format!("  {{{{- toYaml .Values.{value} | nindent {} }}}}", indent + 2);
        self.add(indent, &text);
    }

    /// A field with the content of a value, which is absent without content.
    fn with_optional(&mut self, key: &str, value: &str, indent: usize) {
        self.add(indent, &format!("{{{{- with .Values.{value} }}}}"));
        self.add(indent, &format!("{key}:"));
        self.add(indent, &format!("  {{{{- toYaml . | nindent {} }}}}", indent + 2));
        self.add(indent, "{{- end }}");
    }

    /// Further items, or further fields, from a value.
    fn with_more_of(&mut self, value: &str, indent: usize) {
        self.add(indent, &format!("{{{{- with .Values.{value} }}}}"));
        self.add(indent, &format!("{{{{- toYaml . | nindent {indent} }}}}"));
        self.add(indent, "{{- end }}");
    }

    fn field(&mut self, key: &str, value: &Tree, indent: usize, place: Place<'_>) {
        let inner = Place {
            parent: place.field,
            field: key,
            ..place
        };
        let setting = CONTAINERS.iter().find(|(name, _)| *name == place.container);
        match value {
            _ if key == "resources" && setting.is_some() => {
                self.with_content_of(key, &format!("{}.resources", setting.unwrap().1), indent);
            }
            _ if key == "imagePullPolicy" && setting.is_some() => {
                let text = format!("{key}: {{{{ .Values.{}.image.pullPolicy }}}}", setting.unwrap().1);
                self.add(indent, &text);
            }
            Tree::Same(_) if key == "priorityClassName" && place.value_of(key).is_some() => {
                let text = format!("{key}: {{{{ .Values.{} }}}}", place.value_of(key).unwrap());
                self.add(indent, &text);
            }
            _ if place.value_of(key).is_some() => {
                self.with_content_of(key, &place.value_of(key).unwrap(), indent);
            }
            Tree::Map(fields) if key == "nodeSelector" && place.is_in_pod() => {
                self.with_content_of(key, &format!("{}.nodeSelector", place.workload), indent);
                let is_other = |name: &str| !NODE_LABELS.contains(&name);
                let others = fields
                    .iter()
                    .filter(|(name, _, _)| is_other(name))
                    .cloned()
                    .collect();
                self.tree(&Tree::Map(others), indent + 2, inner);
            }
            Tree::Map(_) if key == "labels" && place.parent == "template" => {
                self.add(indent, &format!("{key}:"));
                self.tree(value, indent + 2, inner);
                self.with_more_of(&format!("{}.podLabels", place.workload), indent + 2);
            }
            _ if place.kind == "NetworkPolicy" && key == "from" => {
                self.with_content_of(key, "networkPolicy.metricsFrom", indent);
            }
            Tree::Map(_) if place.kind == "ConfigMap" && key == "data" => {
                self.add(indent, "data:");
                for file in value_keys(value) {
                    let text =
                        format!(r#"{file}: {{{{ include "gpushare.file" (list $ {file:?}) | toJson }}}}"#);
                    self.add(indent + 2, &text);
                }
                if value_keys(value).contains(&"labels.yaml") {
                    self.add(indent + 2, r#"{{- with index .Values.files "partitions.json" }}"#);
                    self.add(indent + 2, "partitions.json: {{ toJson . }}");
                    self.add(indent + 2, "{{- end }}");
                }
            }
            Tree::Map(_) | Tree::List(_) => {
                self.add(indent, &format!("{key}:"));
                self.tree(value, indent + 2, inner);
            }
            Tree::Same(value) => self.scalar(&format!("{key}: "), value, indent, inner),
            Tree::Either(values) => {
                self.either(values, indent, |lines, value| {
                    lines.scalar(&format!("{key}: "), value, indent, inner);
                });
            }
        }
    }

    fn item(&mut self, item: &Tree, indent: usize, place: Place<'_>) {
        match item {
            Tree::Map(fields) => {
                // The field behind the hyphen has to be there always.
                let is_first = |(key, condition, value): &&(String, Condition, Tree)| {
                    condition.expression().is_none()
                        && matches!(value, Tree::Same(_) | Tree::List(_) | Tree::Map(_))
                        && (key == "name" || !fields.iter().any(|(key, _, _)| key == "name"))
                };
                let first = fields.iter().find(is_first).unwrap();
                let name = first.2.text().filter(|_| first.0 == "name").unwrap_or_default();
                let container = if place.field == "containers" {
                    name
                } else {
                    place.container
                };
                let inner = Place { container, ..place };
                let at = self.0.len();
                self.field(&first.0, &first.2, indent + 2, inner);
                self.0[at].replace_range(indent..indent + 2, "- ");
                let rest: Vec<_> = fields
                    .iter()
                    .filter(|(key, _, _)| *key != first.0)
                    .cloned()
                    .collect();
                self.tree(&Tree::Map(rest), indent + 2, inner);
            }
            Tree::List(_) => panic!("a list within a list"),
            Tree::Same(value) => self.scalar("- ", value, indent, place),
            Tree::Either(values) => {
                self.either(values, indent, |lines, value| {
                    lines.scalar("- ", value, indent, place);
                });
            }
        }
    }

    fn either(&mut self, values: &[(Condition, Value)], indent: usize, write: impl Fn(&mut Self, &Value)) {
        for (idx, (condition, value)) in values.iter().enumerate() {
            let condition = condition.expression().unwrap();
            let text = match idx {
                0 => format!("{{{{- if {condition} }}}}"),
                _ if idx + 1 == values.len() => "{{- else }}".to_owned(),
                _ => format!("{{{{- else if {condition} }}}}"),
            };
            self.add(indent, &text);
            write(self, value);
        }
        self.add(indent, "{{- end }}");
    }

    /// A text, number or the like behind a key or a hyphen.
    fn scalar(&mut self, before: &str, value: &Value, indent: usize, place: Place<'_>) {
        if place.field == "replicas" {
            return self.add(indent, &format!("{before}{{{{ .Values.scheduler.replicas }}}}"));
        }
        let text = value.as_str().unwrap_or_default();
        if let Some((_, expression)) = SETTINGS.iter().find(|(setting, _)| *setting == text) {
            let quote = if expression.starts_with("{{") { "'" } else { "" };
            return self.add(indent, &format!("{before}{quote}{expression}{quote}"));
        }
        // The component's list of accounts, which is longer than the base's.
        let has_others = text
            .strip_prefix(WRITERS)
            .is_some_and(|others| others.contains("koord-scheduler"));
        if has_others {
            let others = "{{ range .Values.recordWriters }}, '{{ . }}'{{ end }}";
            self.add(indent, &format!("{before}>-"));
            self.add(indent + 2, &with_namespace(&format!("{WRITERS}{others}]")));
            return;
        }
        if text == NAMESPACE {
            return self.add(indent, &format!("{before}{{{{ .Values.namespace | quote }}}}"));
        }
        let yaml = serde_yaml_ng::to_string(value).unwrap();
        assert!(!yaml.contains("{{"), "{yaml}");
        let yaml = with_namespace(&yaml);
        let mut lines = yaml.trim_end().lines();
        self.add(indent, &format!("{before}{}", lines.next().unwrap()));
        for line in lines {
            self.add(
                if line.is_empty() { 0 } else { indent + 2 },
                line.trim_start_matches("  "),
            );
        }
    }
}

/// A text with the value in place of the namespace, which is also the beginning of the names of some objects.
fn with_namespace(text: &str) -> String {
    let mut parts = text.split(NAMESPACE);
    let mut replaced = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let is_name = part.starts_with('-');
        replaced += if is_name { NAMESPACE } else { NAMESPACE_VALUE };
        replaced += part;
    }
    replaced
}

/// The beginning of the list of accounts in the policy gpushare-records.
const WRITERS: &str = "['system:serviceaccount:gpushare-system:gpushare-scheduler', \
     'system:serviceaccount:gpushare-system:gpushare-device-plugin'";

fn value_keys(tree: &Tree) -> Vec<&str> {
    match tree {
        Tree::Map(fields) => fields.iter().map(|(key, _, _)| key.as_str()).collect(),
        _ => Vec::new(),
    }
}
