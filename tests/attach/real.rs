//! Real programs, moved while they work.

use crate::with_pool;
use anyhow::{Context, Result, bail, ensure};
use elfremap::proc::smaps;
use elfremap::prot::Prot;
use elfremap_tests::attach::{elfremap, succeed};
use elfremap_tests::image::{Class, Image};
use elfremap_tests::lab::{Lab, chown_all, helper, signal, wait_for_socket};
use elfremap_tests::library::source_dir;
use elfremap_tests::run::{Output, Run, Running};
use elfremap_tests::smaps::Snapshot;
use libtest_mimic::Trial;
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        with_pool("real::mariadb_under_load", 40, |_| mariadb()),
        with_pool("real::java", 40, |_| java()),
        with_pool("real::clang", 100, |_| clang()),
    ]
}

/// How often the server under load is moved and moved back, unless ELFREMAP_TEST_ROUNDS says
/// otherwise.
const ROUNDS: usize = 25;

fn rounds() -> Result<usize> {
    match std::env::var("ELFREMAP_TEST_ROUNDS") {
        Ok(text) => text.parse().context("ELFREMAP_TEST_ROUNDS is not a number"),
        Err(_) => Ok(ROUNDS),
    }
}

/// No query fails and no connection is lost while the server is moved there and back.
fn mariadb() -> Result<()> {
    let lab = Lab::new()?;
    let dir = lab.fresh("m")?;
    let data = format!("--datadir={}", dir.join("data").display());
    let install =
        lab.run("mariadb-install-db").args(["--no-defaults", &data]).directory(lab.path());
    let install = install.args(["--auth-root-authentication-method=normal", "--skip-test-db"]);
    helper(&install.arg("--innodb-log-file-size=8M"))?;
    chown_all(&dir, lab.user())?;
    let program = Path::new("/usr/sbin/mariadbd");
    let mut server = lab.run(program).args(["--no-defaults", &data]).directory("/");
    for (option, file) in [("socket", "sock"), ("pid-file", "pid"), ("log-error", "log")] {
        server = server.arg(format!("--{option}={}", dir.join(file).display()));
    }
    server = server.arg(format!("--tmpdir={}", dir.display()));
    server = server.args(["--skip-networking", "--innodb-buffer-pool-size=32M"]);
    let server = server.time_limit(Duration::from_secs(600)).start_waiting()?;
    let socket = dir.join("sock");
    wait_for_socket(&socket, &server, &dir.join("log"))?;
    let sql = Run::new("mariadb").args(["--no-defaults", "-uroot", "-e", "create database sbtest"]);
    helper(&sql.arg(format!("--socket={}", socket.display())))?;
    // Reads, and writes each of which is a transaction of its own: without any deadlock.
    let loads = ["oltp_read_only", "oltp_update_non_index"];
    let bench = |load: &str, threads: usize, what: &[&str]| {
        Run::new("sysbench")
            .args([
                load,
                "--db-driver=mysql",
                "--mysql-user=root",
                "--tables=2",
                "--table-size=1000",
            ])
            .arg(format!("--mysql-socket={}", socket.display()))
            .args(["--mysql-ignore-errors=", &format!("--threads={threads}")])
            .args(what)
            .time_limit(Duration::from_secs(300))
    };
    helper(&bench(loads[0], 1, &["prepare"]))?;

    let pid = server.pid();
    let image = Image::read(program)?;
    let before = Snapshot::take(pid, &image)?;
    let plain = before.protections(&image);
    let (mut rounds, all) = (0, rounds()?);
    while rounds < all {
        let clients: Vec<Running> = loads
            .iter()
            .map(|load| bench(load, 8, &["--time=10", "run"]).start_waiting())
            .collect::<Result<_>>()?;
        let is_over = |client: &Running| {
            let stat = fs::read_to_string(format!("/proc/{}/stat", client.pid()));
            stat.is_ok_and(|stat| stat.contains(") Z "))
        };
        while rounds < all && !clients.iter().any(is_over) {
            succeed("attach", pid, &["--timeout", "60"])?;
            if rounds.is_multiple_of(5) {
                let now = Snapshot::take(pid, &image)?;
                let text = now.coverage(&image).get(&Class::Text).copied().unwrap_or_default();
                ensure!(text.hugetlb * 2 > text.total, "{text:?}");
                let changed = plain.differences(&now.protections(&image), |_, _| false);
                ensure!(changed.is_empty(), "protections changed: {changed:?}");
            }
            succeed("detach", pid, &["--timeout", "60"])?;
            rounds += 1;
        }
        for client in clients {
            let output = client.finish()?;
            let said = String::from_utf8_lossy(&output.stdout).into_owned();
            ensure!(output.status.success(), "a client failed: {output:?}");
            for line in ["ignored errors:", "reconnects:"] {
                let count = said.lines().find_map(|l| l.trim().strip_prefix(line));
                let count = count.and_then(|rest| rest.split_whitespace().next());
                ensure!(count == Some("0"), "{line} {count:?}: {said}");
            }
        }
    }
    let after = Snapshot::take(pid, &image)?;
    ensure!(after.huge_bytes(&image) == before.huge_bytes(&image), "something is still huge");
    signal(&server, Signal::SIGTERM)?;
    let output = server.finish()?;
    ensure!(output.status.success(), "the server ended with {}", output.status);
    Ok(())
}

