//! The parts that both gpushare daemons share: log, signals, supervision of tasks, health endpoints, and the connection to the
//! API server with its watches and events.
//!
//! Knows nothing of devices or placement, nor of either daemon.

pub mod api_server;
pub mod events;
pub mod health;
pub mod logging;
pub mod panics;
pub mod signals;
pub mod supervise;
pub mod watch;
pub mod watchdog;
