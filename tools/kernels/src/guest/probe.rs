//! What kind of machine this is: what its kernel offers, tried and not guessed.

use crate::checks::Checks;
use crate::pool;
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::{PageSize, nodes::NodeSet};
use std::fs;
use std::io;
use std::ptr;

/// The machine.
#[derive(Clone, Debug)]
pub(crate) struct Machine {
    /// Base page in bytes.
    pub(crate) page: u64,
    /// Huge page sizes of the pools, ascending.
    pub(crate) sizes: Vec<PageSize>,
    /// The default one.
    pub(crate) default: PageSize,
    /// Size of a transparent huge page.
    pub(crate) thp: PageSize,
    /// NUMA nodes.
    pub(crate) nodes: usize,
    /// Whether mremap moves a mapping of the pool.
    pub(crate) can_swap: bool,
    populate_write: bool,
    collapse: bool,
    /// Whether the processor has branch target identification.
    pub(crate) bti: bool,
    poke: [&'static str; 2],
}

impl Machine {
    pub(crate) fn read() -> Result<Self> {
        // SAFETY: sysconf(3) has no precondition.
        let page = u64::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) })?;
        let mut sizes: Vec<PageSize> = fs::read_dir("/sys/kernel/mm/hugepages")?
            .filter_map(|entry| {
                PageSize::from_sysfs_name(entry.ok()?.file_name().as_encoded_bytes())
            })
            .collect();
        sizes.sort_unstable();
        let smallest = *sizes.first().context("no huge pages")?;
        let default = elfremap::hugepage::meminfo::default_size(&fs::read("/proc/meminfo")?);
        let thp = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")?;
        let online = fs::read_to_string("/sys/devices/system/node/online")?;
        pool::set(smallest, 4)?;
        let machine = Self {
            page,
            default: default.context("no default huge page size")?,
            thp: PageSize::new(thp.trim().parse()?).context("odd THP size")?,
            nodes: NodeSet::parse(online.as_bytes()).context("odd list of nodes")?.len(),
            can_swap: can_move_hugetlb(smallest)?,
            populate_write: advise_new_page(page, MADV_POPULATE_WRITE)?,
            collapse: fs::metadata("/sys/kernel/mm/transparent_hugepage").is_ok()
                && advise_huge(thp.trim().parse()?)?,
            bti: has_bti(),
            poke: poke_text(smallest)?,
            sizes,
        };
        pool::set(smallest, 0)?;
        Ok(machine)
    }

    /// The block size that the product plans for where nothing else is asked.
    pub(crate) const fn block(&self) -> PageSize {
        PageSize::SIZE_2M
    }

    pub(crate) fn report(&self, checks: &mut Checks) -> Result<()> {
        let sizes: Vec<String> = self.sizes.iter().map(ToString::to_string).collect();
        let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        checks.fact("kernel", release.trim())?;
        checks
            .fact("page", PageSize::new(self.page).map_or_else(String::new, |p| p.to_string()))?;
        checks.fact("sizes", sizes.join(" "))?;
        checks.fact("default", self.default)?;
        checks.fact("thp", self.thp)?;
        checks.fact("nodes", self.nodes)?;
        checks.fact("hugetlb mremap", yes(self.can_swap))?;
        checks.fact("MADV_POPULATE_WRITE", yes(self.populate_write))?;
        checks.fact("MADV_COLLAPSE", yes(self.collapse))?;
        checks.fact("BTI", yes(self.bti))?;
        checks.fact("ptrace write", self.poke[0])?;
        checks.fact("mem write", self.poke[1])
    }
}

