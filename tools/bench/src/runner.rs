//! Starts a program on a chosen CPU and measures it from outside.

use crate::snapshot::{self, Huge, Image};
use crate::variant::Variant;
use anyhow::{Context, Result, bail, ensure};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::sys::signal::{SaFlags, SigAction, SigHandler, SigSet, Signal, sigaction};
use nix::time::{ClockId, clock_gettime};
use nix::unistd::Pid;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::Read as _;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// A program with its arguments.
#[derive(Clone, Debug)]
pub(crate) struct Job {
    pub program: PathBuf,
    pub args: Vec<OsString>,
    /// Standard input: this file, or nothing.
    pub stdin: Option<PathBuf>,
    /// Root directory that the program runs in, and lies in; the machine's if none.
    pub root: Option<PathBuf>,
}

impl Job {
    pub(crate) fn new(program: &Path, args: &[&str]) -> Self {
        Self {
            program: program.into(),
            args: args.iter().map(|&arg| OsStr::new(arg).into()).collect(),
            stdin: None,
            root: None,
        }
    }
}

/// What one run cost. Times in microseconds.
#[derive(Clone, PartialEq, Debug)]
pub(crate) struct Run {
    /// From before the process was made until it was gone.
    pub wall_us: f64,
    /// From before the process was made until the constructor of the control library
    /// ran, the last before the program's own code; none without the control.
    pub ready_us: Option<f64>,
    /// CPU time of the process at that moment.
    pub ready_cpu_us: Option<f64>,
    pub user_us: f64,
    pub system_us: f64,
    /// Peak resident memory in KiB; hugetlb pages are not in it.
    pub peak_kb: i64,
    pub stdout: String,
}

/// Runs jobs in variants, pinned to one CPU.
#[derive(Debug)]
pub(crate) struct Runner {
    cpu: usize,
    /// CPUs that this process may use when it does not start a child.
    own: CpuSet,
    stamp: PathBuf,
}

impl Runner {
    /// `work` holds the file in which the control library leaves its stamps.
    pub(crate) fn new(cpu: usize, work: &Path) -> Result<Self> {
        let own = sched_getaffinity(Pid::from_raw(0)).context("cannot read the CPU affinity")?;
        ensure!(own.is_set(cpu).unwrap_or(false), "cannot use CPU {cpu}: not among those allowed");
        Ok(Self { cpu, own, stamp: work.canonicalize()?.join("stamp") })
    }

    /// Runs `job` to its end. A run that fails is an error: a figure from it would
    /// mean nothing.
    pub(crate) fn run(&self, job: &Job, variant: &Variant) -> Result<Run> {
        fs::write(&self.stamp, []).context("cannot write the stamp file")?;
        let mut command = self.command(job, variant);
        if variant.stamps() {
            command.env("ELFREMAP_BENCH_STAMP", &self.stamp);
        }
        let start = now_us()?;
        let mut child = self.spawn(&mut command)?;
        let mut stdout = String::new();
        if let Some(mut pipe) = child.stdout.take() {
            pipe.read_to_string(&mut stdout)?;
        }
        let (status, usage) = wait(child)?;
        let wall_us = now_us()? - start;
        check_interrupt()?;
        if !status.success() {
            bail!("{} failed in variant {}: {status}", job.program.display(), variant.name);
        }
        let stamps = fs::read(&self.stamp).context("cannot read the stamp file")?;
        let stamp = |at: usize| {
            let bytes = stamps.get(at..)?.first_chunk()?;
            Some(i64::from_ne_bytes(*bytes) as f64 / 1000.0)
        };
        Ok(Run {
            wall_us,
            ready_us: stamp(0).map(|at| at - start),
            ready_cpu_us: stamp(8),
            user_us: micros(usage.ru_utime),
            system_us: micros(usage.ru_stime),
            peak_kb: usage.ru_maxrss,
            stdout,
        })
    }

