//! Interpreters that fork as their script says.

use crate::{Look, Setting};
use anyhow::{Context, Result};
use elfremap_tests::lab::{Lab, seen};
use elfremap_tests::library;
use std::path::{Path, PathBuf};

pub(crate) fn bash(_: &Lab) -> Result<PathBuf> {
    Path::new("/bin/bash").canonicalize().context("bash is not installed")
}

pub(crate) fn python(_: &Lab) -> Result<PathBuf> {
    Path::new("/usr/bin/python3").canonicalize().context("python3 is not installed")
}

pub(crate) fn shell(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    script(setting, &["--norc"], "shell.bash", &[], look)
}

pub(crate) fn multiprocessing(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    script(setting, &["-I", "-S"], "multi.py", &[], look)
}

/// The same with a parent whose other threads write while it forks.
pub(crate) fn multiprocessing_threads(setting: &Setting<'_>, look: Look<'_>) -> Result<String> {
    script(setting, &["-I", "-S"], "multi.py", &["threads"], look)
}

/// Runs a script that writes `ready` and reads a line, and again `checked` at its end.
fn script(
    setting: &Setting<'_>,
    options: &[&str],
    name: &str,
    arguments: &[&str],
    look: Look<'_>,
) -> Result<String> {
    let script = library::source_dir().join("forks").join(name);
    // The user of the tests may not be able to read it where it is.
    let script = setting.lab.file(name, std::fs::read(script)?)?;
    let run = setting.run()?.args(options).arg(script).args(arguments).directory("/");
    let mut running = run.until_ready()?;
    look(running.pid())?;
    running.write("go\n")?;
    running.wait_for_line("checked")?;
    look(running.pid())?;
    running.write("end\n")?;
    Ok(seen(&running.finish()?))
}
