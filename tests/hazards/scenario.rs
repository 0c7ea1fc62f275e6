//! What every test program goes through: plain as the reference, then under the
//! preload with both strategies and backends, with and without enough pages.

use crate::build::{Built, build};
use crate::source::{Expect, Source, named, options};
use anyhow::{Context, Result, ensure};
use elfremap::prot::Prot;
use elfremap_tests::BLOCK;
use elfremap_tests::image::{Class, Image};
use elfremap_tests::library::tool;
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Output, Run, Running};
use elfremap_tests::smaps::{Backing, Block, Merge, Protections, Snapshot};
use std::path::{Path, PathBuf};
use std::process::Command;

/// More pages than any of the programs needs.
pub(crate) const AMPLE: u64 = 40;

/// A test program of one cell with its plain runs.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    pub(crate) source: Source,
    pub(crate) built: Built,
    pub(crate) image: Image,
    merge: Merge,
    classes: Vec<Class>,
    /// Output of the plain run.
    pub(crate) plain: Output,
    /// Protections in the plain run without ASLR.
    protections: Protections,
    /// Writable and executable mappings in the plain run.
    write_exec: usize,
}

/// `ELFREMAP_BACKEND`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Backend {
    /// Read-only ranges on hugetlb, writable ones on THP.
    Auto,
    Hugetlb,
    Thp,
}

impl Backend {
    pub(crate) const fn value(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Hugetlb => "hugetlb",
            Self::Thp => "thp",
        }
    }

    fn of(self, block: &Block) -> Backing {
        let writable = block.prots.iter().any(|p| p.has(Prot::WRITE));
        match self {
            Self::Auto if writable => Backing::Thp,
            Self::Thp => Backing::Thp,
            Self::Auto | Self::Hugetlb => Backing::Hugetlb,
        }
    }
}

/// How much of what the independent count selects has to lie on huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Moved {
    /// All, each block on what the backend says.
    All,
    /// Each block on one kind of page; what fits.
    WholeBlocks,
    /// None.
    Nothing,
}

/// What a look at a run found.
#[derive(Clone, Debug)]
pub(crate) struct Inspection {
    /// Pages of the pool that it has mapped.
    pub(crate) used: u64,
    pub(crate) output: Output,
    /// Whether every block that was to move lies on huge pages.
    pub(crate) complete: bool,
    /// The blocks that were to move.
    selected: Vec<Block>,
    /// Whether a byte became writable that was not.
    loosened: bool,
}

impl Case {
    /// Builds `source` for `cell` and runs it plain.
    pub(crate) fn new(source: &Source, cell: &[String]) -> Result<Self> {
        let built = build(source, cell)?;
        let mut source = source.clone();
        source.env.extend(options(cell));
        Self::of(source, built)
    }

    /// The same program in another file.
    pub(crate) fn with_binary(&self, binary: PathBuf) -> Result<Self> {
        Self::of(self.source.clone(), Built { binary, ..self.built.clone() })
    }

    fn of(source: Source, built: Built) -> Result<Self> {
        let image = Image::read(&built.binary)?;
        let setting = |name: &str| {
            source.env.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
        };
        let merge = match setting("ELFREMAP_MERGE") {
            None | Some("none") => Merge::None,
            Some("rx") => Merge::Rx,
            Some("relro") => Merge::Relro,
            Some("rwx") => Merge::Rwx,
            Some(other) => anyhow::bail!("unknown merge level {other}"),
        };
        let mut classes = Vec::new();
        for class in setting("ELFREMAP_SEGMENTS").unwrap_or("text,data,bss").split(',') {
            classes.extend_from_slice(match class {
                "text" => &[Class::Text],
                "rodata" => &[Class::Rodata],
                "data" => &[Class::Data, Class::Relro],
                "bss" => &[Class::Bss],
                other => anyhow::bail!("unknown class {other}"),
            });
        }
        let plain_run = command(&source, &built);
        let plain = plain_run.output()?;
        ensure!(
            plain.status.code() == Some(source.exit),
            "the plain run ended with {:?}: {}{}",
            plain.status,
            String::from_utf8_lossy(&plain.stdout),
            String::from_utf8_lossy(&plain.stderr)
        );
        let running = plain_run.aslr_off().until_ready()?;
        let snapshot = Snapshot::take(running.pid(), &image)?;
        running.finish()?.same_as(&plain).context("plain run without ASLR")?;
        let protections = snapshot.protections(&image);
        let write_exec = snapshot.write_exec();
        Ok(Self { source, built, image, merge, classes, plain, protections, write_exec })
    }

