//! Writing the counts and reading back what the kernel made of them: it gives fewer pages
//! than asked without an error when it finds too little contiguous memory.

use std::io::{self, ErrorKind};

use elfremap::hugepage::{PageSize, number, pool};

use super::Place;
use super::plan::{Plan, Step, distribute};
use super::survey::Survey;
use crate::system::Knobs;

/// How hard to try.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Effort {
    /// Have the kernel compact memory and drop clean caches between tries.
    pub hard: bool,
    /// Give everything back when there are fewer pages than asked.
    pub all_or_nothing: bool,
}

impl Effort {
    /// A second try often finds pages that were being freed during the first.
    const fn tries(self) -> u32 {
        if self.hard { 5 } else { 2 }
    }
}

/// What came of a plan.
#[derive(Debug)]
pub struct Outcome {
    /// Per place, in the plan's order.
    pub places: Vec<Gain>,
    /// Whether the gains were given back.
    pub undone: bool,
    /// What stopped the work before its end.
    pub failure: Option<KnobError>,
}

impl Outcome {
    /// Pages gained in all; 0 when they were given back.
    #[must_use]
    pub fn got(&self) -> u64 {
        if self.undone { 0 } else { self.gained() }
    }

    /// Pages gained, given back or not.
    #[must_use]
    pub fn gained(&self) -> u64 {
        self.places.iter().map(|gain| gain.got).sum()
    }
}

/// What one place gave.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Gain {
    /// Where.
    pub place: Place,
    /// Pages asked of it, those that another place could not give among them.
    pub asked: u64,
    /// Pages it gave.
    pub got: u64,
    /// By how much its count of all pages rose.
    pub grown: u64,
    /// By how much its count of persistent pages rose; the kernel makes surplus pages
    /// persistent first.
    pub raised: u64,
}

/// A knob that could not be turned or read.
#[derive(Debug, thiserror::Error)]
#[error("{operation} {path}")]
pub struct KnobError {
    /// `read` or `write`.
    pub operation: &'static str,
    /// The file, without the root.
    pub path: String,
    /// The cause.
    #[source]
    pub error: io::Error,
}

impl KnobError {
    /// Whether rights are what is missing.
    #[must_use]
    pub fn is_permission(&self) -> bool {
        matches!(self.error.kind(), ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem)
    }
}

/// Adds the plan's pages. `stop` is asked between steps whether to leave off.
pub fn grow<K: Knobs>(
    knobs: &K,
    survey: &Survey,
    plan: &Plan,
    effort: Effort,
    stop: impl Fn() -> bool,
) -> Outcome {
    let size = survey.pool.size;
    let run = Run { knobs, size, effort, stop: &stop };
    let mut outcome = Outcome { places: Vec::new(), undone: false, failure: None };
    for step in &plan.steps {
        let mut gain = Gain { place: step.place, asked: step.add(), got: 0, grown: 0, raised: 0 };
        if outcome.failure.is_none() && step.add() > 0 && !stop() {
            outcome.failure = run.raise(*step, &mut gain).err();
        }
        outcome.places.push(gain);
    }
    if plan.may_shift && outcome.failure.is_none() {
        outcome.failure = run.shift(survey, &mut outcome.places).err();
    }
    let short = outcome.gained() < plan.asked;
    if effort.all_or_nothing && short {
        outcome.undone = true;
        for gain in outcome.places.iter().filter(|gain| gain.raised > 0) {
            let undone = run.undo(gain);
            outcome.failure = outcome.failure.or(undone.err());
        }
    }
    outcome
}

/// Gives back the steps' pages; the number really given back is in the survey after it.
///
/// # Errors
/// A count cannot be written or read back; earlier steps stay done.
pub fn shrink<K: Knobs>(knobs: &K, size: PageSize, steps: &[Step]) -> Result<(), KnobError> {
    let run = Run { knobs, size, effort: Effort::default(), stop: &|| false };
    steps.iter().filter(|step| step.give() > 0).try_for_each(|step| run.set(step.place, step.to))
}

/// Sets how many surplus pages there may be.
///
/// # Errors
/// The kernel refuses it (it does for sizes it can make at boot only), or rights are missing.
pub fn set_overcommit<K: Knobs>(knobs: &K, size: PageSize, pages: u64) -> Result<(), KnobError> {
    write(knobs, pool::global_path(size, "nr_overcommit_hugepages"), &pages.to_string())
}

struct Run<'a, K> {
    knobs: &'a K,
    size: PageSize,
    effort: Effort,
    stop: &'a dyn Fn() -> bool,
}

/// Pages of a place.
struct Counts {
    total: u64,
    persistent: u64,
}

