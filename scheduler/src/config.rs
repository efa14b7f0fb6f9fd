//! Flags and environment variables, parsed and checked once. Nothing else of the daemon reads either.

mod filter;
mod leader;
mod webhooks;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::bail;
use clap::Parser;
use daemon::duration::parse_duration;
use daemon::http_server::READ_TIMEOUT;
use daemon::process::ProcessArgs;
use placement::{Policies, ResourceWeights};
use proto::request::hints::DemandedEnforcement;
use proto::resource::ResourceNames;

use crate::index::HintTimes;
use filter::PolicyArgs;
pub use filter::{AnswerNodes, MisfitNodes, weights};
use leader::LeaderArgs;
pub use leader::LeaderElection;
use webhooks::WebhookArgs;
pub use webhooks::{Admission, Certificates, Command, Webhooks};

/// Largest request body, in bytes.
pub const MAX_BODY: usize = 32 << 20;
/// The path of the extender's verbs, as in the old gpushare extender: `urlPrefix` in kube-scheduler's configuration ends with it.
pub const PREFIX: &str = "/gpushare-scheduler";
/// Most requests in work at one time; more wait.
pub const CONCURRENCY: usize = 512;
/// The longest time for which room is kept for a pod with volumes or claims: kube-scheduler's default for `bindTimeoutSeconds` of
/// `VolumeBindingArgs`, the time for which it waits for them before it binds.
const VOLUME_BIND_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest time for which room is kept for a pod whose `status.nominatedNodeName` names the node.
const NOMINATED_HINT_TTL: Duration = Duration::from_secs(30 * 60);

/// Shares GPUs per device: an extender of kube-scheduler.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpushare-scheduler", version, max_term_width = 100)]
pub struct Args {
    /// Address to serve on; one that others reach needs client certificates (`--client-ca-file` or `--tls-from-secret`).
    #[arg(long, env = "GPUSHARE_LISTEN", default_value = "127.0.0.1:12345")]
    listen: SocketAddr,
    /// Address to serve the read API on, such as 127.0.0.1:12346; nowhere but under the extender's prefix if left out. On a
    /// loopback address every client is let in, which is every one that may forward a port to the pod; elsewhere TLS is
    /// served, and clients need a bearer token.
    #[arg(long, env = "GPUSHARE_READ_LISTEN", value_name = "ADDRESS")]
    read_listen: Option<SocketAddr>,
    /// Address to serve the live page of all GPUs on, with the read API that it reads, such as 127.0.0.1:12347; nowhere if left
    /// out. The same clients are let in as with --read-listen; elsewhere than on a loopback address the page asks for the token.
    #[arg(long, env = "GPUSHARE_PAGE_LISTEN", value_name = "ADDRESS")]
    page_listen: Option<SocketAddr>,
    /// Resource that counts GPU memory in units; the node annotation `<resource>-unit` says how much a unit is.
    #[arg(long, env = "GPUSHARE_MEMORY_RESOURCE", default_value = proto::resource::GPU_MEM, value_parser = resource_name)]
    memory_resource: String,
    #[command(flatten)]
    policies: PolicyArgs,
    /// Number of fitting nodes in the answer of filter, the best first; kube-scheduler's own scores count only among these. A
    /// pod with preferences among nodes is answered with all.
    #[arg(
        long,
        env = "GPUSHARE_ANSWER_NODES",
        default_value = "1",
        value_name = "1-11|all"
    )]
    answer_nodes: AnswerNodes,
    /// The report of filter on nodes whose devices have no room, while evicting pods might make some: `resolvable` from kube-scheduler
    /// 1.37 on, which then asks `preempt` about them.
    #[arg(
        long,
        env = "GPUSHARE_MISFIT_NODES",
        value_enum,
        default_value = "unresolvable",
        hide_possible_values = true,
        value_name = "unresolvable|resolvable"
    )]
    misfit_nodes: MisfitNodes,
    /// Longest time that one bind may take; stay below the extender's httpTimeout (3s as shipped).
    #[arg(long, env = "GPUSHARE_BIND_TIMEOUT", default_value = "2s", value_parser = parse_duration)]
    bind_timeout: Duration,
    /// Time for which an answer keeps room for its pod on the one node that it leaves, or on the best of several, if the pod is neither
    /// nominated to that node nor waits for volumes or claims.
    #[arg(long, env = "GPUSHARE_HINT_TTL", default_value = "30s", value_parser = parse_duration)]
    hint_ttl: Duration,
    /// Most bindings on their way to the API server at one time, each on a connection of its own; more wait, and nothing is
    /// written of one that has waited too long. More at once make a busy API server slower, not faster.
    #[arg(long, env = "GPUSHARE_BIND_CONCURRENCY", default_value_t = 64, value_parser = concurrency)]
    bind_concurrency: usize,
    /// Certificate chain to serve TLS with (PEM).
    #[arg(
        long,
        env = "GPUSHARE_TLS_CERT_FILE",
        requires = "tls_key_file",
        value_name = "FILE"
    )]
    tls_cert_file: Option<PathBuf>,
    /// Private key of that certificate (PEM).
    #[arg(
        long,
        env = "GPUSHARE_TLS_KEY_FILE",
        requires = "tls_cert_file",
        value_name = "FILE"
    )]
    tls_key_file: Option<PathBuf>,
    /// Authorities (PEM); with it filter, prioritize, preempt and bind demand a client certificate that one of them signed.
    #[arg(
        long,
        env = "GPUSHARE_CLIENT_CA_FILE",
        requires = "tls_cert_file",
        value_name = "FILE"
    )]
    client_ca_file: Option<PathBuf>,
    #[command(flatten)]
    leader: LeaderArgs,
    #[command(flatten)]
    webhooks: WebhookArgs,
    /// The flags that every daemon has.
    #[command(flatten)]
    pub process: ProcessArgs,
    #[command(subcommand)]
    command: Option<Command>,
}

