//! The one loop that takes pods in: additions are admitted one at a time, in batches that are put in order.
//!
//! The watch is read by another task, so that pods queue up here while a plugin thinks.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures::{StreamExt as _, TryStreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use kube::Api;
use kube::runtime::{WatchStreamExt as _, watcher};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};

use super::config::{Hold, OrderRule};
use super::pod::PodSpec;
use super::pod_worker::Command;
use super::process::Process;
use crate::dice::dice;

#[derive(Debug)]
enum Arrival {
    /// The complete list, at start and after a broken watch.
    List(Vec<Arc<PodSpec>>),
    Applied(Arc<PodSpec>),
    Gone(String),
}

/// Watches this node's pods until the process ends.
pub(crate) async fn run(process: Arc<Process>) {
    let (queue, arrivals) = unbounded_channel();
    let watching = Arc::clone(&process);
    process.spawn(async move { watch(&watching, &queue).await });
    take_in(&process, arrivals).await;
}

async fn watch(process: &Process, queue: &UnboundedSender<Arrival>) {
    let api: Api<Pod> = Api::all(process.config.client.clone());
    let config = watcher::Config::default().fields(&format!("spec.nodeName={}", process.config.node));
    let mut events = watcher(api, config).default_backoff().boxed();
    let mut listed = Vec::new();
    loop {
        let arrival = match events.try_next().await {
            Ok(Some(watcher::Event::Init)) => {
                listed.clear();
                continue;
            }
            Ok(Some(watcher::Event::InitApply(pod))) => {
                listed.extend(PodSpec::read(&pod).map(Arc::new));
                continue;
            }
            Ok(Some(watcher::Event::InitDone)) => Some(Arrival::List(std::mem::take(&mut listed))),
            Ok(Some(watcher::Event::Apply(pod))) => {
                PodSpec::read(&pod).map(|pod| Arrival::Applied(Arc::new(pod)))
            }
            Ok(Some(watcher::Event::Delete(pod))) => pod.metadata.uid.map(Arrival::Gone),
            Ok(None) => return,
            Err(error) => {
                tracing::warn!(%error, "the watch of this node's pods failed");
                continue;
            }
        };
        // The loop may have ended before its queue.
        let _ = arrival.map(|arrival| queue.send(arrival));
    }
}

async fn take_in(process: &Arc<Process>, mut arrivals: UnboundedReceiver<Arrival>) {
    let mut n_batches = 0_u64;
    while let Some(arrival) = arrivals.recv().await {
        let mut batch = Vec::new();
        let is_list = matches!(arrival, Arrival::List(_));
        process.collect(arrival, &mut batch);
        if !is_list {
            process.fill(&mut batch, &mut arrivals).await;
        }
        let order = process.while_held(&mut batch, &mut arrivals).await;
        let (rule, mut rng) = match order {
            Some((rule, seed)) => {
                // The shuffle of a release is the seed's alone, whatever order the pods arrived in.
                if rule == OrderRule::Shuffled {
                    batch.sort_by_cached_key(|pod| pod.full_name());
                }
                (rule, dice(seed, &["release"]))
            }
            None => (
                process.config.ordering.rule,
                dice(process.config.seed, &["batch", &n_batches.to_string()]),
            ),
        };
        process.admit_all(in_order(batch, rule, &mut rng)).await;
        if is_list {
            process.set_sources_ready();
        }
        n_batches += 1;
    }
}

/// Puts one batch in order; pods of one creation time keep the order of their arrival before the rule applies.
fn in_order(mut batch: Vec<Arc<PodSpec>>, rule: OrderRule, rng: &mut StdRng) -> Vec<Arc<PodSpec>> {
    batch.sort_by_key(|pod| pod.created);
    match rule {
        OrderRule::Creation => {}
        OrderRule::Reversed => batch.reverse(),
        OrderRule::Shuffled => batch.shuffle(rng),
    }
    batch
}

impl Process {
    async fn admit_all(self: &Arc<Self>, batch: Vec<Arc<PodSpec>>) {
        for pod in batch {
            self.admit(pod).await;
        }
    }

    /// Collects pods until nobody holds them back; the order that they are then to be admitted in.
    async fn while_held(
        self: &Arc<Self>,
        batch: &mut Vec<Arc<PodSpec>>,
        arrivals: &mut UnboundedReceiver<Arrival>,
    ) -> Option<(OrderRule, u64)> {
        let mut hold = self.hold.subscribe();
        let mut was_held = false;
        loop {
            let Hold { is_held, order } = *hold.borrow_and_update();
            was_held |= is_held;
            self.counts
                .held
                .store(if is_held { batch.len() } else { 0 }, Ordering::Release);
            self.changed();
            if !is_held {
                return order.filter(|_| was_held);
            }
            tokio::select! {
                _ = hold.changed() => {}
                Some(arrival) = arrivals.recv() => self.collect(arrival, batch),
            }
        }
    }

    /// Waits for further pods of a batch that has begun.
    async fn fill(
        self: &Arc<Self>,
        batch: &mut Vec<Arc<PodSpec>>,
        arrivals: &mut UnboundedReceiver<Arrival>,
    ) {
        let ordering = self.config.ordering;
        while !batch.is_empty() && batch.len() < ordering.batch {
            let Ok(Some(next)) = tokio::time::timeout(ordering.linger, arrivals.recv()).await else {
                return;
            };
            self.collect(next, batch);
        }
    }

