//! What became of our choice of a node: a pod that asks again was not bound, so that it needs others to choose from.

use super::remembered::Remembered;

/// What is known of a pod's last attempt.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Attempt {
    /// None is open: it was answered with no node.
    None,
    /// It was sent to this node, while others that fit were held back.
    Open(Box<str>),
    /// It came to nothing on this node.
    Failed(Box<str>),
}

/// The last attempts of pods, by UID.
#[derive(Debug, Default)]
pub(super) struct Attempts(Remembered<Attempt>);

impl Attempts {
    /// A pod asks: whether its last attempt has come to nothing.
    pub(super) fn ask(&mut self, uid: &str) -> bool {
        match self.0.get_mut(uid) {
            None | Some(Attempt::None) => false,
            Some(Attempt::Failed(_)) => true,
            Some(attempt) => {
                if let Attempt::Open(node) = std::mem::replace(attempt, Attempt::None) {
                    *attempt = Attempt::Failed(node);
                }
                true
            }
        }
    }

    /// A pod is sent to a node, while others that fit are held back.
    pub(super) fn begin(&mut self, uid: &str, node: &str) {
        self.0.put(uid, Attempt::Open(node.into()));
    }

    /// A pod cannot be bound to a node.
    pub(super) fn fail(&mut self, uid: &str, node: &str) {
        self.0.put(uid, Attempt::Failed(node.into()));
    }

    /// A pod is refused, which is no attempt.
    pub(super) fn end(&mut self, uid: &str) {
        if let Some(attempt) = self.0.get_mut(uid) {
            *attempt = Attempt::None;
        }
    }

    /// The node on which a pod's last attempt came to nothing.
    pub(super) fn failed_on(&self, uid: &str) -> Option<&str> {
        match self.0.get(uid)? {
            Attempt::Failed(node) => Some(node),
            Attempt::None | Attempt::Open(_) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Attempts;

    #[test]
    fn an_attempt_has_failed_once_its_pod_asks_again() {
        let mut attempts = Attempts::default();
        assert!(!attempts.ask("a"));
        attempts.begin("a", "n1");
        assert_eq!(attempts.failed_on("a"), None, "it may come to something yet");
        assert!(attempts.ask("a") && attempts.ask("a"));
        assert_eq!(attempts.failed_on("a"), Some("n1"));
        attempts.end("a");
        assert!(!attempts.ask("a"));
        attempts.fail("a", "n2");
        assert_eq!(attempts.failed_on("a"), Some("n2"));
        assert!(attempts.ask("a") && !attempts.ask("b"));
    }
}
