//! `make test-machines`: boots guests with other kernels, processors and page sizes,
//! each with two NUMA nodes, and runs the product in them. Works without KVM and
//! never touches the pools of the machine it runs on.

mod archive;
mod boot;
mod build;
mod machine;
mod report;
mod special;
mod system;
mod tlb;

use anyhow::{Context, Result, ensure};
use boot::{Boot, Outcome};
use clap::Parser;
use machine::{Arch, MACHINES, Machine};
use std::collections::VecDeque;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::Mutex;

/// Run the product in guest machines
#[derive(Parser, Debug)]
struct Args {
    /// Only machines whose name contains TEXT; docs/kernels.md is then left as it is
    #[arg(long, value_name = "TEXT")]
    only: Option<String>,
    /// Only these groups of checks: moves, choice, hazards, bti, numa, tools, 1g,
    /// server, tlb
    #[arg(long, value_name = "LIST", requires = "only")]
    groups: Option<String>,
    /// Count TLB walks of a generated and of real programs under a model of TLBs, and keep the
    /// raw data in FILE; nothing else is run
    #[arg(long, value_name = "FILE", conflicts_with = "only")]
    tlb: Option<PathBuf>,
    /// How many guests run at once
    #[arg(long, value_name = "N", default_value_t = 2)]
    jobs: usize,
    /// Where kernels, builds and logs go
    #[arg(long, value_name = "DIR", default_value = "target/machines")]
    output: PathBuf,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let project = std::path::absolute(".")?;
    ensure!(project.join("tools/kernels").is_dir(), "start this in the project's directory");
    let output = std::path::absolute(&args.output)?;
    std::fs::create_dir_all(output.join("log"))?;
    let places = build::Places { project, output };
    let is_wanted = |m: &&Machine| match (&args.tlb, &args.only) {
        (Some(_), _) => m.name == tlb::MACHINE,
        (None, only) => only.as_ref().is_none_or(|text| m.name.contains(text)),
    };
    let machines: Vec<&Machine> = MACHINES.iter().filter(is_wanted).collect();
    ensure!(!machines.is_empty(), "no machine has such a name");

    let mut roots = Vec::new();
    for arch in Arch::ALL {
        if machines.iter().any(|machine| machine.arch == arch) {
            eprintln!("building for {}", arch.name());
            roots.push((arch, build::build(&places, arch)?));
            if !arch.is_native() && args.only.is_none() {
                eprintln!("checking that the whole workspace compiles for {}", arch.name());
                build::check_workspace(&places, arch)?;
            }
        }
    }
    let root_of = |arch| {
        let root = roots.iter().find(|(known, _)| *known == arch);
        root.map(|(_, path)| path).context("no root file system")
    };
    let kernels = places.output.join("kernels");
    if let Some(to) = &args.tlb {
        let machine = machines[0];
        let kernel = boot::kernel(&places.project, &kernels, machine)?;
        tlb::measure(&places, &kernel, root_of(machine.arch)?, machine, to)?;
        return Ok(ExitCode::SUCCESS);
    }
    let run = |machine: &Machine| -> Result<Outcome> {
        let kernel = boot::kernel(&places.project, &kernels, machine)?;
        let log = places.output.join("log").join(format!("{}.log", machine.name));
        let (root, groups) = (root_of(machine.arch)?, args.groups.as_deref());
        let usual = groups.map(special::without);
        let mut outcome = Outcome::default();
        // All groups, or those that are named and need no machine of their own.
        if usual.as_ref().is_none_or(Option::is_some) {
            let groups = usual.as_ref().and_then(Option::as_deref);
            let boot =
                Boot { kernel: &kernel, root, groups, arguments: "", plugin: None, log: &log };
            outcome = boot::run(machine, &boot)?;
        }
        let host = special::Host { places: &places, kernel: &kernel, root, machine };
        special::run(host, groups, &mut outcome);
        Ok(outcome)
    };

    let queue: Mutex<VecDeque<&Machine>> = Mutex::new(machines.iter().copied().collect());
    let results: Mutex<Vec<(&Machine, Outcome)>> = Mutex::default();
    let fetching = Mutex::new(());
    std::thread::scope(|scope| {
        for _ in 0..args.jobs.max(1) {
            scope.spawn(|| {
                loop {
                    let next = queue.lock().ok().and_then(|mut queue| queue.pop_front());
                    let Some(machine) = next else { return };
                    // The two share apt's state of a suite.
                    let fetched = fetching
                        .lock()
                        .map_err(|_| ())
                        .map(|_guard| boot::kernel(&places.project, &kernels, machine));
                    let outcome = match fetched {
                        Ok(Ok(_)) => run(machine),
                        Ok(Err(error)) => Err(error),
                        Err(()) => return,
                    };
                    let outcome = outcome.unwrap_or_else(|error| Outcome {
                        failure: Some(format!("{error:#}")),
                        ..Outcome::default()
                    });
                    report::print(machine, &outcome);
                    if let Ok(mut results) = results.lock() {
                        results.push((machine, outcome));
                    }
                }
            });
        }
    });
    let mut results = results.into_inner().ok().context("a guest's thread has panicked")?;
    ensure!(results.len() == machines.len(), "not every machine was run");
    results.sort_by_key(|(machine, _)| MACHINES.iter().position(|m| m.name == machine.name));
    let table = report::table(&results);
    println!("\n{table}");
    if args.only.is_none() {
        report::write(&places.project.join("docs/kernels.md"), &table)?;
    }
    let failed = results.iter().filter(|(_, outcome)| !outcome.is_success()).count();
    println!("{} machines, {failed} failed", results.len());
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}
