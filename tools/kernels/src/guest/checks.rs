//! Makes checks one after the other and reports each at once.

use anyhow::{Error, Result};
use elfremap_machines::line::Line;
use std::io::Write;

/// The checks of a guest, on its console.
#[derive(Debug)]
pub(crate) struct Checks;

impl Checks {
    /// Runs a check and reports it. Only a failure to report is an error of the caller.
    pub(crate) fn check(
        &mut self,
        group: &str,
        name: impl Into<String>,
        body: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let name = name.into();
        match body() {
            Ok(()) => self.say(&Line::Check { group: group.into(), name, failure: None }),
            Err(error) => self.fail(group, &name, &error),
        }
    }

    pub(crate) fn fail(&mut self, group: &str, name: &str, error: &Error) -> Result<()> {
        let failure = Some(format!("{error:#}"));
        self.say(&Line::Check { group: group.into(), name: name.into(), failure })
    }

    pub(crate) fn fact(&mut self, name: &str, value: impl ToString) -> Result<()> {
        self.say(&Line::Fact(name.into(), value.to_string()))
    }

    pub(crate) fn end(&mut self) -> Result<()> {
        self.say(&Line::End)
    }

    fn say(&mut self, line: &Line) -> Result<()> {
        // In one piece, so that the kernel's own lines come before or after it.
        Ok(std::io::stdout().write_all(format!("{line}\n").as_bytes())?)
    }
}
