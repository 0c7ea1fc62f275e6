//! The table of programs that work for a second.

use super::Data;
use super::plot::Plot;
use super::tables::{Section, cpu, interval, number, quotient, ruled_out};
use crate::record::Bench;
use crate::stats::median;
use crate::variant::{CONTROL, PLAIN};
use std::fmt::Write as _;

/// Gain for programs.
pub(super) fn section(data: &Data) -> Section {
    const BENCH: Bench = Bench::Programs;
    let mut text = format!(
        "\n## Programs\n\n\
         Each works for about a second and ends; the output is the same in each run of each variant. CPU time \
         of the whole run, the move included. Ratios within a round, medians of {} rounds [95 % bootstrap \
         interval].\n\n\
         | program | variant | MB on huge pages: text, rodata, data+bss | huge without us | CPU, s | to plain | \
         to control | user CPU to control | peak RSS, MB |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut rows = Vec::new();
    for subject in data.subjects(BENCH) {
        let counts = data.huge_without_us(BENCH, subject) == 0.0;
        if counts {
            rows.push((subject.to_owned(), None));
        }
        let of = |variant: &str| cpu(data, BENCH, subject, variant);
        let (plain, control) = (of(PLAIN), of(CONTROL));
        for variant in data.variants(BENCH) {
            let own = of(variant);
            if own.is_empty() {
                continue;
            }
            let mb = |bytes: u64| number(Some(bytes as f64 / 1_048_576.0), 1);
            let image = data.image(BENCH, subject, variant).unwrap_or_default();
            let seconds: Vec<f64> = own.values().map(|us| us / 1e6).collect();
            let peak = data.median(BENCH, subject, variant, "peak_kb").map(|kb| kb / 1024.0);
            let to_control = quotient(&own, &control);
            let is = |base: &str, ratio| {
                if variant == base { "1".into() } else { interval(ratio, 3) }
            };
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {}, {}, {} | {} | {} | {} | {} | {} | {} |",
                mb(image.text.moved()),
                mb(image.rodata.moved()),
                mb(image.data.moved()),
                mb(image.text.file),
                number(median(&seconds), 3),
                is(PLAIN, quotient(&own, &plain)),
                is(CONTROL, to_control),
                is(CONTROL, data.ratio(BENCH, subject, variant, CONTROL, "user_us")),
                number(peak, 0),
            );
            if counts && variant != CONTROL {
                rows.push((variant.to_owned(), to_control));
            }
        }
    }
    text.push_str(&ruled_out(data, BENCH));
    let plot = Plot {
        title: "Programs: CPU time against the control".into(),
        axis: "ratio of CPU times of whole runs; smaller is better".into(),
        reference: (1.0, "control"),
        rows,
    };
    Section { text, plots: vec![plot] }
}
