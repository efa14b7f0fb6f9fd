//! One connection to a container runtime: registers the runtime hook, then answers calls until the runtime closes the connection.
//!
//! Nothing here decides about devices. Invalid data ends the connection, except in a call that the session can answer with an
//! error.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use futures::StreamExt;
use futures::stream::FuturesUnordered;
use prost::Message as _;
use proto::nri::api::{
    ConfigureRequest, ConfigureResponse, CreateContainerRequest, CreateContainerResponse, Empty,
    RegisterPluginRequest, SynchronizeRequest, SynchronizeResponse,
};
use proto::nri::ttrpc::{Request, Response, Status};
use proto::nri::wire::{ConnectionId, Decoder, Kind, Message};
use proto::nri::{CREATE_CONTAINER_EVENT, PLUGIN_SERVICE, RUNTIME_SERVICE, code};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::{Instant, sleep_until, timeout};
use tracing::info;

use super::RuntimeHook;
use super::seen::RunningContainers;

const NAME: &str = "gpushare";

/// The place of this plugin in the order in which the runtime calls plugins: a late one sees the changes of those before it.
const INDEX: &str = "90";

/// The number of the only call that this plugin makes.
const REGISTRATION: u32 = 1;

/// Longest time for the runtime to register and to configure this plugin; containerd's own limits for the two are 5 s and 2 s.
const CONFIGURED_WITHIN: Duration = Duration::from_secs(10);

/// Longest time for the runtime to read an answer.
const WRITE_LIMIT: Duration = Duration::from_secs(2);

/// Most calls that are answered at the same time; further ones are read later.
const MOST_CALLS: usize = 64;

const BROKEN: &str = "the connection is broken";
const INVALID: &str = "a message of the runtime is invalid";

/// Serves the runtime at the other end of `stream` until the runtime closes the connection.
pub(super) async fn run<S>(stream: S, hook: &RuntimeHook) -> anyhow::Result<()>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let (mut reader, writer) = tokio::io::split(stream);
    let mut session = Session {
        hook,
        writer,
        is_configured: false,
        running: RunningContainers::default(),
    };
    session.register().await?;
    let deadline = Instant::now() + CONFIGURED_WITHIN;
    let mut decoder = Decoder::default();
    let mut calls = FuturesUnordered::new();
    let mut buffer = vec![0; 16 << 10];
    loop {
        tokio::select! {
            // Beyond the limit the runtime's calls wait in the socket, and this process does not grow.
            read = reader.read(&mut buffer), if calls.len() < MOST_CALLS => {
                let n_read = read.context(BROKEN)?;
                if n_read == 0 {
                    return Ok(());
                }
                for message in decoder.feed(buffer.get(..n_read).unwrap_or_default()).context(INVALID)? {
                    calls.extend(session.handle(message).await?);
                }
            }
            Some((call, answer)) = calls.next() => session.answer(call, answer).await?,
            () = sleep_until(deadline), if !session.is_configured => bail!("the runtime has not configured this plugin within {CONFIGURED_WITHIN:?}"),
        }
    }
}

/// The encoded answer to a call of the runtime, or the error that the runtime gets.
type Answer = Result<Vec<u8>, Status>;

/// A connection to the runtime, and the progress of its conversation.
struct Session<'a, W> {
    hook: &'a RuntimeHook,
    writer: W,
    is_configured: bool,
    /// The running containers that the runtime has reported so far, in several parts.
    running: RunningContainers,
}

impl<'a, W: AsyncWrite + Unpin> Session<'a, W> {
    /// Sends the request by which this plugin registers with the runtime's Node Resource Interface.
    async fn register(&mut self) -> anyhow::Result<()> {
        let plugin = RegisterPluginRequest {
            plugin_name: NAME.to_owned(),
            plugin_idx: INDEX.to_owned(),
        };
        let request = Request {
            service: RUNTIME_SERVICE.to_owned(),
            method: "RegisterPlugin".to_owned(),
            payload: plugin.encode_to_vec(),
            // The session has limits of its own.
            timeout_nano: 0,
        };
        let payload = request.encode_to_vec();
        self.send(ConnectionId::Runtime, Kind::Request, REGISTRATION, payload)
            .await
    }

    /// Writes one message to the connection; an error if the runtime does not read it in time.
    async fn send(
        &mut self,
        connection: ConnectionId,
        kind: Kind,
        call: u32,
        payload: Vec<u8>,
    ) -> anyhow::Result<()> {
        let message = Message {
            connection,
            call,
            kind,
            payload,
        };
        let bytes = message.encode().context(INVALID)?;
        let written = timeout(WRITE_LIMIT, self.writer.write_all(&bytes)).await;
        written
            .context("the runtime does not read answers")?
            .context(BROKEN)
    }

