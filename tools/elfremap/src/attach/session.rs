//! Work inside the target: memory mapped, protected and moved there by the helper.

use std::collections::BTreeSet;
use std::ffi::CStr;
use std::time::{Duration, Instant};

use elfremap::errno::Errno;
use elfremap::exec::pagemap::Pagemap;
use elfremap::prot::Prot;
use elfremap::range::{Range, align_up};

use super::arch;
use super::halt::{Busy, Halt, Lingering, Who};
use super::helper::Calls;
use super::memory;
use super::survey;
use super::target::{Target, state};
use super::{busy, failed, interrupted, is_interrupted, refused};
use crate::check::page_size;

/// The helper at work.
pub(super) struct Session<'a> {
    pub(super) target: &'a Target,
    pub(super) calls: &'a mut dyn Calls,
    pub(super) pagemap: Pagemap,
    /// A thread that stands from the beginning.
    held: Option<i32>,
    timeout: Duration,
    /// A page for the helper's code, and one for what its calls read.
    pages: Option<Range>,
    /// What is mapped in the target and does not belong there.
    leftovers: BTreeSet<Range>,
    /// The longest time for which all threads were stopped.
    pub(super) stall: Duration,
}

/// A number as an argument of a system call.
fn flag(value: i32) -> u64 {
    i64::from(value).cast_unsigned()
}

const PRIVATE: i32 = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;

impl<'a> Session<'a> {
    /// Gets the helper ready: an empty table of files, and code of its own, behind whose system
    /// call it ends by itself.
    pub(super) fn begin(
        target: &'a Target,
        calls: &'a mut dyn Calls,
        held: Option<i32>,
        timeout: Duration,
    ) -> anyhow::Result<Self> {
        let pagemap = survey::pagemap(target)?;
        let (pages, leftovers, stall) = (None, BTreeSet::new(), Duration::ZERO);
        let mut session = Self { target, calls, pagemap, held, timeout, pages, leftovers, stall };
        match session.prepare() {
            Ok(()) => Ok(session),
            Err((step, errno)) => {
                session.clean_up();
                if errno == Errno(libc::ESRCH) {
                    return Err(target.gone());
                }
                let message = format!("cannot begin in process {}: {step}: {errno}", target.pid);
                if matches!(errno, Errno(libc::EACCES | libc::EPERM)) && step == "mprotect" {
                    let why = "it may not make written memory executable (PR_SET_MDWE, or a security module)";
                    return Err(refused(format!("{message}: {why}"), None));
                }
                Err(failed(message))
            }
        }
    }

    fn prepare(&mut self) -> Result<(), (&'static str, Errno)> {
        let page = page_size();
        let pages = self.map(2 * page, Prot::RW, 0).map_err(|errno| ("mmap", errno))?;
        self.write(pages.start(), &arch::CODE).map_err(|errno| ("process_vm_writev", errno))?;
        let code = Range::with_len(pages.start(), page).unwrap_or_default();
        self.protect(code, Prot::RX).map_err(|errno| ("mprotect", errno))?;
        self.leftovers.remove(&pages);
        self.pages = Some(pages);
        self.calls.move_to(Some(pages.start()));
        // So that it keeps none of the program's files open. Without that call (before
        // Linux 5.9) it does until it ends.
        const CLOSE_RANGE_UNSHARE: u64 = 2;
        let all = [0, u64::from(u32::MAX), CLOSE_RANGE_UNSHARE, 0, 0, 0];
        match self.calls.call(libc::SYS_close_range, all) {
            Ok(_) | Err(Errno(libc::ENOSYS | libc::EINVAL)) => {}
            Err(errno) => return Err(("close_range", errno)),
        }
        const NAME: &CStr = c"elfremap";
        let at = self.put(NAME).map_err(|errno| ("process_vm_writev", errno))?;
        let name = [flag(libc::PR_SET_NAME), at, 0, 0, 0, 0];
        self.calls.call(libc::SYS_prctl, name).map(drop).map_err(|errno| ("prctl", errno))
    }

