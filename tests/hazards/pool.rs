//! Too few huge pages, and programs that fight for them or are killed.

use crate::build::{launcher, runs};
use crate::scenario::{AMPLE, Backend, Case, Moved, in_parallel};
use anyhow::{Context, Result, ensure};
use elfremap_tests::BLOCK;
use elfremap_tests::outcome::{Skip, trial};
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::{READY, Run, Running};
use elfremap_tests::smaps::Snapshot;
use libtest_mimic::Trial;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("pool::every-shortage", every_shortage),
        trial("pool::race-for-the-last-pages", race),
        trial("pool::overcommit", overcommit),
        trial("pool::killed-and-replaced", killed),
        trial("pool::cgroup-limits", cgroup),
        trial("pool::memory-limit", memory_limit),
        trial("pool::few-mappings-left", few_mappings_left),
    ]
}

/// Pages that the program takes with ASLR off, all on hugetlb.
fn need(case: &Case, host: &mut Host) -> Result<u64> {
    host.pages(AMPLE)?;
    let run = case.run(Backend::Hugetlb)?.aslr_off();
    Ok(case.inspect(&run, Backend::Hugetlb, Moved::All)?.used)
}

/// Every number of pages from what is needed down to none. (O26)
fn every_shortage() -> Result<()> {
    let cells: [&[&str]; 4] =
        [&["pie", "bfd"], &["no-pie", "bfd"], &["no-pie", "bfd", "page2m"], &["pie", "lld"]];
    for cell in cells {
        let case = Case::named("plain", cell)?;
        let mut host = Host::lock()?;
        let need = need(&case, &mut host)?;
        let sizes: Vec<u64> = (0..need).rev().collect();
        case.shortages(&mut host, need, &sizes).with_context(|| format!("{cell:?}"))?;
        host.finish()?;
    }
    Ok(())
}

/// Many copies start at once with pages for one: each runs, and none takes a page that
/// it does not get. (O27)
fn race() -> Result<()> {
    const COPIES: usize = 20;
    let case = Case::named("plain", &["no-pie", "bfd"])?;
    let launcher = launcher()?;
    let mut host = Host::lock()?;
    let need = need(&case, &mut host)?;
    host.pages(need)?;
    let mut whole = 0;
    for round in 0..runs()?.div_ceil(20) {
        let backend = if round % 2 == 0 { Backend::Hugetlb } else { Backend::Auto };
        let run = case.run(backend)?.aslr_off().through(&launcher, &["barrier"]);
        let mut copies: Vec<Running> =
            (0..COPIES).map(|_| run.start_waiting()).collect::<Result<_>>()?;
        for copy in &mut copies {
            copy.send(b"\n")?;
        }
        let mut used = 0;
        for copy in &mut copies {
            copy.wait_for_line(READY)?;
            let pages = Snapshot::take(copy.pid(), &case.image)?.hugetlb_bytes() / BLOCK;
            whole += u32::from(pages == need);
            used += pages;
        }
        ensure!(used <= need, "{used} pages are mapped, of {need}");
        for copy in copies {
            let output = copy.finish()?;
            output.same_as(&case.plain).with_context(|| format!("round {round}"))?;
            ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
        }
        host.expect_idle().with_context(|| format!("round {round}"))?;
    }
    ensure!(whole > 0, "no copy ever got all pages");
    host.finish()
}

/// An empty pool that may grow: surplus pages are used, and go. (O30)
fn overcommit() -> Result<()> {
    let case = Case::named("plain", &["pie", "bfd"])?;
    let mut host = Host::lock()?;
    host.pages(0)?;
    host.overcommit(AMPLE)?;
    let run = case.run(Backend::Hugetlb)?;
    let inspection = case.inspect(&run, Backend::Hugetlb, Moved::All)?;
    inspection.output.silent()?;
    host.expect_idle()?;
    host.overcommit(1)?;
    let inspection = case.inspect(&run, Backend::Hugetlb, Moved::WholeBlocks)?;
    inspection.output.warned_once(&[])?;
    host.expect_idle()?;
    host.overcommit(0)?;
    let inspection = case.inspect(&run, Backend::Hugetlb, Moved::Nothing)?;
    inspection.output.warned_once(&[])?;
    host.finish()
}

