//! The Lease object in the API server: read from the API server itself, and written only over the version that was read.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use kube::api::PostParams;
use kube::{Api, Client};

use super::election::{LeaseRecord, WriteOutcome};

pub(super) struct LeaseObject {
    api: Api<Lease>,
    pub(super) name: String,
    /// The object as it was read or written last.
    last: Lease,
}

impl LeaseObject {
    /// The Lease of this name, which need not exist.
    pub(super) fn new(client: Client, namespace: &str, name: &str) -> Self {
        Self {
            api: Api::namespaced(client, namespace),
            name: name.to_owned(),
            last: Lease::default(),
        }
    }

    /// Reads the Lease's version and record, if it exists. The request names no resource version, so the API server answers from
    /// etcd and not from its cache.
    pub(super) async fn read(&mut self, timeout: Duration) -> anyhow::Result<Option<(String, LeaseRecord)>> {
        let found = tokio::time::timeout(timeout, self.api.get_opt(&self.name)).await;
        let found = found.context("no answer in time")?;
        let Some(found) = found.context("cannot read the Lease")? else {
            return Ok(None);
        };
        let version = found.metadata.resource_version.clone();
        let version = version.context("the Lease has no resource version")?;
        let record = record(&found);
        self.last = found;
        Ok(Some((version, record)))
    }

    /// Creates the Lease, if it does not exist.
    pub(super) async fn create(&mut self, record: &LeaseRecord, timeout: Duration) -> WriteOutcome {
        let mut lease = Lease::default();
        lease.metadata.name = Some(self.name.clone());
        lease.metadata.labels =
            Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into());
        lease.spec = Some(spec(record, None));
        let params = PostParams::default();
        let answer = tokio::time::timeout(timeout, self.api.create(&params, &lease)).await;
        self.outcome(answer.ok())
    }

    /// Replaces this version of the Lease, and no other version. The object has the UID that was read, so the API server does not
    /// replace a Lease that was deleted and created again under the same name.
    pub(super) async fn write(
        &mut self,
        version: String,
        record: &LeaseRecord,
        timeout: Duration,
    ) -> WriteOutcome {
        // Other fields and labels of the object, which a person may have set, stay.
        let mut lease = self.last.clone();
        lease.metadata.name = Some(self.name.clone());
        lease.metadata.resource_version = Some(version);
        // The API server then keeps the list that it has.
        lease.metadata.managed_fields = None;
        lease.spec = Some(spec(record, self.last.spec.as_ref()));
        let params = PostParams::default();
        let answer = tokio::time::timeout(timeout, self.api.replace(&self.name, &params, &lease)).await;
        self.outcome(answer.ok())
    }

    /// The outcome of a write by the API server's answer; `None` stands for no answer in time.
    fn outcome(&mut self, answer: Option<kube::Result<Lease>>) -> WriteOutcome {
        let error = match answer {
            Some(Ok(lease)) => {
                // An API server never answers without a resource version; then nothing would be known of the write.
                let version = lease.metadata.resource_version.clone();
                self.last = lease;
                return version.map_or(WriteOutcome::Unknown, WriteOutcome::Done);
            }
            // 409: there is another version. 404: the Lease was deleted.
            Some(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                return WriteOutcome::Overtaken;
            }
            Some(Err(error)) => format!("{:#}", anyhow::Error::from(error)),
            None => "no answer in time".to_owned(),
        };
        tracing::warn!(error, "cannot write the Lease");
        WriteOutcome::Unknown
    }
}

/// The fields of a Lease that the election depends on; those that are missing count as empty or zero.
fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.clone().unwrap_or_default();
    LeaseRecord {
        holder: spec.holder_identity.unwrap_or_default(),
        seconds: u64::try_from(spec.lease_duration_seconds.unwrap_or_default()).unwrap_or_default(),
        transitions: u64::try_from(spec.lease_transitions.unwrap_or_default()).unwrap_or_default(),
    }
}

/// The Lease's content for a record, after the content `previous`.
fn spec(record: &LeaseRecord, previous: Option<&LeaseSpec>) -> LeaseSpec {
    // The times are for people: no replica compares them.
    let now = Some(MicroTime(jiff::Timestamp::now()));
    let holder = Some(record.holder.clone());
    let acquired = match previous {
        // kube-scheduler and client-go keep the acquire time while the holder stays the same.
        Some(previous) if previous.holder_identity == holder => previous.acquire_time.clone(),
        _ => None,
    };
    LeaseSpec {
        holder_identity: holder,
        lease_duration_seconds: Some(i32::try_from(record.seconds).unwrap_or(i32::MAX)),
        lease_transitions: Some(i32::try_from(record.transitions).unwrap_or(i32::MAX)),
        acquire_time: acquired.or(now.clone()),
        renew_time: now,
        ..LeaseSpec::default()
    }
}
