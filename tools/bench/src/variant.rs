//! The variants that are measured side by side: plain, a preload that moves
//! nothing, elfremap with its options, and rival libraries named by path.

use crate::generate;
use anyhow::{Context, Result, ensure};
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Name of the variant without any preload.
pub(crate) const PLAIN: &str = "plain";
/// Name of the variant whose preload moves nothing.
pub(crate) const CONTROL: &str = "control";
/// Name of the variant with libhugetlbfs.
pub(crate) const LIBHUGETLBFS: &str = "libhugetlbfs";

const CONTROL_SOURCE: &str = include_str!("../c/control.c");

/// A way to start a program.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Variant {
    pub name: String,
    /// Preload libraries, in the order of LD_PRELOAD.
    preload: Vec<PathBuf>,
    env: Vec<(String, String)>,
    /// Whether it is only worth measuring with huge pages in the pool.
    pub needs_pool: bool,
    /// Whether the control library goes along, as the clock.
    stamps: bool,
    /// Whether it is somebody else's library, which may fail.
    pub foreign: bool,
}

/// Makes the variants that share one control library.
#[derive(Clone, Debug)]
pub(crate) struct Variants {
    control: PathBuf,
    library: PathBuf,
    /// Copies of the libraries lie here: a build in the meantime does not change what is
    /// measured, and a root directory of its own has only to have this folder.
    work: PathBuf,
}

impl Variants {
    /// Builds the control library in `work`; takes a copy of `library`, libelfremap.so, there.
    pub(crate) fn new(library: &Path, work: &Path) -> Result<Self> {
        fs::create_dir_all(work).with_context(|| format!("cannot create {}", work.display()))?;
        let work = work.canonicalize()?;
        let copy = work.join("libelfremap.so");
        fs::copy(library, &copy).with_context(|| {
            format!(
                "cannot copy {}: build it with `cargo build --release -p elfremap-preload`",
                library.display()
            )
        })?;
        let source = work.join("control.c");
        let control = work.join("control.so");
        fs::write(&source, CONTROL_SOURCE)
            .with_context(|| format!("cannot write {}", source.display()))?;
        generate::compile(&["-O2", "-shared", "-fPIC"], &[&source], &control)?;
        Ok(Self { control, library: copy, work })
    }

    /// No preload at all.
    pub(crate) fn plain(&self) -> Variant {
        Variant {
            name: PLAIN.into(),
            preload: Vec::new(),
            env: Vec::new(),
            needs_pool: false,
            stamps: false,
            foreign: false,
        }
    }

    /// A preload that moves nothing.
    pub(crate) fn control(&self) -> Variant {
        Variant {
            name: CONTROL.into(),
            preload: vec![self.control.clone()],
            env: Vec::new(),
            needs_pool: false,
            stamps: true,
            foreign: false,
        }
    }

    /// elfremap with `options` in its environment, loaded behind the control.
    pub(crate) fn elfremap(
        &self,
        name: &str,
        options: &[(&str, &str)],
        needs_pool: bool,
    ) -> Variant {
        Variant {
            name: name.into(),
            preload: vec![self.control.clone(), self.library.clone()],
            env: options.iter().map(|&(k, v)| (k.into(), v.into())).collect(),
            needs_pool,
            stamps: true,
            foreign: false,
        }
    }

    /// A rival as `--rival` names it: `NAME=PATH[,ENV=VALUE...]`.
    pub(crate) fn rival(&self, text: &str) -> Result<Variant> {
        let mut parts = text.split(',');
        let (name, path) =
            parts.next().and_then(|first| first.split_once('=')).with_context(|| {
                format!("cannot read the rival `{text}`: not NAME=PATH[,ENV=VALUE...]")
            })?;
        ensure!(!name.is_empty(), "cannot read the rival `{text}`: the name is empty");
        ensure!(!name.contains('/'), "cannot read the rival `{text}`: a `/` in the name");
        let path = Path::new(path)
            .canonicalize()
            .with_context(|| format!("cannot find the library of the rival {name}: {path}"))?;
        let env = parts
            .map(|pair| pair.split_once('=').map(|(k, v)| (k.to_owned(), v.to_owned())))
            .collect::<Option<_>>()
            .with_context(|| format!("cannot read the environment of the rival `{text}`"))?;
        Ok(Variant {
            name: name.into(),
            preload: vec![self.control.clone(), self.copy(name, &path)?],
            env,
            needs_pool: false,
            stamps: true,
            foreign: true,
        })
    }

