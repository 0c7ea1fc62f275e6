//! Real programs that fork, with all of their image on pages of the pool and not a page
//! to spare; and the same under load while the pool is drained and refilled beside them.
//! Same output as plain, no signal, every page back.
//!
//! Small programs run as copies with more bss and everything merged, so that what they
//! write all the time lies on huge pages.

mod scripts;
mod servers;

use anyhow::{Context, Result, ensure};
use elfremap_tests::BLOCK;
use elfremap_tests::grown::copy_with_more_bss;
use elfremap_tests::image::{Class, Image};
use elfremap_tests::lab::Lab;
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::Run;
use elfremap_tests::smaps::Snapshot;
use libtest_mimic::Arguments;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// More pages than any of the programs takes.
const PLENTY: u64 = 60;

/// What copies get on top of their own bss.
const MORE_BSS: u64 = 3 * BLOCK;

/// How a program is run: plain, or under the preload with a backend.
pub(crate) struct Setting<'a> {
    pub(crate) lab: &'a Lab,
    pub(crate) program: &'a Path,
    backend: Option<&'static str>,
    /// ELFREMAP_FORK=off: forks are on their own.
    unguarded: bool,
}

impl Setting<'_> {
    /// A run of `program`, which may be another than the one under test.
    pub(crate) fn run_of(&self, program: &Path) -> Result<Run> {
        let run = self.lab.run(program).aslr_off().time_limit(Duration::from_secs(120));
        let Some(backend) = self.backend else { return Ok(run) };
        let run = if self.unguarded { run.env("ELFREMAP_FORK", "off") } else { run };
        Ok(run
            .preload_too(self.lab.library()?)
            .env("ELFREMAP_BACKEND", backend)
            .env("ELFREMAP_MERGE", "rwx"))
    }

    /// A run of the program under test.
    pub(crate) fn run(&self) -> Result<Run> {
        self.run_of(self.program)
    }
}

/// Called with the program's process id when it is there and when its work is done.
pub(crate) type Look<'a> = &'a mut dyn FnMut(u32) -> Result<()>;

/// Runs the program to its end and returns what its user sees.
type Scenario = fn(&Setting<'_>, Look<'_>) -> Result<String>;

/// A program under test.
struct Subject {
    name: &'static str,
    /// The program's file.
    find: fn(&Lab) -> Result<PathBuf>,
    /// Whether a copy with more bss is run, instead of the file itself.
    copy: bool,
    scenario: Scenario,
}

