//! The wish that tasks come to an end, shared by all of them.

use tokio::sync::watch;

/// The receiving end, for tasks.
#[derive(Clone, Debug)]
pub struct Stop(watch::Receiver<bool>);

/// The sending end. Dropping it asks for the end too.
#[derive(Debug)]
pub struct Stopper(watch::Sender<bool>);

impl Stopper {
    /// Both ends.
    pub fn new() -> (Self, Stop) {
        let (sender, receiver) = watch::channel(false);
        (Self(sender), Stop(receiver))
    }

    /// Asks for the end.
    pub fn stop(&self) {
        self.0.send_replace(true);
    }
}

impl Stop {
    /// Returns once the end has been asked for.
    pub async fn requested(&mut self) {
        // An error says that the stopper is gone, which asks for the end too.
        let _ = self.0.wait_for(|is_asked| *is_asked).await;
    }

    /// Whether the end has been asked for.
    pub fn is_requested(&self) -> bool {
        *self.0.borrow() || self.0.has_changed().is_err()
    }
}
