//! A chase through memory on pages of a chosen kind: one pointer for each 4 KiB, all in one
//! random cycle. The first thing to measure: if it is not faster on huge pages, the guest's
//! huge pages do not reach the hardware, and nothing else will be either.

use crate::memory::{Kind, Memory};
use crate::rng::Rng;
use anyhow::{Context, Result};
use nix::time::{ClockId, clock_gettime};
use serde::{Deserialize, Serialize};

const PAGE: usize = 4096;
const LINE: usize = 64;
const WORD: usize = size_of::<usize>();

/// Arguments of the hidden command `chase`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    /// Memory, in MiB
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    mb: u32,
    /// Kind of pages
    #[arg(long, value_enum)]
    pages: Pages,
}

/// [`Kind`] as the command line and the report call it.
#[derive(Clone, Copy, PartialEq, Eq, clap::ValueEnum, Debug)]
pub(crate) enum Pages {
    Small,
    Thp,
    Hugetlb,
}

/// What the chase prints.
#[derive(Clone, Copy, PartialEq, Serialize, Deserialize, Debug)]
pub(crate) struct Chased {
    /// CPU time for each hop, in nanoseconds.
    pub ns: f64,
}

/// Chases and prints [`Chased`] as JSON.
pub(crate) fn run(args: &Args) -> Result<()> {
    const HOPS: u32 = 4_000_000;
    let kind = match args.pages {
        Pages::Small => Kind::Small,
        Pages::Thp => Kind::Thp,
        Pages::Hugetlb => Kind::Hugetlb,
    };
    let mut memory = Memory::anonymous((args.mb as usize) << 20, kind)?;
    memory.check(kind)?;
    let words = memory.words();
    let first = lay(words);
    let once = walk(words, first, u32::try_from(words.len() * WORD / PAGE)?);
    let start = cpu_ns()?;
    let end = walk(words, once, HOPS);
    let ns = (cpu_ns()? - start) / f64::from(HOPS);
    // So that the walk is not left out as unused.
    std::hint::black_box(end);
    println!("{}", serde_json::to_string(&Chased { ns })?);
    Ok(())
}

/// Lays the cycle: each word of it holds the index of the next. Returns the first index.
fn lay(words: &mut [usize]) -> usize {
    let mut rng = Rng::new(1);
    let pages = words.len() * WORD / PAGE;
    let mut at: Vec<usize> =
        (0..pages).map(|page| (page * PAGE + rng.below(PAGE / LINE) * LINE) / WORD).collect();
    rng.shuffle(&mut at);
    for (index, &word) in at.iter().enumerate() {
        words[word] = at[(index + 1) % pages];
    }
    at[0]
}

fn walk(words: &[usize], mut at: usize, hops: u32) -> usize {
    for _ in 0..hops {
        at = words[at];
    }
    at
}

fn cpu_ns() -> Result<f64> {
    let now = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).context("cannot read the clock")?;
    Ok(now.tv_sec() as f64 * 1e9 + now.tv_nsec() as f64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_chase_is_one_cycle_with_one_word_in_each_page() {
        let mut words = vec![0; 64 * PAGE / WORD];
        let first = lay(&mut words);
        let mut pages = std::collections::BTreeSet::new();
        let mut at = first;
        for hop in 1..=64 {
            pages.insert(at * WORD / PAGE);
            at = walk(&words, at, 1);
            assert_eq!(at == first, hop == 64, "back at the start after {hop} hops");
        }
        assert_eq!(pages.len(), 64);
    }
}