/// Moves a program there and back until it ends; with its output, how often that was.
fn until_its_end(mut running: Running, part: &str) -> Result<(Output, usize)> {
    let pid = running.pid();
    let mut rounds = 0;
    succeed("attach", pid, &["--timeout", "60"])?;
    let huge = executable(pid, part)?;
    ensure!(huge >= 4 << 20, "only {huge} bytes of {part} are huge");
    running.write("go\n")?;
    loop {
        for command in ["detach", "attach"] {
            let output = elfremap(&[command, &pid.to_string(), "--timeout", "60"])?;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            match output.status.code() {
                Some(0) => rounds += 1,
                // It may end at any moment.
                Some(1 | 3)
                    if ["ended", "no process", "zombie"].iter().any(|w| error.contains(w)) =>
                {
                    return Ok((running.finish()?, rounds));
                }
                _ => {
                    let said = String::from_utf8_lossy(&output.stdout).into_owned();
                    bail!("elfremap {command}: {}: {error}{said}", output.status)
                }
            }
        }
    }
}

/// Bytes of executable memory on the pool's pages, in a process that has mapped a file with
/// `part` in its name.
fn executable(pid: u32, part: &str) -> Result<u64> {
    let text = fs::read(format!("/proc/{pid}/smaps"))?;
    let entries: Vec<_> = smaps::parse(&text).collect::<Result<_, _>>()?;
    let names = |name: &[u8]| String::from_utf8_lossy(name).contains(part);
    ensure!(entries.iter().any(|e| names(e.mapping.name)), "{part} is not loaded");
    let huge = entries.iter().filter(|e| e.mapping.prot == Prot::RX && e.kernel_page_size > 4096);
    Ok(huge.map(|e| e.hugetlb).sum())
}

/// A program in Java: compiled code, garbage collection, and the text of libjvm.
fn java() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let source = source_dir().join("attach/Work.java");
    helper(&Run::new("javac").arg("-d").arg(directory.path()).arg(source))?;
    let run = Run::new("java").args(["-Xmx64m", "-cp"]).arg(directory.path()).arg("Work");
    let plain = {
        let mut running = run.until_ready()?;
        running.write("go\n")?;
        running.finish()?
    };
    ensure!(plain.status.code() == Some(7), "the plain run failed: {plain:?}");
    let (output, _) = until_its_end(run.until_ready()?, "libjvm.so")?;
    output.same_as(&plain)
}

/// A compiler whose code lies in libLLVM and libclang-cpp.
fn clang() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let object = |name: &str| -> PathBuf { directory.path().join(name) };
    let mut text = String::new();
    for n in 0..400 {
        text += &format!(
            "int f{n}(int *a, int n) {{ int s = {n}; for (int i = 0; i < n; i++) \
             {{ s += a[i] * {n}; if (s > a[n - i]) s ^= f{}(a, n - 1); }} return s; }}\n",
            if n == 0 { 0 } else { n - 1 }
        );
    }
    let run =
        |name: &str| Run::new("clang").args(["-O2", "-x", "c", "-", "-c", "-o"]).arg(object(name));
    let mut running = run("plain.o").start_waiting()?;
    running.write(&text)?;
    let plain = running.finish()?;
    ensure!(plain.status.success(), "{plain:?}");
    // It waits for the rest of its source when it is moved first.
    let mut running = run("moved.o").start_waiting()?;
    running.write(&text)?;
    let libraries = |pid| fs::read_to_string(format!("/proc/{pid}/maps")).unwrap_or_default();
    elfremap_tests::lab::wait_until(|| Ok(libraries(running.pid()).contains("libLLVM")))?;
    succeed("attach", running.pid(), &["--timeout", "60"])?;
    let huge = executable(running.pid(), "libLLVM")?;
    ensure!(huge >= 16 << 20, "only {huge} bytes are huge");
    let output = running.finish()?;
    output.same_as(&plain)?;
    let read = |name| fs::read(object(name)).with_context(|| format!("no {name}"));
    ensure!(read("moved.o")? == read("plain.o")?, "it has compiled something else");
    // And back, and there again, while it compiles.
    let source = object("source.c");
    fs::write(&source, &text)?;
    let run = |name| Run::new("clang").args(["-O2", "-c", "-o"]).arg(object(name)).arg(&source);
    let plain = run("plain.o").output()?;
    let running = run("flight.o").start_waiting()?;
    elfremap_tests::lab::wait_until(|| {
        let maps = libraries(running.pid());
        Ok(maps.is_empty() || maps.contains("libLLVM"))
    })?;
    for command in ["attach", "detach", "attach"] {
        elfremap(&[command, &running.pid().to_string(), "--timeout", "60"])?;
    }
    running.finish()?.same_as(&plain)?;
    ensure!(read("flight.o")? == read("plain.o")?, "it has compiled something else");
    Ok(())
}
