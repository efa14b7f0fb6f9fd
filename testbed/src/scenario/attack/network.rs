//! Clients of the network without a credential: many connections, floods of HTTP/2, and requests with two lengths.

use std::collections::VecDeque;
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use futures::future::join_all;
use proto::resource::GPU_MEM;
use rustix::process::{Resource, getrlimit};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower::Service;

use super::http2::{Flood, beginning};
use super::target::Target;
use crate::scenario::world::n_healthy;
use crate::scenario::{DEADLINE, Scenario, World};
use kit::connector::{Connector, connect_from};
use kit::daemons::Invocation;
use kit::kubelet::Kubelet;
use kit::polling;

pub(in crate::scenario) const SCENARIOS: &[Scenario] = scenarios! {
    needs "the port of the webhooks", on [Webhooks]:
    "connections-flooded" => connections_flooded,
        "ten thousand connections from four addresses leave no probe, filter or review without an answer";
    "connections-held" => connections_held,
        "as many idle TLS connections as there are places cost little memory, and others are served";
    "followers-flooded" => followers_flooded,
        "a thousand clients that follow the page's changes and never read leave the page to others";
    "http2-floods" => http2_floods,
        "floods of HTTP/2 frames cost little memory, and others are served";
    "two-lengths" => two_lengths,
        "a request with two lengths is answered once or not at all";
};

/// The scenarios of this file for a device plugin.
pub(in crate::scenario) const OF_PLUGIN: &[Scenario] = scenarios! {
    needs "an API server that fails on command", on [PluginAlone]:
    "plugin-flooded" => plugin_flooded,
        "a plugin with few open files, all of whose places for probes are taken, still registers and lets pods start";
};

/// The addresses of the attackers. Those of the loopback network belong to every Linux machine.
const ATTACKERS: [Ipv4Addr; 4] = [
    Ipv4Addr::new(127, 0, 0, 2),
    Ipv4Addr::new(127, 0, 0, 3),
    Ipv4Addr::new(127, 0, 0, 4),
    Ipv4Addr::new(127, 0, 0, 5),
];
const N_CONNECTIONS: usize = 10_000;
const N_FOLLOWERS: usize = 1000;
/// A quarter of the places of the extender, which is as many as one address may take, and as many as the webhooks have in all.
const PLACES_OF_ADDRESS: usize = 128;
/// More than a plugin with few files has, and has places for.
const N_TO_PLUGIN: usize = 200;
const FEW_FILES: u32 = 64;
/// Longest time until kubelet has the plugin's devices: 5 s where nothing disturbs it.
const REGISTERED: Duration = Duration::from_secs(10);
/// The limit of open files that most machines give to a process.
const OPEN_FILES: u64 = 1024;
/// Files that this process needs beside the connections of the attack.
const OWN_FILES: usize = 300;
/// The most pieces of a flood.
const N_PIECES: u32 = 20_000;
/// The time for which a flood waits until the server takes more.
const TAKES_NO_MORE: Duration = Duration::from_secs(1);

/// Many connections to every listener; half of them begin a request.
async fn connections_flooded(world: &mut World) -> Result<()> {
    let target = Target::of(world.cluster()?)?;
    target.limit_files(OPEN_FILES)?;
    let listeners = [target.extender, target.webhooks, target.health, target.read_api];
    let head = |n| (n % 2 == 0).then_some("POST / HTTP/1.1\r\nhost: a\r\n");
    let flood = flood(&listeners, N_CONNECTIONS, head);
    let _held = target.while_attacked(flood).await??;
    target.check_cost()
}

/// Clients that follow the changes of the page, many more than it serves, and never read.
async fn followers_flooded(world: &mut World) -> Result<()> {
    let target = Target::of(world.cluster()?)?;
    let page = [target.read_api];
    let request = |_| Some("GET /v1/changes HTTP/1.1\r\nhost: localhost\r\n\r\n");
    let flood = flood(&page, N_FOLLOWERS, request);
    let _held = target.while_attacked(flood).await??;
    target.check_cost()
}

/// Opens connections, sends the bytes for the nth of them, and returns those that are still held: as many as this process may.
async fn flood(
    listeners: &[SocketAddr],
    n_connections: usize,
    bytes: impl Fn(usize) -> Option<&'static str>,
) -> Result<VecDeque<TcpStream>> {
    let limit = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
    let most_held = usize::try_from(limit)?
        .saturating_sub(OWN_FILES)
        .min(n_connections);
    let targets = listeners.iter().cycle().zip(ATTACKERS.into_iter().cycle());
    let mut held = VecDeque::new();
    for (n, (listener, attacker)) in targets.take(n_connections).enumerate() {
        let connecting = timeout(TAKES_NO_MORE, connect_from(attacker, *listener)).await;
        // A connection that the server closes at once is an answer, too.
        if let Ok(Ok(mut stream)) = connecting {
            if let Some(bytes) = bytes(n) {
                // It may be closed already.
                let _ = stream.write_all(bytes.as_bytes()).await;
            }
            held.push_back(stream);
        }
        if held.len() > most_held {
            held.pop_front();
        }
    }
    Ok(held)
}

