//! Boots a guest under QEMU and reads its reports.

use crate::machine::{Arch, Machine};
use anyhow::{Context, Result, bail};
use elfremap_machines::line::Line;
use std::fs::{self, File};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// What a guest said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) facts: Vec<(String, String)>,
    /// Group, name, failure.
    pub(crate) checks: Vec<(String, String, Option<String>)>,
    /// Why the guest as a whole failed.
    pub(crate) failure: Option<String>,
    /// The last lines of its console that are no reports, when it failed as a whole: a
    /// panic of its kernel, for example.
    pub(crate) console: Vec<String>,
    /// It ended by itself, before its checks did.
    pub(crate) vanished: bool,
    pub(crate) seconds: u64,
}

/// How many lines of a failed guest's console are shown.
const CONSOLE_LINES: usize = 60;

/// Killed when dropped.
struct Guest(Child);

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// What a machine boots.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Boot<'a> {
    pub(crate) kernel: &'a Path,
    /// The root file system: one archive, or several one after the other.
    pub(crate) root: &'a Path,
    /// Groups of checks; all when `None`.
    pub(crate) groups: Option<&'a str>,
    /// More words for the kernel's command line.
    pub(crate) arguments: &'a str,
    /// A plugin of QEMU's, with its arguments: the machine then has one processor and one node,
    /// and its processors' threads are one, so that each run is like the last.
    pub(crate) plugin: Option<&'a str>,
    /// Gets the console.
    pub(crate) log: &'a Path,
}

fn command(machine: &Machine, boot: &Boot<'_>) -> Command {
    let Boot { kernel, root, groups, arguments, plugin, .. } = *boot;
    let mut command = Command::new(format!("qemu-system-{}", machine.arch.name()));
    // Never a hardware accelerator: /dev/kvm may be there and not work.
    command.args(["-cpu", machine.cpu]);
    command.args(["-M", if machine.arch == Arch::X86_64 { "q35" } else { "virt" }]);
    command.args(["-m", &(2 * machine.node_memory).to_string()]);
    if let Some(plugin) = plugin {
        command.args(["-accel", "tcg,thread=single", "-smp", "1", "-plugin", plugin]);
    } else {
        command.args(["-accel", "tcg,thread=multi", "-smp", "2,sockets=2"]);
        for node in 0..2 {
            let memory = machine.node_memory;
            command.arg("-object").arg(format!("memory-backend-ram,id=m{node},size={memory}M"));
            command.arg("-numa").arg(format!("node,nodeid={node},memdev=m{node},cpus={node}"));
        }
    }
    command.args(["-nodefaults", "-no-user-config", "-no-reboot", "-display", "none"]);
    command.args(["-monitor", "none", "-serial", "stdio"]);
    command.arg("-kernel").arg(kernel).arg("-initrd").arg(root);
    let mut line = format!("console={} panic=-1 quiet loglevel=1", machine.arch.console());
    line += &match groups {
        Some(groups) => format!(" elfremap.groups={groups} {arguments}"),
        None => format!(" elfremap.skip={} {arguments}", machine.skip),
    };
    command.arg("-append").arg(line);
    command
}

/// Boots the machine and waits for its end. A machine that goes away in the middle of a check
/// (an emulator or a kernel that fails; a check itself can only fail, or take too long) is
/// booted once more, and its end is told in any case.
pub(crate) fn run(machine: &Machine, boot: &Boot<'_>) -> Result<Outcome> {
    let outcome = run_once(machine, boot)?;
    if !outcome.vanished {
        return Ok(outcome);
    }
    let console = outcome.console.iter().map(|line| format!("  | {line}\n")).collect::<String>();
    let last = outcome.checks.last().map_or("", |(_, name, _)| name);
    let why = outcome.failure.unwrap_or_default();
    eprint!("{}: {why}, after \"{last}\"; booted once more\n{console}", machine.name);
    run_once(machine, boot)
}

