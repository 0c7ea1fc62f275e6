//! What the target looks like: its objects, each as the planner wants it.

use std::ffi::CString;
use std::fs::File;
use std::os::unix::fs::MetadataExt;

use elfremap::errno::Errno;
use elfremap::exec::pagemap::{Content, Pagemap};
use elfremap::exec::{Identity, areas, first_mapping};
use elfremap::facts::{Area, Backing, Facts, Heap};
use elfremap::plan::{self, Plan, Reason, Refusal};
use elfremap::policy::Policy;
use elfremap::proc::smaps::{self, Entry};
use elfremap::proc::{maps, stat};
use elfremap::prot::Prot;
use elfremap::{glob, range::Range};

use super::failed;
use super::target::Target;
use crate::check::page_size;
use crate::process::{self, Cache, Process};

/// An ELF object of the target.
#[derive(Debug)]
pub(super) struct Found {
    /// Its path as the kernel has it.
    pub(super) path: String,
    pub(super) facts: Facts,
    /// The file behind its mappings as maps names it.
    pub(super) identity: Option<Identity>,
    /// The file itself; `None` when it cannot be opened.
    pub(super) file: Option<Stamped>,
}

/// An open file that is known not to have changed.
#[derive(Debug)]
pub(super) struct Stamped {
    pub(super) file: File,
    stamp: (i64, i64, i64, i64, u64),
}

impl Stamped {
    fn new(file: File) -> Option<Self> {
        Some(Self { stamp: stamp(&file)?, file })
    }

    /// Whether it is as it was when it was opened.
    pub(super) fn is_unchanged(&self) -> bool {
        stamp(&self.file) == Some(self.stamp)
    }
}

fn stamp(file: &File) -> Option<(i64, i64, i64, i64, u64)> {
    let m = file.metadata().ok()?;
    Some((m.mtime(), m.mtime_nsec(), m.ctime(), m.ctime_nsec(), m.size()))
}

/// The objects of the target: the program, and the shared objects that `wanted` (globs,
/// separated by colons; `None`: all) names.
pub(super) fn survey(
    target: &Target,
    block: u64,
    wanted: Option<&str>,
) -> anyhow::Result<Vec<Found>> {
    let text = std::fs::read(target.path("smaps"))?;
    let entries: Vec<Entry<'_>> =
        smaps::parse(&text).collect::<Result<_, _>>().map_err(|error| {
            failed(format!("cannot read the memory map of process {}: {error}", target.pid))
        })?;
    if entries.is_empty() {
        return Err(target.gone());
    }
    let process = living(target);
    let maps = target.maps()?;
    let heap = heap(target, &maps);
    let mut found = Vec::new();
    for mapped in process::objects(&process, &entries, &mut Cache::default()) {
        let named =
            wanted.is_none_or(|names| glob::in_list(names.as_bytes(), mapped.path.as_bytes()));
        if !mapped.main && !named {
            continue;
        }
        let Some(first) = first_mapping(&maps, &mapped.object) else { continue };
        let identity = (!first.is_anonymous()).then_some((first.device, first.inode));
        let file = identity.and_then(|own| open(&process, &maps, &mapped, own));
        let mut areas = areas(&maps, &mapped.object, block, identity).map_err(|errno| {
            failed(format!("cannot use the memory map of process {}: {errno}", target.pid))
        })?;
        mark_bti(&mut areas, &entries);
        let facts = Facts {
            page: page_size(),
            block,
            object: mapped.object,
            areas,
            heap,
            threaded: false,
            limited: target.is_limited(),
            pinned: Vec::new(),
        };
        found.push(Found { path: mapped.path, facts, identity, file });
    }
    Ok(found)
}

/// The process under the number of a thread that has its memory.
pub(super) fn living(target: &Target) -> Process {
    let alive = target.threads().into_iter();
    let pid = alive.filter_map(|tid| u32::try_from(tid).ok()).find(|&tid| tid == target.pid);
    let other = || target.threads().first().and_then(|&tid| u32::try_from(tid).ok());
    Process { pid: pid.or_else(other).unwrap_or(target.pid), name: target.name.clone() }
}

