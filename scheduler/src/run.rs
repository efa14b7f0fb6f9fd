//! Puts the daemon together: configuration, log, client, watches, routes; runs until told to stop.

mod leader;
mod tls;

use std::fmt::Debug;
use std::io::IsTerminal;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use daemon::panics::log_panics;
use daemon::supervise::Tasks;
use daemon::watchdog::{self, Probe};
use futures::FutureExt;
use futures::future::OptionFuture;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::config::{KubeConfigOptions, Kubeconfig};
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use proto::node::Node;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::signal::unix::{SignalKind, signal};
use tracing::{info, warn};
use tracing_subscriber::EnvFilter;

use leader::{Part, Stop};

use crate::bind::Binder;
use crate::certificates::issue::{Order, issue};
use crate::config::{Args, Command, Config, Log, LogFormat, Serving};
use crate::extender::{Extender, health_router, router};
use crate::index::{Index, RawDevice, Shared};
use crate::metrics::{Metrics, register_watches};
use crate::rehearsal::rehearse;
use crate::room::Room;
use crate::serve::{serve, serve_anew};
use crate::watch::heard::Heard;
use crate::watch::{Follow, watch};
use crate::webhook::{self, Webhooks};

/// How long a connection to the API server may take to stand.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// How long the API server may say nothing before a list or a watch is begun anew: longer than any watch lasts (295 s).
const READ_TIMEOUT: Duration = Duration::from_secs(300);

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// Whatever keeps it from starting, and the end of a task that goes on as long as the process.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let config = Config::try_from(args)?;
    start_log(&config.log)?;
    log_panics();
    let client = client(&config).await?;
    let namespace = config
        .admission
        .namespace
        .clone()
        .unwrap_or_else(|| client.default_namespace().to_owned());
    if let Some(command) = &config.command {
        return obey(command, client, config.admission.authority, namespace).await;
    }
    let stop: Stop = stop_signal()?.boxed().shared();
    let part = Part::of(&config, &namespace);
    let home = part.namespace().unwrap_or(&namespace).to_owned();
    let index = Shared::new(index(&config).watching_plugins_in(&home).rehearsing());
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    let metrics = Metrics::register(&mut registry, index.clone());
    part.leadership.register(&mut registry);
    let hangups = part.leadership.hangups();
    let binder = Binder::new(
        client.clone(),
        config.scheduling.bind_timeout,
        part.leadership.clone(),
    );
    let extender =
        Extender::new(index.clone(), metrics, binder, &config.serving).asking_about_readers(client.clone());
    let extender = Arc::new(
        extender
            .judging_by(config.admission.rules.clone())
            .answering(config.scheduling.answer_nodes)
            .reporting(config.scheduling.misfit_nodes),
    );
    let mut tasks = Tasks::default();
    let tls = tls::begin(&config, &client, namespace, &mut registry, &mut tasks)?;
    let listener = listen_for_verbs(&config.serving).await?;
    let webhooks = match config.admission.webhooks.as_ref().zip(tls.webhooks) {
        None => None,
        Some((webhooks, tls)) => {
            let judge = Webhooks::new(config.admission.rules.clone(), index.clone(), &mut registry);
            let judge = judge.demanding_certificates(webhooks.client_ca.is_some());
            Some((
                listen(webhooks.listen).await?,
                webhook::router(Arc::new(judge), &config.serving.prefix),
                tls,
            ))
        }
    };
    let health = OptionFuture::from(config.serving.health_listen.map(listen))
        .await
        .transpose()?;
    info!(
        prefix = config.serving.prefix,
        tls = tls.extender.is_some(),
        webhooks = webhooks.is_some(),
        "serving"
    );
    register_watches(&mut registry, watch_all(&client, &index, &part, &mut tasks));
    let room = Room::new(client.clone(), home);
    let stop = part.begin(client, index.clone(), stop, &mut tasks);
    tasks.spawn(
        "search for decisions that are not seen",
        Arc::clone(&extender).sweep(),
    );
    tasks.spawn("announcements of room", Arc::clone(&extender).announce(room));
    tasks.spawn("rehearsal", rehearse(index.clone()));
    watch_for_hangs(config.hang_timeout, index)?;
    let registry = Arc::new(registry);
    let read_timeout = config.serving.read_timeout;
    let routes = router(Arc::clone(&extender), Arc::clone(&registry), &config.serving);
    let health = health.map(|listener| {
        serve(
            listener,
            health_router(extender, registry),
            None,
            read_timeout,
            stop.clone(),
        )
    });
    let webhooks = webhooks
        .map(|(listener, routes, tls)| serve(listener, routes, Some(tls), read_timeout, stop.clone()));
    let extender = serve_anew(listener, routes, tls.extender, read_timeout, hangups, stop);
    let servers = async { tokio::join!(extender, OptionFuture::from(health), OptionFuture::from(webhooks)) };
    tokio::select! {
        ended = tasks.ended() => Err(ended.into()),
        _ = servers => {
            info!("stopped");
            Ok(())
        }
    }
}

