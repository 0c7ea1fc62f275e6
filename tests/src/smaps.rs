//! The proof: what `/proc/<pid>/smaps` says about the program's segments. Written
//! apart from the product's planner, so that both can be held against each other.

use crate::image::{Class, Image};
use crate::{BLOCK, PAGE};
use anyhow::{Context, Result, bail, ensure};
use elfremap::prot::Prot;
use elfremap::range::Range;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// One mapping of the process. Amounts are in bytes.
#[derive(Clone, Debug)]
pub struct Vma {
    /// Addresses.
    pub range: Range,
    /// Protection.
    pub prot: Prot,
    /// Offset into the file.
    pub offset: u64,
    /// Inode of the file; 0 when anonymous.
    pub inode: u64,
    /// Name as the kernel prints it.
    pub name: String,
    /// `AnonHugePages`.
    pub anon_huge: u64,
    /// `KernelPageSize`.
    pub kernel_page_size: u64,
}

/// What lies behind an address range.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Backing {
    /// MAP_HUGETLB.
    Hugetlb,
    /// A transparent huge page of anonymous memory.
    Thp,
    /// Base pages, present or not.
    Small,
}

/// Bytes of one class by what they lie on.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Cover {
    /// All bytes of the class that are mapped.
    pub total: u64,
    /// On hugetlb pages.
    pub hugetlb: u64,
    /// On transparent huge pages.
    pub thp: u64,
    /// On base pages.
    pub small: u64,
}

/// A process at one moment.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// All mappings by address.
    pub vmas: Vec<Vma>,
    /// What the kernel added to the addresses in the program's file.
    pub bias: u64,
    /// Ranges mapped by transparent huge pages.
    thp: Vec<Range>,
}

impl Snapshot {
    /// Reads process `pid`, which must have been started from the program `image`
    /// and must not change its mappings meanwhile.
    ///
    /// # Errors
    /// When its files in /proc cannot be read, or contradict each other.
    pub fn take(pid: u32, image: &Image) -> Result<Self> {
        let entry = auxv(pid, libc::AT_ENTRY)?;
        let bias = entry
            .checked_sub(image.entry)
            .context("the process was not started from this program's file")?;
        Self::with_bias(pid, bias)
    }

    /// The same for a program that was started as `ld.so PROGRAM`: its load address
    /// is that of the mapping of the file's first page.
    ///
    /// # Errors
    /// As [`Snapshot::take`], and when no mapping of the file's first page is left.
    pub fn take_by_file(pid: u32, image: &Image, file: &Path) -> Result<Self> {
        let inode = fs::metadata(file)?.ino();
        let header = image.header.context("the ELF header is not loaded")?;
        let vmas = read_smaps(pid)?;
        let vma = vmas
            .iter()
            .find(|v| v.inode == inode && v.offset == 0)
            .context("no mapping of the file's first page")?;
        Self::with_bias(pid, vma.range.start() - header / PAGE * PAGE)
    }

    fn with_bias(pid: u32, bias: u64) -> Result<Self> {
        let vmas = read_smaps(pid)?;
        let thp = transparent(pid, &vmas)?;
        Ok(Self { vmas, bias, thp })
    }

    /// Mappings of the whole process that are both writable and executable.
    #[must_use]
    pub fn write_exec(&self) -> usize {
        self.vmas.iter().filter(|v| v.prot.is_write_exec()).count()
    }

    /// Bytes of all hugetlb mappings of the process, populated or only reserved.
    #[must_use]
    pub fn hugetlb_bytes(&self) -> u64 {
        self.vmas.iter().filter(|v| v.kernel_page_size > PAGE).map(|v| v.range.len()).sum()
    }

    /// The mapped bytes in `range` by what they lie on.
    #[must_use]
    pub fn backing(&self, range: Range) -> BTreeMap<Backing, u64> {
        let mut sums = BTreeMap::new();
        for vma in &self.vmas {
            let part = vma.range.intersect(range);
            if part.is_empty() {
                continue;
            }
            if vma.kernel_page_size > PAGE {
                *sums.entry(Backing::Hugetlb).or_default() += part.len();
                continue;
            }
            let thp: u64 = self.thp.iter().map(|r| r.intersect(part).len()).sum();
            if thp > 0 {
                *sums.entry(Backing::Thp).or_default() += thp;
            }
            if part.len() > thp {
                *sums.entry(Backing::Small).or_default() += part.len() - thp;
            }
        }
        sums
    }

