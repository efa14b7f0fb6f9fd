//! Which container is about to start, what it will see, and whether that is what its pod's record says. Pure but for
//! [`look`] and [`podresources`], which fetch what kubelet knows.
//!
//! Allocate is answered on a guess. Before a container starts kubelet says its exact device IDs, and its own books say
//! whose they are: that is proof. What is done about a difference is decided in [`verdict`] and carried out elsewhere.

pub mod environment;
mod exchanges;
pub mod look;
pub mod owner;
pub mod podresources;
pub mod room;
pub mod sight;
pub mod verdict;
