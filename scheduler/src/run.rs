//! Starts the parts of the scheduler in its process: the watches, the tasks between them, and the servers.
//!
//! A process with a command on its command line carries the command out instead of serving. No other module knows all parts.

mod farewell;
mod leader;
mod tls;

use std::fmt::Debug;
use std::sync::Arc;

use axum::Router;
use daemon::api_server::Connection;
use daemon::health::MetricsText;
use daemon::http_server::{CurrentTls, HttpServer, listen};
use daemon::process::Process;
use daemon::supervise::Tasks;
use daemon::watch::WatchLag;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use proto::node::Node;
use serde::de::DeserializeOwned;
use tracing::info;

use leader::OwnReplica;

use crate::admission;
use crate::admission::server::Webhooks;
use crate::bind::Binder;
use crate::certificates::issue::{Order, issue};
use crate::config::{Args, Command, Config, PREFIX, Serving};
use crate::extender::{Extender, bind, health_router, requeue, router};
use crate::index::{Index, RawDevice, Shared};
use crate::leader::Leadership;
use crate::metrics::{Metrics, register_watches};
use crate::page;
use crate::prewarm::prewarm;
use crate::read_api::{self, ReadApi};
use crate::room::Room;
use crate::watch::{ObjectStore, follow, watch};

/// Runs the daemon in its process.
///
/// # Errors
/// The daemon cannot start, or a task has ended.
pub async fn run(args: Args, mut process: Process) -> anyhow::Result<()> {
    let config = Config::try_from(args)?;
    let connection = Connection::new(config.kubeconfig.as_deref()).await?;
    let namespace = config
        .admission
        .namespace
        .clone()
        .unwrap_or_else(|| connection.client.default_namespace().to_owned());
    let Some(command) = config.command else {
        return serve_requests(config, connection, namespace, process).await;
    };
    let executed = execute(command, connection.client, config.admission.authority, namespace);
    process.complete(executed).await.map(drop)
}

/// Carries out a command of the command line, in place of serving.
async fn execute(command: Command, client: Client, secret: String, namespace: String) -> anyhow::Result<()> {
    let Command::IssueClientCertificate { out, name, lifetime } = command;
    let order = Order {
        secret,
        namespace,
        name,
        lifetime,
    };
    issue(client, &order, &out).await?;
    info!(folder = %out.display(), name = order.name, "client certificate written");
    Ok(())
}

/// Starts all tasks and servers of the scheduler, and serves until a signal or the end of a task ends the process.
async fn serve_requests(
    config: Config,
    connection: Connection,
    namespace: String,
    mut process: Process,
) -> anyhow::Result<()> {
    let client = connection.client.clone();
    let replica = OwnReplica::new(&config, &namespace);
    let index = Shared::new(index(&config).watching_plugins_in(&namespace).prewarming());
    // Every request takes this lock, so a process in which it is never released answers nothing and must end.
    let locked = index.clone();
    process.watch_lock("lock of the index", move || drop(locked.write()))?;
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    let extender = Arc::new(extender(
        &config,
        &client,
        &index,
        &replica.leadership,
        &mut registry,
    ));
    replica.leadership.register(&mut registry);
    let connection_resets = replica.leadership.connection_resets();
    let tls = tls::begin(&config, &client, &namespace, &mut registry, &mut process.tasks)?;
    // The registry must be complete before it is served.
    let lags = watch_all(&connection, &index, &replica, &mut process.tasks);
    register_watches(&mut registry, lags);
    serve_webhooks(&config, &index, tls.webhooks, &mut registry, &mut process).await?;
    let metrics = MetricsText::new(registry);
    process
        .serve_health(health_router(Arc::clone(&extender), metrics.clone()))
        .await?;
    let read_api = ReadApi::new(Arc::clone(&extender), process.stop.clone());
    let read_api = Arc::new(read_api.with_certificates(tls.metrics));
    let serving = &config.serving;
    serve_views(serving, &read_api, tls.extender.clone(), &mut process).await?;
    let views = read_api::router(&read_api, PREFIX, serving.demands_certificates());
    let routes = router(Arc::clone(&extender), metrics).merge(views);
    let server = HttpServer {
        tls: tls.extender,
        connection_resets,
        ..HttpServer::new(listen(serving.listen).await?, routes)
    };
    process.serve("extender", server);
    // None of these tasks decides where a pod goes: they check binds without an outcome, wake refused pods, and fill caches.
    let tasks = &mut process.tasks;
    tasks.spawn("history", read_api.record_history());
    tasks.spawn(
        "sweep of unsettled binds",
        bind::sweep_unseen(Arc::clone(&extender)),
    );
    tasks.spawn(
        "announcements of room",
        requeue::announce_room(extender, Room::new(client, namespace)),
    );
    tasks.spawn("prewarm", prewarm(index.clone()));
    // The election begins last: a process that cannot listen on one of its addresses must not become the leader.
    let farewell = replica.begin(&connection, index, &mut process);
    process.serve_until_signal(farewell.run()).await
}

