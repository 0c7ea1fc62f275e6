//! redis-benchmark's GET and SET.

use super::Service;
use crate::measure::find_program;
use crate::runner::Runner;
use anyhow::Result;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What must be installed.
pub(super) const NEEDS: &str = "redis-server and redis-benchmark";

/// Requests for each second of load that is asked for: redis-benchmark counts requests, not
/// seconds.
const REQUESTS_PER_SECOND: u32 = 20_000;

struct Redis {
    server: PathBuf,
    command: &'static str,
}

/// The commands, if everything that they need is here.
pub(super) fn all() -> Vec<(String, Box<dyn Service>)> {
    let Some(server) = find_program("redis-server") else { return Vec::new() };
    if find_program("redis-benchmark").is_none() {
        return Vec::new();
    }
    ["get", "set"]
        .map(|command| -> (String, Box<dyn Service>) {
            let name = format!("redis-server {}", command.to_uppercase());
            (name, Box::new(Redis { server: server.clone(), command }))
        })
        .into()
}

impl Service for Redis {
    fn program(&self) -> &Path {
        &self.server
    }

    fn server(&self, data: &Path) -> Command {
        let mut command = Command::new(&self.server);
        command.args(["--port", "0", "--save", "", "--appendonly", "no"]);
        command.arg("--dir").arg(data).arg("--unixsocket").arg(self.socket(data));
        command
    }

    fn prepare(&self, _data: &Path, _runner: &Runner) -> Result<()> {
        Ok(())
    }

    fn load(&self, socket: &Path, seconds: u32) -> Command {
        let mut command = Command::new("redis-benchmark");
        command.arg("-s").arg(socket).args(["-q", "-c", "20", "-r", "100000", "-t", self.command]);
        command.arg("-n").arg((seconds * REQUESTS_PER_SECOND).to_string());
        command
    }

    /// It does what it was told to, or fails.
    fn done(&self, printed: &str, seconds: u32) -> Option<f64> {
        let asked = f64::from(seconds * REQUESTS_PER_SECOND);
        printed.contains("requests per second").then_some(asked)
    }
}
