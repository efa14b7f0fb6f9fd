//! Which GPUs are linked with which, from what each of them says of the far ends of its links.
//!
//! Pure. GPUs on switches reach each other through them with all their links, so together they are one group.

use std::collections::{BTreeMap, BTreeSet};

use proto::topology::GpuLinks;

/// What is at the other end of an active link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FarEnd {
    /// The GPU of this minor.
    Gpu(u32),
    /// A switch.
    Switch,
}

/// The groups of linked GPUs from all links that their owners, by minor, see.
pub(super) fn groups(links: &[(u32, FarEnd)]) -> Vec<GpuLinks> {
    let mut to_switches = BTreeMap::<u32, u32>::new();
    let mut seen = BTreeMap::<(u32, u32), u32>::new();
    for (own, far) in links {
        match far {
            FarEnd::Switch => *to_switches.entry(*own).or_default() += 1,
            FarEnd::Gpu(other) => *seen.entry((*own, *other)).or_default() += 1,
        }
    }
    let on_switches = GpuLinks {
        minors: to_switches.keys().copied().collect(),
        links: to_switches.values().copied().min().unwrap_or(0),
    };
    let pairs: BTreeSet<(u32, u32)> = seen
        .keys()
        .map(|(one, other)| (*one.min(other), *one.max(other)))
        .collect();
    let between = |(one, other): (u32, u32)| {
        let count = |from, to| seen.get(&(from, to)).copied().unwrap_or(0);
        GpuLinks {
            minors: vec![one, other],
            links: count(one, other).max(count(other, one)),
        }
    };
    let pairs = pairs.into_iter().filter(|(one, other)| one != other).map(between);
    (on_switches.minors.len() > 1)
        .then_some(on_switches)
        .into_iter()
        .chain(pairs)
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    fn text(groups: &[GpuLinks]) -> String {
        serde_json::to_string(groups).unwrap()
    }

    #[rstest]
    #[case::none(&[], "[]")]
    #[case::alone_on_a_switch(&[(0, None), (0, None)], "[]")]
    #[case::on_switches(&[(0, None), (0, None), (2, None), (2, None), (1, None), (1, None)], r#"[{"minors":[0,1,2],"links":2}]"#)]
    #[case::one_with_a_broken_link(&[(0, None), (0, None), (1, None)], r#"[{"minors":[0,1],"links":1}]"#)]
    #[case::pairs(&[(0, Some(1)), (1, Some(0)), (2, Some(3)), (2, Some(3)), (3, Some(2))], r#"[{"minors":[0,1],"links":1},{"minors":[2,3],"links":2}]"#)]
    #[case::one_tells_nothing(&[(1, Some(0)), (1, Some(0))], r#"[{"minors":[0,1],"links":2}]"#)]
    #[case::a_loop(&[(0, Some(0))], "[]")]
    #[case::both(&[(0, None), (1, None), (1, Some(2))], r#"[{"minors":[0,1],"links":1},{"minors":[1,2],"links":1}]"#)]
    fn found(#[case] links: &[(u32, Option<u32>)], #[case] expected: &str) {
        let links: Vec<_> = links
            .iter()
            .map(|(own, far)| (*own, far.map_or(FarEnd::Switch, FarEnd::Gpu)))
            .collect();
        assert_eq!(text(&groups(&links)), expected);
    }

    proptest! {
        /// Links that both ends see make a group for each pair, with as many links.
        #[test]
        fn pairs_are_counted(counts in prop::collection::btree_map((0..8_u32, 0..8_u32), 1..4_u32, 0..10)) {
            let counts: BTreeMap<_, _> = counts.into_iter().filter(|((one, other), _)| one < other).collect();
            let ends = |((one, other), n): (&(u32, u32), &u32)| {
                (0..*n).flat_map(|_| [(*one, FarEnd::Gpu(*other)), (*other, FarEnd::Gpu(*one))]).collect::<Vec<_>>()
            };
            let links: Vec<_> = counts.iter().flat_map(ends).collect();
            let expected: Vec<_> = counts.iter().map(|((one, other), n)| GpuLinks { minors: vec![*one, *other], links: *n }).collect();
            prop_assert_eq!(groups(&links), expected);
        }
    }
}