    /// The program `name`, built for `cell` whether or not its directives say so.
    pub(crate) fn named(name: &str, cell: &[&str]) -> Result<Self> {
        let cell: Vec<_> = cell.iter().map(|word| (*word).to_owned()).collect();
        Self::new(&named(name)?, &cell)
    }

    /// A run of the program with its own preloads, plain.
    pub(crate) fn plain_run(&self) -> Run {
        command(&self.source, &self.built)
    }

    /// A run under the preload.
    pub(crate) fn run(&self, backend: Backend) -> Result<Run> {
        self.run_binary(&self.built.binary, backend)
    }

    /// The same for a copy of the program.
    pub(crate) fn run_binary(&self, binary: &Path, backend: Backend) -> Result<Run> {
        let run = Run::new(binary).preload()?.env("ELFREMAP_BACKEND", backend.value());
        let run = self.built.preloads.iter().fold(run, |run, path| run.preload_too(path));
        Ok(self.source.env.iter().fold(run, |run, (name, value)| run.env(name, value)))
    }

    /// Blocks that the independent count selects at this load address.
    fn selected(&self, bias: u64) -> (Vec<Block>, Vec<Block>) {
        self.protections.blocks(&self.image, bias).into_iter().partition(|block| {
            block.is_uniform(self.merge) && !block.header && block.has(&self.classes)
        })
    }

    /// Runs the program up to its `ready` and compares it with the plain run:
    /// protections, what lies on huge pages, output.
    pub(crate) fn inspect(&self, run: &Run, backend: Backend, moved: Moved) -> Result<Inspection> {
        let running = run.until_ready()?;
        let snapshot = Snapshot::take(running.pid(), &self.image)?;
        self.inspect_as(running, &snapshot, backend, moved)
    }

    /// The same for a program that is `ready`, with its snapshot.
    pub(crate) fn inspect_as(
        &self,
        running: Running,
        snapshot: &Snapshot,
        backend: Backend,
        moved: Moved,
    ) -> Result<Inspection> {
        let used = snapshot.hugetlb_bytes() / BLOCK;
        let (selected, loosened) = self.compare(snapshot, backend, moved)?;
        let is_small = |block: &Block| {
            snapshot.backing(block.range).keys().all(|backing| *backing == Backing::Small)
        };
        let complete = !selected.iter().any(is_small);
        let output = running.finish()?;
        output.same_as(&self.plain)?;
        Ok(Inspection { used, output, complete, selected, loosened })
    }

    /// A run in which something may be refused: each block is whole or untouched, and
    /// what was left undone was said in one line.
    pub(crate) fn inspect_refused(&self, run: &Run, backend: Backend) -> Result<Inspection> {
        let inspection = self.inspect(run, backend, Moved::WholeBlocks)?;
        let lines = inspection.output.warnings();
        ensure!(lines.len() <= 1, "more than one line: {lines:?}");
        ensure!(inspection.complete || lines.len() == 1, "not all was moved, without a word");
        Ok(inspection)
    }