    fn collect(self: &Arc<Self>, arrival: Arrival, batch: &mut Vec<Arc<PodSpec>>) {
        match arrival {
            Arrival::Applied(pod) => {
                // A pod that changed while it waits in the batch is admitted as it is now.
                batch.retain(|waiting| waiting.uid != pod.uid);
                batch.extend(self.update(pod));
            }
            Arrival::Gone(uid) => {
                batch.retain(|waiting| waiting.uid != uid);
                self.forget(&uid);
            }
            Arrival::List(pods) => {
                self.forget_missing(&pods);
                let known: BTreeSet<String> = batch.iter().map(|pod| pod.uid.clone()).collect();
                let new = pods.into_iter().filter(|pod| !known.contains(&pod.uid));
                batch.extend(new.filter_map(|pod| self.update(pod)).collect::<Vec<_>>());
            }
        }
    }

    /// Acts on a pod that is known, or returns one that waits for admission.
    fn update(self: &Arc<Self>, pod: Arc<PodSpec>) -> Option<Arc<PodSpec>> {
        let mut pods = self.pods();
        let Some(record) = pods.0.get_mut(&pod.uid) else {
            drop(pods);
            return self.take_over(pod);
        };
        if pod.deleting && !record.spec.deleting {
            match &record.worker {
                // A worker that has ended has nothing left to stop.
                Some(worker) if worker.send(Command::Delete).is_ok() => {}
                _ => self.publish_deletion(&pod),
            }
            record.spec = pod;
        }
        None
    }

    /// A pod seen for the first time: most need admission, but not those that have ended or are on their way out.
    fn take_over(self: &Arc<Self>, pod: Arc<PodSpec>) -> Option<Arc<PodSpec>> {
        if !pod.deleting && !pod.terminal {
            return Some(pod);
        }
        self.pods().arrive(&pod, pod.terminal);
        if pod.deleting && pod.terminal {
            self.publish_deletion(&pod);
        } else if pod.deleting {
            self.start_worker(&pod);
            if let Some(worker) = self
                .pods()
                .0
                .get(&pod.uid)
                .and_then(|record| record.worker.as_ref())
            {
                let _ = worker.send(Command::Delete);
            }
        }
        None
    }

    fn forget_missing(&self, listed: &[Arc<PodSpec>]) {
        let listed: BTreeSet<&str> = listed.iter().map(|pod| pod.uid.as_str()).collect();
        let gone: Vec<String> = self
            .pods()
            .0
            .keys()
            .filter(|uid| !listed.contains(uid.as_str()))
            .cloned()
            .collect();
        for uid in gone {
            self.forget(&uid);
        }
        // Containers of pods that went away while kubelet was down.
        for container in self.runtime.all() {
            if !listed.contains(container.pod_uid.as_str()) {
                self.runtime.remove(&container.pod_uid);
            }
        }
    }

    fn forget(&self, uid: &str) {
        let record = self.pods().0.remove(uid);
        let told = record
            .and_then(|record| record.worker)
            .is_some_and(|worker| worker.send(Command::Remove).is_ok());
        if !told {
            self.runtime.remove(uid);
        }
        self.changed();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use k8s_openapi::api::core::v1::Pod;
    use rstest::rstest;
    use serde_json::json;

    use super::in_order;
    use crate::dice::dice;
    use crate::kubelet::config::OrderRule;
    use crate::kubelet::pod::PodSpec;

    fn pod(name: &str, second: u32) -> Arc<PodSpec> {
        let time = format!("2026-01-01T00:00:{second:02}Z");
        let pod = json!({"metadata": {"name": name, "uid": name, "creationTimestamp": time}, "spec": {"containers": []}});
        Arc::new(PodSpec::read(&serde_json::from_value::<Pod>(pod).unwrap()).unwrap())
    }

    #[rstest]
    #[case::by_creation_then_by_arrival(OrderRule::Creation, "early late1 late2 last")]
    #[case::reversed(OrderRule::Reversed, "last late2 late1 early")]
    fn a_batch_is_put_in_order(#[case] rule: OrderRule, #[case] expected: &str) {
        let arrived = vec![pod("late1", 5), pod("last", 9), pod("early", 1), pod("late2", 5)];
        let ordered: Vec<String> = in_order(arrived, rule, &mut dice(1, &[]))
            .iter()
            .map(|pod| pod.name.clone())
            .collect();
        assert_eq!(ordered.join(" "), expected);
    }

    #[test]
    fn each_batch_is_shuffled_anew_by_the_seed() {
        let pods = || (0..20).map(|i| pod(&i.to_string(), i)).collect::<Vec<_>>();
        let names = |seed, batch| {
            in_order(pods(), OrderRule::Shuffled, &mut dice(seed, &[batch]))
                .iter()
                .map(|pod| pod.name.clone())
                .collect::<Vec<_>>()
        };
        assert_eq!(names(1, "0"), names(1, "0"));
        assert_ne!(names(1, "0"), names(1, "1"));
        assert_ne!(names(1, "0"), names(2, "0"));
    }
}