    /// Runs `job` once, to learn from smaps what lies on huge pages when the last
    /// constructor runs. Needs a variant with the control library.
    pub(crate) fn huge_at_start(&self, job: &Job, variant: &Variant) -> Result<Huge> {
        fs::write(&self.stamp, []).context("cannot write the stamp file")?;
        let mut command = self.command(job, variant);
        command.env("ELFREMAP_BENCH_SMAPS", &self.stamp).stdout(Stdio::null());
        let (status, _) = wait(self.spawn(&mut command)?)?;
        check_interrupt()?;
        ensure!(
            status.success(),
            "{} failed in variant {}: {status}",
            job.program.display(),
            variant.name
        );
        let text = fs::read(&self.stamp).context("cannot read the stamp file")?;
        ensure!(!text.is_empty(), "variant {} left no smaps", variant.name);
        snapshot::whole(&text)
    }

    /// Runs a generated program to the end of its walks, reads its smaps while it waits,
    /// and returns what it printed.
    pub(crate) fn walk(&self, job: &Job, variant: &Variant) -> Result<(String, Image)> {
        let waiting = self.start_waiting(job, variant)?;
        let image = snapshot::image(waiting.pid());
        let (line, _) = waiting.finish()?;
        Ok((line, image?))
    }

    /// Runs a program that prints a line and waits for the end of its standard input, until
    /// it has done so.
    pub(crate) fn start_waiting(&self, job: &Job, variant: &Variant) -> Result<Waiting> {
        let mut command = self.command(job, variant);
        command.stdin(Stdio::piped());
        let mut child = self.spawn(&mut command)?;
        let mut line = Vec::new();
        let mut pipe = child.stdout.take().context("no pipe from the program")?;
        let mut byte = [0];
        while pipe.read(&mut byte)? == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        let waiting = Waiting {
            name: format!("{} in variant {}", job.program.display(), variant.name),
            line: String::from_utf8(line)?,
            child,
        };
        if waiting.line.is_empty() {
            let name = waiting.name.clone();
            waiting.finish()?;
            bail!("{name} printed nothing");
        }
        Ok(waiting)
    }

    /// Runs `job` to its end; reads its smaps after `seconds`, or sooner when it has ended by
    /// then: how long a run takes depends on what else the machine does.
    pub(crate) fn image_at(&self, job: &Job, variant: &Variant, seconds: f64) -> Result<Image> {
        const TRIES: i32 = 6;
        let mut seen = self.image_once(job, variant, seconds)?;
        for halved in 1..TRIES {
            if seen.is_ok() {
                break;
            }
            seen = self.image_once(job, variant, seconds / 2f64.powi(halved))?;
        }
        seen
    }

    /// The inner error: nothing could be read, as when it had ended.
    fn image_once(&self, job: &Job, variant: &Variant, seconds: f64) -> Result<Result<Image>> {
        let mut command = self.command(job, variant);
        command.stdout(Stdio::null());
        let child = self.spawn(&mut command)?;
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let image = snapshot::image(child.id());
        let (status, _) = wait(child)?;
        check_interrupt()?;
        ensure!(
            status.success(),
            "{} failed in variant {}: {status}",
            job.program.display(),
            variant.name
        );
        Ok(image)
    }

    fn command(&self, job: &Job, variant: &Variant) -> Command {
        let mut command = command_in(job.root.as_deref(), &job.program);
        variant.apply(&mut command);
        let stdin = job.stdin.as_ref().and_then(|path| fs::File::open(path).ok());
        command
            .args(&job.args)
            .stdin(stdin.map_or_else(Stdio::null, Stdio::from))
            .stdout(Stdio::piped())
            .stderr(Stdio::null());
        command
    }

    /// Runs a command on the chosen CPU and returns what it prints.
    pub(crate) fn output(&self, command: &mut Command) -> Result<String> {
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let done = self.spawn(command)?.wait_with_output()?;
        check_interrupt()?;
        let name = command.get_program().display();
        let (out, err) =
            (String::from_utf8_lossy(&done.stdout), String::from_utf8_lossy(&done.stderr));
        ensure!(done.status.success(), "{name} failed: {}: {out}{err}", done.status);
        Ok(out.into_owned())
    }

