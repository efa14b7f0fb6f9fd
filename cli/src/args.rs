//! Flags and arguments, parsed and checked once; kubectl's own names where kubectl has them.

use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, RangedU64ValueParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use http::HeaderValue;
use k8s_openapi::jiff::SignedDuration;
use proto::pod_group::GroupDomain;
use proto::quantity::Quantity;
use proto::read_api::{MAX_PLANNED_MOVES, PlanLimits};

/// Shows the GPUs of a cluster and their pods, explains why a pod waits, plans moves of pods, and checks the installation of
/// gpushare.
#[derive(Clone, Debug, Parser)]
#[command(
    name = "kubectl-gpushare",
    bin_name = "kubectl gpushare",
    version,
    max_term_width = 100
)]
pub(crate) struct Args {
    #[command(flatten)]
    pub(crate) connection: ConnectionArgs,
    #[command(flatten)]
    pub(crate) output: OutputArgs,
    #[command(subcommand)]
    pub(crate) command: Command,
}

impl Args {
    /// Refuses `--namespace` where the command has no use for it, and flags of evictions without `--evict`.
    pub(crate) fn check(self) -> Result<Self, clap::Error> {
        let unused = match &self.command {
            Command::Explain { .. }
            | Command::Fits(_)
            | Command::Top {
                kind: Some(Top::Pods { .. }),
                ..
            } => return Ok(self),
            Command::Top { .. } => "top shows nodes, and `kubectl gpushare top pods` the pods of a namespace",
            Command::Doctor | Command::Version => {
                "the namespace of the installation is that of --gpushare-namespace"
            }
            Command::Ui(_) => "the page shows all namespaces",
            Command::Plan(plan) if !plan.evict && (plan.yes || plan.partial) => {
                return Err(Self::command().error(
                    ErrorKind::MissingRequiredArgument,
                    "--yes and --partial go with --evict",
                ));
            }
            Command::Plan(_) => "a plan is about the pods of all namespaces",
            Command::Close(_) | Command::Open(_) | Command::Migrate(_) | Command::AutoscalerHints { .. } => {
                "the command is about nodes"
            }
            Command::Completion { .. } => "a completion script has none",
        };
        match self.connection.namespace {
            Some(_) => Err(Self::command().error(
                ErrorKind::ArgumentConflict,
                format!("this command takes no --namespace: {unused}"),
            )),
            None => Ok(self),
        }
    }
}

/// The cluster, and the user and namespace in it.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct ConnectionArgs {
    /// Kubeconfig file; without it those of KUBECONFIG, or ~/.kube/config.
    #[arg(long, global = true, value_name = "FILE")]
    pub(crate) kubeconfig: Option<PathBuf>,
    /// Context of the kubeconfig.
    #[arg(long, global = true, value_name = "NAME")]
    pub(crate) context: Option<String>,
    /// User to impersonate.
    #[arg(long = "as", global = true, value_name = "USER", value_parser = user_name)]
    pub(crate) impersonate: Option<HeaderValue>,
    /// Namespace of the pods in question; without it that of the context.
    #[arg(short, long, global = true)]
    pub(crate) namespace: Option<String>,
    /// Namespace that gpushare is installed in.
    #[arg(
        long,
        global = true,
        env = "GPUSHARE_NAMESPACE",
        default_value = "gpushare-system",
        value_name = "NAMESPACE"
    )]
    pub(crate) gpushare_namespace: String,
    /// Address of the read API, such as 127.0.0.1:12346, instead of a port-forward to a pod of the scheduler.
    #[arg(long, global = true, env = "GPUSHARE_READ_API", value_name = "ADDRESS")]
    pub(crate) read_api: Option<String>,
    /// Read the objects instead of asking the scheduler.
    #[arg(long, global = true, conflicts_with = "read_api")]
    pub(crate) offline: bool,
}

/// The form of the answer.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct OutputArgs {
    /// Form of the answer.
    #[arg(short, long, global = true, value_enum, default_value = "table")]
    pub(crate) output: Format,
    /// Leave out the line of column names, and the sums.
    #[arg(long, global = true)]
    pub(crate) no_headers: bool,
}

/// The form of an answer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    /// As wide as the terminal.
    #[default]
    Table,
    /// Every column.
    Wide,
    /// The answer of the read API; of `top pods` its rows.
    Json,
    /// The same as YAML.
    Yaml,
    /// Names, one a line.
    Name,
}

