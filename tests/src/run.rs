//! Runs a program, plain or under the preload, with a time limit.

use crate::library;
use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::resource::Resource;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use std::ffi::{CString, OsStr, OsString};
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// The time limit of a run unless another is given.
pub const WATCHDOG: Duration = Duration::from_secs(60);

/// What begins every line that the preload writes to stderr.
pub const PREFIX: &str = "elfremap:";

/// The line after which a program waits for the end of its stdin, so that it can be
/// looked at.
pub const READY: &str = "ready";

/// A program to run, and how.
#[derive(Clone, Debug)]
pub struct Run {
    program: PathBuf,
    name: Option<OsString>,
    arguments: Vec<OsString>,
    environment: Vec<(OsString, OsString)>,
    preloads: Vec<PathBuf>,
    aslr_off: bool,
    limits: Vec<(Resource, u64)>,
    directory: Option<PathBuf>,
    root: Option<CString>,
    user: Option<u32>,
    traced: bool,
    dies_with_us: bool,
    launcher: Option<(PathBuf, Vec<String>)>,
    group: Option<PathBuf>,
    time: Duration,
}

/// What a program left behind.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Output {
    /// Exit status or signal.
    pub status: ExitStatus,
    /// All of its stdout.
    pub stdout: Vec<u8>,
    /// All of its stderr.
    pub stderr: Vec<u8>,
}

impl Run {
    /// A plain run of `program` with an environment of `PATH` and `LC_ALL=C` alone.
    #[must_use]
    pub fn new(program: impl AsRef<Path>) -> Self {
        let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/bin:/bin".into());
        Self {
            program: program.as_ref().to_owned(),
            name: None,
            arguments: Vec::new(),
            environment: vec![("PATH".into(), path), ("LC_ALL".into(), "C".into())],
            preloads: Vec::new(),
            aslr_off: false,
            limits: Vec::new(),
            directory: None,
            root: None,
            user: None,
            traced: false,
            dies_with_us: false,
            launcher: None,
            group: None,
            time: WATCHDOG,
        }
    }

    /// The program's path or name.
    #[must_use]
    pub fn program(&self) -> &Path {
        &self.program
    }

    /// Adds an argument.
    #[must_use]
    pub fn arg(mut self, argument: impl AsRef<OsStr>) -> Self {
        self.arguments.push(argument.as_ref().to_owned());
        self
    }

    /// Adds arguments.
    #[must_use]
    pub fn args<A: AsRef<OsStr>>(mut self, arguments: impl IntoIterator<Item = A>) -> Self {
        self.arguments.extend(arguments.into_iter().map(|a| a.as_ref().to_owned()));
        self
    }

    /// Starts it under another name than its path (argument 0).
    #[must_use]
    pub fn name(mut self, name: impl AsRef<OsStr>) -> Self {
        self.name = Some(name.as_ref().to_owned());
        self
    }

