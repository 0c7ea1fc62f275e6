//! Start after start with options, pool sizes and limits drawn at random: parity each
//! time, and the pool as it was.
//!
//! `SOAK_STARTS` (2000 by default) and `SOAK_SEED` (1) say how many and which; both are
//! printed. The same seed draws the same starts, but they run two at a time.

use crate::build::launcher;
use crate::scenario::{Backend, Case, in_parallel};
use anyhow::{Context, Result, ensure};
use elfremap_tests::lab::Lab;
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Output, Run};
use libtest_mimic::Trial;
use nix::sys::resource::Resource;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::Duration;

pub(crate) fn trials() -> Vec<Trial> {
    vec![trial("soak::random-starts", random_starts)]
}

/// Starts for which the pool has one size.
const BATCH: u32 = 50;

/// The programs, a cell of each, and what each can live with.
const PROGRAMS: &[(&str, &[&str], Fits)] = &[
    ("plain", &["pie", "bfd"], Fits::All),
    ("plain", &["no-pie", "bfd"], Fits::All),
    ("layout", &["pie", "lld", "default"], Fits::Most),
    ("layout", &["no-pie", "gold", "norelro"], Fits::Most),
    ("layout", &["pie", "mold", "page2m"], Fits::Most),
    ("layout", &["no-pie", "bfd", "loads12"], Fits::Most),
    ("rights", &["pie", "bfd", "now"], Fits::Rights),
    ("edges", &["no-pie", "bfd", "edge=1"], Fits::All),
    ("overlap", &["no-pie", "bfd", "data5ff000"], Fits::All),
    ("early-bss", &["pie", "bfd"], Fits::Most),
    ("earlyheap", &["no-pie", "bfd"], Fits::Most),
    ("sbrk", &["no-pie", "bfd", "BSS1900K"], Fits::Most),
    ("copyreloc", &["no-pie", "bfd", "default"], Fits::Most),
    ("runtime", &["pie", "bfd", "rdynamic"], Fits::Header),
    ("rust-unwind", &["pie", "bfd"], Fits::Header),
    ("interpose", &["pie", "bfd", "rdynamic"], Fits::Most),
    ("signals", &["pie", "bfd"], Fits::Most),
    ("guest", &["pie", "bfd"], Fits::Most),
    ("threads", &["pie", "bfd"], Fits::Most),
    ("fork", &["no-pie", "bfd"], Fits::Most),
    ("workers", &["pie", "bfd"], Fits::Most),
    ("exec", &["pie", "bfd"], Fits::Most),
    ("nosections", &["no-pie", "bfd", "truncated"], Fits::All),
];

/// What may be drawn for a program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fits {
    /// Everything, a launcher that takes system calls away included.
    All,
    /// What the preload's options offer.
    Most,
    /// No option that makes something writable: the program says when it is.
    Rights,
    /// The ELF header stays: the program looks for it.
    Header,
}

/// A program with its plain run's output.
struct Guest {
    name: String,
    run: Run,
    plain: Output,
    fits: Fits,
}

fn guests(lab: &Lab) -> Result<Vec<Guest>> {
    let mut guests = Vec::new();
    for &(name, cell, fits) in PROGRAMS {
        let case = Case::named(name, cell)?;
        let run = case.run(Backend::Auto)?;
        guests.push(Guest {
            name: format!("{name}::{}", cell.join("-")),
            run,
            plain: case.plain,
            fits,
        });
    }
    let mariadbd = lab.run("/usr/sbin/mariadbd").args(["--no-defaults", "--version"]);
    let plain = mariadbd.output()?;
    ensure!(plain.status.success(), "mariadbd --version: {plain:?}");
    // As often as all the others together: it is what the library is for.
    for _ in 0..PROGRAMS.len() {
        let run = mariadbd.clone().preload_too(lab.library()?);
        let plain = plain.clone();
        guests.push(Guest { name: "mariadbd".to_owned(), run, plain, fits: Fits::Most });
    }
    Ok(guests)
}

/// The generator splitmix64.
struct Random(u64);

impl Random {
    /// The generator of the `number`th start.
    const fn new(seed: u64, number: u32) -> Self {
        Self(seed.wrapping_add((number as u64) << 32))
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True once in `n` times.
    fn once_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[usize::try_from(self.below(from.len() as u64)).unwrap_or(0)]
    }
}

/// What was drawn for a start.
struct Start {
    run: Run,
    /// What to say about it when it fails.
    text: String,
    /// Killed after this time.
    killed: Option<Duration>,
    /// Whether the library says more than what went wrong.
    talks: bool,
}

