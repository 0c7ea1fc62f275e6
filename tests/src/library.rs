//! Where the things under test are.

use anyhow::{Context, Result, ensure};
use std::path::{Path, PathBuf};

/// Names the preload library to test, in place of the one beside the test program.
pub const LIBRARY: &str = "ELFREMAP_TEST_LIBRARY";

/// The preload library: [`LIBRARY`] when set, else `libelfremap.so` of the build
/// that the running test belongs to.
///
/// # Errors
/// When there is no such file.
pub fn preload() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os(LIBRARY) {
        return std::path::absolute(&path).context("cannot make the library's path absolute");
    }
    built("libelfremap.so", "elfremap-preload")
}

/// A binary of the project, such as `elfremap-check`, of the same build.
///
/// # Errors
/// When there is no such file.
pub fn tool(name: &str) -> Result<PathBuf> {
    built(name, "elfremap-tools")
}

fn built(name: &str, package: &str) -> Result<PathBuf> {
    let path = profile_dir()?.join(name);
    ensure!(path.is_file(), "no {}: build it with `cargo build -p {package}`", path.display());
    Ok(path)
}

/// The directory of the build's results, such as `target/debug`.
///
/// # Errors
/// When the path of the running test is unknown.
pub fn profile_dir() -> Result<PathBuf> {
    let test = std::env::current_exe().context("cannot read /proc/self/exe")?;
    let dir = test.parent().and_then(Path::parent).context("test lies outside of a target dir")?;
    Ok(dir.to_owned())
}

/// A directory for what tests build and want to find again, under the target directory.
///
/// # Errors
/// When it cannot be made.
pub fn cache_dir(name: &str) -> Result<PathBuf> {
    let target = profile_dir()?;
    let dir = target.parent().unwrap_or(&target).join("tests").join(name);
    std::fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
    Ok(dir)
}

/// This package's directory, where the sources of the test programs are.
#[must_use]
pub fn source_dir() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

/// Copies a program that is to be executed, by cp(1) in a process of its own. What this
/// process has open for writing, a child that another thread forks at that moment has
/// open as well until it executes something, and the kernel refuses to execute such a
/// file ("text file busy").
///
/// # Errors
/// When cp fails.
pub fn copy_program(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<()> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let status = std::process::Command::new("cp")
        .arg("--")
        .args([from, to])
        .status()
        .context("cannot run cp")?;
    ensure!(status.success(), "cannot copy {} to {}", from.display(), to.display());
    Ok(())
}
