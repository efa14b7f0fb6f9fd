//! What this process has answered, by the device IDs that each call was about.

use std::collections::{BTreeMap, HashMap};

use proto::kubelet::deviceplugin::ContainerAllocateResponse;

use crate::extended_resource::ExtendedResource;
use crate::pods::PodUid;

/// Most answers that are kept: kubelet runs a few hundred pods.
pub(super) const MAX_ANSWERS: usize = 16_384;

/// An answer that this process gave.
#[derive(Clone, Debug)]
pub(super) struct Answer {
    /// To whom it was accounted.
    pub(super) pod: Option<PodUid>,
    pub(super) response: ContainerAllocateResponse,
}

/// The answers; device IDs are sorted.
#[derive(Clone, Debug, Default)]
pub(super) struct Answers(BTreeMap<ExtendedResource, HashMap<Vec<String>, Answer>>);

impl Answers {
    pub(super) fn get(&self, resource: ExtendedResource, ids: &[String]) -> Option<&Answer> {
        self.0.get(&resource)?.get(ids)
    }

    pub(super) fn get_mut(&mut self, resource: ExtendedResource, ids: &[String]) -> Option<&mut Answer> {
        self.0.get_mut(&resource)?.get_mut(ids)
    }

    /// The answers about one resource.
    pub(super) fn of(&self, resource: ExtendedResource) -> impl Iterator<Item = (&Vec<String>, &Answer)> {
        self.0.get(&resource).into_iter().flatten()
    }

    /// Replaces what was answered about these IDs before, if there is room.
    pub(super) fn put(&mut self, resource: ExtendedResource, ids: Vec<String>, answer: Answer) {
        // What was answered before for these IDs is not true any more, whether or not there is room.
        self.0.entry(resource).or_default().remove(&ids);
        if self.len() >= MAX_ANSWERS {
            self.retain(|answer| answer.pod.is_some());
        }
        if self.len() < MAX_ANSWERS {
            self.0.entry(resource).or_default().insert(ids, answer);
        }
    }

    pub(super) fn retain(&mut self, keep: impl Fn(&Answer) -> bool) {
        for answers in self.0.values_mut() {
            answers.retain(|_, answer| keep(answer));
        }
    }

    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Answer> {
        self.0.values_mut().flat_map(HashMap::values_mut)
    }

    fn len(&self) -> usize {
        self.0.values().map(HashMap::len).sum()
    }
}
