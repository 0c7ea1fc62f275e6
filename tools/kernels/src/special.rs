//! Guests for checks that need a machine of their own.

use crate::archive::Archive;
use crate::boot::{self, Boot, Outcome};
use crate::build::Places;
use crate::machine::Machine;
use crate::{system, tlb};
use anyhow::Result;
use std::path::{Path, PathBuf};

/// What a special guest is made of.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Host<'a> {
    pub(crate) places: &'a Places,
    pub(crate) kernel: &'a Path,
    pub(crate) root: &'a Path,
    pub(crate) machine: &'a Machine,
}

/// A group of checks, the machines whose kernel it is run on, and how.
type Special = (&'static str, &'static [&'static str], fn(Host<'_>) -> Result<Outcome>);

const SPECIAL: [Special; 3] = [
    ("1g", &["6.12-x86_64", "6.1-aarch64"], gigantic),
    ("server", &["6.12-x86_64"], server),
    ("tlb", &[tlb::MACHINE], |host| {
        Ok(tlb::test(host.places, host.kernel, host.root, host.machine))
    }),
];

/// The groups without the special ones; `None` when none is left.
pub(crate) fn without(groups: &str) -> Option<String> {
    let is_special = |group: &&str| SPECIAL.iter().any(|(special, ..)| special == group);
    let others: Vec<&str> = groups.split(',').filter(|group| !is_special(group)).collect();
    (!others.is_empty()).then(|| others.join(","))
}

/// Runs those of the machine's special groups that are wanted, and adds what they say.
pub(crate) fn run(host: Host<'_>, groups: Option<&str>, outcome: &mut Outcome) {
    for (group, machines, body) in SPECIAL {
        let is_wanted = groups.is_none_or(|list| list.split(',').any(|wanted| wanted == group));
        if is_wanted && machines.contains(&host.machine.name) {
            outcome.add(body(host).unwrap_or_else(|error| Outcome {
                failure: Some(format!("{group}: {error:#}")),
                ..Outcome::default()
            }));
        }
    }
}

fn log(host: Host<'_>, group: &str) -> PathBuf {
    host.places.output.join("log").join(format!("{}-{group}.log", host.machine.name))
}

/// Pages of 1 GiB: the kernel finds them best at boot.
fn gigantic(host: Host<'_>) -> Result<Outcome> {
    // So much that there is room for two, at addresses that are multiples of their size; the
    // kernel itself is not to lie in the middle of one (nokaslr).
    let machine = Machine { node_memory: 4096, ..*host.machine };
    let log = log(host, "1g");
    let boot = Boot {
        kernel: host.kernel,
        root: host.root,
        groups: Some("1g"),
        arguments: "hugepagesz=1G hugepages=2 nokaslr",
        plugin: None,
        log: &log,
    };
    boot::run(&machine, &boot)
}

/// A real server.
fn server(host: Host<'_>) -> Result<Outcome> {
    let mut archive = Archive::default();
    system::add_program(&mut archive, Path::new(system::SERVER))?;
    system::add_server_files(&mut archive)?;
    let root = host.places.output.join("server.cpio");
    system::extend_root(host.root, archive, &root)?;
    let log = log(host, "server");
    let boot = Boot {
        kernel: host.kernel,
        root: &root,
        groups: Some("server"),
        arguments: "",
        plugin: None,
        log: &log,
    };
    // Its data lies in memory, on the node that it is bound to.
    let machine = Machine { node_memory: 1024, ..*host.machine };
    boot::run(&machine, &boot)
}
