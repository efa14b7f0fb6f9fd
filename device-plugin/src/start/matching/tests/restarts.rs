//! Model-based tests of a node on which this plugin and kubelet restart at any moment.
//!
//! The model of kubelet admits one pod at a time in the order of binding, the resources of a container in any order. It writes
//! its checkpoint after each container and when a plugin registers, and knows no more after its own restart. Its reports of pods
//! arrive late. Only the failure of a pod is reported before a restart: nothing that lasts would show a refusal otherwise.

use super::*;

/// The next event; numbers choose among the pods that exist.
#[derive(Clone, Debug)]
enum Event {
    /// A pod is bound; kubelet knows it at once.
    Bind(Box<NodePod>),
    /// The watch of this plugin shows all changes.
    Show,
    /// kubelet makes its next call; `flip` reverses the resources of a container.
    Call {
        flip: bool,
        is_preferred_first: bool,
    },
    /// The oldest report of kubelet arrives.
    Report,
    /// This plugin marks pods assigned.
    Mark,
    /// The deletion of a pod is asked for; kubelet admits it all the same.
    Delete(usize),
    /// A pod goes that is not being admitted.
    Remove(usize),
    RestartPlugin,
    RestartKubelet,
    /// The plugin registers with the kubelet that it knows.
    RegisterAgain,
}

/// kubelet, as far as it deals with device plugins.
#[derive(Default)]
struct Kubelet {
    /// Pods to admit, in order.
    queue: Vec<NodePod>,
    /// The calls to come for the first of them, once it is begun.
    calls: Option<Vec<AnsweredCall>>,
    allocated: Vec<Allocated>,
    /// The checkpoint that it has written last.
    checkpoint: Vec<Allocated>,
    reports: Vec<(PodUid, PodStage)>,
}

fn entry(pod: &NodePod, container: usize, resource: ExtendedResource) -> Allocated {
    let id = format!("{}/{container}", pod.name);
    allocated(
        pod.uid.as_str(),
        &pod.containers[container].name,
        resource,
        &[&id],
    )
}

impl Kubelet {
    /// The next call and the pod that it is for.
    fn next(&mut self, flip: bool) -> Option<(NodePod, AnsweredCall)> {
        loop {
            let pod = self.queue.first()?.clone();
            let is_open = |call: &AnsweredCall| {
                !self
                    .allocated
                    .contains(&entry(&pod, call.container, call.resource))
            };
            let calls = calls_of(&pod, &[flip; 3])
                .into_iter()
                .map(|(container, resource, count)| AnsweredCall {
                    container,
                    resource,
                    count,
                });
            let open: Vec<AnsweredCall> = calls.filter(is_open).collect();
            match self.calls.get_or_insert(open).first() {
                Some(call) => return Some((pod, *call)),
                None => self.admitted(),
            }
        }
    }

    fn answered(&mut self, pod: &NodePod, call: AnsweredCall) {
        self.allocated.push(entry(pod, call.container, call.resource));
        let calls = self.calls.as_mut().unwrap();
        calls.remove(0);
        let next = calls.first().copied();
        if next.is_none_or(|next| next.container != call.container) {
            self.checkpoint = self.allocated.clone();
        }
        if next.is_none() {
            self.admitted();
        }
    }

    fn admitted(&mut self) {
        let pod = self.queue.remove(0);
        self.calls = None;
        self.reports
            .extend([PodStage::Admitted, PodStage::Running].map(|stage| (pod.uid.clone(), stage)));
    }

    fn remove(&mut self, uid: &PodUid) {
        self.queue.retain(|pod| pod.uid != *uid);
        self.allocated.retain(|entry| entry.pod != *uid);
        self.reports.retain(|(reported, _)| reported != uid);
    }
}

/// A node: the state of the API server, of kubelet and of this plugin.
struct Node {
    /// In the order of binding.
    api: Vec<NodePod>,
    unseen: Vec<NodePod>,
    kubelet: Kubelet,
    scene: Scene,
    n_bound: u64,
}

impl Node {
    fn new() -> Self {
        let mut scene = Scene {
            pods: pods([]),
            log: AllocateLog::default(),
        };
        scene.existing(&[]);
        Self {
            api: Vec::new(),
            unseen: Vec::new(),
            kubelet: Kubelet::default(),
            scene,
            n_bound: 0,
        }
    }

