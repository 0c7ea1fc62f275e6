//! A real program under test: its plain run, and how a run with the library must
//! compare with it.

use crate::mode::{Backend, Library, Mode};
use anyhow::{Context, Result, anyhow, bail, ensure};
use elfremap::prot::Prot;
use elfremap_tests::image::{Class, Image};
use elfremap_tests::lab::{Lab, helper};
use elfremap_tests::outcome::Skip;
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::Run;
use elfremap_tests::smaps::{Backing, Block, Cover, Merge, Snapshot};
use elfremap_tests::{BLOCK, PAGE, library};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// Pages in the pool where it shall be large enough: more than any program here takes.
const PLENTY: u64 = 160;

/// What a run of a program showed.
#[derive(Debug)]
pub(crate) struct Session {
    /// Everything that a user of the program sees, times and the like taken out.
    pub(crate) transcript: String,
    /// What the library said.
    pub(crate) warnings: Vec<String>,
    /// The program at work, and its children that run the same image.
    pub(crate) moments: Vec<Moment>,
}

/// A process at one moment.
#[derive(Debug)]
pub(crate) struct Moment {
    /// Which process, and when.
    pub(crate) what: &'static str,
    pub(crate) snapshot: Snapshot,
    /// Huge pages of the pool in use at that moment; only of meaning while it is ours.
    pub(crate) used: u64,
    /// Whether it has forked, or is a fork, and so shares its memory with others.
    forked: bool,
}

impl Moment {
    /// Looks at process `pid` of the program `image` now.
    ///
    /// # Errors
    /// When it cannot be read.
    pub(crate) fn now(what: &'static str, pid: u32, image: &Image) -> Result<Self> {
        let snapshot = Snapshot::take(pid, image)?;
        Ok(Self { what, snapshot, used: Counters::read()?.used(), forked: false })
    }

    /// The same, of a process that shares memory with one that it forked, or that forked it.
    pub(crate) fn forked(self) -> Self {
        Self { forked: true, ..self }
    }
}

/// Runs the program in a mode, from its start to its end.
pub(crate) type Scenario = Box<dyn Fn(&Lab, &Mode) -> Result<Session> + Send + Sync>;

/// A program under test.
pub(crate) struct Subject {
    pub(crate) name: &'static str,
    lab: Arc<Lab>,
    image: Image,
    scenario: Scenario,
    plain: OnceLock<Result<Session, String>>,
    /// How the plain program is placed when it starts; it changes the protection of its data
    /// later.
    at_start: Option<Moment>,
    /// Percent of text that must be on huge pages where rodata may join it.
    text_at_rx: u64,
}

impl Subject {
    pub(crate) fn new(name: &'static str, lab: Arc<Lab>, image: Image, scenario: Scenario) -> Self {
        let plain = OnceLock::new();
        Self { name, lab, image, scenario, plain, at_start: None, text_at_rx: 0 }
    }

    /// Asks for that much of the text, in percent, at merge level rx.
    pub(crate) fn text_at_rx(mut self, percent: u64) -> Self {
        self.text_at_rx = percent;
        self
    }

    /// The program protects a part of its data while it runs: at its start it is as in
    /// `moment` of the plain program.
    pub(crate) fn starts_as(mut self, moment: Moment) -> Self {
        self.at_start = Some(moment);
        self
    }

    /// Runs it in each mode, with huge pages enough, and compares with the plain run.
    ///
    /// # Errors
    /// What differs, for all modes; a skip when the first run is one.
    pub(crate) fn check(&self, modes: &[Mode]) -> Result<()> {
        let mut failures = Vec::new();
        let mut host = self.host()?;
        for mode in modes {
            let result =
                self.run(&mut host, mode, PLENTY).and_then(|session| self.verify(mode, &session));
            match result.with_context(|| format!("in mode: {mode}")) {
                Err(error) if error.is::<Skip>() => return Err(error),
                Err(error) => failures.push(format!("{error:#}")),
                Ok(()) => {}
            }
        }
        host.finish()?;
        ensure!(failures.is_empty(), "{}", failures.join("\n"));
        Ok(())
    }

    /// The control: with a library that does nothing, the program is as in the plain
    /// run, and what [`Subject::check`] asks for in `mode` is not there.
    ///
    /// # Errors
    /// When something differs, or does not although it must.
    pub(crate) fn check_control(&self, mode: &Mode) -> Result<()> {
        let mut host = self.host()?;
        let session = self.run(&mut host, &Mode::OFF, PLENTY)?;
        host.finish()?;
        self.verify(&Mode::OFF, &session)?;
        let proof = self.verify(mode, &session);
        ensure!(proof.is_err(), "a library that does nothing passes as {mode}");
        Ok(())
    }

    /// The machine, with the plain run done before it is ours alone.
    fn host(&self) -> Result<Host> {
        self.plain()?;
        let mut host = Host::lock()?;
        host.overcommit(0)?;
        // So that the kernel makes no page huge that nobody asked for.
        host.thp("madvise")?;
        Ok(host)
    }

