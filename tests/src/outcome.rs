//! Results of a test: passed, failed, or skipped for a named reason.

use anyhow::Result;
use libtest_mimic::{Completion, Failed, Trial};

/// Set to `1`, it makes every skip a failure (CI sets it).
pub const NO_SKIP: &str = "ELFREMAP_TEST_NO_SKIP";

/// A test that could not run here, and why. Returned as an error.
#[derive(Debug, thiserror::Error)]
#[error("skipped: {0}")]
pub struct Skip(String);

impl Skip {
    /// A skip with its reason, such as `needs root`.
    #[must_use]
    pub fn because(reason: impl Into<String>) -> anyhow::Error {
        anyhow::Error::new(Self(reason.into()))
    }
}

/// What `result` means: an error that is a [`Skip`] is an ignored test, unless
/// [`NO_SKIP`] is `1`.
///
/// # Errors
/// The failure with its whole chain of causes.
pub fn completion(result: Result<()>) -> Result<Completion, Failed> {
    let Err(error) = result else {
        return Ok(Completion::Completed);
    };
    match error.downcast_ref::<Skip>() {
        Some(Skip(reason)) if std::env::var_os(NO_SKIP).is_none_or(|v| v != "1") => {
            Ok(Completion::ignored_with(reason.clone()))
        }
        Some(skip) => Err(format!("{skip} (and {NO_SKIP}=1 forbids that)").into()),
        None => Err(format!("{error:#}").into()),
    }
}

/// A test for libtest-mimic that may skip itself.
pub fn trial(name: impl Into<String>, body: impl FnOnce() -> Result<()> + Send + 'static) -> Trial {
    Trial::ignorable_test(name, move || completion(body()))
}

/// For tests of the standard harness: passes over a skip with a line on stderr.
///
/// # Panics
/// On any other error, and on a skip when [`NO_SKIP`] is `1`.
pub fn check(result: Result<()>) {
    match completion(result) {
        Ok(Completion::Ignored { reason }) => {
            eprintln!("skipped: {}", reason.unwrap_or_default());
        }
        Ok(Completion::Completed) => {}
        Err(failed) => panic!("{}", failed.message().unwrap_or("failed")),
    }
}
