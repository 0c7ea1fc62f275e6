//! MariaDB as this machine's Debian builds it, and MySQL as Debian's unstable suite
//! does, in a root directory of its own with a newer C library.

use crate::entry::at_entry;
use crate::mode::Mode;
use crate::subject::{Moment, Session};
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::{Lab, chown_all, helper, seen, signal, wait_for_socket};
use elfremap_tests::library;
use elfremap_tests::outcome::Skip;
use elfremap_tests::run::Run;
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Clients that work at the same time.
const CLIENTS: usize = 4;

/// Where a root directory of its own has the tests' directory.
const INSIDE: &str = "/mnt";

/// A server of the MySQL family.
pub(crate) struct Server {
    name: &'static str,
    /// The program's path, in its root directory.
    program: &'static str,
    /// Its root directory; none when that is the machine's.
    root: Option<PathBuf>,
    /// What it calls itself.
    pub(crate) version: String,
    /// The options of the server alone.
    options: &'static [&'static str],
    /// A data directory as it was made, never served from.
    template: PathBuf,
}

impl Server {
    /// MariaDB of the machine, with a new data directory.
    ///
    /// # Errors
    /// When it is not installed, or the data directory cannot be made.
    pub(crate) fn mariadb(lab: &Lab) -> Result<Self> {
        let mut server = Self {
            name: "mariadbd",
            program: "/usr/sbin/mariadbd",
            root: None,
            version: String::new(),
            options: &["--innodb-log-file-size=8M"],
            template: lab.fresh("mariadb")?,
        };
        server.version = helper(&Run::new(server.program).arg("--version"))?;
        let data = format!("--datadir={}", server.template.join("data").display());
        let install = lab.run("mariadb-install-db").arg("--no-defaults").arg(data);
        let install = install.arg("--auth-root-authentication-method=normal").arg("--skip-test-db");
        helper(&install.arg("--innodb-log-file-size=8M").directory(lab.path()))?;
        Ok(server)
    }

    /// MySQL of Debian's unstable suite, fetched when it is not there yet.
    ///
    /// # Errors
    /// [`Unavailable`] when it cannot be fetched or does not run here; a skip without root.
    pub(crate) fn mysql(lab: &Lab) -> Result<Self> {
        let user = lab.user().ok_or_else(|| Skip::because("needs root, for chroot"))?;
        let root = library::cache_dir("mysql")?.join("root");
        let script = library::source_dir().join("real/get-mysql.sh");
        let mut fetch = Run::new(script).arg(&root).time_limit(Duration::from_secs(180));
        for name in ["ELFREMAP_DEBIAN_MIRROR", "http_proxy", "https_proxy", "no_proxy"] {
            if let Some(value) = std::env::var_os(name) {
                fetch = fetch.env(name, value);
            }
        }
        let package = helper(&fetch).map_err(unavailable)?;
        enter_own_mounts(&root, lab.path())?;
        let mut server = Self {
            name: "mysqld",
            program: "/usr/sbin/mysqld",
            root: Some(root),
            version: String::new(),
            options: &[
                "--innodb-redo-log-capacity=16M",
                "--skip-grant-tables",
                "--mysqlx=OFF",
                "--secure-file-priv=NULL",
            ],
            template: lab.fresh("mysql")?,
        };
        let version = server.run(lab)?.arg("--no-defaults").arg("--version");
        server.version = format!("{} ({package})", helper(&version).map_err(unavailable)?);
        let data = format!("--datadir={INSIDE}/mysql/data");
        let run = server.run(lab)?.user(user).arg("--no-defaults").arg("--initialize-insecure");
        helper(&run.arg(data).arg("--innodb-redo-log-capacity=16M"))?;
        Ok(server)
    }

    /// The program's file, as seen from here.
    pub(crate) fn program(&self) -> PathBuf {
        let root = self.root.as_deref().unwrap_or(Path::new("/"));
        root.join(self.program.trim_start_matches('/'))
    }

