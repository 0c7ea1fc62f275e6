//! Programs that are moved while they run (`elfremap attach`, `detach`), and programs
//! that cannot be preloaded (`elfremap run --attach`).
//!
//! `cargo test -p elfremap-tests --test attach -- FILTER` runs those whose names hold FILTER.

mod back;
mod kills;
mod launch;
mod real;
mod refusals;
mod states;

use anyhow::Result;
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use libtest_mimic::{Arguments, Trial};

fn main() {
    let mut arguments = Arguments::from_args();
    // The pool is one for all, so one test at a time.
    arguments.test_threads = Some(1);
    let trials = [
        states::trials(),
        refusals::trials(),
        back::trials(),
        launch::trials(),
        kills::trials(),
        real::trials(),
    ];
    libtest_mimic::run(&arguments, trials.into_iter().flatten().collect()).exit();
}

/// A test that has the machine for itself: `pages` huge pages in the pool, and no transparent
/// ones that nobody asks for. The pool is idle again afterwards.
fn with_pool(
    name: &str,
    pages: u64,
    body: impl FnOnce(&mut Host) -> Result<()> + Send + 'static,
) -> Trial {
    trial(name, move || {
        let mut host = Host::lock()?;
        host.overcommit(0)?;
        host.thp("madvise")?;
        host.pages(pages)?;
        body(&mut host)?;
        host.finish()
    })
}