    /// Whether every byte of `range` is mapped and lies on `backing`.
    #[must_use]
    pub fn is_all(&self, range: Range, backing: Backing) -> bool {
        self.backing(range) == BTreeMap::from([(backing, range.len())])
    }

    /// Bytes of each class of the program by what they lie on.
    #[must_use]
    pub fn coverage(&self, image: &Image) -> BTreeMap<Class, Cover> {
        let mut covers: BTreeMap<Class, Cover> = BTreeMap::new();
        let mut parts = image.parts.clone();
        if let Some(tail) = heap_tail(image, self.bias) {
            parts.push((tail, Class::HeapTail));
        }
        for (part, class) in parts {
            let Some(range) = part.rebase(part.start() + self.bias) else {
                continue;
            };
            let cover = covers.entry(class).or_default();
            for (backing, bytes) in self.backing(range) {
                cover.total += bytes;
                match backing {
                    Backing::Hugetlb => cover.hugetlb += bytes,
                    Backing::Thp => cover.thp += bytes,
                    Backing::Small => cover.small += bytes,
                }
            }
        }
        covers
    }

    /// Bytes of the program and its heap tail that lie on huge pages of either kind.
    #[must_use]
    pub fn huge_bytes(&self, image: &Image) -> u64 {
        self.coverage(image).values().map(|c| c.hugetlb + c.thp).sum()
    }

    /// The protections of the program's bytes, by the file's addresses.
    #[must_use]
    pub fn protections(&self, image: &Image) -> Protections {
        let span = image.span().align_out(PAGE).unwrap_or_default();
        let loads: Vec<_> = image.loads.iter().filter_map(|(r, _)| r.align_out(PAGE)).collect();
        let blocks = Range::new(span.start() + self.bias, span.end() + self.bias)
            .and_then(|r| r.align_out(BLOCK))
            .unwrap_or_default();
        let mut parts = Vec::new();
        for vma in &self.vmas {
            let part = vma.range.intersect(blocks);
            if part.is_empty() {
                continue;
            }
            // Blocks may begin below the program's own address 0.
            let start = part.start().wrapping_sub(self.bias).cast_signed();
            let own = Range::with_len(start.cast_unsigned(), part.len())
                .is_some_and(|r| loads.iter().any(|load| load.overlaps(r)));
            let owner = match () {
                () if own => Owner::Program,
                () if vma.name == "[heap]" => Owner::Heap,
                () => Owner::Foreign,
            };
            parts.push(Part {
                start,
                end: start + part.len().cast_signed(),
                prot: vma.prot,
                owner,
            });
        }
        Protections { bias: self.bias, parts }
    }
}

/// Whose bytes a mapping near the program holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Owner {
    Program,
    Heap,
    Foreign,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    /// By the file's addresses, hence below 0 for what lies before address 0 of a PIE.
    start: i64,
    end: i64,
    prot: Prot,
    owner: Owner,
}

/// The protections of a program's bytes in one run.
#[derive(Clone, Debug)]
pub struct Protections {
    bias: u64,
    parts: Vec<Part>,
}

impl Protections {
    /// What became of the protections of a plain run, `self`, in the run `now`:
    /// every difference that `allowed(plain, now)` does not allow. Bytes that were
    /// not mapped in the plain run may have become so (gaps within blocks).
    #[must_use]
    pub fn differences(
        &self,
        now: &Self,
        allowed: impl Fn(Prot, Option<Prot>) -> bool,
    ) -> Vec<String> {
        let mut found = Vec::new();
        for part in self.own() {
            let mut edges: BTreeSet<i64> = [part.start, part.end].into();
            edges.extend(
                now.parts
                    .iter()
                    .flat_map(|p| [p.start, p.end])
                    .filter(|e| (part.start..part.end).contains(e)),
            );
            let edges: Vec<_> = edges.into_iter().collect();
            for pair in edges.windows(2) {
                let prot = now.parts.iter().find(|p| p.start <= pair[0] && pair[0] < p.end);
                let prot = prot.map(|p| p.prot);
                if prot != Some(part.prot) && !allowed(part.prot, prot) {
                    let prot = prot.map_or("unmapped".to_owned(), |p| p.to_string());
                    found.push(format!(
                        "{:#x}-{:#x}: {} became {prot}",
                        pair[0], pair[1], part.prot
                    ));
                }
            }
        }
        found
    }

