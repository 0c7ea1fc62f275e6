//! What the move gains on real servers under load.
//!
//! Each round starts one server for each variant anew, in rotated order, all alive at
//! once (an idle one costs nothing), warms each, and then loads them in short slices
//! that go round the variants: other work on the machine that lasts longer than a slice
//! hits all alike. The slices of one round share a server, so the report counts the
//! round, not the slice, as one observation. Server and load run on different CPUs.

mod postgres;
mod redis;
mod sql;

use super::{OPTIONS, Session, Subject, file_size, order};
use crate::record::Bench;
use crate::runner::{self, Runner};
use crate::snapshot;
use crate::variant::Variant;
use anyhow::{Context, Result, bail, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, SysconfVar, sysconf};
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

const BENCH: Bench = Bench::Servers;

/// Seconds of load before the first slice.
const WARM_SECONDS: u32 = 2;

/// A server with a load.
trait Service {
    /// The server's file.
    fn program(&self) -> &Path;
    /// Where a server with its data in `data` has its socket.
    fn socket(&self, data: &Path) -> PathBuf {
        data.join("s")
    }
    /// Whether a server answers.
    fn ready(&self, socket: &Path) -> bool {
        UnixStream::connect(socket).is_ok()
    }
    /// The command that starts a server with its data in `data`.
    fn server(&self, data: &Path) -> Command;
    /// Fills the empty folder `data` with what the servers begin with.
    fn prepare(&self, data: &Path, runner: &Runner) -> Result<()>;
    /// The command that loads the server for `seconds`.
    fn load(&self, socket: &Path, seconds: u32) -> Command;
    /// How much was done in `seconds`, from what the load printed.
    fn done(&self, printed: &str, seconds: u32) -> Option<f64>;
}

struct Loaded {
    name: String,
    service: Box<dyn Service>,
    /// Data as prepared; each server works on a copy of its own.
    data: PathBuf,
    /// Huge pages that are enough for one server in each variant.
    pages: u64,
}

impl Subject for Loaded {
    fn name(&self) -> &str {
        &self.name
    }

    fn pages(&self) -> u64 {
        self.pages
    }
}

pub(super) fn measure(session: &mut Session<'_>) -> Result<()> {
    // In memory, so that no disk is measured.
    let work = Scratch::new()?;
    let client = Runner::new(session.args.client_cpu, &session.args.work)?;
    let variants: Vec<Variant> =
        session.all_variants(&OPTIONS)?.into_iter().map(Variant::bare).collect();
    let mut subjects = Vec::new();
    let services = sql::all(session.mysql.as_ref()).into_iter();
    for (name, service) in services.chain(postgres::all()).chain(redis::all()) {
        if !session.args.asks_for(&name) {
            continue;
        }
        // One data folder for each kind of server.
        let data = work.0.join(format!("data-{}", name.split(' ').next().unwrap_or_default()));
        if !data.exists() {
            fs::create_dir(&data).with_context(|| format!("cannot create {}", data.display()))?;
            service.prepare(&data, &session.runner)?;
        }
        // The file holds text, rodata and data; 8 pages more hold the bss. Some libraries
        // crash the program when the pool is too small.
        let one = file_size(service.program())?.div_ceil(2 << 20) + 8;
        subjects.push(Loaded { name, service, data, pages: one * variants.len() as u64 });
    }
    if subjects.is_empty() {
        let needs = [sql::NEEDS, postgres::NEEDS, redis::NEEDS].join("; ");
        bail!("no server found here to measure: {needs}");
    }
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        let Some(round) = round else { return Ok(()) };
        let mut servers: Vec<(&Variant, Server)> = Vec::new();
        for variant in order(&variants, round) {
            if !session.wants(BENCH, &subject.name, variant, pool)? {
                continue;
            }
            let folder = work.0.join(&variant.name);
            let started = Server::start(subject, variant, &folder, &session.runner)
                .and_then(|server| load(subject, &server, WARM_SECONDS, &client).map(|_| server));
            let started = session.tolerate(BENCH, &subject.name, variant, started)?;
            servers.extend(started.map(|server| (variant, server)));
        }
        for slice in 0..session.args.slices {
            for (variant, server) in order(&servers, round + slice) {
                if !session.wants(BENCH, &subject.name, variant, true)? {
                    continue;
                }
                let before = server.cpu_us()?;
                let start = Instant::now();
                let done = load(subject, server, session.args.slice_seconds, &client);
                let Some(done) = session.tolerate(BENCH, &subject.name, variant, done)? else {
                    continue;
                };
                let seconds = start.elapsed().as_secs_f64();
                let after = server.cpu_us()?;
                let image = snapshot::image(server.child.id())?;
                let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let values = BTreeMap::from([
                    ("done".to_owned(), done),
                    ("seconds".to_owned(), seconds),
                    ("user_us".to_owned(), after.0 - before.0),
                    ("system_us".to_owned(), after.1 - before.1),
                    ("slice".to_owned(), f64::from(slice)),
                    ("text_moved_mb".to_owned(), mb(image.text.moved())),
                    ("text_file_huge_mb".to_owned(), mb(image.text.file)),
                    ("rodata_moved_mb".to_owned(), mb(image.rodata.moved())),
                    ("data_moved_mb".to_owned(), mb(image.data.moved())),
                    (
                        "beside_mb".to_owned(),
                        mb(image.beside(snapshot::process(server.child.id())?)),
                    ),
                    ("peak_mb".to_owned(), snapshot::status_mb(server.child.id(), "VmHWM")?),
                    ("rss_mb".to_owned(), snapshot::status_mb(server.child.id(), "VmRSS")?),
                    (
                        "hugetlb_mb".to_owned(),
                        snapshot::status_mb(server.child.id(), "HugetlbPages")?,
                    ),
                ]);
                session.sample(BENCH, &subject.name, &variant.name, round, values)?;
            }
        }
        for (variant, server) in servers {
            session.tolerate(BENCH, &subject.name, variant, server.stop())?;
        }
        Ok(())
    })
}

