//! The preload library: `LD_PRELOAD=libelfremap.so PROGRAM`.
//!
//! Its constructor moves the program's text, data and bss onto huge pages before
//! `main` runs; see `docs/design.md`. It is `no_std` and brings no runtime along: an
//! allocator of its own, raw system calls, a panic handler that leads back to the
//! constructor's beginning.
//!
//! # Safety
//! This crate is the boundary to the loader and to libc; every block says what it
//! relies on. The constructor runs once, in the thread that loads the program.
#![no_std]

extern crate alloc;

mod builtins;
mod exported;
mod fork;
mod host;
mod inherit;
mod logger;
mod memory;
mod object;
mod options;
mod pool;
mod symbols;
mod wrappers;

use core::cell::UnsafeCell;
use core::fmt;
use core::ptr;

use core_lib::errno::Errno;
use core_lib::exec::guard::Freezer;
use core_lib::exec::{self, Libc, Offer, Process, Remaining, Source};
use core_lib::glob;
use core_lib::hugepage::PageSize;
use core_lib::plan::Refusal;
use core_lib::policy::{Backend, Numa, OnFailure, Policy};
use core_lib::prot::Prot;
use core_lib::report::{Report, Summary, Verdict, Warning};
use elfremap_critical::arch::{self, Context};
use logger::{Level, is_on, log};
use object::Headers;
use options::{Bad, Options};

/// The block size where nothing else is asked for: what one entry of the page middle
/// directory maps with 4 KiB pages.
const BLOCK: u64 = 2 << 20;

#[used]
#[unsafe(link_section = ".init_array")]
static CONSTRUCTOR: extern "C" fn() = constructor;

/// Where a panic leads back to; null when there is no way back.
struct WayBack(UnsafeCell<*const Context>);

// SAFETY: used by the constructor's one thread only.
unsafe impl Sync for WayBack {}

static WAY_BACK: WayBack = WayBack(UnsafeCell::new(ptr::null()));

/// A bug of ours must not end the program: back to the constructor, which lets it run
/// as it was. The window in which it could not go on has no panic path.
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    // SAFETY: set only while `protect` runs below us in this thread. The frames in
    // between own memory of our allocator, and staged mappings, which are leaked.
    unsafe {
        let context = *WAY_BACK.0.get();
        if !context.is_null() {
            arch::escape(context);
        }
    }
    exec::abort_raw()
}

struct HostLibc;

impl Libc for HostLibc {
    fn move_break(&self, delta: isize) -> bool {
        // SAFETY: sbrk(3) moves the break; memory that a negative delta gives up is
        // what an earlier call here took.
        let result = unsafe { host::sbrk(delta) };
        result.addr() != usize::MAX
    }

    fn break_function(&self) -> u64 {
        host::sbrk_address()
    }
}

extern "C" fn constructor() {
    if !host::is_complete() {
        return;
    }
    wrappers::look_up();
    if exported::is_second_copy() {
        return;
    }
    // SAFETY: errno of this thread; the address is valid as long as the thread lives.
    let Some(errno) = (unsafe { host::errno_location().as_mut() }) else { return };
    let saved = *errno;
    let options = options();
    if options.on
        && let Some(headers) = object::main_program()
    {
        // The way out for shells and helpers: no system call so far, no memory taken.
        let may_gain = headers.bytes() >= options.policy.page_size.unwrap_or(BLOCK);
        if may_gain || options.bad.is_some() || options.log >= Level::Info {
            guarded(Job { options, headers });
        }
    }
    *errno = saved;
}

/// The environment's options; the defaults in secure mode (ld.so(8), AT_SECURE), where
/// the environment is somebody else's.
fn options() -> Options {
    if host::getauxval(libc::AT_SECURE) != 0 {
        return Options::default();
    }
    // SAFETY: the environment is libc's; in the constructor nobody changes it but us,
    // and what LD_PRELOAD holds is no option.
    unsafe {
        let environ = host::environ();
        let options = Options::from_environment(environ.cast_const().cast());
        if options.on && !options.inherit {
            inherit::leave_ld_preload(environ);
        }
        options
    }
}

/// What the guarded part works on; owns no memory.
#[derive(Clone, Copy)]
struct Job {
    options: Options,
    headers: Headers,
}

