//! What the move costs while a program runs: children cost more to fork, and each instance
//! has a copy of its own of what other programs share with the page cache.

use super::{OPTIONS, Session, Subject, file_size, find_program, order};
use crate::generate::{self, Spec};
use crate::record::Bench;
use crate::runner::Job;
use crate::snapshot;
use crate::variant::Variant;
use anyhow::{Context, Result};
use serde::Deserialize;
use std::collections::BTreeMap;

const BENCH: Bench = Bench::Costs;

/// Text and bss of the generated program, in MiB.
const TEXT_MB: u32 = 16;
const BSS_MB: u32 = 16;

/// CPU time of parent and child for each child, as the generated program prints it.
#[derive(Deserialize, Debug)]
struct Forked {
    exit_us: f64,
    write_us: f64,
    exec_us: f64,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    /// Forks.
    Forks,
    /// Prints a line and waits; a second one is started beside.
    Waits,
}

#[derive(Debug)]
struct Program {
    name: String,
    kind: Kind,
    job: Job,
    pages: u64,
}

impl Subject for Program {
    fn name(&self) -> &str {
        &self.name
    }

    fn pages(&self) -> u64 {
        self.pages
    }
}

pub(super) fn measure(session: &mut Session<'_>) -> Result<()> {
    let subjects = subjects(session)?;
    let variants: Vec<Variant> =
        session.all_variants(&OPTIONS)?.into_iter().map(Variant::bare).collect();
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        for variant in order(&variants, round.unwrap_or(0)) {
            if !session.wants(BENCH, &subject.name, variant, pool)? {
                continue;
            }
            let done = match subject.kind {
                Kind::Forks => forks(session, &subject.job, variant),
                Kind::Waits => instances(session, &subject.job, variant),
            };
            let done = session.tolerate(BENCH, &subject.name, variant, done)?;
            if let (Some(values), Some(round)) = (done, round) {
                session.sample(BENCH, &subject.name, &variant.name, round, values)?;
            }
        }
        Ok(())
    })
}

fn forks(session: &Session<'_>, job: &Job, variant: &Variant) -> Result<BTreeMap<String, f64>> {
    let run = session.runner.run(job, variant)?;
    let forked: Forked = serde_json::from_str(&run.stdout)
        .with_context(|| format!("cannot read `{}`", run.stdout))?;
    Ok(BTreeMap::from([
        ("exit_us".to_owned(), forked.exit_us),
        ("write_us".to_owned(), forked.write_us),
        ("exec_us".to_owned(), forked.exec_us),
    ]))
}

/// Two instances, the second while the first one is there.
fn instances(session: &Session<'_>, job: &Job, variant: &Variant) -> Result<BTreeMap<String, f64>> {
    let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let first = session.runner.start_waiting(job, variant)?;
    let image = snapshot::image(first.pid());
    let whole = snapshot::process(first.pid());
    let peak = snapshot::status_mb(first.pid(), "VmHWM");
    let one = snapshot::memory_mb(first.pid());
    // Only then look at errors: the first one is not left behind.
    let second = session.runner.start_waiting(job, variant);
    let both = second.as_ref().map_or(Ok((0.0, 0.0)), |second| -> Result<_> {
        let sum = snapshot::memory_mb(first.pid())? + snapshot::memory_mb(second.pid())?;
        let huge =
            snapshot::process(first.pid())?.moved() + snapshot::process(second.pid())?.moved();
        Ok((sum, mb(huge)))
    });
    let second = second.and_then(|second| second.finish());
    let (_, first_us) = first.finish()?;
    let ((_, second_us), (image, whole)) = (second?, (image?, whole?));
    let (both_mb, both_huge_mb) = both?;
    Ok(BTreeMap::from([
        ("text_file_huge_mb".to_owned(), mb(image.text.file)),
        ("peak_rss_mb".to_owned(), peak?),
        ("huge_mb".to_owned(), mb(whole.moved())),
        ("beside_mb".to_owned(), mb(image.beside(whole))),
        ("one_mb".to_owned(), one?),
        ("both_mb".to_owned(), both_mb),
        ("both_huge_mb".to_owned(), both_huge_mb),
        ("first_us".to_owned(), first_us),
        ("second_us".to_owned(), second_us),
    ]))
}

fn subjects(session: &Session<'_>) -> Result<Vec<Program>> {
    let spec = Spec { text_mb: TEXT_MB, stride: 4096, bss_mb: BSS_MB, seed: 1 };
    let chain = generate::build(&spec, &session.args.work)?;
    let name = format!("generated, {TEXT_MB} MB of text, {BSS_MB} MB of bss");
    let pages = u64::from(TEXT_MB + BSS_MB) / 2 + 8;
    let mut subjects = vec![
        Program {
            name: format!("{name}, forking"),
            kind: Kind::Forks,
            job: Job::new(&chain, &["1", "1", "fork", "50"]),
            // A child that writes has copies of the bss.
            pages: 3 * pages,
        },
        Program {
            name,
            kind: Kind::Waits,
            job: Job::new(&chain, &["1000", "1", "wait"]),
            pages: 2 * pages,
        },
    ];
    for (program, option, script) in [
        ("node", "-e", "console.log('ready'); process.stdin.resume()"),
        ("python3", "-c", "import sys; print('ready', flush=True); sys.stdin.read()"),
    ] {
        if let Some(path) = find_program(program) {
            let pages = 2 * (file_size(&path)?.div_ceil(2 << 20) + 16);
            let job = Job::new(&path, &[option, script]);
            subjects.push(Program { name: program.into(), kind: Kind::Waits, job, pages });
        }
    }
    Ok(subjects)
}
