//! Flags about the room that the leader makes by evictions.

use std::time::Duration;

use anyhow::bail;
use clap::{Args, ValueEnum};
use daemon::duration::parse_duration;

use super::filter::MisfitNodes;
use crate::make_room::RoomSettings;

/// The room that the leader makes by evictions.
#[derive(Clone, Debug, Args)]
pub(super) struct MakeRoomArgs {
    /// Evict less important pods for a pod that no single GPU takes, where kube-scheduler evicts none because a node has enough
    /// memory in sum: `report` writes events about the pods that could go, `evict` evicts them. For kube-scheduler up to 1.37;
    /// later ones do it themselves with --misfit-nodes resolvable.
    #[arg(
        long = "make-room",
        env = "GPUSHARE_MAKE_ROOM",
        value_enum,
        default_value = "off",
        hide_possible_values = true,
        value_name = "off|report|evict"
    )]
    mode: MakeRoom,
    /// Time from a pod's first refusal to the first eviction for it, so that no pod is evicted that would end by itself.
    #[arg(long = "make-room-after", env = "GPUSHARE_MAKE_ROOM_AFTER", default_value = "10s", value_parser = parse_duration, value_name = "TIME")]
    after: Duration,
    /// Most pods that are evicted within an hour to make room. Each leader counts from 0.
    #[arg(
        long = "make-room-per-hour",
        env = "GPUSHARE_MAKE_ROOM_PER_HOUR",
        default_value = "60",
        value_name = "PODS"
    )]
    per_hour: u32,
    /// The priority from which on pods are never evicted to make room, even for a pod of a higher one.
    #[arg(
        long = "make-room-below",
        env = "GPUSHARE_MAKE_ROOM_BELOW",
        default_value = "1000000",
        allow_negative_numbers = true,
        value_name = "PRIORITY"
    )]
    below: i32,
    /// Time for which room is kept for the pod that it was made for, besides the grace period of the evicted pods.
    #[arg(long = "make-room-hold", env = "GPUSHARE_MAKE_ROOM_HOLD", default_value = "5m", value_parser = parse_duration, value_name = "TIME")]
    hold: Duration,
}

/// The values of --make-room.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MakeRoom {
    /// No room is made.
    Off,
    /// Events say which pods could go.
    Report,
    /// Pods are evicted.
    Evict,
}

impl MakeRoomArgs {
    /// The settings by the flags; `None` if no room is made.
    pub(super) fn settings(&self, misfit_nodes: MisfitNodes) -> anyhow::Result<Option<RoomSettings>> {
        if self.mode == MakeRoom::Off {
            return Ok(None);
        }
        if misfit_nodes == MisfitNodes::Resolvable {
            bail!(
                "--make-room must be off with --misfit-nodes resolvable: kube-scheduler itself evicts pods then, and both would evict \
                 for the same pod"
            );
        }
        Ok(Some(RoomSettings {
            evicts: self.mode == MakeRoom::Evict,
            after: self.after,
            per_hour: usize::try_from(self.per_hour).unwrap_or(usize::MAX),
            below: self.below,
            hold: self.hold,
        }))
    }
}
