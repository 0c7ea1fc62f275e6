//! The commands, on this machine's real files.

use crate::checks::Checks;
use crate::launch::{Launch, Output};
use crate::moves::{Subject, only_pool};
use crate::node::{MemoryPolicy, huge_bytes_by_node};
use crate::pool::{self, Counters};
use crate::probe::Machine;
use crate::snapshot::{Kind, Snapshot};
use crate::{CHECKER, COMMAND, LIBRARY};
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use serde_json::Value;
use std::collections::BTreeMap;

fn command<'a>(arguments: impl IntoIterator<Item = &'a str>) -> Launch {
    Launch::new(COMMAND).args(arguments).env("PATH", "/elfremap")
}

fn json(output: &Output) -> Result<Value> {
    serde_json::from_str(&output.stdout).with_context(|| format!("no JSON: {:?}", output.stdout))
}

pub(crate) fn run(checks: &mut Checks, machine: &Machine) -> Result<()> {
    let size = machine.block();
    let subject = Subject::named("plain-page2m")?;
    only_pool(machine, size, 32)?;
    let need = subject.need(size)?;
    checks.check("tools", "check names as many pages as a run takes", || {
        checker(&subject, size, need)
    })?;
    checks.check("tools", "status says what smaps says", || status(&subject, size, need))?;
    checks.check("tools", "perfmap names a moved function", || perfmap(&subject, size))?;
    checks.check("tools", "attach and detach", || attach(machine, &subject, size))?;
    checks.check("tools", "pool shows the kernel's numbers", || shows_pool(machine, size))?;
    if machine.nodes < 2 {
        return Ok(());
    }
    checks.check("tools", "reserve on one node", || reserve_on(size))?;
    checks.check("tools", "reserve for instances over the nodes", || {
        reserve_for(&subject, size, need)
    })?;
    checks.check("tools", "run on a node", || {
        pool::set_nodes(size, [need, need])?;
        run_on(&subject, size, need, None)
    })?;
    checks.check("tools", "run on a node and reserve there", || {
        pool::set_nodes(size, [0, 0])?;
        run_on(&subject, size, need, Some("--reserve"))?;
        let [other, there] = nodes(size)?;
        ensure!(other == 0 && there >= need, "pages on the nodes: {other}, {there}");
        Ok(())
    })?;
    pool::set_nodes(size, [0, 0])
}

fn path(subject: &Subject) -> Result<&str> {
    subject.path.to_str().context("odd path")
}

fn checker(subject: &Subject, size: PageSize, need: u64) -> Result<()> {
    let words =
        ["--json", "--backend", "hugetlb", "--page-size", &size.to_string()].map(str::to_owned);
    let launch = Launch::new(CHECKER).args(words.iter().map(String::as_str));
    let output = launch.args([path(subject)?]).output()?;
    output.succeeded()?;
    let found = json(&output)?;
    let pool_pages = find(&found, "pool_pages").context("no number of pages")?;
    let number = |name: &str| pool_pages.get(name).and_then(Value::as_u64).context("no number");
    let (best, worst) = (number("best")?, number("worst")?);
    ensure!(best <= need && need <= worst, "{need} pages are taken; said {best} to {worst}");
    Ok(())
}

/// The first value of that name anywhere.
fn find<'a>(value: &'a Value, name: &str) -> Option<&'a Value> {
    match value {
        Value::Object(map) => map.get(name).or_else(|| map.values().find_map(|v| find(v, name))),
        Value::Array(list) => list.iter().find_map(|v| find(v, name)),
        _ => None,
    }
}

fn status(subject: &Subject, size: PageSize, need: u64) -> Result<()> {
    let running = subject.hugetlb(size).until_ready()?;
    let output = command(["status", "--json", &running.pid().to_string()]).output()?;
    running.finish()?.same_as(&subject.plain)?;
    output.succeeded()?;
    let shown = json(&output)?;
    let objects = find(&shown, "objects").and_then(Value::as_array).context("no objects")?;
    let program = objects.iter().find(|object| object["main"] == true).context("no program")?;
    let classes = program["classes"].as_array().context("no classes")?;
    // All pages taken: those of the classes, and what lies beside them in their blocks.
    let parts = classes.iter().chain([&program["beside"]]);
    let bytes: u64 = parts.filter_map(|part| part["hugetlb"].as_u64()).sum();
    ensure!(bytes == need * size.bytes(), "{need} pages are taken, it says {bytes} bytes");
    Ok(())
}

