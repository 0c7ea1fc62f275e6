//! Starts programs, plain or under the preload, in a place of the machine.
//!
//! There is no time limit here: the host turns off a guest that takes too long.

use crate::LIBRARY;
use crate::node::MemoryPolicy;
use anyhow::{Context, Result, bail, ensure};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Stdio};

/// What begins every line that the preload writes to stderr.
const PREFIX: &str = "elfremap:";

/// A program to start, and how.
#[derive(Clone, Debug)]
pub(crate) struct Launch {
    program: PathBuf,
    arguments: Vec<String>,
    environment: Vec<(String, String)>,
    aslr: bool,
    policy: Option<MemoryPolicy>,
    cgroup: Option<PathBuf>,
    traced: bool,
}

/// What a program left behind.
#[derive(Clone, Debug)]
pub(crate) struct Output {
    pub(crate) status: ExitStatus,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Launch {
    /// A plain run with an empty environment and without ASLR, so that two runs have
    /// the same addresses.
    pub(crate) fn new(program: impl AsRef<Path>) -> Self {
        Self {
            program: program.as_ref().to_owned(),
            arguments: Vec::new(),
            environment: Vec::new(),
            aslr: false,
            policy: None,
            cgroup: None,
            traced: false,
        }
    }

    pub(crate) fn args<'a>(mut self, arguments: impl IntoIterator<Item = &'a str>) -> Self {
        self.arguments.extend(arguments.into_iter().map(str::to_owned));
        self
    }

    pub(crate) fn env(mut self, name: &str, value: impl Into<String>) -> Self {
        self.environment.push((name.to_owned(), value.into()));
        self
    }

    /// Under the preload.
    pub(crate) fn preload(self) -> Self {
        self.env("LD_PRELOAD", LIBRARY)
    }

    /// With addresses as the kernel chooses them.
    pub(crate) fn aslr(mut self) -> Self {
        self.aslr = true;
        self
    }

    /// With this memory policy from before its start (set_mempolicy(2)).
    pub(crate) fn policy(mut self, policy: MemoryPolicy) -> Self {
        self.policy = Some(policy);
        self
    }

    /// In this control group from before its start.
    pub(crate) fn cgroup(mut self, directory: &Path) -> Self {
        self.cgroup = Some(directory.join("cgroup.procs"));
        self
    }

    /// Stopped at its start, for the starting thread to trace it.
    pub(crate) fn traced(mut self) -> Self {
        self.traced = true;
        self
    }

    /// Runs it to its end.
    pub(crate) fn output(&self) -> Result<Output> {
        self.start()?.finish()
    }

    /// Runs it to its end with what it says in files: no pipe wakes this process meanwhile.
    pub(crate) fn output_alone(&self, stdin: &str) -> Result<Output> {
        let path = |name: &str| Path::new("/tmp").join(name);
        let (stdout, stderr) = (path("stdout"), path("stderr"));
        let mut command = self.command()?;
        command.stdin(File::open(stdin).with_context(|| format!("cannot open {stdin}"))?);
        command.stdout(File::create(&stdout)?).stderr(File::create(&stderr)?);
        let status = command.status();
        let status = status.with_context(|| format!("cannot start {}", self.program.display()))?;
        let text = |path: &Path| std::fs::read_to_string(path);
        Ok(Output { status, stdout: text(&stdout)?, stderr: text(&stderr)? })
    }

    /// Starts it and waits until it says that it can be looked at.
    pub(crate) fn until_ready(&self) -> Result<Running> {
        let mut running = self.start()?;
        running.wait_until_ready()?;
        Ok(running)
    }

    /// Starts it, its stdin held open.
    pub(crate) fn start(&self) -> Result<Running> {
        let mut command = self.command()?;
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", self.program.display()))?;
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Running { child, stdout, text: String::new() })
    }

    fn command(&self) -> Result<Command> {
        let mut command = Command::new(&self.program);
        command.args(&self.arguments).env_clear().envs(self.environment.iter().cloned());
        let join = self.cgroup.as_ref().map(|path| File::options().write(true).open(path));
        let join = join.transpose().context("cannot open the control group")?;
        let (aslr, policy, traced) = (self.aslr, self.policy, self.traced);
        // SAFETY: between fork and exec the closure makes system calls only.
        unsafe {
            command.pre_exec(move || {
                if let Some(mut group) = join.as_ref() {
                    group.write_all(b"0")?;
                }
                if let Some(policy) = policy {
                    policy.set()?;
                }
                if !aslr {
                    nix::sys::personality::set(nix::sys::personality::Persona::ADDR_NO_RANDOMIZE)?;
                }
                if traced {
                    nix::sys::ptrace::traceme()?;
                }
                Ok(())
            });
        }
        Ok(command)
    }
}