/// The object's file, by one of its mappings: a file that was removed or replaced is found too.
fn open(
    process: &Process,
    maps: &[u8],
    mapped: &process::Mapped,
    own: Identity,
) -> Option<Stamped> {
    let inode = |file: &File| file.metadata().is_ok_and(|m| m.ino() == own.1);
    let by_mapping = maps::parse(maps)
        .filter_map(Result::ok)
        .filter(|m| (m.device, m.inode) == own)
        .map(|m| process.path(&format!("map_files/{:x}-{:x}", m.range.start(), m.range.end())));
    let by_name = [
        process.path("exe"),
        process.path(&format!("root{}", mapped.path)),
        mapped.path.clone().into(),
    ];
    by_mapping.chain(by_name).find_map(|path| Stamped::new(File::open(path).ok().filter(inode)?))
}

/// The brk heap. It stays where it is: only libc could raise the break.
fn heap(target: &Target, maps: &[u8]) -> Option<Heap> {
    let heap = maps::parse(maps).filter_map(Result::ok).filter(|m| m.name == b"[heap]");
    let end = heap.map(|m| m.range.end()).max();
    let text = std::fs::read(target.path("stat")).ok()?;
    let start = stat::parse(&text).map(|stat| stat.start_brk).filter(|&start| start > 0)?;
    Some(Heap { start, brk: end.unwrap_or(start).max(start), may_grow: false })
}

/// Adds the right that maps does not show (arm64).
fn mark_bti(areas: &mut [Area], entries: &[Entry<'_>]) {
    for mapping in entries.iter().map(|entry| &entry.mapping).filter(|m| m.prot.has(Prot::BTI)) {
        let inside = areas.iter_mut().filter(|area| mapping.range.covers(area.range));
        inside.for_each(|area| area.prot = area.prot | Prot::BTI);
    }
}

/// Opens the target's pagemap.
pub(super) fn pagemap(target: &Target) -> anyhow::Result<Pagemap> {
    let path = target.path("pagemap");
    let path = CString::new(path.into_os_string().into_encoded_bytes())?;
    Pagemap::open_at(&path, page_size()).map_err(|errno| {
        failed(format!("cannot read the pagemap of process {}: {errno}", target.pid))
    })
}

impl Found {
    /// What of the object moves. Blocks whose code is not the file's stay: an armed uprobe's
    /// breakpoint belongs to the file's mapping.
    pub(super) fn plan(
        &mut self,
        policy: &Policy,
        pagemap: &Pagemap,
    ) -> Result<Result<Plan, Refusal>, Errno> {
        loop {
            let plan = match plan::plan(&self.facts, policy) {
                Ok(plan) => plan,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let before = self.facts.pinned.len();
            for piece in plan.moves.iter().flat_map(|m| &m.pieces) {
                if piece.prot.has(Prot::EXEC) && piece.backing != Backing::Anonymous {
                    for (run, content) in pagemap.runs(piece.range)? {
                        let modified = content == Content::Own;
                        let blocks = run.blocks(plan.block).filter(|_| modified);
                        self.facts.pinned.extend(blocks.map(|b| (b, Reason::TextModified)));
                    }
                }
            }
            if self.facts.pinned.len() == before {
                return Ok(Ok(plan));
            }
        }
    }

    /// The mappings in `range` of the text of a maps file.
    pub(super) fn areas_in(&self, maps: &[u8], range: Range) -> Vec<Area> {
        let found = areas(maps, &self.facts.object, self.facts.block, self.identity);
        pages_of(&found.unwrap_or_default(), range)
    }

    /// The same, as they were when the plan was made.
    pub(super) fn planned_in(&self, range: Range) -> Vec<Area> {
        pages_of(&self.facts.areas, range)
    }
}

/// The parts of `areas` in `range`, neighbours joined, with the rights that maps shows.
pub(super) fn pages_of(areas: &[Area], range: Range) -> Vec<Area> {
    let mut parts: Vec<Area> = Vec::new();
    for area in areas.iter().filter(|area| area.range.overlaps(range)) {
        let inside = area.range.intersect(range);
        let backing = match area.backing {
            Backing::File(offset) => Backing::File(offset + (inside.start() - area.range.start())),
            other => other,
        };
        let prot = [Prot::READ, Prot::WRITE, Prot::EXEC]
            .into_iter()
            .filter(|&right| area.prot.has(right))
            .fold(Prot::NONE, |sum, right| sum | right);
        let continues = |last: &Area| match (last.backing, backing) {
            (Backing::File(a), Backing::File(b)) => a + last.range.len() == b,
            (a, b) => a == b,
        };
        match parts.last_mut() {
            Some(last)
                if last.range.end() == inside.start() && last.prot == prot && continues(last) =>
            {
                last.range = Range::new(last.range.start(), inside.end()).unwrap_or(last.range);
            }
            _ => parts.push(Area { range: inside, prot, backing }),
        }
    }
    parts
}
