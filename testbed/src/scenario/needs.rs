//! The needs of a scenario besides the API of its cluster: none, commands that break a part of the cluster, or the testbed
//! itself.

use std::fmt;

use kit::parts::{Commands, Need};

/// A scenario's needs besides the API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// These commands of a real cluster's file; with an empty list the scenario needs none.
    Commands(&'static [Need]),
    /// The testbed's own cluster, since only that has what the text names.
    Testbed(&'static str),
}

impl Needs {
    /// The reason that the scenario cannot run on a real cluster with these commands; `None` if it can.
    pub fn missing(self, commands: &Commands) -> Option<String> {
        match self {
            Self::Testbed(what) => Some(format!("it needs the testbed's own cluster: {what}")),
            Self::Commands(needs) => {
                let missing: Vec<String> = needs
                    .iter()
                    .filter(|need| !commands.allow(**need))
                    .map(Need::to_string)
                    .collect();
                (!missing.is_empty())
                    .then(|| format!("it needs {} in the file of --break-with", missing.join(", ")))
            }
        }
    }
}

impl fmt::Display for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Commands([]) => Ok(()),
            Self::Commands(needs) => {
                let needs: Vec<String> = needs.iter().map(Need::to_string).collect();
                write!(f, " [on a real cluster: {}]", needs.join(", "))
            }
            Self::Testbed(what) => write!(f, " [testbed only: {what}]"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::scenario;

    #[test]
    fn a_cluster_without_commands_runs_the_harmless_scenarios() {
        let commands = Commands::default();
        let possible = scenario::all()
            .into_iter()
            .filter(|scenario| scenario.needs.missing(&commands).is_none());
        assert!(possible.clone().count() >= 15);
        assert!(
            possible
                .into_iter()
                .all(|scenario| scenario.needs == Needs::Commands(&[]))
        );
    }
}
