//! Processes of kube-schedulers that are stopped while their pods are created, so that the creation of pods is not
//! measured.

use std::process::Command;

use anyhow::{Context, Result, ensure};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct HaltedProcess {
    /// The `schedulerName` of its pods.
    pub(super) scheduler: String,
    pid: u32,
}

/// A stopped process; it goes on when this is dropped.
#[derive(Debug)]
pub(super) struct Halted(HaltedProcess);

impl HaltedProcess {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        let (scheduler, pid) = text
            .split_once('=')
            .ok_or("give it as NAME=PID, with the schedulerName of the pods")?;
        let pid = pid
            .parse()
            .ok()
            // `kill` takes 0 and negative numbers for groups of processes, and stopping init would stop the
            // machine.
            .filter(|pid| *pid > 1)
            .ok_or_else(|| format!("{pid:?} is not the id of a process"))?;
        Ok(Self {
            scheduler: scheduler.to_owned(),
            pid,
        })
    }

    pub(super) fn halt(&self) -> Result<Halted> {
        self.signal("STOP")?;
        Ok(Halted(self.clone()))
    }

    /// Sends a signal by way of `kill`: doing so here would need unsafe code.
    fn signal(&self, name: &str) -> Result<()> {
        let Self { scheduler, pid } = self;
        let sent = Command::new("sh")
            .args(["-c", &format!("kill -{name} {pid}")])
            .output()
            .context("cannot run sh")?;
        let error = String::from_utf8_lossy(&sent.stderr);
        ensure!(
            sent.status.success(),
            "--halt {scheduler}={pid}: process {pid} cannot be sent SIG{name}: {}",
            error.trim()
        );
        Ok(())
    }
}

impl Drop for Halted {
    fn drop(&mut self) {
        if let Err(error) = self.0.signal("CONT") {
            tracing::error!(%error, "the scheduler does not go on");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::process::Stdio;

    use super::*;

    /// The state letter of a process in `/proc`; `T` if it is stopped.
    fn state(pid: u32) -> Option<char> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(") ")?.1.chars().next()
    }

    #[rstest::rstest]
    #[case::plain("plain=4711", Ok(("plain", 4711)))]
    #[case::no_pid("plain", Err("give it as NAME=PID, with the schedulerName of the pods"))]
    #[case::every_process("plain=-1", Err(r#""-1" is not the id of a process"#))]
    #[case::own_group("plain=0", Err(r#""0" is not the id of a process"#))]
    #[case::init("plain=1", Err(r#""1" is not the id of a process"#))]
    fn the_flag_names_a_scheduler_and_its_process(
        #[case] text: &str,
        #[case] wanted: Result<(&str, u32), &str>,
    ) {
        let wanted = wanted
            .map(|(scheduler, pid)| HaltedProcess {
                scheduler: scheduler.to_owned(),
                pid,
            })
            .map_err(str::to_owned);
        assert_eq!(HaltedProcess::parse(text), wanted);
    }

    #[test]
    fn a_process_is_stopped_until_it_is_dropped() {
        let mut echo = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let process = HaltedProcess {
            scheduler: "echo".to_owned(),
            pid: echo.id(),
        };
        let (mut asked, mut answers) = (
            echo.stdin.take().unwrap(),
            BufReader::new(echo.stdout.take().unwrap()).lines(),
        );
        for nth in 0..2 {
            let halted = process.halt().unwrap();
            while state(echo.id()) != Some('T') {
                std::thread::yield_now();
            }
            drop(halted);
            writeln!(asked, "{nth}").unwrap();
            assert_eq!(answers.next().unwrap().unwrap(), nth.to_string());
        }
        drop(asked);
        echo.wait().unwrap();
        let error = process.halt().unwrap_err().to_string();
        assert!(
            error.starts_with(&format!(
                "--halt echo={0}: process {0} cannot be sent SIGSTOP: ",
                echo.id()
            )),
            "{error}"
        );
    }
}
