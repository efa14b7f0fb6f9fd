//! Starts the parts of the scheduler in its process.
//!
//! Both daemons start in the same phases: *state* (values that the parts share, and the metrics), *health* (probes and metrics
//! are served), *watches*, *tasks*, *servers*, *farewell* (the part that has to end in order after SIGTERM).
//!
//! A process with a command on its command line carries the command out instead of serving. No other module knows all parts.

mod leader;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;

use axum::Router;
use daemon::api_server::Connection;
use daemon::events;
use daemon::http_server::{CurrentTls, HttpServer, listen};
use daemon::metrics_text::MetricsText;
use daemon::open_files::OWN_FILES;
use daemon::process::{HEALTH_CONNECTIONS, Process};
use daemon::supervise::Tasks;
use daemon::watch::WatchLag;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::{Api, Client};
use prometheus_client::registry::Registry;
use proto::node::Node;
use proto::pod::Pod;
use proto::pod_group::PodGroupApi;
use tracing::info;

use leader::OwnReplica;

use crate::admission;
use crate::admission::server::Webhooks;
use crate::bind::Binder;
use crate::certificates::issue::{CertificateOrder, issue};
use crate::closing_events;
use crate::config::{Args, Command, Config, PREFIX, is_loopback};
use crate::extender::pod_memory::sweep_memory;
use crate::extender::{Extender, bind, health_router, requeue, router};
use crate::index::{Index, RawDevice, Shared};
use crate::leader::{BIND_TIMEOUT, Leadership};
use crate::make_room::RoomMaker;
use crate::metrics::{Metrics, RoomMetrics, register_watches};
use crate::next_model;
use crate::page;
use crate::pod_group_watch::{self, WatchStates};
use crate::read_api::{self, ReadApi};
use crate::room::Room;
use crate::watch::{ObjectStore, follow, watch};

/// The most connections of the extender: kube-scheduler opens one for each binding that is under way at the same time.
const EXTENDER_CONNECTIONS: usize = 512;
/// The most connections of the webhooks: each API server has a few.
const WEBHOOK_CONNECTIONS: usize = 128;
/// The most connections of the page and the read API: a browser opens six.
const VIEW_CONNECTIONS: usize = 192;

// Most containers may open 1,024 files; where the limit is lower, `Process::serve` lowers these numbers.
const _: () = assert!(
    EXTENDER_CONNECTIONS + WEBHOOK_CONNECTIONS + VIEW_CONNECTIONS + HEALTH_CONNECTIONS + OWN_FILES <= 1024
);

/// Runs the daemon in its process.
///
/// # Errors
/// The daemon cannot start, or a task has ended.
pub async fn run(args: Args, mut process: Process) -> anyhow::Result<()> {
    let config = Config::try_from(args)?;
    let connection = Connection::new().await?;
    let Some(command) = config.command else {
        return serve_requests(config, connection, process).await;
    };
    let executed = execute(command, connection.client, config.admission.authority);
    process.complete(executed).await.map(drop)
}

/// Carries out a command of the command line, in place of serving.
async fn execute(command: Command, client: Client, secret: String) -> anyhow::Result<()> {
    let Command::IssueClientCertificate {
        out,
        namespace,
        name,
        lifetime,
    } = command;
    let order = CertificateOrder {
        secret,
        namespace: namespace.unwrap_or_else(|| client.default_namespace().to_owned()),
        name,
        lifetime,
    };
    issue(client, &order, &out).await?;
    info!(folder = %out.display(), name = order.name, "client certificate written");
    Ok(())
}