/// A program that runs; killed when dropped before its end.
#[derive(Debug)]
pub(crate) struct Running {
    child: Child,
    stdout: BufReader<ChildStdout>,
    text: String,
}

impl Running {
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn wait_until_ready(&mut self) -> Result<()> {
        loop {
            let start = self.text.len();
            if self.stdout.read_line(&mut self.text)? == 0 {
                let mut stderr = String::new();
                if let Some(mut stream) = self.child.stderr.take() {
                    stream.read_to_string(&mut stderr)?;
                }
                let status = self.child.wait()?;
                bail!("ended before it was ready: {status}; {:?}; {stderr:?}", self.text);
            }
            if self.text[start..].trim_end() == "ready" {
                return Ok(());
            }
        }
    }

    /// Writes to its stdin.
    pub(crate) fn say(&mut self, text: &str) -> Result<()> {
        let stdin = self.child.stdin.as_mut().context("its stdin is closed")?;
        Ok(stdin.write_all(text.as_bytes())?)
    }

    pub(crate) fn has_ended(&mut self) -> Result<bool> {
        Ok(self.child.try_wait()?.is_some())
    }

    /// Lets it go on, and waits for its end.
    pub(crate) fn finish(mut self) -> Result<Output> {
        drop(self.child.stdin.take());
        self.stdout.read_to_string(&mut self.text)?;
        let mut stderr = String::new();
        if let Some(mut stream) = self.child.stderr.take() {
            stream.read_to_string(&mut stderr)?;
        }
        let status = self.child.wait()?;
        Ok(Output { status, stdout: std::mem::take(&mut self.text), stderr })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            let _ = self.child.kill();
            let _ = self.child.wait();
        }
    }
}

impl Output {
    /// The lines of the preload.
    pub(crate) fn warnings(&self) -> Vec<&str> {
        self.stderr.lines().filter(|line| line.starts_with(PREFIX)).collect()
    }

    /// Parity: the same status, stdout and (but for the preload's lines) stderr.
    pub(crate) fn same_as(&self, plain: &Self) -> Result<()> {
        let ended = |status: ExitStatus| (status.code(), status.signal());
        ensure!(
            ended(self.status) == ended(plain.status),
            "{} instead of {}; {:?}; {:?}",
            self.status,
            plain.status,
            self.stdout,
            self.stderr
        );
        ensure!(self.stdout == plain.stdout, "stdout {:?} not {:?}", self.stdout, plain.stdout);
        let others = |output: &Self| -> Vec<String> {
            let lines = output.stderr.lines().filter(|line| !line.starts_with(PREFIX));
            lines.map(str::to_owned).collect()
        };
        ensure!(others(self) == others(plain), "stderr {:?} not {:?}", self.stderr, plain.stderr);
        Ok(())
    }

    /// Nothing from the preload.
    pub(crate) fn silent(&self) -> Result<()> {
        ensure!(self.warnings().is_empty(), "said something on success: {:?}", self.warnings());
        Ok(())
    }

    /// One line from the preload, which holds each of `words`.
    pub(crate) fn warned_once(&self, words: &[&str]) -> Result<()> {
        let warnings = self.warnings();
        ensure!(warnings.len() == 1, "one warning expected, got {warnings:?}");
        for word in words {
            ensure!(warnings[0].contains(word), "the warning lacks {word:?}: {}", warnings[0]);
        }
        Ok(())
    }

    /// Exit status 0.
    pub(crate) fn succeeded(&self) -> Result<()> {
        ensure!(self.status.success(), "{}: {:?} {:?}", self.status, self.stdout, self.stderr);
        Ok(())
    }
}
