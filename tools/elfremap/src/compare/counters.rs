//! TLB counters of the processor over whole child processes, by perf_event_open(2).
//!
//! # Safety
//! perf_event_open(2) has no wrapper in libc; its argument is built here.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::{self, ErrorKind, Read};
use std::os::fd::FromRawFd;

use serde::Serialize;

/// What was counted in user space; `None`: this counter is not there.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Counts {
    /// Instructions retired.
    pub instructions: Option<f64>,
    /// Cycles.
    pub cycles: Option<f64>,
    /// Instruction fetches that missed the TLBs.
    pub itlb_misses: Option<f64>,
    /// Loads that missed the TLBs.
    pub dtlb_misses: Option<f64>,
}

/// Counters that the next child of this thread, and its children, will count in. They are for
/// one child: the kernel may exchange the counters of parent and child when it switches from
/// one to the other, and starting at execve(2) works once.
#[derive(Debug)]
pub struct Counters {
    files: [Option<File>; 4],
}

/// Why there are no counters.
#[derive(Debug, thiserror::Error)]
pub enum Unavailable {
    /// No PMU, as in most virtual machines.
    #[error("this machine shows no hardware counters")]
    NoHardware,
    /// perf_event_paranoid, seccomp or the like.
    #[error("hardware counters are not permitted (root, or sysctl kernel.perf_event_paranoid=2)")]
    NotPermitted,
    /// Anything else.
    #[error("hardware counters cannot be opened: {0}")]
    Other(io::Error),
}

/// The kinds and codes of `uapi/linux/perf_event.h`.
const HARDWARE: u32 = 0;
const CACHE: u32 = 3;
const CACHE_DTLB: u64 = 3;
const CACHE_ITLB: u64 = 4;
const RESULT_MISS: u64 = 1 << 16;
const EVENTS: [(u32, u64); 4] = [
    (HARDWARE, 1),
    (HARDWARE, 0),
    (CACHE, CACHE_ITLB | RESULT_MISS),
    (CACHE, CACHE_DTLB | RESULT_MISS),
];

impl Counters {
    /// Opens what there is. Counting starts when a child calls execve(2).
    ///
    /// # Errors
    /// None of the counters can be opened; the reason is the first one's.
    pub fn open() -> Result<Self, Unavailable> {
        let mut reason = None;
        let files = EVENTS.map(|(kind, config)| match open(kind, config) {
            Ok(file) => Some(file),
            Err(error) => {
                reason.get_or_insert(error);
                None
            }
        });
        match reason {
            Some(error) if files.iter().all(Option::is_none) => Err(match error.kind() {
                ErrorKind::NotFound | ErrorKind::Unsupported => Unavailable::NoHardware,
                _ if error.raw_os_error() == Some(libc::ENODEV) => Unavailable::NoHardware,
                ErrorKind::PermissionDenied => Unavailable::NotPermitted,
                _ => Unavailable::Other(error),
            }),
            _ => Ok(Self { files }),
        }
    }

    /// What the child and those of its children that have ended counted.
    #[must_use]
    pub fn read(&self) -> Counts {
        let [instructions, cycles, itlb_misses, dtlb_misses] =
            [0, 1, 2, 3].map(|i: usize| self.files[i].as_ref().and_then(value));
        Counts { instructions, cycles, itlb_misses, dtlb_misses }
    }
}

/// The count, scaled up by the share of the time in which the counter really counted;
/// `None` when it never did.
fn value(mut file: &File) -> Option<f64> {
    let mut record = [0; 24];
    file.read_exact(&mut record).ok()?;
    let number = |at: usize| -> Option<f64> {
        let bytes = record.get(at..at + 8)?.try_into().ok()?;
        Some(u64::from_ne_bytes(bytes) as f64)
    };
    let (count, enabled, running) = (number(0)?, number(8)?, number(16)?);
    (running > 0.0).then(|| count * enabled / running)
}

/// `struct perf_event_attr` in its first published size, which every kernel accepts.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    kind: u32,
    size: u32,
    config: u64,
    sample_period: u64,
    sample_type: u64,
    read_format: u64,
    flags: u64,
    wakeup_events: u32,
    breakpoint_type: u32,
    breakpoint_address: u64,
}

fn open(kind: u32, config: u64) -> io::Result<File> {
    const DISABLED: u64 = 1;
    const INHERIT: u64 = 1 << 1;
    const EXCLUDE_KERNEL: u64 = 1 << 5;
    const EXCLUDE_HYPERVISOR: u64 = 1 << 6;
    const ENABLE_ON_EXEC: u64 = 1 << 12;
    const TIMES_ENABLED_AND_RUNNING: u64 = 1 | 2;
    const CLOSE_ON_EXEC: libc::c_ulong = 8;
    let attributes = Attributes {
        kind,
        size: 64,
        config,
        read_format: TIMES_ENABLED_AND_RUNNING,
        flags: DISABLED | INHERIT | EXCLUDE_KERNEL | EXCLUDE_HYPERVISOR | ENABLE_ON_EXEC,
        ..Attributes::default()
    };
    let (this_thread, any_cpu, no_group) = (0, -1, -1);
    // SAFETY: the kernel reads `size` = 64 bytes from the pointer, which is the size of
    // `Attributes`, whose fields are all initialised and which lives through the call.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const attributes,
            this_thread,
            any_cpu,
            no_group,
            CLOSE_ON_EXEC,
        )
    };
    let fd = i32::try_from(fd).unwrap_or(-1);
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call returned a new descriptor, which nothing else owns.
    Ok(unsafe { File::from_raw_fd(fd) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn the_kernel_knows_the_structure() {
        assert_eq!(size_of::<Attributes>(), 64);
    }

    /// Page faults are counted by software, so the mechanism can be tried on any machine.
    #[test]
    fn a_childs_events_are_counted_from_its_exec_on() {
        const SOFTWARE: u32 = 1;
        const PAGE_FAULTS: u64 = 2;
        let faults = |program: &str, arguments: &[&str]| {
            let counter = open(SOFTWARE, PAGE_FAULTS)?;
            let own_pages = vec![1u8; 4 << 20];
            assert_eq!(value(&counter), None, "counts this process: {}", own_pages.len());
            assert!(Command::new(program).args(arguments).status()?.success());
            Ok::<_, io::Error>(value(&counter).unwrap())
        };
        let once = match faults("true", &[]) {
            Ok(once) => once,
            Err(error) => {
                assert!(std::env::var_os("ELFREMAP_TEST_NO_SKIP").is_none(), "{error}");
                eprintln!("skipped: needs perf_event_open: {error}");
                return;
            }
        };
        assert!(once > 10.0, "{once}");
        let more = faults("sh", &["-c", "/bin/true; /bin/true; /bin/true"]).unwrap();
        assert!(more > 2.0 * once, "{more} {once}");
    }
}
