//! Builds the test programs, once per content: results stay under the target directory.

use crate::source::{Source, programs_dir};
use crate::words::{Patch, Word, meaning};
use anyhow::{Context, Result, ensure};
use elfremap_tests::library::cache_dir;
use elfremap_tests::outcome::Skip;
use goblin::elf::header::header64;
use goblin::elf::program_header::{PT_LOAD, program_header64};
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// A program of one cell, built.
#[derive(Clone, Debug)]
pub(crate) struct Built {
    pub(crate) binary: PathBuf,
    pub(crate) libraries: Vec<PathBuf>,
    pub(crate) preloads: Vec<PathBuf>,
}

/// Builds `source` for `cell`.
pub(crate) fn build(source: &Source, cell: &[String]) -> Result<Built> {
    for linker in ["gold", "lld", "mold"] {
        if cell.iter().any(|word| word == linker) && !is_in_path(&format!("ld.{linker}")) {
            return Err(Skip::because(format!(
                "needs ld.{linker}: run tests/install-packages.sh as root"
            )));
        }
    }
    let words: Vec<Word> = cell.iter().map(|w| meaning(w, cell)).collect::<Result<_>>()?;
    let words_of = |list: fn(&Word) -> &'static [&'static str]| {
        words.iter().flat_map(move |w| list(w).iter().map(|s| (*s).to_owned()))
    };
    let shared = |files: &[PathBuf]| files.iter().map(|f| library(f)).collect::<Result<_>>();
    let libraries: Vec<PathBuf> = shared(&source.libraries)?;
    let mut recipe = Recipe::new(driver(&source.main));
    recipe.arguments.extend(words_of(|w| w.link));
    if is_rust(&source.main) {
        recipe = Recipe::new("rustc");
        recipe
            .arguments
            .extend(["--edition=2024", "-Copt-level=1", "-Cdebuginfo=1"].map(str::to_owned));
        let pie = !cell.iter().any(|w| w == "no-pie");
        let model = if pie { "pie" } else { "static" };
        recipe.arguments.push(format!("-Crelocation-model={model}"));
        recipe.arguments.extend(words_of(|w| w.link).map(|w| format!("-Clink-arg={w}")));
        recipe.input(&source.main)?;
    } else {
        let compile: Vec<_> = source.flags.iter().cloned().chain(words_of(|w| w.compile)).collect();
        recipe.input(&object(&source.main, &compile)?)?;
    }
    if let Some(defines) = &source.fill {
        let fill = object(&programs_dir().join("common/fill.S"), defines)?;
        recipe.linker_input(&fill)?;
    }
    if !libraries.is_empty() {
        // Whether or not the program names one of their symbols.
        recipe.arguments.push("-Wl,--no-as-needed".to_owned());
    }
    for library in &libraries {
        recipe.linker_input(library)?;
        let directory = library.parent().context("no directory")?.display().to_string();
        recipe.arguments.push(format!("-Wl,-rpath,{directory}"));
    }
    for script in words.iter().filter_map(|w| w.script) {
        let own = source.main.with_file_name(script);
        let path = if own.is_file() { own } else { programs_dir().join("common").join(script) };
        recipe.also(&path)?;
        recipe.arguments.push(format!("-Wl,-T,{}", path.display()));
    }
    recipe.patches = words.iter().filter_map(|w| w.patch).collect();
    let directory = cache_dir("programs")?.join(format!("{}-{}", source.name, cell.join("-")));
    let binary = recipe.make(&directory, &source.name)?;
    Ok(Built { binary, libraries, preloads: shared(&source.preloads)? })
}