    fn happens(&mut self, event: Event) -> Result<(), TestCaseError> {
        match event {
            Event::Bind(pod) => self.bind(*pod),
            Event::Show => self.show(),
            Event::Call {
                flip,
                is_preferred_first,
            } => return self.call(flip, is_preferred_first),
            Event::Report if !self.kubelet.reports.is_empty() => {
                let (uid, stage) = self.kubelet.reports.remove(0);
                self.change(&uid, |pod| pod.stage = stage);
            }
            Event::Report => {}
            Event::Mark => {
                for due in crate::start::assigned::unmarked(&self.scene.pods, &self.scene.log) {
                    self.change(&due.uid, |pod| *pod = pod.clone().assigned(true));
                }
            }
            Event::Delete(at) => {
                if let Some(uid) = self.chosen(at) {
                    self.change(&uid, |pod| pod.deleting = true);
                }
            }
            Event::Remove(at) => self.remove(at),
            Event::RestartPlugin => self.restart_plugin(),
            Event::RestartKubelet => {
                self.report_failed();
                self.kubelet.allocated = self.kubelet.checkpoint.clone();
                self.kubelet.calls = None;
                self.register();
            }
            Event::RegisterAgain => self.register(),
        }
        Ok(())
    }

    fn bind(&mut self, pod: NodePod) {
        self.n_bound += 1;
        let name = format!("p{}", self.n_bound);
        let placement = pod.placement.map(|placement| Placement {
            assumed_at: self.n_bound,
            ..placement
        });
        let pod = NodePod {
            uid: PodUid::from(name.as_str()),
            name,
            placement,
            ..pod
        };
        self.api.push(pod.clone());
        self.unseen.push(pod.clone());
        self.kubelet.queue.push(pod);
    }

    fn show(&mut self) {
        for pod in self.unseen.drain(..) {
            self.scene.pods.apply(pod);
        }
    }

    fn chosen(&self, at: usize) -> Option<PodUid> {
        self.api
            .get(at.checked_rem(self.api.len())?)
            .map(|pod| pod.uid.clone())
    }

    fn change(&mut self, uid: &PodUid, change: impl Fn(&mut NodePod)) {
        for pod in self
            .api
            .iter_mut()
            .chain(&mut self.unseen)
            .filter(|pod| pod.uid == *uid)
        {
            change(pod);
        }
        if self.scene.pods.get(uid).is_some() {
            self.scene.change(uid.as_str(), change);
            self.scene.log.forget_gone(&self.scene.pods);
        }
    }

    fn remove(&mut self, at: usize) {
        let admitting = self
            .kubelet
            .calls
            .as_ref()
            .and_then(|_| self.kubelet.queue.first());
        let Some(uid) = self
            .chosen(at)
            .filter(|uid| admitting.is_none_or(|pod| pod.uid != *uid))
        else {
            return;
        };
        self.kubelet.remove(&uid);
        self.api.retain(|pod| pod.uid != uid);
        self.unseen.retain(|pod| pod.uid != uid);
        self.scene.pods.delete(&uid);
        self.scene.log.forget_gone(&self.scene.pods);
    }

    fn report_failed(&mut self) {
        let reports = std::mem::take(&mut self.kubelet.reports);
        let (failed, others): (Vec<_>, Vec<_>) = reports
            .into_iter()
            .partition(|(_, stage)| *stage == PodStage::Terminal);
        self.kubelet.reports = others;
        for (uid, stage) in failed {
            self.change(&uid, |pod| pod.stage = stage);
        }
    }

    fn restart_plugin(&mut self) {
        self.report_failed();
        self.unseen.clear();
        self.scene = Scene {
            pods: pods(self.api.clone()),
            log: AllocateLog::default(),
        };
        self.scene.existing(&self.kubelet.checkpoint);
        self.kubelet.checkpoint = self.kubelet.allocated.clone();
    }

    /// The plugin reads the checkpoint, and kubelet writes it when the plugin registers.
    fn register(&mut self) {
        self.scene.log.resume(&self.kubelet.checkpoint, &self.scene.pods);
        self.kubelet.checkpoint = self.kubelet.allocated.clone();
    }

