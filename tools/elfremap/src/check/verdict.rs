//! Whether the preload can do anything for a program.

use std::path::Path;

use elfremap::plan::Refusal;
use elfremap::policy::Merge;

use super::{Analysis, Impossible, LEVELS, mb};
use crate::elf::{FileSource, Image, Kind, machine_name};

/// The C library behind a program interpreter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Libc {
    /// glibc, which the preload is built for.
    Glibc,
    /// musl.
    Musl,
    /// Something else.
    Unknown,
}

impl Libc {
    /// By the name of the interpreter.
    #[must_use]
    pub fn of(interpreter: &str) -> Self {
        let name = interpreter.rsplit('/').next().unwrap_or_default();
        if name.starts_with("ld-musl-") {
            Self::Musl
        } else if name.starts_with("ld-linux")
            || name.starts_with("ld64.so")
            || name.starts_with("ld-2.")
        {
            Self::Glibc
        } else {
            Self::Unknown
        }
    }
}

/// Why a program is started in secure mode, in which the loader ignores LD_PRELOAD
/// (ld.so(8)).
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Secure {
    /// The set-user-ID bit.
    pub setuid: bool,
    /// The set-group-ID bit, with permission to execute for the group.
    pub setgid: bool,
    /// File capabilities.
    pub capabilities: bool,
}

impl Secure {
    /// Of an open file.
    #[must_use]
    pub fn of(file: &FileSource) -> Self {
        Self::new(file.mode(), file.has_attribute(c"security.capability"))
    }

    /// From the mode bits and whether there is a `security.capability` attribute.
    #[must_use]
    pub const fn new(mode: u32, capabilities: bool) -> Self {
        let setgid = mode & libc::S_ISGID != 0 && mode & libc::S_IXGRP != 0;
        Self { setuid: mode & libc::S_ISUID != 0, setgid, capabilities }
    }

    /// In words; `None` for an ordinary program.
    #[must_use]
    pub fn describe(self) -> Option<&'static str> {
        match self {
            Self { setuid: true, .. } => Some("setuid"),
            Self { setgid: true, .. } => Some("setgid"),
            Self { capabilities: true, .. } => Some("with file capabilities"),
            _ => None,
        }
    }
}

/// Why a program cannot be remapped.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Unfit {
    /// Not a program at all.
    NotProgram(Kind),
    /// For another kind of machine.
    Foreign(String),
    /// No loader that could preload anything.
    Static(Kind),
    /// Its loader is not on this machine.
    LoaderMissing(String),
    /// Its loader is not glibc's.
    OtherLibc(Libc, String),
    /// The loader ignores LD_PRELOAD.
    Secure(Secure),
    /// The sanitizer in this library refuses to start behind a preload.
    Sanitizer(String),
    /// The planner cannot take it.
    Impossible(Impossible),
    /// There is nothing to gain.
    Refused {
        /// Why.
        refusal: Refusal,
        /// The shared object with the most text, and its bytes, when that is more than
        /// the program has and worth a huge page.
        elsewhere: Option<(String, u64)>,
        /// The lowest merge level without writable code at which something moves.
        level: Option<Merge>,
    },
}

impl Unfit {
    /// A stable code for machines.
    #[must_use]
    pub const fn code(&self) -> &'static str {
        match self {
            Self::NotProgram(_) => "not-a-program",
            Self::Foreign(_) => "foreign-machine",
            Self::Static(_) => "static",
            Self::LoaderMissing(_) => "loader-missing",
            Self::OtherLibc(Libc::Musl, _) => "musl",
            Self::OtherLibc(..) => "other-loader",
            Self::Secure(_) => "secure-mode",
            Self::Sanitizer(_) => "sanitizer",
            Self::Impossible(_) => "too-large",
            Self::Refused { refusal, .. } => refusal.code(),
        }
    }

    /// In words.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            Self::NotProgram(Kind::SharedObject) => {
                "a shared object, which moves only with the program that loads it".into()
            }
            Self::NotProgram(kind) => format!("a {}, not a program", kind.describe()),
            Self::Foreign(what) => what.clone(),
            Self::Static(kind) => {
                format!("a {}: there is no loader that could preload anything", kind.describe())
            }
            Self::LoaderMissing(path) => format!("its loader {path} is not on this machine"),
            Self::OtherLibc(Libc::Musl, path) => {
                format!("its loader {path} is musl's, and the preload needs glibc")
            }
            Self::OtherLibc(_, path) => {
                format!("its loader {path} is not glibc's, which the preload needs")
            }
            Self::Secure(secure) => format!(
                "{} program: it runs in secure mode, in which the loader ignores LD_PRELOAD",
                secure.describe().unwrap_or_default()
            ),
            Self::Sanitizer(library) => {
                format!("AddressSanitizer ({library}) refuses to start behind a preload")
            }
            Self::Impossible(cause) => cause.to_string(),
            Self::Refused { refusal, elsewhere, level } => {
                let mut text = refusal.to_string();
                if let Some((library, bytes)) = elsewhere {
                    text += &format!(" (most code in {library}, {} MB)", mb(*bytes));
                }
                if let Some(level) = level {
                    text += &format!("; more moves with --merge {level}");
                }
                text
            }
        }
    }
}