    /// libhugetlbfs, told to move all segments of any program, where it is installed: the
    /// first library that did so. It moves programs with at most three segments.
    pub(crate) fn libhugetlbfs(&self) -> Result<Option<Variant>> {
        let triplet = format!("/usr/lib/{}-linux-gnu", std::env::consts::ARCH);
        let found = [triplet.as_str(), "/usr/lib64", "/usr/lib"]
            .iter()
            .flat_map(|dir| {
                ["libhugetlbfs.so.0", "libhugetlbfs.so"].map(|n| Path::new(dir).join(n))
            })
            .find(|path| path.exists());
        let Some(path) = found else { return Ok(None) };
        let env = [("HUGETLB_ELFMAP", "RW"), ("HUGETLB_FORCE_ELFMAP", "yes")];
        Ok(Some(Variant {
            name: LIBHUGETLBFS.into(),
            preload: vec![self.control.clone(), self.copy(LIBHUGETLBFS, &path)?],
            env: env.map(|(k, v)| (k.into(), v.into())).into(),
            needs_pool: true,
            stamps: true,
            foreign: true,
        }))
    }

    /// In a folder of the variant's own: two libraries may have the same file name, a build of
    /// elfremap and another one of it, for example.
    fn copy(&self, variant: &str, library: &Path) -> Result<PathBuf> {
        let folder = self.work.join(format!("library-{variant}"));
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot create {}", folder.display()))?;
        let copy = folder.join(library.file_name().unwrap_or_default());
        fs::copy(library, &copy)
            .with_context(|| format!("cannot copy {} to {}", library.display(), copy.display()))?;
        Ok(copy)
    }
}

impl Variant {
    /// Whether [`crate::runner::Run::ready_us`] is there.
    pub(crate) const fn stamps(&self) -> bool {
        self.stamps
    }

    /// The same without the control library as a clock: just what a user would start.
    pub(crate) fn bare(mut self) -> Self {
        if self.name != CONTROL && self.stamps {
            self.preload.remove(0);
        }
        self.stamps = false;
        self
    }

    /// Makes `command` start its program this way: nothing of the caller's own preloads
    /// and options is left in its environment.
    pub(crate) fn apply(&self, command: &mut Command) {
        for (name, _) in std::env::vars_os() {
            if name == "LD_PRELOAD" || name.to_string_lossy().starts_with("ELFREMAP") {
                command.env_remove(name);
            }
        }
        if !self.preload.is_empty() {
            let mut list = OsString::new();
            for path in &self.preload {
                if !list.is_empty() {
                    list.push(":");
                }
                list.push(path);
            }
            command.env("LD_PRELOAD", list);
        }
        command.envs(self.env.iter().map(|(k, v)| (k, v)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn variants(work: &Path) -> Variants {
        Variants { control: "/c.so".into(), library: "/l.so".into(), work: work.into() }
    }

    #[test]
    fn a_rival_is_loaded_behind_the_control_with_its_environment() {
        let work = std::env::temp_dir().join(format!("elfremap-rival-{}", std::process::id()));
        fs::create_dir(&work).unwrap();
        let library = work.join("given.so");
        fs::write(&library, "x").unwrap();
        let text = format!("other={},A=1,B=x=y", library.display());
        let copies = work.join("copies");
        fs::create_dir(&copies).unwrap();
        let rival = variants(&copies).rival(&text).unwrap();
        let copy = copies.join("library-other/given.so");
        assert_eq!(rival.preload, [Path::new("/c.so"), &copy]);
        let second = work.join("second");
        fs::create_dir(&second).unwrap();
        fs::write(second.join("given.so"), "y").unwrap();
        variants(&copies).rival(&format!("second={}/given.so", second.display())).unwrap();
        assert_eq!(fs::read(&copy).unwrap(), b"x", "the second has the same file name");
        assert_eq!(rival.env, [("A".into(), "1".into()), ("B".into(), "x=y".into())]);
        for wrong in
            ["other", "=/dev/null", "a/b=/dev/null", "other=/no/such/file", "other=/dev/null,A"]
        {
            assert!(variants(&copies).rival(wrong).is_err(), "{wrong}");
        }
        fs::remove_dir_all(&work).unwrap();
    }
}
