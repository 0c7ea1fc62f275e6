//! What all programs here share: a directory, the library in it, the list of what
//! was found on huge pages.

use crate::library;
use crate::run::{Output, PREFIX, Run, Running};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs::{self, Permissions};
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::thread::sleep;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// The number of the user `nobody`: the servers refuse to run as root, and should not.
const NOBODY: u32 = 65534;

/// The tests' common ground. Its directory goes when it is dropped.
#[derive(Debug)]
pub struct Lab {
    dir: TempDir,
    user: Option<u32>,
    rows: Mutex<Vec<String>>,
}

impl Lab {
    /// Makes the directory. The path is short, for the sake of unix sockets (108 bytes).
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn new() -> Result<Self> {
        let dir = tempfile::Builder::new().prefix("elfremap-real-").tempdir_in("/tmp")?;
        fs::set_permissions(dir.path(), Permissions::from_mode(0o755))?;
        let user = nix::unistd::geteuid().is_root().then_some(NOBODY);
        Ok(Self { dir, user, rows: Mutex::new(Vec::new()) })
    }

    /// The directory; other users may pass through it.
    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    /// The user that servers run as; none when the tests are an ordinary user's.
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// A run of `program` as that user.
    pub fn run(&self, program: impl AsRef<Path>) -> Run {
        let run = Run::new(program).env("HOME", self.path()).env("TZ", "UTC").dies_with_us();
        match self.user {
            Some(user) => run.user(user),
            None => run,
        }
    }

    /// A copy of the preload library that every user can read.
    ///
    /// # Errors
    /// When the library has not been built, or cannot be copied.
    pub fn library(&self) -> Result<PathBuf> {
        let copy = self.path().join("libelfremap.so");
        if !copy.exists() {
            let from = library::preload()?;
            fs::copy(&from, &copy).with_context(|| format!("cannot copy {}", from.display()))?;
            fs::set_permissions(&copy, Permissions::from_mode(0o755))?;
        }
        Ok(copy)
    }

    /// An empty directory of that user's, made anew.
    ///
    /// # Errors
    /// When it cannot be made.
    pub fn fresh(&self, name: &str) -> Result<PathBuf> {
        let dir = self.path().join(name);
        self.remove(&dir)?;
        fs::create_dir(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        fs::set_permissions(&dir, Permissions::from_mode(0o700))?;
        chown(&dir, self.user, self.user)?;
        Ok(dir)
    }

    /// Removes a directory of [`Lab::fresh`], if it is there.
    ///
    /// # Errors
    /// When it is there and cannot be removed.
    pub fn remove(&self, dir: &Path) -> Result<()> {
        match fs::remove_dir_all(dir) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", dir.display()))
            }
            _ => Ok(()),
        }
    }

    /// Writes `text` to a file that every user can read.
    ///
    /// # Errors
    /// When it cannot be written.
    pub fn file(&self, name: &str, text: impl AsRef<[u8]>) -> Result<PathBuf> {
        let path = self.path().join(name);
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        fs::set_permissions(&path, Permissions::from_mode(0o644))?;
        Ok(path)
    }

    /// Adds a line to the list that is printed at the end.
    pub fn note(&self, row: String) {
        if let Ok(mut rows) = self.rows.lock() {
            rows.push(row);
        }
    }

    /// Prints the list.
    pub fn print(&self) {
        let Ok(rows) = self.rows.lock() else { return };
        for row in rows.iter() {
            println!("{row}");
        }
    }
}

/// What a helper program, run plain, prints.
///
/// # Errors
/// When it cannot be run or fails.
pub fn helper(run: &Run) -> Result<String> {
    let output = run.output()?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    let program = run.program().display();
    ensure!(output.status.success(), "{program} ended with {}: {stderr}", output.status);
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

/// Sets the owner of `dir` and of everything in it.
///
/// # Errors
/// When something in it cannot be changed.
pub fn chown_all(dir: &Path, user: Option<u32>) -> Result<()> {
    chown(dir, user, user).with_context(|| format!("cannot chown {}", dir.display()))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            chown_all(&entry.path(), user)?;
        } else {
            std::os::unix::fs::lchown(entry.path(), user, user)?;
        }
    }
    Ok(())
}

/// What a user of a program sees of a run: stdout, stderr without the library's own
/// lines, status.
pub fn seen(output: &Output) -> String {
    let stderr = String::from_utf8_lossy(&output.stderr);
    let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
    for line in stderr.lines().filter(|line| !line.starts_with(PREFIX)) {
        text += line;
        text.push('\n');
    }
    text + &format!("{}\n", output.status)
}

/// Waits until a server accepts connections to `socket`.
///
/// # Errors
/// When it ends before that, or takes too long; with its log.
pub fn wait_for_socket(socket: &Path, server: &Running, log: &Path) -> Result<()> {
    let answers = wait_until(|| {
        let gone = fs::read_link(format!("/proc/{}/exe", server.pid())).is_err();
        ensure!(!gone, "the server has ended");
        Ok(UnixStream::connect(socket).is_ok())
    });
    answers.with_context(|| fs::read_to_string(log).unwrap_or_default())
}

/// Waits until `condition` holds.
///
/// # Errors
/// When it does not within 30 seconds, or returns an error.
pub fn wait_until(mut condition: impl FnMut() -> Result<bool>) -> Result<()> {
    let end = Instant::now() + Duration::from_secs(30);
    while !condition()? {
        ensure!(Instant::now() < end, "waited in vain");
        sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// Sends a signal to a program that runs.
///
/// # Errors
/// When it is gone.
pub fn signal(running: &Running, signal: Signal) -> Result<()> {
    kill(Pid::from_raw(i32::try_from(running.pid())?), signal)?;
    Ok(())
}
