//! The annotation of a Node by which an administrator closes GPUs to new pods.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

/// Annotation of the Node: the minors of the GPUs that take no new pods, separated by commas, or [`ALL`].
pub const CLOSED_GPUS: &str = "gpushare/closed-gpus";

/// The value of [`CLOSED_GPUS`] that closes all GPUs of the node.
pub const ALL: &str = "all";

/// Most bytes of a value that are read: far more than the minors of any node.
const MAX_BYTES: usize = 4096;

/// Most characters of a value that its problem shows, so that an event about it stays short.
const MAX_SHOWN: usize = 512;

/// The GPUs that [`CLOSED_GPUS`] names, and the value itself for [`Self::problem`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ClosedGpus {
    is_all: bool,
    minors: BTreeSet<u32>,
    /// True if a part of the value is neither a minor nor [`ALL`].
    is_unreadable: bool,
    /// The annotation's own value; empty for GPUs that no annotation names.
    value: String,
}

impl ClosedGpus {
    /// All GPUs of a node.
    pub fn all() -> Self {
        Self {
            is_all: true,
            ..Self::default()
        }
    }

    /// The GPUs with these minors.
    pub fn of(minors: impl IntoIterator<Item = u32>) -> Self {
        Self {
            minors: minors.into_iter().collect(),
            ..Self::default()
        }
    }

    /// Reads the annotation; without it no GPU is closed. Parts of the value that name a GPU close it, whatever the others are.
    pub fn read(annotations: Option<&BTreeMap<String, String>>) -> Self {
        let mut closed = Self::default();
        let Some(value) = annotations.and_then(|annotations| annotations.get(CLOSED_GPUS)) else {
            return closed;
        };
        value.clone_into(&mut closed.value);
        if value.len() > MAX_BYTES {
            closed.is_unreadable = true;
            return closed;
        }
        for part in value.split(',').map(str::trim) {
            match part.parse() {
                Ok(minor) => drop(closed.minors.insert(minor)),
                Err(_) if part == ALL => closed.is_all = true,
                Err(_) => closed.is_unreadable = true,
            }
        }
        closed
    }

    /// The GPUs that this or `other` closes.
    #[must_use]
    pub fn with(mut self, other: Self) -> Self {
        self.is_all |= other.is_all;
        self.minors.extend(other.minors);
        self
    }

    /// The GPUs that stay closed once these are open; `None` if all of the node are closed, whose minors are not known here.
    #[must_use]
    pub fn without(mut self, gpus: &[u32]) -> Option<Self> {
        self.minors.retain(|minor| !gpus.contains(minor));
        (!self.is_all).then_some(self)
    }

    /// Returns true if no GPU is closed.
    pub fn is_empty(&self) -> bool {
        !self.is_all && self.minors.is_empty()
    }

    /// Returns true if the GPU with this minor is closed.
    pub fn has(&self, minor: u32) -> bool {
        self.is_all || self.minors.contains(&minor)
    }

    /// The fault of the annotation on a node whose GPUs have the minors `known`, in a sentence; `None` without one.
    pub fn problem(&self, known: &[u32]) -> Option<String> {
        let absent = self.minors.iter().any(|minor| !known.contains(minor));
        if !self.is_unreadable && !absent {
            return None;
        }
        let value: String = self.value.chars().take(MAX_SHOWN).collect();
        let is_cut = value.len() < self.value.len();
        let cut = if is_cut { " (cut)" } else { "" };
        let known: Vec<String> = known.iter().map(ToString::to_string).collect();
        Some(format!(
            "node annotation {CLOSED_GPUS}: {value:?}{cut} is neither {ALL:?} nor a list of GPUs of the node (minors {}); it closes \
             only the GPUs that it names",
            known.join(",")
        ))
    }
}

impl fmt::Display for ClosedGpus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.is_all {
            return f.write_str(ALL);
        }
        let minors: Vec<String> = self.minors.iter().map(ToString::to_string).collect();
        f.write_str(&minors.join(","))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    const LONG: &str =
        "0,x00000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000";

    fn read(value: &str) -> ClosedGpus {
        ClosedGpus::read(Some(&BTreeMap::from([(
            CLOSED_GPUS.to_owned(),
            value.to_owned(),
        )])))
    }

    #[rstest]
    #[case::two("0,3", &[0, 3], true)]
    #[case::spaces(" 3 , 0", &[0, 3], true)]
    #[case::all("all", &[0, 1, 2, 3], true)]
    #[case::an_absent_minor("0,9", &[0], false)]
    #[case::nonsense("x", &[], false)]
    #[case::nonsense_beside_a_minor("1,x", &[1], false)]
    #[case::a_negative_number("-1", &[], false)]
    #[case::all_beside_a_minor("all,9", &[0, 1, 2, 3], false)]
    #[case::a_long_value(LONG, &[0], false)]
    #[case::nothing("", &[], false)]
    #[case::another_case("ALL", &[], false)]
    fn a_value_closes_the_gpus_that_it_names(
        #[case] value: &str,
        #[case] expected: &[u32],
        #[case] is_valid: bool,
    ) {
        let closed = read(value);
        let minors: Vec<u32> = (0..4).filter(|minor| closed.has(*minor)).collect();
        assert_eq!(minors, expected);
        let problem = closed.problem(&[0, 1, 2, 3]);
        assert_eq!(problem.is_none(), is_valid, "{problem:?}");
        if let Some(problem) = problem {
            assert!(
                problem.contains(&format!("{value:?}")),
                "the whole value: {problem}"
            );
        }
    }

    #[test]
    fn gpus_are_opened_by_their_minors() {
        let rest = read("0,3").without(&[3, 7]);
        assert_eq!(rest.map(|rest| rest.to_string()).as_deref(), Some("0"));
        assert_eq!(read("all").without(&[3]), None);
    }

    #[test]
    fn a_long_value_closes_nothing() {
        let closed = read(&"0,".repeat(MAX_BYTES));
        assert!(closed.is_empty() && closed.problem(&[0]).is_some());
    }

    proptest! {
        #[test]
        fn a_written_value_is_read_again(minors in proptest::collection::btree_set(0_u32..64, 1..9)) {
            let closed = ClosedGpus::of(minors.iter().copied());
            let again = read(&closed.to_string());
            prop_assert_eq!((again.is_all, &again.minors), (closed.is_all, &closed.minors));
            prop_assert_eq!(again.problem(&(0..64).collect::<Vec<_>>()), None);
        }

        #[test]
        fn any_text_is_read(text in ".{0,64}") {
            let closed = read(&text);
            let _ = closed.problem(&[0]);
        }
    }
}
