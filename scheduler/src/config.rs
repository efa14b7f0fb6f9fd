//! The flags of the scheduler and their environment variables, parsed and checked once at the start.

mod filter;
mod leader;
mod make_room;
mod webhooks;

use std::net::{Ipv4Addr, SocketAddr};
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
use crate::make_room::RoomSettings;
use filter::PolicyArgs;
pub use filter::{AnswerNodes, MisfitNodes, weights};
use leader::LeaderArgs;
pub use leader::LeaderElection;
use make_room::MakeRoomArgs;
pub(crate) use webhooks::Command;
use webhooks::WebhookArgs;
pub use webhooks::{Admission, Certificates, Webhooks};

/// Largest request body, in bytes.
pub const MAX_BODY: usize = 32 << 20;
/// The path of the extender's verbs, as in the old gpushare extender: `urlPrefix` in kube-scheduler's configuration ends with it.
pub const PREFIX: &str = "/gpushare-scheduler";
/// Most requests that are answered at one time; more wait. A request that only reads memory takes a fraction of a millisecond.
pub const CONCURRENCY: usize = 512;
/// Most bindings on their way to the API server at one time: more would slow it down. Others wait up to
/// [`BIND_TIMEOUT`](crate::leader::BIND_TIMEOUT).
pub const BIND_CONCURRENCY: usize = 64;
/// The longest time for which room is kept for a pod with volumes or claims: kube-scheduler waits as long for them by default
/// (`bindTimeoutSeconds`).
const VOLUME_BIND_TIMEOUT: Duration = Duration::from_secs(600);
/// The longest time for which room is kept for a pod whose `status.nominatedNodeName` names the node.
const NOMINATED_HINT_TTL: Duration = Duration::from_secs(30 * 60);

/// Shares GPUs per device: an extender of kube-scheduler.
#[derive(Clone, Debug, Parser)]
#[command(name = "gpushare-scheduler", version, max_term_width = 100)]
pub struct Args {
    /// Address of the extender; on one that other machines reach clients need a certificate of the authority in
    /// `--tls-dir`, else of that in `--certificate-secret`.
    #[arg(long, env = "GPUSHARE_LISTEN", default_value = "127.0.0.1:12345")]
    listen: SocketAddr,
    /// Address to serve the live page of all GPUs and the read API on, such as 127.0.0.1:12346; if left out there is no page, and
    /// the read API only under the extender's prefix. On a loopback address every client is let in, which is every one that may
    /// forward a port to the pod; elsewhere TLS is served, and clients need a bearer token, for which the page asks.
    #[arg(long, env = "GPUSHARE_READ_LISTEN", value_name = "ADDRESS")]
    read_listen: Option<SocketAddr>,
    /// Name of the resource that counts GPU memory in units; the node annotation `<resource>-unit` has the size of a unit.
    #[arg(long, env = "GPUSHARE_MEMORY_RESOURCE", default_value = proto::resource::GPU_MEM, value_parser = resource_name)]
    memory_resource: String,
    #[command(flatten)]
    policies: PolicyArgs,
    /// Number of fitting nodes in the answer of filter, the best first; kube-scheduler's own scores count only among these: more
    /// than one where plugins of its profile must have a say. For a pod with preferences among nodes the answer has all fitting
    /// nodes.
    #[arg(
        long,
        env = "GPUSHARE_ANSWER_NODES",
        default_value = "1",
        value_name = "1-11|all"
    )]
    answer_nodes: AnswerNodes,
    /// Form in which filter reports nodes whose devices have no room, while evicting pods might make some: set `resolvable` from
    /// kube-scheduler 1.38 on, which then asks `preempt` about such nodes.
    #[arg(
        long,
        env = "GPUSHARE_MISFIT_NODES",
        value_enum,
        default_value = "unresolvable",
        hide_possible_values = true,
        value_name = "unresolvable|resolvable"
    )]
    misfit_nodes: MisfitNodes,
    #[command(flatten)]
    make_room: MakeRoomArgs,
    /// Time for which filter keeps room for a pod on the node of its answer, or on the best of several, until the pod is bound.
    /// Longer for a pod that is nominated to that node (30m), or that waits for volumes or claims (10m). Raise it where pods
    /// wait longer for the rest of their group (coscheduling, Koordinator).
    #[arg(long, env = "GPUSHARE_HINT_TTL", default_value = "30s", value_parser = parse_duration)]
    hint_ttl: Duration,
    /// Directory of a mounted TLS Secret (PEM): `tls.crt` and `tls.key` are the extender's certificate chain and key. Clients of
    /// filter, prioritize, preempt and bind then need a certificate that an authority in `ca.crt` signed.
    #[arg(long, env = "GPUSHARE_TLS_DIR", value_name = "DIR")]
    tls_dir: Option<PathBuf>,
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

