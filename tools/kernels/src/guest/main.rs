//! The first and only program of a guest machine: sets the machine up, runs the
//! product in it, reports each check on the console, turns the machine off.
//!
//! Nothing here trusts the product's own log: what moved is read from smaps, where
//! pages lie from numa_maps, what is left over from the pools' counters.

mod bti;
mod cgroup;
mod checks;
mod init;
mod launch;
mod moves;
mod node;
mod numa;
mod pool;
mod probe;
mod rival;
mod server;
mod snapshot;
mod tlb;
mod tools;

use anyhow::{Context, Result, bail};
use checks::Checks;

/// Where the host put the product.
const LIBRARY: &str = "/elfremap/libelfremap.so";
const COMMAND: &str = "/elfremap/elfremap";
const CHECKER: &str = "/elfremap/elfremap-check";
const PROGRAMS: &str = "/programs";
const HAZARDS: &str = "/hazards";

type Group = fn(&mut Checks, &probe::Machine) -> Result<()>;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if std::process::id() != 1 {
        return match arguments.first().map(String::as_str) {
            Some("hold") => rival::hold(&arguments[1..]),
            _ => bail!("this program is a guest's init"),
        };
    }
    let mut checks = Checks;
    if let Err(error) = run(&mut checks) {
        let _ = checks.fail("machine", "set up", &error);
    }
    let _ = checks.end();
    init::power_off()
}

fn run(checks: &mut Checks) -> Result<()> {
    init::mount_all()?;
    let machine = probe::Machine::read().context("cannot look at the machine")?;
    machine.report(checks)?;
    let wanted = init::argument("elfremap.groups=")?;
    let skipped = init::argument("elfremap.skip=")?.unwrap_or_default();
    let has = |list: &str, group: &str| list.split(',').any(|g| g == group);
    // Some need a machine of their own: those run only when they are named.
    let is_wanted = |group: &str| match &wanted {
        Some(list) => has(list, group),
        None => !has(&skipped, group) && !["tlb", "1g", "server"].contains(&group),
    };
    let groups: [(&str, Group); 9] = [
        ("moves", moves::run),
        ("choice", moves::choice),
        ("hazards", moves::hazards),
        ("bti", bti::run),
        ("numa", numa::run),
        ("tools", tools::run),
        ("1g", moves::gigantic),
        ("server", server::run),
        ("tlb", tlb::run),
    ];
    for (name, group) in groups {
        if is_wanted(name)
            && let Err(error) = group(checks, &machine)
        {
            checks.fail(name, "all", &error)?;
        }
    }
    checks.check("machine", "the kernel complained of nothing", init::kernel_is_content)
}