fn run_once(machine: &Machine, boot: &Boot<'_>) -> Result<Outcome> {
    let start = Instant::now();
    let log = boot.log;
    let console = File::create(log).with_context(|| format!("cannot make {}", log.display()))?;
    let mut command = command(machine, boot);
    command.stdin(Stdio::null()).stdout(console.try_clone()?).stderr(console);
    // SAFETY: the closure makes one system call. The thread that starts the guest
    // waits for it, so the guest is gone when this tool is.
    unsafe {
        command.pre_exec(|| {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL);
            Ok(())
        });
    }
    let name = command.get_program().to_string_lossy().into_owned();
    let mut guest = Guest(command.spawn().with_context(|| format!("cannot start {name}"))?);
    let limit = Duration::from_secs(4 * machine.quiet_seconds);
    let mut failure = None;
    let mut by_itself = true;
    loop {
        if let Some(status) = guest.0.try_wait()? {
            if !status.success() {
                failure = Some(format!("{name}: {status}"));
            }
            break;
        }
        if start.elapsed() > limit {
            failure = Some(format!("still running after {} s", limit.as_secs()));
            by_itself = false;
            break;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(guest);
    let text = String::from_utf8_lossy(&fs::read(log)?).into_owned();
    let mut outcome = Outcome { failure, seconds: start.elapsed().as_secs(), ..Outcome::default() };
    let mut ended = false;
    for line in text.lines().filter_map(Line::parse) {
        match line {
            Line::Fact(name, value) => outcome.facts.push((name, value)),
            Line::Check { group, name, failure } => outcome.checks.push((group, name, failure)),
            Line::End => ended = true,
        }
    }
    if !ended && outcome.failure.is_none() {
        outcome.failure = Some("ended before its checks did".to_owned());
    }
    outcome.vanished = by_itself && !ended;
    if outcome.failure.is_some() {
        outcome.console = last_lines(&text);
    }
    Ok(outcome)
}

fn last_lines(console: &str) -> Vec<String> {
    let lines: Vec<&str> = console
        .lines()
        .map(str::trim_end)
        .filter(|line| !line.is_empty() && Line::parse(line).is_none())
        .collect();
    let first = lines.len().saturating_sub(CONSOLE_LINES);
    lines[first..].iter().map(|&line| line.to_owned()).collect()
}

impl Outcome {
    /// The value of a fact; empty when the guest did not come that far.
    pub(crate) fn fact(&self, name: &str) -> &str {
        self.facts.iter().find(|(known, _)| known == name).map_or("", |(_, value)| value)
    }

    /// Takes in what another guest of the same machine said.
    pub(crate) fn add(&mut self, other: Self) {
        if self.facts.is_empty() {
            self.facts = other.facts;
        }
        self.checks.extend(other.checks);
        self.failure = self.failure.take().or(other.failure);
        self.console.extend(other.console);
        self.seconds += other.seconds;
    }

    /// Passed and failed checks of a group; all when `None`.
    pub(crate) fn count(&self, group: Option<&str>) -> (usize, usize) {
        let checks = self.checks.iter().filter(|(g, ..)| group.is_none_or(|group| g == group));
        let (failed, passed): (Vec<_>, Vec<_>) = checks.partition(|(.., why)| why.is_some());
        (passed.len(), failed.len())
    }

    pub(crate) fn is_success(&self) -> bool {
        let (passed, failed) = self.count(None);
        self.failure.is_none() && failed == 0 && passed > 0
    }
}

/// The kernel image of a machine, fetched by the script beside this tool's sources.
pub(crate) fn kernel(
    project: &Path,
    cache: &Path,
    machine: &Machine,
) -> Result<std::path::PathBuf> {
    fs::create_dir_all(cache)?;
    let output = Command::new(project.join("tools/kernels/get-kernel.sh"))
        .arg(cache)
        .args([machine.arch.debian(), machine.package])
        .args(machine.suites)
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run get-kernel.sh")?;
    let path = String::from_utf8_lossy(&output.stdout).trim().to_owned();
    if !output.status.success() || path.is_empty() {
        bail!("cannot fetch the kernel of {}", machine.name);
    }
    Ok(path.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_console_is_shown_without_its_reports_and_from_its_end() {
        let mut console = String::from("early\r\n\r\n@elfremap pass | NUMA | x\n");
        (1..=CONSOLE_LINES).for_each(|line| console += &format!("line {line}\r\n"));
        let lines = last_lines(&console);
        assert_eq!(lines.len(), CONSOLE_LINES);
        assert_eq!(lines.first().map(String::as_str), Some("line 1"));
        assert_eq!(last_lines("early\r\n@elfremap end\n"), ["early"]);
    }
}
