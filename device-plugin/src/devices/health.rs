//! Decides from the observations of a watch whether each device is healthy, and when an unhealthy one has recovered. Pure: the
//! caller passes the time, and acts on the [`HealthChange`]s.
//!
//! A critical XID (unless applications cause it), a lost device, a failed probe or an adapter without an active port makes a
//! device unhealthy. It is healthy again when, since its last trouble, it has answered a number of probes and a quiet time has
//! passed; if it needs a reset, no answer counts until one was observed or the driver has taken its demand back. An operator may
//! clear a device. Each relapse within a day of the recovery doubles the quiet time, up to an hour. [`Health::load`] continues the
//! XIDs of an earlier process.

mod xids;

use std::collections::BTreeMap;
use std::fmt;
use std::num::NonZeroU32;
use std::time::Duration;

use crate::devices::inventory::{MIG, Observation, ObservationKind, PhysicalId};

use xids::XidClass;
pub use xids::Xids;

/// Longest quiet time to which relapses lead, unless the policy itself sets a longer one.
pub(crate) const LONGEST_QUIET: Duration = Duration::from_secs(60 * 60);

/// Time after the recovery of a device in which further trouble is a relapse.
pub(crate) const RELAPSE_WITHIN: Duration = Duration::from_secs(24 * 60 * 60);

/// An XID that an application causes and that leaves the device in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ApplicationFault {
    pub(crate) uuid: PhysicalId,
    pub(crate) xid: u64,
}

/// The reason for a device's present state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HealthReason {
    /// The driver reported a critical error.
    Xid(u64),
    /// The device fell off the bus, or its source no longer lists it.
    Lost,
    /// A probe failed.
    ProbeFailed,
    /// The GPU is in MIG mode. Conditions and metrics show it as a failed probe, the word that their readers know.
    MigMode,
    /// The driver says that the device must be reset.
    NeedsReset,
    /// No port of an adapter is active.
    PortDown,
    /// The device was unhealthy and has recovered.
    Recovered,
    /// An operator has cleared the device.
    Cleared,
}

impl HealthReason {
    /// The XID in a word such as `Xid79`.
    pub fn xid(word: &str) -> Option<u64> {
        word.strip_prefix("Xid")?.parse().ok()
    }
}

/// One word, fit for the reason of a condition or an event.
impl fmt::Display for HealthReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Xid(xid) => return write!(f, "Xid{xid}"),
            Self::Lost => "Lost",
            // Readers of conditions and metrics know this word for MIG mode too.
            Self::ProbeFailed | Self::MigMode => "ProbeFailed",
            Self::NeedsReset => "NeedsReset",
            Self::PortDown => "PortDown",
            Self::Recovered => "Recovered",
            Self::Cleared => "Cleared",
        })
    }
}

/// A device became unhealthy or healthy, or is now unhealthy for another reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthChange {
    /// The device whose health has changed.
    pub device: PhysicalId,
    /// True if pods may be placed on the device.
    pub is_healthy: bool,
    /// The reason for the change.
    pub reason: HealthReason,
    /// The reason in a sentence for people.
    pub message: String,
}

/// The parameters of the rules.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthPolicy {
    /// The classes of critical XIDs.
    pub xids: Xids,
    /// The number of probes in a row that an unhealthy device must answer before it is healthy again.
    pub answers: NonZeroU32,
    /// The time for which an unhealthy device must also have been without trouble; each relapse doubles it, up to an hour.
    pub quiet: Duration,
}

/// Three answered probes over at least a minute; XIDs have the classes of NVIDIA's documentation.
impl Default for HealthPolicy {
    fn default() -> Self {
        Self {
            xids: Xids::default(),
            answers: NonZeroU32::MIN.saturating_add(2),
            quiet: Duration::from_secs(60),
        }
    }
}

impl HealthPolicy {
    fn needs_reset(&self, reason: HealthReason) -> bool {
        match reason {
            HealthReason::Xid(xid) => self.xids.class(xid) == XidClass::Reset,
            other => other == HealthReason::NeedsReset,
        }
    }

    /// The end of a message about trouble: the operator's step, if there is one, and the condition of recovery.
    fn remedy(&self, reason: HealthReason, needs_reset: bool, relapses: u32) -> String {
        let relapse = match relapses {
            0 => String::new(),
            n => format!(" (relapse {n})"),
        };
        if needs_reset {
            return format!(
                "it stays unhealthy until it has been reset (`nvidia-smi --gpu-reset`), the node has booted, or an operator clears \
                 it{relapse}"
            );
        }
        let step = match reason {
            HealthReason::Lost => "if it does not come back, restart the node; ",
            HealthReason::PortDown => "check its cable and its switch; ",
            HealthReason::ProbeFailed => "if that lasts, see the node's kernel log; ",
            _ => "",
        };
        format!(
            "{step}it is healthy again after {} probes and {} s without trouble{relapse}",
            self.answers,
            self.quiet_after(relapses).as_secs()
        )
    }

