//! What `elfremap reserve` did, as JSON and as text, and the exit status it leads to.

use std::env;
use std::fmt::Write;

use elfremap::hugepage::PageSize;
use serde::Serialize;

use super::Place;
use super::apply::{KnobError, Outcome};
use super::plan::{Plan, Step};
use super::survey::{Spot, Survey};
use super::text::shell_word;
use crate::exit::{Failure, Status};
use crate::interrupt;
use crate::output::{Style, counted, megabytes};

/// What the command prints. Field by field, this is the JSON schema. Counts are pages.
#[derive(Serialize, Debug)]
pub(crate) struct Report {
    pub(crate) schema: u32,
    /// In bytes.
    pub(crate) page_size: u64,
    #[serde(skip)]
    pub(crate) page: PageSize,
    pub(crate) dry_run: bool,
    pub(crate) release: bool,
    /// Pages to add, or with `release` to give back.
    pub(crate) asked: u64,
    /// Pages added or given back.
    pub(crate) got: u64,
    /// Pages not tried for, so that some memory stays free.
    pub(crate) held_back: u64,
    /// Whether the pages were given back, there being fewer than asked.
    pub(crate) undone: bool,
    /// What the kernel gave before that.
    pub(crate) gained: u64,
    pub(crate) places: Vec<PlaceEntry>,
    /// Free pages promised to nobody, at the end.
    pub(crate) available: u64,
    pub(crate) overcommit: Option<Change>,
    /// Pages that each instance of the program needs.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pages_each: Option<u64>,
    /// What a dry run would write.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(crate) writes: Vec<PlannedWrite>,
    #[serde(rename = "persist", skip_serializing_if = "Option::is_none")]
    pub(crate) lasting: Option<String>,
    #[serde(skip)]
    pub(crate) failure: Option<KnobError>,
}

#[derive(Serialize, Debug)]
pub(crate) struct PlaceEntry {
    /// `None`: the machine has no NUMA support.
    pub(crate) node: Option<u32>,
    #[serde(skip)]
    pub(crate) place: Place,
    pub(crate) asked: u64,
    /// Instances of the program it is to hold.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) instances: Option<u64>,
    pub(crate) before: Counts,
    pub(crate) after: Counts,
}

#[derive(Serialize, Clone, Copy, Debug)]
pub(crate) struct Counts {
    pub(crate) total: u64,
    pub(crate) free: u64,
    pub(crate) surplus: u64,
}

#[derive(Serialize, Debug)]
pub(crate) struct Change {
    pub(crate) before: u64,
    pub(crate) after: u64,
}

#[derive(Serialize, Debug)]
pub(crate) struct PlannedWrite {
    pub(crate) path: String,
    pub(crate) from: u64,
    pub(crate) to: u64,
}

impl From<&Spot> for Counts {
    fn from(spot: &Spot) -> Self {
        Self { total: spot.total, free: spot.free, surplus: spot.surplus }
    }
}

impl Report {
    pub(crate) fn new(size: PageSize, before: &Survey, dry_run: bool) -> Self {
        let place = |spot: &Spot| PlaceEntry {
            node: match spot.place {
                Place::Machine => None,
                Place::Node(node) => Some(node),
            },
            place: spot.place,
            asked: 0,
            instances: None,
            before: spot.into(),
            after: spot.into(),
        };
        Self {
            schema: 1,
            page_size: size.bytes(),
            page: size,
            dry_run,
            release: false,
            asked: 0,
            got: 0,
            held_back: 0,
            undone: false,
            gained: 0,
            places: before.spots.iter().map(place).collect(),
            available: before.pool.available(),
            overcommit: None,
            pages_each: None,
            writes: Vec::new(),
            lasting: None,
            failure: None,
        }
    }

    pub(crate) fn note_steps(&mut self, size: PageSize, steps: &[Step]) {
        for step in steps {
            let entries = self.places.iter_mut().filter(|entry| entry.place == step.place);
            entries.for_each(|entry| entry.asked = step.add().max(step.give()));
            if step.from != step.to {
                let path = step.place.path(size, "nr_hugepages");
                self.writes.push(PlannedWrite { path, from: step.from, to: step.to });
            }
        }
    }

    pub(crate) fn note_instances(&mut self, plan: &Plan, pages: u64) {
        self.pages_each = Some(pages);
        for (step, &instances) in plan.steps.iter().zip(&plan.instances) {
            let entries = self.places.iter_mut().filter(|entry| entry.place == step.place);
            entries.for_each(|entry| {
                entry.asked = step.add();
                entry.instances = Some(instances);
            });
        }
    }

    /// Which place is to hold how many instances, before anything is done about it.
    pub(crate) fn plan_text(&self, program: &str, count: u64) -> String {
        let each = self.pages_each.unwrap_or_default();
        let mut text = format!(
            "plan: {} of {program}, each {} of {}\n",
            counted(count, "instance"),
            counted(each, "page"),
            self.page
        );
        let mut placed = 0;
        for entry in &self.places {
            let Some(instances) = entry.instances else { continue };
            placed += instances;
            let _ = writeln!(
                text,
                "  {:<9} {}: {}, {} free now, {} to add",
                entry.place,
                counted(instances, "instance"),
                counted(instances.saturating_mul(each), "page"),
                entry.before.free,
                entry.asked
            );
        }
        if placed < count {
            let _ = writeln!(
                text,
                "  no place has memory for {} as a whole",
                counted(count - placed, "instance")
            );
        }
        text
    }

