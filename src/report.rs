//! What was done, for people and machines.

use alloc::vec::Vec;
use core::fmt;

use crate::class::{Class, ClassBytes};
use crate::exec::{Remaining, Shortage, Source};
use crate::hugepage::{NodeSet, PageSize};
use crate::plan::{Left, Move, Reason, Refusal};
use crate::prot::Prot;
use crate::range::Range;

/// Whether anything was tried.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// There was a plan; see what moved.
    Planned,
    /// The program was left alone.
    Refused(Refusal),
}

/// A planned range and what became of it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Moved {
    /// Addresses.
    pub range: Range,
    /// Rights afterwards.
    pub prot: Prot,
    /// Bytes by class.
    pub bytes: ClassBytes,
    /// Where its pages came from; `None` when it stayed on ordinary pages.
    pub source: Option<Source>,
    /// Whether bytes that were read-only after relocation are now writable.
    pub opens_relro: bool,
}

impl Moved {
    /// The outcome of a planned range.
    #[must_use]
    pub fn new(plan: &Move, source: Option<Source>) -> Self {
        let opens_relro = plan.prot.has(Prot::WRITE) && plan.bytes.get(Class::Relro) > 0;
        Self { range: plan.range, prot: plan.prot, bytes: plan.bytes, source, opens_relro }
    }
}

/// What was done to one program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Report {
    /// The program's path as the kernel names it.
    pub program: Vec<u8>,
    /// Whether anything was tried.
    pub verdict: Verdict,
    /// Base page size in bytes.
    pub page: u64,
    /// Block size in bytes.
    pub block: u64,
    /// The planned ranges.
    pub moved: Vec<Moved>,
    /// Blocks that stayed.
    pub left: Vec<Left>,
    /// What could not be had, and for which range.
    pub shortages: Vec<(Range, Shortage)>,
    /// Bytes of the program by class.
    pub total: ClassBytes,
    /// From the first look to the end, in nanoseconds.
    pub nanoseconds: u64,
}

impl Report {
    /// A report in which nothing has moved yet.
    #[must_use]
    pub const fn new(verdict: Verdict, page: u64, block: u64) -> Self {
        Self {
            program: Vec::new(),
            verdict,
            page,
            block,
            moved: Vec::new(),
            left: Vec::new(),
            shortages: Vec::new(),
            total: ClassBytes::EMPTY,
            nanoseconds: 0,
        }
    }

    /// Bytes by class that were moved.
    #[must_use]
    pub fn bytes_moved(&self) -> ClassBytes {
        let mut sum = ClassBytes::default();
        self.moved.iter().filter(|m| m.source.is_some()).for_each(|m| sum.add_all(&m.bytes));
        sum
    }

    /// The most telling reason for something being left that usually moves.
    #[must_use]
    pub fn notable(&self) -> Option<Reason> {
        if let Verdict::Refused(Refusal::NoBlock(reason)) = self.verdict {
            return reason.is_notable().then_some(reason);
        }
        let notable = self.left.iter().filter(|left| left.reason.is_notable());
        notable.max_by_key(|left| left.bytes.total()).map(|left| left.reason)
    }

