//! `kubectl gpushare`: the program. Everything it does is in the library of this crate.

use std::process::ExitCode;

#[tokio::main]
async fn main() -> ExitCode {
    cli::run().await
}
