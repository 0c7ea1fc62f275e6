//! The tables of the TLB model's counts.

use super::distinct;
use crate::record::{Model, TlbCounts, TlbRun};
use crate::variant::PLAIN;
use std::fmt::Write as _;

/// One of the counts of a run.
type Count = fn(&TlbCounts) -> u64;

/// Page walks, and below them what the first level misses.
const COLUMNS: [(&str, Count, Count); 2] =
    [("iTLB", |c| c.itlb_walks, |c| c.itlb_misses), ("dTLB", |c| c.dtlb_walks, |c| c.dtlb_misses)];

/// What the model is, and a table for each program.
pub(super) fn section(model: &Model, runs: &[TlbRun]) -> String {
    let mut text = format!(
        "| | |\n| --- | --- |\n| guest's kernel | Linux {} |\n| emulator | {} |\n\
         | elfremap | {} |\n\n",
        model.kernel, model.qemu, model.commit
    );
    let tlb = |name: &str| model.tlbs.get(name).map_or("-", String::as_str);
    let _ = writeln!(
        text,
        "Entries x ways of the modelled TLBs: instructions {} for 4 KiB pages, {} for 2 MiB; data {} and {}; \
         second level, shared by all, {}.",
        tlb("itlb4k"),
        tlb("itlb2m"),
        tlb("dtlb4k"),
        tlb("dtlb2m"),
        tlb("stlb")
    );
    for subject in distinct(runs.iter().map(|run| run.subject.as_str())) {
        let of_subject: Vec<&TlbRun> = runs.iter().filter(|run| run.subject == subject).collect();
        let _ = write!(
            text,
            "\n## {subject}\n\n**A model's counts, not a processor's.** {}\n\n\
             | variant | 2 MiB pages | instructions, millions |",
            stability(&of_subject)
        );
        for (tlb, ..) in COLUMNS {
            let _ = write!(text, " {tlb} walks | against plain | {tlb} misses, first level |");
        }
        text.push_str("\n| --- | --- | --- | --- | --- | --- | --- | --- | --- |\n");
        for variant in distinct(of_subject.iter().map(|run| run.variant.as_str())) {
            let first = |variant: &str| {
                of_subject.iter().find(|run| run.variant == variant && run.round == 0)
            };
            let (Some(run), Some(plain)) = (first(variant), first(PLAIN)) else { continue };
            let _ = write!(
                text,
                "| {variant} | {} | {:.1} |",
                run.huge_pages,
                run.counts.instructions as f64 / 1e6
            );
            for (_, walks, misses) in COLUMNS {
                let _ = write!(
                    text,
                    " {} | {} | {} |",
                    grouped(walks(&run.counts)),
                    against(walks(&run.counts), walks(&plain.counts)),
                    grouped(misses(&run.counts))
                );
            }
            text.push('\n');
        }
    }
    text
}

/// How far the runs of a variant lie apart.
fn stability(runs: &[&TlbRun]) -> String {
    let mut apart = 0.0f64;
    for run in runs {
        let first = runs.iter().find(|other| other.variant == run.variant && other.round == 0);
        let Some(first) = first else { continue };
        for (_, walks, _) in COLUMNS {
            let (a, b) = (walks(&first.counts) as f64, walks(&run.counts) as f64);
            apart = apart.max((a - b).abs() / a.max(1.0));
        }
    }
    let rounds = runs.iter().map(|run| run.round + 1).max().unwrap_or(0);
    if runs.iter().all(|run| run.exact) && apart == 0.0 {
        format!("{rounds} runs of each variant gave the same counts.")
    } else {
        format!(
            "The program has threads: walks of {rounds} runs of a variant lie up to {:.1} % apart; the \
             first is shown.",
            apart * 100.0
        )
    }
}

/// 1234567 as 1,234,567.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// "1/855" where it fell to less than half, else the change.
fn against(walks: u64, plain: u64) -> String {
    if walks == plain || walks == 0 || plain == 0 {
        return if walks == plain { "=".into() } else { "-".into() };
    }
    let (walks, plain) = (walks as f64, plain as f64);
    if plain >= 2.0 * walks {
        let times = plain / walks;
        return if times < 10.0 { format!("1/{times:.1}") } else { format!("1/{times:.0}") };
    }
    format!("{:+.1} %", (walks / plain - 1.0) * 100.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers() {
        assert_eq!(grouped(1_234_567), "1,234,567");
        assert_eq!(grouped(999), "999");
        assert_eq!(against(10, 8550), "1/855");
        assert_eq!(against(4, 10), "1/2.5");
        assert_eq!(against(102, 100), "+2.0 %");
        assert_eq!(against(100, 100), "=");
    }

    #[test]
    fn runs_that_differ_are_said_to() {
        let run = |round, exact, itlb_walks| TlbRun {
            subject: "s".into(),
            variant: PLAIN.into(),
            round,
            exact,
            huge_pages: 0,
            counts: TlbCounts {
                instructions: 1,
                accesses: 1,
                itlb_misses: 1,
                dtlb_misses: 1,
                itlb_walks,
                dtlb_walks: 1,
            },
        };
        let text = |a: &TlbRun, b: &TlbRun| stability(&[a, b]);
        assert!(text(&run(0, true, 100), &run(1, true, 100)).contains("the same"));
        assert!(text(&run(0, false, 100), &run(1, false, 90)).contains("10.0 % apart"));
    }
}
