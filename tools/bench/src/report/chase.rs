//! The table of the pointer chase.

use super::Data;
use super::plot::Plot;
use super::tables::{Section, interval, number};
use crate::measure::chase::PAGES;
use crate::record::Bench;
use std::fmt::Write as _;

/// Whether huge pages help at all.
pub(super) fn section(data: &Data) -> Section {
    const BENCH: Bench = Bench::Chase;
    let mut text = format!(
        "\n## Do huge pages reach the hardware?\n\n\
         A pointer chase through anonymous memory, one pointer for each 4 KiB, without any program or \
         library. Where its ratio is near 1 on memory that is larger than the TLB reaches, huge pages of this \
         machine are huge by name only, and no figure below can be far from 1 either. \
         Medians of {} rounds [95 % bootstrap interval].\n\n\
         | memory | pages | ns per hop | to 4 KiB pages |\n| --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut rows = Vec::new();
    for subject in data.subjects(BENCH) {
        rows.push((subject.to_owned(), None));
        for pages in PAGES {
            let name = if pages == PAGES[0] { "4 KiB" } else { pages };
            let ratio = data.ratio(BENCH, subject, pages, PAGES[0], "ns");
            let base = pages == PAGES[0];
            let _ = writeln!(
                text,
                "| {subject} | {name} | {} | {} |",
                number(data.median(BENCH, subject, pages, "ns"), 1),
                if base { "1".into() } else { interval(ratio, 3) },
            );
            if !base && ratio.is_some() {
                rows.push((name.to_owned(), ratio));
            }
        }
    }
    let plot = Plot {
        title: "Pointer chase on huge pages against 4 KiB pages".into(),
        axis: "ratio of CPU times; smaller is better".into(),
        reference: (1.0, "4 KiB pages"),
        rows,
    };
    Section { text, plots: vec![plot] }
}
