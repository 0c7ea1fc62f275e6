//! The options that decide what is planned: the same names and values as the
//! preload's environment variables, which are their defaults.

use std::env;
use std::fmt::Display;
use std::str::FromStr;

use elfremap::hugepage::PageSize;
use elfremap::policy::{Backends, Merge, Policy, Segments};

const HEADING: &str = "What to plan for";

/// What to plan for.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct PolicyArgs {
    /// Classes to move, a list of text, rodata, data, bss, header [default:
    /// $ELFREMAP_SEGMENTS or text,data,bss]
    #[arg(long, value_name = "LIST", help_heading = HEADING)]
    pub segments: Option<Segments>,

    /// Where huge pages come from: auto, hugetlb, thp, or a list such as
    /// text:hugetlb,data:thp [default: $ELFREMAP_BACKEND or auto]
    #[arg(long, value_name = "KIND", help_heading = HEADING)]
    pub backend: Option<Backends>,

    /// Huge page size: 2M, 1G, ... [default: $ELFREMAP_PAGE_SIZE, or 2M where the
    /// machine has it]
    #[arg(long, value_name = "SIZE", help_heading = HEADING)]
    pub page_size: Option<PageSize>,

    /// What may share a huge page: none, rx, relro, rwx [default: $ELFREMAP_MERGE
    /// or none]
    #[arg(long, value_name = "LEVEL", help_heading = HEADING)]
    pub merge: Option<Merge>,
}

impl PolicyArgs {
    /// The policy: what is given, else what the environment says, else the preload's
    /// defaults. A variable that is not accepted is named in a warning, and its
    /// default used, as the preload does.
    #[must_use]
    pub fn policy(&self) -> Policy {
        Policy {
            segments: or_variable(self.segments, "ELFREMAP_SEGMENTS").unwrap_or_default(),
            backends: or_variable(self.backend, "ELFREMAP_BACKEND").unwrap_or_default(),
            page_size: or_variable(self.page_size, "ELFREMAP_PAGE_SIZE").map(PageSize::bytes),
            merge: or_variable(self.merge, "ELFREMAP_MERGE").unwrap_or_default(),
            ..Policy::default()
        }
    }
}

fn or_variable<T: FromStr<Err: Display>>(given: Option<T>, variable: &str) -> Option<T> {
    if given.is_some() {
        return given;
    }
    let value = env::var(variable).ok().filter(|value| !value.is_empty())?;
    match value.parse() {
        Ok(value) => Some(value),
        Err(error) => {
            eprintln!("elfremap: warning: {variable}={value} is not accepted ({error})");
            None
        }
    }
}