    /// The pool has `pages` pages, and is idle again afterwards.
    fn run(&self, host: &mut Host, mode: &Mode, pages: u64) -> Result<Session> {
        host.pages(if uses_pool(mode) { pages } else { 0 })?;
        let session = (self.scenario)(&self.lab, mode)?;
        host.expect_idle()?;
        Ok(session)
    }

    fn verify(&self, mode: &Mode, session: &Session) -> Result<()> {
        let plain = self.plain()?;
        same_transcript(plain, session)?;
        ensure!(session.warnings.is_empty(), "said something on success: {:?}", session.warnings);
        for (then, now) in plain.moments.iter().zip(&session.moments) {
            self.compare(mode, then, now).context(now.what)?;
        }
        ensure!(plain.moments.len() == session.moments.len(), "not the processes of the plain run");
        Ok(())
    }

    fn plain(&self) -> Result<&Session> {
        let plain = self.plain.get_or_init(|| {
            (self.scenario)(&self.lab, &Mode::PLAIN).map_err(|error| format!("{error:#}"))
        });
        plain.as_ref().map_err(|text| anyhow!("the plain run failed: {text}"))
    }

    /// The pool as large as `elfremap-check` says is enough for `program`, which is what an
    /// independent count over all load addresses says, and one page less than that.
    ///
    /// # Errors
    /// When the numbers differ, or the program, or the library does not warn once.
    pub(crate) fn check_pool(&self, mode: &Mode, program: &Path) -> Result<()> {
        // What the library finds is how the program starts.
        let first = self.at_start.as_ref().or(self.plain()?.moments.first());
        let plain = &first.context("nothing was looked at")?.snapshot;
        let protections = plain.protections(&self.image);
        let (backend, merge) = mode.options();
        let needed = |bias: u64| {
            let blocks = protections.blocks(&self.image, bias);
            let expected = expected(&blocks, backend, merge);
            expected.iter().filter(|(_, backing)| *backing == Backing::Hugetlb).count()
        };
        // The kernel loads a PIE at any page.
        let places = if self.image.pie { BLOCK / PAGE } else { 1 };
        let worst = (0..places).map(|page| needed(plain.bias + page * PAGE)).max().unwrap_or(0);
        let said = mode.apply_to_check(Run::new(library::tool("elfremap-check")?)).arg(program);
        let said: serde_json::Value = serde_json::from_str(&helper(&said.arg("--json"))?)?;
        let said = said.pointer("/need/pool_pages/worst").and_then(serde_json::Value::as_u64);
        ensure!(said == Some(worst as u64), "elfremap-check says {said:?} pages, counted: {worst}");

        let mut host = self.host()?;
        let random = Mode { aslr: true, ..*mode };
        self.verify(&random, &self.run(&mut host, &random, worst as u64)?)
            .context("with enough pages")?;
        // At a fixed address the number is known to the page.
        let fixed = Mode { aslr: false, ..*mode };
        let exact = needed(plain.bias) as u64;
        self.verify(&fixed, &self.run(&mut host, &fixed, exact)?)
            .context("with just enough pages")?;
        let short = self.run(&mut host, &fixed, exact - 1)?;
        host.finish()?;
        same_transcript(self.plain()?, &short)?;
        ensure!(
            matches!(&short.warnings[..], [one] if one.contains("elfremap reserve")),
            "with one page less, one warning with the remedy expected: {:?}",
            short.warnings
        );
        for (then, now) in self.plain()?.moments.iter().zip(&short.moments) {
            self.kept(&fixed, then, now).context("with one page less")?;
            self.lab.note(self.row(&fixed, now, &now.snapshot.coverage(&self.image)));
        }
        Ok(())
    }

    /// That no byte's protection differs from the plain run's but as asked for.
    fn kept(&self, mode: &Mode, then: &Moment, now: &Moment) -> Result<()> {
        let (_, merge) = mode.options();
        let plain = then.snapshot.protections(&self.image);
        let changed = plain.differences(&now.snapshot.protections(&self.image), |then, now| {
            then == Prot::READ
                && (merge >= Merge::Rx && now == Some(Prot::RX)
                    || merge >= Merge::Relro && now == Some(Prot::RW))
        });
        ensure!(changed.is_empty(), "protections changed: {changed:?}");
        ensure!(
            now.snapshot.write_exec() == then.snapshot.write_exec(),
            "a mapping became writable and executable"
        );
        Ok(())
    }

