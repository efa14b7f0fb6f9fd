//! The cluster and the GPU of a run, the pods that the scenarios create on it, and the answers of their program.

use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail, ensure};
use k8s_openapi::api::core::v1::{Event, Pod, ServiceAccount};
use kube::Client;
use kube::api::{Api, ListParams, LogParams, PostParams};
use proto::device::{CONDITION_ISOLATED, DeviceCondition, DeviceInfo};
use proto::resource::GPU_MEM;
use serde::Serialize;
use serde_json::{Map, Value, json};

use super::ProgramTimes;
use super::answers::Answers;
use super::plugin;
use super::target::{GIB, MIB, NodeVersions, TargetGpu};
use crate::scenario::World;
use kit::invariants;
use kit::kubelet::DEVICE_NODES;
use kit::kubelet::probe_program::PROGRAM;
use kit::observer::reason_not_running;
use kit::pod_fields::{container_statuses, has_ended, phase};
use kit::pods::{Limits, PodBuilder};
use kit::polling;

/// The longest wait for a pod, whose node may have to pull the image first.
pub(super) const START: Duration = Duration::from_secs(300);

/// The result of a scenario: a text for people, figures for programs.
#[derive(Clone, Debug, Default)]
pub(super) struct Finding {
    pub(super) text: String,
    pub(super) figures: Map<String, Value>,
    /// The reason for which the scenario could not run, if it could not.
    pub(super) not_run: Option<String>,
}

impl Finding {
    /// The observation of a scenario that passes.
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }

    /// The result of a scenario that could not run.
    pub(super) fn not_run(reason: impl Into<String>) -> Self {
        Self {
            not_run: Some(reason.into()),
            ..Self::default()
        }
    }

    /// With a figure.
    #[must_use]
    pub(super) fn figure(mut self, name: &str, value: impl Serialize) -> Self {
        self.figures.insert(name.to_owned(), json!(value));
        self
    }
}

/// A run on one GPU.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) world: World,
    pub(super) gpu: TargetGpu,
    /// The image that has the program.
    pub(super) image: String,
    /// The state before the first scenario.
    pub(super) at_start: Option<StateBefore>,
    /// Times that the pods' programs are given.
    pub(super) times: ProgramTimes,
}

/// The state of a GPU and its node before any pod of the run.
#[derive(Clone, Copy, Debug)]
pub(super) struct StateBefore {
    /// Bytes of the GPU that CUDA reports as free.
    pub(super) free: u64,
    /// The number of the plugin's CDI specs.
    pub(super) n_specs: usize,
    /// Bytes that the plugin has measured in use by other programs, if it measures them.
    pub(super) unattributed: Option<u64>,
}

impl Trial {
    /// Creates a pod for the GPU's node that asks for memory units of these bytes, and runs commands of the program.
    pub(super) async fn start(&self, name: &str, commands: &[&str], bytes: u64) -> Result<()> {
        self.create(self.sharing(name, commands, bytes)).await
    }

    /// Such a pod.
    pub(super) fn sharing(&self, name: &str, commands: &[&str], bytes: u64) -> PodBuilder {
        self.pod(name, commands, &[(GPU_MEM, &self.gpu.units(bytes).to_string())])
    }

    /// Starts a pod of 1 GiB that allocates and fills memory and adds it up, and waits until it has.
    pub(super) async fn ensure_works(&self, name: &str) -> Result<()> {
        let commands = ["see", "allocate=134217728", "fill", "sum", "hold=3600"];
        self.start(name, &commands, GIB).await?;
        self.compared(name, "sum").await.map(drop)
    }

    /// Creates a pod.
    pub(super) async fn create(&self, pod: PodBuilder) -> Result<()> {
        self.world.create(pod).await.map(drop)
    }

    /// A pod for the GPU's node that runs commands of the program.
    pub(super) fn pod(&self, name: &str, commands: &[&str], limits: &Limits<'_>) -> PodBuilder {
        PodBuilder::of_program(name, &self.image, &command_line(commands), limits).on(&self.gpu.node)
    }

    /// The same after an init container that asks for as much and runs other commands.
    pub(super) fn with_init(&self, pod: PodBuilder, commands: &[&str], bytes: u64) -> PodBuilder {
        let limits = [(GPU_MEM, &*self.gpu.units(bytes).to_string())];
        pod.init_program("init", &self.image, &command_line(commands), &limits)
    }

