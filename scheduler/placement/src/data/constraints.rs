//! Constraints: rules that a pod sets for the choice of its devices, by Koordinator's annotations.

use std::fmt;

use crate::data::device::{Labels, LimitLevel};
use crate::data::ident::DeviceType;

/// Devices of several types that are allocated close to one another.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JointAllocation {
    /// The types: the engine chooses devices of the first, and devices of the others near them.
    pub kinds: Vec<DeviceType>,
    /// True if devices of all types must share their PCIe switches: every switch has devices of all types, or of none.
    pub same_switch: bool,
}

/// Demands on a partition of GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartitionConstraint {
    /// True if only partitions with the highest score among those of the requested size in the node's table will do.
    pub restricted: bool,
    /// Least bandwidth of a ring through the GPUs, in bytes per second.
    pub bandwidth: Option<u64>,
}

/// The conversion of a requested amount to a number of devices (Koordinator's `allocateStrategy`). Without one, the amount is a
/// part of one device or a number of whole devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strategy {
    /// Every device that the label selector selects gives the full amount.
    ApplyForAll,
    /// The amount is the number of devices.
    RequestsAsCount,
}

/// Exclusive use: the devices that other pods must not use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Exclusion {
    /// The devices of the type that the pod holds.
    Device,
    /// All devices of the type on the PCIe switches of the devices that the pod holds.
    Switch,
}

/// The widest part of a machine that devices may be spread over.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scope {
    /// One device.
    Device,
    /// One PCIe switch.
    Switch,
    /// One NUMA node.
    Numa,
    /// The machine.
    Machine,
}

impl Scope {
    /// The scope in words.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Device => "device",
            Self::Switch => "switch",
            Self::Numa => "NUMA node",
            Self::Machine => "machine",
        }
    }
}

/// Constraints on the devices of one type that a pod gets.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DeviceConstraint {
    /// If given, the pod gets only devices with these labels.
    pub selector: Option<Selector>,
    /// If given, the pod gets one virtual function (SR-IOV), out of groups with these labels, instead of each device.
    pub virtual_functions: Option<Selector>,
    /// The conversion of the requested amount to a number of devices.
    pub strategy: Option<Strategy>,
    /// The devices that no other pod may use; `None` if others may use all.
    pub exclusion: Option<Exclusion>,
    /// The widest part of the machine that the devices may be spread over.
    pub scope: Option<Scope>,
}

/// No constraint on the devices of a type.
pub(crate) static UNCONSTRAINED: DeviceConstraint = DeviceConstraint {
    selector: None,
    virtual_functions: None,
    strategy: None,
    exclusion: None,
    scope: None,
};

/// All constraints of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Constraints {
    /// Types of devices that are allocated close to one another.
    pub joint: Option<JointAllocation>,
    /// Demands on the partition, a set of GPUs that the node's partition table lists; if given, the pod's GPUs must be such a
    /// set.
    pub partition: Option<PartitionConstraint>,
    /// The weakest enforcement of memory limits that the pod accepts on GPUs that it shares.
    pub limits: LimitLevel,
    /// Constraints by type, each type once.
    pub by_kind: Vec<(DeviceType, DeviceConstraint)>,
}

impl Constraints {
    /// The constraints on devices of a type.
    pub fn of(&self, kind: &DeviceType) -> Option<&DeviceConstraint> {
        let (_, constraint) = self.by_kind.iter().find(|(of, _)| of == kind)?;
        Some(constraint)
    }

    /// Returns true if some constraint rules out whole GPUs, so that the vendor's plugin must not choose them.
    pub(crate) fn narrow_gpus(&self) -> bool {
        let gpus = self.of(&DeviceType::Gpu).unwrap_or(&UNCONSTRAINED);
        let on_same_switch =
            |joint: &JointAllocation| joint.same_switch && joint.kinds.contains(&DeviceType::Gpu);
        self.partition.is_some()
            || self.joint.as_ref().is_some_and(on_same_switch)
            || gpus.selector.is_some()
            || gpus.virtual_functions.is_some()
            || gpus.scope.is_some_and(|scope| scope < Scope::Machine)
            // Exclusive use of a device alone restricts other pods, not the choice.
            || gpus.exclusion == Some(Exclusion::Switch)
    }
}