/// The settings of the scheduler, checked against each other.
#[derive(Clone, Debug)]
pub struct Config {
    pub(crate) scheduling: Scheduling,
    pub(crate) serving: Serving,
    /// Election of a leader; `None` for a replica that is the only one.
    pub(crate) leader: Option<LeaderElection>,
    /// The settings of webhooks, and of certificates that the scheduler creates itself.
    pub admission: Admission,
    /// A command to execute instead of serving.
    pub(crate) command: Option<Command>,
}

/// The settings of filter, prioritize and bind.
#[derive(Clone, Debug)]
pub struct Scheduling {
    pub(crate) names: ResourceNames,
    pub(crate) policies: Policies,
    /// The enforcement of memory limits that pods demand which have no annotation about it.
    pub(crate) enforcement: DemandedEnforcement,
    pub(crate) weights: ResourceWeights,
    pub(crate) answer_nodes: AnswerNodes,
    pub(crate) misfit_nodes: MisfitNodes,
    /// The settings of the room that the leader makes by evictions; `None` if it makes none.
    pub(crate) make_room: Option<RoomSettings>,
    pub(crate) hints: HintTimes,
}

/// The settings of the HTTP servers.
#[derive(Clone, Debug)]
pub struct Serving {
    /// Address of the extender.
    pub listen: SocketAddr,
    /// Address of the page and the read API, if they have one.
    pub read_listen: Option<SocketAddr>,
    /// Largest request body, in bytes: [`MAX_BODY`] except in tests.
    pub max_body: usize,
    /// Longest time from the head of a request to the end of its body: [`READ_TIMEOUT`] except in tests.
    pub read_timeout: Duration,
    /// [`CONCURRENCY`] except in tests.
    pub concurrency: usize,
    /// [`BIND_CONCURRENCY`] except in tests.
    pub bind_concurrency: usize,
    /// The certificate files of the extender, if it has some.
    pub tls: Option<TlsFiles>,
    /// True if the extender shows a certificate from the Secret, and its verbs demand a client certificate of the same authority.
    pub tls_from_secret: bool,
}

impl Default for Serving {
    /// Plain text on any port of the loopback address.
    fn default() -> Self {
        Self {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 0)),
            read_listen: None,
            max_body: MAX_BODY,
            read_timeout: READ_TIMEOUT,
            concurrency: CONCURRENCY,
            bind_concurrency: BIND_CONCURRENCY,
            tls: None,
            tls_from_secret: false,
        }
    }
}

impl Serving {
    /// Returns true if the extender serves TLS; filter, prioritize, preempt and bind then demand a client certificate.
    pub fn demands_certificates(&self) -> bool {
        self.tls_from_secret || self.tls.is_some()
    }

    /// Refuses an address that other machines reach if clients need no certificate: any client could bind pods there.
    fn check_address(&self) -> anyhow::Result<()> {
        if is_loopback(self.listen) || self.demands_certificates() {
            return Ok(());
        }
        bail!(
            "--listen={}: every client that reaches this address could bind pods. Set --tls-dir or --certificate-secret, \
             so that clients must show a certificate; or listen on 127.0.0.1",
            self.listen
        )
    }