fn draw(guest: &Guest, random: &mut Random) -> Result<Start> {
    let mut run = guest.run.clone();
    let mut text = guest.name.clone();
    let mut set = |name: &str, value: &str| {
        text += &format!(" {name}={value}");
        run = run.clone().env(name, value);
    };
    set(
        "ELFREMAP_BACKEND",
        random.pick(&[
            "auto",
            "auto",
            "hugetlb",
            "hugetlb",
            "thp",
            "text:thp,data:hugetlb,bss:hugetlb",
            "text:hugetlb,bss:thp",
        ]),
    );
    set("ELFREMAP_STRATEGY", random.pick(&["auto", "swap", "move"]));
    let merges: &[&str] =
        if guest.fits == Fits::Rights { &["none", "rx"] } else { &["none", "rx", "relro", "rwx"] };
    set("ELFREMAP_MERGE", random.pick(merges));
    let mut segments: Vec<&str> =
        ["text", "rodata", "data", "bss"].into_iter().filter(|_| !random.once_in(4)).collect();
    if guest.fits != Fits::Header && random.once_in(4) {
        segments.push("header");
    }
    if !segments.is_empty() {
        set("ELFREMAP_SEGMENTS", &segments.join(","));
    }
    let numa = random.pick(&["inherit", "inherit", "local", "interleave", "0"]);
    set("ELFREMAP_NUMA", numa);
    let inherit = random.pick(&["0", "1"]);
    set("ELFREMAP_INHERIT", inherit);
    if random.once_in(3) {
        set("ELFREMAP_PAGE_SIZE", random.pick(&["2M", "2M", "1G"]));
    }
    let log = random.pick(&["off", "error", "warn", "warn", "info", "debug"]);
    set("ELFREMAP_LOG", log);
    if random.once_in(2) {
        text += ", ASLR off";
        run = run.aslr_off();
    }
    if guest.fits == Fits::All && random.once_in(4) {
        let step = random.pick(&[
            "mdwe",
            "deny=mremap:EPERM",
            "deny=mremap:ENOSYS",
            "deny=madvise:EINVAL",
            "deny-exec=EACCES:10",
            "no-proc",
        ]);
        text += &format!(", {step}");
        run = run.through(launcher()?, &[step]);
    }
    if guest.fits == Fits::All && random.once_in(8) {
        // Room for the program and some of a second copy.
        let limit = 24 + random.below(40);
        text += &format!(", address space of {limit} MiB");
        run = run.limit(Resource::RLIMIT_AS, limit << 20);
    }
    let killed = random.once_in(8).then(|| Duration::from_micros(random.below(20_000)));
    Ok(Start { run, text, killed, talks: ["info", "debug"].contains(&log) })
}

impl Start {
    fn check(&self, plain: &Output) -> Result<()> {
        if let Some(delay) = self.killed {
            let running = self.run.start_waiting()?;
            std::thread::sleep(delay);
            return running.kill().map(drop);
        }
        let output = self.run.output()?;
        output.same_as(plain)?;
        let said = output.warnings();
        ensure!(self.talks || said.len() <= 1, "more than one line: {said:?}");
        Ok(())
    }
}

fn number(name: &str, otherwise: u64) -> Result<u64> {
    match std::env::var(name) {
        Ok(text) => text.parse().with_context(|| format!("{name} is not a number")),
        Err(_) => Ok(otherwise),
    }
}

fn random_starts() -> Result<()> {
    let lab = Lab::new()?;
    let guests = guests(&lab)?;
    let seed = number("SOAK_SEED", 1)?;
    let starts = u32::try_from(number("SOAK_STARTS", 2000)?)?;
    eprintln!("soak: SOAK_STARTS={starts} SOAK_SEED={seed}");
    let killed = AtomicU32::new(0);
    for batch in 0..starts.div_ceil(BATCH) {
        let mut host = Host::lock()?;
        let mut random = Random::new(!seed, batch);
        // Ample, just too few, or none; sometimes the kernel may add some.
        let pages = match random.below(4) {
            0 => 0,
            1 => random.below(8),
            _ => random.below(80),
        };
        let extra = if random.once_in(3) { random.below(10) } else { 0 };
        host.pages(pages)?;
        host.overcommit(extra)?;
        let first = batch * BATCH;
        in_parallel(BATCH.min(starts - first), |index| {
            let mut random = Random::new(seed, first + index);
            let guest = &guests[usize::try_from(random.below(guests.len() as u64))?];
            let start = draw(guest, &mut random)?;
            killed.fetch_add(u32::from(start.killed.is_some()), Relaxed);
            start.check(&guest.plain).with_context(|| {
                let n = first + index;
                format!("seed {seed}, start {n}: pool of {pages} and {extra} more, {}", start.text)
            })
        })?;
        host.finish().with_context(|| format!("seed {seed}, batch {batch}"))?;
    }
    let killed = killed.into_inner();
    eprintln!("soak: {starts} starts, {killed} of them killed");
    ensure!(starts < 200 || killed > 0, "none was killed");
    Ok(())
}