/// A shared library from one C file.
pub(crate) fn library(source: &Path) -> Result<PathBuf> {
    let mut recipe = Recipe::new(driver(source));
    recipe.arguments.extend(
        ["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Wno-unused-function", "-g"]
            .map(str::to_owned),
    );
    recipe.input(source)?;
    let stem = source.file_stem().context("no name")?.to_string_lossy().into_owned();
    let parent = source.parent().and_then(Path::file_name).context("no directory")?;
    let name = format!("{}-lib-{stem}", parent.to_string_lossy());
    let output = format!("lib{stem}.so");
    recipe.arguments.push(format!("-Wl,-soname,{output}"));
    recipe.make(&cache_dir("programs")?.join(name), &output)
}

/// programs/tools/launch.c.
pub(crate) fn launcher() -> Result<PathBuf> {
    tool(&programs_dir().join("tools/launch.c"), "gcc", &["-O1", "-Wall", "-Wextra"])
}

/// How many runs with randomised addresses each program gets.
pub(crate) fn runs() -> Result<u32> {
    match std::env::var("ELFREMAP_TEST_RUNS") {
        Ok(text) => text.parse().context("ELFREMAP_TEST_RUNS is not a number"),
        Err(_) => Ok(200),
    }
}

/// A program from one C file with just these words for the compiler driver.
pub(crate) fn tool(source: &Path, driver: &str, arguments: &[&str]) -> Result<PathBuf> {
    let mut recipe = Recipe::new(driver);
    recipe.arguments.extend(arguments.iter().map(|s| (*s).to_owned()));
    recipe.input(source)?;
    let stem = source.file_stem().context("no name")?.to_string_lossy().into_owned();
    let mut hasher = DefaultHasher::new();
    (driver, arguments).hash(&mut hasher);
    let name = format!("tool-{stem}-{:x}", hasher.finish());
    recipe.make(&cache_dir("programs")?.join(name), &stem)
}

fn is_in_path(name: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&path).any(|directory| directory.join(name).is_file())
}

fn is_rust(source: &Path) -> bool {
    source.extension().is_some_and(|e| e == "rs")
}

fn driver(source: &Path) -> &'static str {
    if source.extension().is_some_and(|e| e == "cpp") { "g++" } else { "gcc" }
}

/// The object of one source file.
fn object(source: &Path, flags: &[String]) -> Result<PathBuf> {
    let common = programs_dir().join("common");
    let mut recipe = Recipe::new(driver(source));
    recipe
        .arguments
        .extend(["-c", "-O1", "-g", "-Wall", "-Wextra", "-Wno-unused-function"].map(str::to_owned));
    recipe.arguments.push(format!("-I{}", common.display()));
    recipe.arguments.extend(flags.iter().cloned());
    recipe.input(source)?;
    recipe.also(&common.join("hazard.h"))?;
    let mut hasher = DefaultHasher::new();
    (source, flags).hash(&mut hasher);
    recipe.make(&cache_dir("objects")?, &format!("{:016x}.o", hasher.finish()))
}

/// A command that makes one file, and all that the file depends on.
struct Recipe {
    driver: String,
    arguments: Vec<String>,
    patches: Vec<Patch>,
    contents: DefaultHasher,
}

impl Recipe {
    fn new(driver: &str) -> Self {
        let mut contents = DefaultHasher::new();
        versions().hash(&mut contents);
        Self { driver: driver.to_owned(), arguments: Vec::new(), patches: Vec::new(), contents }
    }

    /// Takes the content of `path` into account.
    fn also(&mut self, path: &Path) -> Result<()> {
        let bytes = fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        bytes.hash(&mut self.contents);
        Ok(())
    }

    fn input(&mut self, path: &Path) -> Result<()> {
        self.also(path)?;
        self.arguments.push(path.display().to_string());
        Ok(())
    }

    /// An input for the linker, through rustc if need be.
    fn linker_input(&mut self, path: &Path) -> Result<()> {
        self.also(path)?;
        let prefix = if self.driver == "rustc" { "-Clink-arg=" } else { "" };
        self.arguments.push(format!("{prefix}{}", path.display()));
        Ok(())
    }