/// Runs the remap with signals blocked and a way back for panics; gives all memory back.
fn guarded(mut job: Job) {
    let mask = match exec::block_signals() {
        Ok(mask) => mask,
        Err(errno) => {
            job.options.start_logging();
            log(Level::Warn, format_args!("program left alone: cannot block signals: {errno}"));
            return logger::stop();
        }
    };
    job.options.start_logging();
    if !memory::prepare() {
        log(Level::Warn, format_args!("program left alone: no memory to work with"));
        logger::stop();
        return exec::restore_signals(mask);
    }
    let mut context = Context::new();
    // SAFETY: the context lives until `protect` has returned, and the way back is
    // closed right after. `work` gets the pointer to `job`, which outlives it. Frames
    // that an escape skips own memory that is given back as a whole below.
    let panicked = unsafe {
        *WAY_BACK.0.get() = &raw const context;
        let panicked = arch::protect(&raw mut context, work, (&raw mut job).cast());
        *WAY_BACK.0.get() = ptr::null();
        panicked != 0
    };
    if panicked {
        log(Level::Error, format_args!("internal error; the program runs on"));
    }
    logger::stop();
    exec::close_leftovers();
    exec::restore_signals(mask);
    // SAFETY: whatever was allocated belonged to frames that are gone.
    unsafe { memory::release() };
}

unsafe extern "C" fn work(job: *mut u8) {
    // SAFETY: `guarded` passes its `Job`, which nobody else uses meanwhile.
    let job = unsafe { *job.cast::<Job>() };
    let options = &job.options;
    let off_pool = off_pool(options);
    let report = remap(&job, off_pool);
    match &report {
        Ok(report) => {
            exported::publish(report);
            pool::remember(report, options.fork_guard);
        }
        Err(trouble) => exported::publish_trouble(trouble),
    }
    let failed = say(options, off_pool, report.as_ref());
    if failed && options.policy.on_failure == OnFailure::Abort {
        exec::abort_raw();
    }
}

/// Why nothing could even be planned.
enum Trouble {
    /// Not one of the programs that ELFREMAP_EXE names: no trouble at all.
    OtherProgram,
    /// The program headers make no sense.
    Headers,
    /// The machine has no huge pages of any kind.
    NoHugePages,
    /// A seccomp filter ends who makes the calls of a move.
    Filter,
    /// The asked page size is not one of these.
    PageSize(Offer),
    /// A file that tells what is there could not be read.
    Read(&'static str, Errno),
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::OtherProgram => f.write_str("not one of the programs in ELFREMAP_EXE"),
            Self::Headers => f.write_str("its program headers make no sense"),
            Self::Filter => {
                f.write_str("a seccomp filter ends the process at a system call that a move needs")
            }
            Self::NoHugePages => f.write_str("the kernel offers no huge pages"),
            Self::PageSize(offer) => {
                f.write_str("ELFREMAP_PAGE_SIZE is not offered by this machine; accepted:")?;
                let mut sizes = offer.sizes.iter().filter_map(|&size| PageSize::new(size));
                sizes.try_for_each(|size| write!(f, " {size}"))
            }
            Self::Read(what, errno) => write!(f, "cannot read {what}: {errno}"),
        }
    }
}

/// Why writable ranges keep away from the pool though it was asked for.
#[derive(Clone, Copy)]
enum OffPool {
    /// Forks could not be guarded.
    Fork,
    /// Other threads could not be made to wait while a range is moved back.
    Threads(Errno),
}

impl fmt::Display for OffPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("data and bss are not put on the pool: ")?;
        match self {
            Self::Fork => f.write_str(
                "this C library has no __register_atfork; hint: ELFREMAP_FORK=off for a program that never forks",
            ),
            Self::Threads(errno) => write!(
                f,
                "the program may have threads, and the kernel has no userfaultfd for it that \
                 makes them wait (userfaultfd: {errno}); hint: sysctl vm.unprivileged_userfaultfd=1"
            ),
        }
    }
}

/// Whether what lies on the pool could be moved back when the program's own calls or a
/// fork ask for it.
fn off_pool(options: &Options) -> Option<OffPool> {
    if !options.policy.backends.any_is(Backend::Hugetlb) {
        return None;
    }
    if options.fork_guard && !fork::register() {
        return Some(OffPool::Fork);
    }
    let errno = Freezer::probe().err().filter(|_| symbols::may_have_threads())?;
    Some(OffPool::Threads(errno))
}

fn remap(job: &Job, off_pool: Option<OffPool>) -> Result<Report, Trouble> {
    let policy = &Policy { writable_off_pool: off_pool.is_some(), ..job.options.policy };
    let page = host::getauxval(libc::AT_PAGESZ);
    let page = if page.is_power_of_two() { page } else { 4096 };
    let object = job.headers.object().ok_or(Trouble::Headers)?;
    let process =
        Process::new(object, page).map_err(|errno| Trouble::Read("/proc/self/maps", errno))?;
    if job.options.programs.is_some_and(|list| !glob::in_list(list, process.name())) {
        return Err(Trouble::OtherProgram);
    }
    if job.headers.bytes() < policy.page_size.unwrap_or(BLOCK) {
        let mut report = Report::new(Verdict::Refused(Refusal::TooSmall), page, BLOCK);
        report.program = process.name().into();
        return Ok(report);
    }
    if exec::tryout::calls_are_deadly() {
        return Err(Trouble::Filter);
    }
    let offer = exec::offer();
    let block = block_size(policy, &offer, &process, job.headers.bytes())?;
    // SAFETY: signals are blocked; this library is no part of the main program, the
    // loader calls it and it returns to the loader. No reference into the program's
    // memory is held here: its headers are read-only.
    let report = unsafe { process.remap(block, policy, &offer, &HostLibc) };
    report.map_err(|errno| Trouble::Read("/proc/self", errno))
}