fn perfmap(subject: &Subject, size: PageSize) -> Result<()> {
    let running = subject.hugetlb(size).until_ready()?;
    let pid = running.pid();
    let output = command(["perfmap", &pid.to_string()]).output()?;
    let map = std::fs::read_to_string(format!("/tmp/perf-{pid}.map"));
    let maps = std::fs::read_to_string(format!("/proc/{pid}/maps"))?;
    running.finish()?.same_as(&subject.plain)?;
    output.succeeded()?;
    let map = map.context("no map")?;
    let line = map.lines().find(|line| line.ends_with(" fill_text"));
    let line = line.context("fill_text is not in the map")?;
    let address = line.split(' ').next().context("no address")?;
    let address = u64::from_str_radix(address.trim_start_matches("0x"), 16)?;
    let text = elfremap::proc::maps::parse(maps.as_bytes());
    let text = text.filter_map(Result::ok).find(|mapping| mapping.range.contains(address));
    let text = text.context("the address is not mapped")?;
    ensure!(text.prot.has(elfremap::prot::Prot::EXEC), "the address is no code: {line}");
    Ok(())
}

fn shows_pool(machine: &Machine, size: PageSize) -> Result<()> {
    pool::set(size, 7)?;
    let output = command(["pool", "--json"]).output()?;
    output.succeeded()?;
    let shown = json(&output)?;
    let pools = find(&shown, "pools").and_then(Value::as_array).context("no pools")?;
    ensure!(pools.len() == machine.sizes.len(), "{} pools: {shown}", pools.len());
    let totals: Vec<u64> =
        pools.iter().filter_map(|pool| pool.get("total").and_then(Value::as_u64)).collect();
    ensure!(totals.iter().sum::<u64>() == 7 && totals.contains(&7), "totals: {totals:?}");
    pool::set(size, 0)
}

fn nodes(size: PageSize) -> Result<[u64; 2]> {
    Ok([pool::on_node(size, 0)?, pool::on_node(size, 1)?])
}

fn reserve_on(size: PageSize) -> Result<()> {
    pool::set_nodes(size, [2, 0])?;
    let text = size.to_string();
    let words = ["reserve", "--pages", "6", "--node", "1", "--size", &text, "--keep-free", "0"];
    command(words).output()?.succeeded()?;
    ensure!(nodes(size)? == [2, 6], "on the nodes: {:?}", nodes(size)?);
    let words = ["reserve", "--release", "--pages", "6", "--node", "1", "--size", &text];
    command(words).output()?.succeeded()?;
    ensure!(nodes(size)? == [2, 0], "after release: {:?}", nodes(size)?);
    Ok(())
}

