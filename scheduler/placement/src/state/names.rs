//! The table of node names, which a request looks up thousands of times: short names lie in the table itself.

use std::borrow::Borrow;
use std::hash::{Hash, Hasher};

use rustc_hash::FxHashMap;

use crate::data::ident::NodeId;

/// Longest name that lies in the table, in bytes: one entry is then one cache line.
const MAX_SHORT: usize = 54;

/// Nodes by name.
#[derive(Debug, Default)]
pub(crate) struct Names {
    nodes: FxHashMap<NodeName, NodeId>,
    /// Number of changes so far: a look-up is right as long as it is the same.
    version: u64,
}

/// The name of a node, within the table if it is short.
#[derive(Debug)]
enum NodeName {
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
        self.nodes.get(name.as_bytes()).copied()
    }

    pub(crate) fn insert(&mut self, name: &str, node: NodeId) {
        self.nodes.insert(NodeName::from(name), node);
        self.version += 1;
    }

    pub(crate) fn remove(&mut self, name: &str) {
        self.nodes.remove(name.as_bytes());
        self.version += 1;
    }

    pub(crate) fn version(&self) -> u64 {
        self.version
    }

    #[cfg(any(test, feature = "check"))]
    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }
}

impl From<&str> for NodeName {
    fn from(name: &str) -> Self {
        let mut bytes = [0; MAX_SHORT];
        // The range is out of bounds for a long name, which then gets an allocation of its own.
        match (bytes.get_mut(..name.len()), u8::try_from(name.len())) {
            (Some(start), Ok(n)) => {
                start.copy_from_slice(name.as_bytes());
                Self::Short { n, bytes }
            }
            _ => Self::Long(name.as_bytes().into()),
        }
    }
}

// Bytes, not `str`: a look-up would have to check the encoding of a name that was valid when it was inserted.
impl Borrow<[u8]> for NodeName {
    #[inline]
    fn borrow(&self) -> &[u8] {
        match self {
            Self::Short { n, bytes } => bytes.get(..usize::from(*n)).unwrap_or(bytes),
            Self::Long(bytes) => bytes,
        }
    }
}

impl PartialEq for NodeName {
    fn eq(&self, other: &Self) -> bool {
        // The padding of a short name is no part of it.
        let (one, other): (&[u8], &[u8]) = (self.borrow(), other.borrow());
        one == other
    }
}

impl Eq for NodeName {}

impl Hash for NodeName {
    fn hash<H: Hasher>(&self, state: &mut H) {
        // A look-up hashes the bytes of a name, so an entry has to hash as its bytes do.
        let bytes: &[u8] = self.borrow();
        bytes.hash(state);
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{Names, NodeName};
    use crate::data::ident::NodeId;

    #[rstest]
    #[case::empty(0)]
    #[case::usual(20)]
    #[case::longest_in_node(54)]
    #[case::shortest_elsewhere(55)]
    #[case::longest_of_a_node(253)]
    #[case::longer_than_any(70_000)]
    fn names_that_share_a_prefix_are_different(#[case] length: usize) {
        let mut names = Names::default();
        let name = "n".repeat(length);
        let node = |index| NodeId { index, generation: 7 };
        names.insert(&name, node(1));
        names.insert(&format!("{name}n"), node(2));
        names.insert(&format!("{name}\0"), node(3));
        assert_eq!(names.get(&name), Some(node(1)));
        assert_eq!(names.get(&format!("{name}n")), Some(node(2)));
        assert_eq!(names.get(&format!("{name}\0")), Some(node(3)));
        names.remove(&name);
        assert_eq!((names.get(&name), names.len()), (None, 2));
    }

    #[test]
    fn an_entry_of_the_name_table_fits_a_cache_line() {
        assert_eq!(size_of::<(NodeName, NodeId)>(), 64);
    }
}
