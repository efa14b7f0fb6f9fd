//! Finding nodes by name, thousands of times per request: short names lie in the table itself.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHashMap;

use crate::fleet::NodeId;

/// Longest name that lies in the table, in bytes: one entry is then one cache line.
const MAX_SHORT: usize = 54;

/// Place of each node by its name, with its generation, so that nothing else need be looked at.
#[derive(Debug, Default)]
pub(crate) struct Names {
    places: FxHashMap<Name, NodeId>,
    version: u64,
}

#[derive(Debug)]
enum Name {
    /// Padded with zeros.
    Short {
        n: u8,
        bytes: [u8; MAX_SHORT],
    },
    Long(Box<[u8]>),
}

impl Names {
    #[inline]
    pub(crate) fn get(&self, name: &str) -> Option<NodeId> {
        self.places.get(name.as_bytes()).copied()
    }

    pub(crate) fn insert(&mut self, name: &str, place: NodeId) {
        self.places.insert(Name::from(name), place);
        self.version += 1;
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.places.remove(name.as_bytes());
        self.version += 1;
    }

    /// Grows with every change.
    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    pub(crate) fn len(&self) -> usize {
        self.places.len()
    }
}

impl From<&str> for Name {
    fn from(name: &str) -> Self {
        let mut bytes = [0; MAX_SHORT];
        match (bytes.get_mut(..name.len()), u8::try_from(name.len())) {
            (Some(start), Ok(n)) => {
                start.copy_from_slice(name.as_bytes());
                Self::Short { n, bytes }
            }
            _ => Self::Long(name.as_bytes().into()),
        }
    }
}

impl Borrow<[u8]> for Name {
    #[inline]
    fn borrow(&self) -> &[u8] {
        match self {
            Self::Short { n, bytes } => bytes.get(..usize::from(*n)).unwrap_or(bytes),
            Self::Long(bytes) => bytes,
        }
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        let (one, other): (&[u8], &[u8]) = (self.borrow(), other.borrow());
        one == other
    }
}

impl Eq for Name {}

impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        let bytes: &[u8] = self.borrow();
        bytes.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{Name, Names};
    use crate::fleet::NodeId;

    #[rstest]
    #[case::empty(0)]
    #[case::usual(20)]
    #[case::longest_in_place(54)]
    #[case::shortest_elsewhere(55)]
    #[case::longest_of_a_node(253)]
    #[case::absurd(70_000)]
    fn names_of_any_length_are_told_apart(#[case] length: usize) {
        let mut names = Names::default();
        let name = "n".repeat(length);
        let place = |index| NodeId::new(index, 7);
        names.insert(&name, place(1));
        names.insert(&format!("{name}n"), place(2));
        names.insert(&format!("{name}\0"), place(3));
        assert_eq!(names.get(&name), Some(place(1)));
        assert_eq!(names.get(&format!("{name}n")), Some(place(2)));
        assert_eq!(names.get(&format!("{name}\0")), Some(place(3)));
        names.remove(&name);
        assert_eq!((names.get(&name), names.len()), (None, 2));
    }

    #[test]
    fn an_entry_is_one_cache_line() {
        assert_eq!(size_of::<(Name, NodeId)>(), 64);
    }
}