    /// Serves queries in `mode` from a copy of the data directory, and shuts down.
    ///
    /// # Errors
    /// When it does not start, crashes, or does not end with status 0.
    pub(crate) fn session(&self, lab: &Lab, mode: &Mode) -> Result<Session> {
        let image = Image::read(&self.program())?;
        let dir = lab.fresh("serve")?;
        helper(&Run::new("cp").arg("-a").arg(self.template.join("data")).arg(&dir))?;
        chown_all(&dir, lab.user())?;
        let server = self.serve(lab, mode)?.start_waiting()?;
        let socket = dir.join("sock");
        wait_for_socket(&socket, &server, &dir.join("log"))?;

        let mut transcript = seen(&client(&socket, "queries.sql").output()?);
        let workers: Vec<_> = (0..CLIENTS)
            .map(|me| {
                client(&socket, "worker.sql")
                    .arg(format!("--init-command=SET @me = {me}"))
                    .start_waiting()
            })
            .collect::<Result<_>>()?;
        for worker in workers {
            transcript += &seen(&worker.finish()?);
        }
        let moment = Moment::now("serving", server.pid(), &image)?;
        signal(&server, Signal::SIGTERM)?;
        let output = server.finish()?;
        let log = fs::read_to_string(dir.join("log")).unwrap_or_default();
        ensure!(output.status.success(), "{} ended with {}; {log}", self.name, output.status);
        // The last query asks for a table that is not there, on purpose.
        let errors: Vec<_> = transcript.lines().filter(|line| line.contains("ERROR")).collect();
        ensure!(errors.len() == 1, "queries failed: {errors:?}; {log}");
        lab.remove(&dir)?;
        Ok(Session { transcript, warnings: output.warnings(), moments: vec![moment] })
    }

    /// The server at its entry point, when the library's work is done and its own
    /// has not begun.
    ///
    /// # Errors
    /// When it does not come there.
    pub(crate) fn entry(&self, lab: &Lab, mode: &Mode) -> Result<Session> {
        let image = Image::read(&self.program())?;
        lab.fresh("serve")?;
        let moment = at_entry(self.serve(lab, mode)?, &image)?;
        Ok(Session { transcript: String::new(), warnings: Vec::new(), moments: vec![moment] })
    }

    /// The server on the directory `serve`.
    fn serve(&self, lab: &Lab, mode: &Mode) -> Result<Run> {
        let seen = if self.root.is_some() { Path::new(INSIDE) } else { lab.path() };
        let dir = seen.join("serve");
        let mut run = self.run(lab)?.arg("--no-defaults").directory("/");
        if let Some(user) = lab.user() {
            run = run.user(user);
        }
        for (option, file) in
            [("datadir", "data"), ("socket", "sock"), ("pid-file", "pid"), ("log-error", "log")]
        {
            run = run.arg(format!("--{option}={}", dir.join(file).display()));
        }
        // In the machine's /tmp, another server that starts would remove our files.
        run = run.arg(format!("--tmpdir={}", dir.display()));
        run = run.arg("--skip-networking").arg("--innodb-buffer-pool-size=32M");
        run = self.options.iter().fold(run, |run, option| run.arg(option));
        lab.library()?;
        Ok(mode.apply_at(&seen.join("libelfremap.so"), run))
    }

    fn run(&self, lab: &Lab) -> Result<Run> {
        let run = Run::new(self.program).env("HOME", lab.path()).env("TZ", "UTC").dies_with_us();
        match &self.root {
            Some(root) => run.root(root),
            None => Ok(run),
        }
    }
}

/// The server could not be got. The one reason for leaving out a test that holds
/// everywhere: the suite that the server comes from moves.
#[derive(Debug, thiserror::Error)]
#[error("skipped: cannot get MySQL from Debian's unstable suite: {0}")]
pub(crate) struct Unavailable(String);

fn unavailable(error: anyhow::Error) -> anyhow::Error {
    let line = format!("{error:#}").split_whitespace().collect::<Vec<_>>().join(" ");
    Unavailable(line).into()
}

/// Gives this process mounts of its own, with those that a root directory needs; the
/// kernel takes them away with the process, however that ends.
fn enter_own_mounts(root: &Path, lab: &Path) -> Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).context("cannot have mounts of our own")?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
    for (what, to) in [
        (Path::new("/dev"), "dev"),
        (Path::new("/proc"), "proc"),
        (Path::new("/sys"), "sys"),
        (lab, &INSIDE[1..]),
    ] {
        let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
        mount(Some(what), &root.join(to), none, flags, none)
            .with_context(|| format!("cannot mount {} in {}", what.display(), root.display()))?;
    }
    Ok(())
}

fn client(socket: &Path, script: &str) -> Run {
    let script = library::source_dir().join("real/data").join(script);
    Run::new("mariadb")
        .arg("--no-defaults")
        .arg("--user=root")
        .arg(format!("--socket={}", socket.display()))
        .arg("--batch")
        .arg("--force")
        .arg(format!("--execute=source {}", script.display()))
}
