//! The parts that both gpushare daemons share: how a process logs, ends, watches itself, and talks to the API server.
//!
//! Knows nothing of devices and of placement, and of neither daemon.

pub mod api_server;
pub mod events;
pub mod health;
pub mod logging;
pub mod panics;
pub mod signals;
pub mod supervise;
pub mod watch;
pub mod watchdog;
