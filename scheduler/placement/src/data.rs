//! Values without state: amounts, devices, inventories, requests, constraints, holdings, policies and reasons.
//!
//! Nothing here knows a node or a fleet; every other module of the crate builds on these types.

pub(crate) mod amounts;
pub(crate) mod constraints;
pub(crate) mod device;
pub(crate) mod holding;
pub(crate) mod ident;
pub(crate) mod inventory;
pub(crate) mod misfit;
pub(crate) mod policy;
pub(crate) mod reason;
pub(crate) mod request;
pub(crate) mod workload;

/// The indices of the items for which `is_meant` returns true.
pub(crate) fn indices_where<T>(items: &[T], is_meant: impl Fn(&T) -> bool) -> impl Iterator<Item = usize> {
    let items = items.iter().enumerate();
    items.filter_map(move |(at, item)| is_meant(item).then_some(at))
}
