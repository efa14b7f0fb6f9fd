//! `testbed kube-scheduler`: the scheduling loop as a process of its own, so that it can be killed and stopped as the real one.
//!
//! With `leaderElection` in its configuration the loop runs while the process holds the Lease. After losing it, the loop begins
//! again from nothing, as the real process exits and is started again.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use kube::Client;

use super::leader_election::Elector;
use super::{Configuration, KubeScheduler, Loop, Options};
use crate::cluster::client_of;

/// `testbed kube-scheduler`.
#[derive(Clone, Debug, Args)]
pub struct KubeSchedulerArgs {
    /// The cluster, and the account of the process.
    #[arg(long, value_name = "FILE")]
    kubeconfig: PathBuf,
    /// A `KubeSchedulerConfiguration`.
    #[arg(long, value_name = "FILE")]
    config: PathBuf,
    /// Host name of the process, by which it holds the Lease: the name of its pod.
    #[arg(long, value_name = "NAME")]
    host_name: String,
}

/// Runs until `stop` completes, and then gives the Lease up.
///
/// # Errors
/// A file is unreadable or not what it should be.
pub async fn run(args: KubeSchedulerArgs, stop: impl Future<Output = ()>) -> Result<bool> {
    let configuration = Configuration::read(&args.config)?;
    let client = client_of(&args.kubeconfig).await?;
    tokio::pin!(stop);
    let Some(election) = configuration.leader_election.clone() else {
        let _running = KubeScheduler::start(&client, &configuration, Options::default())?;
        stop.await;
        return Ok(true);
    };
    loop {
        let mut elector = Elector::new(client.clone(), election.clone(), &args.host_name);
        let is_asked_to_end = tokio::select! {
            result = lead(&mut elector, &client, &configuration) => result.map(|()| false)?,
            () = &mut stop => true,
        };
        if is_asked_to_end {
            elector.release().await;
            return Ok(true);
        }
    }
}

/// Runs the loop from the time at which the Lease is held until it is lost.
async fn lead(elector: &mut Elector, client: &Client, configuration: &Configuration) -> Result<()> {
    elector.acquire().await;
    let running = Loop::new(client.clone(), configuration, Options::default())?;
    tokio::select! {
        () = running.run(client.clone()) => {}
        () = elector.renew() => {}
    }
    Ok(())
}
