//! What the preload costs a script of programs that are too small to be moved: they
//! inherit LD_PRELOAD all the same.

use super::{DEFAULT, Session, Subject, order};
use crate::record::Bench;
use crate::runner::Job;
use crate::variant::Variant;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::path::Path;

const BENCH: Bench = Bench::Refused;

/// Programs started by one run of the script.
const COMMANDS: usize = 1000;

#[derive(Debug)]
struct Script;

impl Subject for Script {
    fn name(&self) -> &str {
        "1000 x true"
    }

    fn pages(&self) -> u64 {
        0
    }
}

pub(super) fn measure(session: &mut Session<'_>) -> Result<()> {
    let script = session.args.work.join("true.sh");
    std::fs::write(&script, "/bin/true\n".repeat(COMMANDS))
        .with_context(|| format!("cannot write {}", script.display()))?;
    let mut job = Job::new(Path::new("/bin/sh"), &[]);
    job.args.push(script.into());
    let variants: Vec<Variant> =
        session.all_variants(&[DEFAULT])?.into_iter().map(Variant::bare).collect();
    session.rounds(BENCH, &[Script], |session, script, round, _| {
        for variant in order(&variants, round.unwrap_or(0)) {
            if !session.wants(BENCH, script.name(), variant, true)? {
                continue;
            }
            let done = session.runner.run(&job, variant);
            let Some(run) = session.tolerate(BENCH, script.name(), variant, done)? else {
                continue;
            };
            let values = BTreeMap::from([
                ("wall_us".to_owned(), run.wall_us),
                ("user_us".to_owned(), run.user_us),
                ("system_us".to_owned(), run.system_us),
            ]);
            if let Some(round) = round {
                session.sample(BENCH, script.name(), &variant.name, round, values)?;
            }
        }
        Ok(())
    })
}
