//! The tables of a report.

use super::Data;
use super::plot::Plot;
use crate::record::Bench;
use crate::stats::{Estimate, estimate, median};
use crate::variant::{CONTROL, PLAIN};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// A part of the page, with the plots that go below it.
#[derive(Debug)]
pub(super) struct Section {
    pub text: String,
    pub plots: Vec<Plot>,
}

/// The top of the page: what was measured on what.
pub(super) fn head(stem: &str, data: &Data) -> String {
    let mut text = format!(
        "# {stem}\n\nRendered by `elfremap-bench report` from [data/{stem}.jsonl](data/{stem}.jsonl); \
         method and reading: [README.md](README.md).\n\n"
    );
    if let Some(machine) = &data.machine {
        let _ = writeln!(text, "| | |\n| --- | --- |");
        let counters = if machine.hardware_counters { "yes" } else { "none" };
        for (name, value) in [
            ("measured", date(data.time)),
            ("machine", machine.hardware()),
            ("kernel", machine.software()),
            ("hardware counters", counters.to_owned()),
            ("C library, compiler", format!("{}, {}", machine.libc, machine.compiler)),
            ("elfremap", format!("{} ({})", machine.version, machine.commit)),
            ("options", format!("`{}`", data.options.join(" "))),
        ] {
            let _ = writeln!(text, "| {name} | {value} |");
        }
        if machine.virtual_machine {
            text.push_str(
                "\nA virtual machine shares its processor and its memory with others: \
                 times move from minute to minute. Only ratios within a round count, and \
                 only as far as their interval lies away from 1 and from the control's.\n",
            );
        }
    }
    if !data.skipped.is_empty() {
        text.push_str("\nNot measured:\n\n");
        for (bench, subject, variant, reason) in &data.skipped {
            let _ = writeln!(text, "- {bench:?}, {subject}, {variant}: {reason}");
        }
    }
    text
}

/// Cost at the start.
pub(super) fn startup(data: &Data) -> Section {
    const BENCH: Bench = Bench::Startup;
    let mut text = format!(
        "\n## Start-up\n\n\
         CPU time of the process until the last constructor has run, less that of the control in \
         the same round, against the CPU time that populating the same huge pages and copying \
         the same bytes once, from memory that is mapped, takes in a process of its own. *Populate + \
         read* takes them from the page cache by read(2) instead, as long as that must be: \
         for a file cached in 4 KiB pages the kernel's work for each page is in it. \
         Medians of {} rounds [95 % bootstrap interval].\n\n\
         | program | variant | MB moved | own start, ms | added, ms | to own start | populate + copy, ms | ratio | \
         populate + read, ms | ratio | added until the end, ms | peak RSS, MB |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut rows = Vec::new();
    for subject in data.subjects(BENCH) {
        rows.push((subject.to_owned(), None));
        let own = data.values(BENCH, subject, CONTROL, "ready_cpu_us");
        let own_whole = cpu(data, BENCH, subject, CONTROL);
        for variant in data.variants(BENCH) {
            if variant == PLAIN || variant == CONTROL {
                continue;
            }
            let huge = data
                .huge
                .get(&(BENCH, subject.to_owned(), variant.to_owned()))
                .copied()
                .unwrap_or_default();
            let limit = data.values(BENCH, subject, variant, "limit_cpu_us");
            let ready = data.values(BENCH, subject, variant, "ready_cpu_us");
            let added: Vec<(u32, f64)> = ready
                .iter()
                .filter_map(|(round, us)| Some((*round, us - own.get(round)?)))
                .collect();
            let copy = data.values(BENCH, subject, variant, "limit_copy_cpu_us");
            let read = data.values(BENCH, subject, variant, "limit_read_cpu_us");
            let limit_read: BTreeMap<u32, f64> = limit
                .iter()
                .filter_map(|(round, us)| Some((*round, us - copy.get(round)? + read.get(round)?)))
                .collect();
            let to = |limit: &BTreeMap<u32, f64>| -> Vec<f64> {
                added.iter().filter_map(|(round, us)| Some(us / limit.get(round)?)).collect()
            };
            let (ratio, ratio_read) = (estimate(&to(&limit)), estimate(&to(&limit_read)));
            let to_own = to(&own);
            let added: Vec<f64> = added.into_iter().map(|(_, us)| us / 1e3).collect();
            let until_end: Vec<f64> = cpu(data, BENCH, subject, variant)
                .iter()
                .filter_map(|(round, us)| Some((us - own_whole.get(round)?) / 1e3))
                .collect();
            let ms = |values: &BTreeMap<u32, f64>| {
                let values: Vec<f64> = values.values().map(|us| us / 1e3).collect();
                median(&values)
            };
            let peak = data.median(BENCH, subject, variant, "peak_kb").map(|kb| kb / 1024.0);
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                moved(huge.hugetlb, huge.thp),
                number(ms(&own), 2),
                interval(estimate(&added), 2),
                number(median(&to_own), 2),
                number(ms(&limit), 2),
                interval(ratio, 3),
                number(ms(&limit_read), 2),
                interval(ratio_read, 3),
                number(median(&until_end), 2),
                number(peak, 0),
            );
            if ratio.is_some() {
                rows.push((variant.to_owned(), ratio));
            }
        }
    }
    let plot = Plot {
        title: "Start-up cost against populating and copying once".into(),
        axis: "ratio of CPU times; smaller is better".into(),
        reference: (1.0, "populate + copy"),
        rows,
    };
    Section { text, plots: vec![plot] }
}

