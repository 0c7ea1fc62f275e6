//! What of a running program lies on huge pages, from the kernel's own account of
//! it: the segments from the program headers in its memory, the pages from its smaps.

use anyhow::{Context, Result, ensure};
use elfremap::proc::smaps;
use elfremap::range::Range;
use serde::{Deserialize, Serialize};
use std::fs::{self, File};
use std::ops::AddAssign;
use std::os::unix::fs::FileExt;

/// Bytes of one class of segments, or of a whole process.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Debug)]
pub(crate) struct Huge {
    /// Mapped in all.
    pub size: u64,
    /// On hugetlb pages.
    pub hugetlb: u64,
    /// On transparent huge pages.
    pub thp: u64,
    /// Page cache mapped by huge entries: huge without our doing (`FilePmdMapped`).
    pub file: u64,
}

impl Huge {
    /// Bytes on huge pages that belong to no file: what a remap has moved.
    pub(crate) const fn moved(self) -> u64 {
        self.hugetlb + self.thp
    }
}

impl AddAssign for Huge {
    fn add_assign(&mut self, other: Self) {
        self.size += other.size;
        self.hugetlb += other.hugetlb;
        self.thp += other.thp;
        self.file += other.file;
    }
}

/// The main program by class of its segments.
#[derive(Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, Debug)]
pub(crate) struct Image {
    /// Executable segments.
    pub text: Huge,
    /// Read-only segments.
    pub rodata: Huge,
    /// Writable segments, relro and bss among them.
    pub data: Huge,
}

impl Image {
    /// All classes together.
    fn all(self) -> Huge {
        let mut all = self.text;
        all += self.rodata;
        all += self.data;
        all
    }

    /// Bytes on huge pages of a process, `whole`, that are none of its segments': the rest
    /// of their first and last pages, and what the program itself has put on huge pages.
    pub(crate) fn beside(self, whole: Huge) -> u64 {
        whole.moved().saturating_sub(self.all().moved())
    }
}

/// Reads process `pid` (a child of ours, or we must be root).
pub(crate) fn image(pid: u32) -> Result<Image> {
    let segments = segments(pid)?;
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    let mut image = Image::default();
    for &(range, flags) in &segments {
        let class = match flags {
            flags if flags & PF_X != 0 => &mut image.text,
            flags if flags & PF_W != 0 => &mut image.data,
            _ => &mut image.rodata,
        };
        class.size += range.len();
        for entry in smaps::parse(&text) {
            *class += part(&entry.context(path.clone())?, range);
        }
    }
    Ok(image)
}

/// A field of /proc/PID/status that is in kB, in MiB; 0 where the kernel has no such field.
pub(crate) fn status_mb(pid: u32, field: &str) -> Result<f64> {
    let path = format!("/proc/{pid}/status");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kb = value.and_then(|value| value.split_whitespace().next()?.parse::<f64>().ok());
    Ok(kb.unwrap_or(0.0) / 1024.0)
}

/// What a process has in memory, in MiB: its share of shared pages, hugetlb pages included,
/// which the kernel counts apart.
pub(crate) fn memory_mb(pid: u32) -> Result<f64> {
    let path = format!("/proc/{pid}/smaps_rollup");
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {path}"))?;
    let kb = |field: &str| -> f64 {
        let value = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
        value.and_then(|v| v.split_whitespace().next()?.parse().ok()).unwrap_or(0.0)
    };
    Ok((kb("Pss") + kb("Private_Hugetlb") + kb("Shared_Hugetlb")) / 1024.0)
}

/// All huge pages of process `pid`.
pub(crate) fn process(pid: u32) -> Result<Huge> {
    let path = format!("/proc/{pid}/smaps");
    whole(&fs::read(&path).with_context(|| format!("cannot read {path}"))?)
}

/// All huge pages in the text of an smaps file.
pub(crate) fn whole(smaps_text: &[u8]) -> Result<Huge> {
    let mut sum = Huge::default();
    for entry in smaps::parse(smaps_text) {
        let entry = entry?;
        let mut all = part(&entry, entry.mapping.range);
        all.size = entry.mapping.range.len();
        sum += all;
    }
    Ok(sum)
}

