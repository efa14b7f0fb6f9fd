//! CPU and memory of nodes themselves: what pods need besides devices, and what strands devices when it runs out.
//!
//! Refuses nothing: kube-scheduler sees to it that pods fit. Who prefers nodes wants to know.

use crate::fleet::{Fleet, NodeId};
use crate::ident::OwnerId;

/// CPU and memory, of a node or for a pod.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostAmounts {
    /// Thousandths of a CPU.
    pub cpu_milli: u64,
    /// Bytes.
    pub memory: u64,
}

/// What a node has of these, and what of it is used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Host {
    /// `None` as long as nobody has said it: there is enough, then.
    pub(crate) total: Option<HostAmounts>,
    pub(crate) used: HostAmounts,
    /// How many owners use something.
    pub(crate) n_owners: u32,
}

/// What one owner uses, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct HostUse {
    pub(crate) index: u32,
    pub(crate) amounts: HostAmounts,
    /// Whether it is there because of the node, and says nothing of pods to come.
    pub(crate) is_tied: bool,
}

/// What an owner uses of a node's CPU and memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostLoad {
    /// How much.
    pub amounts: HostAmounts,
    /// Whether it runs there because of the node, as pods of `DaemonSets` do: no such pod will come and look for a node.
    pub is_tied: bool,
}

impl From<HostAmounts> for HostLoad {
    fn from(amounts: HostAmounts) -> Self {
        Self {
            amounts,
            is_tied: false,
        }
    }
}

impl HostAmounts {
    /// More than any node has.
    pub const PLENTY: Self = Self {
        cpu_milli: u64::MAX,
        memory: u64::MAX,
    };

    /// The sum, at most what the types hold.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_add(other.cpu_milli),
            memory: self.memory.saturating_add(other.memory),
        }
    }

    /// The difference, at least zero.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self {
            cpu_milli: self.cpu_milli.saturating_sub(other.cpu_milli),
            memory: self.memory.saturating_sub(other.memory),
        }
    }
}

impl Host {
    /// Whether nobody has said anything of it.
    pub(crate) fn is_unknown(&self) -> bool {
        self.total.is_none() && self.n_owners == 0
    }

    /// What nobody uses.
    pub(crate) fn free(&self) -> HostAmounts {
        self.total
            .map_or(HostAmounts::PLENTY, |total| total.less(self.used))
    }
}

impl Fleet {
    /// Says what CPU and memory a node has for pods; `None` if that is not known (any more).
    pub fn set_host(&mut self, node: &str, total: Option<HostAmounts>) {
        let known = self.names.get(node).map(NodeId::index);
        // A node of which nothing is known need not be entered for that.
        let Some(index) = known.or_else(|| total.map(|_| self.index_of(node))) else {
            return;
        };
        if self.at(index).is_some_and(|node| node.host.total != total) {
            self.change(index, |node| node.host.total = total);
        }
        self.vacate_if_idle(index);
    }

    /// Takes note of the CPU and memory that an owner uses of a node, in place of what it used before.
    pub fn run(&mut self, owner: &OwnerId, node: &str, load: impl Into<HostLoad>) {
        let index = self.index_of(node);
        let HostLoad { amounts, is_tied } = load.into();
        let used = HostUse {
            index,
            amounts,
            is_tied,
        };
        if self.running.get(owner) == Some(&used) {
            return;
        }
        self.change(index, |node| {
            node.host.used = node.host.used.plus(amounts);
            node.host.n_owners += 1;
        });
        let before = self.running.insert(owner.clone(), used);
        let is_plain = !self.owners.contains_key(owner);
        if is_plain {
            self.beside.come(used);
        }
        if let Some(before) = before {
            if is_plain {
                self.beside.go(before);
            }
            self.give_back(before);
        }
    }

    /// The amounts of a node's CPU and memory that an owner uses, if they are known.
    pub fn host_use(&self, owner: &str) -> Option<HostAmounts> {
        self.running.get(owner).map(|used| used.amounts)
    }

    /// An owner uses no CPU or memory any more.
    pub fn end(&mut self, owner: &str) {
        if let Some(before) = self.running.remove(owner) {
            if !self.owners.contains_key(owner) {
                self.beside.go(before);
            }
            self.give_back(before);
        }
    }

    fn give_back(&mut self, before: HostUse) {
        self.change(before.index, |node| {
            node.host.used = node.host.used.less(before.amounts);
            node.host.n_owners -= 1;
        });
        self.vacate_if_idle(before.index);
    }
}
