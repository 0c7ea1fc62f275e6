//! Programs that run to their end by themselves: interpreters, compilers, a debugger.

use crate::entry::at_entry;
use crate::mode::Mode;
use crate::subject::{Session, Subject};
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::{Lab, helper, seen};
use elfremap_tests::library;
use elfremap_tests::run::Run;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// One of the files in `real/data`.
fn data(name: &str) -> PathBuf {
    library::source_dir().join("real/data").join(name)
}

/// A program, run by `run` to its end; `after` adds to what its user sees, and takes
/// out what depends on the time of day.
fn subject(
    lab: &Arc<Lab>,
    name: &'static str,
    program: &Path,
    run: impl Fn(&Lab) -> Result<Run> + Send + Sync + 'static,
    after: impl Fn(&Lab, String) -> Result<String> + Send + Sync + 'static,
) -> Result<Subject> {
    // cc1 does not say which version it is, its driver does.
    let version = Run::new(if name == "cc1" { Path::new("gcc") } else { program });
    let version = helper(&version.arg("--version"))?;
    println!("{name}: {}", version.lines().next().unwrap_or_default());
    let image = Image::read(program)?;
    let copy = image.clone();
    let scenario = Box::new(move |lab: &Lab, mode: &Mode| {
        let moment = at_entry(mode.apply(lab, run(lab)?)?, &image)?;
        let output = mode.apply(lab, run(lab)?)?.output()?;
        let transcript = after(lab, seen(&output))?;
        // The plain run says what is right, but it must not be a failure.
        ensure!(output.status.success(), "ended with {}: {transcript}", output.status);
        Ok(Session { transcript, warnings: output.warnings(), moments: vec![moment] })
    });
    Ok(Subject::new(name, Arc::clone(lab), copy, scenario))
}

/// A program's path as the shell finds it, links followed.
fn which(name: &str) -> Result<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
    Ok(found.with_context(|| format!("{name} is not installed"))?.canonicalize()?)
}

/// node: generated code, threads, a child process that runs node again.
///
/// # Errors
/// When it is not installed.
pub(crate) fn node(lab: &Arc<Lab>) -> Result<Subject> {
    let program = which("node")?;
    let run = {
        let program = program.clone();
        move |lab: &Lab| Ok(lab.run(&program).arg(data("compute.js")))
    };
    subject(lab, "node", &program, run, |_, text| Ok(text))
}

/// PHP, its command line form.
///
/// # Errors
/// When it is not installed.
pub(crate) fn php(lab: &Arc<Lab>) -> Result<Subject> {
    let program = which("php")?;
    let run = {
        let program = program.clone();
        move |lab: &Lab| Ok(lab.run(&program).arg("-n").arg(data("compute.php")))
    };
    subject(lab, "php", &program, run, |_, text| Ok(text))
}

/// The system's Python runs a part of its own tests.
///
/// # Errors
/// When it is not installed.
pub(crate) fn python(lab: &Arc<Lab>) -> Result<Subject> {
    /// Each within a second or two; with threads, forks, signals, mapped memory, C modules.
    const MODULES: &[&str] = &[
        "test.test_json",
        "test.test_re",
        "test.test_struct",
        "test.test_generators",
        "test.test_mmap",
        "test.test_threading_local",
        "test.test_fork1.ForkTest.test_threaded_import_lock_fork",
        "test.test_fork1.ForkTest.test_nested_import_lock_fork",
        "test.test_zlib",
        "test.test_ctypes",
        "test.test_posix",
    ];
    let program =
        Path::new("/usr/bin/python3").canonicalize().context("python3 is not installed")?;
    let python = program.clone();
    let run = move |lab: &Lab| {
        let dir = lab.fresh("python")?;
        Ok(lab.run(&python).args(["-E", "-s", "-m", "unittest", "-v"]).args(MODULES).directory(dir))
    };
    subject(lab, "python3", &program, run, |_, text| {
        Ok(text
            .lines()
            .map(|line| match line.split_once(" tests in ") {
                Some((tests, _)) => format!("{tests} tests\n"),
                None => format!("{line}\n"),
            })
            .collect())
    })
}

/// gdb stops a program, shows its stack and goes on.
///
/// # Errors
/// When it or the C compiler is not installed.
pub(crate) fn gdb(lab: &Arc<Lab>) -> Result<Subject> {
    let program = which("gdb")?;
    let debugged = lab.path().join("debugged");
    helper(
        &Run::new("cc")
            .args(["-g", "-O0", "-pthread", "-o"])
            .arg(&debugged)
            .arg(data("work.c"))
            .args(["-lm"]),
    )?;
    let gdb = program.clone();
    let run = move |lab: &Lab| {
        Ok(lab
            .run(&gdb)
            .args(["-nx", "-batch", "-x"])
            .arg(data("gdb.commands"))
            .arg(&debugged)
            .directory("/"))
    };
    subject(lab, "gdb", &program, run, |_, text| {
        // Ids of threads and processes differ from run to run.
        Ok(text
            .lines()
            .filter(|line| !line.contains("(LWP ") && !line.contains("(process "))
            .map(|line| format!("{line}\n"))
            .collect())
    })
}

/// clang: the compiler is in libLLVM and libclang-cpp, the program itself is small.
///
/// # Errors
/// When it is not installed.
pub(crate) fn clang(lab: &Arc<Lab>) -> Result<Subject> {
    let program = which("clang")?;
    let clang = program.clone();
    let run = move |lab: &Lab| {
        let dir = lab.fresh("clang")?;
        Ok(lab.run(&clang).args(["-O2", "-c", "-o", "work.o"]).arg(data("work.c")).directory(dir))
    };
    subject(lab, "clang", &program, run, |lab, text| {
        with_file(text, &lab.path().join("clang/work.o"))
    })
}

/// The C compiler proper of GCC.
///
/// # Errors
/// When it is not installed.
pub(crate) fn cc1(lab: &Arc<Lab>) -> Result<Subject> {
    let program = PathBuf::from(helper(&Run::new("gcc").arg("-print-prog-name=cc1"))?);
    let preprocessed =
        lab.file("work.i", helper(&Run::new("gcc").arg("-E").arg(data("work.c")))?)?;
    let cc1 = program.clone();
    let run = move |lab: &Lab| {
        let dir = lab.fresh("cc1")?;
        Ok(lab.run(&cc1).args(["-quiet", "-O2", "-o", "work.s"]).arg(&preprocessed).directory(dir))
    };
    subject(lab, "cc1", &program, run, |lab, text| with_file(text, &lab.path().join("cc1/work.s")))
}

fn with_file(text: String, file: &Path) -> Result<String> {
    let bytes = fs::read(file).with_context(|| format!("{text}: no {}", file.display()))?;
    Ok(text + &bytes.escape_ascii().to_string())
}
