//! The Lease object in the API server: read from the API server itself, and written only over the version that was read.

use std::time::Duration;

use anyhow::Context;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::PostParams;
use kube::{Api, Client};

use super::election::{LeaseRecord, WriteOutcome};

/// A Lease, by its name.
pub(super) struct LeaseObject {
    api: Api<Lease>,
    name: String,
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

    pub(super) fn name(&self) -> &str {
        &self.name
    }

    /// Reads the Lease's version and record, if it exists. The request names no resource version, so the API server answers from
    /// etcd and not from its cache.
    pub(super) async fn read(&mut self, timeout: Duration) -> anyhow::Result<Option<(String, LeaseRecord)>> {
        let found = tokio::time::timeout(timeout, self.api.get_opt(&self.name))
            .await
            .context("no answer in time")?;
        let Some(found) = found.context("cannot read the Lease")? else {
            return Ok(None);
        };
        let version = found
            .metadata
            .resource_version
            .clone()
            .context("the Lease has no resource version")?;
        let record = record(&found);
        self.last = found;
        Ok(Some((version, record)))
    }

    /// Creates the Lease, if it does not exist.
    pub(super) async fn create(&mut self, record: &LeaseRecord, timeout: Duration) -> WriteOutcome {
        let metadata = ObjectMeta {
            name: Some(self.name.clone()),
            labels: Some([("app.kubernetes.io/part-of".to_owned(), "gpushare".to_owned())].into()),
            ..ObjectMeta::default()
        };
        let lease = Lease {
            metadata,
            spec: Some(spec(record, None)),
        };
        let params = PostParams::default();
        let request = self.api.create(&params, &lease);
        let answer = tokio::time::timeout(timeout, request).await;
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
        let request = self.api.replace(&self.name, &params, &lease);
        let answer = tokio::time::timeout(timeout, request).await;
        self.outcome(answer.ok())
    }

    /// The outcome of a write by the API server's answer; `None` stands for no answer in time.
    fn outcome(&mut self, answer: Option<kube::Result<Lease>>) -> WriteOutcome {
        match answer {
            Some(Ok(lease)) => match lease.metadata.resource_version.clone() {
                Some(version) => {
                    self.last = lease;
                    WriteOutcome::Done(version)
                }
                // An API server never answers without a resource version, so nothing is known of the write.
                None => WriteOutcome::Unknown,
            },
            // 409: there is another version. 404: the Lease was deleted.
            Some(Err(kube::Error::Api(status))) if [404, 409].contains(&status.code) => {
                WriteOutcome::Overtaken
            }
            Some(Err(error)) => {
                tracing::warn!(
                    error = format!("{:#}", anyhow::Error::from(error)),
                    "cannot write the Lease"
                );
                WriteOutcome::Unknown
            }
            None => {
                tracing::warn!("cannot write the Lease: no answer in time");
                WriteOutcome::Unknown
            }
        }
    }
}

/// The fields of a Lease that the election depends on; those that are missing count as empty or zero.
fn record(lease: &Lease) -> LeaseRecord {
    let spec = lease.spec.as_ref();
    let number = |field: Option<i32>| {
        field
            .and_then(|number| u64::try_from(number).ok())
            .unwrap_or_default()
    };
    LeaseRecord {
        holder: spec
            .and_then(|spec| spec.holder_identity.clone())
            .unwrap_or_default(),
        seconds: number(spec.and_then(|spec| spec.lease_duration_seconds)),
        transitions: number(spec.and_then(|spec| spec.lease_transitions)),
    }
}

/// The Lease's content for a record, after the content `previous`. Its times are for people: no replica compares them.
fn spec(record: &LeaseRecord, previous: Option<&LeaseSpec>) -> LeaseSpec {
    let now = MicroTime(jiff::Timestamp::now());
    let number = |number: u64| Some(i32::try_from(number).unwrap_or(i32::MAX));
    // kube-scheduler and client-go keep the acquire time while the holder stays the same.
    let same_holder =
        previous.filter(|previous| previous.holder_identity.as_deref() == Some(record.holder.as_str()));
    LeaseSpec {
        holder_identity: Some(record.holder.clone()),
        lease_duration_seconds: number(record.seconds),
        lease_transitions: number(record.transitions),
        acquire_time: same_holder
            .and_then(|previous| previous.acquire_time.clone())
            .or_else(|| Some(now.clone())),
        renew_time: Some(now),
        ..LeaseSpec::default()
    }
}