    /// Sets an environment variable.
    #[must_use]
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), value.as_ref().to_owned()));
        self
    }

    /// Preloads the library under test.
    ///
    /// # Errors
    /// When it has not been built.
    pub fn preload(self) -> Result<Self> {
        let library = library::preload()?;
        Ok(self.preload_too(library))
    }

    /// Preloads another library, after those given before.
    #[must_use]
    pub fn preload_too(mut self, library: impl Into<PathBuf>) -> Self {
        self.preloads.push(library.into());
        self
    }

    /// Turns address space layout randomisation off, as `setarch -R` does.
    #[must_use]
    pub fn aslr_off(mut self) -> Self {
        self.aslr_off = true;
        self
    }

    /// Limits a resource, soft and hard.
    #[must_use]
    pub fn limit(mut self, resource: Resource, value: u64) -> Self {
        self.limits.push((resource, value));
        self
    }

    /// Runs it in this directory.
    #[must_use]
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Runs it with `root` as its root directory (chroot(2), needs root); the program's
    /// path and the preload's are then paths in there.
    ///
    /// # Errors
    /// When the path holds a NUL byte.
    pub fn root(mut self, root: &Path) -> Result<Self> {
        self.root = Some(CString::new(root.as_os_str().as_bytes())?);
        Ok(self)
    }

    /// Runs it as the user and the group of this number, and in no other group (needs root).
    #[must_use]
    pub fn user(mut self, id: u32) -> Self {
        self.user = Some(id);
        self
    }

    /// Kills it when the thread that starts it ends, however that happens: no server
    /// outlives a test that was killed.
    #[must_use]
    pub fn dies_with_us(mut self) -> Self {
        self.dies_with_us = true;
        self
    }

    /// Stops it before its first instruction, for the starting thread to trace it
    /// (PTRACE_TRACEME in ptrace(2)).
    #[must_use]
    pub fn traced(mut self) -> Self {
        self.traced = true;
        self
    }

    /// Starts it through `launcher STEP... set=LD_PRELOAD=... -- PROGRAM ARGUMENT...`
    /// (programs/tools/launch.c), which itself runs without the preloads.
    #[must_use]
    pub fn through(mut self, launcher: impl Into<PathBuf>, steps: &[&str]) -> Self {
        self.launcher = Some((launcher.into(), steps.iter().map(|s| (*s).to_owned()).collect()));
        self
    }

    /// Runs it in this control group (a directory with `cgroup.procs`).
    #[must_use]
    pub fn group(mut self, directory: impl Into<PathBuf>) -> Self {
        self.group = Some(directory.into());
        self
    }

    /// Kills it (and fails) after this time.
    #[must_use]
    pub fn time_limit(mut self, time: Duration) -> Self {
        self.time = time;
        self
    }

    /// Runs it to its end with an empty stdin.
    ///
    /// # Errors
    /// When it cannot be started or does not end in time.
    pub fn output(&self) -> Result<Output> {
        self.start(Stdio::null())?.finish()
    }

    /// Starts it with its stdin held open.
    ///
    /// # Errors
    /// When it cannot be started.
    pub fn start_waiting(&self) -> Result<Running> {
        self.start(Stdio::piped())
    }

    /// Starts it and waits until it has written the line [`READY`].
    ///
    /// # Errors
    /// When it cannot be started, ends before that, or takes too long.
    pub fn until_ready(&self) -> Result<Running> {
        let mut running = self.start_waiting()?;
        running.wait_for_line(READY)?;
        Ok(running)
    }

    fn start(&self, stdin: Stdio) -> Result<Running> {
        let list: Vec<_> = self.preloads.iter().map(|p| p.as_os_str()).collect();
        let list = (!list.is_empty()).then(|| list.join(OsStr::new(":")));
        let mut command;
        if let Some((launcher, steps)) = &self.launcher {
            command = Command::new(launcher);
            command.args(steps);
            if let Some(list) = &list {
                let mut step = OsString::from("set=LD_PRELOAD:");
                step.push(list);
                command.arg(step);
            }
            command.arg("--").arg(&self.program);
        } else {
            command = Command::new(&self.program);
        }
        command.env_clear().envs(self.environment.iter().map(|(k, v)| (k, v)));
        if let (Some(list), None) = (&list, &self.launcher) {
            command.env("LD_PRELOAD", list);
        }
        command.args(&self.arguments).stdin(stdin).process_group(0);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        if let Some(name) = &self.name {
            command.arg0(name);
        }
        if let Some(directory) = &self.directory {
            command.current_dir(directory);
        }
        let group = match &self.group {
            Some(directory) => {
                Some(File::options().write(true).open(directory.join("cgroup.procs"))?)
            }
            None => None,
        };
        let (aslr_off, limits) = (self.aslr_off, self.limits.clone());
        let (root, user, traced) = (self.root.clone(), self.user, self.traced);
        let dies_with_us = self.dies_with_us;
        // SAFETY: between fork and exec the closure makes system calls only, and
        // reads values that were copied before.
        unsafe {
            command.pre_exec(move || {
                // What a shell in the background or nohup ignores would stay ignored, and
                // programs that test their own signal handling then fail.
                for signal in [libc::SIGHUP, libc::SIGINT, libc::SIGQUIT] {
                    libc::signal(signal, libc::SIG_DFL);
                }
                if let Some(root) = &root {
                    nix::unistd::chroot(root.as_c_str())?;
                    nix::unistd::chdir(c"/")?;
                }
                if let Some(id) = user {
                    nix::unistd::setgroups(&[])?;
                    nix::unistd::setgid(id.into())?;
                    nix::unistd::setuid(id.into())?;
                }
                if aslr_off && libc::personality(libc::ADDR_NO_RANDOMIZE as libc::c_ulong) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                if let Some(group) = &group {
                    // Zero stands for the process that writes.
                    nix::unistd::write(group, b"0")?;
                }
                for &(resource, value) in &limits {
                    nix::sys::resource::setrlimit(resource, value, value)?;
                }
                // After the change of user, which would undo it.
                if dies_with_us && libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) < 0 {
                    return Err(std::io::Error::last_os_error());
                }
                if traced {
                    nix::sys::ptrace::traceme()?;
                }
                Ok(())
            });
        }
        let child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let pidfd = pidfd(child.id())?;
        Ok(Running {
            child,
            pidfd,
            deadline: Instant::now() + self.time,
            stdout: Vec::new(),
            stderr: Vec::new(),
        })
    }
}

