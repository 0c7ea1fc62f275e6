//! Every system call of the preload fails once: under ptrace, the k-th call that is made
//! from the library's own code gets an error in place of its effect, for every k and
//! several errors; and every kind of call fails always (ENOSYS). The program must run as
//! it does without the preload. Likewise the process is killed at every step, and the
//! pool's counters must return to where they were.

mod tracer;

use anyhow::{Context, Result, ensure};
use elfremap_tests::library::{cache_dir, preload, source_dir};
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::Run;
use libtest_mimic::{Arguments, Trial};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Command;
use tracer::{Fault, Traced, trace};

/// Pages that suffice for the subject on the pool.
const PAGES: u64 = 16;

/// What a preload's options look like.
type Options = &'static [(&'static str, &'static str)];

const VARIANTS: &[(&str, Options)] = &[
    ("default", &[]),
    ("hugetlb-swap", &[("ELFREMAP_BACKEND", "hugetlb"), ("ELFREMAP_STRATEGY", "swap")]),
    ("hugetlb-move", &[("ELFREMAP_BACKEND", "hugetlb"), ("ELFREMAP_STRATEGY", "move")]),
    ("thp-swap", &[("ELFREMAP_BACKEND", "thp"), ("ELFREMAP_STRATEGY", "swap")]),
    ("thp-move", &[("ELFREMAP_BACKEND", "thp"), ("ELFREMAP_STRATEGY", "move")]),
];

fn main() {
    let mut trials = Vec::new();
    for &(name, options) in VARIANTS {
        for aslr in [true, false] {
            let place = if aslr { "" } else { "-no-aslr" };
            let mut add = |what: &str, body: fn(&Case) -> Result<()>| {
                let case = Case { options, aslr };
                trials.push(trial(format!("{what}::{name}{place}"), move || body(&case)));
            };
            add("each_call_fails", Case::each_call_fails);
            if aslr && !name.starts_with("thp") {
                add("each_kind_is_missing", Case::each_kind_is_missing);
                add("killed_at_each_call", Case::killed_at_each_call);
                add("drained_at_each_call", Case::drained_at_each_call);
            }
        }
    }
    trials.push(trial("the_harness_notices_a_lost_call", the_harness_notices_a_lost_call));
    run(trials);
}

/// The pool is one for all, so one test at a time.
fn run(trials: Vec<Trial>) {
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit();
}

struct Case {
    options: Options,
    aslr: bool,
}

impl Case {
    fn run(&self) -> Result<Run> {
        let run = self
            .options
            .iter()
            .fold(Run::new(subject()?).preload()?, |run, (name, value)| run.env(name, value));
        Ok(if self.aslr { run } else { run.aslr_off() })
    }

    fn trace(&self, fault: Option<Fault>) -> Result<Traced> {
        trace(&subject()?, &preload()?, self.options, self.aslr, fault)
    }

    /// The calls that the preload makes when nothing fails.
    fn calls(&self) -> Result<Vec<i64>> {
        let traced = self.trace(None)?;
        ensure!(traced.calls.len() > 20, "only {} calls of the preload seen", traced.calls.len());
        Ok(traced.calls)
    }

    fn check(&self, fault: Fault) -> Result<()> {
        let plain = Run::new(subject()?).output()?;
        let traced = self.trace(Some(fault))?;
        let at = || format!("{fault:?}, call {:?}", traced.failed);
        traced.output.same_as(&plain).with_context(at)?;
        let said = traced.output.warnings();
        ensure!(said.len() <= 1, "{}: said {said:?}", at());
        Ok(())
    }

    fn each_call_fails(&self) -> Result<()> {
        let mut host = Host::lock()?;
        host.pages(PAGES)?;
        // The sequence itself is what a machine without faults sees.
        self.run()?.output()?.same_as(&Run::new(subject()?).output()?)?;
        let calls = self.calls()?;
        // Without ASLR the heap takes part; that needs no more than one kind of error.
        let all = [libc::ENOMEM, libc::EPERM, libc::EINVAL, libc::EACCES, libc::EAGAIN];
        let errors = if self.aslr { &all[..] } else { &all[..1] };
        for &errno in errors {
            for nth in 0..calls.len() {
                self.check(Fault::Once { nth, errno })?;
            }
            host.expect_idle()?;
        }
        host.finish()
    }

    fn each_kind_is_missing(&self) -> Result<()> {
        let mut host = Host::lock()?;
        host.pages(PAGES)?;
        let kinds: BTreeSet<i64> = self.calls()?.into_iter().collect();
        for number in kinds {
            self.check(Fault::Kind { number, errno: libc::ENOSYS })?;
        }
        host.expect_idle()?;
        host.finish()
    }

    /// The pool is emptied by somebody else between any two steps.
    fn drained_at_each_call(&self) -> Result<()> {
        let mut host = Host::lock()?;
        host.pages(PAGES)?;
        let mut warned = 0;
        for nth in 0..self.calls()?.len() {
            host.pages(PAGES)?;
            let plain = Run::new(subject()?).output()?;
            let traced = self.trace(Some(Fault::Drain { nth }))?;
            traced.output.same_as(&plain).with_context(|| format!("drained at call {nth}"))?;
            let said = traced.output.warnings();
            ensure!(said.len() <= 1, "drained at call {nth}: said {said:?}");
            warned += said.len();
            host.expect_idle()?;
        }
        ensure!(warned > 0, "there was always enough");
        host.finish()
    }

    fn killed_at_each_call(&self) -> Result<()> {
        let mut host = Host::lock()?;
        host.pages(PAGES)?;
        for nth in 0..self.calls()?.len() {
            self.trace(Some(Fault::Kill { nth }))?;
            let counters = Counters::read()?;
            ensure!(counters.is_idle(), "killed at call {nth}, the pool is left as {counters:?}");
        }
        host.finish()
    }
}

/// A harness that lets everything pass would be worth nothing: a call that fails always
/// must be seen to have failed, and change what the preload says.
fn the_harness_notices_a_lost_call() -> Result<()> {
    let mut host = Host::lock()?;
    host.pages(PAGES)?;
    let case = Case { options: &[], aslr: true };
    let number = libc::SYS_madvise;
    let traced = case.trace(Some(Fault::Kind { number, errno: libc::ENOSYS }))?;
    ensure!(traced.failed == Some(number), "no call was made to fail");
    traced.output.warned_once(&["ENOSYS"])?;
    host.finish()
}

/// Compiles the subject, once.
fn subject() -> Result<PathBuf> {
    let source = source_dir().join("faults/subject.c");
    let program = cache_dir("faults")?.join("subject");
    let time = |path: &PathBuf| path.metadata().and_then(|m| m.modified()).ok();
    if time(&program) < time(&source) {
        let status = Command::new("cc")
            .args(["-O1", "-o"])
            .arg(&program)
            .arg(&source)
            .status()
            .context("cannot run cc")?;
        ensure!(status.success(), "cc failed for {}", source.display());
    }
    Ok(program)
}