/// The checked configuration.
#[derive(Clone, Debug)]
pub struct Config {
    /// Kubeconfig file, if one is given.
    pub kubeconfig: Option<PathBuf>,
    /// Scheduling.
    pub scheduling: Scheduling,
    /// HTTP.
    pub serving: Serving,
    /// Election of a leader, if there are several replicas.
    pub leader: Option<LeaderElection>,
    /// Webhooks, and certificates that are made here.
    pub admission: Admission,
    /// A command to execute instead of serving.
    pub command: Option<Command>,
}

/// The settings of scheduling.
#[derive(Clone, Debug)]
pub struct Scheduling {
    /// Resource names that the cluster chooses.
    pub names: ResourceNames,
    /// Order of nodes, and of a node's devices.
    pub policies: Policies,
    /// The enforcement of memory limits for pods that do not say which they demand.
    pub enforcement: DemandedEnforcement,
    /// The weights of resources, for the policies that use them.
    pub weights: ResourceWeights,
    /// The number of fitting nodes in an answer.
    pub answer_nodes: AnswerNodes,
    /// The form in which filter reports nodes whose devices have no room.
    pub misfit_nodes: MisfitNodes,
    /// Longest time that one bind may take.
    pub bind_timeout: Duration,
    /// The times for which room is kept for pods that are not bound yet.
    pub hints: HintTimes,
}

/// The settings of the HTTP servers.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Address to serve on.
    pub listen: SocketAddr,
    /// Address to serve the read API on too.
    pub read_listen: Option<SocketAddr>,
    /// Address to serve the page on.
    pub page_listen: Option<SocketAddr>,
    /// Largest request body, in bytes.
    pub max_body: usize,
    /// Longest time in which a request must have come in whole.
    pub read_timeout: Duration,
    /// Most requests in work at one time.
    pub concurrency: usize,
    /// Most bindings on their way to the API server at one time.
    pub bind_concurrency: usize,
    /// Certificates in files, if TLS is served with such.
    pub tls: Option<TlsFiles>,
    /// True if TLS is served with the scheduler's own certificates, and the verbs demand one of the same authority.
    pub tls_from_secret: bool,
}

