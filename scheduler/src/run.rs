//! Puts the daemon together: configuration, log, client, watches, leader election, routes; runs until a signal.

mod leader;
mod tls;

use std::fmt::Debug;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context;
use daemon::api_server::Connection;
use daemon::health::MetricsText;
use daemon::logging;
use daemon::panics::log_panics;
use daemon::signals::cancel_on_signal;
use daemon::supervise::Tasks;
use daemon::watch::WatchLag;
use daemon::watchdog::{self, Probe};
use futures::future::OptionFuture;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use proto::node::Node;
use serde::de::DeserializeOwned;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use leader::OwnReplica;

use crate::admission;
use crate::admission::server::Webhooks;
use crate::bind::Binder;
use crate::certificates::issue::{Order, issue};
use crate::config::{Args, Command, Config, READ_TIMEOUT, Serving};
use crate::extender::{Extender, bind, health_router, requeue, router};
use crate::index::{Index, RawDevice, Shared};
use crate::leader::Leadership;
use crate::metrics::{Metrics, register_watches};
use crate::page;
use crate::prewarm::prewarm;
use crate::read_api::{self, ReadApi};
use crate::room::Room;
use crate::serve::tls::CurrentTls;
use crate::serve::{serve, serve_with_resets};
use crate::watch::{ObjectStore, follow, watch};

/// Runs the daemon until SIGTERM or SIGINT.
///
/// # Errors
/// The reason for which it cannot start, or the end of a task.
pub async fn run(args: Args) -> anyhow::Result<()> {
    let config = Config::try_from(args)?;
    logging::start(config.log.format, &config.log.filter);
    log_panics();
    let connection = Connection::new(config.kubeconfig.as_deref()).await?;
    let namespace = config
        .admission
        .namespace
        .clone()
        .unwrap_or_else(|| connection.client.default_namespace().to_owned());
    match &config.command {
        Some(command) => execute(command, connection.client, config.admission.authority, namespace).await,
        None => serve_until_stopped(config, connection, namespace).await,
    }
}

