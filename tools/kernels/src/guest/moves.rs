//! The promises, for every program, page size, source and strategy.

use crate::checks::Checks;
use crate::launch::{Launch, Output};
use crate::pool::{self, Counters};
use crate::probe::Machine;
use crate::snapshot::{Kind, Movable, Snapshot};
use crate::{HAZARDS, PROGRAMS};
use anyhow::{Context, Result, ensure};
use elfremap::exec::guard::Freezer;
use elfremap::hugepage::PageSize;
use std::path::{Path, PathBuf};

/// Enough of any size for any of the programs, in bytes.
const AMPLE: u64 = 64 << 20;

/// A program and its plain run.
#[derive(Debug)]
pub(crate) struct Subject {
    pub(crate) path: PathBuf,
    pub(crate) plain: Output,
    snapshot: Snapshot,
}

impl Subject {
    pub(crate) fn named(name: &str) -> Result<Self> {
        Self::new(&Path::new(PROGRAMS).join(name))
    }

    fn new(path: &Path) -> Result<Self> {
        let running = Launch::new(path).until_ready()?;
        let snapshot = Snapshot::take(running.pid(), path)?;
        let plain = running.finish()?;
        ensure!(plain.status.code() == Some(42), "plain run: {} {:?}", plain.status, plain.stdout);
        Ok(Self { path: path.to_owned(), plain, snapshot })
    }

    pub(crate) const fn snapshot(&self) -> &Snapshot {
        &self.snapshot
    }

    pub(crate) fn name(&self) -> String {
        self.path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned())
    }

    /// Whether it imports what starts threads (the C++ library does).
    fn has_threads(&self) -> bool {
        self.name().starts_with("layout")
    }

    /// The program under the preload, with pages of `size` from the pool alone.
    pub(crate) fn hugetlb(&self, size: PageSize) -> Launch {
        let launch = Launch::new(&self.path).preload().env("ELFREMAP_BACKEND", "hugetlb");
        launch.env("ELFREMAP_PAGE_SIZE", size.to_string())
    }

    pub(crate) fn movable(&self, size: PageSize) -> Movable {
        self.snapshot.movable(size)
    }

    /// Runs it; `look` sees it while it waits. Parity and rights are checked.
    pub(crate) fn run(
        &self,
        launch: &Launch,
        look: impl FnOnce(u32, &Snapshot) -> Result<()>,
    ) -> Result<Output> {
        let running = launch.until_ready()?;
        let now = Snapshot::take(running.pid(), &self.path)?;
        now.same_rights_as(&self.snapshot)?;
        let looked = look(running.pid(), &now);
        let output = running.finish()?;
        output.same_as(&self.plain)?;
        looked.with_context(|| format!("said {:?}; mapped {}", output.stderr, now.describe()))?;
        Ok(output)
    }

    /// As many pages as the pool lends to one run.
    pub(crate) fn need(&self, size: PageSize) -> Result<u64> {
        let mut used = 0;
        self.run(&self.hugetlb(size), |_, _| {
            used = Counters::read(size)?.used();
            Ok(())
        })?;
        ensure!(used > 0, "{} takes no page of {size}", self.name());
        Ok(used)
    }
}

/// The programs that have checks of their own: one forks, one is larger than 1 GiB.
const FORKS: &str = "fork-page2m";
const GIGANTIC: &str = "gigantic";

/// All other programs, ordered by name.
fn subjects() -> Result<Vec<Subject>> {
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(PROGRAMS)? {
        let path = entry?.path();
        if path.file_name().is_some_and(|name| name != FORKS && name != GIGANTIC) {
            paths.push(path);
        }
    }
    paths.sort();
    paths
        .iter()
        .map(|path| Subject::new(path).with_context(|| path.display().to_string()))
        .collect()
}

/// Sets every pool but that of `size` to 0.
pub(crate) fn only_pool(machine: &Machine, size: PageSize, pages: u64) -> Result<()> {
    for &other in machine.sizes.iter().filter(|&&other| other != size) {
        pool::set(other, 0)?;
    }
    pool::set(size, pages)
}

fn ample(size: PageSize) -> u64 {
    size.pages_for(AMPLE).max(8)
}

pub(crate) fn run(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let subjects = subjects()?;
    // 1 GiB pages hold none of the programs.
    for &size in machine.sizes.iter().filter(|&&size| size < PageSize::SIZE_1G) {
        let group = size.to_string();
        only_pool(machine, size, ample(size))?;
        for subject in &subjects {
            for strategy in ["auto", "swap", "move"] {
                let name = format!("{}: {strategy}", subject.name());
                checks.check(&group, name, || hugetlb(machine, subject, size, strategy))?;
            }
        }
        let plain = Subject::named("plain-page2m").or_else(|_| Subject::named("plain"))?;
        if plain.movable(size).certain.is_empty() {
            continue;
        }
        checks.check(&group, "randomised addresses", || randomised(&plain, size))?;
        checks.check(&group, "too few pages", || short(machine, &plain, size))?;
    }
    let (size, forks) = (machine.block(), Subject::named(FORKS)?);
    for strategy in ["auto", "move"] {
        let name = format!("children write, no page is left: {strategy}");
        checks.check(&size.to_string(), name, || fork(machine, &forks, size, strategy))?;
    }
    let none = machine.block();
    only_pool(machine, none, 0)?;
    for subject in &subjects {
        for strategy in ["auto", "swap", "move"] {
            let name = format!("{}: {strategy}", subject.name());
            checks.check("THP", name, || thp(machine, subject, strategy))?;
        }
    }
    Ok(())
}

