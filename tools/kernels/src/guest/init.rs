//! What an init does: mounts, the kernel's command line, the end.

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use std::fs;

/// Where the unified cgroup hierarchy is.
pub(crate) const CGROUPS: &str = "/sys/fs/cgroup";

pub(crate) fn mount_all() -> Result<()> {
    for (kind, place) in [
        ("proc", "/proc"),
        ("sysfs", "/sys"),
        ("devtmpfs", "/dev"),
        ("tmpfs", "/tmp"),
        ("tmpfs", "/run"),
        ("cgroup2", CGROUPS),
    ] {
        fs::create_dir_all(place).with_context(|| format!("cannot make {place}"))?;
        mount(Some(kind), place, Some(kind), MsFlags::empty(), None::<&str>)
            .with_context(|| format!("cannot mount {place}"))?;
    }
    for (file, value) in [
        ("/sys/fs/cgroup/cgroup.subtree_control", "+cpuset +hugetlb"),
        // What a distribution for servers sets, so that a plain run has no huge pages.
        ("/sys/kernel/mm/transparent_hugepage/enabled", "madvise"),
        // A core dump would only take time.
        ("/proc/sys/kernel/core_pattern", "|/nothing"),
    ] {
        fs::write(file, value).with_context(|| format!("cannot write {value} to {file}"))?;
    }
    Ok(())
}

/// The rest of the word of the kernel's command line that begins with `prefix`.
pub(crate) fn argument(prefix: &str) -> Result<Option<String>> {
    let line = fs::read_to_string("/proc/cmdline").context("cannot read /proc/cmdline")?;
    Ok(line.split_whitespace().find_map(|word| word.strip_prefix(prefix)).map(str::to_owned))
}

/// No line in the kernel's log that tells of a bug, or of a program killed for want of
/// huge pages.
pub(crate) fn kernel_is_content() -> Result<()> {
    // SYSLOG_ACTION_READ_ALL of syslog(2).
    const READ_ALL: i32 = 3;
    let mut text = vec![0u8; 1 << 20];
    let room = i32::try_from(text.len())?;
    // SAFETY: the kernel writes at most `room` bytes, for which there is room.
    let got = unsafe { libc::syscall(libc::SYS_syslog, READ_ALL, text.as_mut_ptr(), room) };
    text.truncate(usize::try_from(got).context("cannot read the kernel's log")?);
    let text = String::from_utf8_lossy(&text);
    let complaint = ["BUG:", "WARNING:", "Oops", "inadequate", "hugepage pool", "Bad rss-counter"];
    let lines: Vec<&str> =
        text.lines().filter(|line| complaint.iter().any(|word| line.contains(word))).collect();
    ensure!(lines.is_empty(), "the kernel's log: {}", lines.join(" / "));
    Ok(())
}

pub(crate) fn power_off() -> ! {
    let _ = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_POWER_OFF);
    loop {
        std::thread::park();
    }
}
