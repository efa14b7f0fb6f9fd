//! Decides from what a watch saw whether each GPU is healthy, and when a sick one has recovered.
//!
//! Pure: no clock, NVML or channel. The caller passes in the time (since any fixed moment) with
//! each observation and acts on the [`HealthChange`]s that come out.
//!
//! The rules:
//!
//! * A critical XID makes its device unhealthy, unless it is of another class by the policy: those that an
//!   application causes by its own fault say nothing about the device, and only its pods are told of them; those that
//!   are ignored say nothing to anybody.
//! * A device that is lost, or fails a probe in another way, is unhealthy at once; so is an adapter none of whose ports is
//!   active.
//! * An XID whose device cannot be told, or is not one of ours, changes nothing by itself. The watch
//!   answers it by probing every device: those that fail are unhealthy, the others stay as they are.
//!   One strange event does not take a whole node down.
//! * A device without event support (NVML answers `NOT_SUPPORTED`) is judged by probes alone; the lack
//!   of events is no illness.
//! * A sick device is healthy again when, since its last trouble, it has answered so many probes in a
//!   row and so much time has passed as the policy demands. It need not be restarted for that.
//! * Time does not heal a device that needs a reset: after an XID that asks for one by the policy, or as long as its driver
//!   names a recovery action. Probes count again once the driver names none, once a reset has been seen (the device was lost
//!   and is back, or the rows that waited for a reset are remapped), or once an operator clears it ([`Health::clear`]). A
//!   boot resets devices too; XIDs of an earlier boot are not recalled.
//! * A device that is sick again within a day of its recovery has had a relapse. With each one the
//!   time that it must be without trouble is doubled, up to an hour; after a day in health the count
//!   begins anew. So an error that comes back every few minutes does not return the device to pods each time.
//! * Health outlives the process in the node's Device object. A device that it says is unhealthy by an
//!   XID begins as if that XID had just come ([`Health::recall`]); what probes can tell is left to them.

#[cfg(test)]
mod tests;
mod xids;

use std::{collections::BTreeMap, fmt, num::NonZeroU32, time::Duration};

pub use xids::{InvalidXidList, XidClass, Xids};

use crate::inventory::PhysicalId;

/// Something that a watch saw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Observation {
    /// The device it is about; `None` if that cannot be told, or if it is about all of them.
    pub device: Option<PhysicalId>,
    /// What it is.
    pub kind: ObservationKind,
}

/// What a watch can see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ObservationKind {
    /// The driver reported a critical error with this number; 999 stands for one it cannot name.
    Xid(u64),
    /// The device answered a probe; it is unknown whether it needs a reset.
    Answered,
    /// The device answered a probe, and needs no reset: its driver says so, or a reset has been seen.
    Sound,
    /// The device answered a probe, and its driver says that it must be reset; the text says how.
    NeedsReset(String),
    /// The device is gone: it fell off the bus, or the driver does not list it any more.
    Lost,
    /// The device is there and a probe of it failed; the text says how.
    Failed(String),
    /// None of the adapter's ports can be used; the text says what they are.
    PortDown(String),
    /// The source now describes other devices, or the same ones otherwise: discover again.
    InventoryChanged,
    /// The driver is another one than the library that this process has of it; the text says how that was seen.
    DriverReplaced(String),
}

/// An XID that an application causes, and that leaves the device in order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fault {
    /// The device.
    pub uuid: PhysicalId,
    /// The XID.
    pub xid: u64,
}

/// Why a device is in the state it is in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// A critical error was reported.
    Xid(u64),
    /// The device is gone.
    Lost,
    /// A probe failed.
    ProbeFailed,
    /// Its driver says that it must be reset.
    NeedsReset,
    /// None of an adapter's ports is active.
    PortDown,
    /// It was sick and is well.
    Recovered,
    /// An operator has cleared it.
    Cleared,
}

impl Reason {
    /// The XID that a word like `Xid79` is for.
    pub fn xid(word: &str) -> Option<u64> {
        word.strip_prefix("Xid")?.parse().ok()
    }
}

/// One word, fit for a condition's or an event's reason: `Xid79`, `Lost`, `ProbeFailed`, `NeedsReset`,
/// `PortDown`, `Recovered`, `Cleared`.
impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Xid(xid) => write!(f, "Xid{xid}"),
            Self::Lost => f.write_str("Lost"),
            Self::ProbeFailed => f.write_str("ProbeFailed"),
            Self::NeedsReset => f.write_str("NeedsReset"),
            Self::PortDown => f.write_str("PortDown"),
            Self::Recovered => f.write_str("Recovered"),
            Self::Cleared => f.write_str("Cleared"),
        }
    }
}

/// A device became sick, became well, or is now sick for another reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HealthChange {
    /// The device.
    pub uuid: PhysicalId,
    /// Whether pods may be placed on it.
    pub healthy: bool,
    /// Why.
    pub reason: Reason,
    /// The same for a person.
    pub message: String,
}

