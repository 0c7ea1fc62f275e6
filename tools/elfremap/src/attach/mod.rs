//! Moving the code of a program that runs already, from outside, and back again.
//!
//! The target's memory is changed by system calls of its own: by a [`helper`] thread that is made
//! in it and runs nothing of the program. What moves is copied while the program runs ([`stage`]);
//! then all threads are stopped ([`halt`]), the copy is compared with what it stands for and
//! takes its place by one mremap(2) ([`swap`]). See docs/attach.md for what a kill of this
//! process can do at which step.

mod arch;
mod halt;
mod helper;
mod launch;
mod memory;
mod ptrace;
mod restore;
mod session;
mod stage;
mod survey;
mod swap;
mod target;

use std::time::{Duration, Instant};

use elfremap::exec::{Offer, Shortage, Source, ladder, offer};
use elfremap::plan::{Left, Plan, Reason};
use elfremap::policy::Policy;
use elfremap::report::{Moved, Report, Verdict};

use crate::check::page_size;
use crate::exit::{Failure, Status};
use crate::host::{Facility, Probes};
use crate::interrupt;
use helper::Helper;
use session::Session;
use survey::Found;

pub use helper::Calls;
pub use launch::start;
pub use restore::{Back, Returned, detach};
pub use target::Target;

/// What to do and how.
#[derive(Clone, Debug)]
pub struct Options {
    /// What moves.
    pub policy: Policy,
    /// Huge page size to plan for, in bytes.
    pub block: u64,
    /// Globs, separated by colons, for the shared objects that move with the program; `None`:
    /// all of them.
    pub objects: Option<String>,
    /// How long to wait for a thread that does not stop.
    pub timeout: Duration,
}

/// What became of a process.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// What became of each object, the program first.
    pub reports: Vec<Report>,
    /// The longest time for which all threads were stopped.
    pub stall: Duration,
}

/// Wraps the calls that are made in the target, for tests.
pub type Wrap<'a> = dyn Fn(Box<dyn Calls>) -> Box<dyn Calls> + 'a;

/// What would be done: a report for each object, in which nothing has moved yet.
///
/// # Errors
/// The process cannot be looked into.
pub fn plan(target: &Target, options: &Options) -> anyhow::Result<Vec<(Report, Option<Plan>)>> {
    let pagemap = survey::pagemap(target)?;
    let mut plans = Vec::new();
    for mut found in survey::survey(target, options.block, options.objects.as_deref())? {
        let planned = found.plan(&options.policy, &pagemap).map_err(|_| target.gone())?;
        let mut report = report_of(&found, options.block);
        let plan = match planned {
            Ok(plan) => {
                (report.total, report.left) = (plan.total, plan.left.clone());
                Some(plan)
            }
            Err(refusal) => {
                report.verdict = Verdict::Refused(refusal);
                None
            }
        };
        plans.push((report, plan));
    }
    Ok(plans)
}

fn report_of(found: &Found, block: u64) -> Report {
    let mut report = Report::new(Verdict::Planned, page_size(), block);
    report.program = found.path.clone().into_bytes();
    report
}

/// Moves what the options select. The reports say what became of each object.
///
/// # Errors
/// Nothing could be begun, or the process ended. What had been moved by then stays moved.
pub fn attach(
    target: &Target,
    options: &Options,
    held: Option<i32>,
    wrap: &Wrap<'_>,
) -> anyhow::Result<Outcome> {
    let begin = Instant::now();
    let pagemap = survey::pagemap(target)?;
    let mut work = Vec::new();
    let mut reports = Vec::new();
    for mut found in survey::survey(target, options.block, options.objects.as_deref())? {
        let mut report = report_of(&found, options.block);
        match found.plan(&options.policy, &pagemap).map_err(|_| target.gone())? {
            Ok(plan) => {
                (report.total, report.left) = (plan.total, plan.left.clone());
                work.push((reports.len(), found, plan));
            }
            Err(refusal) => report.verdict = Verdict::Refused(refusal),
        }
        reports.push(report);
    }
    if work.is_empty() {
        return Ok(Outcome { reports, stall: Duration::ZERO });
    }
    ptrace::prepare_to_wait();
    let mut offer = offer();
    let size = elfremap::hugepage::PageSize::new(options.block);
    if !size.is_some_and(|size| matches!(Probes::run(size).mremap_huge, Facility::Works)) {
        // Such mappings cannot be moved (before Linux 5.16), or there are none.
        offer.sizes.clear();
    }
    let mut calls = wrap(Box::new(Helper::create(target, held, options.timeout)?));
    let mut session = Session::begin(target, &mut *calls, held, options.timeout)?;
    for (index, found, plan) in &work {
        move_object(&mut session, found, plan, &offer, &mut reports[*index])?;
    }
    let stall = session.stall;
    drop(session);
    let nanoseconds = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    reports.iter_mut().for_each(|report| report.nanoseconds = nanoseconds);
    Ok(Outcome { reports, stall })
}