    /// The blocks of 2 MiB that the program touches when loaded with `bias`, counted
    /// from this plain run's mappings alone.
    #[must_use]
    pub fn blocks(&self, image: &Image, bias: u64) -> Vec<Block> {
        let shift = bias.cast_signed();
        // Block by block of each segment: between segments there may be terabytes.
        let here: BTreeSet<Range> = image
            .loads
            .iter()
            .filter_map(|(load, _)| load.align_out(PAGE))
            .filter_map(|load| load.rebase(load.start() + bias))
            .flat_map(|load| load.blocks(BLOCK))
            .collect();
        // Where another load address puts the heap is not known from this run.
        let near = bias == self.bias;
        here.into_iter()
            .map(|range| {
                let mut block = Block {
                    range,
                    prots: BTreeSet::new(),
                    foreign: false,
                    header: false,
                    classes: BTreeMap::new(),
                };
                for part in self.parts.iter().filter(|p| near || p.owner == Owner::Program) {
                    let start = (part.start + shift).cast_unsigned();
                    let end = (part.end + shift).cast_unsigned();
                    let bytes = Range::new(start, end).unwrap_or_default().intersect(range).len();
                    if bytes == 0 {
                        continue;
                    }
                    match part.owner {
                        Owner::Program => {}
                        Owner::Heap => *block.classes.entry(Class::HeapTail).or_default() += bytes,
                        Owner::Foreign => block.foreign = true,
                    }
                    block.prots.insert(part.prot);
                }
                for (part, class) in &image.parts {
                    let bytes = part
                        .rebase(part.start() + bias)
                        .map_or(0, |part| part.intersect(range).len());
                    if bytes > 0 {
                        *block.classes.entry(*class).or_default() += bytes;
                    }
                }
                block.header = image.header.is_some_and(|h| range.contains(h + bias));
                block
            })
            .collect()
    }

    fn own(&self) -> impl Iterator<Item = &Part> {
        self.parts.iter().filter(|p| p.owner == Owner::Program)
    }
}

/// What may share a block (`ELFREMAP_MERGE`).
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Merge {
    /// One protection only.
    None,
    /// R-- with R-X.
    Rx,
    /// Also relro with RW-.
    Relro,
    /// Everything.
    Rwx,
}

/// A block that the program touches.
#[derive(Clone, Debug)]
pub struct Block {
    /// Addresses in the process.
    pub range: Range,
    /// Protections of the bytes mapped in it.
    pub prots: BTreeSet<Prot>,
    /// Whether a mapping that is neither the program's nor its heap lies in it.
    pub foreign: bool,
    /// Whether it holds the ELF header.
    pub header: bool,
    /// Bytes of the program in it by class.
    pub classes: BTreeMap<Class, u64>,
}

impl Block {
    /// Whether all bytes in it may live under one protection at this merge level; one
    /// that is writable and executable only at the last.
    #[must_use]
    pub fn is_uniform(&self, merge: Merge) -> bool {
        let relro = self.classes.contains_key(&Class::Relro);
        let rodata = self.classes.contains_key(&Class::Rodata);
        let only = |allowed: &[Prot]| self.prots.iter().all(|p| allowed.contains(p));
        let write_exec = self.prots.iter().any(|p| p.is_write_exec());
        !self.foreign
            && !self.prots.is_empty()
            && (merge == Merge::Rwx || !write_exec)
            && (self.prots.len() == 1
                || (merge >= Merge::Rx && only(&[Prot::READ, Prot::RX]) && !relro)
                || (merge >= Merge::Relro && only(&[Prot::READ, Prot::RW]) && relro && !rodata)
                || merge == Merge::Rwx)
    }

    /// Whether it holds bytes of one of `classes`.
    #[must_use]
    pub fn has(&self, classes: &[Class]) -> bool {
        classes.iter().any(|c| self.classes.contains_key(c))
    }

    /// Whether the default options (segments text, data with relro, bss) select it at
    /// `merge`: uniform, not the block of the ELF header, and holding what was asked for.
    #[must_use]
    pub fn is_selected(&self, merge: Merge) -> bool {
        self.is_uniform(merge)
            && !self.header
            && self.has(&[Class::Text, Class::Relro, Class::Data, Class::Bss])
    }
}

/// The addresses (by the file) from the end of bss to the end of its last block.
fn heap_tail(image: &Image, bias: u64) -> Option<Range> {
    let (last, prot) = image.loads.iter().max_by_key(|(r, _)| r.end())?;
    if !prot.has(Prot::WRITE) {
        return None;
    }
    let start = elfremap::range::align_up(last.end() + bias, PAGE)?;
    let end = elfremap::range::align_up(start, BLOCK)?;
    Range::new(start - bias, end - bias)
}

