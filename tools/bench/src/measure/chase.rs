//! Whether huge pages help at all here: the pointer chase on pages of each kind.

use super::{Session, Subject, order};
use crate::chase::Chased;
use crate::record::Bench;
use crate::runner::{self, Job};
use anyhow::{Context, Result};
use std::collections::BTreeMap;

const BENCH: Bench = Bench::Chase;

/// Kinds of pages, as the command `chase` takes them. The first is what the others are
/// compared with.
pub(crate) const PAGES: [&str; 3] = ["small", "thp", "hugetlb"];

#[derive(Debug)]
struct Memory {
    name: String,
    mb: u32,
}

impl Subject for Memory {
    fn name(&self) -> &str {
        &self.name
    }

    fn pages(&self) -> u64 {
        u64::from(self.mb) / 2
    }
}

pub(super) fn measure(session: &mut Session<'_>) -> Result<()> {
    let own = std::env::current_exe().context("cannot find this very program")?;
    let subjects = [4, 16, 64, 256].map(|mb| Memory { name: format!("{mb} MB"), mb });
    let plain = session.variants.plain();
    session.rounds(BENCH, &subjects, |session, subject, round, pool| {
        for &pages in order(&PAGES, round.unwrap_or(0)) {
            if pages == "hugetlb" && !pool {
                if round.is_none() {
                    session.skipped(BENCH, &subject.name, pages, "no huge pages")?;
                }
                continue;
            }
            let mb = subject.mb.to_string();
            let job = Job::new(&own, &["chase", "--mb", &mb, "--pages", pages]);
            let run = match session.runner.run(&job, &plain) {
                Ok(run) => run,
                // The kernel found too few huge pages in one piece: the chase says so by failing.
                Err(error) if pages != PAGES[0] => {
                    runner::check_interrupt()?;
                    session.skipped(BENCH, &subject.name, pages, &format!("{error:#}"))?;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let chased: Chased =
                serde_json::from_str(&run.stdout).context("cannot read what chase printed")?;
            if let Some(round) = round {
                let values = BTreeMap::from([("ns".to_owned(), chased.ns)]);
                session.sample(BENCH, &subject.name, pages, round, values)?;
            }
        }
        Ok(())
    })
}
