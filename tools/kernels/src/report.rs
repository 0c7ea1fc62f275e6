//! The results, for people and for docs/kernels.md.

use crate::boot::Outcome;
use crate::machine::Machine;
use anyhow::{Context, Result};
use std::fmt::Write;
use std::fs;
use std::path::Path;

/// The groups of checks, one column each.
const GROUPS: [&str; 12] = [
    "64K", "2M", "32M", "1G", "THP", "choice", "hazards", "BTI", "NUMA", "tools", "TLB", "machine",
];

/// The facts, one column each.
const FACTS: [(&str, &str); 8] = [
    ("page", "base page"),
    ("sizes", "huge pages"),
    ("thp", "THP"),
    ("hugetlb mremap", "swap on hugetlb"),
    ("MADV_POPULATE_WRITE", "`MADV_POPULATE_WRITE`"),
    ("MADV_COLLAPSE", "`MADV_COLLAPSE`"),
    ("ptrace write", "ptrace writes to r-x hugetlb"),
    ("mem write", "`/proc/PID/mem` writes to it"),
];

const BEGIN: &str = "<!-- written by make test-machines -->";
const END: &str = "<!-- end -->";

/// Says how a machine fared, with each failure.
pub(crate) fn print(machine: &Machine, outcome: &Outcome) {
    let (passed, failed) = outcome.count(None);
    let verdict = if outcome.is_success() { "passed" } else { "FAILED" };
    let mut text = format!(
        "{verdict}: {} (Linux {}): {passed} checks passed, {failed} failed, {} s\n",
        machine.name,
        outcome.fact("kernel"),
        outcome.seconds
    );
    if let Some(why) = &outcome.failure {
        let _ = writeln!(text, "  {why}");
    }
    for line in &outcome.console {
        let _ = writeln!(text, "  | {line}");
    }
    for (group, name, failure) in &outcome.checks {
        if let Some(why) = failure {
            let _ = writeln!(text, "  {group}: {name}: {why}");
        }
    }
    print!("{text}");
}

/// Two tables in Markdown: results, and what the kernels offer.
pub(crate) fn table(results: &[(&Machine, Outcome)]) -> String {
    let mut rows = vec![header(&["kernel", "architecture", "base page", "result"], &GROUPS)];
    for (machine, outcome) in results {
        let result = if outcome.is_success() { "pass" } else { "**FAIL**" };
        let mut row = vec![
            outcome.fact("kernel").to_owned(),
            machine.arch.name().to_owned(),
            outcome.fact("page").to_owned(),
            result.to_owned(),
        ];
        row.extend(GROUPS.iter().map(|group| match outcome.count(Some(group)) {
            (0, 0) => String::new(),
            (passed, failed) => format!("{passed}/{}", passed + failed),
        }));
        rows.push(row);
    }
    let names: Vec<&str> = FACTS.iter().map(|(_, title)| *title).collect();
    let mut facts = vec![header(&["kernel", "architecture"], &names)];
    for (machine, outcome) in results {
        let mut row = vec![outcome.fact("kernel").to_owned(), machine.arch.name().to_owned()];
        row.extend(FACTS.iter().map(|(fact, _)| outcome.fact(fact).to_owned()));
        facts.push(row);
    }
    format!("{}\n{}", markdown(&rows), markdown(&facts))
}

fn header(first: &[&str], rest: &[&str]) -> Vec<String> {
    first.iter().chain(rest).map(|&text| text.to_owned()).collect()
}

fn markdown(rows: &[Vec<String>]) -> String {
    let mut text = String::new();
    for (index, row) in rows.iter().enumerate() {
        let _ = writeln!(text, "| {} |", row.join(" | "));
        if index == 0 {
            let _ = writeln!(text, "|{}", "---|".repeat(row.len()));
        }
    }
    text
}

/// Puts the tables in their place in the document.
pub(crate) fn write(path: &Path, table: &str) -> Result<()> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let (before, rest) = text.split_once(BEGIN).context("docs/kernels.md has no place for it")?;
    let (_, after) = rest.split_once(END).context("docs/kernels.md has no end of it")?;
    fs::write(path, format!("{before}{BEGIN}\n\n{table}\n{END}{after}"))
        .with_context(|| format!("cannot write {}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::machine::MACHINES;

    #[test]
    fn a_failed_check_fails_its_machine_and_shows_in_its_column() {
        let check = |why: Option<&str>| ("2M".to_owned(), "x".to_owned(), why.map(str::to_owned));
        let outcome = Outcome {
            facts: vec![("kernel".into(), "6.1.0".into())],
            checks: vec![check(None), check(Some("y"))],
            ..Outcome::default()
        };
        let table = table(&[(&MACHINES[0], outcome)]);
        assert!(table.contains("| 6.1.0 | x86_64 |  | **FAIL** |  | 1/2 |"), "{table}");
        assert!(!Outcome::default().is_success());
    }
}