    fn compare(&self, mode: &Mode, then: &Moment, now: &Moment) -> Result<()> {
        let (backend, merge) = mode.options();
        let snapshot = &now.snapshot;
        self.kept(mode, then, now)?;
        let plain = &then.snapshot;
        let blocks = plain.protections(&self.image).blocks(&self.image, snapshot.bias);
        let mut expected = expected(&blocks, backend, merge);
        if now.forked {
            // Which of the processes has which copy of a written page depends on who wrote first.
            expected.retain(|(block, _)| !block.prots.contains(&Prot::RW));
        }
        let mut wrong = Vec::new();
        let mut pages = BTreeMap::new();
        for (block, backing) in &expected {
            let found = snapshot.backing(block.range);
            let right = match backing {
                Backing::Small => found.keys().all(|b| *b == Backing::Small),
                huge => snapshot.is_all(block.range, *huge),
            };
            if !right {
                wrong.push(format!(
                    "{} {:?}: {backing:?} expected, found {found:?}",
                    block.range, block.classes
                ));
            }
            *pages.entry(*backing).or_insert(0u64) += 1;
        }
        let cover = snapshot.coverage(&self.image);
        self.lab.note(self.row(mode, now, &cover));
        if !wrong.is_empty() {
            bail!(
                "{} of {} blocks are not where they should be:\n{}",
                wrong.len(),
                expected.len(),
                wrong.join("\n")
            );
        }
        let hugetlb = pages.get(&Backing::Hugetlb).copied().unwrap_or(0);
        ensure!(
            now.used == hugetlb || now.forked && backend == Some(Backend::Hugetlb),
            "{} huge pages of the pool in use, {hugetlb} expected",
            now.used
        );
        if merge >= Merge::Rx {
            let text = percent(&cover, &[Class::Text]);
            ensure!(
                text >= self.text_at_rx,
                "{text} % of text on huge pages, {} expected",
                self.text_at_rx
            );
        }
        Ok(())
    }

    fn row(&self, mode: &Mode, moment: &Moment, cover: &BTreeMap<Class, Cover>) -> String {
        let mut row = format!("{:<11} {:<26} {:<10}", self.name, mode.to_string(), moment.what);
        for (label, classes) in [
            ("text", &[Class::Text][..]),
            ("rodata", &[Class::Rodata]),
            ("relro", &[Class::Relro]),
            ("data+bss", &[Class::Data, Class::Bss]),
            ("heap tail", &[Class::HeapTail]),
        ] {
            let of = |value| sum(cover, classes, value);
            let (total, hugetlb, thp) = (of(|c| c.total), of(|c| c.hugetlb), of(|c| c.thp));
            let kind = match (hugetlb, thp) {
                (0, 0) => "",
                (_, 0) => " hugetlb",
                (0, _) => " thp",
                _ => " both",
            };
            row += &format!(" | {label} {}/{}{kind}", megabytes(hugetlb + thp), megabytes(total));
        }
        row + &format!(" | {} of the pool", moment.used)
    }
}

fn sum(cover: &BTreeMap<Class, Cover>, classes: &[Class], value: fn(&Cover) -> u64) -> u64 {
    classes.iter().filter_map(|class| cover.get(class)).map(value).sum()
}

/// How much of these classes lies on huge pages, in percent; all of nothing is 100.
fn percent(cover: &BTreeMap<Class, Cover>, classes: &[Class]) -> u64 {
    let huge = sum(cover, classes, |c| c.hugetlb + c.thp);
    (100 * huge).checked_div(sum(cover, classes, |c| c.total)).unwrap_or(100)
}

/// That the user of the program saw the same.
///
/// # Errors
/// The first line that differs.
pub(crate) fn same_transcript(plain: &Session, now: &Session) -> Result<()> {
    let mut lines = now.transcript.lines();
    for (number, then) in plain.transcript.lines().enumerate() {
        let line = lines.next();
        ensure!(line == Some(then), "line {} differs: {line:?} instead of {then:?}", number + 1);
    }
    ensure!(lines.next().is_none(), "more lines than in the plain run");
    Ok(())
}

fn uses_pool(mode: &Mode) -> bool {
    !matches!(mode.library, Library::Absent | Library::On(Backend::Thp, _))
}

/// The program's own bytes in a block.
fn own_bytes(block: &Block) -> u64 {
    block
        .classes
        .iter()
        .filter(|(class, _)| **class != Class::HeapTail)
        .map(|(_, bytes)| bytes)
        .sum()
}

fn megabytes(bytes: u64) -> String {
    let tenths = bytes * 10 / (1 << 20);
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// What each of the program's blocks must lie on.
fn expected(blocks: &[Block], backend: Option<Backend>, merge: Merge) -> Vec<(&Block, Backing)> {
    /// What moves by default; relro is a part of data.
    const CLASSES: &[Class] = &[Class::Text, Class::Relro, Class::Data, Class::Bss];
    let selected = |block: &&Block| block.is_uniform(merge) && !block.header && block.has(CLASSES);
    // A program that has not even one block's worth to gain is left alone.
    let gain: u64 = blocks.iter().filter(selected).map(own_bytes).sum();
    blocks
        .iter()
        .map(|block| match backend {
            Some(backend) if gain >= BLOCK && selected(&block) => {
                let written = block.prots.contains(&Prot::RW);
                (block, if written { backend.written() } else { backend.read_only() })
            }
            _ => (block, Backing::Small),
        })
        .collect()
}
