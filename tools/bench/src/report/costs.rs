//! The tables of what the move costs a running program.

use super::Data;
use super::tables::{Section, interval, number};
use crate::record::Bench;
use crate::variant::PLAIN;
use std::fmt::Write as _;

const BENCH: Bench = Bench::Costs;

/// Forks, memory and a second instance.
pub(super) fn section(data: &Data) -> Section {
    let mut text = format!(
        "\n## Costs\n\nRatios to plain in the same round, medians of {} rounds [95 % bootstrap interval].\n",
        data.rounds(BENCH)
    );
    text.push_str(&forks(data));
    text.push_str(&instances(data));
    Section { text, plots: Vec::new() }
}

/// Whether a subject has the value at all.
fn has(data: &Data, subject: &str, name: &str) -> bool {
    !data.values(BENCH, subject, PLAIN, name).is_empty()
}

fn forks(data: &Data) -> String {
    let mut text = String::from(
        "\n### Children\n\nCPU time of parent and child together for each child: one that exits at once, \
         one that writes a byte to each 2 MiB of the bss first, and one that executes `/bin/true` \
         without the library.\n\n\
         | program | variant | fork + exit, us | to plain | fork + write, us | to plain | fork + exec, us | \
         to plain |\n| --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for subject in data.subjects(BENCH).into_iter().filter(|s| has(data, s, "exit_us")) {
        for variant in data.variants(BENCH) {
            let figure = |name| {
                let ratio = data.ratio(BENCH, subject, variant, PLAIN, name);
                let ratio = if variant == PLAIN { "1".into() } else { interval(ratio, 2) };
                format!("{} | {ratio}", number(data.median(BENCH, subject, variant, name), 0))
            };
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {} | {} | {} |",
                figure("exit_us"),
                figure("write_us"),
                figure("exec_us")
            );
        }
    }
    text
}

fn instances(data: &Data) -> String {
    let mut text = String::from(
        "\n### Memory and a second instance\n\nThe program waits, and a second one is started beside it. \
         Memory: proportional share (Pss) and hugetlb pages together. *Beside* are bytes on huge pages that are \
         none of the program's segments': the rest of the first and last pages, gaps, the start of the heap, and what \
         the program itself has on huge pages. Peak RSS has no hugetlb pages in it.\n\n\
         | program | variant | peak RSS, MB | on huge pages, MB | beside, MB | memory of one, MB | \
         memory of two, MB | both on huge pages, MB | CPU of the second, ms | to plain | to the first |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for subject in data.subjects(BENCH).into_iter().filter(|s| has(data, s, "one_mb")) {
        for variant in data.variants(BENCH) {
            let value = |name| data.median(BENCH, subject, variant, name);
            let first = data.values(BENCH, subject, variant, "first_us");
            let second = data.values(BENCH, subject, variant, "second_us");
            let to_plain = data.ratio(BENCH, subject, variant, PLAIN, "second_us");
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                number(value("peak_rss_mb"), 0),
                number(value("huge_mb"), 0),
                number(value("beside_mb"), 1),
                number(value("one_mb"), 0),
                number(value("both_mb"), 0),
                number(value("both_huge_mb"), 0),
                number(value("second_us").map(|us| us / 1e3), 1),
                if variant == PLAIN { "1".into() } else { interval(to_plain, 2) },
                interval(super::tables::quotient(&second, &first), 2),
            );
        }
    }
    text
}
