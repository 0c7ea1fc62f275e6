//! What the move gains while a program runs: the generated program, which does
//! nothing but what huge pages are good for.

use super::{OPTIONS, Session, Subject, order};
use crate::generate::{self, Spec};
use crate::record::Bench;
use crate::runner::Job;
use crate::snapshot::Image;
use crate::stats;
use crate::variant::Variant;
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use std::collections::BTreeMap;

const BENCH: Bench = Bench::Runtime;

/// Bss of the generated programs, in MiB.
const BSS_MB: u32 = 16;

/// What the generated program prints.
#[derive(Deserialize, Debug)]
pub(crate) struct Walked {
    /// Nanoseconds per hop, one for each repetition.
    pub text_ns: Vec<f64>,
    pub bss_ns: Vec<f64>,
    /// The same for every run of the program with the same arguments.
    pub checksum: u32,
}

#[derive(Debug)]
struct Chain {
    name: String,
    job: Job,
    text_mb: u32,
}

impl Subject for Chain {
    fn name(&self) -> &str {
        &self.name
    }

    fn pages(&self) -> u64 {
        u64::from(self.text_mb + BSS_MB) / 2 + 8
    }
}

pub(super) fn measure(session: &mut Session<'_>) -> Result<()> {
    const DEFAULT_MB: [u32; 4] = [4, 16, 64, 128];
    let sizes =
        if session.args.text_mb.is_empty() { &DEFAULT_MB[..] } else { &session.args.text_mb };
    let mut subjects = Vec::new();
    for &text_mb in sizes {
        for &stride in &session.args.stride {
            let spec = Spec { text_mb, stride, bss_mb: BSS_MB, seed: 1 };
            let program = generate::build(&spec, &session.args.work)?;
            subjects.push(Chain {
                name: format!("{text_mb} MB, a block per {stride} B"),
                job: Job::new(&program, &["1000", "3", "wait"]),
                text_mb,
            });
        }
    }
    let variants: Vec<Variant> =
        session.all_variants(&OPTIONS)?.into_iter().map(Variant::bare).collect();
    let mut checksums = BTreeMap::new();
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        for variant in order(&variants, round.unwrap_or(0)) {
            if !session.wants(BENCH, &subject.name, variant, pool)? {
                continue;
            }
            let done = session.runner.walk(&subject.job, variant);
            let Some((line, image)) = session.tolerate(BENCH, &subject.name, variant, done)? else {
                continue;
            };
            let walked = parse(&line)?;
            let first = *checksums.entry(subject.name.clone()).or_insert(walked.checksum);
            ensure!(
                walked.checksum == first,
                "{} in variant {} computed {}, not {first}",
                subject.name,
                variant.name,
                walked.checksum
            );
            if let Some(round) = round {
                session.sample(
                    BENCH,
                    &subject.name,
                    &variant.name,
                    round,
                    values(&walked, image),
                )?;
            }
        }
        Ok(())
    })
}

/// Reads the line that a generated program prints.
pub(crate) fn parse(line: &str) -> Result<Walked> {
    serde_json::from_str(line).with_context(|| format!("cannot read `{line}`"))
}

fn values(walked: &Walked, image: Image) -> BTreeMap<String, f64> {
    let mb = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let mut values = BTreeMap::from([
        ("text_moved_mb".to_owned(), mb(image.text.moved())),
        ("text_file_huge_mb".to_owned(), mb(image.text.file)),
        ("data_moved_mb".to_owned(), mb(image.data.moved())),
    ]);
    values.extend(stats::median(&walked.text_ns).map(|ns| ("text_ns".to_owned(), ns)));
    values.extend(stats::median(&walked.bss_ns).map(|ns| ("bss_ns".to_owned(), ns)));
    values
}