    /// Waits for the answer of a pod's container `main` to a command; an error that the program reports before it is an error.
    pub(super) async fn answers(&self, pod: &str, command: &str) -> Result<Answers> {
        let answers = self.answers_of(pod, command).await?;
        match answers.failed() {
            Some((answer, error)) => bail!("{pod}: {} failed: {error}", answer.command),
            None => Ok(answers),
        }
    }

    /// Waits until a pod's container `main` has answered a command, or has ended.
    pub(super) async fn answers_of(&self, pod: &str, command: &str) -> Result<Answers> {
        self.answers_within(START, pod, "main", command).await
    }

    /// The same with another longest wait, and of any container.
    pub(super) async fn answers_within(
        &self,
        limit: Duration,
        pod: &str,
        container: &str,
        command: &str,
    ) -> Result<Answers> {
        let answered = async || {
            // The state is read before the log: a container that has ended prints no more.
            let object = self.world.observer.now().pods.remove(&self.world.key(pod));
            let answers = Answers::parse(&self.log(pod, container).await?);
            if answers.last(command).is_some() || answers.failed().is_some() {
                return Ok(Ok(answers));
            }
            let state = object.as_ref().map_or("not created", phase);
            let why = object.as_ref().map(why_not_running).unwrap_or_default();
            let missing = format!("{pod} is {state}, and has not answered {command}: {why}");
            let may_answer = !object.as_ref().is_some_and(has_ended) && !is_hopeless(&why);
            ensure!(may_answer, missing);
            Ok(Err(missing))
        };
        polling::until_found(limit, answered).await
    }

    /// The log of a container; empty before its start.
    async fn log(&self, pod: &str, container: &str) -> Result<String> {
        let params = LogParams {
            container: Some(container.to_owned()),
            ..LogParams::default()
        };
        match self.world.pods.api().logs(pod, &params).await {
            // The testbed keeps the output of all starts; each begins with the container's device nodes.
            Ok(log) => Ok(log.rsplit(DEVICE_NODES).next().unwrap_or_default().to_owned()),
            // The container waits for its start: 400; kubelet was killed and does not serve logs: 500 and above.
            Err(kube::Error::Api(status)) if status.code == 400 || status.code >= 500 => Ok(String::new()),
            Err(error) => Err(error).with_context(|| format!("cannot read the log of {pod}")),
        }
    }

    /// Waits for a pod's answers up to a command, and compares what its container sees with its record; returns the answers.
    pub(super) async fn compared(&self, pod: &str, command: &str) -> Result<Answers> {
        let answers = self.answers(pod, command).await?;
        self.compare(pod, &answers)?;
        Ok(answers)
    }

    /// Compares what a container sees with its pod's record.
    pub(super) fn compare(&self, pod: &str, answers: &Answers) -> Result<()> {
        let view = answers.last("see");
        let view = view.with_context(|| format!("{pod} has not shown what it sees"))?;
        let compared = view.compare_view(&self.record(pod)?);
        compared.map_err(|difference| anyhow!("{pod}: {difference}"))
    }

    /// Minor numbers and UUIDs of the GPUs in a pod's record.
    pub(super) fn record(&self, pod: &str) -> Result<Vec<(i32, String)>> {
        let record = invariants::record(&self.world.pod(pod)?);
        record.map_err(|problem| anyhow!("{pod}: {problem}"))
    }

    /// The GPU in its node's Device object.
    pub(super) fn device(&self) -> Result<DeviceInfo> {
        let mut snapshot = self.world.observer.now();
        let device = snapshot.devices.remove(&self.gpu.node);
        let mut devices = device.into_iter().flat_map(|device| device.spec.devices);
        let found = devices.find(|info| info.id == self.gpu.uuid);
        found.with_context(|| format!("the Device object of {} has no {}", self.gpu.node, self.gpu.uuid))
    }

    /// The condition `Isolated` of the GPU, if the plugin publishes it.
    pub(super) fn isolated(&self) -> Result<Option<DeviceCondition>> {
        let mut conditions = self.device()?.conditions.into_iter();
        Ok(conditions.find(|condition| condition.condition_type == CONDITION_ISOLATED))
    }

