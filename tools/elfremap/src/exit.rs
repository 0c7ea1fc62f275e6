//! Exit codes and the one place that prints a failure.

use std::fmt;
use std::process::ExitCode;

/// What a command's exit status says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(u8)]
pub enum Status {
    /// Done, or suitable.
    Done = 0,
    /// The operation failed.
    Failed = 1,
    /// Wrong usage (clap exits with it as well).
    Usage = 2,
    /// A negative verdict: not suitable, not remapped.
    Negative = 3,
    /// Not permitted.
    NotPermitted = 4,
    /// Not enough huge pages.
    Short = 5,
    /// `run` itself failed, as env(1) has it.
    RunFailed = 125,
    /// `run` found the program but could not run it.
    CannotRun = 126,
    /// `run` did not find the program.
    NotFound = 127,
}

impl From<Status> for ExitCode {
    fn from(status: Status) -> Self {
        Self::from(status as u8)
    }
}

/// A failure with the exit status it stands for and the command that mends it.
/// Attach it to an [`anyhow::Error`] with `anyhow::Error::new(Failure { .. })`.
#[derive(Debug)]
pub struct Failure {
    /// Exit status.
    pub status: Status,
    /// Operation, object and cause, in lower case.
    pub message: String,
    /// What to type next, without the leading `hint: `.
    pub hint: Option<String>,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Failure {}

/// Prints `elfremap: error: <what>: <why>` and the hint to stderr; returns the status.
#[must_use]
pub fn report(error: &anyhow::Error) -> ExitCode {
    eprintln!("elfremap: error: {error:#}");
    let failure = error.downcast_ref::<Failure>();
    if let Some(hint) = failure.and_then(|f| f.hint.as_ref()) {
        eprintln!("hint: {hint}");
    }
    failure.map_or(Status::Failed, |f| f.status).into()
}