    fn quiet_after(&self, relapses: u32) -> Duration {
        // An error that comes back every few minutes must not return the device to pods each time.
        let doubled = self.quiet.saturating_mul(2_u32.saturating_pow(relapses));
        doubled.min(LONGEST_QUIET.max(self.quiet))
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct DeviceHealth {
    /// The trouble that makes the device unhealthy; none if it is healthy.
    trouble: Option<Trouble>,
    recovered: Option<Duration>,
    relapses: u32,
}

impl DeviceHealth {
    /// Records trouble; it is a relapse if the last recovery was less than a day ago.
    fn record_trouble(&mut self, reason: HealthReason, needs_reset: bool, now: Duration) {
        // Only a healthy device can relapse; further trouble of an unhealthy one belongs to the same fault.
        if self.trouble.is_none() {
            self.relapses = match self.recovered {
                Some(at) if now.saturating_sub(at) <= RELAPSE_WITHIN => self.relapses.saturating_add(1),
                _ => 0,
            };
        }
        // Further trouble starts the recovery again: answered probes and the quiet time count from the last trouble on.
        self.trouble = Some(Trouble {
            reason,
            needs_reset,
            since: now,
            n_answered_probes: 0,
        });
    }

    /// Counts an answered probe. Returns the recovery if the device has now answered enough probes over the quiet time.
    fn record_answer(
        &mut self,
        policy: &HealthPolicy,
        device: &PhysicalId,
        now: Duration,
    ) -> Option<HealthChange> {
        // While a reset is needed no answer counts: NVML may go on answering for a GPU whose memory or firmware has failed.
        let trouble = self.trouble.as_mut().filter(|trouble| !trouble.needs_reset)?;
        trouble.n_answered_probes = trouble.n_answered_probes.saturating_add(1);
        let (reason, answers) = (trouble.reason, trouble.n_answered_probes);
        let quiet = now.saturating_sub(trouble.since);
        if answers < policy.answers.get() || quiet < policy.quiet_after(self.relapses) {
            return None;
        }
        (self.trouble, self.recovered) = (None, Some(now));
        Some(HealthChange {
            device: device.clone(),
            is_healthy: true,
            reason: HealthReason::Recovered,
            message: format!(
                "the device answered {answers} probes in {} s without trouble since {reason}",
                quiet.as_secs()
            ),
        })
    }
}

/// The trouble of an unhealthy device, and the progress of its recovery.
#[derive(Clone, Copy, Debug)]
struct Trouble {
    reason: HealthReason,
    /// True if answered probes do not count until a reset is observed.
    needs_reset: bool,
    /// The time of the device's last trouble.
    since: Duration,
    n_answered_probes: u32,
}

/// The health of a set of devices.
#[derive(Clone, Debug)]
pub struct Health {
    policy: HealthPolicy,
    devices: BTreeMap<PhysicalId, DeviceHealth>,
}

impl Health {
    /// The health of these devices by the rules of `policy`. Every device starts healthy.
    pub fn new(policy: HealthPolicy, devices: impl IntoIterator<Item = PhysicalId>) -> Self {
        let mut health = Self {
            policy,
            devices: BTreeMap::new(),
        };
        health.set_devices(devices);
        health
    }

    /// Replaces the set of devices. A device that stays keeps its state, a new device is healthy.
    pub(crate) fn set_devices(&mut self, devices: impl IntoIterator<Item = PhysicalId>) {
        let mut before = std::mem::take(&mut self.devices);
        for device in devices {
            let state = before.remove(&device).unwrap_or_default();
            self.devices.insert(device, state);
        }
    }

    /// Returns true if pods may be placed on the device; an unknown device is not healthy.
    pub fn is_healthy(&self, device: &PhysicalId) -> bool {
        self.devices
            .get(device)
            .is_some_and(|state| state.trouble.is_none())
    }

    /// The reason that the device is unhealthy, if it is.
    pub fn trouble(&self, device: &PhysicalId) -> Option<HealthReason> {
        Some(self.devices.get(device)?.trouble?.reason)
    }

    /// Loads an XID that an earlier process observed at `since`; one that the policy now blames on applications has no effect.
    pub fn load(
        &mut self,
        now: Duration,
        device: &PhysicalId,
        xid: u64,
        since: &str,
    ) -> Option<HealthChange> {
        let observation = Observation {
            device: Some(device.clone()),
            kind: ObservationKind::Xid(xid),
        };
        // The quiet time starts now, since the probes that an earlier process saw answered are not known.
        let change = self.observe(now, &observation)?;
        let reason = HealthReason::Xid(xid);
        let remedy = self.policy.remedy(reason, self.policy.needs_reset(reason), 0);
        let message = format!(
            "the driver reported critical error XID {xid} before this process began; unhealthy since {since}; {remedy}"
        );
        Some(HealthChange { message, ..change })
    }

    /// The fault of an application that an observation reports; none for other observations and for unknown devices.
    pub(crate) fn application_fault(&self, observation: &Observation) -> Option<ApplicationFault> {
        let ObservationKind::Xid(xid) = observation.kind else {
            return None;
        };
        let uuid = observation.device.clone()?;
        // An XID of a device that this plugin does not list concerns none of its pods.
        let is_fault =
            self.devices.contains_key(&uuid) && self.policy.xids.class(xid) == XidClass::Application;
        is_fault.then_some(ApplicationFault { uuid, xid })
    }

    /// Applies one observation, made at `now`; those of unknown devices, or of no device, change nothing. Returns the change of
    /// health that readers of the fleet must see.
    pub fn observe(&mut self, now: Duration, observation: &Observation) -> Option<HealthChange> {
        // An event that names no device must not make all devices of the node unhealthy.
        let device = observation.device.as_ref()?;
        let state = self.devices.get_mut(device)?;
        let (reason, message) = match &observation.kind {
            // The watch of the fleet acts on these two itself.
            ObservationKind::InventoryChanged | ObservationKind::DriverReplaced(_) => return None,
            ObservationKind::Answered => return state.record_answer(&self.policy, device, now),
            ObservationKind::AnsweredWithoutFault => {
                // From here on answered probes count towards recovery again.
                if let Some(trouble) = state.trouble.as_mut() {
                    trouble.needs_reset = false;
                }
                return state.record_answer(&self.policy, device, now);
            }
            ObservationKind::Xid(xid) if self.policy.xids.class(*xid) == XidClass::Application => {
                return None;
            }
            ObservationKind::Xid(xid) => (
                HealthReason::Xid(*xid),
                format!("the driver reported critical error XID {xid}"),
            ),
            ObservationKind::NeedsReset(how) => (
                HealthReason::NeedsReset,
                format!("the device must be reset: {how}"),
            ),
            ObservationKind::Lost => (
                HealthReason::Lost,
                "the device fell off the bus or is not listed any more".to_owned(),
            ),
            ObservationKind::Failed(how) => (
                HealthReason::ProbeFailed,
                format!("the device does not answer: {how}"),
            ),
            ObservationKind::MigMode => (
                HealthReason::MigMode,
                format!("the device does not answer: {MIG}"),
            ),
            ObservationKind::PortDown(states) => {
                (HealthReason::PortDown, format!("no port is active: {states}"))
            }
        };
        let before = state.trouble;
        // A device that is lost and comes back has been reset on the way.
        let still_needs_reset =
            before.is_some_and(|trouble| trouble.needs_reset) && reason != HealthReason::Lost;
        let needs_reset = still_needs_reset || self.policy.needs_reset(reason);
        let reason_before = before.map(|trouble| trouble.reason);
        // An XID says more than the driver's demand for a reset that follows from it, so the XID stays the reason.
        let reason = match reason_before {
            Some(xid @ HealthReason::Xid(_)) if reason == HealthReason::NeedsReset => xid,
            _ => reason,
        };
        state.record_trouble(reason, needs_reset, now);
        // A driver may report the same XID many times per second, and nothing changes for kubelet or for events.
        if reason_before == Some(reason) {
            return None;
        }
        let remedy = self.policy.remedy(reason, needs_reset, state.relapses);
        Some(HealthChange {
            device: device.clone(),
            is_healthy: false,
            reason,
            message: format!("{message}; {remedy}"),
        })
    }

    /// Makes an unhealthy device healthy on the word of an operator; the next trouble makes it unhealthy again.
    pub(crate) fn clear(&mut self, now: Duration, device: &PhysicalId) -> Option<HealthChange> {
        let state = self.devices.get_mut(device)?;
        let trouble = state.trouble.take()?;
        // Trouble soon afterwards is a relapse, as after a recovery by probes.
        state.recovered = Some(now);
        Some(HealthChange {
            device: device.clone(),
            is_healthy: true,
            reason: HealthReason::Cleared,
            message: format!("an operator has cleared {}", trouble.reason),
        })
    }
}

#[cfg(test)]
mod tests;
