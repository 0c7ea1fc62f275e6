//! Runs the programs that the host counts TLB walks of, one after the other.

use crate::checks::Checks;
use crate::launch::{Launch, Output};
use crate::moves::only_pool;
use crate::probe::Machine;
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use serde_json::Value;
use std::collections::BTreeMap;

/// What the host wants to be run; there is none in other guests.
const RUNS: &str = "/tlb/runs.json";
/// For a server's data.
const DATA: &str = "/tmp/data";
/// Enough 2 MiB pages for any of them.
const PAGES: u64 = 100;

pub(crate) fn run(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let Ok(text) = std::fs::read(RUNS) else { return Ok(()) };
    let runs: Vec<Value> = serde_json::from_slice(&text)?;
    only_pool(machine, PageSize::SIZE_2M, PAGES)?;
    let mut first: BTreeMap<String, Output> = BTreeMap::new();
    for (index, run) in runs.iter().enumerate() {
        let subject = run["subject"].as_str().context("no subject")?;
        checks.check("TLB", format!("run {index}, {subject}"), || {
            if std::fs::exists(DATA)? {
                std::fs::remove_dir_all(DATA)?;
            }
            std::fs::create_dir(DATA)?;
            let stdin = run["stdin"].as_str().context("no input")?;
            let mut output = launch(run)?.output_alone(stdin)?;
            output.succeeded()?;
            output.silent()?;
            // What a server logs has the time in it.
            if stdin != "/dev/null" {
                output.stderr.clear();
            }
            let plain = first.entry(subject.to_owned()).or_insert_with(|| output.clone());
            output.same_as(plain)
        })?;
    }
    ensure!(!first.is_empty(), "no runs");
    Ok(())
}

fn launch(run: &Value) -> Result<Launch> {
    let words = run["arguments"].as_array().context("no arguments")?;
    let words = words.iter().filter_map(Value::as_str);
    let mut launch = Launch::new(run["program"].as_str().context("no program")?).args(words);
    for pair in run["env"].as_array().context("no environment")? {
        let word = |at: usize| pair[at].as_str().context("an odd variable");
        launch = launch.env(word(0)?, word(1)?);
    }
    Ok(launch)
}