/// Three instances on two nodes: whole ones on each, the plan before anything is written, and
/// surplus pages for one more.
fn reserve_for(subject: &Subject, size: PageSize, need: u64) -> Result<()> {
    pool::set_nodes(size, [0, 0])?;
    let text = size.to_string();
    let words = ["reserve", "--for", path(subject)?, "--instances", "3", "--node", "auto"];
    let more = ["--overcommit", "auto", "--size", &text, "--keep-free", "0"];
    let words: Vec<&str> = words.into_iter().chain(more).collect();
    let reserve = |more: Option<&'static str>| {
        command(words.iter().copied().chain(more)).env("ELFREMAP_BACKEND", "hugetlb").output()
    };
    let dry = reserve(Some("--dry-run"))?;
    dry.succeeded()?;
    ensure!(nodes(size)? == [0, 0], "a dry run has reserved {:?}", nodes(size)?);
    for node in ["node0", "node1", "nr_overcommit_hugepages"] {
        ensure!(dry.stdout.contains(node), "the plan lacks {node}: {}", dry.stdout);
    }
    let done = reserve(None)?;
    done.succeeded()?;
    let plan = dry.stdout.split("would write").next().unwrap_or_default();
    let shown = plan.contains("node 0    2 instances") && plan.contains("node 1    1 instance");
    ensure!(shown && done.stdout.starts_with(plan), "{plan:?}, then {:?}", done.stdout);
    let [first, second] = nodes(size)?;
    ensure!(first == 2 * second && second >= need, "{need} each: {first}, {second}");
    ensure!(pool::overcommit(size)? == second, "surplus: {}", pool::overcommit(size)?);
    // All three run at once, each on its node, and a fourth on surplus pages: that one is bound
    // to none, since Linux 6.1 has no surplus pages for programs that are.
    let launch = || subject.hugetlb(size);
    let on = |node: u32| launch().policy(MemoryPolicy::Bind(node)).until_ready();
    let running = [on(0)?, on(0)?, on(1)?, launch().until_ready()?];
    for (program, node) in running.into_iter().zip([Some(0), Some(0), Some(1), None]) {
        let by_node = huge_bytes_by_node(program.pid(), &subject.movable(size).all())?;
        let output = program.finish()?;
        output.same_as(&subject.plain)?;
        output.silent()?;
        ensure!(by_node.values().sum::<u64>() == need * size.bytes(), "pages lie on {by_node:?}");
        ensure!(node.is_none_or(|node| by_node.keys().eq([&node])), "pages lie on {by_node:?}");
    }
    pool::set_overcommit(size, 0)?;
    pool::expect_idle(size)
}

/// `run --numa-node 1` binds the program's processors and memory there.
fn run_on(subject: &Subject, size: PageSize, need: u64, more: Option<&str>) -> Result<()> {
    let words = ["run", "--numa-node", "1", "--backend", "hugetlb"];
    let words = words.into_iter().chain(more).chain(["--", path(subject)?]);
    let launch = command(words).env("ELFREMAP_LIBRARY", LIBRARY);
    let running = launch.until_ready()?;
    let pid = running.pid();
    let by_node = huge_bytes_by_node(pid, &subject.movable(size).all())?;
    let cpus = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let output = running.finish()?;
    ensure!(output.stdout == subject.plain.stdout, "{:?}", output.stdout);
    ensure!(output.status.code() == Some(42), "{}", output.status);
    let bytes = need * size.bytes();
    ensure!(by_node == BTreeMap::from([(1, bytes)]), "pages lie on {by_node:?}");
    ensure!(cpus.contains("Cpus_allowed_list:\t1\n"), "not on the node's processors");
    ensure!(Counters::read(size)?.used() == 0, "pages were not given back");
    Ok(())
}

/// A program that was started without us gets its text onto pages of the pool, and goes back
/// to small ones, while it waits. A kernel that cannot move pages of the pool leaves it as
/// it is.
fn attach(machine: &Machine, subject: &Subject, size: PageSize) -> Result<()> {
    only_pool(machine, size, 32)?;
    let (movable, kind) = (subject.movable(size), Kind::Hugetlb(size));
    let (_, read) = movable.certain_by_right(subject.snapshot());
    let running = Launch::new(&subject.path).until_ready()?;
    let pid = running.pid().to_string();
    let text = size.to_string();
    let words = ["attach", &pid, "--objects", "", "--backend", "hugetlb", "--page-size", &text];
    let attached = command(words).output()?;
    let now = Snapshot::take(running.pid(), &subject.path)?;
    now.same_rights_as(subject.snapshot())?;
    now.nothing_else(&movable, kind)?;
    if machine.can_swap {
        attached.succeeded()?;
        now.all_on(&read, kind)?;
        command(["detach", &pid]).output()?.succeeded()?;
    } else {
        ensure!(!attached.status.success(), "moved: {:?}", attached.stdout);
    }
    let then = Snapshot::take(running.pid(), &subject.path)?;
    then.same_rights_as(subject.snapshot())?;
    then.none_huge(&movable.all())?;
    running.finish()?.same_as(&subject.plain)?;
    pool::expect_idle(size)
}