/// Programs that end normally, are killed at any moment, or exec themselves: the pool
/// gets its pages back. (O37)
fn killed() -> Result<()> {
    let case = Case::named("exec", &["pie", "bfd"])?;
    let mut host = Host::lock()?;
    host.pages(2 * AMPLE)?;
    let run = case.run(Backend::Hugetlb)?;
    let again = run.clone().env("HAZARD_EXEC", "3");
    for hundred in 0..runs()?.div_ceil(100) {
        in_parallel(100, |index| match index % 3 {
            0 => run.output()?.same_as(&case.plain),
            1 => again.output()?.same_as(&case.plain),
            _ => {
                let running = run.start_waiting()?;
                // Spread over the time that a start takes.
                let delay = u64::from(index * 7919 + hundred * 104_729) % 20_000;
                std::thread::sleep(Duration::from_micros(delay));
                running.kill().map(drop)
            }
        })?;
        host.expect_idle()?;
    }
    host.finish()
}

/// A hugetlb control group for the test, and what is to be undone.
struct Group {
    directory: PathBuf,
    mounted: Option<PathBuf>,
    /// Names of the files that limit reservations and usage.
    files: [&'static str; 2],
}

impl Group {
    /// Version 2 when the controller is there, else version 1, mounted for the test.
    fn new(scratch: &Path) -> Result<Self> {
        let v2 = Path::new("/sys/fs/cgroup");
        let name = format!("elfremap-test-{}", std::process::id());
        let offers = |file: &str| {
            fs::read_to_string(v2.join(file))
                .is_ok_and(|text| text.split_whitespace().any(|word| word == "hugetlb"))
        };
        if offers("cgroup.controllers") {
            if !offers("cgroup.subtree_control") {
                fs::write(v2.join("cgroup.subtree_control"), "+hugetlb")?;
            }
            let directory = v2.join(name);
            fs::create_dir(&directory)?;
            return Ok(Self {
                directory,
                mounted: None,
                files: ["hugetlb.2MB.rsvd.max", "hugetlb.2MB.max"],
            });
        }
        let mounted = scratch.join("hugetlb");
        fs::create_dir(&mounted)?;
        mount(Some("none"), &mounted, Some("cgroup"), MsFlags::empty(), Some("hugetlb")).map_err(
            |errno| Skip::because(format!("needs the hugetlb control group (mount: {errno})")),
        )?;
        let directory = mounted.join(name);
        fs::create_dir(&directory)?;
        let files = ["hugetlb.2MB.rsvd.limit_in_bytes", "hugetlb.2MB.limit_in_bytes"];
        Ok(Self { directory, mounted: Some(mounted), files })
    }
}

impl Drop for Group {
    fn drop(&mut self) {
        let removed = fs::remove_dir(&self.directory);
        let unmounted = self.mounted.as_ref().map(|m| umount2(m, MntFlags::MNT_DETACH));
        if removed.is_err() || unmounted.is_some_and(|u| u.is_err()) {
            eprintln!("cannot remove the control group {}", self.directory.display());
        }
    }
}

/// Limits of a control group below what is needed, on reservations and on usage: the
/// first is an error of mmap, the second one of populating, and a signal for whoever
/// does not ask. (O28, O29)
fn cgroup() -> Result<()> {
    let case = Case::named("plain", &["no-pie", "bfd"])?;
    let scratch = tempfile::tempdir()?;
    let mut host = Host::lock()?;
    let need = need(&case, &mut host)?;
    host.pages(AMPLE)?;
    let group = Group::new(scratch.path())?;
    for file in group.files {
        let path = group.directory.join(file);
        let before = fs::read_to_string(&path)?;
        for limit in [need, need - 1, 1, 0] {
            fs::write(&path, (limit * BLOCK).to_string())?;
            for strategy in ["swap", "move"] {
                let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_STRATEGY", strategy);
                let run = run.aslr_off().group(&group.directory);
                let moved = match limit {
                    0 => Moved::Nothing,
                    _ if limit < need => Moved::WholeBlocks,
                    _ => Moved::All,
                };
                let inspection = case
                    .inspect(&run, Backend::Hugetlb, moved)
                    .with_context(|| format!("{file}: {limit} pages of {need}, {strategy}"))?;
                if limit < need {
                    inspection.output.warned_once(&["cgroup"])?;
                } else {
                    inspection.output.silent()?;
                }
                host.expect_idle()?;
            }
        }
        // What stands for "no limit" differs between the versions.
        if fs::write(&path, before.trim()).is_err() {
            fs::write(&path, (1u64 << 40).to_string())?;
        }
    }
    ensure!(Counters::read()?.is_idle(), "pages are left in the group");
    drop(group);
    host.finish()
}

/// A memory control group for the test.
struct Memory {
    directory: PathBuf,
    file: &'static str,
}

impl Memory {
    /// Version 2 when its memory controller is there, else version 1.
    fn new() -> Result<Self> {
        let name = format!("elfremap-test-{}", std::process::id());
        let v2 = Path::new("/sys/fs/cgroup");
        let has = |file: &str| {
            fs::read_to_string(v2.join(file))
                .is_ok_and(|text| text.split_whitespace().any(|word| word == "memory"))
        };
        let (parent, file) = if has("cgroup.controllers") {
            if !has("cgroup.subtree_control") {
                fs::write(v2.join("cgroup.subtree_control"), "+memory")?;
            }
            (v2.to_owned(), "memory.max")
        } else if v2.join("memory").is_dir() {
            (v2.join("memory"), "memory.limit_in_bytes")
        } else {
            return Err(Skip::because("needs the memory control group"));
        };
        let directory = parent.join(name);
        fs::create_dir(&directory)?;
        Ok(Self { directory, file })
    }

