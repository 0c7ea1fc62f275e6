//! What the library does after the start. Forks: with not a page to spare, parent and
//! children write all of data and bss, and nobody dies; the parent keeps its huge pages.
//! The program's own calls on its memory: they do what they do on small pages.

use anyhow::{Context, Result, ensure};
use elfremap_tests::image::{Class, Image};
use elfremap_tests::library::{cache_dir, source_dir};
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::{Output, Run, Running};
use elfremap_tests::smaps::Snapshot;
use libtest_mimic::Arguments;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn main() {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let trials = vec![
        trial("fork::single_threaded", single_threaded),
        trial("fork::with_writing_threads", with_writing_threads),
        trial("fork::unguarded_children_die", unguarded_children_die),
        trial("fork::thp_needs_no_guard", thp_needs_no_guard),
        trial("fork::code_in_a_file", code_in_a_file),
        trial("fork::fails_when_the_child_cannot_have_its_pages", lost_children),
        trial("calls::hugetlb", || calls("hugetlb", 0)),
        trial("calls::hugetlb_with_writing_threads", || calls("hugetlb", 8)),
        trial("calls::auto", || calls("auto", 0)),
        trial("calls::auto_with_writing_threads", || calls("auto", 8)),
        trial("calls::thp_with_writing_threads", || calls("thp", 8)),
        trial("calls::code_in_a_file", calls_on_code_in_a_file),
        trial("calls::threads_that_cannot_wait", threads_that_cannot_wait),
        trial("calls::no_threads_no_userfaultfd", no_threads_no_userfaultfd),
        trial("calls::other_wrappers_are_called", other_wrappers_are_called),
        trial("start::attributes_set_by_a_library", attributes_set_by_a_library),
        trial("start::process_that_shares_memory", process_that_shares_memory),
        trial("start::leaves_ld_preload_by_any_name", leaves_ld_preload_by_any_name),
    ];
    libtest_mimic::run(&arguments, trials).exit();
}

/// Builds `guards/NAME.c` with these flags as `target`.
fn build(name: &str, target: &str, flags: &[&str]) -> Result<PathBuf> {
    let source = source_dir().join("guards").join(format!("{name}.c"));
    let program = cache_dir("guards")?.join(target);
    let time = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).ok();
    if time(&program) < time(&source).max(time(&source.with_file_name("pages.h"))) {
        let status = Command::new("cc")
            .args(["-O1", "-pthread"])
            .args(flags)
            .arg("-o")
            .arg(&program)
            .arg(&source)
            .args(["-lutil", "-ldl"])
            .status()
            .context("cannot run cc")?;
        ensure!(status.success(), "cc failed for {}", source.display());
    }
    Ok(program)
}

fn program() -> Result<PathBuf> {
    build("forks", "forks", &[])
}

fn forks(count: u32, threads: u32, backend: &str) -> Result<Run> {
    Run::new(program()?)
        .args([count.to_string(), threads.to_string()])
        .env("ELFREMAP_BACKEND", backend)
        .aslr_off()
        .time_limit(Duration::from_secs(300))
        .preload()
}

/// Sets the pool to just what the program takes at its start.
fn exact_pool(host: &mut Host, run: &Run) -> Result<u64> {
    host.pages(40)?;
    let mut running = run.start_waiting()?;
    running.wait_for_line("ready")?;
    let used = Counters::read()?.used();
    running.kill()?;
    ensure!(used >= 4, "only {used} pages taken");
    host.pages(used)?;
    Ok(used)
}

/// Bytes of data and bss on pages of the pool.
fn writable_on_pool(running: &Running, program: &Path) -> Result<u64> {
    let image = Image::read(program)?;
    let snapshot = Snapshot::take(running.pid(), &image)?;
    let coverage = snapshot.coverage(&image);
    Ok([Class::Data, Class::Bss].iter().filter_map(|c| coverage.get(c)).map(|c| c.hugetlb).sum())
}