/// Many connections to the probes of a plugin with few open files, after which kubelet restarts and connects to the plugin again.
async fn plugin_flooded(world: &mut World) -> Result<()> {
    let name = world.gpu_node(1)?.name;
    let node = world.node(&name)?;
    node.restart_plugin_as(with_few_files).await?;
    let metrics = node.metrics_address();
    let is_listening = async || TcpStream::connect(metrics).await.is_ok();
    polling::until(DEADLINE, "the plugin does not listen", is_listening).await?;
    let held = flood(&[metrics], N_TO_PLUGIN, |_| None).await?;
    world.node(&name)?.restart_kubelet().await?;
    let offers_units = |kubelet: &Kubelet| n_healthy(kubelet, GPU_MEM) > 0;
    let kubelet = world.node(&name)?.kubelet();
    let failure = format!("the plugin has not registered within {REGISTERED:?}");
    kubelet.expect_until(REGISTERED, failure, offers_units).await?;
    world.start_units("flooded", "1", &name).await?;
    drop(held);
    world.node(&name)?.restart_plugin().await
}

/// The plugin's start with a limit of open files.
fn with_few_files(mut plugin: Invocation) -> Invocation {
    let program = std::mem::replace(&mut plugin.program, "sh".into());
    let own = [
        "-c".to_owned(),
        format!(r#"ulimit -n {FEW_FILES}; exec "$0" "$@""#),
        program.display().to_string(),
    ];
    plugin.args.splice(..0, own);
    plugin
}

/// Complete TLS handshakes on both listeners with TLS, in all their places, without a request.
async fn connections_held(world: &mut World) -> Result<()> {
    let cluster = world.cluster()?;
    let (connector, url) = cluster.webhook_connector()?;
    let target = Target::of(cluster)?;
    let mut held = Vec::new();
    for listener in [target.extender, target.webhooks] {
        for _ in 0..PLACES_OF_ADDRESS {
            for attacker in ATTACKERS {
                let connector = connector.clone().at(listener).coming_from(attacker);
                held.push(connect(connector, &url).await?);
            }
        }
    }
    target.check_answers().await?;
    target.check_cost()?;
    drop(held);
    Ok(())
}

/// Opens a TLS connection to the scheduler.
async fn connect(
    mut connector: Connector,
    url: &str,
) -> Result<impl tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + use<>> {
    let connecting = timeout(DEADLINE, connector.call(url.parse()?)).await;
    let stream = connecting.context("the scheduler takes no connection")??;
    Ok(stream.into_inner())
}

/// Each flood of HTTP/2 in turn, at the webhooks, whose clients show no certificate.
async fn http2_floods(world: &mut World) -> Result<()> {
    let cluster = world.cluster()?;
    let (connector, url) = cluster.webhook_connector()?;
    let connector = connector.offering_http2();
    let target = Target::of(cluster)?;
    for flood in Flood::ALL {
        let mut streams = Vec::new();
        for attacker in ATTACKERS {
            let mut stream = connect(connector.clone().coming_from(attacker), &url).await?;
            stream.write_all(&beginning()).await?;
            streams.push(send_flood(stream, flood));
        }
        let attacked = target.while_attacked(join_all(streams)).await;
        let _streams = attacked.with_context(|| format!("{flood:?}"))?;
        target.check_cost().with_context(|| format!("after {flood:?}"))?;
    }
    Ok(())
}

/// Sends at most [`N_PIECES`] pieces of a flood, fewer if the server closes the connection or takes no more. Reads nothing, and
/// returns the connection, which stays open on this side.
async fn send_flood<S: tokio::io::AsyncWrite + Unpin>(mut stream: S, flood: Flood) -> S {
    for n in 0..N_PIECES {
        let piece = flood.piece(n);
        let written = timeout(TAKES_NO_MORE, stream.write_all(&piece)).await;
        if !matches!(written, Ok(Ok(()))) {
            break;
        }
    }
    stream
}

/// Requests whose length is said twice. Two programs that read different lengths in one of them see different requests after it.
const TWO_LENGTHS: [&str; 6] = [
    "content-length: 5\r\ncontent-length: 6\r\n\r\n",
    "content-length: 35\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "transfer-encoding: chunked\r\ntransfer-encoding: identity\r\n\r\n0\r\n\r\n",
    "transfer-encoding: identity, chunked, identity\r\n\r\n",
    "content-length : 35\r\n\r\n",
    "content-length: +35\r\n\r\n",
];

/// A second request behind each of them: an answer to it would show that its bytes were not taken for a body.
async fn two_lengths(world: &mut World) -> Result<()> {
    let target = Target::of(world.cluster()?)?;
    for lengths in TWO_LENGTHS {
        let mut stream = TcpStream::connect(target.health).await?;
        let requests = format!(
            "GET /healthz HTTP/1.1\r\nhost: a\r\n{lengths}GET /metrics HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n"
        );
        stream.write_all(requests.as_bytes()).await?;
        stream.shutdown().await?;
        let mut answers = Vec::new();
        let read = timeout(DEADLINE, stream.read_to_end(&mut answers)).await;
        read.context("the answer does not end")??;
        let answers = String::from_utf8_lossy(&answers);
        let is_second_answered = answers.contains("# TYPE");
        ensure!(!is_second_answered, "{lengths:?} hid a request: {answers}");
    }
    Ok(())
}
