//! The source of a replica's terms: a Lease that the replicas contend for, or the one of the kube-scheduler in its pod.

use std::time::Instant;

use super::election::{Action, Election, Record, Reign, Written};
use super::neighbour::Neighbour;

/// Decides, from a Lease and the time, the times in which a replica may decide.
#[derive(Clone, Debug)]
pub(super) enum TermSource {
    /// The replicas' own Lease.
    Election(Election),
    /// The Lease of kube-scheduler, which is read and never written.
    Neighbour(Neighbour),
}

impl TermSource {
    pub(super) fn reign(&self, now: Instant) -> Option<Reign> {
        match self {
            Self::Election(election) => election.reign(now),
            Self::Neighbour(neighbour) => neighbour.reign(now),
        }
    }

    /// The holder of the Lease when it was read last; empty if it had none.
    pub(super) fn holder(&self) -> &str {
        match self {
            Self::Election(election) => election.holder(),
            Self::Neighbour(neighbour) => neighbour.holder(),
        }
    }

    pub(super) fn next(&mut self, now: Instant) -> Action {
        match self {
            Self::Election(election) => election.next(now),
            Self::Neighbour(neighbour) => neighbour.next(now),
        }
    }

    /// The answer to a read that was sent at `sent` and answered at `received`.
    pub(super) fn read(&mut self, sent: Instant, received: Instant, found: Option<(String, Record)>) {
        match self {
            Self::Election(election) => election.read(received, found),
            Self::Neighbour(neighbour) => neighbour.read(sent, received, found),
        }
    }

    /// A read failed, which was known at `received`.
    pub(super) fn unread(&mut self, received: Instant) {
        match self {
            Self::Election(election) => election.unread(received),
            Self::Neighbour(neighbour) => neighbour.unread(received),
        }
    }

    /// The outcome of a write that was sent at `sent`, known at `received`.
    pub(super) fn written(&mut self, record: Record, sent: Instant, received: Instant, outcome: Written) {
        match self {
            Self::Election(election) => election.written(record, sent, received, outcome),
            Self::Neighbour(_) => {}
        }
    }

    /// Ends the replica's part; an own Lease is given up.
    pub(super) fn resign(&mut self, now: Instant) {
        match self {
            Self::Election(election) => election.resign(now),
            Self::Neighbour(neighbour) => neighbour.resign(),
        }
    }

    /// Returns true if the replica holds the Lease itself and can give it up.
    pub(super) const fn is_own(&self) -> bool {
        matches!(self, Self::Election(_))
    }

    /// The part of the Lease that makes it useless to this replica, for people.
    pub(super) fn problem(&self) -> Option<String> {
        match self {
            Self::Election(_) => None,
            Self::Neighbour(neighbour) => neighbour.problem(),
        }
    }
}