/// Starts all parts of the scheduler in the phases that the head of this file names, and serves until a signal or the end of a
/// task ends the process.
async fn serve_requests(config: Config, connection: Connection, mut process: Process) -> anyhow::Result<()> {
    // State. The registry of metrics must be complete before it is served.
    let client = connection.client.clone();
    // The Lease and the Secret are in the namespace of this replica's pod.
    let namespace = client.default_namespace().to_owned();
    let replica = OwnReplica::new(&config, &namespace);
    let index = Shared::new(index(&config).watching_plugins_in(&namespace));
    // Every request takes this lock, so a process in which it is never released answers nothing and must end.
    let locked = index.clone();
    process.watch_lock("lock of the index", move || drop(locked.write()))?;
    let mut registry = Registry::with_prefix("gpushare_scheduler");
    let leadership = &replica.leadership;
    let extender = Arc::new(extender(&config, &client, &index, leadership, &mut registry));
    leadership.register(&mut registry);
    let connection_resets = leadership.connection_resets();
    let tls = tls::begin(&config, &client, &namespace, &mut registry, &mut process.tasks)?;
    let webhooks = webhooks(&config, &index, &mut registry);
    let lags = register_lags(&mut registry);
    let make_room = config.scheduling.make_room;
    let make_room = make_room.map(|settings| (settings, RoomMetrics::register(&mut registry)));
    let pod_group_watches = WatchStates::register(&mut registry);
    let metrics = MetricsText::new(registry);
    let certificates = Some(tls.metrics);
    let read_api = ReadApi::new(Arc::clone(&extender), certificates, process.stop.clone());
    let read_api = Arc::new(read_api);

    // Health.
    let health = health_router(Arc::clone(&extender), metrics.clone());
    process.serve_health(health).await?;

    // Watches.
    watch_objects(&connection, &index, &lags, &replica, &mut process.tasks);
    watch_pod_groups(&connection, &index, &pod_group_watches, &mut process.tasks);

    // Tasks. None of them decides where a pod goes: they check binds without an outcome, wake refused pods, make room, and write
    // events.
    let tasks = &mut process.tasks;
    let (recorder, writer) = events::recorder(&connection, "gpushare-scheduler", None);
    tasks.spawn("events", writer.run());
    let closing_events = closing_events::record(index.clone(), replica.leadership.clone(), recorder.clone());
    tasks.spawn("events about closed GPUs", closing_events);
    tasks.spawn("workload model", next_model::keep_current(index.clone()));
    tasks.spawn("history", Arc::clone(&read_api).record_history());
    tasks.spawn(
        "sweep of unsettled binds",
        bind::sweep_unseen(Arc::clone(&extender)),
    );
    tasks.spawn("sweep of pods that are gone", sweep_memory(Arc::clone(&extender)));
    if let Some((settings, room_metrics)) = make_room {
        let writers = (client.clone(), recorder.clone());
        let maker = RoomMaker::new(Arc::clone(&extender), writers, room_metrics, settings);
        tasks.spawn("room by evictions", maker.run());
    }
    let announcements = requeue::announce_room(Arc::clone(&extender), Room::new(client, namespace));
    tasks.spawn("announcements of room", announcements);

    // Servers.
    let serving = &config.serving;
    if let Some((address, routes)) = webhooks {
        let server = http_server(address, routes, WEBHOOK_CONNECTIONS, tls.webhooks).await?;
        process.serve("webhooks", server);
    }
    if let Some(address) = serving.read_listen {
        // A port-forward ends on the loopback address, which no other machine reaches and no certificate names.
        let is_local = is_loopback(address);
        let tls = tls.extender.clone().filter(|_| !is_local);
        let server = http_server(address, page::router(&read_api, !is_local), VIEW_CONNECTIONS, tls).await?;
        process.serve("read API and page", server);
    }
    let views = read_api::router(&read_api, PREFIX, serving.demands_certificates());
    let routes = router(extender, metrics).merge(views);
    let server = HttpServer {
        connection_resets,
        ..http_server(serving.listen, routes, EXTENDER_CONNECTIONS, tls.extender).await?
    };
    process.serve("extender", server);

    // Farewell. The election begins last: a process that cannot listen on one of its addresses must not become the leader.
    let misfit_nodes = config.scheduling.misfit_nodes;
    let farewell = replica.begin((connection.client, recorder), index, misfit_nodes, &mut process);
    process.serve_until_signal(farewell).await
}

/// Address and routes of the webhooks, if they are configured; registers their metric.
fn webhooks(config: &Config, index: &Shared<Index>, registry: &mut Registry) -> Option<(SocketAddr, Router)> {
    let settings = config.admission.webhooks.as_ref()?;
    let (rules, demands_certificate) = (config.admission.rules.clone(), settings.client_ca.is_some());
    let webhooks = Webhooks::new(rules, index.clone(), demands_certificate, registry);
    Some((
        settings.listen,
        admission::server::router(Arc::new(webhooks), PREFIX),
    ))
}