    pub(crate) fn take(&mut self, plan: &Plan, outcome: Outcome) {
        self.got = outcome.got();
        self.gained = outcome.gained();
        self.undone = outcome.undone;
        for gain in &outcome.places {
            let entries = self.places.iter_mut().filter(|entry| entry.place == gain.place);
            entries.for_each(|entry| entry.asked = gain.asked);
        }
        debug_assert_eq!(plan.asked, self.asked);
        self.failure = outcome.failure;
    }

    /// Fills in how things are now.
    pub(crate) fn look_back(&mut self, after: &Survey) {
        for entry in &mut self.places {
            if let Some(spot) = after.spots.iter().find(|spot| spot.place == entry.place) {
                entry.after = spot.into();
            }
        }
        if self.release {
            let total = |of: fn(&PlaceEntry) -> u64| self.places.iter().map(of).sum::<u64>();
            self.got = total(|e| e.before.total).saturating_sub(total(|e| e.after.total));
        }
        self.available = after.pool.available();
        if let Some(change) = &mut self.overcommit {
            change.after = after.pool.overcommit;
        }
    }

    pub(crate) fn text(&self, style: Style) -> String {
        let mut text = String::new();
        let pages = |count: u64| {
            let noun = counted(count, "huge page");
            format!("{noun} of {} ({})", self.page, megabytes(count.saturating_mul(self.page_size)))
        };
        if self.dry_run {
            for PlannedWrite { path, from, to } in &self.writes {
                let _ = writeln!(text, "would write {to} (now {from}) to\n  {path}");
            }
            if self.writes.is_empty() {
                text += "nothing to do\n";
            }
            return text;
        }
        if self.release {
            let _ = writeln!(text, "released {}", pages(self.got));
        } else if self.asked > 0 {
            let of = if self.got < self.asked {
                format!(" of {} asked", self.asked)
            } else {
                String::new()
            };
            let _ = writeln!(text, "reserved {}{of}", pages(self.got));
        } else if self.overcommit.is_none() {
            text += "nothing to do: there are enough huge pages\n";
        }
        if self.asked > 0 || self.release {
            let heading = "                asked    before     after      free";
            let _ = writeln!(text, "{}", style.bold(heading));
            for entry in &self.places {
                let _ = writeln!(
                    text,
                    "  {:<9} {:>9} {:>9} {:>9} {:>9}",
                    entry.place,
                    entry.asked,
                    entry.before.total,
                    entry.after.total,
                    entry.after.free
                );
            }
        }
        if let Some(Change { before, after }) = self.overcommit {
            let _ = writeln!(text, "surplus pages allowed: {after} (before: {before})");
        }
        let _ = writeln!(text, "free and promised to nobody: {}", self.available);
        text
    }

    /// The exit status, and what to say on stderr when it is not 0.
    pub(crate) fn verdict(self, tried_hard: bool) -> anyhow::Result<Status> {
        if let Some(error) = self.failure {
            return Err(knob_failure(error));
        }
        if let Some(signal) = interrupt::requested() {
            anyhow::bail!("reserve: interrupted by signal {signal}");
        }
        let wanted = match (self.dry_run, self.release) {
            (true, true) => self.places.iter().map(|entry| entry.asked).sum(),
            (true, false) => self.asked - self.held_back,
            (false, _) => self.got,
        };
        if wanted >= self.asked {
            return Ok(Status::Done);
        }
        if self.release {
            let message = format!(
                "release {}: only {} were free and promised to nobody",
                counted(self.asked, &format!("{} page", self.page)),
                wanted
            );
            return Err(anyhow::Error::new(Failure { status: Status::Short, message, hint: None }));
        }
        let (asked, page) = (self.asked, self.page);
        let mut message = format!("reserve {}: ", counted(asked, &format!("{page} page")));
        if self.held_back == 0 {
            let _ = write!(message, "the kernel gave {}", self.gained);
        } else {
            let room = asked - self.held_back;
            let _ = write!(message, "there is memory for {room}");
            if self.gained < room && !self.dry_run && !self.undone {
                let _ = write!(message, ", and the kernel gave {}", self.gained);
            }
        }
        if self.undone {
            message += "; nothing is kept";
        }
        let hint = if self.held_back > 0 {
            "free some memory, or leave less to the others with --keep-free SIZE"
        } else if !tried_hard {
            "try again with --hard, which compacts memory and drops clean caches"
        } else {
            "reserve at boot, before memory is fragmented: add --persist systemd"
        };
        Err(anyhow::Error::new(Failure {
            status: Status::Short,
            message,
            hint: Some(String::from(hint)),
        }))
    }
}

/// A knob that could not be turned, with the way out.
fn knob_failure(error: KnobError) -> anyhow::Error {
    let permission = error.is_permission();
    let hint = if error.error.raw_os_error() == Some(libc::EINVAL) {
        String::from(
            "the kernel cannot do this for pages of that size while it runs; \
             its command line can: hugepagesz=SIZE hugepages=N",
        )
    } else if error.error.raw_os_error() == Some(libc::EROFS) {
        String::from("sysfs is read-only here, as it is in containers: run this on the host")
    } else if nix::unistd::geteuid().is_root() {
        String::from("this root may not, as in a container: run this as root of the host")
    } else {
        let words: Vec<_> = env::args().map(|word| shell_word(&word)).collect();
        format!("sudo {}", words.join(" "))
    };
    let message = format!("{error}: {}", error.error);
    let status = if permission { Status::NotPermitted } else { Status::Failed };
    let has_hint = permission || error.error.raw_os_error() == Some(libc::EINVAL);
    anyhow::Error::new(Failure { status, message, hint: has_hint.then_some(hint) })
}