    fn ask(&mut self, call: AnsweredCall, attempt: MatchAttempt) -> Option<Match> {
        let Scene { pods, log } = &mut self.scene;
        if log.needs_checkpoint(pods) {
            log.load(&self.kubelet.checkpoint, pods);
        }
        self.scene.ask(call.resource, call.count, &[], attempt)
    }

    /// Waits for the pods that the watch has not shown, unless the match is clear without them.
    fn answer(&mut self, call: AnsweredCall) -> Option<Match> {
        self.ask(call, MatchAttempt::Early).or_else(|| {
            self.show();
            self.ask(call, MatchAttempt::Early)
                .or_else(|| self.ask(call, MatchAttempt::Last))
        })
    }

    fn call(&mut self, flip: bool, is_preferred_first: bool) -> Result<(), TestCaseError> {
        let Some((pod, call)) = self.kubelet.next(flip) else {
            return Ok(());
        };
        self.scene.log.preferred = None;
        if is_preferred_first {
            self.scene.log.preferred = self.answer(call);
        }
        let asked = Call {
            resource: call.resource,
            count: call.count,
            devices: &[],
        };
        let answer = preferred(&self.scene.pods, &self.scene.log, &asked).or_else(|| self.answer(call));
        match (&pod.placement, answer) {
            (Ok(own), Some(found)) => {
                let gpus = found.placement.as_ref().map(|placement| &placement.gpus);
                prop_assert_eq!(
                    (&found.pod, found.container, gpus),
                    (&pod.uid, call.container, Some(&own.gpus))
                );
                let ids = entry(&pod, call.container, call.resource).ids;
                self.scene.answer(call.resource, &ids[0], Some(found.pod.clone()));
                self.scene.log.record(found, &self.scene.pods);
                self.kubelet.answered(&pod, call);
            }
            (Err(_), Some(found)) => {
                prop_assert_eq!(
                    (&found.pod, found.container, &found.placement),
                    (&pod.uid, call.container, &None)
                );
                self.scene.log.record(found, &self.scene.pods);
                self.kubelet.answered(&pod, call);
            }
            (_, answer) => prop_assert!(false, "{} is answered with {answer:?}", pod.name),
        }
        Ok(())
    }
}

fn any_pod() -> impl Strategy<Value = NodePod> {
    let container = (kinds(), 0..3_u64, 0..3_u64).prop_map(|(kind, memory_units, shared)| {
        (kind, memory_units, shared.max(u64::from(memory_units == 0)))
    });
    (
        prop::collection::vec(container, 1..4),
        0..4_u32,
        prop::bool::weighted(0.9),
    )
        .prop_map(|(mut kinds, minor, is_placed)| {
            kinds.sort_by_key(|(kind, ..)| *kind == ContainerKind::App);
            let container = |(idx, (kind, memory_units, shared))| ContainerRequest {
                name: format!("c{idx}"),
                kind,
                memory_units,
                ..shares(shared)
            };
            let pod = pod(
                "",
                0,
                kinds.into_iter().enumerate().map(container).collect::<Vec<_>>(),
            )
            .on([minor]);
            if is_placed { pod } else { pod.unplaced() }
        })
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        4 => any_pod().prop_map(Box::new).prop_map(Event::Bind),
        2 => Just(Event::Show),
        8 => any::<(bool, bool)>().prop_map(|(flip, is_preferred_first)| Event::Call { flip, is_preferred_first }),
        3 => Just(Event::Report),
        1 => Just(Event::Mark),
        1 => any::<usize>().prop_map(Event::Delete),
        1 => any::<usize>().prop_map(Event::Remove),
        1 => Just(Event::RestartPlugin),
        1 => Just(Event::RestartKubelet),
        1 => Just(Event::RegisterAgain),
    ]
}

proptest! {
    /// Each call is answered for its own container with the devices of its pod's record, and pods without one with none.
    #[test]
    fn a_restart_of_the_plugin_changes_no_devices_of_a_pod(events in prop::collection::vec(any_event(), 1..80)) {
        let mut node = Node::new();
        for event in events {
            node.happens(event)?;
        }
    }
}
