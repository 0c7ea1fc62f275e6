//! What the preload costs at the start of a program, beside what the kernel and the
//! CPU need to populate and to copy the same bytes once.

use super::{MYSQLD, OPTIONS, Session, Subject, file_size, find_program, order};
use crate::generate::{self, Spec};
use crate::populate::Cost;
use crate::record::{Bench, Record};
use crate::runner::Job;
use crate::snapshot::Huge;
use crate::variant::Variant;
use anyhow::{Context, Result};
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

const BENCH: Bench = Bench::Startup;

/// Programs that are measured where they are installed.
const PROGRAMS: [&str; 5] = ["mariadbd", "postgres", "node", "gdb", "cc1"];

#[derive(Debug)]
struct Program {
    name: String,
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
    let variants = session.all_variants(&OPTIONS)?;
    let mut moved: BTreeMap<(String, String), Huge> = BTreeMap::new();
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        for variant in order(&variants, round.unwrap_or(0)) {
            if !session.wants(BENCH, &subject.name, variant, pool)? {
                continue;
            }
            let key = (subject.name.clone(), variant.name.clone());
            if round.is_none() && variant.stamps() {
                let done = session.runner.huge_at_start(&subject.job, variant);
                let Some(huge) = session.tolerate(BENCH, &subject.name, variant, done)? else {
                    continue;
                };
                session.out.write(&Record::Huge {
                    bench: BENCH,
                    subject: key.0.clone(),
                    variant: key.1.clone(),
                    huge,
                })?;
                moved.insert(key.clone(), huge);
            }
            let huge = moved.get(&key).copied().unwrap_or_default();
            let done = one(session, subject, variant, round, huge);
            session.tolerate(BENCH, &subject.name, variant, done)?;
        }
        Ok(())
    })
}

fn one(
    session: &mut Session<'_>,
    subject: &Program,
    variant: &Variant,
    round: Option<u32>,
    huge: Huge,
) -> Result<()> {
    // The yardstick first, and twice: pages that the machine has not used for a long time cost
    // up to ten times as much (a hypervisor has to find memory for them). The second time and
    // the variant after it get the pages that were just given back.
    let mut limit = None;
    if huge.moved() > 0 {
        populate(session, &subject.job.program, huge)?;
        limit = Some(populate(session, &subject.job.program, huge)?);
    }
    let run = session.runner.run(&subject.job, variant)?;
    let mut values = BTreeMap::from([
        ("wall_us".to_owned(), run.wall_us),
        ("user_us".to_owned(), run.user_us),
        ("system_us".to_owned(), run.system_us),
        ("peak_kb".to_owned(), run.peak_kb as f64),
    ]);
    values.extend(run.ready_us.map(|us| ("ready_us".to_owned(), us)));
    values.extend(run.ready_cpu_us.map(|us| ("ready_cpu_us".to_owned(), us)));
    if let Some(limit) = limit {
        values.insert("limit_us".to_owned(), limit.wall_us);
        values.insert("limit_cpu_us".to_owned(), limit.cpu_us);
        values.insert("limit_copy_cpu_us".to_owned(), limit.copy_cpu_us);
        values.insert("limit_read_cpu_us".to_owned(), limit.read_cpu_us);
    }
    match round {
        Some(round) => session.sample(BENCH, &subject.name, &variant.name, round, values),
        None => Ok(()),
    }
}

/// Populates as many huge pages of the same kinds and copies as many bytes of the
/// program's file, in a process on the same CPU.
fn populate(session: &Session<'_>, program: &Path, huge: Huge) -> Result<Cost> {
    let own = std::env::current_exe().context("cannot find this very program")?;
    let (hugetlb, thp) = (huge.hugetlb.to_string(), huge.thp.to_string());
    let mut job = Job::new(&own, &["populate", "--hugetlb", &hugetlb, "--thp", &thp, "--source"]);
    job.args.push(program.into());
    let run = session.runner.run(&job, &session.variants.plain())?;
    serde_json::from_str(&run.stdout).context("cannot read what populate printed")
}

fn subjects(session: &Session<'_>) -> Result<Vec<Program>> {
    const DEFAULT_MB: [u32; 3] = [8, 64, 128];
    let mut subjects = Vec::new();
    let sizes =
        if session.args.text_mb.is_empty() { &DEFAULT_MB[..] } else { &session.args.text_mb };
    for &text_mb in sizes {
        let spec = Spec { text_mb, stride: 4096, bss_mb: 0, seed: 1 };
        let program = generate::build(&spec, &session.args.work)?;
        // It ends as soon as it has begun.
        subjects.push(subject(format!("{text_mb} MB of text"), Job::new(&program, &["0"]))?);
        if text_mb == 64 {
            let pieces = program.with_extension("4k");
            generate::copy(&program, &pieces, 4096)?;
            let name = format!("{text_mb} MB of text, cached in 4 KiB pages");
            subjects.push(subject(name, Job::new(&pieces, &["0"]))?);
        }
    }
    let found = PROGRAMS.iter().filter_map(|name| find_program(name));
    let mut seen = BTreeSet::new();
    for program in found.chain(session.args.program.iter().cloned()) {
        if !seen.insert(program.canonicalize()?) {
            continue;
        }
        let name = program.file_name().unwrap_or_default().to_string_lossy().into_owned();
        subjects.push(subject(name, Job::new(&program, &["--version"]))?);
    }
    if let Some(mysql) = &session.mysql {
        let mut job = Job::new(&mysql.program, &["--version"]);
        job.root = Some(mysql.root.clone());
        subjects.push(subject(MYSQLD.into(), job)?);
    }
    Ok(subjects)
}

fn subject(name: String, job: Job) -> Result<Program> {
    // The file holds text, rodata and data; the bss of the programs above is below 32 MB.
    let pages = file_size(&job.program)?.div_ceil(2 << 20) + 16;
    Ok(Program { name, job, pages })
}
