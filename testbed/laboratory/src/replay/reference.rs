//! Policies from elsewhere, which the engine's are compared with. They know every node and device, and never
//! ask the engine.
//!
//! Their choices are written into pods as records, so that the engine counts and checks them.

use std::collections::HashMap;

use anyhow::Result;
use rand::RngExt;
use rand::rngs::StdRng;

use super::engine::Engine;
use super::fragment::{TypicalPod, fragment};
use super::occupancy::{FreeRoom, GpuShare, NodeUse};
use super::policy::Reference;
use super::portion::{floor, portion, real};
use super::trace::WHOLE;
use super::world::{ReplayInput, ReplayPod};

/// A reference policy, with a cache of the scores of nodes that have not changed.
#[derive(Debug)]
pub struct Chooser<'w> {
    world: &'w ReplayInput,
    reference: Reference,
    typical: &'w [TypicalPod],
    dice: StdRng,
    /// The CPU and GPU thousandths of the largest nodes, by which scores are scaled.
    largest: [i64; 2],
    /// The kind of each pod: pods of one kind have equal specs, and so equal scores.
    kinds: Vec<usize>,
    /// The known scores by kind and node, each with the node's version that it was computed for; `None` if there is no room.
    known: Vec<Vec<(u32, Option<i64>)>>,
}

impl<'w> Chooser<'w> {
    pub fn new(
        world: &'w ReplayInput,
        reference: Reference,
        typical: &'w [TypicalPod],
        dice: StdRng,
    ) -> Self {
        let mut largest = [0, 0];
        for node in &world.nodes {
            let n_gpus = i64::try_from(node.minors.len()).unwrap_or(0);
            largest = [largest[0].max(node.cpu), largest[1].max(n_gpus * WHOLE)];
        }
        let mut kind_by_spec: HashMap<String, usize> = HashMap::new();
        let mut kinds = Vec::new();
        for pod in &world.pods {
            let n_kinds = kind_by_spec.len();
            let spec = pod.object.get("spec").map(ToString::to_string);
            kinds.push(*kind_by_spec.entry(spec.unwrap_or_default()).or_insert(n_kinds));
        }
        let n_kinds = kind_by_spec.len();
        Self {
            world,
            reference,
            typical,
            dice,
            largest,
            kinds,
            known: vec![vec![(0, None); world.nodes.len()]; n_kinds],
        }
    }

    /// The nodes among `nodes` whose devices have room for the pod with this index, with their scores.
    pub fn score(
        &mut self,
        pod_at: usize,
        nodes: &[usize],
        occupancy: &FreeRoom,
        engine: &Engine<'_>,
    ) -> Result<Vec<(usize, i64)>> {
        let Some(pod) = self.world.pods.get(pod_at) else {
            return Ok(Vec::new());
        };
        let kind = self.kinds.get(pod_at).copied().unwrap_or(0);
        // The scores are taken out of `self`, which `score_node` borrows, and put back below.
        let mut known = self.known.get_mut(kind).map(std::mem::take).unwrap_or_default();
        let mut results = Vec::with_capacity(nodes.len());
        for node in nodes {
            let (Some(free), Some((version, score))) = (occupancy.node(*node), known.get_mut(*node)) else {
                continue;
            };
            if *version != free.version {
                (*version, *score) = (free.version, self.score_node(*node, free, pod, engine)?);
            }
            results.extend(score.map(|score| (*node, score)));
        }
        if let Some(place) = self.known.get_mut(kind) {
            *place = known;
        }
        if self.reference == Reference::Random {
            for (_, score) in &mut results {
                *score = self.dice.random_range(0..i64::MAX);
            }
        }
        Ok(results)
    }

    /// The score of a node under the reference policy; `None` if its GPUs have too little room for the pod.
    fn score_node(
        &self,
        at: usize,
        free: &NodeUse,
        pod: &ReplayPod,
        engine: &Engine<'_>,
    ) -> Result<Option<i64>> {
        if free.n_with(pod.milli) < pod.gpus {
            return Ok(None);
        }
        let gpu_left = free.gpu_free() - pod.demand();
        let [most_cpu, gpu_norm] = self.largest;
        Ok(Some(match self.reference {
            Reference::KubeDefault => engine.default_score(at)?,
            Reference::BestFit => {
                let left = portion(free.cpu_free - pod.cpu, most_cpu).midpoint(portion(gpu_left, gpu_norm));
                floor(100.0 * (1.0 - left))
            }
            Reference::Fullest => -gpu_left,
            // A placeholder: `score` draws a number for each request, which must not be cached.
            Reference::Random => 0,
            Reference::Fgd => {
                let choices = self.scored_choices(at, free, pod);
                choices.iter().map(|(score, _)| *score).max().unwrap_or(0)
            }
        }))
    }

    /// The parts of GPUs that a pod gets on a node.
    pub fn parts(&mut self, at: usize, free: &NodeUse, pod: &ReplayPod) -> Vec<GpuShare> {
        if self.reference == Reference::Fgd && pod.gpus == 1 {
            // The first of the best choices is wanted: `max_by_key` takes the last, so the order is reversed.
            let choices = self.scored_choices(at, free, pod).into_iter().rev();
            let best = choices.max_by_key(|(score, _)| *score);
            return best.map(|(_, parts)| parts).unwrap_or_default();
        }
        let mut fitting: Vec<(i64, usize)> = free.gpus.iter().copied().zip(0..).collect();
        fitting.retain(|(free, _)| *free >= pod.milli);
        if self.reference == Reference::Random {
            for (free, _) in &mut fitting {
                *free = self.dice.random_range(0..i64::MAX);
            }
        }
        // The GPUs with the least free come first; for the random policy, the order of the numbers drawn above.
        fitting.sort_unstable();
        let milli = pod.milli;
        let taken = fitting.into_iter().take(pod.gpus);
        taken.map(|(_, gpu)| GpuShare { gpu, milli }).collect()
    }

    /// Every choice of devices on a node, with a score from 0 to 100; the less fragmentation grows, the higher.
    fn scored_choices(&self, at: usize, free: &NodeUse, pod: &ReplayPod) -> Vec<(i64, Vec<GpuShare>)> {
        let before = fragment(self.world, at, free, self.typical);
        let milli = pod.milli;
        let fitting = free.gpus.iter().zip(0..).filter(|(free, _)| **free >= milli);
        let fitting: Vec<GpuShare> = fitting.map(|(_, gpu)| GpuShare { gpu, milli }).collect();
        // Pods of several GPUs ask for whole ones as a rule, which are all alike: one choice stands for all.
        let choices = if pod.gpus == 1 {
            fitting.chunks(1).collect()
        } else {
            vec![fitting.get(..pod.gpus).unwrap_or_default()]
        };
        let mut scored_choices = Vec::new();
        for parts in choices {
            let mut after = free.clone();
            after.take(pod, parts, 1);
            let descent = before - fragment(self.world, at, &after, self.typical);
            let score = floor(100.0 / (1.0 + (-descent / real(WHOLE)).exp()));
            scored_choices.push((score, parts.to_vec()));
        }
        scored_choices
    }
}