    /// Deletes all pods of the run, and waits until they are gone.
    pub(super) async fn clear(&self) -> Result<()> {
        self.world.clear_within(START).await
    }

    /// The versions of the node's software.
    pub(super) async fn versions(&self) -> NodeVersions {
        let mut versions = NodeVersions::of(&self.gpu.node, &self.world.observer.now());
        let metrics = plugin::metrics(self).await.unwrap_or_default();
        let version = metrics.version().map(str::to_owned);
        versions.gpushare = version.or_else(|| plugin::image(self)).unwrap_or_default();
        versions
    }

    /// The newest event with this reason about a pod, or about the GPU's node since the pod was created: its object and message.
    pub(super) async fn event(&self, pod: &str, reason: &str) -> Result<Option<(String, String)>> {
        let events: Api<Event> = Api::all(self.world.client());
        let params = ListParams::default().fields(&format!("reason={reason}"));
        let listed = events.list(&params).await.context("cannot list events")?;
        // The node may have events about earlier faults. The time is the API server's, as this machine's clock may differ.
        let created = self.world.pod(pod)?.metadata.creation_timestamp;
        let is_about = |event: &Event| {
            let (name, namespace) = (&event.involved_object.name, &event.involved_object.namespace);
            let is_pod = name.as_deref() == Some(pod) && namespace.as_ref() == Some(&self.world.namespace);
            is_pod || name.as_ref() == Some(&self.gpu.node) && event.last_timestamp >= created
        };
        let about = listed.into_iter().filter(is_about);
        let newest = about.max_by_key(|event| event.last_timestamp.clone());
        Ok(newest.map(|event| {
            let object = event.involved_object.name.unwrap_or_default();
            (object, event.message.unwrap_or_default())
        }))
    }
}

/// Creates the service account that pods of a namespace have: they would be refused until Kubernetes' own controller has made it.
pub(super) async fn make_service_account(client: &Client, namespace: &str) -> Result<()> {
    let accounts: Api<ServiceAccount> = Api::namespaced(client.clone(), namespace);
    let account = serde_json::from_value(json!({"metadata": {"name": "default"}}))?;
    match accounts.create(&PostParams::default(), &account).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 409 => Ok(()),
        Err(error) => Err(error).context("cannot create the ServiceAccount of the pods"),
    }
}

/// The reason for which a pod does not run, or has ended.
fn why_not_running(pod: &Pod) -> String {
    for status in container_statuses(pod) {
        let state = status.state.clone().unwrap_or_default();
        if let Some(ended) = state.terminated {
            let [reason, message] = [ended.reason, ended.message].map(Option::unwrap_or_default);
            return format!("{reason} with status {} {message}", ended.exit_code);
        }
    }
    reason_not_running(pod)
}

/// Returns true if kubelet goes on trying what does not get better by itself.
fn is_hopeless(why: &str) -> bool {
    let reasons = ["ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"];
    reasons.iter().any(|reason| why.starts_with(reason))
}

/// The command line of the program with these commands.
fn command_line(commands: &[&str]) -> Vec<String> {
    let words = std::iter::once(&PROGRAM).chain(commands);
    words.map(|word| (*word).to_owned()).collect()
}

/// An amount of memory in whole MiB.
pub(super) fn mib(bytes: u64) -> String {
    format!("{} MiB", bytes / MIB)
}

/// The middle, the ninetieth percentile and the largest of some seconds.
pub(super) fn percentiles(mut seconds: Vec<f64>) -> Option<[f64; 3]> {
    seconds.sort_by(f64::total_cmp);
    let at = |percent: usize| {
        let nth = (seconds.len() * percent).div_ceil(100);
        seconds.get(nth.saturating_sub(1)).copied()
    };
    Some([at(50)?, at(90)?, at(100)?])
}

/// The condition `Isolated` in words.
pub(super) fn isolated_in_words(condition: Option<&DeviceCondition>) -> String {
    condition.map_or("Isolated is not published".to_owned(), |condition| {
        format!("Isolated={} {}", condition.status, condition.reason)
    })
}

/// The finding about an image without the variable by which NVIDIA's runtime shows GPUs.
pub(super) fn no_variable(image: &str) -> Finding {
    Finding::not_run(format!(
        "the image {image} does not set NVIDIA_VISIBLE_DEVICES, so it shows nothing"
    ))
}
