//! What tells devices of one type apart besides what is free of them: where they sit, their labels, their virtual functions,
//! and how GPUs are linked.

use std::collections::BTreeMap;

use crate::ident::{FunctionId, SwitchId};

/// Labels of a device, or of a group of virtual functions.
pub type Labels = BTreeMap<Box<str>, Box<str>>;

/// Where a device sits in its machine, as far as its node says.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    /// NUMA node; `None` if unknown.
    pub numa: Option<u32>,
    /// PCIe switch; `None` if unknown. The same text below two NUMA nodes means two switches.
    pub switch: Option<SwitchId>,
}

/// A part of a device that an owner can have to itself.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Function {
    /// What identifies it on its node, such as its PCI address.
    pub id: FunctionId,
    /// Its number, for records; -1 if unknown.
    pub minor: i32,
}

/// Virtual functions of one device that share their labels.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct FunctionGroup {
    /// The labels.
    pub labels: Labels,
    /// The functions, in any order.
    pub functions: Vec<Function>,
}

/// What tells a device apart from others of its type.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Traits {
    /// Its labels.
    pub labels: Labels,
    /// Where it sits; `None` if nothing is known.
    pub place: Option<Place>,
    /// Its virtual functions; empty if it has none.
    pub functions: Vec<FunctionGroup>,
}

/// GPUs every two of which are linked directly, or through switches of their own.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct LinkGroup {
    /// Minors of the GPUs.
    pub minors: Vec<u32>,
    /// How many links there are between any two of them.
    pub n_links: u32,
}

/// A set of GPUs that may be given away together.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Partition {
    /// Minors of its GPUs.
    pub minors: Vec<u32>,
    /// Bandwidth of a ring through them, in bytes per second; `None` if unknown.
    pub bandwidth: Option<u64>,
    /// How well the node is left when it has been given away; higher is better.
    pub score: i64,
}

/// All sets of GPUs of a node that may be given away together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct PartitionTable {
    /// Whether whole GPUs are given away in these sets only; otherwise the sets are preferred.
    pub is_binding: bool,
    /// The sets, in the order of the table.
    pub partitions: Vec<Partition>,
}