    /// Refuses an address of the read API at which clients would send bearer tokens without TLS.
    fn check_plain_tokens(&self) -> anyhow::Result<()> {
        // A port-forward ends on the loopback address, so there is no network between the client and this process.
        if let Some(address) = self.read_listen
            && !is_loopback(address)
            && !self.demands_certificates()
        {
            bail!(
                "--read-listen={address}: tokens would be sent in plain text. Set --tls-dir, or --certificate-secret with a --listen that \
                 other machines reach; or listen on 127.0.0.1"
            );
        }
        Ok(())
    }
}

/// Files of certificates and keys (PEM).
#[derive(Clone, Debug)]
pub struct TlsFiles {
    /// File with the certificate chain of the server.
    pub cert: PathBuf,
    /// File with the private key of the certificate.
    pub key: PathBuf,
    /// File with the authorities that sign the certificates of clients, if clients need one.
    pub client_ca: Option<PathBuf>,
}

impl TryFrom<Args> for Config {
    type Error = anyhow::Error;

    fn try_from(args: Args) -> anyhow::Result<Self> {
        let tls = args.tls_dir.map(|dir| TlsFiles {
            cert: dir.join("tls.crt"),
            key: dir.join("tls.key"),
            client_ca: Some(dir.join("ca.crt")),
        });
        let names = ResourceNames {
            memory: args.memory_resource,
        };
        // Rules between several flags, which clap does not check.
        let leader = args.leader.leader()?;
        // Clients on other machines need a certificate; kube-scheduler in the same pod needs none.
        let needs_tls = !is_loopback(args.listen);
        let admission = args.webhooks.admission(names.clone(), tls.as_ref(), needs_tls)?;
        let certificates = admission.certificates.as_ref();
        let serving = Serving {
            listen: args.listen,
            read_listen: args.read_listen,
            tls,
            tls_from_secret: certificates.is_some_and(|certificates| certificates.for_extender),
            ..Serving::default()
        };
        serving.check_plain_tokens()?;
        // A command does not listen.
        if args.command.is_none() {
            serving.check_address()?;
        }
        Ok(Self {
            scheduling: Scheduling {
                names,
                policies: Policies {
                    node: args.policies.node_policy,
                    device: args.policies.device_policy,
                },
                enforcement: args.policies.enforcement(),
                weights: weights(args.policies.score_weights),
                answer_nodes: args.answer_nodes,
                misfit_nodes: args.misfit_nodes,
                make_room: args.make_room.settings(args.misfit_nodes)?,
                hints: HintTimes {
                    plain: args.hint_ttl,
                    // A pod that waits for volumes or claims keeps its room at least as long as any other pod.
                    claims: VOLUME_BIND_TIMEOUT.max(args.hint_ttl),
                    // kube-scheduler removes a nomination in time; the limit is for one that stays.
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

/// Returns true if only this machine reaches the address.
pub(crate) fn is_loopback(address: SocketAddr) -> bool {
    // `::ffff:127.0.0.1` is the loopback address as well.
    address.ip().to_canonical().is_loopback()
}

/// Returns true if the text can be the domain or the name of an extended resource.
fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    (1..=253).contains(&text.len()) && bytes.all(|b| b.is_ascii_alphanumeric() || b"-._".contains(&b))
}

/// Parses the name of an extended resource: a domain, a slash and a name.
fn resource_name(text: &str) -> Result<String, String> {
    match text.split_once('/') {
        // Kubernetes allows 63 characters in the name of an extended resource, and 253 in its domain.
        Some((domain, name)) if is_name(domain) && is_name(name) && name.len() <= 63 => Ok(text.to_owned()),
        _ => Err("must be a resource name with a domain, such as aliyun.com/gpu-mem".to_owned()),
    }
}

#[cfg(test)]
mod tests;