    /// The blocks that were to move, and whether relro became writable.
    fn compare(
        &self,
        snapshot: &Snapshot,
        backend: Backend,
        moved: Moved,
    ) -> Result<(Vec<Block>, bool)> {
        let now = snapshot.protections(&self.image);
        let differences =
            self.protections.differences(&now, |then, now| self.may_become(then, now));
        ensure!(differences.is_empty(), "protections: {differences:?}");
        let kept = |then: Prot, now: Option<Prot>| {
            then.has(Prot::WRITE) || now.is_some_and(|now| !now.has(Prot::WRITE))
        };
        let loosened = !self.protections.differences(&now, kept).is_empty();
        ensure!(
            self.merge == Merge::Rwx || snapshot.write_exec() <= self.write_exec,
            "mappings that are writable and executable"
        );
        let (selected, others) = self.selected(snapshot.bias);
        if self.source.expect == Expect::Parity {
            return Ok((selected, loosened));
        }
        let mut hugetlb = 0;
        for block in &selected {
            let backing = snapshot.backing(block.range);
            let want = backend.of(block);
            let good = match moved {
                Moved::All => snapshot.is_all(block.range, want),
                Moved::WholeBlocks => backing.len() == 1,
                Moved::Nothing => backing.keys().all(|b| *b == Backing::Small),
            };
            ensure!(
                good,
                "block {} ({:?}) lies on {backing:?}, {moved:?} on {want:?} expected",
                block.range,
                block.classes
            );
            hugetlb += u64::from(snapshot.is_all(block.range, Backing::Hugetlb));
        }
        for block in others {
            let backing = snapshot.backing(block.range);
            ensure!(
                backing.keys().all(|b| *b == Backing::Small),
                "block {} ({:?}) lies on {backing:?}, and must not be moved",
                block.range,
                block.prots
            );
        }
        let used = snapshot.hugetlb_bytes() / BLOCK;
        ensure!(hugetlb == used, "{hugetlb} blocks on hugetlb, but {used} pages in use");
        Ok((selected, loosened))
    }

    /// What a merge level allows a byte's protection to become.
    fn may_become(&self, then: Prot, now: Option<Prot>) -> bool {
        let now = now.unwrap_or(Prot::NONE);
        match self.merge {
            Merge::None => false,
            Merge::Rx => (then, now) == (Prot::READ, Prot::RX),
            Merge::Relro => then == Prot::READ && (now == Prot::RX || now == Prot::RW),
            Merge::Rwx => now.has(then),
        }
    }

    /// What the preload had to say: nothing, or one line when something usual was not
    /// done (`short`), or a right was given that a merge level names.
    fn said_what_was_due(&self, inspection: &Inspection, short: bool) -> Result<()> {
        let output = &inspection.output;
        if self.source.expect == Expect::Parity {
            ensure!(output.warnings().len() <= 1, "more than one line: {:?}", output.warnings());
            return Ok(());
        }
        let write_exec = self.image.parts.iter().any(|(_, class)| *class == Class::WriteExec);
        let left = write_exec && self.merge != Merge::Rwx;
        if inspection.loosened {
            return output.warned_once(&["RELRO is off"]);
        }
        if short || left { output.warned_once(&[]) } else { output.silent() }
    }

    /// One run with its checks; afterwards the pool is idle again.
    fn step(
        &self,
        host: &Host,
        name: &str,
        (run, backend): (Run, Backend),
        (moved, short): (Moved, bool),
    ) -> Result<Inspection> {
        let body = || -> Result<Inspection> {
            let inspection = self.inspect(&run, backend, moved)?;
            self.said_what_was_due(&inspection, short)?;
            host.expect_idle()?;
            Ok(inspection)
        };
        body().with_context(|| name.to_owned())
    }

    /// All runs. The pool must be this test's for the time.
    pub(crate) fn all_runs(&self, host: &mut Host) -> Result<()> {
        use Backend::{Auto, Hugetlb, Thp};
        host.pages(AMPLE)?;
        let step = |name: &str, run: Run, backend| {
            self.step(host, name, (run, backend), (Moved::All, false))
                .map(|inspection| inspection.used)
        };
        step("backend auto", self.run(Auto)?, Auto)?;
        step("backend hugetlb", self.run(Hugetlb)?, Hugetlb)?;
        for strategy in ["swap", "move"] {
            for backend in [Hugetlb, Auto] {
                let name = format!("strategy {strategy}, backend {}", backend.value());
                step(&name, self.run(backend)?.env("ELFREMAP_STRATEGY", strategy), backend)?;
            }
            let run = self.run(Hugetlb)?.env("ELFREMAP_STRATEGY", strategy).aslr_off();
            step(&format!("strategy {strategy}, ASLR off"), run, Hugetlb)?;
        }
        let used = step("backend thp", self.run(Thp)?, Thp)?;
        ensure!(used == 0, "backend thp took {used} pages of the pool");
        step("backend thp, ASLR off", self.run(Thp)?.aslr_off(), Thp)?;
        step("backend auto, ASLR off", self.run(Auto)?.aslr_off(), Auto)?;
        let need = step("ASLR off", self.run(Hugetlb)?.aslr_off(), Hugetlb)?;
        if self.source.expect == Expect::Moved {
            ensure!(need > 0, "nothing was moved");
            self.agrees_with_check(need)?;
            self.shortages(host, need, &[need - 1, 0])?;
        }
        Ok(())
    }

