//! The number of pages is the number taken: over many starts with ASLR on it lies
//! within the bounds, and a pool of the largest number is always enough.

mod support;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use elfremap_tests::library;
use elfremap_tests::outcome::{Skip, check as outcome};
use elfremap_tests::pool::{Counters, Host};
use serde_json::Value;
use support::{big_source, check, compile};

/// What the preload's warning says when pages were missing (merge levels that cost
/// something are warned of as well).
const REMEDY: &str = "elfremap reserve";
/// Starts in a row for each program.
const STARTS: u32 = 20;

/// Ends the process when dropped.
struct Started(Child);

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The worst and best case of what the pool is asked for.
fn need(program: &Path, options: &[&str]) -> Result<(u64, u64)> {
    let path = program.to_str().context("path")?;
    let found = check(&[&["--json", path], options].concat())?.json()?;
    ensure!(found["suitable"] == true, "{path}: {}", found["reason"]);
    let number = |value: &Value| value.as_u64().context("no number");
    let pages = &found["need"]["pool_pages"];
    Ok((number(&pages["best"])?, number(&pages["worst"])?))
}

/// The pages that the program takes from the pool, when it has come to a stop in
/// `main` or soon after, and what the preload had to say.
fn taken(
    program: &Path,
    arguments: &[&str],
    options: &[&str],
    ready: &str,
) -> Result<(u64, String)> {
    let mut command = support::command(program);
    command.args(arguments).env("LD_PRELOAD", library::preload()?);
    for pair in options.chunks_exact(2) {
        let name = pair[0].trim_start_matches('-').to_uppercase();
        command.env(format!("ELFREMAP_{name}"), pair[1]);
    }
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let before = Counters::read()?;
    let mut started = Started(command.spawn().context("cannot start")?);
    let mut lines = BufReader::new(started.0.stdout.take().context("stdout")?).lines();
    let is_ready = lines.any(|line| line.is_ok_and(|line| line == ready));
    ensure!(is_ready, "{} ended before `{ready}`", program.display());
    let used = Counters::read()?.used() - before.used();
    drop(started.0.stdin.take());
    let mut messages = started.0.stderr.take().context("stderr")?;
    let _ = started.0.kill();
    let _ = started.0.wait();
    let mut text = String::new();
    std::io::Read::read_to_string(&mut messages, &mut text)?;
    Ok((used, text))
}

fn wait_until_idle() -> Result<()> {
    let begin = Instant::now();
    while !Counters::read()?.is_idle() {
        ensure!(begin.elapsed() < Duration::from_secs(5), "pages are not given back");
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Every start takes a number within the bounds out of a pool of exactly the worst
/// case, without a warning; with one page less than the worst case that was seen there
/// is a warning, and all pages come back.
fn bounds_hold(program: &Path, arguments: &[&str], options: &[&str], ready: &str) -> Result<()> {
    let (best, worst) = need(program, options)?;
    let name = program.display();
    let mut host = Host::lock()?;
    host.pages(worst)?;
    let mut seen = Vec::new();
    for _ in 0..STARTS {
        let (used, messages) = taken(program, arguments, options, ready)?;
        ensure!(
            (best..=worst).contains(&used),
            "{name} {options:?}: {used} not in {best}..={worst}"
        );
        ensure!(!messages.contains(REMEDY), "{name} {options:?}: {messages}");
        wait_until_idle()?;
        seen.push(used);
    }
    let least = seen.iter().min().copied().unwrap_or(0);
    if least > 0 {
        host.pages(best.min(least) - 1)?;
        let (used, messages) = taken(program, arguments, options, ready)?;
        ensure!(used < least, "{name} {options:?}: {used} pages of a pool of {}", least - 1);
        ensure!(messages.contains(REMEDY), "{name} {options:?}: {messages:?}");
        wait_until_idle()?;
    }
    eprintln!("{name} {options:?}: {best} to {worst}, taken {seen:?}");
    host.finish()
}

const HUGETLB: [&str; 2] = ["--backend", "hugetlb"];

#[test]
fn generated_programs() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        for (name, flags) in [
            ("pie", &["-O1", "-pie"][..]),
            ("fixed", &["-O1", "-no-pie"]),
            ("relro_now", &["-O1", "-pie", "-Wl,-z,relro,-z,now"]),
            ("lld", &["-O1", "-pie", "-fuse-ld=lld"]),
            ("gold", &["-O1", "-pie", "-fuse-ld=gold"]),
            ("aligned", &["-O1", "-pie", "-Wl,-z,max-page-size=0x200000"]),
            ("in_64k", &["-O1", "-pie", "-Wl,-z,max-page-size=0x10000"]),
            ("one_segment", &["-O1", "-pie", "-Wl,-z,noseparate-code"]),
        ] {
            let program = compile(directory.path(), "gcc", name, &big_source(), flags)?;
            // Every level for the usual links, the two that matter most for the others.
            let all = ["none", "rx", "relro", "rwx"];
            let merges = if matches!(name, "pie" | "fixed") { &all[..] } else { &all[..2] };
            for merge in merges {
                let options = [&HUGETLB[..], &["--merge", merge]].concat();
                bounds_hold(&program, &[], &options, "ready")?;
            }
            if name == "pie" {
                bounds_hold(&program, &[], &[], "ready")?;
            }
        }
        Ok(())
    })());
}