async fn http_server(
    address: SocketAddr,
    routes: Router,
    most_connections: usize,
    tls: Option<CurrentTls>,
) -> anyhow::Result<HttpServer> {
    let server = HttpServer::new(listen(address).await?, routes, most_connections);
    Ok(HttpServer { tls, ..server })
}

fn extender(
    config: &Config,
    client: &Client,
    index: &Shared<Index>,
    leadership: &Leadership,
    registry: &mut Registry,
) -> Extender {
    let metrics = Metrics::register(registry, index.clone(), leadership);
    let binder = Binder::new(client.clone(), BIND_TIMEOUT, leadership.clone());
    let mut extender = Extender::new(index.clone(), metrics, binder, &config.serving);
    extender.rules = config.admission.rules.clone();
    extender.answer_nodes = config.scheduling.answer_nodes;
    extender.misfit_nodes = config.scheduling.misfit_nodes;
    extender.evicts_for_room = config.scheduling.make_room.map(|settings| settings.evicts);
    extender.with_token_reviews(client.clone())
}

/// The lags of the watches of nodes, devices and pods, on which decisions depend, shown in metrics.
fn register_lags(registry: &mut Registry) -> [WatchLag; 3] {
    let lags = [
        WatchLag::new(<Index as ObjectStore<Node>>::KIND),
        WatchLag::new(<Index as ObjectStore<RawDevice>>::KIND),
        WatchLag::new(<Index as ObjectStore<Pod>>::KIND),
    ];
    register_watches(registry, lags.to_vec());
    lags
}

/// Starts the tasks that carry nodes, Device objects, pods and disruption budgets into the index.
fn watch_objects(
    connection: &Connection,
    index: &Shared<Index>,
    [of_nodes, of_devices, of_pods]: &[WatchLag; 3],
    replica: &OwnReplica,
    tasks: &mut Tasks,
) {
    let Connection { client, contact } = connection;
    // A cluster may withhold the right to watch budgets, so readiness does not wait for them, and no metric shows the lag of
    // their watch.
    let budgets = Api::<PodDisruptionBudget>::all(client.clone());
    let budgets = watch("disruption budgets", budgets, contact);
    tasks.spawn("watch of disruption budgets", follow(budgets, index.clone()));
    let nodes = watch("nodes", Api::<Node>::all(of_nodes.observe(client)), contact);
    tasks.spawn("watch of nodes", follow(nodes, index.clone()));
    let devices = Api::<RawDevice>::all(of_devices.observe(client));
    let devices = watch("devices", devices, contact);
    tasks.spawn("watch of devices", follow(devices, index.clone()));
    let pods = watch("pods", Api::<Pod>::all(of_pods.observe(client)), contact);
    let (barrier, index) = (replica.barrier.clone(), index.clone());
    tasks.spawn("watch of pods", async move { barrier.follow(pods, index).await });
}

/// Starts the tasks that carry the `PodGroup`s of Kubernetes and of coscheduling into the index. Readiness does not wait for
/// them: most clusters have none.
fn watch_pod_groups(connection: &Connection, index: &Shared<Index>, states: &WatchStates, tasks: &mut Tasks) {
    let follow = |apis| pod_group_watch::follow(apis, connection.clone(), index.clone(), states.clone());
    tasks.spawn("watch of PodGroups", follow(&PodGroupApi::NATIVE));
    let coscheduling = follow(&[PodGroupApi::Coscheduling]);
    tasks.spawn("watch of coscheduling's PodGroups", coscheduling);
}

fn index(config: &Config) -> Index {
    let scheduling = &config.scheduling;
    let index = Index::new(
        scheduling.names.clone(),
        scheduling.policies,
        scheduling.hints.plain,
    )
    .with_hint_times(scheduling.hints)
    .with_weights(scheduling.weights.clone())
    .demanding(scheduling.enforcement);
    index.allowing_all_devices(config.admission.rules.allow_all_devices)
}
