//! PostgreSQL: a server that forks one process for each client, and more for parallel queries.

use crate::entry::at_entry;
use crate::mode::Mode;
use crate::subject::{Moment, Session, Subject};
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::{Lab, helper, seen, signal, wait_for_socket, wait_until};
use elfremap_tests::library;
use elfremap_tests::run::Run;
use nix::sys::signal::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The newest version that is installed, as Debian and Ubuntu place it.
fn programs() -> Result<PathBuf> {
    let mut versions: Vec<_> = fs::read_dir("/usr/lib/postgresql")
        .context("postgresql is not installed")?
        .map(|entry| entry.map(|e| e.path().join("bin")))
        .collect::<Result<_, _>>()?;
    versions.retain(|dir| dir.join("postgres").exists());
    versions.sort();
    versions.pop().context("no server in /usr/lib/postgresql")
}

/// The server as a subject.
///
/// # Errors
/// When it is not installed.
pub(crate) fn subject(lab: &Arc<Lab>) -> Result<Subject> {
    let bin = programs()?;
    let server = bin.join("postgres");
    println!("{}", helper(&Run::new(&server).arg("--version"))?);
    let image = Image::read(&server)?;
    let copy = image.clone();
    let scenario = Box::new(move |lab: &Lab, mode: &Mode| session(lab, mode, &bin, &image));
    Ok(Subject::new("postgres", Arc::clone(lab), copy, scenario))
}

fn session(lab: &Lab, mode: &Mode, bin: &Path, image: &Image) -> Result<Session> {
    let dir = lab.fresh("postgres")?;
    let data = dir.join("data");
    // initdb runs the server several times, by way of the shell.
    let initdb =
        lab.run(bin.join("initdb")).arg("--no-sync").arg("--auth=trust").arg("--username=me");
    let initdb =
        initdb.arg("--locale=C").arg("--encoding=UTF8").arg("-D").arg(&data).directory(&dir);
    let made = mode.apply(lab, initdb)?.output()?;
    ensure!(made.status.success(), "initdb failed: {}", seen(&made));
    let mut warnings = made.warnings();

    let mut run = lab.run(bin.join("postgres")).arg("-D").arg(&data).directory(&dir);
    // Its own huge pages (huge_pages=try) would be counted among ours.
    for setting in [
        &format!("unix_socket_directories={}", dir.display()),
        "listen_addresses=",
        "huge_pages=off",
        "shared_buffers=32MB",
        "fsync=off",
        "logging_collector=off",
        "log_destination=csvlog",
    ] {
        run = run.arg("-c").arg(setting);
    }
    let run = mode.apply(lab, run)?;
    let entry = at_entry(run.clone(), image)?;
    let server = run.start_waiting()?;
    wait_for_socket(&dir.join(".s.PGSQL.5432"), &server, Path::new("/dev/null"))?;
    let client = |program: &str| {
        Run::new(bin.join(program))
            .env("PGHOST", &dir)
            .env("PGUSER", "me")
            .env("PGDATABASE", "postgres")
    };

    // It accepts connections before it serves them.
    wait_until(|| Ok(client("pg_isready").output()?.status.success()))?;
    let filled = client("pgbench").args(["--initialize", "--quiet", "--scale=2"]).output()?;
    ensure!(filled.status.success(), "pgbench failed: {}", seen(&filled));
    let bench =
        client("pgbench").args(["--client=4", "--jobs=2", "--transactions=150", "--random-seed=7"]);
    let bench = bench.output()?;
    // Everything but the figures of time.
    let mut transcript: String = seen(&bench)
        .lines()
        .filter(|line| line.starts_with("number of") || line.starts_with("exit"))
        .map(|line| format!("{line}\n"))
        .collect();
    let script = library::source_dir().join("real/data/postgres.sql");
    transcript += &seen(&client("psql").args(["--no-psqlrc", "--file"]).arg(script).output()?);

    let mut moments = vec![entry, Moment::now("serving", server.pid(), image)?.forked()];
    let mut session = client("psql").args(["-XAtq"]).start_waiting()?;
    session.write("SELECT 'pid ' || pg_backend_pid();\n")?;
    let backend = session.wait_for_prefix("pid ")?.parse().context("no pid of a backend")?;
    moments.push(Moment::now("a backend", backend, image)?.forked());
    session.finish()?;

    signal(&server, Signal::SIGINT)?;
    let output = server.finish()?;
    ensure!(output.status.success(), "postgres ended with {}: {}", output.status, seen(&output));
    warnings.extend(output.warnings());
    lab.remove(&dir)?;
    Ok(Session { transcript, warnings, moments })
}