/// One range after the other, so that at most one exists twice; text first, which gains most.
fn move_object(
    session: &mut Session<'_>,
    found: &Found,
    plan: &Plan,
    offer: &Offer,
    report: &mut Report,
) -> anyhow::Result<()> {
    let mut moves: Vec<_> = plan.moves.iter().collect();
    moves.sort_by_key(|m| (m.is_writable(), !m.prot.has(elfremap::prot::Prot::EXEC)));
    for range in moves {
        let mut rest = vec![range.range];
        for source in ladder(range, plan.block, offer) {
            if !matches!(source, Source::Thp(_)) && offer.sizes.is_empty() {
                continue;
            }
            if is_interrupted() {
                return Err(interrupted());
            }
            let short = |step, errno| Shortage { source, step, errno };
            let staged = match stage::stage(session, found, range, source) {
                Ok(staged) => staged,
                Err(shortage) => {
                    if shortage.errno.0 == libc::ESRCH || !session.is_alive() {
                        return Err(session.target.gone());
                    }
                    report.shortages.push((range.range, shortage));
                    continue;
                }
            };
            let swapped = swap::swap(session, found, range, &staged, plan.block)?;
            for &home in &swapped.moved {
                report.moved.push(Moved::new(&swap::part_of(range, home), Some(source)));
            }
            for &home in &swapped.changed {
                let bytes = swap::part_of(range, home).bytes;
                report.left.push(Left { range: home, reason: Reason::Changed, bytes });
            }
            rest.clear();
            if let Some((step, errno)) = swapped.error {
                if errno.0 == libc::ESRCH || !session.is_alive() {
                    return Err(session.target.gone());
                }
                report.shortages.push((range.range, short(step, errno)));
                let done = |b: &elfremap::range::Range| {
                    swapped.moved.iter().chain(&swapped.changed).any(|r| r.covers(*b))
                };
                rest = range.range.blocks(plan.block).filter(|b| !done(b)).collect();
                if rest.len() as u64 * plan.block == range.range.len() {
                    rest = vec![range.range];
                    continue;
                }
            }
            break;
        }
        if is_interrupted() && !rest.is_empty() {
            return Err(interrupted());
        }
        for home in rest {
            report.moved.push(Moved::new(&swap::part_of(range, home), None));
        }
    }
    Ok(())
}

fn failure(status: Status, message: String, hint: Option<String>) -> anyhow::Error {
    anyhow::Error::new(Failure { status, message, hint })
}

fn failed(message: String) -> anyhow::Error {
    failure(Status::Failed, message, None)
}

fn refused(message: String, hint: Option<String>) -> anyhow::Error {
    failure(Status::Negative, message, hint)
}

fn not_permitted(message: String, hint: Option<String>) -> anyhow::Error {
    failure(Status::NotPermitted, message, hint)
}

/// A thread did not stop in time.
fn busy(target: &Target, tid: i32, state: char) -> anyhow::Error {
    let why = match state {
        'D' => "in uninterruptible sleep (a device, a file server, or vfork)",
        't' => "being traced",
        _ => "busy",
    };
    let message =
        format!("thread {tid} of process {} did not stop in time: it is {why}", target.pid);
    failure(Status::Failed, message, Some("try again later, or with --timeout SECONDS".into()))
}

fn is_interrupted() -> bool {
    interrupt::requested().is_some()
}

fn interrupted() -> anyhow::Error {
    failed("interrupted; what had been moved by then stays moved".into())
}