async fn execute(command: &Command, client: Client, secret: String, namespace: String) -> anyhow::Result<()> {
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

async fn serve_until_stopped(
    config: Config,
    connection: Connection,
    namespace: String,
) -> anyhow::Result<()> {
    let stop = cancel_on_signal().context("cannot wait for signals")?;
    let client = connection.client.clone();
    let replica = OwnReplica::new(&config, &namespace);
    let home = replica.namespace().unwrap_or(&namespace).to_owned();
    let index = Shared::new(index(&config).watching_plugins_in(&home).prewarming());
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    let mut tasks = Tasks::default();
    let extender = Arc::new(extender(
        &config,
        &client,
        &index,
        &replica.leadership,
        &mut registry,
    ));
    replica.leadership.register(&mut registry);
    let connection_resets = replica.leadership.connection_resets();
    let tls = tls::begin(&config, &client, namespace, &mut registry, &mut tasks)?;
    // Every address is bound before anything is watched: a process that cannot listen ends at once.
    let listener = listen_for_verbs(&config.serving).await?;
    let webhooks = webhooks(&config, &index, tls.webhooks, &mut registry).await?;
    let read_listeners = (
        listen_if_set(config.serving.read_listen).await?,
        listen_if_set(config.serving.page_listen).await?,
    );
    let health_listener = listen_if_set(config.serving.health_listen).await?;
    info!(
        prefix = config.serving.prefix,
        tls = tls.extender.is_some(),
        webhooks = webhooks.is_some(),
        "serving"
    );
    register_watches(
        &mut registry,
        watch_all(&connection, &index, &replica, &mut tasks),
    );
    let stop = replica.begin(&connection, index.clone(), stop, &mut tasks);
    tasks.spawn(
        "sweep of unsettled binds",
        bind::sweep_unseen(Arc::clone(&extender)),
    );
    let room = Room::new(client, home);
    tasks.spawn(
        "announcements of room",
        requeue::announce_room(Arc::clone(&extender), room),
    );
    tasks.spawn("prewarm", prewarm(index.clone()));
    watch_for_hangs(config.hang_timeout, index)?;
    let metrics = MetricsText::new(registry);
    let read_timeout = config.serving.read_timeout;
    let read_api = Arc::new(ReadApi::new(Arc::clone(&extender), stop.clone()).with_certificates(tls.metrics));
    tasks.spawn("history", Arc::clone(&read_api).record_history());
    let serving = &config.serving;
    let reads = serve_reads(read_listeners, &read_api, tls.extender.clone(), stop.clone());
    let reads_of_verbs = read_api::router(&read_api, &serving.prefix, serving.guards_views());
    let routes = router(Arc::clone(&extender), metrics.clone(), serving).merge(reads_of_verbs);
    let health = health_listener.map(|listener| {
        let routes = health_router(extender, metrics);
        serve(
            listener,
            routes,
            None,
            read_timeout,
            stop.clone().cancelled_owned(),
        )
    });
    let webhooks = webhooks.map(|(listener, routes, tls)| {
        serve(
            listener,
            routes,
            Some(tls),
            read_timeout,
            stop.clone().cancelled_owned(),
        )
    });
    let extender = serve_with_resets(
        listener,
        routes,
        tls.extender,
        read_timeout,
        connection_resets,
        stop.cancelled_owned(),
    );
    // All servers end together: the first one that stops must not cut off the requests of the others.
    let servers = async {
        tokio::join!(
            extender,
            OptionFuture::from(health),
            reads,
            OptionFuture::from(webhooks)
        )
    };
    tokio::select! {
        ended = tasks.ended() => Err(ended.into()),
        _ = servers => {
            info!("stopped");
            Ok(())
        }
    }
}

/// Serves the read API and the page on addresses of their own.
async fn serve_reads(
    (reads, page): (Option<TcpListener>, Option<TcpListener>),
    api: &Arc<ReadApi>,
    tls: Option<CurrentTls>,
    stop: CancellationToken,
) {
    let serve = |listener: TcpListener, routes: fn(&Arc<ReadApi>, bool) -> axum::Router| {
        let address = listener.local_addr();
        let is_local = address.is_ok_and(|address| address.ip().to_canonical().is_loopback());
        // A port-forward ends on the loopback address, which no other machine reaches and no certificate names.
        let tls = tls.clone().filter(|_| !is_local);
        let stop = stop.clone().cancelled_owned();
        serve(listener, routes(api, !is_local), tls, READ_TIMEOUT, stop)
    };
    let reads =
        reads.map(|listener| serve(listener, |api, is_guarded| read_api::router(api, "", is_guarded)));
    let page = page.map(|listener| serve(listener, page::router));
    tokio::join!(OptionFuture::from(reads), OptionFuture::from(page));
}

fn extender(
    config: &Config,
    client: &Client,
    index: &Shared<Index>,
    leadership: &Leadership,
    registry: &mut Registry,
) -> Extender {
    let metrics = Metrics::register(registry, index.clone());
    let binder = Binder::new(client.clone(), config.scheduling.bind_timeout, leadership.clone());
    Extender::new(index.clone(), metrics, binder, &config.serving)
        .with_token_reviews(client.clone())
        .with_rules(config.admission.rules.clone())
        .with_answer_nodes(config.scheduling.answer_nodes)
        .with_misfit_nodes(config.scheduling.misfit_nodes)
}

/// The listener, routes and certificates of the webhooks, if they are configured.
async fn webhooks(
    config: &Config,
    index: &Shared<Index>,
    tls: Option<CurrentTls>,
    registry: &mut Registry,
) -> anyhow::Result<Option<(TcpListener, axum::Router, CurrentTls)>> {
    let Some((settings, tls)) = config.admission.webhooks.as_ref().zip(tls) else {
        return Ok(None);
    };
    let webhooks = Webhooks::new(config.admission.rules.clone(), index.clone(), registry)
        .demanding_certificates(settings.client_ca.is_some());
    let routes = admission::server::router(Arc::new(webhooks), &config.serving.prefix);
    Ok(Some((listen(settings.listen).await?, routes, tls)))
}

/// Ends the process if it hangs for `limit`; never if that is zero.
fn watch_for_hangs(limit: Duration, index: Shared<Index>) -> anyhow::Result<()> {
    let started = Probe::of_lock("lock of the index", move || drop(index.write()))
        .and_then(|lock| watchdog::watch(limit, vec![Probe::of_runtime(Handle::current()), lock]));
    started.context("cannot start the thread that watches for hangs")
}

async fn listen_for_verbs(serving: &Serving) -> anyhow::Result<TcpListener> {
    if !serving.is_local() && !serving.demands_certificates() {
        warn!(address = %serving.listen, "--insecure-listen: every client that reaches this address may bind pods");
    }
    listen(serving.listen).await
}

async fn listen_if_set(address: Option<SocketAddr>) -> anyhow::Result<Option<TcpListener>> {
    match address {
        Some(address) => listen(address).await.map(Some),
        None => Ok(None),
    }
}

async fn listen(address: SocketAddr) -> anyhow::Result<TcpListener> {
    let listener = TcpListener::bind(address)
        .await
        .with_context(|| format!("cannot listen on {address}"))?;
    info!(address = %listener.local_addr().unwrap_or(address), "listening");
    Ok(listener)
}

/// Watches every kind; returns the lags of the kinds that decisions depend on.
fn watch_all(
    connection: &Connection,
    index: &Shared<Index>,
    replica: &OwnReplica,
    tasks: &mut Tasks,
) -> Vec<WatchLag> {
    // A cluster may withhold this right, so readiness does not wait for this kind and its age is no cause for alarm.
    let budgets = Api::<PodDisruptionBudget>::all(connection.client.clone());
    let budgets = watch("disruption budgets", budgets, &connection.contact);
    tasks.spawn("watch of disruption budgets", follow(budgets, index.clone()));
    vec![
        watch_kind::<Node>(("nodes", "watch of nodes"), connection, index, tasks),
        watch_kind::<RawDevice>(("devices", "watch of devices"), connection, index, tasks),
        replica.watch_pods(connection, index, tasks),
    ]
}

fn watch_kind<K>(
    (name, task): (&'static str, &'static str),
    connection: &Connection,
    index: &Shared<Index>,
    tasks: &mut Tasks,
) -> WatchLag
where
    K: kube::Resource<DynamicType = ()> + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    Index: ObjectStore<K>,
{
    let lag = WatchLag::new(<Index as ObjectStore<K>>::KIND);
    let objects = watch(
        name,
        Api::<K>::all(lag.observe(&connection.client)),
        &connection.contact,
    );
    tasks.spawn(task, follow(objects, index.clone()));
    lag
}

fn index(config: &Config) -> Index {
    let scheduling = &config.scheduling;
    let index = Index::new(
        scheduling.names.clone(),
        scheduling.policies,
        scheduling.hints.plain,
    )
    .holding(scheduling.hints)
    .weighing(scheduling.weights.clone())
    .demanding(scheduling.enforcement);
    index.allowing_all_devices(config.admission.rules.allow_all_devices)
}
