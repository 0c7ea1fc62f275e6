//! Redis: small, so it may be left alone; forks to save its memory to disk.

use crate::entry::at_entry;
use crate::mode::Mode;
use crate::subject::{Moment, Session, Subject};
use anyhow::{Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::{Lab, helper, seen, signal, wait_for_socket, wait_until};
use elfremap_tests::run::Run;
use nix::sys::signal::Signal;
use std::path::Path;
use std::sync::Arc;

/// Debian's redis-tools has the server too, under the name of a tool of the same
/// program; that package starts no service.
const PROGRAM: &str = "/usr/bin/redis-check-rdb";

/// The server as a subject.
///
/// # Errors
/// When it is not installed.
pub(crate) fn subject(lab: &Arc<Lab>) -> Result<Subject> {
    println!("{}", helper(&Run::new(PROGRAM).name("redis-server").arg("--version"))?);
    let image = Image::read(Path::new(PROGRAM))?;
    let copy = image.clone();
    let scenario = Box::new(move |lab: &Lab, mode: &Mode| session(lab, mode, &image));
    Ok(Subject::new("redis", Arc::clone(lab), copy, scenario))
}

fn session(lab: &Lab, mode: &Mode, image: &Image) -> Result<Session> {
    let dir = lab.fresh("redis")?;
    let socket = dir.join("sock");
    let log = dir.join("log");
    let run = lab
        .run(PROGRAM)
        .name("redis-server")
        .args(["--port", "0", "--save", "", "--unixsocket"])
        .arg(&socket);
    let run =
        run.args(["--enable-debug-command", "local", "--dir"]).arg(&dir).arg("--logfile").arg(&log);
    let run = mode.apply(lab, run)?;
    let entry = at_entry(run.clone(), image)?;
    let server = run.start_waiting()?;
    wait_for_socket(&socket, &server, &log)?;
    let cli = |words: &[&str]| Run::new("redis-cli").arg("-s").arg(&socket).args(words);

    let bench = Run::new("redis-benchmark").arg("-s").arg(&socket);
    let bench = bench.args([
        "-q",
        "-n",
        "5000",
        "-c",
        "20",
        "-t",
        "set,get,incr,lpush,rpop,sadd,hset,zadd,lrange_100,mset",
    ]);
    let bench = bench.output()?;
    ensure!(bench.status.success(), "redis-benchmark failed: {}", seen(&bench));
    let mut transcript = String::new();
    for words in [
        &["DEBUG", "POPULATE", "20000", "item", "100"][..],
        &[
            "EVAL",
            "local s = 0; for i = 1, 100000 do s = (s * 31 + i) % 1000003 end; return s",
            "0",
        ],
        &["SET", "greeting", "hello"],
        &["GETRANGE", "greeting", "1", "3"],
        &["GEOADD", "towns", "13.4", "52.5", "Berlin", "2.35", "48.86", "Paris"],
        &["GEODIST", "towns", "Berlin", "Paris", "km"],
        &["DBSIZE"],
        &["DEBUG", "DIGEST"],
        &["BGSAVE"],
    ] {
        transcript += &seen(&cli(words).output()?);
    }
    let mut saved = String::new();
    wait_until(|| {
        saved = helper(&cli(&["INFO", "persistence"]))?;
        Ok(saved.contains("rdb_bgsave_in_progress:0"))
    })?;
    transcript += saved
        .lines()
        .find(|line| line.starts_with("rdb_last_bgsave_status"))
        .unwrap_or("not saved\n");
    // What the forked process wrote is what the server holds.
    for words in [&["DEBUG", "RELOAD", "NOSAVE"][..], &["DEBUG", "DIGEST"]] {
        transcript += &seen(&cli(words).output()?);
    }
    let moment = Moment::now("serving", server.pid(), image)?.forked();
    signal(&server, Signal::SIGTERM)?;
    let output = server.finish()?;
    ensure!(
        output.status.success(),
        "redis-server ended with {}: {}",
        output.status,
        seen(&output)
    );
    lab.remove(&dir)?;
    Ok(Session { transcript, warnings: output.warnings(), moments: vec![entry, moment] })
}