fn pidfd(pid: u32) -> Result<OwnedFd> {
    // SAFETY: pidfd_open(2) takes two integers.
    let fd = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
    ensure!(fd >= 0, "pidfd_open: {}", std::io::Error::last_os_error());
    // SAFETY: the kernel has just made this descriptor for us.
    Ok(unsafe { OwnedFd::from_raw_fd(i32::try_from(fd)?) })
}

/// A program that runs. Killed, with its process group, when dropped before its end.
#[derive(Debug)]
pub struct Running {
    child: Child,
    pidfd: OwnedFd,
    deadline: Instant,
    stdout: Vec<u8>,
    stderr: Vec<u8>,
}

impl Running {
    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it has written to stdout so far, as far as it has been read.
    #[must_use]
    pub fn stdout(&self) -> &[u8] {
        &self.stdout
    }

    /// Writes to its stdin.
    ///
    /// # Errors
    /// When its stdin is closed.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("stdin is closed")?;
        Ok(stdin.write_all(bytes)?)
    }

    /// Waits until it has written `line`.
    ///
    /// # Errors
    /// When it ends before that, or takes too long.
    pub fn wait_for_line(&mut self, line: &str) -> Result<()> {
        while !self.stdout.split(|&b| b == b'\n').any(|l| l == line.as_bytes()) {
            if !self.pump()? {
                bail!(
                    "the program ended without writing {line:?}; stdout: {}; stderr: {}",
                    String::from_utf8_lossy(&self.stdout),
                    String::from_utf8_lossy(&self.stderr)
                );
            }
        }
        Ok(())
    }

    /// Waits until it has written a whole line that begins with `prefix`, and returns
    /// the rest of that line.
    ///
    /// # Errors
    /// When it ends before that, or takes too long.
    pub fn wait_for_prefix(&mut self, prefix: &str) -> Result<String> {
        loop {
            let text = String::from_utf8_lossy(&self.stdout);
            let whole = text.rfind('\n').map_or("", |end| &text[..end]);
            if let Some(rest) = whole.lines().find_map(|line| line.strip_prefix(prefix)) {
                return Ok(rest.to_owned());
            }
            ensure!(
                self.pump()?,
                "the program ended without writing {prefix:?}; stderr: {}",
                String::from_utf8_lossy(&self.stderr)
            );
        }
    }

    /// Writes `text` to its stdin, which [`Run::start_waiting`] holds open.
    ///
    /// # Errors
    /// When it does not read any more.
    pub fn write(&mut self, text: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("the program's stdin is empty")?;
        Ok(stdin.write_all(text.as_bytes())?)
    }

    /// Ends its stdin, and waits for its end.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn finish(mut self) -> Result<Output> {
        drop(self.child.stdin.take());
        while self.pump()? {}
        // Ends at once: the pidfd said that the process has ended.
        let status = self.child.wait()?;
        Ok(Output {
            status,
            stdout: std::mem::take(&mut self.stdout),
            stderr: std::mem::take(&mut self.stderr),
        })
    }

    /// Kills it, and waits for its end.
    ///
    /// # Errors
    /// When it does not end in time.
    pub fn kill(mut self) -> Result<Output> {
        self.child.kill()?;
        self.finish()
    }

    /// Waits for more output. False when both streams and the process have ended.
    fn pump(&mut self) -> Result<bool> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        let mut fds = Vec::new();
        let mut streams = 0;
        if let Some(stdout) = &self.child.stdout {
            fds.push(PollFd::new(stdout.as_fd(), PollFlags::POLLIN));
            streams += 1;
        }
        if let Some(stderr) = &self.child.stderr {
            fds.push(PollFd::new(stderr.as_fd(), PollFlags::POLLIN));
            streams += 1;
        }
        if streams == 0 {
            fds.push(PollFd::new(self.pidfd.as_fd(), PollFlags::POLLIN));
        }
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        match poll(&mut fds, timeout) {
            Ok(0) => {
                self.kill_group();
                bail!(
                    "the program did not end in time; stdout: {}; stderr: {}",
                    String::from_utf8_lossy(&self.stdout),
                    String::from_utf8_lossy(&self.stderr)
                );
            }
            Ok(_) => {}
            Err(nix::errno::Errno::EINTR) => return Ok(true),
            Err(errno) => return Err(errno.into()),
        }
        if streams == 0 {
            return Ok(false);
        }
        let ready: Vec<_> = fds
            .iter()
            .filter(|fd| fd.revents().is_some_and(|r| !r.is_empty()))
            .map(|fd| fd.as_fd().as_raw_fd())
            .collect();
        take(&mut self.child.stdout, &mut self.stdout, &ready)?;
        take(&mut self.child.stderr, &mut self.stderr, &ready)?;
        Ok(true)
    }

    fn kill_group(&self) {
        if let Ok(pid) = i32::try_from(self.child.id()) {
            // The child was made the leader of a group of its own and has not been
            // waited for: the number is still its.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.kill_group();
            let _ = self.child.wait();
        }
    }
}