/// The command, with its own flags.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Command {
    /// GPUs with the pods on them: allocated, free and stranded memory, compute, sharers and health.
    Top {
        #[command(subcommand)]
        kind: Option<Top>,
        /// The form of the table.
        #[command(flatten)]
        rows: Rows,
    },
    /// The reasons for which a pod waits: the nodes and GPUs that come nearest, the amounts that they lack, and the pods in the
    /// way. Exits with 2 if no node has room.
    Explain {
        /// The pod, as NAME, `pod NAME`, `pod/NAME` or NAMESPACE/NAME.
        #[arg(required = true, num_args = 1..=2, value_name = "[pod] NAME")]
        pod: Vec<String>,
        /// Every node and GPU, not only the nearest.
        #[arg(long)]
        all: bool,
    },
    /// The number of equal pods that fit now, their nodes, and the reasons that block the rest. Exits with 2 if not all fit.
    Fits(FitsArgs),
    /// The moves by which a node or GPUs become empty, or free memory comes together. Without --evict it moves nothing. Exits
    /// with 2 if the goal names something that does not exist, and with 3 if the goal is not reached.
    Plan(PlanArgs),
    /// Closes GPUs of a node to new pods; its pods stay.
    Close(NodeGpus),
    /// Opens GPUs of a node to new pods again.
    Open(NodeGpus),
    /// Checks the installation. Exits with 2 if something is wrong.
    Doctor,
    /// Opens the live page of all GPUs in a browser, through a port-forward that lasts until Ctrl-C.
    Ui(Ui),
    /// The versions of this command, of the scheduler's replicas, and of the device plugins.
    Version,
    /// Moving nodes from another plugin.
    #[command(subcommand)]
    Migrate(Migrate),
    /// The resources and labels that Cluster Autoscaler, Cluster API and Karpenter need for nodes like one of the cluster.
    AutoscalerHints {
        /// The node.
        node: String,
    },
    /// Prints a completion script.
    Completion {
        /// The shell.
        shell: Shell,
    },
}

/// GPUs of one node.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct NodeGpus {
    /// The node.
    pub(crate) node: String,
    /// Minor numbers of the GPUs, separated by commas; without them all GPUs.
    #[arg(long, value_name = "MINORS", value_delimiter = ',')]
    pub(crate) gpus: Vec<u32>,
}

/// Kinds of rows other than GPUs.
#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Top {
    /// Nodes, one a row, with the sums over their GPUs.
    Nodes,
    /// Pods with a share of a GPU: their requests, limits and use.
    Pods {
        /// Pods of all namespaces.
        #[arg(short = 'A', long)]
        all_namespaces: bool,
    },
}

/// The rows of a table of `top`.
#[derive(Clone, Debug, Default, clap::Args)]
pub(crate) struct Rows {
    /// Show rows again whenever they change, until interrupted.
    #[arg(short, long, global = true)]
    pub(crate) watch: bool,
    /// Label selector of nodes, for `top pods` of pods.
    #[arg(short = 'l', long, global = true)]
    pub(crate) selector: Option<String>,
    /// Column that orders the rows: names by the alphabet, amounts with the largest first.
    #[arg(long, global = true, value_name = "COLUMN", conflicts_with = "watch")]
    pub(crate) sort_by: Option<String>,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Ui {
    /// Port on this machine; without it a free one.
    // The kernel chooses a free port for 0.
    #[arg(long, default_value_t = 0, hide_default_value = true)]
    pub(crate) port: u16,
    /// Print the address, and open no browser.
    #[arg(long)]
    pub(crate) no_browser: bool,
}

#[derive(Clone, Debug, clap::Args)]
pub(crate) struct FitsArgs {
    /// Manifest of a pod or of a workload that makes pods, or a folder of manifests (*.yaml, *.yml and *.json); `-` reads
    /// standard input.
    #[arg(short, long, value_name = "FILE|FOLDER")]
    pub(crate) filename: PathBuf,
    /// Number of pods; without it that of each workload.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=i64::from(proto::read_api::MAX_REPLICAS)))]
    pub(crate) replicas: Option<u32>,
    /// Domain that all pods have to share: one node, or the GPUs of one link group of a node; at most 64 pods. Without it that of
    /// the pods' annotation gpushare/group-domain, which the flag overrides.
    #[arg(
        long,
        value_parser = PossibleValuesParser::new(GroupDomain::ALL.map(GroupDomain::as_str))
            .try_map(|name| name.parse::<GroupDomain>())
    )]
    pub(crate) domain: Option<GroupDomain>,
    /// Empty nodes to add, as NODE=NUMBER: copies of an existing node, which may be named by its instance type.
    #[arg(long, value_name = "NODE=NUMBER", value_parser = added_nodes)]
    pub(crate) add_nodes: Vec<(String, u32)>,
}