/// The widest exclusive use that a list has for a device type; `None` without any.
pub(crate) fn widest_exclusion(
    exclusions: &[(DeviceType, Exclusion)],
    kind: &DeviceType,
) -> Option<Exclusion> {
    let mut widest = None;
    for (excluded_kind, exclusion) in exclusions {
        if excluded_kind == kind {
            widest = widest.max(Some(*exclusion));
        }
    }
    widest
}

/// A condition on one label, as Kubernetes defines the operators of label selectors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LabelCondition {
    /// The label has one of these values.
    In(Vec<Box<str>>),
    /// The label has none of these values, or is missing.
    NotIn(Vec<Box<str>>),
    /// The label exists.
    Exists,
    /// The label is missing.
    DoesNotExist,
}

/// A condition on the label with this key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The label's key.
    pub key: Box<str>,
    /// The condition.
    pub test: LabelCondition,
}

/// A label selector: all requirements must hold; without any, it selects everything.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Selector {
    /// The requirements.
    pub requirements: Vec<Requirement>,
}

impl Selector {
    /// Returns true if all requirements hold.
    pub fn selects(&self, labels: &Labels) -> bool {
        for Requirement { key, test } in &self.requirements {
            let value = labels.get(key).map(AsRef::as_ref);
            if !test.passes(value) {
                return false;
            }
        }
        true
    }
}

impl LabelCondition {
    /// Returns true if the condition holds for the value of a label, `None` if the label is missing.
    fn passes(&self, value: Option<&str>) -> bool {
        match self {
            Self::In(values) => is_one_of(value, values),
            // As for label selectors in Kubernetes, a missing label passes.
            Self::NotIn(values) => !is_one_of(value, values),
            Self::Exists => value.is_some(),
            Self::DoesNotExist => value.is_none(),
        }
    }
}

fn is_one_of(value: Option<&str>, values: &[Box<str>]) -> bool {
    values.iter().any(|one| value == Some(&**one))
}

impl fmt::Display for Selector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, requirement) in self.requirements.iter().enumerate() {
            write!(f, "{}{requirement}", if at == 0 { "" } else { "," })?;
        }
        Ok(())
    }
}

impl fmt::Display for Requirement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, test } = self;
        match test {
            LabelCondition::In(values) if values.len() == 1 => write!(f, "{key}={}", values.join("")),
            LabelCondition::In(values) => write!(f, "{key} in ({})", values.join(", ")),
            LabelCondition::NotIn(values) => write!(f, "{key} notin ({})", values.join(", ")),
            LabelCondition::Exists => f.write_str(key),
            LabelCondition::DoesNotExist => write!(f, "!{key}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{LabelCondition, Requirement, Selector};

    fn one(test: LabelCondition) -> Selector {
        Selector {
            requirements: vec![Requirement {
                key: "type".into(),
                test,
            }],
        }
    }

    #[rstest]
    #[case::empty(&Selector::default(), [true, true, true])]
    #[case::is_in(&one(LabelCondition::In(vec!["a".into(), "c".into()])), [true, false, false])]
    #[case::in_nothing(&one(LabelCondition::In(vec![])), [false, false, false])]
    #[case::not_in(&one(LabelCondition::NotIn(vec!["a".into()])), [false, true, true])]
    #[case::exists(&one(LabelCondition::Exists), [true, true, false])]
    #[case::does_not_exist(&one(LabelCondition::DoesNotExist), [false, false, true])]
    fn selects_by_labels(#[case] selector: &Selector, #[case] expected: [bool; 3]) {
        let labels = [&[("type", "a")][..], &[("type", "b")], &[("other", "a")]];
        let labels = labels.map(|pairs| {
            pairs
                .iter()
                .map(|(key, value)| ((*key).into(), (*value).into()))
                .collect()
        });
        assert_eq!(labels.map(|labels| selector.selects(&labels)), expected);
    }

    #[test]
    fn a_selector_matches_only_if_all_its_requirements_do() {
        let both = Selector {
            requirements: [
                one(LabelCondition::Exists),
                one(LabelCondition::NotIn(vec!["a".into()])),
            ]
            .into_iter()
            .flat_map(|one| one.requirements)
            .collect(),
        };
        let labels = |value: &str| [("type".into(), value.into())].into();
        assert!(both.selects(&labels("b")));
        assert!(!both.selects(&labels("a")));
    }
}