fn read_smaps(pid: u32) -> Result<Vec<Vma>> {
    let path = format!("/proc/{pid}/smaps");
    let text = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    let mut vmas = Vec::new();
    for entry in elfremap::proc::smaps::parse(&text) {
        let entry = entry.with_context(|| format!("cannot parse {path}"))?;
        vmas.push(Vma {
            range: entry.mapping.range,
            prot: entry.mapping.prot,
            offset: entry.mapping.offset,
            inode: entry.mapping.inode,
            name: String::from_utf8_lossy(entry.mapping.name).into_owned(),
            anon_huge: entry.anon_huge,
            kernel_page_size: entry.kernel_page_size,
        });
    }
    ensure!(!vmas.is_empty(), "{path} is empty");
    Ok(vmas)
}

/// The value of `key` in the auxiliary vector of `pid` (getauxval(3)).
fn auxv(pid: u32, key: u64) -> Result<u64> {
    let path = format!("/proc/{pid}/auxv");
    let bytes = fs::read(&path).with_context(|| format!("cannot read {path}"))?;
    let words: Vec<u64> =
        bytes.chunks_exact(8).map(|c| u64::from_ne_bytes(c.try_into().unwrap_or([0; 8]))).collect();
    let pair = words.chunks_exact(2).find(|pair| pair[0] == key);
    Ok(pair.with_context(|| format!("no entry {key} in {path}"))?[1])
}

/// Where transparent huge pages are mapped. smaps gives sums per mapping only; for a
/// mapping that has some but not all, the PAGEMAP_SCAN ioctl (Linux 6.7) tells which.
fn transparent(pid: u32, vmas: &[Vma]) -> Result<Vec<Range>> {
    let mut found = Vec::new();
    let pagemap = format!("/proc/{pid}/pagemap");
    for vma in vmas.iter().filter(|v| v.anon_huge > 0) {
        let blocks = vma.range.align_in(BLOCK);
        if blocks.len() == vma.anon_huge {
            found.push(blocks);
            continue;
        }
        let file = File::open(&pagemap).with_context(|| format!("cannot open {pagemap}"))?;
        let ranges = scan_huge(&file, vma.range)
            .with_context(|| format!("cannot tell where the huge pages of {} are", vma.range))?;
        let sum: u64 = ranges.iter().map(|r| r.len()).sum();
        if sum != vma.anon_huge {
            bail!(
                "smaps says {} bytes of huge pages in {}, pagemap {sum}",
                vma.anon_huge,
                vma.range
            );
        }
        found.extend(ranges);
    }
    Ok(found)
}

