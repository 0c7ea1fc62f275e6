//! The ways to run the program that are compared.

use std::path::Path;
use std::process::Command;
use std::str::FromStr;

use crate::launch::preload_value;

/// A way to run the program: plain, or with the preload and some of its options.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Variant {
    /// What the user calls it.
    pub name: String,
    /// Whether the preload is there.
    pub preload: bool,
    /// Variables of the preload.
    pub variables: Vec<(&'static str, &'static str)>,
}

/// A name that stands for no variant.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "no variant '{0}': write remapped, hugetlb, thp, rx, relro, rwx, text, swap or move, \
     or several joined by +"
)]
pub struct BadVariant(String);

impl Variant {
    /// The program as it is.
    #[must_use]
    pub fn plain() -> Self {
        Self { name: String::from("plain"), preload: false, variables: Vec::new() }
    }

    /// Prepares a command: the preload behind others that are set already.
    pub fn apply(&self, command: &mut Command, library: &Path) {
        if !self.preload {
            return;
        }
        let others = std::env::var_os("LD_PRELOAD");
        let preload = preload_value(others.as_deref(), library);
        command.env("LD_PRELOAD", preload).envs(self.variables.iter().copied());
    }
}

impl FromStr for Variant {
    type Err = BadVariant;

    fn from_str(name: &str) -> Result<Self, BadVariant> {
        let mut variables = Vec::new();
        for part in name.split('+') {
            variables.extend(match part {
                "remapped" => None,
                "hugetlb" => Some(("ELFREMAP_BACKEND", "hugetlb")),
                "thp" => Some(("ELFREMAP_BACKEND", "thp")),
                "rx" => Some(("ELFREMAP_MERGE", "rx")),
                "relro" => Some(("ELFREMAP_MERGE", "relro")),
                "rwx" => Some(("ELFREMAP_MERGE", "rwx")),
                "text" => Some(("ELFREMAP_SEGMENTS", "text")),
                "swap" => Some(("ELFREMAP_STRATEGY", "swap")),
                "move" => Some(("ELFREMAP_STRATEGY", "move")),
                _ => return Err(BadVariant(String::from(part))),
            });
        }
        let mut names: Vec<_> = variables.iter().map(|(name, _)| name).collect();
        names.sort_unstable();
        names.dedup();
        if names.len() < variables.len() {
            return Err(BadVariant(String::from(name)));
        }
        Ok(Self { name: String::from(name), preload: true, variables })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names() {
        let variant: Variant = "thp+rx".parse().unwrap();
        assert!(variant.preload);
        assert_eq!(variant.variables, [("ELFREMAP_BACKEND", "thp"), ("ELFREMAP_MERGE", "rx")]);
        assert_eq!("remapped".parse::<Variant>().unwrap().variables, []);
        for name in ["", "plain", "thp+", "thp+hugetlb", "rx,thp"] {
            assert!(name.parse::<Variant>().is_err(), "{name}");
        }
    }
}