/// Reads once from `stream` when it is among `ready`; forgets the stream at its end.
fn take<S: Read + AsRawFd>(
    stream: &mut Option<S>,
    into: &mut Vec<u8>,
    ready: &[i32],
) -> Result<()> {
    let Some(open) = stream.as_mut().filter(|s| ready.contains(&s.as_raw_fd())) else {
        return Ok(());
    };
    let mut buffer = [0; 65536];
    match open.read(&mut buffer) {
        Ok(0) => *stream = None,
        Ok(n) => into.extend_from_slice(&buffer[..n]),
        Err(error) if error.kind() == ErrorKind::Interrupted => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

impl Output {
    /// The lines of stderr that the preload wrote.
    #[must_use]
    pub fn warnings(&self) -> Vec<String> {
        let text = String::from_utf8_lossy(&self.stderr).into_owned();
        text.lines().filter(|l| l.starts_with(PREFIX)).map(str::to_owned).collect()
    }

    /// Parity: the same stdout and exit status as in the plain run `plain`, and the
    /// same stderr but for the preload's own lines.
    ///
    /// # Errors
    /// Names the first difference.
    pub fn same_as(&self, plain: &Self) -> Result<()> {
        let lossy = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        ensure!(
            self.status == plain.status,
            "ended with {} instead of {}; stdout: {}; stderr: {}",
            describe(self.status),
            describe(plain.status),
            lossy(&self.stdout),
            lossy(&self.stderr)
        );
        if self.stdout != plain.stdout {
            let (now, then) = (lossy(&self.stdout), lossy(&plain.stdout));
            let at = now.lines().zip(then.lines()).position(|(a, b)| a != b);
            let at = at.unwrap_or_else(|| now.lines().count().min(then.lines().count()));
            bail!(
                "stdout differs in line {}: {:?} instead of {:?}",
                at + 1,
                now.lines().nth(at),
                then.lines().nth(at)
            );
        }
        let others = |output: &Self| -> Vec<String> {
            let text = lossy(&output.stderr);
            text.lines().filter(|l| !l.starts_with(PREFIX)).map(str::to_owned).collect()
        };
        ensure!(
            others(self) == others(plain),
            "stderr differs: {:?} instead of {:?}",
            lossy(&self.stderr),
            lossy(&plain.stderr)
        );
        Ok(())
    }

    /// The preload said nothing.
    ///
    /// # Errors
    /// With what it said.
    pub fn silent(&self) -> Result<()> {
        let warnings = self.warnings();
        ensure!(warnings.is_empty(), "said something on success: {warnings:?}");
        Ok(())
    }

    /// The preload wrote one line, and it names each of `words`.
    ///
    /// # Errors
    /// With what it said instead.
    pub fn warned_once(&self, words: &[&str]) -> Result<()> {
        let warnings = self.warnings();
        ensure!(warnings.len() == 1, "one warning expected, got {warnings:?}");
        for word in words {
            ensure!(warnings[0].contains(word), "the warning lacks {word:?}: {}", warnings[0]);
        }
        Ok(())
    }
}

fn describe(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (_, Some(signal)) => {
            let name = Signal::try_from(signal).map_or("unknown signal", |s| s.as_str());
            format!("signal {signal} ({name})")
        }
        _ => format!("{status:?}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Run {
        Run::new("/bin/sh").arg("-c").arg(script)
    }

    #[test]
    fn output_and_status() {
        let output = shell("echo out; echo err >&2; echo elfremap: w >&2; exit 42").output();
        let output = output.unwrap();
        assert_eq!((output.status.code(), &output.stdout[..]), (Some(42), &b"out\n"[..]));
        assert_eq!(output.warnings(), ["elfremap: w"]);
        assert!(output.silent().is_err());
        let other = shell("echo out; echo err >&2; exit 42").output().unwrap();
        output.same_as(&other).unwrap();
        assert!(other.same_as(&shell("echo other; exit 42").output().unwrap()).is_err());
        assert!(other.same_as(&shell("echo out; kill -11 $$").output().unwrap()).is_err());
    }

    #[test]
    fn a_waiting_program_goes_on_when_its_stdin_ends() {
        let running = shell("echo ready; cat; echo done").until_ready().unwrap();
        assert_eq!(running.stdout(), b"ready\n");
        assert_eq!(running.finish().unwrap().stdout, b"ready\ndone\n");
        assert!(shell("echo other").until_ready().is_err());
    }

    #[test]
    fn the_watchdog_kills_the_whole_group() {
        let run = shell("sleep 50 & sleep 50").time_limit(Duration::from_millis(100));
        let begin = Instant::now();
        assert!(format!("{:#}", run.output().unwrap_err()).contains("in time"));
        assert!(begin.elapsed() < Duration::from_secs(20));
    }

    #[test]
    fn limits_and_personality_are_the_programs() {
        let run = shell("ulimit -c; cat /proc/self/personality").aslr_off();
        let output = run.limit(Resource::RLIMIT_CORE, 0).output().unwrap();
        assert_eq!(output.stdout, b"0\n00040000\n");
    }
}