fn hugetlb(machine: &Machine, subject: &Subject, size: PageSize, strategy: &str) -> Result<()> {
    let movable = subject.movable(size);
    let launch = subject.hugetlb(size).env("ELFREMAP_STRATEGY", strategy);
    let kind = Kind::Hugetlb(size);
    let cannot = strategy == "swap" && !machine.can_swap;
    // Data of a program that may have threads keeps off the pool then.
    let off_pool = subject.has_threads() && Freezer::probe().is_err();
    let output = subject.run(&launch, |_, now| {
        if cannot || off_pool || movable.certain.is_empty() {
            now.nothing_else(&movable, kind)
        } else {
            now.moved_exactly(&movable, kind)
        }
    })?;
    if cannot && !movable.certain.is_empty() {
        output.warned_once(&["mremap"])?;
    } else if off_pool && !movable.certain.is_empty() {
        output.warned_once(&[])?;
    } else {
        output.silent()?;
    }
    pool::expect_idle(size)
}

/// With addresses as the kernel chooses them.
fn randomised(subject: &Subject, size: PageSize) -> Result<()> {
    for _ in 0..5 {
        let output = subject.hugetlb(size).aslr().output()?;
        output.same_as(&subject.plain)?;
        output.silent()?;
        pool::expect_idle(size)?;
    }
    Ok(())
}

/// One page too few, and none: a whole program, one warning, every page back.
fn short(machine: &Machine, subject: &Subject, size: PageSize) -> Result<()> {
    let need = subject.need(size)?;
    let movable = subject.movable(size);
    for pages in [need, need - 1, 0] {
        only_pool(machine, size, pages)?;
        for strategy in ["auto", "move"] {
            let launch = subject.hugetlb(size).env("ELFREMAP_STRATEGY", strategy);
            let context = || format!("{strategy} with {pages} of {need} pages");
            let output = subject
                .run(&launch, |_, now| {
                    if pages == need {
                        now.moved_exactly(&movable, Kind::Hugetlb(size))
                    } else {
                        ensure!(now.hugetlb_bytes() <= pages * size.bytes(), "more than there is");
                        now.nothing_else(&movable, Kind::Hugetlb(size))
                    }
                })
                .with_context(context)?;
            if pages == need {
                output.silent().with_context(context)?;
            } else {
                output.warned_once(&["huge pages", "elfremap reserve"]).with_context(context)?;
            }
            pool::expect_idle(size).with_context(context)?;
        }
    }
    Ok(())
}

/// Children and their parent write to data and bss on pages of the pool when none is
/// left: no signal, no wrong byte.
fn fork(machine: &Machine, subject: &Subject, size: PageSize, strategy: &str) -> Result<()> {
    only_pool(machine, size, ample(size))?;
    let need = subject.need(size)?;
    only_pool(machine, size, need)?;
    let movable = subject.movable(size);
    let launch = subject.hugetlb(size).env("ELFREMAP_STRATEGY", strategy);
    let look = |_, now: &Snapshot| now.moved_exactly(&movable, Kind::Hugetlb(size));
    subject.run(&launch, look)?.silent()?;
    pool::expect_idle(size)
}

fn thp(machine: &Machine, subject: &Subject, strategy: &str) -> Result<()> {
    let size = machine.thp;
    let movable = subject.movable(size);
    let launch = Launch::new(&subject.path)
        .preload()
        .env("ELFREMAP_BACKEND", "thp")
        .env("ELFREMAP_PAGE_SIZE", size.to_string())
        .env("ELFREMAP_STRATEGY", strategy);
    let output = subject.run(&launch, |_, now| {
        if movable.certain.is_empty() {
            now.nothing_else(&movable, Kind::Thp)
        } else {
            now.moved_exactly(&movable, Kind::Thp)
        }
    })?;
    output.silent()
}

