//! Large programs that nobody here compiled, run without and with the preload: the
//! same answers, the same exit status, and every block that may lie on a huge page
//! does, by `/proc/<pid>/smaps`.
//!
//! The tests run one after the other: the pool of huge pages is one for the machine.

mod entry;
mod mode;
mod nginx;
mod postgres;
mod redis;
mod short;
mod sql;
mod subject;

use crate::mode::{Backend, Mode};
use crate::sql::{Server, Unavailable};
use crate::subject::Subject;
use anyhow::{Context, Result, ensure};
use elfremap_tests::image::Image;
use elfremap_tests::lab::Lab;
use elfremap_tests::outcome::completion;
use elfremap_tests::pool::Host;
use elfremap_tests::smaps::Merge;
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::process::ExitCode;
use std::sync::Arc;

type Test = fn(&Arc<Lab>) -> Result<()>;

const TESTS: &[(&str, Test)] = &[
    ("mariadbd", mariadbd),
    ("mysqld", mysqld),
    ("mariadbd-unsteady-pool", unsteady),
    ("postgres", postgres),
    ("redis-server", redis),
    ("nginx", nginx),
    ("node", |lab| short(lab, short::node)),
    ("php", |lab| short(lab, short::php)),
    ("python3", |lab| short(lab, short::python)),
    ("gdb", |lab| short(lab, short::gdb)),
    ("clang", |lab| short(lab, short::clang)),
    ("cc1", |lab| short(lab, short::cc1)),
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    let lab = match Lab::new() {
        Ok(lab) => Arc::new(lab),
        Err(error) => {
            eprintln!("{error:?}");
            return ExitCode::FAILURE;
        }
    };
    let trials = TESTS.iter().map(|&(name, test)| {
        let lab = Arc::clone(&lab);
        Trial::ignorable_test(name, move || outcome(test(&lab)))
    });
    let conclusion = libtest_mimic::run(&arguments, trials.collect());
    lab.print();
    conclusion.exit_code()
}

fn outcome(result: Result<()>) -> Result<Completion, Failed> {
    match result {
        Err(error) if error.is::<Unavailable>() => Ok(Completion::ignored_with(error)),
        other => completion(other),
    }
}

/// Every backend at the merge levels that add no right to any data, addresses random and not.
fn all_modes() -> Vec<Mode> {
    let mut modes = Vec::new();
    for backend in [Backend::Auto, Backend::Thp, Backend::Hugetlb] {
        for merge in [Merge::None, Merge::Rx] {
            modes.extend([false, true].map(|aslr| Mode::on(backend, merge, aslr)));
        }
    }
    modes.push(Mode::on(Backend::Auto, Merge::None, true).aside());
    modes.push(Mode::on(Backend::Hugetlb, Merge::Rx, false).aside());
    modes
}

/// A few of them, for programs that are like others.
fn some_modes() -> [Mode; 4] {
    [
        Mode::on(Backend::Auto, Merge::None, true),
        Mode::on(Backend::Auto, Merge::Rx, false),
        Mode::on(Backend::Thp, Merge::None, false),
        Mode::on(Backend::Hugetlb, Merge::None, true),
    ]
}

fn mariadbd(lab: &Arc<Lab>) -> Result<()> {
    database(lab, "mariadbd", Server::mariadb(lab)?)
}

fn mysqld(lab: &Arc<Lab>) -> Result<()> {
    database(lab, "mysqld", Server::mysql(lab)?)
}

fn database(lab: &Arc<Lab>, name: &'static str, server: Server) -> Result<()> {
    println!("{}", server.version);
    let server = Arc::new(server);
    let image = Image::read(&server.program())?;
    let scenario = |at_entry: bool| -> subject::Scenario {
        let server = Arc::clone(&server);
        Box::new(
            move |lab, mode| {
                if at_entry { server.entry(lab, mode) } else { server.session(lab, mode) }
            },
        )
    };
    let mut modes = all_modes();
    let entry = Subject::new(name, Arc::clone(lab), image.clone(), scenario(true)).text_at_rx(99);
    let mut serving = Subject::new(name, Arc::clone(lab), image, scenario(false)).text_at_rx(99);
    if name == "mariadbd" {
        // It write-protects 8 KiB of its data once it has started, also on the pool: that
        // block is back on small pages then, and the rest is where it was.
        let plain = server.entry(lab, &Mode::PLAIN)?.moments;
        serving = plain.into_iter().fold(serving, Subject::starts_as);
    }
    serving.check_control(&Mode::on(Backend::Auto, Merge::None, false))?;
    let mut failures = Vec::new();
    failures.extend(serving.check(&modes).err());
    for merge in [Merge::None, Merge::Rx] {
        let mode = Mode::on(Backend::Hugetlb, merge, false);
        failures.extend(serving.check_pool(&mode, &server.program()).err());
    }
    modes.extend([false, true].map(|aslr| Mode::on(Backend::Auto, Merge::Relro, aslr)));
    failures.extend(entry.check(&modes).err());
    let failures: Vec<_> = failures.iter().map(|error| format!("{error:#}")).collect();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    Ok(())
}

/// Starts, serves and stops while the pool is drained and refilled beside it.
fn unsteady(lab: &Arc<Lab>) -> Result<()> {
    const PAGES: u64 = 24;
    let server = Server::mariadb(lab)?;
    let plain = server.session(lab, &Mode::PLAIN)?;
    let mut host = Host::lock()?;
    host.overcommit(0)?;
    for backend in [Backend::Auto, Backend::Hugetlb] {
        for merge in [Merge::None, Merge::Rx] {
            let mode = Mode::on(backend, merge, true);
            let session = host.unsteady(PAGES, || server.session(lab, &mode))?;
            let session = session.with_context(|| mode.to_string())?;
            subject::same_transcript(&plain, &session).with_context(|| mode.to_string())?;
            ensure!(session.warnings.len() <= 1, "more than one line: {:?}", session.warnings);
        }
    }
    host.finish()
}

fn postgres(lab: &Arc<Lab>) -> Result<()> {
    postgres::subject(lab)?.check(&some_modes())
}

fn redis(lab: &Arc<Lab>) -> Result<()> {
    redis::subject(lab)?.check(&some_modes())
}

fn nginx(lab: &Arc<Lab>) -> Result<()> {
    nginx::subject(lab)?.check(&some_modes())
}

fn short(lab: &Arc<Lab>, program: fn(&Arc<Lab>) -> Result<Subject>) -> Result<()> {
    program(lab)?.check(&some_modes())
}