/// What counts as illness and what as recovery.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Policy {
    /// The critical XIDs that mean nothing.
    pub ignored_xids: Xids,
    /// Those that an application causes: they do not make a device unhealthy.
    pub application_xids: Xids,
    /// Those after which a device needs a reset.
    pub reset_xids: Xids,
    /// How many probes in a row a sick device must answer.
    pub answers: NonZeroU32,
    /// How long it must have been without trouble, before the first relapse.
    pub quiet: Duration,
}

/// Three answers over at least a minute; no XID is ignored, and some are known to be caused by applications.
impl Default for Policy {
    fn default() -> Self {
        let (ignored_xids, application_xids, reset_xids) =
            (Xids::none(), Xids::of_applications(), Xids::of_resets());
        Self {
            ignored_xids,
            application_xids,
            reset_xids,
            answers: NonZeroU32::MIN.saturating_add(2),
            quiet: Duration::from_secs(60),
        }
    }
}

/// Longest time without trouble that relapses lead to, unless the policy itself asks for more.
pub const LONGEST_QUIET: Duration = Duration::from_secs(60 * 60);

/// How long after its recovery a device that falls sick has a relapse.
pub const RELAPSE_WITHIN: Duration = Duration::from_secs(24 * 60 * 60);

/// A device as it has been so far.
#[derive(Clone, Copy, Debug, Default)]
struct Course {
    illness: Option<Illness>,
    /// When it last recovered.
    recovered: Option<Duration>,
    /// How often it has fallen sick within a day of a recovery.
    relapses: u32,
}

impl Course {
    /// Notes trouble; it is a relapse if the device has recovered only lately.
    fn trouble(&mut self, reason: Reason, needs_reset: bool, now: Duration) {
        if self.illness.is_none() {
            let is_relapse = self
                .recovered
                .is_some_and(|recovered| now.saturating_sub(recovered) <= RELAPSE_WITHIN);
            self.relapses = if is_relapse {
                self.relapses.saturating_add(1)
            } else {
                0
            };
        }
        self.illness = Some(Illness {
            reason,
            needs_reset,
            since: now,
            answers: 0,
        });
    }

    /// Counts an answered probe; the device recovers if it is the last that was missing.
    fn answer(&mut self, policy: &Policy, uuid: &PhysicalId, now: Duration) -> Option<HealthChange> {
        let quiet = policy.quiet_after(self.relapses);
        let illness = self.illness.as_mut().filter(|illness| !illness.needs_reset)?;
        illness.answers = illness.answers.saturating_add(1);
        if illness.answers < policy.answers.get() || now.saturating_sub(illness.since) < quiet {
            return None;
        }
        let message = recovery(illness, now);
        (self.illness, self.recovered) = (None, Some(now));
        Some(HealthChange {
            uuid: uuid.clone(),
            healthy: true,
            reason: Reason::Recovered,
            message,
        })
    }
}

/// What is wrong with a device, and how far its recovery has come.
#[derive(Clone, Copy, Debug)]
struct Illness {
    reason: Reason,
    /// True if probes do not count until a reset is seen.
    needs_reset: bool,
    /// When the last trouble was seen.
    since: Duration,
    /// Probes answered since then.
    answers: u32,
}

/// The health of a set of devices.
#[derive(Clone, Debug)]
pub struct Health {
    policy: Policy,
    devices: BTreeMap<PhysicalId, Course>,
}

impl Health {
    /// Devices are healthy until something is seen of them.
    pub fn new(policy: Policy, devices: impl IntoIterator<Item = PhysicalId>) -> Self {
        let devices = devices
            .into_iter()
            .map(|uuid| (uuid, Course::default()))
            .collect();
        Self { policy, devices }
    }

    /// Replaces the set of devices. One that stays keeps its state, a new one is healthy.
    pub fn retarget(&mut self, devices: impl IntoIterator<Item = PhysicalId>) {
        let mut before = std::mem::take(&mut self.devices);
        let keep = |uuid: PhysicalId| {
            let course = before.remove(&uuid).unwrap_or_default();
            (uuid, course)
        };
        self.devices = devices.into_iter().map(keep).collect();
    }

    /// Whether pods may be placed on the device; an unknown device is not healthy.
    pub fn is_healthy(&self, uuid: &PhysicalId) -> bool {
        self.devices
            .get(uuid)
            .is_some_and(|course| course.illness.is_none())
    }

    /// Why the device is unhealthy, if it is.
    pub fn illness(&self, uuid: &PhysicalId) -> Option<Reason> {
        self.devices.get(uuid)?.illness.map(|illness| illness.reason)
    }

    /// Begins with an XID that a predecessor of this process saw at `since`, unless the policy ignores it.
    pub fn recall(
        &mut self,
        now: Duration,
        uuid: &PhysicalId,
        xid: u64,
        since: &str,
    ) -> Option<HealthChange> {
        let seen = Observation {
            device: Some(uuid.clone()),
            kind: ObservationKind::Xid(xid),
        };
        let change = self.observe(now, &seen)?;
        let cure = cure(self.policy.needs_reset(Reason::Xid(xid)));
        let message = format!(
            "the driver reported critical error XID {xid} before this process began; unhealthy since {since}{cure}"
        );
        Some(HealthChange { message, ..change })
    }

