//! MySQL's server as Debian's unstable suite builds it, in a root directory of its own with
//! a newer C library: Debian's stable releases have MariaDB only. The project's tests fetch
//! it with the same script.

use anyhow::{Context, Result, ensure};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/real/get-mysql.sh");

/// The server in its root directory.
#[derive(Clone, Debug)]
pub(crate) struct MySql {
    pub root: PathBuf,
    /// The server, as seen from here.
    pub program: PathBuf,
    /// Package, version and architecture.
    pub version: String,
}

impl MySql {
    /// Fetches it into `work` unless it is there, and gives this process mounts of its
    /// own, in which the root directory has /dev, /proc, /sys, and `work` under the same
    /// name. The kernel takes them away with the process, however that ends.
    ///
    /// # Errors
    /// Without root, when it cannot be fetched, or when it does not run here.
    pub(crate) fn get(work: &Path) -> Result<Self> {
        ensure!(nix::unistd::geteuid().is_root(), "mysqld needs root, for chroot");
        let work = work.canonicalize()?;
        let root = work.join("mysql");
        let fetched = Command::new(SCRIPT).arg(&root).stdin(Stdio::null()).output();
        let fetched = fetched.with_context(|| format!("cannot run {SCRIPT}"))?;
        let said = String::from_utf8_lossy(&fetched.stderr);
        ensure!(
            fetched.status.success(),
            "cannot get MySQL from Debian's unstable suite: {}",
            said.split_whitespace().collect::<Vec<_>>().join(" ")
        );
        let version = String::from_utf8_lossy(&fetched.stdout).trim().to_owned();
        enter_own_mounts(&root, &work)?;
        Ok(Self { program: root.join("usr/sbin/mysqld"), root, version })
    }
}

fn enter_own_mounts(root: &Path, work: &Path) -> Result<()> {
    let none = None::<&str>;
    unshare(CloneFlags::CLONE_NEWNS).context("cannot have mounts of our own")?;
    mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)
        .context("cannot make the mounts private")?;
    let whole = MsFlags::MS_BIND | MsFlags::MS_REC;
    // `work` first, and by itself: the root directory lies in it, with the mounts that follow.
    for (what, flags) in [
        (work, MsFlags::MS_BIND),
        (Path::new("/dev"), whole),
        (Path::new("/proc"), whole),
        (Path::new("/sys"), whole),
    ] {
        let to = root.join(what.strip_prefix("/").unwrap_or(what));
        fs::create_dir_all(&to).with_context(|| format!("cannot create {}", to.display()))?;
        mount(Some(what), &to, none, flags, none)
            .with_context(|| format!("cannot mount {} in {}", what.display(), root.display()))?;
    }
    Ok(())
}
