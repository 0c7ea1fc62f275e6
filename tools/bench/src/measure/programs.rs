//! What the move gains for programs of this machine that work for a second and end: compilers and
//! interpreters, those among them that gain nothing.

use super::{OPTIONS, Session, Subject, file_size, find_program, order};
use crate::record::{Bench, Record};
use crate::runner::Job;
use crate::source::c_source;
use crate::variant::Variant;
use anyhow::{Context, Result, bail, ensure};
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::path::Path;

const BENCH: Bench = Bench::Programs;

/// Functions in the file that the compilers compile.
const FUNCTIONS: u32 = 110;

/// Name in the report, the program, its arguments before the file, the file's name and text.
type Work<'a> = (&'a str, &'a str, &'a [&'a str], &'a str, String);

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
    let variants: Vec<Variant> =
        session.all_variants(&OPTIONS)?.into_iter().map(Variant::bare).collect();
    // What each program printed first, and how long that took.
    let mut firsts: BTreeMap<String, (String, f64)> = BTreeMap::new();
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        for variant in order(&variants, round.unwrap_or(0)) {
            if !session.wants(BENCH, &subject.name, variant, pool)? {
                continue;
            }
            let done = session.runner.run(&subject.job, variant);
            let Some(run) = session.tolerate(BENCH, &subject.name, variant, done)? else {
                continue;
            };
            let first = firsts
                .entry(subject.name.clone())
                .or_insert_with(|| (run.stdout.clone(), run.wall_us / 1e6));
            ensure!(!run.stdout.is_empty(), "{} printed nothing", subject.name);
            ensure!(
                run.stdout == first.0,
                "{} in variant {} printed something else than before",
                subject.name,
                variant.name
            );
            let Some(round) = round else {
                // What lies on huge pages, halfway through.
                let done = session.runner.image_at(&subject.job, variant, first.1 / 2.0);
                if let Some(image) = session.tolerate(BENCH, &subject.name, variant, done)? {
                    session.out.write(&Record::Image {
                        bench: BENCH,
                        subject: subject.name.clone(),
                        variant: variant.name.clone(),
                        image,
                    })?;
                }
                continue;
            };
            let values = BTreeMap::from([
                ("wall_us".to_owned(), run.wall_us),
                ("user_us".to_owned(), run.user_us),
                ("system_us".to_owned(), run.system_us),
                ("peak_kb".to_owned(), run.peak_kb as f64),
            ]);
            session.sample(BENCH, &subject.name, &variant.name, round, values)?;
        }
        Ok(())
    })
}

fn subjects(session: &Session<'_>) -> Result<Vec<Program>> {
    let work = session.args.work.canonicalize()?.join("programs");
    std::fs::create_dir_all(&work).with_context(|| format!("cannot create {}", work.display()))?;
    let source = || c_source(FUNCTIONS);
    let all: [Work<'_>; 5] = [
        ("cc1 -O2", "cc1", &["-quiet", "-O2", "-o", "-"], "big.c", source()),
        ("clang -O2", "clang", &["-O2", "-S", "-o", "-"], "big.c", source()),
        (
            "node, rendering",
            "node",
            &[],
            "render.js",
            include_str!("../../programs/render.js").into(),
        ),
        (
            "php, a report",
            "php",
            &["-n"],
            "report.php",
            include_str!("../../programs/report.php").into(),
        ),
        (
            "python3, small programs",
            "python3",
            &["-I"],
            "small.py",
            include_str!("../../programs/small.py").into(),
        ),
    ];
    let mut subjects = Vec::new();
    for (name, program, args, file, text) in all {
        let Some(program) = find_program(program) else {
            eprintln!("elfremap-bench: not measured: {program} is not installed");
            continue;
        };
        let file = work.join(file);
        std::fs::write(&file, text).with_context(|| format!("cannot write {}", file.display()))?;
        subjects.push(subject(name, &program, args, &file)?);
    }
    if subjects.is_empty() {
        bail!("no program found here to measure: cc1, clang, node, php, python3");
    }
    Ok(subjects)
}

fn subject(name: &str, program: &Path, args: &[&str], file: &Path) -> Result<Program> {
    let mut job = Job::new(program, args);
    job.args.push(OsStr::new(file).into());
    // The file holds text, rodata and data; 16 pages more hold the bss and what is beside.
    let pages = file_size(program)?.div_ceil(2 << 20) + 16;
    Ok(Program { name: name.into(), job, pages })
}