    /// Writes a text to where the helper's calls can read it; returns its address.
    pub(super) fn put(&mut self, text: &CStr) -> Result<u64, Errno> {
        let pages = self.pages.ok_or(Errno::EINVAL)?;
        let bytes = text.to_bytes_with_nul();
        let at = pages.start() + page_size();
        if bytes.len() as u64 > page_size() {
            return Err(Errno(libc::ENAMETOOLONG));
        }
        self.write(at, bytes)?;
        Ok(at)
    }

    pub(super) fn read(&self, address: u64, buffer: &mut [u8]) -> Result<(), Errno> {
        memory::read(self.calls.thread(), address, buffer)
    }

    pub(super) fn write(&self, address: u64, bytes: &[u8]) -> Result<(), Errno> {
        memory::write(self.calls.thread(), address, bytes)
    }

    /// Maps anonymous memory anywhere.
    pub(super) fn map(&mut self, len: u64, prot: Prot, flags: i32) -> Result<Range, Errno> {
        let args = [0, len, flag(prot.to_raw()), flag(PRIVATE | flags), u64::MAX, 0];
        let start = self.calls.call(libc::SYS_mmap, args)?;
        let range = Range::with_len(start, len).ok_or(Errno(libc::EIO))?;
        self.leftovers.insert(range);
        Ok(range)
    }

    /// The same at an address that is a multiple of `align`.
    pub(super) fn map_aligned(&mut self, len: u64, align: u64, prot: Prot) -> Result<Range, Errno> {
        let room = self.map(len.checked_add(align).ok_or(Errno::ENOMEM)?, prot, 0)?;
        let start = align_up(room.start(), align).ok_or(Errno::ENOMEM)?;
        let range = Range::with_len(start, len).ok_or(Errno::ENOMEM)?;
        let (before, after) = room.subtract(range);
        self.leftovers.remove(&room);
        self.leftovers.extend([before, range, after].into_iter().filter(|part| !part.is_empty()));
        for part in [before, after].into_iter().filter(|part| !part.is_empty()) {
            self.unmap(part)?;
        }
        Ok(range)
    }

    /// Maps memory over what is at `range`: a file's, from an offset, or anonymous.
    pub(super) fn map_over(
        &mut self,
        range: Range,
        prot: Prot,
        file: Option<(i32, u64)>,
    ) -> Result<(), Errno> {
        let (flags, fd, offset) = match file {
            Some((fd, offset)) => (libc::MAP_PRIVATE, flag(fd), offset),
            None => (PRIVATE, u64::MAX, 0),
        };
        let flags = flag(flags | libc::MAP_FIXED);
        let args = [range.start(), range.len(), flag(prot.to_raw()), flags, fd, offset];
        self.calls.call(libc::SYS_mmap, args).map(drop)
    }

    pub(super) fn unmap(&mut self, range: Range) -> Result<(), Errno> {
        self.calls.call(libc::SYS_munmap, [range.start(), range.len(), 0, 0, 0, 0])?;
        self.leftovers.remove(&range);
        Ok(())
    }

    pub(super) fn protect(&mut self, range: Range, prot: Prot) -> Result<(), Errno> {
        let args = [range.start(), range.len(), flag(prot.to_raw()), 0, 0, 0];
        self.calls.call(libc::SYS_mprotect, args).map(drop)
    }

    /// Keeps a mapping of ours from children that are forked meanwhile, as far as the kernel can
    /// take that back later: for pages of the pool Linux 7.3 cannot, since `MADV_DOFORK` refuses
    /// mappings that may not grow.
    pub(super) fn hide_from_children(&mut self, range: Range) -> Result<(), Errno> {
        match self.advise(range, libc::MADV_DOFORK) {
            Ok(()) => self.advise(range, libc::MADV_DONTFORK),
            Err(Errno::EINVAL) => Ok(()),
            other => other,
        }
    }

    /// Undoes [`Self::hide_from_children`].
    pub(super) fn show_to_children(&mut self, range: Range) -> Result<(), Errno> {
        match self.advise(range, libc::MADV_DOFORK) {
            Err(Errno::EINVAL) => Ok(()),
            other => other,
        }
    }

    pub(super) fn advise(&mut self, range: Range, advice: i32) -> Result<(), Errno> {
        let args = [range.start(), range.len(), flag(advice), 0, 0, 0];
        self.calls.call(libc::SYS_madvise, args).map(drop)
    }

