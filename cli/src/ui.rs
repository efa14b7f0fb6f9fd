//! `ui`: the live page of the scheduler in a browser.
//!
//! Each connection of the browser is forwarded to the pod that is best to ask at that time, so that the page goes on after the
//! leader has changed or its pod has gone; with `--read-api` to that address.

use std::net::Ipv4Addr;
use std::process::{Command, Stdio};

use serde_json::Value;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::args::Ui;
use crate::connection::ClusterConnection;
use crate::failure::{CommandFailure, CommandResult};
use crate::output::Screen;
use crate::read_api::{ReadApiClient, forward_port, pod_to_ask};

pub(crate) async fn run(connection: &ClusterConnection, screen: &Screen, options: &Ui) -> CommandResult {
    if connection.args.offline {
        let text = "ui shows the page of the scheduler: leave out --offline";
        return Err(CommandFailure::Input(text.to_owned()));
    }
    // Loopback alone: the page shows the names of all pods without asking for credentials.
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, options.port)).await;
    let listener = listener.map_err(|error| {
        CommandFailure::Input(format!(
            "cannot listen on port {}: {error}; choose another with --port",
            options.port
        ))
    })?;
    // One request first, so that a fault ends the command and does not open an empty page.
    let _: Value = ReadApiClient::connect(connection).await?.get("doctor").await?;
    let port = listener
        .local_addr()
        .map_or(options.port, |address| address.port());
    let url = format!("http://127.0.0.1:{port}/");
    screen.print(&format!("{url}\n"))?;
    screen.complain(
        "Forwarding to the scheduler until Ctrl-C. Every user of this machine can open the address.",
    );
    if !options.no_browser && !open_browser(&url) {
        screen.complain("No browser was found: open the address yourself.");
    }
    let mut connections = JoinSet::new();
    let mut last_failure = String::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                connections.spawn(forward_browser(connection.clone(), stream));
            },
            Some(ended) = connections.join_next() => if let Ok(Err(failure)) = ended {
                // The page tries again every few seconds, and one line for each fault is enough.
                let text = failure.to_string();
                if text != last_failure {
                    screen.complain(&format!("error: {text}"));
                    last_failure = text;
                }
            },
        }
    }
}

/// Forwards one connection of the browser until either side ends it.
async fn forward_browser(
    connection: ClusterConnection,
    mut browser: TcpStream,
) -> Result<(), CommandFailure> {
    if let Some(address) = &connection.args.read_api {
        // A connection that cannot be forwarded just ends, and the page makes another.
        if let Ok(mut stream) = TcpStream::connect(address).await {
            let _ = copy_bidirectional(&mut browser, &mut stream).await;
        }
        return Ok(());
    }
    let pod = pod_to_ask(&connection).await?;
    let (mut stream, forwarded) = forward_port(&connection, &pod).await?;
    // A connection that breaks off is made again by the page.
    let _ = copy_bidirectional(&mut browser, &mut stream).await;
    forwarded.abort();
    Ok(())
}

/// Opens an address in the user's browser; returns false without a display, or if no program opens it.
fn open_browser(url: &str) -> bool {
    let (opener, needs_display) = if cfg!(target_os = "macos") {
        ("open", false)
    } else if cfg!(windows) {
        ("explorer", false)
    } else {
        ("xdg-open", true)
    };
    // Without a display, xdg-open would start a browser for terminals in the midst of this command.
    let displays = ["DISPLAY", "WAYLAND_DISPLAY"].map(std::env::var_os);
    if needs_display && displays.iter().all(Option::is_none) {
        return false;
    }
    let mut command = Command::new(opener);
    command.arg(url).stdin(Stdio::null());
    command.stdout(Stdio::null()).stderr(Stdio::null());
    command.spawn().is_ok()
}