    /// Makes `directory`/`name` unless it is there from the same contents.
    fn make(mut self, directory: &Path, name: &str) -> Result<PathBuf> {
        (&self.driver, &self.arguments, &self.patches).hash(&mut self.contents);
        let stamp = format!("{:016x}", self.contents.finish());
        let (output, stamp_file) = (directory.join(name), directory.join(format!("{name}.stamp")));
        if output.is_file() && fs::read_to_string(&stamp_file).is_ok_and(|s| s == stamp) {
            return Ok(output);
        }
        fs::create_dir_all(directory)?;
        // Another test may make or use the same file: it appears all at once.
        let scratch = tempfile::tempdir_in(directory)?;
        let fresh = scratch.path().join(name);
        let made = Command::new(&self.driver)
            .args(&self.arguments)
            .arg("-o")
            .arg(&fresh)
            .env("LC_ALL", "C")
            .output()
            .with_context(|| format!("cannot run {}", self.driver))?;
        let messages = String::from_utf8_lossy(&made.stderr);
        ensure!(
            made.status.success(),
            "{} {} failed: {messages}",
            self.driver,
            self.arguments.join(" ")
        );
        for patch in &self.patches {
            patch.apply(&fresh)?;
        }
        fs::rename(&fresh, &output)?;
        fs::write(&stamp_file, stamp)?;
        Ok(output)
    }
}

/// What the compilers say that they are: another one makes other files.
fn versions() -> &'static str {
    static VERSIONS: OnceLock<String> = OnceLock::new();
    VERSIONS.get_or_init(|| {
        ["gcc", "ld.bfd", "ld.gold", "ld.lld", "rustc"]
            .iter()
            .filter_map(|tool| Command::new(tool).arg("--version").output().ok())
            .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
            .collect()
    })
}

impl Patch {
    fn apply(self, path: &Path) -> Result<()> {
        if self != Self::NoSections && self != Self::Truncate {
            return edit(path, |bytes| self.edit(bytes));
        }
        let stripped = Command::new("strip").arg("--strip-all").arg(path).status()?;
        ensure!(stripped.success(), "strip failed");
        edit(path, |bytes| self.edit(bytes))
    }

    fn edit(self, bytes: &mut Vec<u8>) -> Result<()> {
        use header64::Header;
        use program_header64::ProgramHeader;
        let header = *Header::from_bytes(
            bytes.first_chunk::<{ header64::SIZEOF_EHDR }>().context("no ELF header")?,
        );
        let start = usize::try_from(header.e_phoff)?;
        let size = size_of::<ProgramHeader>();
        let count = usize::from(header.e_phnum);
        let table = bytes.get_mut(start..start + size * count).context("no program headers")?;
        let mut end = 0;
        for entry in table.chunks_exact_mut(size) {
            let headers = ProgramHeader::from_bytes(entry, 1);
            let load = headers.first().context("no program header")?;
            if load.p_type != PT_LOAD {
                continue;
            }
            end = end.max(load.p_offset + load.p_filesz);
            if let Self::Align(align) = self {
                // p_align is the last of the structure's fields (elf(5)).
                entry[size - 8..].copy_from_slice(&align.to_le_bytes());
            }
        }
        if matches!(self, Self::NoSections | Self::Truncate) {
            // e_shoff, e_shnum and e_shstrndx (elf(5)).
            bytes[40..48].fill(0);
            bytes[60..64].fill(0);
        }
        if self == Self::Truncate {
            bytes.truncate(usize::try_from(end)?);
        }
        Ok(())
    }
}

/// Changes the file's content and keeps its mode.
fn edit(path: &Path, change: impl Fn(&mut Vec<u8>) -> Result<()>) -> Result<()> {
    let mode = fs::metadata(path)?.permissions().mode();
    let mut bytes = fs::read(path)?;
    change(&mut bytes)?;
    fs::write(path, bytes)?;
    fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
    Ok(())
}
