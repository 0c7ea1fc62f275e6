//! A server: started, waited for, put under load, stopped.

use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use nix::sys::signal::{Signal, killpg};

use super::measure::{self, Ended};
use crate::interrupt;

/// How long to wait for a server.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Until it is ready.
    pub ready: Duration,
    /// Until it has ended after SIGTERM.
    pub stop: Duration,
}

/// A running server with its process group; killed when it is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    start: Instant,
    ended: bool,
}

/// A command line for sh(1), silent unless `loud`. A single program takes the shell's place, so
/// that signals and costs are its own.
#[must_use]
pub fn shell(line: &str, loud: bool) -> Command {
    let mut command = Command::new("/bin/sh");
    let line = if is_single(line) { format!("exec {line}") } else { String::from(line) };
    command.args(["-c", &line]).stdin(Stdio::null());
    if !loud {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    command
}

/// Runs something in a thread of its own, whose children the counters of this one don't see.
pub fn off_the_record<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    thread::scope(|scope| match scope.spawn(work).join() {
        Ok(value) => value,
        Err(panic) => std::panic::resume_unwind(panic),
    })
}

/// Whether the line surely is one command without words that only a shell knows.
fn is_single(line: &str) -> bool {
    let first = line.split_whitespace().next().unwrap_or("");
    let is_path_or_name = |c: char| c.is_ascii_alphanumeric() || "/._-+".contains(c);
    let is_program = first.contains('/') || !BUILTIN.contains(&first);
    let is_open = line.contains(['\n', ';', '&', '|', '(', '`']);
    !first.is_empty() && first.chars().all(is_path_or_name) && is_program && !is_open
}

/// Words of sh(1) that `exec` can't run, or not with the same effect.
const BUILTIN: [&str; 31] = [
    ".", "alias", "bg", "break", "case", "cd", "command", "continue", "eval", "exec", "exit",
    "export", "fg", "for", "getopts", "hash", "if", "jobs", "local", "read", "readonly", "return",
    "set", "shift", "times", "trap", "umask", "unset", "until", "wait", "while",
];

impl Server {
    /// Starts it in a process group of its own and waits until `ready` succeeds.
    ///
    /// # Errors
    /// It cannot be started, ends before it is ready, or is not ready in time.
    pub fn start(command: &mut Command, ready: &str, patience: Patience) -> anyhow::Result<Self> {
        let start = Instant::now();
        let child = command.process_group(0).spawn().context("start the server")?;
        let mut server = Self { child, start, ended: false };
        loop {
            if let Some(ended) = server.wait(Duration::ZERO)? {
                bail!("the server ended before it was ready: {}", ended.status);
            }
            if off_the_record(|| shell(ready, false).status())
                .context("run the --ready command")?
                .success()
            {
                return Ok(server);
            }
            if let Some(signal) = interrupt::requested() {
                bail!("interrupted by signal {signal}");
            }
            if start.elapsed() > patience.ready {
                bail!(
                    "the server was not ready after {} s: '{ready}' still fails",
                    patience.ready.as_secs()
                );
            }
            thread::sleep(Duration::from_millis(50));
        }
    }

    /// The process id of its process group.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks it to end with SIGTERM, as service managers do, and waits for that.
    ///
    /// # Errors
    /// It does not end in time, ended before, or ends in a crash.
    pub fn stop(mut self, patience: Patience) -> anyhow::Result<Ended> {
        if let Some(ended) = self.wait(Duration::ZERO)? {
            bail!("the server ended under the load: {}", ended.status);
        }
        killpg(measure::pid(&self.child), Signal::SIGTERM).context("stop the server")?;
        let Some(ended) = self.wait(patience.stop)? else {
            bail!("the server still runs {} s after SIGTERM", patience.stop.as_secs());
        };
        match ended.status.signal() {
            None | Some(libc::SIGTERM) => Ok(ended),
            Some(_) => bail!("the server crashed while it stopped: {}", ended.status),
        }
    }

    fn wait(&mut self, patience: Duration) -> io::Result<Option<Ended>> {
        let ended = measure::wait_for(&self.child, self.start, patience)?;
        self.ended |= ended.is_some();
        Ok(ended)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Once it has been waited for, its number may be another's.
        if !self.ended {
            let _ = killpg(measure::pid(&self.child), Signal::SIGKILL);
            let _ = self.wait(Duration::from_secs(10));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_program_takes_the_shells_place() {
        for line in ["redis-server --port 7000", "/usr/bin/env A=b x >/dev/null", "./a 'b c'"] {
            assert!(is_single(line), "{line}");
        }
        for line in ["", "A=b x", "x & y", "x; y", "cd /tmp", "if true", "x | y", "x `y`", "$X y"] {
            assert!(!is_single(line), "{line}");
        }
        let status = |line| shell(line, true).status().unwrap().code();
        assert_eq!(status("sh -c 'exit 3'"), Some(3));
        assert_eq!(status("exit 4"), Some(4));
        assert_eq!(status("A=5 && exit $A"), Some(5));
    }
}
