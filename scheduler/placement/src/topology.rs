//! Which devices a request gets where it matters which: partitions, places, links, labels, virtual functions, exclusions
//! and devices of several types that belong together.
//!
//! Rules come first: a device must be well, have room, have the labels (and a free virtual function) that are wished for,
//! and be left by the exclusions of others and of the request itself ([`scene`]); GPUs must be a partition where only
//! partitions will do, and lie within their scope ([`partitions`]); devices that must share switches do. Of all choices
//! that break none of these the one with the least [`rank`] is taken ([`search`], [`follow`]).
//!
//! Types that are not joined are chosen one by one. Wishes say nothing where the vendor's plugin chooses the GPUs, so a
//! request with any is refused there. More than 64 devices of a type: only the 64 preferred ones are looked at, and more
//! than 64 at once are taken by preference alone.

mod admit;
mod decide;
mod follow;
mod groups;
mod links;
mod partitions;
mod pool;
mod problem;
mod rank;
mod scene;
mod search;
mod sets;
mod uses;

pub(crate) use decide::Decision;
pub(crate) use uses::Use;