/// What keeps the preload from working at all, by the file's headers alone; `None`
/// when it can load.
#[must_use]
pub fn obstacle(image: &Image, secure: Secure) -> Option<Unfit> {
    obstacle_on(image, secure, false)
}

/// The same for a machine of the program's own kind (`abroad`) or for this one.
fn obstacle_on(image: &Image, secure: Secure, abroad: bool) -> Option<Unfit> {
    if matches!(image.kind, Kind::Object | Kind::Core | Kind::Other(_)) {
        return Some(Unfit::NotProgram(image.kind));
    }
    if !abroad && let Some(foreign) = foreign(image) {
        return Some(Unfit::Foreign(foreign));
    }
    match image.kind {
        Kind::Static | Kind::StaticPie => return Some(Unfit::Static(image.kind)),
        Kind::SharedObject => return Some(Unfit::NotProgram(image.kind)),
        _ => {}
    }
    if let Some(interpreter) = &image.interpreter {
        match Libc::of(interpreter) {
            Libc::Glibc if !abroad && !Path::new(interpreter).exists() => {
                return Some(Unfit::LoaderMissing(interpreter.clone()));
            }
            Libc::Glibc => {}
            other => return Some(Unfit::OtherLibc(other, interpreter.clone())),
        }
    }
    if secure.describe().is_some() {
        return Some(Unfit::Secure(secure));
    }
    asan_library(image).map(Unfit::Sanitizer)
}

/// The verdict over everything that was found; `None` when the program is suitable.
pub(super) fn unfit(analysis: &Analysis) -> Option<Unfit> {
    let image = &analysis.image;
    if let Some(obstacle) = obstacle_on(image, analysis.secure, analysis.abroad) {
        return Some(obstacle);
    }
    match analysis.chosen() {
        Err(cause) => Some(Unfit::Impossible(*cause)),
        Ok(estimate) => {
            let refusal = estimate.refusal?;
            let own = image.text_bytes();
            let largest = analysis.dependencies.iter().max_by_key(|d| d.text_bytes);
            let elsewhere = largest.filter(|d| d.text_bytes > own.max(estimate.block));
            let levels = LEVELS.iter().zip(analysis.estimates.iter().flatten());
            let level = levels.filter(|(level, _)| **level < Merge::Rwx);
            Some(Unfit::Refused {
                refusal,
                elsewhere: elsewhere.map(|d| (d.name.clone(), d.text_bytes)),
                level: level.into_iter().find(|(_, e)| e.refusal.is_none()).map(|(l, _)| *l),
            })
        }
    }
}

/// What is foreign about a file.
fn foreign(image: &Image) -> Option<String> {
    if image.is_native() {
        return None;
    }
    let machine = machine_name(image.machine, image.class);
    let here = if cfg!(target_arch = "aarch64") { "arm64" } else { "x86-64" };
    if machine == here {
        return Some(format!("a {machine} program of another byte order"));
    }
    Some(format!("a program for {machine}, and this machine is {here}"))
}

/// The library of AddressSanitizer, which must come first and ends the program when
/// it does not. The other sanitizers do not mind, and neither does a runtime that is
/// linked into the program.
fn asan_library(image: &Image) -> Option<String> {
    let needed = image.dynamic.as_ref().map(|dynamic| &dynamic.needed)?;
    let is_asan = |name: &&String| name.contains("libasan.so") || name.contains("clang_rt.asan");
    needed.iter().find(is_asan).cloned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loaders() {
        for (path, libc) in [
            ("/lib64/ld-linux-x86-64.so.2", Libc::Glibc),
            ("/nix/store/x-glibc-2.38/lib/ld-linux-x86-64.so.2", Libc::Glibc),
            ("/lib/ld-linux-aarch64.so.1", Libc::Glibc),
            ("/lib/ld-musl-x86_64.so.1", Libc::Musl),
            ("/system/bin/linker64", Libc::Unknown),
            ("", Libc::Unknown),
        ] {
            assert_eq!(Libc::of(path), libc, "{path}");
        }
    }

    #[test]
    fn secure_mode() {
        assert_eq!(Secure::new(0o100_755, false).describe(), None);
        assert_eq!(Secure::new(0o104_755, false).describe(), Some("setuid"));
        assert_eq!(Secure::new(0o102_755, false).describe(), Some("setgid"));
        // Without permission to execute the bit means mandatory locking.
        assert_eq!(Secure::new(0o102_644, false).describe(), None);
        assert!(Secure::new(0o100_755, true).describe().is_some());
    }
}
