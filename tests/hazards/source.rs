//! The test programs' sources and the directives in their comments.
//!
//! A directive is a line `//# key: value` at the top of a program's main file:
//!
//! - `build: A,B x C,D x ...`: build every combination of the words of
//!   `words.rs`, one word from each list; several lines add up. A word `NAME=VALUE`
//!   with a name in capitals is an option of the preload.
//! - `exit: N`: the plain run must end with this status. Default 42.
//! - `expect: moved` (default): every block of 2 MiB that an independent count selects
//!   lies on a huge page, and no other; `parity`: the same output and protections,
//!   whatever is moved.
//! - `fill: text=N rodata=N relro=N data=N bss=N`: pages of fill, where the default of
//!   common/fill.S does not do; `fill: none`.
//! - `flags: ...`: more words for the compiler.
//! - `library: FILE`: a shared library that the program is linked with;
//!   `preload: FILE`: one that is preloaded after ours.
//! - `env: NAME=VALUE`: set in every run under the preload.
//! - `runs: few`: a tenth of the runs with randomised addresses that others get.
//! - `matrix: no`: used by a test of its own only.

use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::path::{Path, PathBuf};

/// What a program promises about its move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Expect {
    /// The blocks of the independent count, and no other.
    Moved,
    /// Parity alone.
    Parity,
}

/// A test program: its main file and what its directives say.
#[derive(Clone, Debug)]
pub(crate) struct Source {
    /// The directory's name.
    pub(crate) name: String,
    /// main.c, main.cpp or main.rs.
    pub(crate) main: PathBuf,
    /// One list of words per cell.
    pub(crate) cells: Vec<Vec<String>>,
    /// Status of the plain run.
    pub(crate) exit: i32,
    pub(crate) expect: Expect,
    /// Definitions for common/fill.S; `None`: no fill.
    pub(crate) fill: Option<Vec<String>>,
    pub(crate) flags: Vec<String>,
    pub(crate) libraries: Vec<PathBuf>,
    pub(crate) preloads: Vec<PathBuf>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) matrix: bool,
    pub(crate) few_runs: bool,
}

/// Where the programs are.
pub(crate) fn programs_dir() -> PathBuf {
    elfremap_tests::library::source_dir().join("programs")
}

/// All programs, by name.
pub(crate) fn discover() -> Result<Vec<Source>> {
    let mut sources = Vec::new();
    for entry in fs::read_dir(programs_dir())? {
        let directory = entry?.path();
        for main in ["main.c", "main.cpp", "main.rs"] {
            let main = directory.join(main);
            if main.is_file() {
                let source = Source::read(&directory, &main);
                sources.push(source.with_context(|| main.display().to_string())?);
            }
        }
    }
    sources.sort_by(|a, b| a.name.cmp(&b.name));
    ensure!(!sources.is_empty(), "no test programs");
    Ok(sources)
}

/// The program of that name.
pub(crate) fn named(name: &str) -> Result<Source> {
    let source = discover()?.into_iter().find(|s| s.name == name);
    source.with_context(|| format!("no test program {name}"))
}

impl Source {
    fn read(directory: &Path, main: &Path) -> Result<Self> {
        let name = directory.file_name().context("no name")?.to_string_lossy().into_owned();
        let mut source = Self {
            name,
            main: main.to_owned(),
            cells: Vec::new(),
            exit: 42,
            expect: Expect::Moved,
            fill: Some(Vec::new()),
            flags: Vec::new(),
            libraries: Vec::new(),
            preloads: Vec::new(),
            env: Vec::new(),
            matrix: true,
            few_runs: false,
        };
        let text = fs::read_to_string(main)?;
        for line in text.lines().filter_map(|l| l.strip_prefix("//# ")) {
            let (key, value) = line.split_once(": ").with_context(|| line.to_owned())?;
            let words = || value.split_whitespace().map(str::to_owned);
            let file = directory.join(value);
            match key {
                "build" => source.cells.extend(cells(value)),
                "exit" => source.exit = value.parse()?,
                "expect" => {
                    source.expect = match value {
                        "moved" => Expect::Moved,
                        "parity" => Expect::Parity,
                        _ => bail!("unknown expectation {value}"),
                    }
                }
                "fill" if value == "none" => source.fill = None,
                "fill" => {
                    let define = |word: String| {
                        let (class, pages) = word.split_once('=').context("class=pages")?;
                        Ok(format!("-D{}_PAGES={pages}", class.to_uppercase()))
                    };
                    source.fill = Some(words().map(define).collect::<Result<_>>()?);
                }
                "flags" => source.flags.extend(words()),
                "library" => source.libraries.push(file),
                "preload" => source.preloads.push(file),
                "env" => {
                    let (name, value) = value.split_once('=').context("NAME=VALUE")?;
                    source.env.push((name.to_owned(), value.to_owned()));
                }
                "runs" => source.few_runs = value == "few",
                "matrix" => source.matrix = value != "no",
                _ => bail!("unknown directive {key}"),
            }
        }
        if source.cells.is_empty() {
            source.cells = cells("pie");
        }
        Ok(source)
    }
}

/// The words of a cell that are options of the preload.
pub(crate) fn options(cell: &[String]) -> impl Iterator<Item = (String, String)> {
    let options = cell.iter().filter(|word| word.starts_with("ELFREMAP_"));
    options.filter_map(|word| word.split_once('=')).map(|(n, v)| (n.to_owned(), v.to_owned()))
}

/// `a,b x c,d` as [[a, c], [a, d], [b, c], [b, d]].
fn cells(text: &str) -> Vec<Vec<String>> {
    text.split(" x ").fold(vec![Vec::new()], |cells, list| {
        let extend = |cell: &Vec<String>, word: &str| {
            let mut cell = cell.clone();
            cell.push(word.trim().to_owned());
            cell
        };
        cells.iter().flat_map(|cell| list.split(',').map(move |word| extend(cell, word))).collect()
    })
}
