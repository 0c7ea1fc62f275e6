//! `elfremap_report`: the one exported symbol. `elfremap status` reads it from outside;
//! a second copy of the library finds in it that the work is done.

use core::cell::UnsafeCell;
use core::fmt::{Display, Write};
use core::ptr;

use core_lib::exec::Source;
use core_lib::plan::Refusal;
use core_lib::report::{Report, Verdict};

use crate::logger::Line;

const MAGIC: [u8; 8] = *b"ELFREMAP";
const ROOM: usize = 4096 - 12;

/// Magic, length of the text in little-endian order, text: lines `key=value`.
#[repr(C)]
struct Exported {
    magic: [u8; 8],
    len: [u8; 4],
    text: [u8; ROOM],
}

struct Slot(UnsafeCell<Exported>);

// SAFETY: written once, by the constructor's one thread.
unsafe impl Sync for Slot {}

/// Zero until the constructor has run.
#[unsafe(export_name = "elfremap_report")]
static REPORT: Slot =
    Slot(UnsafeCell::new(Exported { magic: [0; 8], len: [0; 4], text: [0; ROOM] }));

unsafe extern "C" {
    /// The same symbol as the loader binds it: the first loaded copy's.
    #[link_name = "elfremap_report"]
    static FIRST: UnsafeCell<[u8; 8]>;
}

/// Whether another copy of this library has been here.
pub(crate) fn is_second_copy() -> bool {
    // SAFETY: the symbol is defined by this library and by every copy of it, with these
    // bytes at its start; it is written by constructors only, which run one by one.
    unsafe { ptr::read_volatile(FIRST.get()) == MAGIC }
}

/// Writes the report.
pub(crate) fn publish(report: &Report) {
    let mut text = Line::<ROOM>::new();
    let _ = describe(report, &mut text);
    write(text.bytes());
}

/// Writes why nothing could be planned.
pub(crate) fn publish_trouble(trouble: &impl Display) {
    let mut text = Line::<ROOM>::new();
    let version = env!("CARGO_PKG_VERSION");
    let _ = write!(text, "version={version}\nverdict=trouble\ntrouble={trouble}\n");
    write(text.bytes());
}

fn write(text: &[u8]) {
    let len = u32::try_from(text.len()).unwrap_or(0);
    let exported = REPORT.0.get();
    // SAFETY: one thread only; the text is no longer than its room.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr(), (&raw mut (*exported).text).cast(), text.len());
        (&raw mut (*exported).len).write_volatile(len.to_le_bytes());
        (&raw mut (*exported).magic).write_volatile(MAGIC);
    }
}

fn describe(report: &Report, text: &mut impl Write) -> core::fmt::Result {
    writeln!(text, "version={}", env!("CARGO_PKG_VERSION"))?;
    writeln!(text, "block={}", report.block)?;
    match report.verdict {
        Verdict::Planned => writeln!(text, "verdict=planned")?,
        Verdict::Refused(refusal) => {
            writeln!(text, "verdict=refused")?;
            writeln!(text, "refusal={}", refusal.code())?;
            if let Refusal::NoBlock(_) = refusal {
                writeln!(text, "refusal_text={refusal}")?;
            }
        }
    }
    writeln!(text, "nanoseconds={}", report.nanoseconds)?;
    for moved in &report.moved {
        match moved.source {
            Some(Source::Hugetlb(size)) => writeln!(text, "moved={} hugetlb {size}", moved.range)?,
            Some(Source::Thp(size)) => writeln!(text, "moved={} thp {size}", moved.range)?,
            None => writeln!(text, "unmoved={}", moved.range)?,
        }
    }
    for (range, shortage) in &report.shortages {
        let (step, errno) = (shortage.step, shortage.errno);
        writeln!(text, "shortage={range} {step} {errno} {}", shortage.source)?;
    }
    for left in &report.left {
        writeln!(text, "left={} {} {}", left.range, left.reason.code(), left.bytes.total())?;
    }
    Ok(())
}
