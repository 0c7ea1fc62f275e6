//! The options: environment variables `ELFREMAP*`.

use core::ffi::{CStr, c_char};
use core::fmt;

use core_lib::hugepage::PageSize;
use core_lib::policy::Policy;

use crate::logger::{self, Level};

/// A value that was not accepted, as the beginning of a warning; empty when none.
pub(crate) struct Bad(pub(crate) Option<(&'static [u8], &'static [u8], &'static str)>);

impl fmt::Display for Bad {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Some((name, value, accepted)) = self.0 else { return Ok(()) };
        let (name, value) = (name.escape_ascii(), value.escape_ascii());
        write!(f, "{name}={value} is not accepted (accepted: {accepted}); ")
    }
}

/// The options in force.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Options {
    pub(crate) on: bool,
    pub(crate) policy: Policy,
    /// `ELFREMAP_EXE`.
    pub(crate) programs: Option<&'static [u8]>,
    /// `ELFREMAP_INHERIT`.
    pub(crate) inherit: bool,
    /// `ELFREMAP_FORK`.
    pub(crate) fork_guard: bool,
    pub(crate) log: Level,
    pub(crate) log_file: Option<&'static [u8]>,
    /// The first value that was not accepted: variable, value, accepted values.
    pub(crate) bad: Option<(&'static [u8], &'static [u8], &'static str)>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            on: true,
            policy: Policy::default(),
            programs: None,
            inherit: true,
            fork_guard: true,
            log: Level::Warn,
            log_file: None,
            bad: None,
        }
    }
}

impl Options {
    /// Reads the environment.
    ///
    /// # Safety
    /// `environment` is null or a null-terminated array of C strings that live and
    /// stay unchanged as long as the options are used.
    pub(crate) unsafe fn from_environment(environment: *const *const c_char) -> Self {
        let mut options = Self::default();
        if environment.is_null() {
            return options;
        }
        let mut at = environment;
        // SAFETY: the caller's promise; the loop stops at the null pointer.
        while let Some(entry) = unsafe { at.read().as_ref() } {
            // SAFETY: as above: a C string.
            let entry: &'static [u8] = unsafe { CStr::from_ptr(entry) }.to_bytes();
            if entry.starts_with(b"ELFREMAP") {
                options.take(entry);
            }
            // SAFETY: this entry was not the terminator, so another one follows.
            at = unsafe { at.add(1) };
        }
        options
    }

    fn take(&mut self, entry: &'static [u8]) {
        let Some(equals) = entry.iter().position(|&b| b == b'=') else { return };
        let (name, value) = (&entry[..equals], &entry[equals + 1..]);
        if value.is_empty() {
            return;
        }
        if let Err(accepted) = self.set(name, value)
            && self.bad.is_none()
        {
            self.bad = Some((name, value, accepted));
        }
    }

    fn set(&mut self, name: &[u8], value: &'static [u8]) -> Result<(), &'static str> {
        let text = core::str::from_utf8(value).unwrap_or("");
        let policy = &mut self.policy;
        match name {
            b"ELFREMAP" => self.on = choose(text, &[("on", true), ("off", false)], "on, off")?,
            b"ELFREMAP_SEGMENTS" => policy.segments = text.parse().map_err(accepted)?,
            b"ELFREMAP_BACKEND" => policy.backends = text.parse().map_err(accepted)?,
            b"ELFREMAP_MERGE" => policy.merge = text.parse().map_err(accepted)?,
            b"ELFREMAP_STRATEGY" => policy.strategy = text.parse().map_err(accepted)?,
            b"ELFREMAP_NUMA" => policy.numa = text.parse().map_err(accepted)?,
            b"ELFREMAP_ON_FAILURE" => policy.on_failure = text.parse().map_err(accepted)?,
            b"ELFREMAP_PAGE_SIZE" => {
                let size: PageSize =
                    text.parse().map_err(|_| "a huge page size of the machine, such as 2M")?;
                policy.page_size = Some(size.bytes());
            }
            b"ELFREMAP_EXE" => self.programs = Some(value),
            b"ELFREMAP_INHERIT" => {
                self.inherit = choose(text, &[("1", true), ("0", false)], "1, 0")?;
            }
            b"ELFREMAP_FORK" => {
                self.fork_guard = choose(text, &[("guard", true), ("off", false)], "guard, off")?;
            }
            b"ELFREMAP_LOG" => {
                let levels = [
                    ("off", Level::Off),
                    ("error", Level::Error),
                    ("warn", Level::Warn),
                    ("info", Level::Info),
                    ("debug", Level::Debug),
                ];
                self.log = choose(text, &levels, "off, error, warn, info, debug")?;
            }
            b"ELFREMAP_LOG_FILE" => self.log_file = Some(value),
            // Variables of later versions and of the user's own are none of our business.
            _ => {}
        }
        Ok(())
    }

    /// Sets the logger up.
    pub(crate) fn start_logging(&self) {
        logger::start(self.log, self.log_file);
    }
}

fn accepted(bad: core_lib::policy::BadValue) -> &'static str {
    bad.accepted
}

fn choose<T: Copy>(
    text: &str,
    values: &[(&str, T)],
    accepted: &'static str,
) -> Result<T, &'static str> {
    values.iter().find(|(name, _)| *name == text).map(|&(_, value)| value).ok_or(accepted)
}
