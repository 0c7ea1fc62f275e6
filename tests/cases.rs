//! docs/cases.md: every case is in it, and every test that it names exists.

use elfremap_tests::library::source_dir;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The numbered cases.
const CASES: std::ops::RangeInclusive<u32> = 1..=66;

fn root() -> &'static Path {
    source_dir().parent().expect("tests lies in the project's directory")
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The source files of a test program, as one text.
fn sources(directory: &Path) -> String {
    let entries =
        fs::read_dir(directory).unwrap_or_else(|error| panic!("{}: {error}", directory.display()));
    let files = entries.map(|entry| entry.expect("a directory that can be read").path());
    let mut files: Vec<PathBuf> =
        files.filter(|path| path.extension().is_some_and(|end| end == "rs")).collect();
    files.sort();
    files.iter().map(|path| read(path)).collect()
}

/// Whether `file` has a test function of that name.
fn has_function(file: &Path, name: &str) -> bool {
    let text = read(file);
    let mut lines = text.lines().map(str::trim);
    let mut is_test = false;
    lines.any(|line| {
        is_test |= line == "#[test]";
        let found = is_test && line.starts_with(&format!("fn {name}("));
        is_test &= !line.starts_with("fn ");
        found
    })
}

/// Whether a test of libtest-mimic has that name, or its parts make it up.
fn has_trial(directory: &Path, name: &str) -> bool {
    let text = sources(directory);
    let is_there = |name: &str| text.contains(&format!("\"{name}\""));
    is_there(name) || name.split("::").all(is_there)
}

fn exists(test: &str) -> bool {
    let tests = source_dir();
    match test.split_once('/') {
        Some(("hazards", name)) if !name.contains("::") => ["c", "cpp", "rs"]
            .iter()
            .any(|end| tests.join("programs").join(name).join(format!("main.{end}")).is_file()),
        Some((program @ ("hazards" | "forks" | "guards" | "real" | "faults"), name)) => {
            has_trial(&tests.join(program), name)
        }
        Some(("tools", name)) => name.split_once("::").is_some_and(|(file, function)| {
            let file = root().join(format!("tools/elfremap/tests/{file}.rs"));
            has_function(&file, function)
        }),
        Some(("src", _)) => test
            .split_once("::")
            .is_some_and(|(file, function)| has_function(&root().join(file), function)),
        _ => false,
    }
}

/// The rows' first two columns.
fn rows(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines().filter_map(|line| {
        let mut columns = line.strip_prefix("| ")?.split(" | ");
        let (case, tests) = (columns.next()?, columns.next()?);
        (tests != "tests").then_some((case, tests))
    })
}

#[test]
fn every_case_has_a_test_that_exists() {
    let text = read(&root().join("docs/cases.md"));
    let mut seen = BTreeSet::new();
    let mut count = 0;
    for (case, tests) in rows(&text) {
        if let Some(number) = case.strip_prefix('O').and_then(|rest| rest.get(..2)) {
            let number: u32 = number.parse().expect("a number of two digits");
            assert!(seen.insert(number), "O{number:02} is there twice");
        }
        let named: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        assert!(!named.is_empty(), "no test: {case}");
        for test in named {
            assert!(exists(test), "{case}: there is no test {test}");
            count += 1;
        }
    }
    let missing: Vec<u32> = CASES.filter(|number| !seen.contains(number)).collect();
    assert!(missing.is_empty(), "cases without a row: {missing:?}");
    assert!(count > 100, "only {count} tests are named: is the table read as it is written?");
}

#[test]
fn a_test_that_is_missing_is_noticed() {
    for test in [
        "hazards/no-such-program",
        "hazards/start::no-such-test",
        "forks/nothing-to-spare::no-such-program",
        "tools/check::no_such_test",
        // There, but no test.
        "src/plan/mod.rs::plan",
        "elsewhere/test",
    ] {
        assert!(!exists(test), "{test}");
    }
}
