//! sysbench's point selects and read-only transactions on MariaDB and MySQL.

use super::{Server, Service};
use crate::measure::find_program;
use crate::mysql::MySql;
use crate::runner::{self, Runner};
use anyhow::{Context, Result};
use std::path::{Path, PathBuf};
use std::process::Command;

/// What must be installed.
pub(super) const NEEDS: &str = "mariadbd with mariadb-install-db, and sysbench";

const TABLES: u32 = 10;
const ROWS: u32 = 20_000;

/// Which server, and what only that one knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    MariaDb,
    MySql,
}

/// A server with one of sysbench's tests.
#[derive(Clone, Debug)]
struct Sql {
    kind: Kind,
    program: PathBuf,
    root: Option<PathBuf>,
    test: &'static str,
}

/// The tests, on each server that is here.
pub(super) fn all(mysql: Option<&MySql>) -> Vec<(String, Box<dyn Service>)> {
    if find_program("sysbench").is_none() {
        return Vec::new();
    }
    let mariadb = find_program("mariadbd");
    let servers = mysql
        .map(|mysql| (Kind::MySql, mysql.program.clone(), Some(mysql.root.clone())))
        .into_iter()
        .chain(mariadb.map(|program| (Kind::MariaDb, program, None)));
    servers
        .flat_map(|(kind, program, root)| {
            ["oltp_point_select", "oltp_read_only"].map(|test| {
                let name = if kind == Kind::MySql { "mysqld" } else { "mariadbd" };
                let service = Sql { kind, program: program.clone(), root: root.clone(), test };
                (format!("{name} {test}"), Box::new(service) as Box<dyn Service>)
            })
        })
        .collect()
}

impl Sql {
    fn sysbench(&self, socket: &Path) -> Command {
        let mut command = Command::new("sysbench");
        command
            .arg(self.test)
            .args(["--db-driver=mysql", "--mysql-user=root", "--mysql-db=sbtest", "--threads=4"])
            .arg(format!("--mysql-socket={}", socket.display()))
            .arg(format!("--tables={TABLES}"))
            .arg(format!("--table-size={ROWS}"));
        command
    }

    fn server_command(&self, data: &Path) -> Command {
        let mut command = runner::command_in(self.root.as_deref(), &self.program);
        command.arg("--no-defaults").arg(format!("--datadir={}", data.display()));
        if nix::unistd::geteuid().is_root() {
            command.arg("--user=root");
        }
        command
    }
}

impl Service for Sql {
    fn program(&self) -> &Path {
        &self.program
    }

    fn server(&self, data: &Path) -> Command {
        let mut command = self.server_command(data);
        for (option, file) in [("socket", "s"), ("tmpdir", ""), ("pid-file", "pid")] {
            command.arg(format!("--{option}={}", data.join(file).display()));
        }
        command
            .args(["--skip-networking", "--skip-grant-tables", "--skip-log-bin"])
            // Larger than the data, and nothing is written to a disk in the meantime.
            .args(["--innodb-buffer-pool-size=256M", "--innodb-flush-log-at-trx-commit=0"])
            .args(["--innodb-buffer-pool-dump-at-shutdown=0", "--performance-schema=OFF"]);
        if self.kind == Kind::MySql {
            command.args(["--mysqlx=OFF", "--secure-file-priv=NULL"]);
            command.arg("--innodb-redo-log-capacity=64M");
        }
        command
    }

    fn prepare(&self, data: &Path, runner: &Runner) -> Result<()> {
        let mut install = match self.kind {
            Kind::MySql => {
                let mut install = self.server_command(data);
                install.args(["--initialize-insecure", "--innodb-redo-log-capacity=64M"]);
                install
            }
            Kind::MariaDb => {
                let mut install = Command::new("mariadb-install-db");
                install
                    .args(["--no-defaults", "--skip-test-db"])
                    .arg("--auth-root-authentication-method=normal")
                    .arg(format!("--datadir={}", data.display()));
                if nix::unistd::geteuid().is_root() {
                    install.arg("--user=root");
                }
                install
            }
        };
        runner.output(&mut install)?;
        let script = data.join("init.sql");
        std::fs::write(&script, "CREATE DATABASE sbtest;\n")
            .with_context(|| format!("cannot write {}", script.display()))?;
        let mut command = self.server(data);
        command.arg(format!("--init-file={}", script.display()));
        let server = Server::spawn(self, command, data, runner)?;
        runner.output(self.sysbench(&server.socket).arg("prepare"))?;
        server.stop()
    }

    fn load(&self, socket: &Path, seconds: u32) -> Command {
        let mut command = self.sysbench(socket);
        command.arg(format!("--time={seconds}")).arg("run");
        command
    }

    fn done(&self, printed: &str, _seconds: u32) -> Option<f64> {
        transactions(printed)
    }
}

/// From a line such as `    transactions:      1234   (617.00 per sec.)`.
fn transactions(printed: &str) -> Option<f64> {
    let line = printed.lines().find_map(|line| line.trim().strip_prefix("transactions:"))?;
    line.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_number_of_transactions() {
        let printed =
            "SQL statistics:\n    transactions:                        20 (9.96 per sec.)\n";
        assert_eq!(transactions(printed), Some(20.0));
        assert_eq!(transactions("FATAL: unable to connect"), None);
    }
}
