//! Puts new workload models, the mixes of pods that the policy `fill` expects, into effect.
//!
//! The index notifies when a model is due. The scores that follow from the model are computed before it takes effect, a few under
//! each lock of the index, so that neither a request nor an update waits for them.

use tokio::task::spawn_blocking;

use crate::index::{Index, Shared};

/// Puts each model that is due into effect. Ends only if that panics.
pub(crate) async fn keep_current(index: Shared<Index>) {
    let due = index.write().announce_due_models();
    loop {
        due.notified().await;
        let index = index.clone();
        if spawn_blocking(move || replace_model(&index)).await.is_err() {
            return;
        }
    }
}

/// Puts the workload model of the present pods into effect.
fn replace_model(index: &Shared<Index>) {
    let next = index.read().fleet().next_model();
    let Some(mut next) = next else { return };
    next.simulate();
    while next.prepare(index.read().fleet()) {}
    index.write().set_workload_model(&mut next);
}