fn run_with_empty_pool(run: &Run) -> Result<Output> {
    let mut host = Host::lock()?;
    exact_pool(&mut host, run)?;
    let mut running = run.start_waiting()?;
    running.wait_for_line("ready")?;
    ensure!(Counters::read()?.free == 0, "the pool is not empty");
    let before = writable_on_pool(&running, run.program())?;
    ensure!(before >= 6 << 20, "only {before} bytes of data and bss on the pool");
    running.write("go\n")?;
    running.wait_for_line("checked")?;
    let after = writable_on_pool(&running, run.program())?;
    ensure!(after == before, "{after} of {before} bytes are left on the pool");
    running.write("end\n")?;
    let output = running.finish()?;
    host.finish()?;
    Ok(output)
}

fn passed(output: &Output) -> Result<()> {
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success() && text.contains("bad 0"), "{output:?}");
    Ok(())
}

fn single_threaded() -> Result<()> {
    passed(&run_with_empty_pool(&forks(1000, 0, "hugetlb")?)?)
}

fn with_writing_threads() -> Result<()> {
    passed(&run_with_empty_pool(&forks(1000, 8, "hugetlb")?)?)
}

/// A server that was started by root, has threads, and has given up its privileges: nothing makes
/// the threads wait. Their writes take pages away from a child that is still copying: that fork
/// fails, with ENOMEM, and the others are as ever.
fn lost_children() -> Result<()> {
    let run = Run::new(build("lost", "lost", &[])?).arg("200").env("ELFREMAP_BACKEND", "hugetlb");
    let run = run.aslr_off();
    let mut host = Host::lock()?;
    host.unprivileged_userfaultfd(false)?;
    host.pages(AMPLE)?;
    let mut plain = run.start_waiting()?;
    plain.write("go\n")?;
    let plain = plain.finish()?;
    ensure!(plain.status.success(), "the plain run: {plain:?}");
    let run = run.preload()?;
    let session = |empty: bool| -> Result<u32> {
        let mut running = run.start_waiting()?;
        running.wait_for_line("ready")?;
        ensure!(!empty || Counters::read()?.free == 0, "the pool is not empty");
        let moved = writable_on_pool(&running, run.program())?;
        ensure!(moved >= 6 << 20, "only {moved} bytes of data and bss on the pool");
        running.write("go\n")?;
        let output = running.finish()?;
        passed(&output)?;
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        Ok(text.trim().strip_prefix("failed ").context("no count")?.parse()?)
    };
    let failed = session(false)?;
    ensure!(failed == 0, "{failed} forks failed with pages to spare");
    exact_pool(&mut host, &run)?;
    ensure!(session(true)? > 0, "no fork failed: nothing was lost");
    host.finish()
}

/// What the guard is for: without it the same run ends children by SIGBUS.
fn unguarded_children_die() -> Result<()> {
    let mut host = Host::lock()?;
    let run = forks(10, 0, "hugetlb")?.env("ELFREMAP_FORK", "off");
    exact_pool(&mut host, &run)?;
    let mut running = run.start_waiting()?;
    running.wait_for_line("ready")?;
    running.write("go\nend\n")?;
    let output = running.finish()?;
    ensure!(!output.status.success(), "the guard has nothing to do: {output:?}");
    host.finish()
}

fn thp_needs_no_guard() -> Result<()> {
    let run = forks(100, 0, "thp")?;
    let mut running = run.start_waiting()?;
    running.wait_for_line("ready")?;
    running.write("go\nend\n")?;
    passed(&running.finish()?)
}

/// Where code may not be written first, it lies in a file on the pool.
fn code_in_a_file() -> Result<()> {
    passed(&run_with_empty_pool(&forks(100, 0, "hugetlb")?.through(launcher()?, &["mdwe"]))?)
}