    /// What protection the merge level, asked for by name, has cost.
    #[must_use]
    pub fn loosened(&self) -> Option<&'static str> {
        let moved = || self.moved.iter().filter(|m| m.source.is_some());
        if moved().any(|m| m.prot.is_write_exec()) {
            Some("pages are writable and executable (ELFREMAP_MERGE=rwx)")
        } else if moved().any(|m| m.opens_relro) {
            Some("RELRO is off: relro is writable (ELFREMAP_MERGE)")
        } else {
            None
        }
    }

    /// Whether something that was planned lies on small pages, or nothing could be
    /// planned for a notable reason. Another kind of huge page than was asked for first
    /// is no failure.
    #[must_use]
    pub fn has_failed(&self) -> bool {
        self.moved.iter().any(|m| m.source.is_none()) || self.notable().is_some()
    }

    /// Whether something was left undone that the user should hear of.
    #[must_use]
    pub fn is_incomplete(&self) -> bool {
        !self.shortages.is_empty() || self.notable().is_some()
    }

    /// The program's path as a shell takes it; a name that cannot be typed as it is
    /// stands for itself as PROGRAM.
    fn write_quoted(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let is_plain = |&b: &u8| b.is_ascii_alphanumeric() || b"/._+-".contains(&b);
        if self.program.iter().all(is_plain) {
            return self.write_program(f);
        }
        let is_quotable = |&b: &u8| b != b'\'' && !b.is_ascii_control() && b.is_ascii();
        if self.program.iter().all(is_quotable) {
            f.write_str("'")?;
            self.write_program(f)?;
            return f.write_str("'");
        }
        f.write_str("PROGRAM")
    }

    fn write_program(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.program.utf8_chunks() {
            for char in chunk.valid().chars() {
                if char.is_control() {
                    write!(f, "\\x{:02x}", u32::from(char))?
                } else {
                    write!(f, "{char}")?
                }
            }
            chunk.invalid().iter().try_for_each(|byte| write!(f, "\\x{byte:02x}"))?;
        }
        Ok(())
    }
}

/// An amount in MiB with one decimal.
struct Mb(u64);

impl fmt::Display for Mb {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let tenths = self.0.saturating_mul(10).saturating_add(1 << 19) >> 20;
        write!(f, "{}.{}", tenths / 10, tenths % 10)
    }
}

/// A page size such as `2M`.
struct Size(u64);

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            g if g >= 1 << 30 => write!(f, "{}G", g >> 30),
            m if m >= 1 << 20 => write!(f, "{}M", m >> 20),
            k => write!(f, "{}K", k >> 10),
        }
    }
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hugetlb(size) => write!(f, "hugetlb {}", Size(*size)),
            Self::Thp(_) => f.write_str("THP"),
        }
    }
}

/// The summary: `mysqld: text 33.9 of 35.6 MB, ... on 17 huge pages (hugetlb 2M) in 9.8 ms`.
#[derive(Debug)]
pub struct Summary<'a>(pub &'a Report);

impl fmt::Display for Summary<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.0;
        report.write_program(f)?;
        if let Verdict::Refused(refusal) = report.verdict {
            return write!(f, ": left alone: {refusal}");
        }
        let moved = report.bytes_moved();
        let mut separator = ": ";
        for class in Class::ALL {
            if report.total.get(class) == 0 || class == Class::Heap {
                continue;
            }
            if moved.get(class) == 0 && class == Class::Rodata {
                continue;
            }
            let (moved, total) = (Mb(moved.get(class)), Mb(report.total.get(class)));
            write!(f, "{separator}{} {moved} of {total} MB", class.name())?;
            separator = ", ";
        }
        let mut joiner = " on";
        let mut sources: Vec<(Source, u64)> = Vec::new();
        for m in &report.moved {
            let Some(source) = m.source else { continue };
            let pages = m.range.len() / source.size();
            match sources.iter_mut().find(|(known, _)| *known == source) {
                Some((_, sum)) => *sum += pages,
                None => sources.push((source, pages)),
            }
        }
        for (source, pages) in &sources {
            let s = if *pages == 1 { "" } else { "s" };
            write!(f, "{joiner} {pages} huge page{s} ({source})")?;
            joiner = " and";
        }
        if sources.is_empty() {
            f.write_str(" on huge pages")?;
        }
        let tenths = report.nanoseconds / 100_000;
        write!(f, " in {}.{} ms", tenths / 10, tenths % 10)
    }
}

/// The one warning line, without its prefix: what was wanted, what failed, what was
/// done instead, what to type.
#[derive(Debug)]
pub struct Warning<'a> {
    /// The report.
    pub report: &'a Report,
    /// What the pool has left, when it was short.
    pub pool: Option<Remaining>,
}