/// Loads a server and returns how much it did.
fn load(subject: &Loaded, server: &Server, seconds: u32, client: &Runner) -> Result<f64> {
    let mut command = subject.service.load(&server.socket, seconds);
    let printed = client.output(&mut command)?;
    runner::check_interrupt()?;
    subject.service.done(&printed, seconds).with_context(|| {
        format!("cannot read what {} printed: {printed}", command.get_program().display())
    })
}

/// A running server; killed when dropped.
#[derive(Debug)]
struct Server {
    child: Child,
    socket: PathBuf,
}

impl Server {
    fn start(subject: &Loaded, variant: &Variant, folder: &Path, runner: &Runner) -> Result<Self> {
        if folder.exists() {
            fs::remove_dir_all(folder)?;
        }
        let copied = Command::new("cp").arg("-a").arg(&subject.data).arg(folder).status();
        if !copied.is_ok_and(|status| status.success()) {
            bail!("cannot copy {} to {}", subject.data.display(), folder.display());
        }
        let mut command = subject.service.server(folder);
        variant.apply(&mut command);
        Self::spawn(subject.service.as_ref(), command, folder, runner)
            .with_context(|| format!("{}, variant {}", subject.name, variant.name))
    }

    /// Starts a server and waits until it answers.
    fn spawn(
        service: &dyn Service,
        mut command: Command,
        folder: &Path,
        runner: &Runner,
    ) -> Result<Self> {
        const PATIENCE: Duration = Duration::from_secs(60);
        let log = folder.join("log");
        let file = fs::File::create(&log).context("cannot create the server's log")?;
        command.stdin(std::process::Stdio::null()).stdout(file.try_clone()?).stderr(file);
        let mut server =
            Self { child: runner.spawn(&mut command)?, socket: service.socket(folder) };
        let start = Instant::now();
        while !service.ready(&server.socket) {
            runner::check_interrupt()?;
            let ended = server.child.try_wait()?;
            if ended.is_some() || start.elapsed() > PATIENCE {
                let said = fs::read_to_string(&log).unwrap_or_default();
                bail!("the server does not start: {}", said.lines().last().unwrap_or_default());
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(server)
    }

    /// User and system time so far, in microseconds, of the server and its children, those
    /// that have ended included; in steps of a clock tick.
    fn cpu_us(&self) -> Result<(f64, f64)> {
        let ticks = sysconf(SysconfVar::CLK_TCK)?.context("no clock tick")? as f64;
        let own = self.child.id();
        let mut sum = [0; 4];
        let mut found = false;
        for entry in fs::read_dir("/proc")?.flatten() {
            // A process may be gone before it is read.
            let Ok(text) = fs::read_to_string(entry.path().join("stat")) else { continue };
            let Some((pid, parent, times)) = stat(&text) else { continue };
            if pid == own || parent == own {
                found |= pid == own;
                sum.iter_mut().zip(times).for_each(|(sum, ticks)| *sum += ticks);
            }
        }
        ensure!(found, "the server has ended");
        let us = |a: u64, b: u64| (a + b) as f64 * 1e6 / ticks;
        Ok((us(sum[0], sum[2]), us(sum[1], sum[3])))
    }

    /// Ends the server as an administrator would; a failure on the way out is an error.
    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(i32::try_from(self.child.id())?), Signal::SIGTERM)?;
        let status = self.child.wait()?;
        if !status.success() {
            bail!("the server ended with {status}");
        }
        Ok(())
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // After `stop` it is gone, and both do nothing.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// From the text of /proc/PID/stat (proc_pid_stat(5)): pid, parent, and utime, stime, cutime and
/// cstime in clock ticks.
fn stat(text: &str) -> Option<(u32, u32, [u64; 4])> {
    let (pid, rest) = text.split_once(" (")?;
    // The name may hold anything; the state is the first field after it.
    let fields: Vec<&str> = rest.rsplit_once(") ")?.1.split_whitespace().collect();
    let number = |at: usize| fields.get(at)?.parse::<u64>().ok();
    let parent = fields.get(1)?.parse().ok()?;
    Some((pid.parse().ok()?, parent, [number(11)?, number(12)?, number(13)?, number(14)?]))
}

/// A folder in memory, removed when dropped.
#[derive(Debug)]
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let path = PathBuf::from(format!("/dev/shm/elfremap-bench-{}", std::process::id()));
        fs::create_dir(&path).with_context(|| format!("cannot create {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_stat_whatever_the_name() {
        let text = "42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 10 20 30 40 20 0 1 0\n";
        assert_eq!(stat(text), Some((42, 7, [10, 20, 30, 40])));
        let own = fs::read_to_string("/proc/self/stat").unwrap();
        assert_eq!(stat(&own).unwrap().0, std::process::id());
        assert_eq!(stat(""), None);
    }
}