/// Without a size asked for, the one whose pool has pages, where the program's layout
/// allows it: 2 MiB first; never 1 GiB, never over a neighbour.
pub(crate) fn choice(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let subjects = subjects()?;
    for &size in machine.sizes.iter().filter(|&&size| size < PageSize::SIZE_1G) {
        for subject in subjects.iter().filter(|s| s.name().starts_with("plain")) {
            let name = format!("{}: only {size} pages in the pools", subject.name());
            checks.check("choice", name, || {
                only_pool(machine, size, ample(size))?;
                let launch =
                    Launch::new(&subject.path).preload().env("ELFREMAP_BACKEND", "hugetlb");
                let movable = subject.movable(size);
                let kind = Kind::Hugetlb(size);
                subject.run(&launch, |_, now| {
                    if movable.certain.is_empty() {
                        now.nothing_else(&movable, kind)
                    } else {
                        now.moved_exactly(&movable, kind)
                    }
                })?;
                pool::expect_idle(size)
            })?;
        }
    }
    let plain = Subject::named("plain-page2m")?;
    checks.check("choice", "default options", || defaults(machine, &plain))
}

/// The default options: what is only read lies on the pool's pages, and what is written on
/// transparent huge pages; where those are too large for it, it stays and that is said.
fn defaults(machine: &Machine, subject: &Subject) -> Result<()> {
    let size = machine.block();
    only_pool(machine, size, ample(size))?;
    let movable = subject.movable(size);
    let (written, read) = movable.certain_by_right(subject.snapshot());
    ensure!(!written.is_empty() && !read.is_empty(), "nothing to see");
    let fits = machine.thp == size;
    let output = subject.run(&Launch::new(&subject.path).preload(), |_, now| {
        now.all_on(&read, Kind::Hugetlb(size))?;
        if fits { now.all_on(&written, Kind::Thp) } else { now.none_huge(&written) }
    })?;
    if fits {
        output.silent()?;
    } else {
        output
            .warned_once(&["transparent huge pages are too large", "ELFREMAP_BACKEND=hugetlb"])?;
    }
    pool::expect_idle(size)
}

/// Programs that each do something a careless remap would break: with pages from the pool
/// by each strategy, with too few there, and with the default options.
pub(crate) fn hazards(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let mut names: Vec<String> = Vec::new();
    for entry in std::fs::read_dir(HAZARDS)? {
        let name = entry?.file_name().to_string_lossy().into_owned();
        if !name.ends_with(".so") {
            names.push(name);
        }
    }
    names.sort();
    ensure!(names.len() > 10, "only {names:?}");
    let size = machine.block();
    for name in names {
        let subject = match Subject::new(&Path::new(HAZARDS).join(&name)) {
            Ok(subject) => subject,
            Err(error) => {
                checks.fail("hazards", &name, &error)?;
                continue;
            }
        };
        // It changes the rights of single 4 KiB pages, which the pool's cannot have.
        let ways: &[(&str, u64)] = match name.as_str() {
            "page-tricks" => &[],
            _ => &[("auto", 32), ("move", 32), ("auto", 1)],
        };
        for &(way, pages) in ways {
            let what = if pages == 1 { "one page in the pool" } else { way };
            checks.check("hazards", format!("{name}: {what}"), || {
                only_pool(machine, size, pages)?;
                let launch = subject.hugetlb(size).env("ELFREMAP_STRATEGY", way);
                let movable = subject.movable(size);
                subject.run(&launch, |_, now| now.nothing_else(&movable, Kind::Hugetlb(size)))?;
                pool::expect_idle(size)
            })?;
        }
        checks.check("hazards", format!("{name}: default options"), || {
            only_pool(machine, size, 32)?;
            subject.run(&Launch::new(&subject.path).preload(), |_, _| Ok(()))?;
            pool::expect_idle(size)
        })?;
    }
    Ok(())
}

/// Bss on pages of 1 GiB, where it was asked for and where no other pool has any; too few
/// of them leave the program as it is.
pub(crate) fn gigantic(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let size = PageSize::SIZE_1G;
    ensure!(machine.sizes.contains(&size), "no pool of 1G pages");
    // Some kernels find both at boot, others one of them later.
    pool::set(size, 2)?;
    let subject = Subject::named(GIGANTIC)?;
    let (movable, kind) = (subject.movable(size), Kind::Hugetlb(size));
    ensure!(movable.certain.len() == 2, "movable: {:?}", movable.certain);
    let pools = "text:hugetlb,data:hugetlb,bss:hugetlb";
    let launch = Launch::new(&subject.path).preload().env("ELFREMAP_BACKEND", pools);
    let asked = launch.clone().env("ELFREMAP_PAGE_SIZE", "1G");
    for (name, launch) in [("asked for", &asked), ("only 1G pages in the pools", &launch)] {
        checks.check("1G", name, || {
            subject.run(launch, |_, now| now.moved_exactly(&movable, kind))?.silent()?;
            pool::expect_idle(size)
        })?;
    }
    checks.check("1G", "one page too few", || {
        pool::set(size, 1)?;
        let output = subject.run(&asked, |_, now| now.nothing_else(&movable, kind))?;
        output.warned_once(&["huge pages", "elfremap reserve"])?;
        pool::expect_idle(size)
    })
}