/// Cost for programs that are not moved.
pub(super) fn refused(data: &Data) -> Section {
    const BENCH: Bench = Bench::Refused;
    let mut text = format!(
        "\n## Programs too small to be moved\n\n\
         A shell script that starts 1000 small programs, all of which inherit the preload. \
         Ratios to plain in the same round, medians of {} rounds [95 % bootstrap interval].\n\n\
         | script | variant | wall, s | wall ratio | CPU time ratio |\n\
         | --- | --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut rows = Vec::new();
    for subject in data.subjects(BENCH) {
        rows.push((subject.to_owned(), None));
        let plain = cpu(data, BENCH, subject, PLAIN);
        for variant in data.variants(BENCH) {
            let wall = data.ratio(BENCH, subject, variant, PLAIN, "wall_us");
            let ratios: Vec<f64> = cpu(data, BENCH, subject, variant)
                .into_iter()
                .filter_map(|(round, us)| Some(us / plain.get(&round)?))
                .collect();
            let seconds = data.median(BENCH, subject, variant, "wall_us").map(|us| us / 1e6);
            let base = variant == PLAIN;
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {} | {} | {} |",
                number(seconds, 3),
                if base { "1".into() } else { interval(wall, 3) },
                if base { "1".into() } else { interval(estimate(&ratios), 3) },
            );
            if !base {
                rows.push((variant.to_owned(), estimate(&ratios)));
            }
        }
    }
    let plot = Plot {
        title: "1000 small programs: CPU time against plain".into(),
        axis: "ratio of CPU times; smaller is better".into(),
        reference: (1.0, "plain"),
        rows,
    };
    Section { text, plots: vec![plot] }
}