/// The block size to plan for: what was asked for; else 2 MiB where it is offered and
/// its pool has pages; else the size of whose pool the program can get most; else the
/// one of transparent huge pages. The program has `len` bytes.
///
/// The machine's default size is no guide: it may be 1 GiB, which no program fills, or
/// 32 MiB (arm64 with 16 KiB pages), which few fill.
fn block_size(policy: &Policy, offer: &Offer, process: &Process, len: u64) -> Result<u64, Trouble> {
    let is_offered = |size| offer.sizes.contains(&size) || offer.thp() == Some(size);
    if let Some(size) = policy.page_size {
        return if is_offered(size) { Ok(size) } else { Err(Trouble::PageSize(offer.clone())) };
    }
    // For most programs there is no other choice, and no pool to ask.
    let has_others = offer.sizes.iter().any(|&size| size != BLOCK && size <= len);
    if is_offered(BLOCK) && !(has_others && exec::is_void(BLOCK)) {
        return Ok(BLOCK);
    }
    let trouble = |errno| Trouble::Read("/proc/self", errno);
    if let Some(size) = process.best_block(policy, offer).map_err(trouble)? {
        return Ok(size);
    }
    match offer.thp() {
        Some(size) if size != BLOCK && process.fits(size, policy).map_err(trouble)? => Ok(size),
        _ if is_offered(BLOCK) => Ok(BLOCK),
        _ => {
            let larger = offer.sizes.iter().copied().chain(offer.thp()).filter(|&s| s > BLOCK);
            larger.min().ok_or(Trouble::NoHugePages)
        }
    }
}

/// Prints the one line that is due, if any, and says whether something failed that
/// ELFREMAP_ON_FAILURE is about.
fn say(options: &Options, off_pool: Option<OffPool>, outcome: Result<&Report, &Trouble>) -> bool {
    let bad = Bad(options.bad);
    match outcome {
        Ok(report) => {
            if report.is_incomplete() || report.loosened().is_some() {
                let pool = pool_of(report, options.policy.numa);
                log(Level::Warn, format_args!("{bad}{}", Warning { report, pool }));
            } else if options.bad.is_some() {
                log(Level::Warn, format_args!("{bad}it is ignored"));
            } else if let Some(reason) = off_pool.filter(|_| has_writable(report)) {
                log(Level::Warn, format_args!("{reason}"));
            }
            details(report);
            report.has_failed()
        }
        Err(Trouble::OtherProgram) => {
            log(Level::Info, format_args!("left alone: {}", Trouble::OtherProgram));
            false
        }
        Err(trouble) => {
            log(Level::Warn, format_args!("{bad}program left alone: {trouble}"));
            true
        }
    }
}

fn has_writable(report: &Report) -> bool {
    report.moved.iter().any(|moved| moved.prot.has(Prot::WRITE))
}

/// What is left in the pool that was short.
fn pool_of(report: &Report, numa: Numa) -> Option<Remaining> {
    let (_, shortage) = report.shortages.first()?;
    let Source::Hugetlb(size) = shortage.source else { return None };
    exec::remaining(size, numa)
}

/// The summary, as the kernel confirms it, and each range.
fn details(report: &Report) {
    if !is_on(Level::Info) {
        return;
    }
    let mut report = report.clone();
    if let Err(errno) = exec::verify::confirm(&mut report) {
        log(Level::Info, format_args!("cannot read /proc/self to verify: {errno}"));
    }
    log(Level::Info, format_args!("{}", Summary(&report)));
    for moved in &report.moved {
        match moved.source {
            Some(source) => {
                log(Level::Debug, format_args!("{} {}: {source}", moved.range, moved.prot))
            }
            None => log(Level::Debug, format_args!("{} {}: small pages", moved.range, moved.prot)),
        }
    }
    for (range, shortage) in &report.shortages {
        log(
            Level::Debug,
            format_args!("{range}: {}: {} {}", shortage.source, shortage.step, shortage.errno),
        );
    }
    for left in &report.left {
        log(Level::Debug, format_args!("{}: stays: {}", left.range, left.reason));
    }
}
