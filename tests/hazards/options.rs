//! The preload's options, each by what it does to a program.

use crate::scenario::{AMPLE, Backend, Case, Moved};
use anyhow::{Context, Result, ensure};
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use elfremap_tests::run::Run;
use libtest_mimic::Trial;
use std::fs;
use std::os::unix::process::ExitStatusExt;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("options::bad-values-are-named", bad_values),
        trial("options::off-and-other-programs", off),
        trial("options::log", log),
        trial("options::abort-on-failure", abort),
        trial("options::inherit", inherit),
        trial("options::backend-by-class", backend_by_class),
        trial("options::page-size", page_size),
    ]
}

/// The program `plain` with pages enough.
fn plain() -> Result<(Case, Host)> {
    let case = Case::named("plain", &["pie", "bfd"])?;
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    Ok((case, host))
}

/// A value that is not accepted is named in one line, and the default is used.
fn bad_values() -> Result<()> {
    let (case, host) = plain()?;
    for (name, value) in [
        ("ELFREMAP", "maybe"),
        ("ELFREMAP_SEGMENTS", "text,date"),
        ("ELFREMAP_PAGE_SIZE", "3M"),
        ("ELFREMAP_PAGE_SIZE", "huge"),
        ("ELFREMAP_MERGE", "all"),
        ("ELFREMAP_STRATEGY", "jump"),
        ("ELFREMAP_INHERIT", "sometimes"),
        ("ELFREMAP_ON_FAILURE", "explode"),
        ("ELFREMAP_LOG", "loud"),
    ] {
        let run = case.run(Backend::Hugetlb)?.env(name, value);
        let inspection = case
            .inspect(&run, Backend::Hugetlb, Moved::WholeBlocks)
            .with_context(|| format!("{name}={value}"))?;
        inspection.output.warned_once(&[name, value, "accepted"])?;
        host.expect_idle()?;
    }
    let run = case.run(Backend::Auto)?.env("ELFREMAP_BACKEND", "fastest");
    let inspection = case.inspect(&run, Backend::Auto, Moved::All)?;
    inspection.output.warned_once(&["ELFREMAP_BACKEND", "fastest", "hugetlb"])?;
    host.finish()
}

fn off() -> Result<()> {
    let (case, host) = plain()?;
    for (name, value, moved) in [
        ("ELFREMAP", "off", Moved::Nothing),
        ("ELFREMAP", "on", Moved::All),
        ("ELFREMAP_EXE", "other", Moved::Nothing),
        ("ELFREMAP_EXE", "other:pl?in", Moved::All),
        ("ELFREMAP_EXE", "p*", Moved::All),
    ] {
        let run = case.run(Backend::Hugetlb)?.env(name, value);
        let inspection = case
            .inspect(&run, Backend::Hugetlb, moved)
            .with_context(|| format!("{name}={value}"))?;
        inspection.output.silent()?;
    }
    host.finish()
}

/// `info` is one line with the amounts; a file takes it instead of stderr.
fn log() -> Result<()> {
    let (case, mut host) = plain()?;
    // Without ASLR: the second run is to take as many pages as the first.
    let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_LOG", "info").aslr_off();
    let inspection = case.inspect(&run, Backend::Hugetlb, Moved::All)?;
    let pages = format!("{} huge pages", inspection.used);
    inspection.output.warned_once(&["text", "data", "bss", "MB", &pages, "hugetlb", "ms"])?;
    let scratch = tempfile::tempdir()?;
    let file = scratch.path().join("log.%p.txt");
    let running = run.clone().env("ELFREMAP_LOG_FILE", &file).until_ready()?;
    let named = scratch.path().join(format!("log.{}.txt", running.pid()));
    let output = running.finish()?;
    output.same_as(&case.plain)?;
    output.silent()?;
    let text = fs::read_to_string(named)?;
    ensure!(text.lines().count() == 1 && text.contains(&pages), "{text}");
    host.pages(0)?;
    let quiet = case.run(Backend::Hugetlb)?.env("ELFREMAP_LOG", "off").output()?;
    quiet.same_as(&case.plain)?;
    quiet.silent()?;
    host.finish()
}

fn abort() -> Result<()> {
    let (case, mut host) = plain()?;
    let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_ON_FAILURE", "abort");
    let whole = case.inspect(&run, Backend::Hugetlb, Moved::All)?;
    whole.output.silent()?;
    host.pages(0)?;
    let output = run.output()?;
    ensure!(output.status.signal() == Some(libc::SIGABRT), "{output:?}");
    ensure!(output.stdout.is_empty(), "{output:?}");
    output.warned_once(&[])?;
    host.finish()
}

/// Whether the children of a program get the preload, and what else was preloaded.
fn inherit() -> Result<()> {
    let other = crate::build::library(&crate::source::programs_dir().join("samename/maps.c"))?;
    let run = Run::new("/bin/sh").arg("-c").arg("env | grep ^LD_PRELOAD; exit 0");
    for (value, ours) in [("1", true), ("0", false)] {
        let run = run.clone().preload_too(&other).preload()?.env("ELFREMAP_INHERIT", value);
        let output = run.output()?;
        let text = String::from_utf8(output.stdout)?;
        ensure!(text.contains("libelfremap.so") == ours, "ELFREMAP_INHERIT={value}: {text}");
        ensure!(text.contains("libmaps.so"), "another preload was lost: {text}");
    }
    let run = run.preload()?.env("ELFREMAP_INHERIT", "0");
    ensure!(!String::from_utf8(run.output()?.stdout)?.contains("libelfremap.so"));
    Ok(())
}

fn backend_by_class() -> Result<()> {
    let (case, host) = plain()?;
    let list = "text:hugetlb,data:thp,bss:thp";
    let run = case.run(Backend::Auto)?.env("ELFREMAP_BACKEND", list);
    case.inspect(&run, Backend::Auto, Moved::All)?.output.silent()?;
    host.finish()
}

/// A page size is taken only when asked for, and 1 GiB is no size for a small program. (O14)
fn page_size() -> Result<()> {
    let (case, host) = plain()?;
    let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_PAGE_SIZE", "2M");
    case.inspect(&run, Backend::Hugetlb, Moved::All)?.output.silent()?;
    for backend in [Backend::Hugetlb, Backend::Auto, Backend::Thp] {
        let run = case.run(backend)?.env("ELFREMAP_PAGE_SIZE", "1G");
        let inspection = case.inspect(&run, backend, Moved::Nothing)?;
        ensure!(inspection.output.warnings().len() <= 1, "{:?}", inspection.output);
    }
    host.finish()
}
