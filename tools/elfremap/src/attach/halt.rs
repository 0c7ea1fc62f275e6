//! All threads of the target stopped at once, for as short a time as can be.
//!
//! # Safety
//! The only unsafe calls here change the scheduling of this process and of the helper.
#![allow(unsafe_code)]

use std::collections::BTreeSet;
use std::fs;
use std::time::{Duration, Instant};

use elfremap::errno::Errno;

use super::arch::{RESUMED, Registers};
use super::ptrace::{self, Stop};
use super::target::{Status, Target, call_under_way, state, turns};

/// Why not all threads could be stopped in time.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Busy {
    /// This thread does not stop: it is in that state (proc_pid_stat(5)).
    Thread(i32, char),
    /// The kernel does not let us trace a thread.
    Forbidden,
    /// The process is gone, or there is nothing left to stop.
    Gone,
}

/// Who is to be stopped.
#[derive(Clone, Copy, Debug)]
pub(super) struct Who {
    /// The helper, which is not.
    pub(super) helper: i32,
    /// A thread that is stopped already.
    pub(super) held: Option<i32>,
    /// Whether threads are woken that sleep in a call which the kernel would end early. Where
    /// nothing is written to, they may sleep on, and are looked at again before the swap.
    pub(super) everyone: bool,
}

/// Threads that were asked to stop in an attempt that was given up, and still have not.
#[derive(Default, Debug)]
pub(super) struct Lingering(BTreeSet<i32>);

impl Lingering {
    /// Lets those go that have stopped by now; waits for some until `until`.
    pub(super) fn let_go(&mut self, until: Instant) {
        while !self.0.is_empty() {
            match ptrace::wait(-1, until) {
                Ok(Some((tid, stop))) => {
                    // A thread that was born meanwhile stops as well, and is not in the list.
                    if stop != Stop::Ended {
                        release(tid, stop.signal(), false);
                    }
                    self.0.remove(&tid);
                }
                Ok(None) => return,
                Err(_) => self.0.clear(),
            }
        }
    }
}

/// The threads, stopped until this is dropped.
#[derive(Debug)]
pub(super) struct Halt<'a> {
    target: &'a Target,
    who: Who,
    /// When the first thread was asked to stop.
    began: Instant,
    until: Instant,
    /// Threads that were asked and have not stopped yet.
    asked: BTreeSet<i32>,
    /// Threads that stand, and the signal that each is to get.
    standing: Vec<(i32, i32)>,
    /// Threads that sleep on, each with its [`turns`].
    asleep: Vec<(i32, Option<u64>)>,
    /// Threads that were woken out of a call which the kernel ends early. The others that are
    /// stopped in such a call have only just begun it: they were at something else before.
    woken: BTreeSet<i32>,
    known: BTreeSet<i32>,
    lingering: &'a mut Lingering,
}

impl<'a> Halt<'a> {
    /// Stops them.
    pub(super) fn begin(
        target: &'a Target,
        who: Who,
        patience: Duration,
        lingering: &'a mut Lingering,
    ) -> Result<Self, Busy> {
        let known = [Some(who.helper), who.held].into_iter().flatten().collect();
        let mut halt = Self {
            target,
            who,
            began: Instant::now(),
            until: Instant::now() + patience,
            asked: BTreeSet::new(),
            standing: Vec::new(),
            asleep: Vec::new(),
            woken: BTreeSet::new(),
            known,
            lingering,
        };
        halt.stop()?;
        Ok(halt)
    }

    fn stop(&mut self) -> Result<(), Busy> {
        // Whatever takes long is done before the first thread stands still.
        let mut running = Vec::new();
        for tid in self.unknown()? {
            let turns = turns(tid);
            match state(tid) {
                None | Some(b'Z' | b'X') => {}
                Some(b'D') => return Err(Busy::Thread(tid, 'D')),
                Some(b'S') if !self.who.everyone && !is_resumed(tid) => {
                    self.asleep.push((tid, turns))
                }
                Some(state) => {
                    if state != b'R' && !(state == b'S' && is_resumed(tid)) {
                        self.woken.insert(tid);
                    }
                    running.push(tid);
                }
            }
        }
        running.retain(|&tid| ptrace::seize(tid, ptrace::OPTIONS) != Err(Errno(libc::ESRCH)));
        prefer(0, true);
        prefer(self.who.helper, true);
        let spent = self.began.elapsed();
        self.began += spent;
        self.until += spent;
        for &tid in &running {
            self.ask(tid)?;
        }
        self.wait_for_asked()?;
        // Those that were made meanwhile.
        loop {
            let new = self.unknown()?;
            if new.is_empty() {
                return Ok(());
            }
            for tid in new {
                self.take(tid)?;
            }
            self.wait_for_asked()?;
        }
    }

