//! The extender as kube-scheduler meets it: JSON over its routes, with a small API server behind it.

#![expect(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::indexing_slicing,
    reason = "a test that cannot go on should end"
)]

#[path = "extender/announcing.rs"]
mod announcing;
#[path = "extender/answers.rs"]
mod answers;
#[path = "extender/api.rs"]
mod api;
#[path = "extender/bind_outcomes.rs"]
mod bind_outcomes;
#[path = "extender/bind_queue.rs"]
mod bind_queue;
#[path = "extender/bind_races.rs"]
mod bind_races;
#[path = "extender/bodies.rs"]
mod bodies;
#[path = "extender/closed.rs"]
mod closed;
#[path = "extender/damaged.rs"]
mod damaged;
#[path = "extender/devices.rs"]
mod devices;
#[path = "extender/early.rs"]
mod early;
#[path = "extender/every_route.rs"]
mod every_route;
#[path = "extender/golden.rs"]
mod golden;
#[path = "extender/gone.rs"]
mod gone;
#[path = "extender/group_views.rs"]
mod group_views;
#[path = "extender/groups.rs"]
mod groups;
#[path = "extender/holding.rs"]
mod holding;
#[path = "extender/leading.rs"]
mod leading;
#[path = "extender/making_room.rs"]
mod making_room;
#[path = "extender/model_based.rs"]
mod model_based;
#[path = "extender/objects.rs"]
mod objects;
mod old_extender_bugs;
#[path = "extender/page.rs"]
mod page;
#[path = "extender/planning.rs"]
mod planning;
#[path = "extender/plugin_away.rs"]
mod plugin_away;
#[path = "extender/preempting.rs"]
mod preempting;
mod process;
#[path = "extender/proposals.rs"]
mod proposals;
#[path = "extender/read_api.rs"]
mod read_api;
#[path = "extender/readers.rs"]
mod readers;
#[path = "extender/repeated.rs"]
mod repeated;
#[path = "extender/requests.rs"]
mod requests;
#[path = "extender/room_faults.rs"]
mod room_faults;
#[path = "extender/room_histories.rs"]
mod room_histories;
#[path = "extender/served.rs"]
mod served;
#[path = "extender/topology.rs"]
mod topology;
#[path = "extender/views.rs"]
mod views;
#[path = "extender/world.rs"]
mod world;