impl Serving {
    /// Returns true if filter, prioritize, preempt and bind demand a client certificate.
    pub fn demands_certificates(&self) -> bool {
        self.tls_from_secret || self.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some())
    }

    /// Refuses an address that other machines reach if clients need no certificate: any client could bind pods there.
    fn check_address(&self) -> anyhow::Result<()> {
        if self.listen.ip().to_canonical().is_loopback() || self.demands_certificates() {
            return Ok(());
        }
        bail!(
            "--listen={}: every client that reaches this address could bind pods. Set --tls-cert-file, --tls-key-file and --client-ca-file, \
             or --certificate-secret and --tls-from-secret, so that clients must show a certificate; or listen on 127.0.0.1",
            self.listen
        )
    }

    /// Refuses an address at which clients would send bearer tokens without TLS.
    fn check_plain_tokens(&self, flag: &str, address: Option<SocketAddr>) -> anyhow::Result<()> {
        match address {
            Some(address)
                if !address.ip().to_canonical().is_loopback()
                    && self.tls.is_none()
                    && !self.tls_from_secret =>
            {
                bail!(
                    "{flag}={address}: tokens would be sent in plain text. Set --tls-cert-file and --tls-key-file, or \
                     --certificate-secret and --tls-from-secret; or listen on 127.0.0.1"
                )
            }
            _ => Ok(()),
        }
    }
}

/// Files of certificates and keys (PEM).
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// Certificate chain.
    pub cert: PathBuf,
    /// Private key.
    pub key: PathBuf,
    /// Authorities that sign the certificates of clients, if the verbs demand one.
    pub client_ca: Option<PathBuf>,
}

impl TryFrom<Args> for Config {
    type Error = anyhow::Error;

    fn try_from(args: Args) -> anyhow::Result<Self> {
        if args.bind_timeout.is_zero() {
            bail!("--bind-timeout must be longer than 0s");
        }
        let tls = match (args.tls_cert_file, args.tls_key_file) {
            (Some(cert), Some(key)) => Some(TlsFiles {
                cert,
                key,
                client_ca: args.client_ca_file,
            }),
            _ => None,
        };
        let names = ResourceNames {
            memory: args.memory_resource,
        };
        let leader = args.leader.leader(args.bind_timeout)?;
        let admission = args.webhooks.admission(names.clone(), tls.as_ref())?;
        let serving = Serving {
            listen: args.listen,
            read_listen: args.read_listen,
            page_listen: args.page_listen,
            max_body: MAX_BODY,
            read_timeout: READ_TIMEOUT,
            concurrency: CONCURRENCY,
            bind_concurrency: args.bind_concurrency,
            tls,
            tls_from_secret: admission
                .certificates
                .as_ref()
                .is_some_and(|certificates| certificates.for_extender),
        };
        serving.check_plain_tokens("--read-listen", serving.read_listen)?;
        serving.check_plain_tokens("--page-listen", serving.page_listen)?;
        // A command does not listen.
        if args.command.is_none() {
            serving.check_address()?;
        }
        Ok(Self {
            kubeconfig: args.process.kubeconfig,
            scheduling: Scheduling {
                names,
                policies: args.policies.policies(),
                enforcement: args.policies.enforcement(),
                weights: args.policies.weights(),
                answer_nodes: args.answer_nodes,
                misfit_nodes: args.misfit_nodes,
                bind_timeout: args.bind_timeout,
                hints: HintTimes {
                    plain: args.hint_ttl,
                    claims: VOLUME_BIND_TIMEOUT.max(args.hint_ttl),
                    nominated: NOMINATED_HINT_TTL.max(args.hint_ttl),
                },
            },
            serving,
            leader,
            admission,
            command: args.command,
        })
    }
}

fn concurrency(text: &str) -> Result<usize, String> {
    let most: usize = text.parse().map_err(|_| "not a whole number".to_owned())?;
    (1..=65_536)
        .contains(&most)
        .then_some(most)
        .ok_or_else(|| "must be from 1 to 65536".to_owned())
}

/// An extended resource name: a domain, a slash, a name.
fn resource_name(text: &str) -> Result<String, String> {
    let word = |word: &str| {
        !word.is_empty()
            && word.len() <= 253
            && word
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
    };
    match text.split_once('/') {
        Some((domain, name)) if word(domain) && word(name) && name.len() <= 63 => Ok(text.to_owned()),
        _ => Err("must be a resource name with a domain, such as aliyun.com/gpu-mem".to_owned()),
    }
}

#[cfg(test)]
mod tests;