    /// Moves a mapping over what is at `to`.
    pub(super) fn remap(&mut self, from: Range, to: u64) -> Result<(), Errno> {
        let how = flag(libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED);
        let args = [from.start(), from.len(), from.len(), how, to, 0];
        self.calls.call(libc::SYS_mremap, args).map(drop)
    }

    /// Opens a file for reading in the target.
    pub(super) fn open(&mut self, path: &CStr) -> Result<i32, Errno> {
        let at = self.put(path)?;
        let flags = flag(libc::O_RDONLY | libc::O_CLOEXEC | libc::O_NONBLOCK | libc::O_NOCTTY);
        let fd = self.calls.call(libc::SYS_openat, [flag(libc::AT_FDCWD), at, flags, 0, 0, 0])?;
        i32::try_from(fd).map_err(|_| Errno(libc::EBADF))
    }

    pub(super) fn close(&mut self, fd: i32) {
        let _ = self.calls.call(libc::SYS_close, [flag(fd), 0, 0, 0, 0, 0]);
    }

    /// A part of a mapping of ours was moved away: only the rest is to be taken away.
    pub(super) fn gave(&mut self, part: Range) {
        let whole = self.leftovers.iter().copied().find(|whole| whole.covers(part));
        if let Some(whole) = whole {
            self.leftovers.remove(&whole);
            let (before, after) = whole.subtract(part);
            self.leftovers.extend([before, after].into_iter().filter(|rest| !rest.is_empty()));
        }
    }

    /// Unmaps what is left in `whole`.
    pub(super) fn discard(&mut self, whole: Range) {
        let rest: Vec<Range> =
            self.leftovers.iter().copied().filter(|r| whole.covers(*r)).collect();
        for range in rest {
            let _ = self.unmap(range);
        }
    }

    /// Stops all threads and does `work`, which says whether it is content with what it found;
    /// where it is not, and where the threads do not stop in time, that is tried again until the
    /// time is over. `everyone`: see [`Who`].
    pub(super) fn with_all_stopped<T>(
        &mut self,
        everyone: bool,
        mut work: impl FnMut(&mut Self, &mut Halt<'_>) -> Result<T, Busy>,
    ) -> anyhow::Result<T> {
        /// How long the threads may stand while others are waited for: at first, and at most.
        const FIRST: Duration = Duration::from_millis(3);
        const LONGEST: Duration = Duration::from_millis(100);
        let who = Who { helper: self.calls.thread(), held: self.held, everyone };
        let target = self.target;
        let until = Instant::now() + self.timeout;
        let mut lingering = Lingering::default();
        let mut patience = FIRST;
        loop {
            let tried = Halt::begin(target, who, patience, &mut lingering).and_then(|mut halt| {
                let result = work(self, &mut halt);
                self.stall = self.stall.max(halt.end());
                result
            });
            let why = match tried {
                Ok(done) => return Ok(done),
                Err(why) => why,
            };
            let (tid, state) = match why {
                Busy::Gone => return Err(target.gone()),
                Busy::Forbidden => return Err(target.forbidden()),
                Busy::Thread(tid, state) => (tid, state),
            };
            if is_interrupted() {
                return Err(interrupted());
            }
            if Instant::now() >= until {
                return Err(busy(target, tid, state));
            }
            lingering.let_go(Instant::now() + 2 * patience);
            std::thread::sleep(Duration::from_millis(5));
            if state != 'D' {
                patience = (2 * patience).min(LONGEST);
            }
        }
    }

    /// Whether the process is still there.
    pub(super) fn is_alive(&self) -> bool {
        !matches!(state(self.calls.thread()), None | Some(b'Z' | b'X'))
    }

    /// Takes away whatever does not belong into the target, and ends the helper.
    pub(super) fn clean_up(&mut self) {
        self.calls.move_to(None);
        self.leftovers.extend(self.pages.take());
        // Twice: what cuts a mapping may be refused (vm.max_map_count) until others are gone.
        for _ in 0..2 {
            for range in self.leftovers.clone() {
                let _ = self.unmap(range);
            }
        }
        self.calls.end();
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        self.clean_up();
    }
}