const SUBJECTS: &[Subject] = &[
    Subject { name: "bash", find: scripts::bash, copy: true, scenario: scripts::shell },
    Subject {
        name: "python",
        find: scripts::python,
        copy: true,
        scenario: scripts::multiprocessing,
    },
    Subject {
        name: "python-threads",
        find: scripts::python,
        copy: true,
        scenario: scripts::multiprocessing_threads,
    },
    Subject {
        name: "prefork",
        find: servers::prefork_program,
        copy: false,
        scenario: servers::prefork,
    },
    Subject { name: "redis", find: servers::redis_program, copy: true, scenario: servers::redis },
    Subject { name: "nginx", find: servers::nginx_program, copy: true, scenario: servers::nginx },
    Subject { name: "php-fpm", find: servers::php_program, copy: true, scenario: servers::php },
    Subject {
        name: "postgres",
        find: servers::postgres_program,
        copy: false,
        scenario: servers::postgres,
    },
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let lab = match Lab::new() {
        Ok(lab) => Arc::new(lab),
        Err(error) => {
            eprintln!("{error:?}");
            return ExitCode::FAILURE;
        }
    };
    let mut trials = Vec::new();
    for subject in SUBJECTS {
        for (kind, test) in [
            ("nothing-to-spare", nothing_to_spare as fn(&Subject, &Lab) -> Result<()>),
            ("unsteady-pool", unsteady_pool),
        ] {
            let lab = Arc::clone(&lab);
            trials.push(trial(format!("{kind}::{}", subject.name), move || test(subject, &lab)));
        }
    }
    let trial = trial("the-guard-is-needed::bash", move || guard_is_needed(&SUBJECTS[0], &lab));
    trials.push(trial);
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The file to run.
fn program(subject: &Subject, lab: &Lab) -> Result<PathBuf> {
    let file = (subject.find)(lab)?;
    if !subject.copy {
        return Ok(file);
    }
    let copy = lab.path().join(format!("{}-with-more-bss", subject.name));
    if !copy.exists() {
        copy_with_more_bss(&file, &copy, MORE_BSS)?;
    }
    Ok(copy)
}

/// Bytes of data and bss on pages of the pool, and pages of the pool in all.
fn on_pool(pid: u32, image: &Image) -> Result<(u64, u64)> {
    let snapshot = Snapshot::take(pid, image)?;
    let coverage = snapshot.coverage(image);
    let of = |class| coverage.get(&class).map_or(0, |cover| cover.hugetlb);
    Ok((of(Class::Data) + of(Class::Bss), snapshot.hugetlb_bytes() / BLOCK))
}

/// A pool of exactly the pages that the program takes.
fn nothing_to_spare(subject: &Subject, lab: &Lab) -> Result<()> {
    let program = program(subject, lab)?;
    let image = Image::read(&program)?;
    let setting = |backend| Setting { lab, program: &program, backend, unguarded: false };
    let plain = (subject.scenario)(&setting(None), &mut |_| Ok(())).context("plain")?;
    let mut host = Host::lock()?;
    host.overcommit(0)?;
    host.thp("madvise")?;
    for backend in ["hugetlb", "auto"] {
        let run = |host: &mut Host, pages: u64, look: Look<'_>| -> Result<()> {
            host.pages(pages)?;
            let name = || format!("{backend}, {pages} pages");
            let seen = (subject.scenario)(&setting(Some(backend)), look).with_context(name)?;
            same(&seen, &plain).with_context(name)?;
            host.expect_idle().with_context(name)
        };
        let mut taken = None;
        run(&mut host, PLENTY, &mut |pid| {
            let (written, pages) = on_pool(pid, &image)?;
            // What is written is what a fork needs pages for.
            ensure!(backend != "hugetlb" || written > 0, "no data on the pool");
            ensure!(taken.is_none_or(|taken| taken == pages), "{pages} pages instead of {taken:?}");
            taken = Some(pages);
            Ok(())
        })?;
        let taken = taken.context("nobody looked")?;
        run(&mut host, taken, &mut |pid| {
            let (_, pages) = on_pool(pid, &image)?;
            ensure!(pages == taken, "{pages} of {taken} pages are left to the program");
            let free = Counters::read()?.free;
            ensure!(free == 0, "{free} pages to spare");
            Ok(())
        })?;
    }
    host.finish()
}

/// What the first test proves: without the guard children of the same program die.
fn guard_is_needed(subject: &Subject, lab: &Lab) -> Result<()> {
    const SCRIPT: &str = "echo ready; read -r _; for i in {1..20}; do (x=$i) || echo died; done";
    let program = program(subject, lab)?;
    let image = Image::read(&program)?;
    let mut host = Host::lock()?;
    for unguarded in [false, true] {
        let setting = Setting { lab, program: &program, backend: Some("hugetlb"), unguarded };
        let run = setting.run()?.args(["-c", SCRIPT]);
        host.pages(PLENTY)?;
        let running = run.until_ready()?;
        let (_, taken) = on_pool(running.pid(), &image)?;
        running.kill()?;
        host.pages(taken)?;
        let mut running = run.until_ready()?;
        running.write("go\n")?;
        let output = running.finish()?;
        let died = String::from_utf8_lossy(&output.stdout).contains("died");
        ensure!(died == unguarded, "unguarded {unguarded}, {taken} pages: {output:?}");
    }
    host.finish()
}

/// Starts, works, forks and stops while pages come and go.
fn unsteady_pool(subject: &Subject, lab: &Lab) -> Result<()> {
    let program = program(subject, lab)?;
    let setting = |backend| Setting { lab, program: &program, backend, unguarded: false };
    let plain = (subject.scenario)(&setting(None), &mut |_| Ok(())).context("plain")?;
    let mut host = Host::lock()?;
    host.overcommit(0)?;
    for backend in ["hugetlb", "auto"] {
        let run = || (subject.scenario)(&setting(Some(backend)), &mut |_| Ok(()));
        let seen = host.unsteady(24, run).context(backend)?.context(backend)?;
        same(&seen, &plain).context(backend)?;
    }
    host.finish()
}

/// The first line that differs.
fn same(seen: &str, plain: &str) -> Result<()> {
    for (number, (now, then)) in seen.lines().zip(plain.lines()).enumerate() {
        ensure!(now == then, "line {} is {now:?} instead of {then:?}", number + 1);
    }
    ensure!(seen == plain, "{seen:?} instead of {plain:?}");
    Ok(())
}
