//! Small self-checking programs, one hazard each, built in many layouts and run
//! plain and under the preload; see `source.rs` for the directives in their sources.
//!
//! `cargo test -p elfremap-tests --test hazards -- FILTER` runs those whose names hold
//! FILTER. Environment: ELFREMAP_TEST_LIBRARY (another library to test),
//! ELFREMAP_TEST_RUNS (runs with randomised addresses, 200 by default),
//! ELFREMAP_TEST_NO_SKIP=1 (a skip is a failure).

mod behaviour;
mod build;
mod heap;
mod options;
mod pool;
mod scenario;
mod soak;
mod source;
mod starts;
mod surroundings;
mod words;

use anyhow::Result;
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use libtest_mimic::{Arguments, Trial};
use scenario::Case;
use source::Source;

fn main() -> Result<()> {
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for source in source::discover()?.into_iter().filter(|s| s.matrix) {
        for cell in &source.cells {
            if !words::impossible(cell) {
                trials.push(layout(&source, cell));
            }
        }
        trials.push(many_runs(source));
    }
    trials.extend(heap::trials());
    trials.extend(options::trials());
    trials.extend(pool::trials());
    trials.extend(starts::trials());
    trials.extend(behaviour::trials());
    trials.extend(surroundings::trials());
    trials.extend(soak::trials());
    libtest_mimic::run(&arguments, trials).exit();
}

fn layout(source: &Source, cell: &[String]) -> Trial {
    let (name, source, cell) = (cell.join("-"), source.clone(), cell.to_vec());
    trial(format!("{}::{name}", source.name), move || {
        let case = Case::new(&source, &cell)?;
        let mut host = Host::lock()?;
        case.all_runs(&mut host)?;
        host.finish()
    })
}

/// The first cell of each program again and again.
fn many_runs(source: Source) -> Trial {
    trial(format!("{}::many-runs", source.name), move || {
        let case = Case::new(&source, &source.cells[0])?;
        let mut host = Host::lock()?;
        let runs = build::runs()?;
        case.many_runs(&mut host, if source.few_runs { runs.div_ceil(10) } else { runs })?;
        host.finish()
    })
}