const fn yes(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

/// `MADV_POPULATE_WRITE` and `MADV_COLLAPSE` of madvise(2).
const MADV_POPULATE_WRITE: i32 = 23;
const MADV_COLLAPSE: i32 = 25;

const RW: i32 = libc::PROT_READ | libc::PROT_WRITE;
const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

/// New memory that is never given back: this program ends with the machine.
fn map(len: u64, prot: i32, flags: i32) -> Result<*mut u8> {
    // SAFETY: a new mapping at an address of the kernel's choice.
    let start =
        unsafe { libc::mmap(ptr::null_mut(), usize::try_from(len)?, prot, PRIVATE | flags, -1, 0) };
    ensure!(start != libc::MAP_FAILED, "mmap: {}", io::Error::last_os_error());
    Ok(start.cast())
}

fn map_pool_page(size: PageSize) -> Result<*mut u8> {
    let page = map(size.bytes(), RW, libc::MAP_HUGETLB | size.mmap_flags())?;
    // SAFETY: the page was mapped just now, from a pool that has pages.
    unsafe { page.write_volatile(1) };
    Ok(page)
}

fn can_move_hugetlb(size: PageSize) -> Result<bool> {
    let len = usize::try_from(size.bytes())?;
    let page = map_pool_page(size)?;
    let room = map(2 * size.bytes(), libc::PROT_NONE, libc::MAP_NORESERVE)?;
    let target = room.map_addr(|a| a.next_multiple_of(len));
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: both ranges are this function's own.
    let moved = unsafe { libc::mremap(page.cast(), len, len, flags, target) };
    let is_moved = moved != libc::MAP_FAILED;
    let at = if is_moved { moved } else { page.cast() };
    // SAFETY: the page lies there and nobody uses it.
    unsafe { libc::munmap(at, len) };
    Ok(is_moved)
}

fn advise_new_page(page: u64, advice: i32) -> Result<bool> {
    let start = map(page, RW, 0)?;
    // SAFETY: the page is this function's own.
    Ok(unsafe { libc::madvise(start.cast(), usize::try_from(page)?, advice) } == 0)
}

fn advise_huge(size: u64) -> Result<bool> {
    let len = usize::try_from(size)?;
    let start = map(2 * size, RW, 0)?.map_addr(|a| a.next_multiple_of(len));
    // SAFETY: the memory is this function's own.
    let result = unsafe {
        start.write_volatile(1);
        libc::madvise(start.cast(), len, MADV_COLLAPSE)
    };
    Ok(result == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::EINVAL))
}

#[cfg(target_arch = "aarch64")]
fn has_bti() -> bool {
    /// `HWCAP2_BTI` of arch/arm64/include/uapi/asm/hwcap.h.
    const HWCAP2_BTI: u64 = 1 << 17;
    // SAFETY: getauxval(3) has no precondition.
    unsafe { libc::getauxval(libc::AT_HWCAP2) & HWCAP2_BTI != 0 }
}

#[cfg(not(target_arch = "aarch64"))]
const fn has_bti() -> bool {
    false
}

/// Whether a debugger can write to read-only executable pages of the pool: by
/// ptrace(2), and by /proc/PID/mem.
fn poke_text(size: PageSize) -> Result<[&'static str; 2]> {
    use nix::sys::ptrace;
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::waitpid;
    use std::os::unix::fs::FileExt;
    let page = map_pool_page(size)?;
    let len = usize::try_from(size.bytes())?;
    // SAFETY: the page is this function's own; the child only stops itself.
    let child = unsafe {
        libc::mprotect(page.cast(), len, libc::PROT_READ | libc::PROT_EXEC);
        match nix::unistd::fork()? {
            nix::unistd::ForkResult::Parent { child } => child,
            nix::unistd::ForkResult::Child => {
                let _ = ptrace::traceme();
                libc::raise(libc::SIGSTOP);
                libc::_exit(0);
            }
        }
    };
    waitpid(child, None)?;
    let by_ptrace = ptrace::write(child, page.cast(), 0x1234).is_ok();
    let file = fs::File::options().write(true).open(format!("/proc/{child}/mem"))?;
    let by_file = file.write_at(&[1; 8], page.addr() as u64).is_ok();
    kill(child, Signal::SIGKILL)?;
    waitpid(child, None)?;
    // SAFETY: nobody uses the page any more.
    unsafe { libc::munmap(page.cast(), len) };
    Ok([yes(by_ptrace), yes(by_file)])
}