/// Gain at run time.
pub(super) fn runtime(data: &Data) -> Section {
    const BENCH: Bench = Bench::Runtime;
    let mut text = format!(
        "\n## Generated program\n\n\
         CPU time per hop: a random chain of direct jumps through the text, and a pointer chase \
         through the bss (one pointer per 4 KiB). Ratios to plain and to the control in the same \
         round, medians of {} rounds [95 % bootstrap interval]. *Huge without us* is the page cache \
         of the program's own file mapped by huge entries (`FilePmdMapped`).\n\n\
         | text | variant | text moved, MB | huge without us, MB | ns per hop | to plain | to control | \
         bss+data moved, MB | ns per hop | to plain | to control |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut plots = Vec::new();
    for (name, title) in
        [("text_ns", "Jumps through the text"), ("bss_ns", "Pointers through the bss")]
    {
        plots.push(Plot {
            title: format!("{title}: time against the control"),
            axis: "ratio of CPU times per hop; smaller is better".into(),
            reference: (1.0, "control"),
            rows: Vec::new(),
        });
        for subject in data.subjects(BENCH) {
            if data.huge_without_us(BENCH, subject) > 0.0 {
                continue;
            }
            let rows = &mut plots.last_mut().expect("just pushed").rows;
            rows.push((subject.to_owned(), None));
            for variant in data.variants(BENCH).into_iter().filter(|v| *v != CONTROL) {
                let ratio = data.ratio(BENCH, subject, variant, CONTROL, name);
                if ratio.is_some() {
                    rows.push((variant.to_owned(), ratio));
                }
            }
        }
    }
    for subject in data.subjects(BENCH) {
        for variant in data.variants(BENCH) {
            let value = |name| data.median(BENCH, subject, variant, name);
            if value("text_ns").is_none() {
                continue;
            }
            let ratio = |base: &str, name| {
                if variant == base {
                    "1".into()
                } else {
                    interval(data.ratio(BENCH, subject, variant, base, name), 3)
                }
            };
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                number(value("text_moved_mb"), 0),
                number(value("text_file_huge_mb"), 0),
                number(value("text_ns"), 1),
                ratio(PLAIN, "text_ns"),
                ratio(CONTROL, "text_ns"),
                number(value("data_moved_mb"), 0),
                number(value("bss_ns"), 1),
                ratio(PLAIN, "bss_ns"),
                ratio(CONTROL, "bss_ns"),
            );
        }
    }
    text.push_str(&ruled_out(data, BENCH));
    Section { text, plots }
}

/// Gain on servers.
pub(super) fn servers(data: &Data) -> Section {
    const BENCH: Bench = Bench::Servers;
    let mut text = format!(
        "\n## Servers\n\n\
         Each of {} rounds starts all servers anew and loads them in turn in short slices; ratios \
         within a round, medians of the rounds [95 % bootstrap interval]. Done: transactions or \
         requests per second. CPU: of the server, for each of them.\n\n\
         | server, load | variant | MB on huge pages: text, rodata, data+bss | beside | huge without us | peak RSS, MB | hugetlb, MB | done per s | to plain | to control | \
         user CPU to plain | to control | all CPU to control |\n\
         | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n",
        data.rounds(BENCH)
    );
    let mut plots = [
        ("Throughput", "to control; larger is better"),
        ("User CPU time for each transaction", "to control; smaller is better"),
    ]
    .map(|(title, axis)| Plot {
        title: format!("Servers: {}", title.to_lowercase()),
        axis: axis.into(),
        reference: (1.0, "control"),
        rows: Vec::new(),
    });
    for subject in data.subjects(BENCH) {
        let counts = data.huge_without_us(BENCH, subject) == 0.0;
        for plot in plots.iter_mut().filter(|_| counts) {
            plot.rows.push((subject.to_owned(), None));
        }
        let figures = |variant: &str| served(data, subject, variant);
        let (plain, control) = (figures(PLAIN), figures(CONTROL));
        for variant in data.variants(BENCH) {
            let own = figures(variant);
            let ratio = |figure: usize, base: &[BTreeMap<u32, f64>; 3]| {
                quotient(&own[figure], &base[figure])
            };
            let to = |base: &str, ratio| {
                if variant == base { "1".into() } else { interval(ratio, 3) }
            };
            let value = |name| data.median(BENCH, subject, variant, name);
            let throughput: Vec<f64> = own[0].values().copied().collect();
            let _ = writeln!(
                text,
                "| {subject} | {variant} | {}, {}, {} | {} | {} | {} | {} | {} | {} | {} | {} | {} | {} |",
                number(value("text_moved_mb"), 0),
                number(value("rodata_moved_mb"), 0),
                number(value("data_moved_mb"), 0),
                number(value("beside_mb"), 0),
                number(value("text_file_huge_mb"), 0),
                number(value("peak_mb"), 0),
                number(value("hugetlb_mb"), 0),
                number(median(&throughput), 0),
                to(PLAIN, ratio(0, &plain)),
                to(CONTROL, ratio(0, &control)),
                to(PLAIN, ratio(1, &plain)),
                to(CONTROL, ratio(1, &control)),
                to(CONTROL, ratio(2, &control)),
            );
            if counts && variant != CONTROL {
                plots[0].rows.push((variant.to_owned(), ratio(0, &control)));
                plots[1].rows.push((variant.to_owned(), ratio(1, &control)));
            }
        }
    }
    text.push_str(&ruled_out(data, BENCH));
    Section { text, plots: plots.into() }
}