    fn limit(&self, bytes: u64) -> Result<()> {
        Ok(fs::write(self.directory.join(self.file), bytes.to_string())?)
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir(&self.directory) {
            eprintln!("cannot remove {}: {error}", self.directory.display());
        }
    }
}

/// Limits of memory from what the program itself can just live with upward. The move never
/// costs its life. Afterwards it has whole blocks of memory where it had some of their
/// pages: by that much more it needs, but on pool pages, which are not charged to the group.
fn memory_limit() -> Result<()> {
    let case = Case::named("plain", &["pie", "bfd"])?;
    let group = Memory::new()?;
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let limited = |run: &Run, mib: u64| {
        group.limit(mib << 20)?;
        run.clone().aslr_off().group(&group.directory).output()
    };
    // From above, since a program that just lives spends its time reading pages again.
    let off = case.run(Backend::Auto)?.env("ELFREMAP", "off");
    let lives = |mib: u64| limited(&off, mib).is_ok_and(|output| output == case.plain);
    let most = (1..40).rev().find(|&mib| !lives(mib)).context("every limit is enough")?;
    let least = most + 1;
    for (backend, strategy) in [
        (Backend::Auto, "swap"),
        (Backend::Thp, "swap"),
        (Backend::Hugetlb, "swap"),
        (Backend::Hugetlb, "move"),
    ] {
        let run = case.run(backend)?.env("ELFREMAP_STRATEGY", strategy);
        let rounding = if backend == Backend::Hugetlb { 0 } else { (5 * BLOCK) >> 20 };
        for mib in (least + 2..least + 20).step_by(3) {
            let output = limited(&run, mib)?;
            let name = || format!("{mib} MiB of {least}, {}, {strategy}", backend.value());
            ensure!(output.stdout.starts_with(b"ready"), "{}: {output:?}", name());
            if mib > least + rounding {
                output.same_as(&case.plain).with_context(name)?;
            }
            ensure!(output.warnings().len() <= 1, "{}: {:?}", name(), output.warnings());
        }
        host.expect_idle()?;
    }
    drop(group);
    host.finish()
}

/// An earlier library has used up nearly all mappings that a process may have.
fn few_mappings_left() -> Result<()> {
    for (cell, numbers) in [
        (["pie", "bfd"], [0, 4, 8, 12, 16, 24, 100]),
        (["no-pie", "bfd"], [2, 6, 10, 14, 20, 32, 100]),
    ] {
        let case = Case::named("crowded", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        let mut warned = 0;
        for left in numbers {
            let crowd = |run: Run| run.env("HAZARD_MAPPINGS", left.to_string()).output();
            let plain = crowd(case.plain_run())?;
            let text = String::from_utf8_lossy(&plain.stdout).into_owned();
            ensure!(plain.status.code() == Some(42) && text.contains("crowded: 1"), "{plain:?}");
            for (backend, strategy) in [(Backend::Auto, "auto"), (Backend::Hugetlb, "move")] {
                let output = crowd(case.run(backend)?.env("ELFREMAP_STRATEGY", strategy))?;
                let name = || format!("{cell:?}, {left} left, {}, {strategy}", backend.value());
                output.same_as(&plain).with_context(name)?;
                ensure!(output.warnings().len() <= 1, "{}: {:?}", name(), output.warnings());
                warned += output.warnings().len();
                ensure!(left < 100 || output.warnings().is_empty(), "{}: {output:?}", name());
                host.expect_idle()?;
            }
        }
        ensure!(warned > 0, "no number was too small");
        host.finish()?;
    }
    Ok(())
}
