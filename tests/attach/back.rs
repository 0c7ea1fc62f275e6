//! Back onto the file, whatever has become of it; shared objects; the tools that look on.

use crate::states::PAGES;
use crate::with_pool;
use anyhow::{Context, Result, ensure};
use elfremap_tests::attach::{Subject, build, elfremap, subject, succeed};
use elfremap_tests::image::{Class, Image};
use elfremap_tests::library::{copy_program, source_dir};
use elfremap_tests::run::Run;
use elfremap_tests::smaps::{Backing, Snapshot};
use libtest_mimic::Trial;
use std::fs;
use std::path::Path;

const READ_ONLY: &[Class] = &[Class::Text, Class::Rodata];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        with_pool("back::a_program_that_was_replaced", PAGES, |_| replaced_program()),
        with_pool("back::a_library_that_was_removed", PAGES, |_| removed_library()),
        with_pool("back::shared_objects_by_name", PAGES, |_| objects_by_name()),
        with_pool("back::merged_protections", 2 * PAGES, |_| merged()),
        with_pool("back::what_the_preload_moved", PAGES, |_| preloaded()),
        with_pool("back::what_the_tools_say", PAGES, |_| tools()),
        with_pool("back::twice", PAGES, |_| twice()),
    ]
}

fn replaced_program() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let program = directory.path().join("subject");
    copy_program(subject("gcc", &[])?, &program)?;
    let subject = Subject::start(&Run::new(&program).args(["caller", "nanosleep"]))?;
    fs::remove_file(&program)?;
    copy_program("/bin/true", &program)?;
    succeed("attach", subject.pid(), &[])?;
    subject.expect(READ_ONLY, Backing::Hugetlb)?;
    succeed("detach", subject.pid(), &[])?;
    // From the file that was removed, which the kernel still has.
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// A program with a library of several MB of text; returns the library's path.
fn with_library(directory: &Path) -> Result<(Run, std::path::PathBuf)> {
    let library = directory.join("libbig.so");
    copy_program(
        build(&source_dir().join("attach/library.c"), "gcc", &["-shared", "-fPIC"])?,
        &library,
    )?;
    let program = build(&source_dir().join("attach/loads.c"), "gcc", &["-ldl"])?;
    Ok((Run::new(program).arg(&library), library))
}

/// The library's text: how much of it is huge, and how much is the file's.
fn text_of(pid: u32, library: &Path) -> Result<(u64, u64)> {
    let image = Image::read(library)?;
    let now = Snapshot::take_by_file(pid, &image, library)?;
    let text = now.coverage(&image).get(&Class::Text).copied().unwrap_or_default();
    let mapped = now.vmas.iter().filter(|v| v.prot == elfremap::prot::Prot::RX && v.inode != 0);
    let own = mapped.filter(|v| v.name.contains("libbig.so")).map(|v| v.range.len()).sum();
    Ok((text.hugetlb + text.thp, own))
}

fn objects_by_name() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (run, library) = with_library(directory.path())?;
    let running = run.until_ready()?;
    let pid = running.pid();
    let (_, all) = text_of(pid, &library)?;
    let output = elfremap(&["attach", &pid.to_string(), "--objects", "libother*:nothing"])?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    ensure!(text_of(pid, &library)? == (0, all), "it has moved");
    for options in [&["--objects", "lib*.so"][..], &[]] {
        succeed("attach", pid, options)?;
        let (huge, rest) = text_of(pid, &library)?;
        ensure!(huge >= 4 << 20 && huge + rest == all, "{huge} of {all} huge, {rest} not");
        succeed("detach", pid, options)?;
        ensure!(text_of(pid, &library)? == (0, all), "it is not back");
    }
    let output = running.finish()?;
    ensure!(output.status.code() == Some(42), "{output:?}");
    Ok(())
}

