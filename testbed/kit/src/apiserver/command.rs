//! The command `testbed api-server`.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::Args;

use super::ApiServer;

/// Flags of `testbed api-server`.
#[derive(Clone, Debug, Args)]
pub struct ApiServerArgs {
    /// File to write a kubeconfig to.
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
}

/// Serves until the process is interrupted, and so never returns a value.
pub async fn run(args: ApiServerArgs) -> Result<bool> {
    let server = ApiServer::start().await.context("cannot start the API server")?;
    server.kubeconfig(&args.kubeconfig, "admin")?;
    std::future::pending().await
}