    /// Threads that have not been looked at.
    fn unknown(&mut self) -> Result<Vec<i32>, Busy> {
        let entries =
            fs::read_dir(format!("/proc/{}/task", self.target.pid)).map_err(|_| Busy::Gone)?;
        let tids = entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok());
        Ok(tids.filter(|&tid| self.known.insert(tid)).collect())
    }

    /// Seizes a thread and asks it to stop.
    fn take(&mut self, tid: i32) -> Result<(), Busy> {
        match ptrace::seize(tid, ptrace::OPTIONS) {
            // It was made by a traced thread, so it is traced as well and stops by itself.
            Err(Errno(libc::EPERM)) if self.asked.contains(&tid) => Ok(()),
            Err(Errno(libc::ESRCH)) => Ok(()),
            _ => self.ask(tid),
        }
    }

    fn ask(&mut self, tid: i32) -> Result<(), Busy> {
        match ptrace::interrupt(tid) {
            Ok(()) => {
                self.asked.insert(tid);
                Ok(())
            }
            // Not traced by us: it has ended, or may not be.
            Err(_) if matches!(state(tid), None | Some(b'Z' | b'X')) => Ok(()),
            Err(_) => Err(Busy::Forbidden),
        }
    }

    fn wait_for_asked(&mut self) -> Result<(), Busy> {
        while !self.asked.is_empty() {
            match ptrace::wait(-1, self.until) {
                Ok(Some((tid, stop))) => self.note(tid, stop),
                Ok(None) if Instant::now() >= self.until => {
                    let tid = self.asked.first().copied().unwrap_or_default();
                    return Err(Busy::Thread(tid, state(tid).map_or('?', char::from)));
                }
                // Interrupted by a signal: to stop the threads does not take long.
                Ok(None) => {}
                Err(_) => return Err(Busy::Gone),
            }
        }
        Ok(())
    }

    fn note(&mut self, tid: i32, stop: Stop) {
        self.asked.remove(&tid);
        if stop == Stop::Ended {
            self.standing.retain(|(standing, _)| *standing != tid);
            return;
        }
        self.known.insert(tid);
        if tid != self.who.helper && !self.standing.iter().any(|(standing, _)| *standing == tid) {
            self.standing.push((tid, stop.signal()));
        }
    }

    /// Lets the threads go on; returns how long they were kept.
    pub(super) fn end(self) -> Duration {
        let began = self.began;
        drop(self);
        began.elapsed()
    }

    /// Whether those that were left asleep still sleep. Those that do not are stopped.
    pub(super) fn is_complete(&mut self) -> Result<bool, Busy> {
        let awake: Vec<i32> = self
            .asleep
            .extract_if(.., |(tid, before)| before.is_none() || turns(*tid) != *before)
            .map(|(tid, _)| tid)
            .collect();
        if awake.is_empty() {
            return Ok(true);
        }
        for tid in awake {
            self.take(tid)?;
        }
        self.wait_for_asked()?;
        Ok(false)
    }
}

impl Drop for Halt<'_> {
    fn drop(&mut self) {
        for &(tid, signal) in &self.standing {
            release(tid, signal, !self.woken.contains(&tid));
        }
        prefer(self.who.helper, false);
        prefer(0, false);
        self.lingering.0.append(&mut self.asked);
    }
}

/// Lets a stopped thread go. `has_just_begun`: see [`made_again`].
fn release(tid: i32, signal: i32, has_just_begun: bool) {
    if signal == 0
        && let Some(again) = made_again(tid, has_just_begun)
    {
        let _ = ptrace::set_registers(tid, &again);
    }
    let _ = ptrace::detach(tid, signal);
}

/// Whether the kernel resumes by itself what the thread sleeps in when it is stopped.
pub(super) fn is_resumed(tid: i32) -> bool {
    call_under_way(tid).is_some_and(|call| RESUMED.contains(&call))
}

/// The registers with which a stopped thread makes its call again that ended early only
/// because of the stop. Where the call has just begun, its time may begin anew as well.
pub(super) fn made_again(tid: i32, has_just_begun: bool) -> Option<Registers> {
    let again = ptrace::registers(tid).ok()??.uninterrupted(has_just_begun)?;
    (!Status::read(tid)?.has_signal()).then_some(again)
}

/// Lets a thread (0: this one) run before all ordinary ones, or as usual again. Where that is
/// not permitted it is no worse than it was.
fn prefer(tid: i32, preferred: bool) {
    let policy =
        if preferred { libc::SCHED_FIFO | libc::SCHED_RESET_ON_FORK } else { libc::SCHED_OTHER };
    let parameters = libc::sched_param { sched_priority: i32::from(preferred) };
    // SAFETY: the kernel reads the structure; a helper that has ended is an error.
    unsafe { libc::sched_setscheduler(tid, policy, &raw const parameters) };
}