/// Serves the webhooks, if they are configured.
async fn serve_webhooks(
    config: &Config,
    index: &Shared<Index>,
    tls: Option<CurrentTls>,
    registry: &mut Registry,
    process: &mut Process,
) -> anyhow::Result<()> {
    let Some(settings) = &config.admission.webhooks else {
        return Ok(());
    };
    let webhooks = Webhooks::new(config.admission.rules.clone(), index.clone(), registry)
        .demanding_certificates(settings.client_ca.is_some());
    let routes = admission::server::router(Arc::new(webhooks), PREFIX);
    let server = HttpServer {
        tls,
        ..HttpServer::new(listen(settings.listen).await?, routes)
    };
    process.serve("webhooks", server);
    Ok(())
}

/// Serves the read API, and the page with the read API, on addresses of their own where they are configured.
async fn serve_views(
    serving: &Serving,
    api: &Arc<ReadApi>,
    tls: Option<CurrentTls>,
    process: &mut Process,
) -> anyhow::Result<()> {
    type Routes = fn(&Arc<ReadApi>, bool) -> Router;
    let reads: Routes = |api, is_guarded| read_api::router(api, "", is_guarded);
    let page: Routes = page::router;
    for (name, address, routes) in [
        ("read API", serving.read_listen, reads),
        ("page", serving.page_listen, page),
    ] {
        let Some(address) = address else { continue };
        // A port-forward ends on the loopback address, which no other machine reaches and no certificate names.
        let is_local = address.ip().to_canonical().is_loopback();
        let server = HttpServer {
            tls: tls.clone().filter(|_| !is_local),
            ..HttpServer::new(listen(address).await?, routes(api, !is_local))
        };
        process.serve(name, server);
    }
    Ok(())
}

/// The extender with the settings of the flags.
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

/// Watches every kind; returns the lags of the kinds that decisions depend on.
fn watch_all(
    connection: &Connection,
    index: &Shared<Index>,
    replica: &OwnReplica,
    tasks: &mut Tasks,
) -> Vec<WatchLag> {
    // A cluster may withhold the right to watch budgets, so readiness does not wait for them, and no metric shows the lag of their
    // watch.
    let budgets = Api::<PodDisruptionBudget>::all(connection.client.clone());
    let budgets = watch("disruption budgets", budgets, &connection.contact);
    tasks.spawn("watch of disruption budgets", follow(budgets, index.clone()));
    vec![
        watch_kind::<Node>(("nodes", "watch of nodes"), connection, index, tasks),
        watch_kind::<RawDevice>(("devices", "watch of devices"), connection, index, tasks),
        replica.watch_pods(connection, index, tasks),
    ]
}

/// Starts the task that shows all objects of one kind to the index; returns the lag of its watch for metrics.
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

/// An empty index with the settings of the flags.
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