/// Ends the process if it hangs for so long; never for zero.
fn watch_for_hangs(limit: Duration, index: Shared<Index>) -> anyhow::Result<()> {
    if limit.is_zero() {
        return Ok(());
    }
    let started = Probe::of_lock("lock of the index", move || drop(index.write()))
        .and_then(|lock| watchdog::watch(limit, vec![Probe::of_runtime(Handle::current()), lock]));
    started.context("cannot start the thread that watches for hangs")
}

async fn obey(command: &Command, client: Client, secret: String, namespace: String) -> anyhow::Result<()> {
    match command {
        Command::IssueClientCertificate { out, name, lifetime } => {
            let order = Order {
                secret,
                namespace,
                name: name.clone(),
                lifetime: *lifetime,
            };
            issue(client, &order, out).await?;
            info!(folder = %out.display(), name, "client certificate written");
            Ok(())
        }
    }
}

async fn listen_for_verbs(serving: &Serving) -> anyhow::Result<TcpListener> {
    if !serving.is_local() && !serving.demands_certificates() {
        warn!(address = %serving.listen, "--insecure-listen: every client that reaches this address may bind pods");
    }
    listen(serving.listen).await
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    info!(address = %listener.local_addr().unwrap_or(address), "listening");
    Ok(listener)
}

/// Follows every kind; says when each was last heard of.
fn watch_all(client: &Client, index: &Shared<Index>, part: &Part, tasks: &mut Tasks) -> Vec<Heard> {
    // A cluster may withhold this right, so that nothing waits for it and its age is no cause for alarm.
    let budgets = Api::<PodDisruptionBudget>::all(client.clone());
    tasks.spawn("watch of disruption budgets", watch(budgets, index.clone()));
    let nodes = watch_kind::<Node>("watch of nodes", client, index, tasks);
    vec![
        nodes,
        watch_kind::<RawDevice>("watch of devices", client, index, tasks),
        part.watch_pods(client, index, tasks),
    ]
}

fn watch_kind<K>(name: &'static str, client: &Client, index: &Shared<Index>, tasks: &mut Tasks) -> Heard
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + 'static,
    Index: Follow<K>,
{
    let heard = Heard::new(<Index as Follow<K>>::KIND);
    tasks.spawn(name, watch(Api::<K>::all(heard.listen(client)), index.clone()));
    heard
}

fn index(config: &Config) -> Index {
    let scheduling = &config.scheduling;
    let index = Index::new(
        scheduling.names.clone(),
        scheduling.policies,
        scheduling.hints.plain,
    )
    .holding(scheduling.hints)
    .weighing(scheduling.weights.clone());
    index.allowing_all_devices(config.admission.rules.allow_all_devices)
}

/// A client without retries and rate limits of its own: binds must know what was sent, and how often.
async fn client(config: &Config) -> anyhow::Result<Client> {
    let mut settings = match &config.kubeconfig {
        Some(path) => {
            let at = || format!("kubeconfig {}", path.display());
            let file = Kubeconfig::read_from(path).with_context(at)?;
            kube::Config::from_custom_kubeconfig(file, &KubeConfigOptions::default())
                .await
                .with_context(at)?
        }
        None => kube::Config::infer()
            .await
            .context("no kubeconfig and no service account to reach the API server with")?,
    };
    settings.default_retry = false;
    settings.connect_timeout = Some(CONNECT_TIMEOUT);
    settings.read_timeout = Some(READ_TIMEOUT);
    Client::try_from(settings).context("cannot make a client of the API server")
}

fn start_log(log: &Log) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&log.level).with_context(|| format!("--log-level {:?}", log.level))?;
    // A line that cannot be written, as on a full disk, is lost: saying so would end the task that wanted to write it.
    let builder = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .log_internal_errors(false);
    let builder = builder.with_ansi(std::io::stderr().is_terminal());
    let started = match log.format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
    started.map_err(|error| anyhow::anyhow!("cannot start the log: {error}"))
}

fn stop_signal() -> anyhow::Result<impl Future<Output = ()>> {
    let mut terminate = signal(SignalKind::terminate()).context("cannot wait for SIGTERM")?;
    let mut interrupt = signal(SignalKind::interrupt()).context("cannot wait for SIGINT")?;
    Ok(async move {
        tokio::select! {
            _ = terminate.recv() => info!("SIGTERM, stopping"),
            _ = interrupt.recv() => info!("SIGINT, stopping"),
        }
    })
}