/// `struct pm_scan_arg` of linux/fs.h.
#[repr(C)]
#[derive(Default)]
struct ScanArgument {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `struct page_region` of linux/fs.h.
#[repr(C)]
#[derive(Clone, Copy, Default)]
struct Region {
    start: u64,
    end: u64,
    categories: u64,
}

/// The parts of `range` that huge page table entries map.
fn scan_huge(pagemap: &File, range: Range) -> Result<Vec<Range>> {
    /// Bit PAGE_IS_HUGE of linux/fs.h.
    const IS_HUGE: u64 = 1 << 6;
    nix::ioctl_readwrite!(pagemap_scan, b'f', 16, ScanArgument);
    let mut regions = [Region::default(); 256];
    let mut found = Vec::new();
    let mut start = range.start();
    while start < range.end() {
        let mut argument = ScanArgument {
            size: size_of::<ScanArgument>() as u64,
            start,
            end: range.end(),
            vec: regions.as_mut_ptr() as u64,
            vec_len: regions.len() as u64,
            category_mask: IS_HUGE,
            return_mask: IS_HUGE,
            ..ScanArgument::default()
        };
        // SAFETY: the argument is the structure that the request's number stands
        // for, and `vec` points to `vec_len` writable regions that outlive the call.
        let count = unsafe { pagemap_scan(pagemap.as_raw_fd(), &raw mut argument) }?;
        for region in &regions[..usize::try_from(count)?] {
            found.extend(Range::new(region.start, region.end));
        }
        ensure!(argument.walk_end > start, "PAGEMAP_SCAN does not advance");
        start = argument.walk_end;
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own_image() -> Image {
        Image::read(Path::new("/proc/self/exe")).unwrap()
    }

    #[test]
    fn own_process_is_on_small_pages_with_the_files_protections() {
        let image = own_image();
        let now = Snapshot::take(std::process::id(), &image).unwrap();
        let here = own_image as *const () as u64;
        let text = now.vmas.iter().find(|v| v.range.contains(here)).unwrap();
        assert_eq!(text.prot, Prot::RX);
        let cover = now.coverage(&image);
        assert_eq!(cover[&Class::Text].hugetlb, 0);
        let text_bytes: u64 =
            image.parts.iter().filter(|(_, c)| *c == Class::Text).map(|(r, _)| r.len()).sum();
        assert_eq!(cover[&Class::Text].total, text_bytes);
        assert_eq!(now.write_exec(), 0);
        let prots = now.protections(&image);
        assert_eq!(prots.differences(&prots, |_, _| false), Vec::<String>::new());
        let by_file =
            Snapshot::take_by_file(std::process::id(), &image, Path::new("/proc/self/exe"));
        assert_eq!(by_file.unwrap().bias, now.bias);
    }

    fn protections(parts: &[(i64, i64, Prot)]) -> Protections {
        let parts: Vec<_> = parts
            .iter()
            .map(|&(start, end, prot)| Part { start, end, prot, owner: Owner::Program })
            .collect();
        Protections { bias: 0, parts }
    }

    #[test]
    fn a_changed_byte_range_is_named_and_a_filled_gap_is_not() {
        let plain = protections(&[(0, 0x3000, Prot::RX), (0x5000, 0x6000, Prot::RW)]);
        let same = protections(&[(0, 0x5000, Prot::RX), (0x5000, 0x7000, Prot::RW)]);
        assert_eq!(plain.differences(&same, |_, _| false), Vec::<String>::new());
        let wrong = protections(&[(0, 0x1000, Prot::RX), (0x1000, 0x2000, Prot::RW)]);
        assert_eq!(
            plain.differences(&wrong, |_, _| false),
            [
                "0x1000-0x2000: r-x became rw-",
                "0x2000-0x3000: r-x became unmapped",
                "0x5000-0x6000: rw- became unmapped"
            ]
        );
    }

    #[test]
    fn blocks_of_one_protection() {
        let image = Image {
            entry: 0,
            pie: true,
            header: Some(0),
            loads: vec![
                (Range::new(0, 0x50_0000).unwrap(), Prot::RX),
                (Range::new(0x50_0000, 0x70_0000).unwrap(), Prot::RW),
            ],
            parts: vec![
                (Range::new(0, 0x50_0000).unwrap(), Class::Text),
                (Range::new(0x50_0000, 0x70_0000).unwrap(), Class::Data),
            ],
        };
        let plain = protections(&[(0, 0x50_0000, Prot::RX), (0x50_0000, 0x70_0000, Prot::RW)]);
        let uniform: Vec<_> =
            plain.blocks(&image, 0).iter().map(|b| b.is_selected(Merge::None)).collect();
        // The header's block, text, text and data, data.
        assert_eq!(uniform, [false, true, false, true]);
        let moved = plain.blocks(&image, 0x10_0000);
        assert_eq!(moved.len(), 4);
        assert!(moved[1].is_selected(Merge::None) && moved[2].is_selected(Merge::None));
        assert_eq!(moved[3].classes[&Class::Data], 0x20_0000);
    }

    #[test]
    fn transparent_pages_are_found_by_place() {
        let len = usize::try_from(3 * BLOCK).unwrap();
        let file = File::open("/proc/self/pagemap").unwrap();
        // SAFETY: a new private mapping of nobody's memory, unmapped below.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        let all = Range::with_len(start as u64, 3 * BLOCK).unwrap();
        let block = all.align_in(BLOCK).start();
        let at = std::ptr::with_exposed_provenance_mut(usize::try_from(block).unwrap());
        let two_mib = usize::try_from(BLOCK).unwrap();
        // SAFETY: one block inside of the mapping made above.
        let collapsed = unsafe {
            libc::memset(at, 1, two_mib);
            libc::madvise(at, two_mib, libc::MADV_COLLAPSE)
        };
        if collapsed == 0 {
            match scan_huge(&file, all) {
                Ok(found) => assert_eq!(found, [Range::with_len(block, BLOCK).unwrap()]),
                // Before Linux 6.7.
                Err(error) => assert!(format!("{error:#}").contains("ENOTTY"), "{error:#}"),
            }
        }
        // SAFETY: the mapping made above, not used any more.
        unsafe { libc::munmap(start, len) };
    }
}
