//! The identity of a physical device.

use std::{fmt, str::FromStr, sync::Arc};

/// Identifies a physical device of this node: a GPU by its UUID, such as `GPU-5a1d9f6c-…`, a device of another type by its PCI
/// address, such as `0000:1f:00.0`. The device IDs that kubelet allocates stand for parts of such a device.
///
/// Not empty, at most 40 visible ASCII characters, because it is part of kubelet's device IDs and of environment variables. Cheap
/// to clone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalId(Arc<str>);

impl PhysicalId {
    /// Longest accepted text; NVIDIA's UUIDs are `GPU-` or `MIG-` and 36 characters.
    pub(crate) const MAX_LEN: usize = 40;

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for PhysicalId {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let problem = if text.is_empty() {
            "it is empty"
        } else if text.len() > Self::MAX_LEN {
            "it is longer than 40 characters"
        } else if !text.as_bytes().iter().all(u8::is_ascii_graphic) {
            "it has a character that is not visible ASCII"
        } else {
            return Ok(Self(text.into()));
        };
        Err(format!("{text:?} is not the ID of a device: {problem}"))
    }
}

impl fmt::Display for PhysicalId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::empty("", "it is empty")]
    #[case::space("GPU a", "it has a character that is not visible ASCII")]
    #[case::newline("GPU-a\n", "it has a character that is not visible ASCII")]
    #[case::not_ascii("GPU-ä", "it has a character that is not visible ASCII")]
    #[case::too_long(
        "GPU-5a1d9f6c-0b1e-4c6a-9f4e-0123456789abc",
        "it is longer than 40 characters"
    )]
    fn invalid_ids_are_refused(#[case] text: &str, #[case] problem: &'static str) {
        assert_eq!(
            text.parse::<PhysicalId>(),
            Err(format!("{text:?} is not the ID of a device: {problem}"))
        );
    }

    proptest! {
        #[test]
        fn an_accepted_id_keeps_its_text(text in "[!-~]{1,40}") {
            prop_assert_eq!(text.parse::<PhysicalId>().unwrap().to_string(), text);
        }

        #[test]
        fn exactly_short_visible_ascii_ids_are_accepted(text in ".{0,45}") {
            let fits = (1..=40).contains(&text.len()) && text.chars().all(|c| ('!'..='~').contains(&c));
            prop_assert_eq!(text.parse::<PhysicalId>().is_ok(), fits);
        }
    }
}
