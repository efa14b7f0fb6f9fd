//! The parts that both gpushare daemons share: the process with its log, signals, supervised tasks and watchdog; the HTTP server
//! for probes, metrics and the daemon's own routes; and the connection to the API server with its watches and events.
//!
//! Nothing here knows devices, placement, or one of the two daemons (scheduler and device plugin).

pub mod api_server;
pub mod duration;
pub mod events;
pub mod health;
pub mod http_server;
pub mod log_limit;
pub mod logging;
pub mod metrics_text;
pub mod open_files;
pub mod panics;
pub mod process;
pub mod supervise;
pub mod tick;
pub mod watch;
pub mod watchdog;
pub mod x509;