/// `calls` built with threads or without any use of them.
fn calls_program(threads: bool) -> Result<PathBuf> {
    if threads {
        build("calls", "calls-threads", &["-DTHREADS"])
    } else {
        build("calls", "calls", &[])
    }
}

/// From its start to its end; what it has on the pool before and after its calls.
fn session(run: &Run) -> Result<(Output, u64, u64)> {
    let mut running = run.start_waiting()?;
    running.wait_for_line("ready")?;
    let before = writable_on_pool(&running, run.program())?;
    running.write("go\n")?;
    running.wait_for_line("checked")?;
    let after = writable_on_pool(&running, run.program())?;
    running.write("end\n")?;
    Ok((running.finish()?, before, after))
}

/// More pages than the program has blocks.
const AMPLE: u64 = 40;

fn calls(backend: &str, threads: u32) -> Result<()> {
    let program = Run::new(calls_program(true)?).arg(threads.to_string());
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (plain, ..) = session(&program)?;
    ensure!(plain.status.success(), "the plain run: {plain:?}");
    let (output, before, after) = session(&program.env("ELFREMAP_BACKEND", backend).preload()?)?;
    output.same_as(&plain)?;
    output.silent()?;
    if backend == "hugetlb" {
        // Only the blocks that it worked on have left the pool: a few of eight or so.
        ensure!(before >= 12 << 20, "only {before} bytes of data and bss on the pool");
        ensure!(after < before && after > 0, "{after} of {before} bytes are left on the pool");
    } else {
        ensure!(before == 0, "{before} bytes of data and bss on the pool");
    }
    host.finish()
}

fn calls_on_code_in_a_file() -> Result<()> {
    let run = Run::new(calls_program(true)?).arg("2").env("ELFREMAP_BACKEND", "hugetlb");
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (plain, ..) = session(&run.clone().through(launcher()?, &["mdwe"]))?;
    ensure!(plain.status.success(), "the plain run: {plain:?}");
    let (output, before, after) = session(&run.preload()?.through(launcher()?, &["mdwe"]))?;
    output.same_as(&plain)?;
    output.silent()?;
    ensure!(after < before && after > 0, "{after} of {before} bytes are left on the pool");
    host.finish()
}

/// The kernel has nothing to make threads wait: data and bss go to THP, and it says so.
fn threads_that_cannot_wait() -> Result<()> {
    let program = Run::new(calls_program(true)?).arg("8");
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (plain, ..) = session(&program)?;
    let run = program.env("ELFREMAP_BACKEND", "hugetlb").preload()?;
    let (output, before, _) = session(&run.through(launcher()?, &["deny=ioctl:EPERM"]))?;
    output.same_as(&plain)?;
    output.warned_once(&["data and bss", "userfaultfd", "EPERM", "hint: sysctl"])?;
    ensure!(before == 0, "{before} bytes of data and bss on the pool");
    host.finish()
}

/// A program that cannot have threads needs nothing to make them wait.
fn no_threads_no_userfaultfd() -> Result<()> {
    let program = Run::new(calls_program(false)?);
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (plain, ..) = session(&program)?;
    let run = program.env("ELFREMAP_BACKEND", "hugetlb").preload()?;
    let (output, before, after) = session(&run.through(launcher()?, &["deny=ioctl:EPERM"]))?;
    output.same_as(&plain)?;
    output.silent()?;
    ensure!(before >= 12 << 20, "only {before} bytes of data and bss on the pool");
    ensure!(after < before && after > 0, "{after} of {before} bytes are left on the pool");
    host.finish()
}

/// Runs a program in a changed world: `programs/tools/launch.c`.
fn launcher() -> Result<PathBuf> {
    let (source, copy) = (source_dir().join("programs/tools/launch.c"), cache_dir("guards")?);
    let program = copy.join("launch");
    let status = Command::new("cc").arg("-O1").arg("-o").arg(&program).arg(&source).status();
    ensure!(status.context("cannot run cc")?.success(), "cc failed for {}", source.display());
    Ok(program)
}

