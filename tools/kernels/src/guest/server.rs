//! MariaDB's server on two nodes: as without the preload when its node has no pages, and
//! all on that node when it has.

use crate::checks::Checks;
use crate::launch::{Launch, Running};
use crate::node::{MemoryPolicy, huge_bytes_by_node};
use crate::pool::{self, Counters};
use crate::probe::Machine;
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use elfremap::range::Range;
use std::collections::BTreeMap;
use std::path::Path;

const PROGRAM: &str = "/usr/sbin/mariadbd";
const DATA: &str = "/tmp/data";
const RESULT: &str = "/tmp/result";
/// More than its text needs.
const PAGES: u64 = 20;

const SQL: &str = "create database d;
use d;
create table t (id int primary key, k int, v varchar(60), key (k)) engine=innodb;
insert into t select seq, seq*7919 mod 1000, repeat('x', seq mod 50) from seq_1_to_1000;
select k, count(*), max(length(v)), sha2(group_concat(id order by id), 256) from t group by k into outfile '/tmp/result';
";

pub(crate) fn run(checks: &mut Checks, _machine: &Machine) -> Result<()> {
    let size = PageSize::SIZE_2M;
    let bound = |launch: Launch| launch.policy(MemoryPolicy::Bind(0));
    let plain = serve(&bound(launch()), |_| Ok(()))?;
    ensure!(plain.1.lines().count() > 500, "the plain run found {:?}", plain.1);
    checks.check("NUMA", "mariadbd, bound to a node without pages", || {
        pool::set_nodes(size, [0, PAGES])?;
        let (warnings, result) = serve(&bound(launch()).preload(), |_| {
            let now = Counters::read(size)?;
            ensure!(now.used() == 0, "{} pages of another node are used", now.used());
            Ok(())
        })?;
        ensure!(result == plain.1, "another result");
        let [warning] = &warnings[..] else { anyhow::bail!("not one warning: {warnings:?}") };
        ensure!(warning.contains("elfremap reserve --node 0"), "{warning}");
        pool::expect_idle(size)
    })?;
    checks.check("NUMA", "mariadbd, bound to a node with pages", || {
        pool::set_nodes(size, [PAGES, PAGES])?;
        let (warnings, result) = serve(&bound(launch()).preload(), |pid| {
            let everywhere = Range::with_len(0, 1 << 47).context("odd range")?;
            let by_node = huge_bytes_by_node(pid, &[everywhere])?;
            let bytes = Counters::read(size)?.used() * size.bytes();
            ensure!(
                bytes > 0 && by_node == BTreeMap::from([(0, bytes)]),
                "{bytes} bytes: {by_node:?}"
            );
            Ok(())
        })?;
        ensure!(result == plain.1, "another result");
        ensure!(warnings.is_empty(), "{warnings:?}");
        pool::expect_idle(size)
    })?;
    pool::set_nodes(size, [0, 0])
}

fn launch() -> Launch {
    Launch::new(PROGRAM).args([
        "--no-defaults",
        "--bootstrap",
        "--user=root",
        "--datadir=/tmp/data",
        "--log-warnings=0",
        "--innodb-buffer-pool-size=8M",
        "--innodb-log-file-size=4M",
        "--innodb-data-file-path=ibdata1:4M:autoextend",
        "--innodb-temp-data-file-path=ibtmp1:4M:autoextend",
        "--innodb-use-native-aio=0",
        "--innodb-flush-method=nosync",
    ])
}

/// Runs it in a new data directory; `look` sees it once it has answered. What the preload said,
/// and the answer.
fn serve(launch: &Launch, look: impl FnOnce(u32) -> Result<()>) -> Result<(Vec<String>, String)> {
    for path in [DATA, RESULT] {
        if Path::new(path).is_dir() {
            std::fs::remove_dir_all(path)?;
        } else if Path::new(path).exists() {
            std::fs::remove_file(path)?;
        }
    }
    std::fs::create_dir(DATA)?;
    let mut running = launch.start()?;
    running.say(SQL)?;
    let looked = answered(&mut running).and_then(|()| look(running.pid()));
    let output = running.finish()?;
    output.succeeded()?;
    looked.with_context(|| output.stderr.clone())?;
    let warnings = output.warnings().into_iter().map(str::to_owned).collect();
    Ok((warnings, std::fs::read_to_string(RESULT).context("no answer")?))
}

/// Waits for the answer.
fn answered(running: &mut Running) -> Result<()> {
    loop {
        // Written in one piece, but for a moment it is empty.
        if std::fs::metadata(RESULT).is_ok_and(|file| file.len() > 0) {
            return Ok(());
        }
        ensure!(!running.has_ended()?, "it has ended");
        std::thread::sleep(std::time::Duration::from_millis(20));
    }
}