    /// Starts a child on the chosen CPU, by being there ourselves for that moment: the
    /// child inherits the affinity and nothing has to run in it before exec.
    pub(crate) fn spawn(&self, command: &mut Command) -> Result<Child> {
        let mut set = CpuSet::new();
        set.set(self.cpu).context("cannot pin to the CPU")?;
        sched_setaffinity(Pid::from_raw(0), &set).context("cannot pin to the CPU")?;
        let child = command.spawn();
        sched_setaffinity(Pid::from_raw(0), &self.own).context("cannot unpin")?;
        child.with_context(|| format!("cannot start {}", command.get_program().display()))
    }
}

/// A program that has printed its line and waits.
#[derive(Debug)]
pub(crate) struct Waiting {
    name: String,
    line: String,
    child: Child,
}

impl Waiting {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Lets it end; returns its line and the CPU time it has used, in microseconds.
    pub(crate) fn finish(mut self) -> Result<(String, f64)> {
        drop(self.child.stdin.take());
        let (status, usage) = wait(self.child)?;
        check_interrupt()?;
        ensure!(status.success(), "{} failed: {status}", self.name);
        Ok((self.line, micros(usage.ru_utime) + micros(usage.ru_stime)))
    }
}

/// A command that runs `program` with `root` as its root directory; `program` is where it
/// lies as seen from here.
pub(crate) fn command_in(root: Option<&Path>, program: &Path) -> Command {
    let Some(root) = root else { return Command::new(program) };
    let inside = Path::new("/").join(program.strip_prefix(root).unwrap_or(program));
    let mut command = Command::new(inside);
    let root = root.to_owned();
    // SAFETY: the closure runs in the child between fork and exec. It makes two system calls
    // and allocates at most the copy of a short path; this program has one thread, so no lock of the
    // allocator can be held by another at the time of the fork.
    unsafe {
        command.pre_exec(move || {
            nix::unistd::chroot(&root)?;
            nix::unistd::chdir("/")?;
            Ok(())
        });
    }
    command
}

fn micros(time: libc::timeval) -> f64 {
    time.tv_sec as f64 * 1e6 + time.tv_usec as f64
}

/// CLOCK_MONOTONIC, as the control library reads it.
fn now_us() -> Result<f64> {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).context("cannot read the clock")?;
    Ok(now.tv_sec() as f64 * 1e6 + now.tv_nsec() as f64 / 1e3)
}

/// Waits for `child` and returns what it used, which std does not tell.
pub(crate) fn wait(child: Child) -> Result<(ExitStatus, libc::rusage)> {
    let pid = libc::pid_t::try_from(child.id())?;
    let mut status = 0;
    let mut usage = std::mem::MaybeUninit::<libc::rusage>::zeroed();
    loop {
        // SAFETY: both pointers are to live values of the types that wait4(2) fills. The
        // child was not waited for before: `child` is taken by value.
        if unsafe { libc::wait4(pid, &raw mut status, 0, usage.as_mut_ptr()) } == pid {
            break;
        }
        let error = std::io::Error::last_os_error();
        ensure!(error.raw_os_error() == Some(libc::EINTR), "cannot wait for the program: {error}");
        // A signal to us: the child is not left behind. It may be gone already.
        let _ = nix::sys::signal::kill(Pid::from_raw(pid), Signal::SIGKILL);
    }
    // SAFETY: wait4 has filled it; all zero, as it began, is a valid rusage as well.
    Ok((ExitStatus::from_raw(status), unsafe { usage.assume_init() }))
}

static INTERRUPTED: AtomicBool = AtomicBool::new(false);

extern "C" fn note_interrupt(_: libc::c_int) {
    INTERRUPTED.store(true, Ordering::Relaxed);
}

/// Makes ^C and SIGTERM an error of the run that is going on, so that what was
/// reserved is given back.
pub(crate) fn catch_interrupts() -> Result<()> {
    let action =
        SigAction::new(SigHandler::Handler(note_interrupt), SaFlags::empty(), SigSet::empty());
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        // SAFETY: the handler only stores to an atomic, which is async-signal-safe.
        unsafe { sigaction(signal, &action) }.context("cannot set a signal handler")?;
    }
    Ok(())
}

/// An error once a signal has come.
pub(crate) fn check_interrupt() -> Result<()> {
    ensure!(!INTERRUPTED.load(Ordering::Relaxed), "interrupted");
    Ok(())
}