/// Throughput, and user time and all CPU time for each transaction of a server, by round.
pub(super) fn served(data: &Data, subject: &str, variant: &str) -> [BTreeMap<u32, f64>; 3] {
    let sum = |name| data.sums(Bench::Servers, subject, variant, name);
    let per = |over: BTreeMap<u32, f64>, under: &BTreeMap<u32, f64>| -> BTreeMap<u32, f64> {
        over.into_iter().filter_map(|(round, x)| Some((round, x / under.get(&round)?))).collect()
    };
    let done = sum("done");
    let mut all = sum("user_us");
    for (round, system) in sum("system_us") {
        *all.entry(round).or_default() += system;
    }
    [per(done.clone(), &sum("seconds")), per(sum("user_us"), &done), per(all, &done)]
}

/// The ratio of two figures, round by round.
pub(super) fn quotient(over: &BTreeMap<u32, f64>, under: &BTreeMap<u32, f64>) -> Option<Estimate> {
    let ratios: Vec<f64> =
        over.iter().filter_map(|(round, value)| Some(value / under.get(round)?)).collect();
    estimate(&ratios)
}

/// What is said below a table of subjects whose plain program is huge already.
pub(super) fn ruled_out(data: &Data, bench: Bench) -> String {
    let mut text = String::new();
    for subject in data.subjects(bench) {
        let mb = data.huge_without_us(bench, subject);
        if mb > 0.0 {
            let _ = write!(
                text,
                "\nRuled out: {subject}. {mb:.1} MB of its text are mapped by huge page cache entries \
                 without any library, so its ratios do not tell what the move gains.\n"
            );
        }
    }
    text
}

/// User and system time together, by round.
pub(super) fn cpu(data: &Data, bench: Bench, subject: &str, variant: &str) -> BTreeMap<u32, f64> {
    let mut sum = data.values(bench, subject, variant, "user_us");
    for (round, system) in data.values(bench, subject, variant, "system_us") {
        *sum.entry(round).or_default() += system;
    }
    sum
}

fn moved(hugetlb: u64, thp: u64) -> String {
    let mb = |bytes: u64| bytes >> 20;
    match (hugetlb, thp) {
        (0, 0) => "0".into(),
        (h, 0) => format!("{} hugetlb", mb(h)),
        (0, t) => format!("{} THP", mb(t)),
        (h, t) => format!("{} hugetlb + {} THP", mb(h), mb(t)),
    }
}

pub(super) fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or_else(|| "-".into(), |value| format!("{value:.digits$}"))
}

pub(super) fn interval(estimate: Option<Estimate>, digits: usize) -> String {
    estimate.map_or_else(
        || "-".into(),
        |e| format!("{:.digits$} [{:.digits$}..{:.digits$}]", e.median, e.low, e.high),
    )
}

/// A day in UTC, from seconds since 1970 (days to civil date, proleptic Gregorian).
fn date(seconds: u64) -> String {
    let mut days = seconds / 86_400;
    let leap = |year: u64| {
        year.is_multiple_of(4) && (!year.is_multiple_of(100) || year.is_multiple_of(400))
    };
    let mut year = 1970;
    while days >= 365 + u64::from(leap(year)) {
        days -= 365 + u64::from(leap(year));
        year += 1;
    }
    let february = 28 + u64::from(leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(1_767_225_599), "2025-12-31");
    }
}
