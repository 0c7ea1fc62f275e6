//! The table that compares elfremap's default options with each rival in the same round.

use super::Data;
use super::tables::{cpu, interval, number, quotient, served};
use crate::record::Bench;
use crate::stats::{Estimate, median};
use crate::variant::{CONTROL, PLAIN};
use std::collections::BTreeMap;
use std::fmt::Write as _;

const OURS: &str = "elfremap";

/// The fewest rounds for a verdict: bootstrap intervals of fewer are far too narrow.
const FEWEST: usize = 6;

/// A figure by which variants are compared.
struct Figure {
    bench: Bench,
    name: &'static str,
    larger_is_better: bool,
    /// For a subject and a variant, by round.
    values: fn(&Data, &str, &str) -> BTreeMap<u32, f64>,
    /// Whether its ratio to the control means something.
    to_control: bool,
    /// What the values are shown in, and what they are divided by for that.
    unit: (&'static str, f64),
}

const FIGURES: [Figure; 7] = [
    Figure {
        bench: Bench::Startup,
        name: "CPU time added for each MB moved",
        larger_is_better: false,
        values: added_per_mb,
        to_control: false,
        unit: ("us", 1.0),
    },
    Figure {
        bench: Bench::Runtime,
        name: "time per jump",
        larger_is_better: false,
        values: |data, subject, variant| data.values(Bench::Runtime, subject, variant, "text_ns"),
        to_control: true,
        unit: ("ns", 1.0),
    },
    Figure {
        bench: Bench::Runtime,
        name: "time per pointer in the bss",
        larger_is_better: false,
        values: |data, subject, variant| data.values(Bench::Runtime, subject, variant, "bss_ns"),
        to_control: true,
        unit: ("ns", 1.0),
    },
    Figure {
        bench: Bench::Programs,
        name: "CPU time",
        larger_is_better: false,
        values: |data, subject, variant| cpu(data, Bench::Programs, subject, variant),
        to_control: true,
        unit: ("ms", 1e3),
    },
    Figure {
        bench: Bench::Servers,
        name: "done per second",
        larger_is_better: true,
        values: |data, subject, variant| served(data, subject, variant)[0].clone(),
        to_control: true,
        unit: ("/s", 1.0),
    },
    Figure {
        bench: Bench::Servers,
        name: "user CPU for each",
        larger_is_better: false,
        values: |data, subject, variant| served(data, subject, variant)[1].clone(),
        to_control: true,
        unit: ("us", 1.0),
    },
    Figure {
        bench: Bench::Servers,
        name: "all CPU for each",
        larger_is_better: false,
        values: |data, subject, variant| served(data, subject, variant)[2].clone(),
        to_control: true,
        unit: ("us", 1.0),
    },
];

/// CPU time added to the control's at the start, in microseconds for each MiB on huge pages.
fn added_per_mb(data: &Data, subject: &str, variant: &str) -> BTreeMap<u32, f64> {
    let mb = moved_mb(data, Bench::Startup, subject, variant);
    let own = data.values(Bench::Startup, subject, CONTROL, "ready_cpu_us");
    data.values(Bench::Startup, subject, variant, "ready_cpu_us")
        .into_iter()
        .filter(|_| mb >= 1.0)
        .filter_map(|(round, us)| Some((round, (us - own.get(&round)?) / mb)))
        .collect()
}

/// MiB that the variant has put on huge pages.
fn moved_mb(data: &Data, bench: Bench, subject: &str, variant: &str) -> f64 {
    let mb = |bytes: u64| bytes as f64 / 1_048_576.0;
    let key = (bench, subject.to_owned(), variant.to_owned());
    if let Some(huge) = data.huge.get(&key) {
        return mb(huge.moved());
    }
    if let Some(image) = data.images.get(&key) {
        return mb(image.text.moved() + image.rodata.moved() + image.data.moved());
    }
    ["text_moved_mb", "rodata_moved_mb", "data_moved_mb"]
        .iter()
        .filter_map(|name| data.median(bench, subject, variant, name))
        .sum()
}

/// The table; nothing when no rival was measured.
pub(super) fn section(data: &Data) -> String {
    let mut rows = String::new();
    for figure in &FIGURES {
        for subject in data.subjects(figure.bench) {
            if data.huge_without_us(figure.bench, subject) > 0.0 {
                continue;
            }
            for rival in data.variants(figure.bench) {
                if rival != PLAIN && rival != CONTROL && !is_ours(rival) {
                    rows.push_str(&row(data, figure, subject, rival).unwrap_or_default());
                }
            }
        }
    }
    if rows.is_empty() {
        return rows;
    }
    format!(
        "\n## Against rivals\n\n\
         elfremap's default options and each other library, in the same rounds. *Ahead*: the whole interval \
         lies on the better side of 1; *behind*: on the worse side; *level*: 1 lies in the interval; no verdict below 6 rounds. A \
         library that has put nothing on huge pages (0 MB) is no rival there, and shows how far a figure can \
         be off. Left out are subjects that are ruled out above.\n\n\
         | subject | figure | MB moved | rival | MB moved | elfremap | rival | elfremap to control | \
         rival to control | elfremap to rival | elfremap is |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n{rows}"
    )
}

/// Whether a variant is one of elfremap's own.
fn is_ours(variant: &str) -> bool {
    variant.strip_prefix(OURS).is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

fn row(data: &Data, figure: &Figure, subject: &str, rival: &str) -> Option<String> {
    let of = |variant| (figure.values)(data, subject, variant);
    let (ours, theirs, control) = (of(OURS), of(rival), of(CONTROL));
    let ratio = quotient(&ours, &theirs)?;
    let middle = |values: &BTreeMap<u32, f64>| {
        let values: Vec<f64> = values.values().copied().collect();
        median(&values)
    };
    let to_control = |values| {
        if !figure.to_control {
            return "-".into();
        }
        let ratio = quotient(values, &control);
        let verdict = ratio.map_or("", |ratio| verdict(ratio, figure.larger_is_better));
        format!("{} {verdict}", interval(ratio, 3))
    };
    let mb = |variant| moved_mb(data, figure.bench, subject, variant);
    let show = |value: Option<f64>| {
        let value = value.map(|value| value / figure.unit.1);
        let digits = if value.is_some_and(|value| value >= 1000.0) { 0 } else { 1 };
        format!("{} {}", number(value, digits), figure.unit.0)
    };
    let reads = match (mb(OURS) >= 1.0, mb(rival) >= 1.0) {
        (false, false) => "(neither moves anything)",
        (true, false) => "(the rival moves nothing)",
        (_, true) => verdict(ratio, figure.larger_is_better),
    };
    let mut line = String::new();
    let _ = writeln!(
        line,
        "| {subject} | {} | {:.0} | {rival} | {:.0} | {} | {} | {} | {} | {} | {} |",
        figure.name,
        mb(OURS),
        mb(rival),
        show(middle(&ours)),
        show(middle(&theirs)),
        to_control(&ours),
        to_control(&theirs),
        interval(Some(ratio), 3),
        reads,
    );
    Some(line)
}

fn verdict(ratio: Estimate, larger_is_better: bool) -> &'static str {
    if ratio.n < FEWEST {
        return "(too few rounds)";
    }
    match (ratio.low > 1.0, ratio.high < 1.0) {
        (true, _) => {
            if larger_is_better {
                "ahead"
            } else {
                "behind"
            }
        }
        (_, true) => {
            if larger_is_better {
                "behind"
            } else {
                "ahead"
            }
        }
        _ => "level",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_needs_the_whole_interval() {
        let ratio = |low, high| Estimate { median: f64::midpoint(low, high), low, high, n: FEWEST };
        assert_eq!(verdict(ratio(1.01, 1.2), true), "ahead");
        assert_eq!(verdict(ratio(1.01, 1.2), false), "behind");
        assert_eq!(verdict(ratio(0.8, 0.99), true), "behind");
        assert_eq!(verdict(ratio(0.8, 0.99), false), "ahead");
        assert_eq!(verdict(ratio(0.9, 1.1), true), "level");
        assert_eq!(verdict(ratio(1.0, 1.1), true), "level");
        let few = Estimate { n: FEWEST - 1, ..ratio(1.01, 1.2) };
        assert_eq!(verdict(few, true), "(too few rounds)");
    }

    #[test]
    fn names_that_begin_alike_are_not_ours() {
        assert!(is_ours("elfremap") && is_ours("elfremap-thp"));
        assert!(!is_ours("elfremapper") && !is_ours("control"));
    }
}