    /// Handles a message of the runtime. For a `CreateContainer`, returns the future of the call's number and its answer.
    async fn handle(
        &mut self,
        message: Message,
    ) -> anyhow::Result<Option<impl Future<Output = (u32, Answer)> + use<'a, W>>> {
        match (message.connection, message.kind, message.call) {
            (ConnectionId::Runtime, Kind::Response, REGISTRATION) => {
                let response = Response::decode(message.payload.as_slice());
                let response = response.context("an envelope of the runtime is invalid")?;
                let status = response.status.unwrap_or_default();
                ensure!(
                    status.code == 0,
                    "the runtime refuses this plugin: {}",
                    status.message
                );
                Ok(None)
            }
            (ConnectionId::Plugin, Kind::Request, call) => {
                let request: Request = match decode(&message.payload) {
                    Ok(request) => request,
                    Err(status) => {
                        self.answer(call, Err(status)).await?;
                        return Ok(None);
                    }
                };
                if request.service == PLUGIN_SERVICE && request.method == "CreateContainer" {
                    // The answer may wait until the pod is known; other calls are answered meanwhile.
                    let hook = self.hook;
                    return Ok(Some(async move { (call, answer_create(hook, &request).await) }));
                }
                let answer = self.answer_at_once(&request);
                self.answer(call, answer).await?;
                Ok(None)
            }
            // This plugin makes no other call, and no call streams.
            _ => Ok(None),
        }
    }

    /// Sends the answer, or its error, to the runtime's call with this number.
    async fn answer(&mut self, call: u32, answer: Answer) -> anyhow::Result<()> {
        let (status, payload) = match answer {
            Ok(payload) => (None, payload),
            Err(status) => (Some(status), Vec::new()),
        };
        let payload = Response { status, payload }.encode_to_vec();
        self.send(ConnectionId::Plugin, Kind::Response, call, payload)
            .await
    }

    /// Answers every request but `CreateContainer`: those that need no waiting.
    fn answer_at_once(&mut self, request: &Request) -> Answer {
        match (request.service.as_str(), request.method.as_str()) {
            (PLUGIN_SERVICE, "Configure") => {
                let configuration: ConfigureRequest = decode(&request.payload)?;
                info!(
                    runtime = configuration.runtime_name,
                    version = configuration.runtime_version,
                    "the container runtime has accepted the runtime hook"
                );
                self.is_configured = true;
                self.hook.metrics.set_hook_connected(true);
                // Any event beside `CreateContainer` would cost a call for every container of the node.
                let events = CREATE_CONTAINER_EVENT;
                Ok(ConfigureResponse { events }.encode_to_vec())
            }
            (PLUGIN_SERVICE, "Synchronize") => self.synchronize(decode(&request.payload)?),
            // The plugin has not subscribed to these; an empty answer asks for no change.
            (
                PLUGIN_SERVICE,
                "StateChange" | "UpdateContainer" | "StopContainer" | "UpdatePodSandbox" | "Shutdown",
            ) => Ok(Empty {}.encode_to_vec()),
            // `.64` limits the length of the names, which come from the runtime.
            (service, method) => Err(Status {
                code: code::UNIMPLEMENTED,
                message: format!("this plugin has no {method:.64} of service {service:.64}"),
            }),
        }
    }

    /// Adds one part of the runtime's report of all running containers, and hands the report to the hook after its last part.
    fn synchronize(&mut self, part: SynchronizeRequest) -> Answer {
        let more = part.more;
        if let Err(message) = self.running.add(part, &self.hook.fleet.borrow()) {
            // The runtime may begin its report from the start.
            self.running = RunningContainers::default();
            let code = code::FAILED_PRECONDITION;
            return Err(Status { code, message });
        }
        if !more {
            let running = std::mem::take(&mut self.running);
            self.hook.synchronize(running.complete());
        }
        Ok(SynchronizeResponse { more }.encode_to_vec())
    }
}

/// Answers `CreateContainer`: the change to the container, within half the time that the runtime waits for it.
async fn answer_create(hook: &RuntimeHook, request: &Request) -> Answer {
    let asked: CreateContainerRequest = decode(&request.payload)?;
    let limit = match u64::try_from(request.timeout_nano) {
        // Half of the time that the runtime waits, so that the answer is there before the runtime closes the connection.
        Ok(nanos) if nanos > 0 => Duration::from_nanos(nanos / 2),
        _ => Duration::MAX,
    };
    let (pod, container) = (asked.pod.unwrap_or_default(), asked.container.unwrap_or_default());
    let adjust = Some(hook.create(&pod, &container, limit).await?);
    Ok(CreateContainerResponse { adjust }.encode_to_vec())
}

/// The message in a payload; an error for the runtime if it does not parse.
fn decode<M: prost::Message + Default>(payload: &[u8]) -> Result<M, Status> {
    M::decode(payload).map_err(|error| Status {
        code: code::INVALID_ARGUMENT,
        message: error.to_string(),
    })
}