/// Where and what was missing, for a warning.
enum Missing<'a> {
    /// Pages on these nodes.
    OnNodes(&'a NodeSet),
    /// Pages of the pool.
    InPool,
    /// Perhaps the permission: this limit of the hugetlb cgroup.
    Limit(&'static str),
}

impl Warning<'_> {
    /// What is most likely missing when `pages` could not be had at `step`.
    fn missing(&self, pages: u64, step: &str) -> Missing<'_> {
        match &self.pool {
            Some(Remaining { nodes: Some((nodes, free)), .. }) if *free < pages => {
                Missing::OnNodes(nodes)
            }
            // The cgroup is asked when pages are promised (mmap), and when they are taken.
            Some(pool) if pool.free.saturating_sub(pool.reserved) >= pages => {
                Missing::Limit(if step == "mmap" { "rsvd.max" } else { "max" })
            }
            _ => Missing::InPool,
        }
    }

    fn loosened(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let separator = if self.report.is_incomplete() { "; " } else { ": " };
        self.report.loosened().map_or(Ok(()), |what| write!(f, "{separator}{what}"))
    }
}

impl fmt::Display for Warning<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let report = self.report;
        report.write_program(f)?;
        let Some((_, first)) = report.shortages.first() else {
            if let Some(reason) = report.notable() {
                let stays = if matches!(report.verdict, Verdict::Refused(_)) {
                    ": left alone: "
                } else {
                    ": partly left on small pages: "
                };
                write!(f, "{stays}{reason}")?;
            }
            return self.loosened(f);
        };
        let short: Vec<&Moved> = report
            .moved
            .iter()
            .filter(|m| {
                report
                    .shortages
                    .iter()
                    .any(|(range, s)| *range == m.range && s.source == first.source)
            })
            .collect();
        let pages: u64 = short.iter().map(|m| m.range.len() / first.source.size()).sum();
        let mut bytes = ClassBytes::default();
        short.iter().for_each(|m| bytes.add_all(&m.bytes));
        write!(f, ": no {pages} huge pages ({}) for", first.source)?;
        let mut separator = " ";
        for class in Class::ALL.into_iter().filter(|&class| bytes.get(class) > 0) {
            write!(f, "{separator}{}", class.name())?;
            separator = ", ";
        }
        write!(f, ": {} {}", first.step, first.errno)?;
        let missing = self.missing(pages, first.step);
        if let Some(pool) = &self.pool {
            let free = pool.nodes.as_ref().map_or(pool.free, |&(_, free)| free);
            write!(f, ", {free} free")?;
            if let Some((nodes, _)) = &pool.nodes {
                let s = if nodes.len() == 1 { "" } else { "s" };
                write!(f, " on node{s} {nodes} ({} on all nodes)", pool.free)?;
            }
            if pool.reserved > 0 {
                write!(f, " ({} of them reserved)", pool.reserved)?;
            }
        }
        let size = PageSize::new(first.source.size()).unwrap_or(PageSize::SIZE_2M);
        if let Missing::Limit(limit) = missing {
            write!(f, ", so perhaps its cgroup's limit hugetlb.{size:#}.{limit}")?;
        }
        let on_thp = short.iter().filter(|m| matches!(m.source, Some(Source::Thp(_)))).count();
        f.write_str(if on_thp == short.len() {
            "; on transparent huge pages instead"
        } else if on_thp > 0 {
            "; partly on transparent huge pages, the rest left on small pages"
        } else {
            "; left on small pages"
        })?;
        if matches!(first.source, Source::Hugetlb(_)) {
            match missing {
                Missing::Limit(_) => {
                    f.write_str("; try: raise that limit, or elfremap reserve ")?
                }
                Missing::OnNodes(nodes) => {
                    write!(f, "; try: elfremap reserve --node {nodes} ")?;
                }
                Missing::InPool => f.write_str("; try: elfremap reserve ")?,
            }
            f.write_str("--for ")?;
            report.write_quoted(f)?;
        }
        self.loosened(f)
    }
}