#[test]
fn real_programs() {
    outcome((|| {
        let programs: [(&str, &[&str], &str); 3] = [
            // Ends by itself a moment after the line; the pages are counted before.
            (
                "/usr/bin/node",
                &["-e", "console.log('ready'); setTimeout(() => {}, 60000)"],
                "ready",
            ),
            ("/usr/bin/gdb", &["-q", "-nx", "-ex", "echo ready\\n"], "ready"),
            ("/usr/bin/php", &["-r", "echo \"ready\\n\"; sleep(60);"], "ready"),
        ];
        for (program, arguments, ready) in programs {
            if !Path::new(program).exists() {
                return Err(Skip::because(format!("needs {program}")));
            }
            for options in [&HUGETLB[..], &["--backend", "hugetlb", "--merge", "rx"]] {
                if need(Path::new(program), options).is_ok() {
                    bounds_hold(Path::new(program), arguments, options, ready)?;
                }
            }
        }
        Ok(())
    })());
}

/// A server whose start is long: it is stopped at its first line of the log.
#[test]
fn mariadbd() {
    outcome((|| {
        let program = Path::new("/usr/sbin/mariadbd");
        if !program.exists() {
            return Err(Skip::because("needs /usr/sbin/mariadbd"));
        }
        for merge in ["none", "rx"] {
            let options = ["--backend", "hugetlb", "--merge", merge];
            let (best, worst) = need(program, &options)?;
            let mut host = Host::lock()?;
            host.pages(worst)?;
            let mut seen = Vec::new();
            for _ in 0..STARTS {
                let used = during_help(program, merge)?;
                ensure!((best..=worst).contains(&used), "{merge}: {used} not in {best}..={worst}");
                wait_until_idle()?;
                seen.push(used);
            }
            eprintln!("mariadbd {merge}: {best} to {worst}, taken {seen:?}");
            host.finish()?;
        }
        Ok(())
    })());
}

/// The pages in use while `--verbose --help` waits for its reader, who reads nothing
/// beyond the first byte: the text is longer than a pipe holds.
fn during_help(program: &Path, merge: &str) -> Result<u64> {
    let mut command = Command::new(program);
    command
        .args(["--no-defaults", "--verbose", "--help"])
        .env("LD_PRELOAD", library::preload()?)
        .env("ELFREMAP_BACKEND", "hugetlb")
        .env("ELFREMAP_MERGE", merge)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut started = Started(command.spawn()?);
    let mut out = started.0.stdout.take().context("stdout")?;
    let mut byte = [0];
    std::io::Read::read_exact(&mut out, &mut byte)?;
    let used = Counters::read()?.used();
    let _ = started.0.kill();
    let mut messages = String::new();
    let _ = std::io::Read::read_to_string(
        &mut started.0.stderr.take().context("stderr")?,
        &mut messages,
    );
    ensure!(!messages.contains("elfremap"), "{messages}");
    Ok(used)
}