/// Without its file, small pages of its own.
fn removed_library() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let (run, library) = with_library(directory.path())?;
    let running = run.until_ready()?;
    let pid = running.pid();
    let image = Image::read(&library)?;
    let before = Snapshot::take_by_file(pid, &image, &library)?;
    fs::remove_file(&library)?;
    succeed("attach", pid, &[])?;
    let text = |now: &Snapshot| now.coverage(&image).get(&Class::Text).copied().unwrap_or_default();
    let now = || -> Result<Snapshot> {
        // Placed where it was: its first page is mapped from the removed file.
        let mut now = Snapshot::take(pid, &Image::read(run.program())?)?;
        now.bias = before.bias;
        Ok(now)
    };
    ensure!(text(&now()?).hugetlb >= 4 << 20, "{:?}", text(&now()?));
    let output = succeed("detach", pid, &["--json"])?;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let private = said["objects"][0]["private"].as_u64().context("no number")?;
    ensure!(private >= 4 << 20 && said["objects"][0]["from_file"] == 0, "{said}");
    let after = now()?;
    ensure!(text(&after).small == text(&after).total, "{:?}", text(&after));
    let changed = before.protections(&image).differences(&after.protections(&image), |_, _| false);
    ensure!(changed.is_empty(), "protections changed: {changed:?}");
    let output = running.finish()?;
    ensure!(output.status.code() == Some(42), "{output:?}");
    Ok(())
}

/// Blocks of text and read-only data, and of relro and data, become one mapping; detached they
/// are what they were.
fn merged() -> Result<()> {
    for (level, segments) in [("rx", "text,rodata"), ("relro", "text,rodata,data,bss")] {
        let subject =
            Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "writer", "poll"]))?;
        let options = ["--merge", level, "--segments", segments];
        succeed("attach", subject.pid(), &options)?;
        let now = subject.now()?;
        ensure!(now.write_exec() == 0, "a mapping became writable and executable");
        let cover = now.coverage(&subject.image);
        let text = cover.get(&Class::Text).copied().unwrap_or_default();
        // All but the part in the block of the ELF header.
        ensure!(text.hugetlb + (2 << 20) > text.total, "{text:?}");
        succeed("detach", subject.pid(), &[])?;
        subject.expect_untouched()?;
        subject.finish()?;
    }
    Ok(())
}

fn preloaded() -> Result<()> {
    let run = Run::new(subject("gcc", &[])?).args(["caller", "writer"]);
    let plain = Subject::start(&run)?;
    plain.finish()?;
    let running = run.preload()?.until_ready()?;
    let image = Image::read(&subject("gcc", &[])?)?;
    let cover = |pid| -> Result<_> { Ok(Snapshot::take(pid, &image)?.coverage(&image)) };
    let before = cover(running.pid())?;
    ensure!(before[&Class::Text].hugetlb >= 2 << 20, "{before:?}");
    // The writable ranges are looked after by the library in there.
    let output = elfremap(&["detach", &running.pid().to_string()])?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(said.contains("the preload in the process looks after it"), "{said}");
    let after = cover(running.pid())?;
    ensure!(after[&Class::Text].hugetlb == 0, "{after:?}");
    ensure!(after[&Class::Data].thp == before[&Class::Data].thp, "{after:?}");
    let output = running.finish()?;
    ensure!(output.status.code() == Some(42), "{output:?}");
    Ok(())
}

fn tools() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]))?;
    let pid = subject.pid().to_string();
    let map = format!("/tmp/perf-{pid}.map");
    let status = elfremap(&["status", &pid])?;
    ensure!(status.status.code() == Some(3), "{status:?}");
    ensure!(String::from_utf8_lossy(&status.stdout).contains("elfremap attach"), "{status:?}");
    let output = succeed("attach", subject.pid(), &["--perfmap", "--json"])?;
    let said: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(said["objects"][0]["moved"][0]["pages"] == "hugetlb", "{said}");
    let names = fs::read_to_string(&map).with_context(|| format!("no {map}"))?;
    fs::remove_file(&map)?;
    ensure!(names.lines().any(|line| line.ends_with(" pages")), "`pages` is not named");
    let status = elfremap(&["status", &pid])?;
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(status.status.code() == Some(0) && text.contains("remapped"), "{text}");
    ensure!(text.contains("attached"), "{text}");
    let status = elfremap(&["status", "--json", &pid])?;
    let said: serde_json::Value = serde_json::from_slice(&status.stdout)?;
    ensure!(said["processes"][0]["attached"] == true, "{said}");
    succeed("detach", subject.pid(), &[])?;
    ensure!(elfremap(&["status", &pid])?.status.code() == Some(3), "it is still remapped");
    subject.finish().map(drop)
}

/// A second attach finds nothing left, and a detach after that all of it.
fn twice() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]))?;
    succeed("attach", subject.pid(), &[])?;
    let output = elfremap(&["attach", &subject.pid().to_string()])?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    subject.expect(READ_ONLY, Backing::Hugetlb)?;
    // The rest by another command.
    succeed("attach", subject.pid(), &["--segments", "data,bss"])?;
    succeed("detach", subject.pid(), &[])?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}
