//! The logger: formats on the stack, writes with one write(2). Silent on success.

use core::cell::UnsafeCell;
use core::ffi::CStr;
use core::fmt::{self, Write};

use core_lib::exec::{Fd, process_id, write_to};

/// The descriptor messages go to unless a file is named.
const STDERR: i32 = 2;

/// How much is printed: this level and those before it. (The crate `log` would do, but
/// a workspace build turns its `std` feature on for the tools, and std does not go
/// together with a panic handler of our own.)
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Level {
    Off,
    Error,
    Warn,
    Info,
    Debug,
}

/// The level, and the file while the constructor runs.
struct Logger {
    level: Level,
    file: Option<Fd>,
}

struct Shared(UnsafeCell<Logger>);

// SAFETY: only the constructor's one thread logs, opens and closes.
unsafe impl Sync for Shared {}

static LOGGER: Shared = Shared(UnsafeCell::new(Logger { level: Level::Off, file: None }));

/// Whether messages of this level are printed.
pub(crate) fn is_on(level: Level) -> bool {
    // SAFETY: one thread only.
    level <= unsafe { (*LOGGER.0.get()).level }
}

/// Text of at most N bytes; what goes beyond is cut off.
pub(crate) struct Line<const N: usize> {
    bytes: [u8; N],
    len: usize,
}

impl<const N: usize> Line<N> {
    pub(crate) const fn new() -> Self {
        Self { bytes: [0; N], len: 0 }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.bytes.get(..self.len).unwrap_or_default()
    }

    fn push(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            if let Some(slot) = self.bytes.get_mut(self.len) {
                *slot = byte;
                self.len += 1;
            }
        }
    }

    /// Ends the line, whatever is in it.
    fn end(&mut self) {
        self.len = self.len.min(N - 1);
        self.push(b"\n");
    }
}

impl<const N: usize> Write for Line<N> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.push(text.as_bytes());
        Ok(())
    }
}

/// Prints a line `elfremap: LEVEL: MESSAGE`.
pub(crate) fn log(level: Level, message: fmt::Arguments<'_>) {
    if !is_on(level) {
        return;
    }
    let name = match level {
        Level::Off | Level::Error => "error",
        Level::Warn => "warning",
        Level::Info => "info",
        Level::Debug => "debug",
    };
    let mut line = Line::<1024>::new();
    let _ = write!(line, "elfremap: {name}: {message}");
    line.end();
    // SAFETY: one thread only.
    match unsafe { &(*LOGGER.0.get()).file } {
        Some(file) => file.write(line.bytes()),
        None => write_to(STDERR, line.bytes()),
    }
}

/// Starts logging at `level` to stderr, or to the file (`%p` stands for the process's
/// number), which is created or appended to.
pub(crate) fn start(level: Level, file: Option<&[u8]>) {
    // SAFETY: one thread only, and no message is being printed.
    unsafe { (*LOGGER.0.get()).level = level };
    let Some(file) = file.filter(|_| level != Level::Off) else { return };
    let mut path = Line::<4096>::new();
    let mut rest = file;
    while let Some(at) = rest.windows(2).position(|two| two == b"%p") {
        path.push(&rest[..at]);
        let _ = write!(path, "{}", process_id());
        rest = &rest[at + 2..];
    }
    path.push(rest);
    path.push(b"\0");
    // Never wait for the reader of a FIFO, nor write where somebody else's link points.
    let flags = libc::O_WRONLY
        | libc::O_CREAT
        | libc::O_APPEND
        | libc::O_NOCTTY
        | libc::O_NONBLOCK
        | libc::O_NOFOLLOW;
    let opened = CStr::from_bytes_with_nul(path.bytes())
        .map_err(|_| core_lib::errno::Errno(libc::ENAMETOOLONG))
        .and_then(|path| Fd::open(path, flags, 0o644));
    match opened {
        // SAFETY: as above.
        Ok(fd) => unsafe { (*LOGGER.0.get()).file = Some(fd) },
        Err(errno) => log(
            Level::Warn,
            format_args!("cannot open ELFREMAP_LOG_FILE: {errno}; logging to stderr"),
        ),
    }
}

/// Closes the file.
pub(crate) fn stop() {
    // SAFETY: one thread only, and no message is being printed.
    unsafe { (*LOGGER.0.get()).file = None };
}