    /// The fault of an application that an observation tells of, if it is one of a device of ours.
    pub fn fault(&self, seen: &Observation) -> Option<Fault> {
        let ObservationKind::Xid(xid) = seen.kind else {
            return None;
        };
        let uuid = seen
            .device
            .clone()
            .filter(|uuid| self.devices.contains_key(uuid))?;
        (self.policy.class_of(xid) == XidClass::Application).then_some(Fault { uuid, xid })
    }

    /// Takes in one observation made at `now` and says what changes.
    ///
    /// Observations of devices that are not ours, or of no device, change nothing.
    pub fn observe(&mut self, now: Duration, seen: &Observation) -> Option<HealthChange> {
        let uuid = seen.device.as_ref()?;
        let course = self.devices.get_mut(uuid)?;
        let (reason, message) = match &seen.kind {
            ObservationKind::InventoryChanged | ObservationKind::DriverReplaced(_) => return None,
            ObservationKind::Answered => return course.answer(&self.policy, uuid, now),
            ObservationKind::Sound => {
                if let Some(illness) = course.illness.as_mut() {
                    illness.needs_reset = false;
                }
                return course.answer(&self.policy, uuid, now);
            }
            ObservationKind::Xid(xid) if self.policy.class_of(*xid) != XidClass::Device => return None,
            ObservationKind::Xid(xid) => (
                Reason::Xid(*xid),
                format!("the driver reported critical error XID {xid}"),
            ),
            ObservationKind::NeedsReset(how) => {
                (Reason::NeedsReset, format!("the device must be reset: {how}"))
            }
            ObservationKind::Lost => (
                Reason::Lost,
                "the device fell off the bus or is not listed any more".to_owned(),
            ),
            ObservationKind::Failed(how) => {
                (Reason::ProbeFailed, format!("the device does not answer: {how}"))
            }
            ObservationKind::PortDown(states) => (Reason::PortDown, format!("no port is active: {states}")),
        };
        let before = course.illness;
        // A device that was lost and answers again has been reset.
        let waits = before.is_some_and(|illness| illness.needs_reset) && reason != Reason::Lost;
        let needs_reset = waits || self.policy.needs_reset(reason);
        // A driver that says no more than that a reset is needed does not hide the error that led to it.
        let reason = match before {
            Some(Illness {
                reason: xid @ Reason::Xid(_),
                ..
            }) if reason == Reason::NeedsReset => xid,
            _ => reason,
        };
        course.trouble(reason, needs_reset, now);
        let cure = cure(needs_reset);
        let message = match course.relapses {
            0 => format!("{message}{cure}"),
            n => format!(
                "{message}{cure}; relapse {n}: to recover it must be without trouble for {} s",
                self.policy.quiet_after(n).as_secs()
            ),
        };
        (before.map(|illness| illness.reason) != Some(reason)).then(|| HealthChange {
            uuid: uuid.clone(),
            healthy: false,
            reason,
            message,
        })
    }

    /// Makes a sick device healthy because an operator says so; the next trouble makes it sick again.
    pub fn clear(&mut self, now: Duration, uuid: &PhysicalId) -> Option<HealthChange> {
        let course = self.devices.get_mut(uuid)?;
        let illness = course.illness.take()?;
        course.recovered = Some(now);
        let message = format!("an operator has cleared {}", illness.reason);
        Some(HealthChange {
            uuid: uuid.clone(),
            healthy: true,
            reason: Reason::Cleared,
            message,
        })
    }
}

impl Policy {
    /// What an XID says; what is ignored is ignored in any case.
    pub fn class_of(&self, xid: u64) -> XidClass {
        if self.ignored_xids.contains(xid) {
            XidClass::Ignored
        } else if self.application_xids.contains(xid) {
            XidClass::Application
        } else {
            XidClass::Device
        }
    }

    /// Returns true if a device does not recover from this with time.
    fn needs_reset(&self, reason: Reason) -> bool {
        match reason {
            Reason::Xid(xid) => self.reset_xids.contains(xid),
            Reason::NeedsReset => true,
            Reason::Lost | Reason::ProbeFailed | Reason::PortDown | Reason::Recovered | Reason::Cleared => {
                false
            }
        }
    }

    /// How long a device must be without trouble after so many relapses.
    fn quiet_after(&self, relapses: u32) -> Duration {
        let doubled = self.quiet.saturating_mul(2_u32.saturating_pow(relapses));
        doubled.min(LONGEST_QUIET.max(self.quiet))
    }
}

/// The end of a message about trouble.
fn cure(needs_reset: bool) -> &'static str {
    if needs_reset {
        "; it stays unhealthy until it has been reset or an operator clears it"
    } else {
        ""
    }
}

fn recovery(illness: &Illness, now: Duration) -> String {
    let Illness {
        reason,
        since,
        answers,
        ..
    } = illness;
    let quiet = now.saturating_sub(*since).as_secs();
    format!("the device answered {answers} probes in {quiet} s without trouble since {reason}")
}