/// The goal and the limits of `plan`, and the flags by which it makes the moves.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct PlanArgs {
    #[command(subcommand)]
    pub(crate) goal: PlannedGoal,
    /// Most moves.
    #[arg(
        long,
        global = true,
        default_value_t = PlanLimits::default().max_moves,
        value_parser = RangedU64ValueParser::<usize>::new().range(..=MAX_PLANNED_MOVES as u64),
        value_name = "N"
    )]
    pub(crate) max_moves: usize,
    /// Time that a pod must have run to be moved, such as 90s, 5m or 2h.
    #[arg(long, global = true, default_value = "5m", value_parser = duration, value_name = "TIME")]
    pub(crate) min_runtime: Duration,
    /// Evict the pods, one after the other unless --parallel says more, once you have confirmed the plan. GPUs that become empty
    /// are closed first.
    #[arg(long, global = true)]
    pub(crate) evict: bool,
    /// Evict without asking.
    #[arg(long, global = true)]
    pub(crate) yes: bool,
    /// Evict too if the goal cannot be reached.
    #[arg(long, global = true)]
    pub(crate) partial: bool,
    /// Most pods that are evicted at a time, each of another controller; 16 at most.
    #[arg(long, global = true, default_value = "1", value_parser = clap::value_parser!(u8).range(1..=16), value_name = "N")]
    pub(crate) parallel: u8,
    /// Longest time until an evicted pod is gone and its successor has a node, such as 90s, 5m or 2h.
    #[arg(long, global = true, default_value = "5m", value_parser = duration, value_name = "TIME")]
    pub(crate) timeout: Duration,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum PlannedGoal {
    /// Every pod that may move leaves the GPUs of a node.
    EmptyNode {
        /// The node.
        node: String,
    },
    /// Every pod that may move leaves some GPUs of a node.
    EmptyGpus {
        /// The node.
        node: String,
        /// Minor numbers of the GPUs, separated by commas.
        #[arg(required = true, value_name = "MINORS", value_delimiter = ',')]
        gpus: Vec<u32>,
    },
    /// GPUs of one node have memory free at the same time.
    Free {
        /// Memory on each GPU, such as 40Gi.
        #[arg(value_parser = bytes)]
        bytes: u64,
        /// Number of GPUs.
        #[arg(long, default_value_t = 1, value_name = "N")]
        gpus: usize,
        /// Label selector of the nodes of which any may be chosen.
        #[arg(long, value_name = "SELECTOR")]
        on: Option<String>,
    },
    /// The largest free block of memory of each node grows.
    Join,
}

#[derive(Clone, Debug, Subcommand)]
pub(crate) enum Migrate {
    /// The place of each node on the way, and the next step.
    Status,
}

/// Parses the value of `--as`, which becomes that of a header.
fn user_name(text: &str) -> Result<HeaderValue, String> {
    HeaderValue::from_str(text).map_err(|_| "a user name has no control characters".to_owned())
}

fn bytes(text: &str) -> Result<u64, String> {
    let amount = text.parse::<Quantity>().ok().and_then(Quantity::unsigned);
    amount.ok_or_else(|| "write bytes as Kubernetes does, such as 40Gi".to_owned())
}

/// Parses a time such as 90s, 5m or 2h.
fn duration(text: &str) -> Result<Duration, String> {
    match text.parse::<SignedDuration>().map(Duration::try_from) {
        // The scheduler counts whole seconds: 500ms would be no limit at all.
        Ok(Ok(time)) if time.subsec_nanos() == 0 => Ok(time),
        _ => Err("write a number and s, m or h, such as 5m".to_owned()),
    }
}

/// Parses a value of `--add-nodes`.
fn added_nodes(text: &str) -> Result<(String, u32), String> {
    match text.split_once('=').map(|(name, number)| (name, number.parse())) {
        Some((name, Ok(number))) if !name.is_empty() => Ok((name.to_owned(), number)),
        _ => Err("write a node, or an instance type, and a number, such as g5.xlarge=3".to_owned()),
    }
}