impl<K: Knobs> Run<'_, K> {
    /// Writes the step's count until the kernel has it, as often as the effort allows and
    /// while it helps. The gain is kept up to date, on failure too.
    fn raise(&self, step: Step, gain: &mut Gain) -> Result<(), KnobError> {
        let before = self.counts(step.place)?;
        let start = *gain;
        let mut idle = 0;
        for attempt in 0..self.effort.tries() {
            if attempt > 0 && self.effort.hard {
                self.make_room(step.place)?;
            }
            self.set(step.place, step.to)?;
            let now = self.counts(step.place)?;
            let got = now.persistent.saturating_sub(step.from).min(step.add());
            idle = if start.got + got > gain.got { 0 } else { idle + 1 };
            gain.got = start.got + got;
            gain.grown = start.grown + now.total.saturating_sub(before.total);
            gain.raised = start.raised + now.persistent.saturating_sub(before.persistent);
            if got >= step.add() || idle >= 2 || (self.stop)() {
                break;
            }
        }
        Ok(())
    }

    /// Asks the places that gave all they were asked for what the others could not give.
    fn shift(&self, survey: &Survey, places: &mut [Gain]) -> Result<(), KnobError> {
        let limits: Vec<_> =
            survey.spots.iter().map(|spot| (spot.place, spot.room.unwrap_or(u64::MAX))).collect();
        let mut short: u64 = places.iter().map(|gain| gain.asked - gain.got).sum();
        let mut willing: Vec<_> = places.iter().map(|gain| gain.got >= gain.asked).collect();
        while short > 0 && !(self.stop)() {
            let room = |(gain, willing): (&Gain, &bool)| {
                let limit = limits.iter().find(|(place, _)| *place == gain.place);
                let left = limit.map_or(0, |(_, room)| room.saturating_sub(gain.got));
                if *willing { left } else { 0 }
            };
            let room: Vec<_> = places.iter().zip(&willing).map(room).collect();
            let shares = distribute(short, &room, true);
            if shares.iter().all(|&share| share == 0) {
                break;
            }
            for ((gain, willing), share) in places.iter_mut().zip(&mut willing).zip(shares) {
                if share == 0 {
                    continue;
                }
                // All its surplus pages are persistent by now, if it was asked for any.
                let from = self.count(gain.place, "nr_hugepages")?;
                let step = Step { place: gain.place, from, to: from.saturating_add(share) };
                let had = gain.got;
                gain.asked += share;
                let done = self.raise(step, gain);
                short -= gain.got - had;
                *willing = gain.got - had == share;
                done?;
            }
        }
        Ok(())
    }

    /// Puts the place's count back. Pages that are in use by now turn into surplus ones: nobody
    /// loses anything.
    fn undo(&self, gain: &Gain) -> Result<(), KnobError> {
        let lower = |pages| {
            let now = self.counts(gain.place)?.persistent;
            self.set(gain.place, now.saturating_sub(pages))
        };
        if gain.grown > 0 {
            lower(gain.grown)?;
        }
        // Surplus pages that became persistent become surplus pages again, but only where no
        // free page is left: the kernel would take that instead.
        let converted = gain.raised.saturating_sub(gain.grown);
        if converted > 0 && self.count(gain.place, "free_hugepages")? == 0 {
            lower(converted)?;
        }
        Ok(())
    }

    fn set(&self, place: Place, pages: u64) -> Result<(), KnobError> {
        write(self.knobs, place.path(self.size, "nr_hugepages"), &pages.to_string())
    }

    fn counts(&self, place: Place) -> Result<Counts, KnobError> {
        let total = self.count(place, "nr_hugepages")?;
        let surplus = self.count(place, "surplus_hugepages")?;
        Ok(Counts { total, persistent: total.saturating_sub(surplus) })
    }

    fn count(&self, place: Place, file: &str) -> Result<u64, KnobError> {
        let path = place.path(self.size, file);
        let mut text = Vec::new();
        let error = match self.knobs.read(&path, &mut text) {
            Ok(true) => match number(&text) {
                Some(count) => return Ok(count),
                None => ErrorKind::InvalidData.into(),
            },
            Ok(false) => ErrorKind::NotFound.into(),
            Err(error) => error,
        };
        Err(KnobError { operation: "read", path, error })
    }

    /// Has the kernel free and join memory. A knob that this kernel lacks is passed over.
    fn make_room(&self, place: Place) -> Result<(), KnobError> {
        let compact = match place {
            Place::Node(node) => format!("/sys/devices/system/node/node{node}/compact"),
            Place::Machine => String::from("/proc/sys/vm/compact_memory"),
        };
        // 3: page cache, and the inodes and directory entries that keep slabs in place.
        for (path, text) in [(String::from("/proc/sys/vm/drop_caches"), "3"), (compact, "1")] {
            match write(self.knobs, path, text) {
                Err(error) if error.error.kind() == ErrorKind::NotFound => {}
                other => other?,
            }
        }
        Ok(())
    }
}

fn write<K: Knobs>(knobs: &K, path: String, text: &str) -> Result<(), KnobError> {
    knobs.write(&path, text).map_err(|error| KnobError { operation: "write", path, error })
}
