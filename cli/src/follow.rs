//! The changes of the cluster, for `-w`: a lost connection to the scheduler is opened again, and resumes after the last event.

use std::time::Duration;

use proto::read_api::{Node, PendingPod, State};
use tokio::time::sleep;

use crate::connection::ClusterConnection;
use crate::failure::CommandFailure;
use crate::output::Screen;
use crate::read_api::{EventStream, ReadApiClient, StreamEvent};
use crate::source::AnswerSource;

const RECONNECT_PAUSE: Duration = Duration::from_secs(2);

/// A change of the cluster, as one event of the read API reports it.
pub(crate) enum ClusterChange {
    Node(Box<Node>),
    /// All pods that wait for a node now.
    Pending(Vec<PendingPod>),
    /// The whole state: another replica answers now, and does not know which events this client has seen.
    State(Box<State>),
}

/// The changes of the cluster since the state that the command has shown, until the command ends.
pub(crate) struct ChangeFeed<'a> {
    connection: &'a ClusterConnection,
    screen: &'a Screen,
    api: ReadApiClient,
    /// The open stream of events; `None` until it is opened, or after a failure.
    events: Option<EventStream>,
    last_event: String,
}

impl<'a> ChangeFeed<'a> {
    /// The changes after a state that came from `source`; a failure without a scheduler, which alone reports changes.
    pub(crate) fn after(
        state: &State,
        source: AnswerSource,
        connection: &'a ClusterConnection,
        screen: &'a Screen,
    ) -> Result<Self, CommandFailure> {
        match source {
            AnswerSource::Scheduler(api) => Ok(Self {
                connection,
                screen,
                api,
                events: None,
                last_event: state.revision.clone(),
            }),
            AnswerSource::Objects(_) => Err(CommandFailure::Refused(
                "--watch follows the scheduler's events: leave out --offline, or see `kubectl gpushare doctor` for why the scheduler does not \
                 answer"
                    .to_owned(),
            )),
        }
    }

    /// Waits for the next change. Connects again after a failure that may pass.
    pub(crate) async fn next(&mut self) -> Result<ClusterChange, CommandFailure> {
        loop {
            match self.next_event().await {
                Ok(event) => match event.name.as_str() {
                    "node" => return Ok(ClusterChange::Node(Box::new(parse(&event.data)))),
                    "pending" => return Ok(ClusterChange::Pending(parse(&event.data))),
                    // The replica does not know the ID of the last event: another process issued it, or it is too old.
                    "reset" => {
                        if let Some(state) = self.read_state().await? {
                            return Ok(ClusterChange::State(Box::new(state)));
                        }
                    }
                    // Sums, which the tables compute themselves, and nodes that are gone, which have no row.
                    _ => {}
                },
                Err(failure) if failure.is_temporary() => {
                    self.screen
                        .complain(&format!("note: {failure}; connecting again"));
                    self.connect_again().await?;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    /// Waits for the next event of the stream, which is opened first if it is not open, and notes the event's ID.
    async fn next_event(&mut self) -> Result<StreamEvent, CommandFailure> {
        let events = match &mut self.events {
            Some(events) => events,
            // The server sends the events after this ID, those that were missed meanwhile included.
            None => self.events.insert(self.api.events_after(&self.last_event).await?),
        };
        let event = events.next().await?;
        if let Some(id) = &event.id {
            self.last_event.clone_from(id);
        }
        Ok(event)
    }

    /// Reads the state of the replica that has reset the stream; `None` while the replica has not listed every object yet.
    async fn read_state(&mut self) -> Result<Option<State>, CommandFailure> {
        self.connect_again().await?;
        match self.api.get::<State>("state").await {
            Ok(state) => {
                self.last_event.clone_from(&state.revision);
                Ok(Some(state))
            }
            Err(failure) if failure.is_temporary() => {
                sleep(RECONNECT_PAUSE).await;
                Ok(None)
            }
            Err(failure) => Err(failure),
        }
    }

    async fn connect_again(&mut self) -> Result<(), CommandFailure> {
        // The old stream belongs to a connection that is gone.
        self.events = None;
        loop {
            match ReadApiClient::connect(self.connection).await {
                Ok(api) => {
                    self.api = api;
                    return Ok(());
                }
                // Also while no replica is ready: kubelet may just be starting them.
                Err(failure) if failure.is_temporary() => sleep(RECONNECT_PAUSE).await,
                Err(failure) => return Err(failure),
            }
        }
    }
}

/// The data of an event; empty if another version of the scheduler has sent something else.
fn parse<T: serde::de::DeserializeOwned + Default>(data: &str) -> T {
    serde_json::from_str(data).unwrap_or_default()
}