    /// `elfremap-check` says the number of pages beforehand: exactly where the load
    /// address is known, else what holds for every address.
    fn agrees_with_check(&self, need: u64) -> Result<()> {
        let mut command = Command::new(tool("elfremap-check")?);
        command.args(["--json", "--backend", "hugetlb"]).arg(&self.built.binary);
        command.env_clear().envs(self.source.env.iter().map(|(k, v)| (k, v)));
        let output = command.output()?;
        let said: serde_json::Value = serde_json::from_slice(&output.stdout)
            .with_context(|| String::from_utf8_lossy(&output.stderr).into_owned())?;
        let pages = |key: &str| {
            let number = said["need"]["pool_pages"][key].as_u64();
            number.with_context(|| format!("no {key} number of pages in {}", said["need"]))
        };
        let (best, worst) = (pages("best")?, pages("worst")?);
        let exact = self.image.pie || best == worst;
        ensure!(
            exact && (best..=worst).contains(&need),
            "elfremap-check says {best} to {worst} pages, {need} were taken"
        );
        Ok(())
    }

    /// A pool of exactly `need` pages, and the smaller ones in `sizes`.
    pub(crate) fn shortages(&self, host: &mut Host, need: u64, sizes: &[u64]) -> Result<()> {
        let off = |backend| self.run(backend).map(Run::aslr_off);
        host.pages(need)?;
        let run = (off(Backend::Hugetlb)?, Backend::Hugetlb);
        self.step(host, "as many pages as needed", run, (Moved::All, false))?;
        for &pages in sizes {
            host.pages(pages)?;
            for strategy in ["swap", "move"] {
                let run = off(Backend::Hugetlb)?.env("ELFREMAP_STRATEGY", strategy);
                let moved = if pages == 0 { Moved::Nothing } else { Moved::WholeBlocks };
                let name = format!("strategy {strategy}, {pages} pages of {need}");
                self.step(host, &name, (run, Backend::Hugetlb), (moved, true))?;
            }
        }
        // The ladder: what hugetlb does not give is taken from THP.
        host.pages(0)?;
        let inspection = self
            .inspect(&off(Backend::Auto)?, Backend::Thp, Moved::All)
            .context("backend auto, pool empty")?;
        ensure!(inspection.used == 0, "pages from an empty pool");
        let wanted = inspection.selected.iter().any(|b| Backend::Auto.of(b) == Backing::Hugetlb);
        self.said_what_was_due(&inspection, wanted).context("backend auto, pool empty")
    }

    /// `count` runs with randomised addresses, in turn by both backends: no signal,
    /// no difference.
    pub(crate) fn many_runs(&self, host: &mut Host, count: u32) -> Result<()> {
        host.pages(2 * AMPLE)?;
        let runs = [self.run(Backend::Auto)?, self.run(Backend::Hugetlb)?];
        in_parallel(count, |index| {
            let output = runs[index as usize % 2].output()?;
            output.same_as(&self.plain).with_context(|| format!("run {index}"))
        })?;
        host.expect_idle()
    }
}

fn command(source: &Source, built: &Built) -> Run {
    let run =
        built.preloads.iter().fold(Run::new(&built.binary), |run, path| run.preload_too(path));
    source.env.iter().fold(run, |run, (name, value)| run.env(name, value))
}

/// Calls `body` with 0 to `count` - 1, two at a time; the first error ends it.
pub(crate) fn in_parallel(count: u32, body: impl Fn(u32) -> Result<()> + Sync) -> Result<()> {
    use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
    let next = AtomicU32::new(0);
    let work = || {
        loop {
            let index = next.fetch_add(1, Relaxed);
            if index >= count {
                return Ok(());
            }
            body(index).inspect_err(|_| next.store(count, Relaxed))?;
        }
    };
    std::thread::scope(|scope| {
        let other = scope.spawn(work);
        let here: Result<()> = work();
        let there = other.join().map_err(|_| anyhow::anyhow!("a run panicked"))?;
        here.and(there)
    })
}
