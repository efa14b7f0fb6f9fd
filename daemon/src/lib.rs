//! Supervision for both daemons: tasks whose end ends the process, a log line for every panic, and a watchdog for hangs.
//!
//! Knows nothing of Kubernetes, of devices, or of either daemon.

pub mod panics;
pub mod supervise;
pub mod watchdog;