/// Another library wraps the same calls, before ours or after it, makes them in its
/// constructor, and has fork handlers: it sees every call, as without ours.
fn other_wrappers_are_called() -> Result<()> {
    let library = build("wraps", "wraps.so", &["-shared", "-fPIC"])?;
    let program = Run::new(calls_program(true)?).arg("2");
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (plain, ..) = session(&program.clone().preload_too(&library))?;
    let text = String::from_utf8_lossy(&plain.stdout).into_owned();
    ensure!(plain.status.success() && text.contains("wrapped"), "the plain run: {plain:?}");
    for backend in ["hugetlb", "auto", "thp"] {
        let program = program.clone().env("ELFREMAP_BACKEND", backend);
        let before = program.clone().preload_too(&library).preload()?;
        let after = program.preload()?.preload_too(&library);
        for run in [before, after] {
            let (output, ..) = session(&run)?;
            output.same_as(&plain)?;
            output.silent()?;
        }
    }
    host.finish()
}

/// The program with a library that does something to its data before ours; what ours says.
fn after_library(what: &str) -> Result<(Output, String)> {
    let library = build("early", "early.so", &["-shared", "-fPIC"])?;
    let program = Run::new(build("calls", "calls-exports", &["-rdynamic", "-DTHREADS"])?)
        .arg("0")
        .env("EARLY", what);
    let (plain, ..) = session(&program.clone().preload_too(&library))?;
    ensure!(plain.status.success(), "{what}, plain: {plain:?}");
    // The later one in the list is initialised first.
    let mut running = program.preload()?.preload_too(&library).start_waiting()?;
    running.wait_for_line("ready")?;
    let smaps = std::fs::read_to_string(format!("/proc/{}/smaps", running.pid()))?;
    running.write("go\nend\n")?;
    let output = running.finish()?;
    output.same_as(&plain).with_context(|| what.to_owned())?;
    Ok((output, smaps))
}

/// What a library's constructor has set on the program's data is still set.
fn attributes_set_by_a_library() -> Result<()> {
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (output, smaps) = after_library("nothing")?;
    output.silent()?;
    let has = |smaps: &str, flag: &str| {
        let mut flags = smaps.lines().filter(|line| line.starts_with("VmFlags:"));
        flags.any(|line| line.split(' ').any(|word| word == flag))
    };
    ensure!(!has(&smaps, "lo") && !has(&smaps, "dc"), "flags without a cause");
    for (what, flag) in [("mlock", "lo"), ("dontdump", "dd"), ("dontfork", "dc")] {
        let (output, smaps) = after_library(what)?;
        output.warned_once(&["partly left", "locked"])?;
        ensure!(has(&smaps, flag), "{what}: no mapping has the flag {flag}");
        host.expect_idle()?;
    }
    host.finish()
}

/// A process that shares the program's memory and is no thread writes to its data.
fn process_that_shares_memory() -> Result<()> {
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let (output, _) = after_library("sibling")?;
    output.warned_once(&["other threads are running"])?;
    ensure!(String::from_utf8_lossy(&output.stdout).contains("all counted"), "{output:?}");
    host.finish()
}

/// `ELFREMAP_INHERIT=0`, and the library under several names in LD_PRELOAD.
fn leaves_ld_preload_by_any_name() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let links = ["first.so", "second.so"].map(|name| directory.path().join(name));
    let library = elfremap_tests::library::preload()?;
    for link in &links {
        std::os::unix::fs::symlink(&library, link)?;
    }
    let run = Run::new("/bin/sh")
        .args(["-c", "echo [$LD_PRELOAD]"])
        .env("ELFREMAP_INHERIT", "0")
        .preload_too(&links[0])
        .preload()?
        .preload_too(&links[1]);
    let output = run.output()?;
    ensure!(output.stdout == b"[]\n", "{output:?}");
    Ok(())
}