/// The huge pages of a mapping that lie in `range`. smaps counts them for the whole
/// mapping: where only some of it lies in `range`, the same share of its huge pages does.
fn part(entry: &smaps::Entry<'_>, range: Range) -> Huge {
    let mapping = entry.mapping.range;
    let common = range.intersect(mapping).len();
    let share = |bytes: u64| {
        let share = u128::from(bytes) * u128::from(common) / u128::from(mapping.len().max(1));
        u64::try_from(share).unwrap_or(u64::MAX)
    };
    Huge {
        size: 0,
        hugetlb: share(entry.hugetlb),
        thp: share(entry.anon_huge),
        file: share(entry.file_pmd),
    }
}

const PT_LOAD: u32 = 1;
const PT_PHDR: u32 = 6;
const PF_X: u32 = 1;
const PF_W: u32 = 2;

/// The PT_LOAD segments of the main program: addresses and p_flags. The auxiliary
/// vector says where the program headers lie (getauxval(3): AT_PHDR, AT_PHNUM); the
/// load bias is the distance from the address PT_PHDR names.
fn segments(pid: u32) -> Result<Vec<(Range, u32)>> {
    const AT_PHDR: u64 = 3;
    const AT_PHNUM: u64 = 5;
    const PHDR_SIZE: usize = 56;
    let path = format!("/proc/{pid}/auxv");
    let auxv = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    let entry = |kind: u64| {
        auxv.chunks_exact(16).find(|pair| word(pair, 0) == kind).map(|pair| word(pair, 8))
    };
    let address = entry(AT_PHDR).context("no AT_PHDR in the auxiliary vector")?;
    let count = usize::try_from(entry(AT_PHNUM).context("no AT_PHNUM in the auxiliary vector")?)?;
    ensure!(count < 4096, "cannot believe {count} program headers");
    let mut headers = vec![0; count * PHDR_SIZE];
    let path = format!("/proc/{pid}/mem");
    File::open(&path)
        .and_then(|memory| memory.read_exact_at(&mut headers, address))
        .with_context(|| format!("cannot read the program headers from {path}"))?;
    let headers = || headers.chunks_exact(PHDR_SIZE);
    let kind = |header: &[u8]| u32::from_le_bytes(header[..4].try_into().unwrap_or_default());
    let bias = headers()
        .find(|header| kind(header) == PT_PHDR)
        .map_or(0, |header| address.wrapping_sub(word(header, 16)));
    let loads = headers().filter(|header| kind(header) == PT_LOAD);
    Ok(loads
        .filter_map(|header| {
            let flags = u32::from_le_bytes(header[4..8].try_into().unwrap_or_default());
            let start = word(header, 16).wrapping_add(bias);
            Some((Range::new(start, start.wrapping_add(word(header, 40)))?, flags))
        })
        .collect())
}

fn word(bytes: &[u8], at: usize) -> u64 {
    bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn our_own_segments() {
        let segments = segments(std::process::id()).unwrap();
        let here = our_own_segments as *const () as u64;
        let text: Vec<_> = segments.iter().filter(|(range, _)| range.contains(here)).collect();
        assert!(
            matches!(text[..], [&(_, flags)] if flags & (PF_X | PF_W) == PF_X),
            "{segments:x?}"
        );
        let image = image(std::process::id()).unwrap();
        assert!(image.text.size > 0 && image.data.size > 0 && image.rodata.size > 0);
        assert_eq!(image.text.hugetlb, 0);
    }

    #[test]
    fn a_mapping_counts_by_its_share() {
        let text = b"200000-600000 r-xp 00000000 00:0f 7  /anon_hugepage (deleted)\n\
            KernelPageSize:     2048 kB\nPrivate_Hugetlb:    4096 kB\n\
            600000-a00000 rw-p 00000000 00:00 0 \nAnonHugePages: 2048 kB\n";
        let entries: Vec<_> = smaps::parse(text).map(Result::unwrap).collect();
        let range = Range::new(0x500000, 0x800000).unwrap();
        assert_eq!(part(&entries[0], range).hugetlb, 1 << 20);
        assert_eq!(part(&entries[1], range).thp, 1 << 20);
        assert_eq!(part(&entries[1], Range::new(0, 0x600000).unwrap()).thp, 0);
        let all = whole(text).unwrap();
        assert_eq!((all.size, all.hugetlb, all.thp), (8 << 20, 4 << 20, 2 << 20));
        assert_eq!(all.moved(), 6 << 20);
    }
}
