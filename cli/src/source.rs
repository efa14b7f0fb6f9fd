//! The source of answers: the scheduler's read API, or the objects themselves where it cannot be reached.

use std::time::{SystemTime, UNIX_EPOCH};

use proto::read_api::{Explanation, FitAnswer, FitRequest, PlanAnswer, PlanRequest, State};
use scheduler::index::{Index, Shared};
use scheduler::read_api;

use crate::connection::ClusterConnection;
use crate::failure::CommandFailure;
use crate::offline;
use crate::output::Screen;
use crate::read_api::ReadApiClient;

/// The end of the note that the command reads objects itself; it lists the facts that only a running scheduler has.
const READING_OBJECTS: &str = "nodes, devices and pods instead; bindings under way, PodGroups, disruption budgets, device plugins that \
                               are away, memory in use and the scheduler's flags are not seen";

pub(crate) enum AnswerSource {
    Scheduler(ReadApiClient),
    /// The objects of the API server, in a cache of the scheduler's library inside this process.
    Objects(Shared<Index>),
}

impl AnswerSource {
    /// Connects to the scheduler. With `--offline`, or if the scheduler does not answer, reads the objects instead, with a note
    /// on standard error; a scheduler that `--read-api` names has to answer.
    pub(crate) async fn open(
        connection: &ClusterConnection,
        screen: &Screen,
    ) -> Result<Self, CommandFailure> {
        if connection.args.offline {
            screen.complain(&format!("note: --offline: reading {READING_OBJECTS}"));
            return offline::index(connection).await.map(Self::Objects);
        }
        let failure = match ReadApiClient::connect(connection).await {
            // A forwarded port accepts connections even if no process listens, so a request is tried: `doctor`, which a replica
            // answers also before it is ready.
            Ok(mut api) => match api.get::<serde_json::Value>("doctor").await {
                Ok(_) => return Ok(Self::Scheduler(api)),
                Err(failure) => failure,
            },
            // Without the API server there are no objects to read either.
            Err(failure @ (CommandFailure::Unreachable(_) | CommandFailure::Kubeconfig(_))) => {
                return Err(failure);
            }
            Err(failure) => failure,
        };
        // The user named the address; the objects may be those of another cluster.
        if connection.args.read_api.is_some() {
            return Err(failure);
        }
        screen.complain(&format!("note: {failure}\nnote: reading {READING_OBJECTS}"));
        offline::index(connection).await.map(Self::Objects)
    }

    /// The state of the cluster. With `asks_use` the scheduler adds the memory in use, where device plugins measure it.
    pub(crate) async fn state(&mut self, asks_use: bool) -> Result<State, CommandFailure> {
        match self {
            Self::Scheduler(api) => api.get(if asks_use { "state?use=true" } else { "state" }).await,
            Self::Objects(index) => Ok(read_api::state_of(index.clone()).await),
        }
    }

    pub(crate) async fn explain(
        &mut self,
        namespace: &str,
        name: &str,
        all: bool,
    ) -> Result<Explanation, CommandFailure> {
        match self {
            Self::Scheduler(api) => {
                let query = if all { "?all=true" } else { "" };
                api.get(&format!("pods/{namespace}/{name}/explain{query}")).await
            }
            Self::Objects(index) => read_api::explain(index, namespace, name, all).ok_or_else(|| {
                let pod = format!("{namespace}/{name}");
                CommandFailure::Refused(format!("there is no pod {pod:?} that asks for devices"))
            }),
        }
    }

    pub(crate) async fn plan(&mut self, request: &PlanRequest) -> Result<PlanAnswer, CommandFailure> {
        match self {
            Self::Scheduler(api) => api.post("plan", request).await,
            Self::Objects(index) => {
                let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
                // This command is the only client: it does not leave, and no other has to be given way.
                read_api::plan(index, request, now.as_secs(), &|| false, || {})
                    .map_err(|error| CommandFailure::Refused(error.to_string()))
            }
        }
    }

    pub(crate) async fn fit(&mut self, request: &FitRequest) -> Result<FitAnswer, CommandFailure> {
        match self {
            Self::Scheduler(api) => api.post("fit", request).await,
            Self::Objects(index) => read_api::fit(index, request).map_err(CommandFailure::Refused),
        }
    }
}
