//! Scenarios on the small Kubernetes of the crate `kit`, with gpushare's real binaries.
//!
//! [`demo`], [`e2e`] with its [`scenario`]s, [`chaos`] and [`waves`]; [`mod@cli`] has the commands. [`replicas`],
//! [`second_scheduler`] and [`installation`] complete a cluster as `deploy/` does. Nothing of it is shipped.

pub mod chaos;
pub mod cli;
pub mod demo;
pub mod e2e;
pub mod installation;
pub mod replicas;
pub mod scenario;
pub mod second_scheduler;
pub mod waves;
