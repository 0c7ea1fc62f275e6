//! pgbench's select-only transactions on PostgreSQL.

use super::{Server, Service};
use crate::measure::find_program;
use crate::runner::Runner;
use anyhow::{Context, Result, bail};
use nix::unistd::{Uid, User};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// What must be installed.
pub(super) const NEEDS: &str = "postgres with initdb, pgbench and pg_isready";

/// The server refuses to run as root: this user runs it then.
const USER: &str = "postgres";

struct Postgres {
    program: PathBuf,
    /// Folder of the server's programs.
    bin: PathBuf,
    user: Option<User>,
}

/// The test, if everything that it needs is here.
pub(super) fn all() -> Vec<(String, Box<dyn Service>)> {
    let found = || {
        // initdb and pgbench lie beside the server, and the name in PATH may be a link.
        let program = find_program("postgres")?.canonicalize().ok()?;
        let bin = program.parent()?.to_path_buf();
        let user = match Uid::effective().is_root() {
            true => Some(User::from_name(USER).ok()??),
            false => None,
        };
        let complete =
            ["initdb", "pgbench", "pg_isready"].iter().all(|name| bin.join(name).exists());
        complete.then_some(Postgres { program, bin, user })
    };
    let service = |postgres| -> (String, Box<dyn Service>) {
        ("postgres pgbench -S".into(), Box::new(postgres))
    };
    found().map(service).into_iter().collect()
}

impl Postgres {
    /// A command that runs as the server's user.
    fn command(&self, name: &str) -> Command {
        let mut command = Command::new(self.bin.join(name));
        command.current_dir("/");
        if let Some(user) = &self.user {
            command.uid(user.uid.as_raw()).gid(user.gid.as_raw());
        }
        command
    }

    fn pgbench(&self, socket: &Path) -> Command {
        let mut command = Command::new(self.bin.join("pgbench"));
        command.args(["-U", USER, "-h"]).arg(socket.parent().unwrap_or(socket)).arg("postgres");
        command
    }
}

impl Service for Postgres {
    fn program(&self) -> &Path {
        &self.program
    }

    fn socket(&self, data: &Path) -> PathBuf {
        data.join(".s.PGSQL.5432")
    }

    /// It can be connected to some time before it accepts one.
    fn ready(&self, socket: &Path) -> bool {
        let mut ask = Command::new(self.bin.join("pg_isready"));
        ask.args(["-q", "-U", USER, "-h"]).arg(socket.parent().unwrap_or(socket));
        ask.status().is_ok_and(|status| status.success())
    }

    fn server(&self, data: &Path) -> Command {
        let mut command = self.command("postgres");
        command.arg("-D").arg(data).arg("-k").arg(data);
        // Huge pages for the shared buffers are another matter, and would take ours.
        // No segment in /dev/shm is left behind when it is killed.
        let segments = "dynamic_shared_memory_type=mmap";
        for option in
            ["listen_addresses=", "huge_pages=off", "shared_buffers=256MB", "fsync=off", segments]
        {
            command.arg("-c").arg(option);
        }
        command
    }

    fn prepare(&self, data: &Path, runner: &Runner) -> Result<()> {
        if let Some(user) = &self.user {
            nix::unistd::chown(data, Some(user.uid), Some(user.gid))
                .with_context(|| format!("cannot give {} to {USER}", data.display()))?;
        }
        let mut initdb = self.command("initdb");
        initdb.args(["--auth=trust", "--no-sync", "-U", USER, "-D"]).arg(data);
        let done = initdb.output().context("cannot run initdb")?;
        if !done.status.success() {
            bail!("initdb failed: {}", String::from_utf8_lossy(&done.stderr).trim());
        }
        let socket = self.socket(data);
        let server = Server::spawn(self, self.server(data), data, runner)?;
        runner.output(self.pgbench(&socket).args(["-i", "-q", "-s", "10"]))?;
        server.stop()
    }

    fn load(&self, socket: &Path, seconds: u32) -> Command {
        let mut command = self.pgbench(socket);
        command.args(["-S", "-n", "-M", "prepared", "-c", "4", "-T", &seconds.to_string()]);
        command
    }

    fn done(&self, printed: &str, _seconds: u32) -> Option<f64> {
        transactions(printed)
    }
}

/// From the line `number of transactions actually processed: 1234`.
fn transactions(printed: &str) -> Option<f64> {
    let mark = "number of transactions actually processed:";
    let line = printed.lines().find_map(|line| line.trim().strip_prefix(mark))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_number_of_transactions() {
        let printed = "scaling factor: 1\nnumber of transactions actually processed: 46142\n";
        assert_eq!(transactions(printed), Some(46142.0));
        assert_eq!(transactions("pgbench: error"), None);
    }
}
