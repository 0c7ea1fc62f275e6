//! Builds the product, the guest's init and the test programs for an architecture, and
//! packs them up.

use crate::archive::Archive;
use crate::machine::Arch;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A test program of `tests/programs` or of this tool's own, and how it is linked here.
struct Program {
    directory: &'static str,
    /// What is appended to the directory's name.
    cell: &'static str,
    compile: &'static [&'static str],
    link: &'static [&'static str],
    /// Only on this architecture.
    only: Option<Arch>,
}

const PIE: &[&str] = &["-fPIE"];
const NO_PIE: &[&str] = &["-fno-pie"];

const fn program(
    directory: &'static str,
    cell: &'static str,
    compile: &'static [&'static str],
    link: &'static [&'static str],
) -> Program {
    Program { directory, cell, compile, link, only: None }
}

const PROGRAMS: &[Program] = &[
    // The linker's default layout: neighbours within one huge page.
    program("plain", "", PIE, &["-pie"]),
    program("plain", "-page2m", PIE, &["-pie", "-Wl,-z,max-page-size=0x200000"]),
    program("plain", "-fixed", NO_PIE, &["-no-pie"]),
    program("layout", "-page2m", PIE, &["-pie", "-Wl,-z,max-page-size=0x200000,-z,separate-code"]),
    program("rights", "-page2m", PIE, &["-pie", "-Wl,-z,max-page-size=0x200000,-z,now"]),
    program("fork", "-page2m", PIE, &["-pie", "-Wl,-z,max-page-size=0x200000"]),
    program("sbrk", "-fixed", &["-fno-pie", "-DBSS=1900*1024"], &["-no-pie"]),
    program(
        "gigantic",
        "",
        &["-fPIE", "-fcommon"],
        &["-pie", "-Wl,-z,max-page-size=0x40000000,-z,norelro,-z,noseparate-code"],
    ),
    Program {
        directory: "plain",
        cell: "-page32m",
        compile: PIE,
        link: &["-pie", "-Wl,-z,max-page-size=0x2000000,-z,separate-code"],
        only: Some(Arch::Aarch64),
    },
    Program {
        directory: "bti",
        cell: "-page2m",
        compile: &["-fPIE", "-mbranch-protection=standard"],
        link: &["-nostartfiles", "-pie", "-Wl,-z,max-page-size=0x200000"],
        only: Some(Arch::Aarch64),
    },
];

/// More programs of `tests/programs`, built as their own `//#` lines say: those that need
/// nothing of a Debian system.
const HAZARDS: &[&str] = &[
    "crash",
    "crowded",
    "early-bss",
    "earlyheap",
    "exec",
    "guest",
    "interpose",
    "page-tricks",
    "runtime",
    "sealed",
    "self-remap",
    "signals",
    "stacks",
    "threads",
    "workers",
];

const LIBRARIES: &[&str] = &["libc.so.6", "libm.so.6", "libgcc_s.so.1", "libstdc++.so.6"];

/// Where things are and go.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// The project's root.
    pub(crate) project: PathBuf,
    /// Results of this tool.
    pub(crate) output: PathBuf,
}

/// Builds all and returns the path of the guest's root file system.
pub(crate) fn build(places: &Places, arch: Arch) -> Result<PathBuf> {
    let binaries = cargo(places, arch)?;
    let directory = places.output.join(arch.name());
    fs::create_dir_all(&directory)?;
    let mut archive = Archive::default();
    for path in [
        "dev", "proc", "sys", "tmp", "run", "lib", "lib64", "elfremap", "programs", "hazards",
        "nothing",
    ] {
        archive.directory(path);
    }
    archive.device("dev/console", 5, 1);
    archive.file("init", &binaries.join("elfremap-guest"))?;
    for name in ["libelfremap.so", "elfremap", "elfremap-check"] {
        archive.file(&format!("elfremap/{name}"), &binaries.join(name))?;
    }
    for name in LIBRARIES {
        archive.file(&format!("lib/{name}"), &library(places, arch, name)?)?;
    }
    let loader = arch.loader();
    let name = Path::new(loader).file_name().context("odd loader")?.to_string_lossy();
    archive.file(loader, &library(places, arch, &name)?)?;
    for program in PROGRAMS.iter().filter(|p| p.only.is_none_or(|only| only == arch)) {
        let name = format!("{}{}", program.directory, program.cell);
        let path = compile(places, arch, program, &directory.join(&name))?;
        archive.file(&format!("programs/{name}"), &path)?;
    }
    for name in HAZARDS {
        for path in hazard(places, arch, name, &directory)? {
            let file = path.file_name().context("odd path")?.to_string_lossy().into_owned();
            archive.file(&format!("hazards/{file}"), &path)?;
        }
    }
    let path = directory.join("root.cpio");
    fs::write(&path, archive.finish())?;
    Ok(path)
}

/// Builds the Rust parts; returns the directory with the results.
fn cargo(places: &Places, arch: Arch) -> Result<PathBuf> {
    let target = target(arch);
    for packages in [&["elfremap-preload"][..], &["elfremap-tools", "elfremap-machines"]] {
        let mut command = cargo_command(places, arch, "build")?;
        packages.iter().for_each(|package| {
            command.args(["--package", package]);
        });
        let status = command.status().context("cannot run cargo")?;
        ensure!(status.success(), "cargo build for {target} failed");
    }
    Ok(build_directory(places).join(target).join("release"))
}

/// Type-checks the whole workspace for the architecture, tests and benchmarks too.
pub(crate) fn check_workspace(places: &Places, arch: Arch) -> Result<()> {
    let mut command = cargo_command(places, arch, "check")?;
    // The preload is no_std and has been built by itself.
    command.args(["--workspace", "--exclude", "elfremap-preload", "--all-targets"]);
    let status = command.status().context("cannot run cargo")?;
    ensure!(status.success(), "the workspace does not compile for {}", target(arch));
    Ok(())
}

fn target(arch: Arch) -> String {
    format!("{}-unknown-linux-gnu", arch.name())
}

/// Compilers of several versions share no results: a directory of its own.
fn build_directory(places: &Places) -> PathBuf {
    places.output.join("build")
}

/// Cargo for the architecture.
fn cargo_command(places: &Places, arch: Arch, subcommand: &str) -> Result<Command> {
    let target = target(arch);
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(&places.project).args([subcommand, "--locked", "--release", "--quiet"]);
    command.args(["--target", &target]).arg("--target-dir").arg(build_directory(places));
    // The same code as in a release, sooner: no optimisation across crates.
    command.env("CARGO_PROFILE_RELEASE_LTO", "off");
    command.env("CARGO_PROFILE_RELEASE_CODEGEN_UNITS", "16");
    command.env("CARGO_PROFILE_RELEASE_DEBUG", "0");
    if !arch.is_native() {
        let variable = target.to_uppercase().replace('-', "_");
        let linker = arch.compiler(&places.project)?;
        command.env(format!("CARGO_TARGET_{variable}_LINKER"), linker);
        if let Some(compiler) = compiler_for(&target)? {
            command.env("RUSTC", compiler);
        }
    }
    Ok(command)
}

/// The Rust compiler that has the standard library for `target`: `None` for the usual
/// one, else Debian's.
fn compiler_for(target: &str) -> Result<Option<&'static str>> {
    const DEBIAN: &str = "/usr/bin/rustc";
    for compiler in ["rustc", DEBIAN] {
        let output =
            Command::new(compiler).args(["--print", "target-libdir", "--target", target]).output();
        let Ok(output) = output else { continue };
        if Path::new(String::from_utf8_lossy(&output.stdout).trim()).is_dir() {
            return Ok((compiler == DEBIAN).then_some(DEBIAN));
        }
    }
    anyhow::bail!("no Rust compiler has {target}; try: tools/kernels/install-packages.sh")
}

/// The path of a shared library of the architecture.
fn library(places: &Places, arch: Arch, name: &str) -> Result<PathBuf> {
    let compiler = arch.compiler(&places.project)?;
    // The cross libraries lie where Debian's packages put them; a foreign library of
    // the same name that is installed for itself would do as well.
    let cross = PathBuf::from(format!("/usr/{}-linux-gnu/lib", arch.name())).join(name);
    if !arch.is_native() && cross.is_file() {
        return Ok(cross);
    }
    let output = Command::new(&compiler).arg(format!("-print-file-name={name}")).output();
    let output = output.with_context(|| format!("cannot run {}", compiler.display()))?;
    let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
    ensure!(path.is_absolute(), "the compiler for {} has no {name}", arch.name());
    Ok(path)
}

fn compile(places: &Places, arch: Arch, program: &Program, to: &Path) -> Result<PathBuf> {
    let programs = places.project.join("tests/programs");
    let own = places.project.join("tools/kernels/programs");
    let directory = [&programs, &own].map(|top| top.join(program.directory));
    let directory = directory.into_iter().find(|path| path.is_dir()).context("no such program")?;
    let main = main_file(&directory)?;
    let mut arguments: Vec<String> = program.compile.iter().map(|&word| word.to_owned()).collect();
    arguments.extend(fill_sizes(&main)?);
    arguments.push(main.display().to_string());
    arguments.push(programs.join("common/fill.S").display().to_string());
    arguments.extend(program.link.iter().map(|&word| word.to_owned()));
    run_compiler(places, arch, &main, &arguments, to)?;
    Ok(to.to_owned())
}

fn main_file(directory: &Path) -> Result<PathBuf> {
    let main = ["main.c", "main.cpp"].map(|name| directory.join(name));
    let main = main.into_iter().find(|path| path.is_file());
    main.with_context(|| format!("no main file in {}", directory.display()))
}

fn run_compiler(
    places: &Places,
    arch: Arch,
    main: &Path,
    arguments: &[String],
    to: &Path,
) -> Result<()> {
    let is_cplusplus = main.extension().is_some_and(|e| e == "cpp");
    let compiler = arch.compiler(&places.project)?;
    let status = Command::new(&compiler)
        .args(["-O1", "-g", "-Wno-unused-function", "-Wno-array-bounds", "-I"])
        .arg(places.project.join("tests/programs/common"))
        .args(arguments)
        .args(if is_cplusplus { arch.cplusplus() } else { &[] })
        .arg("-o")
        .arg(to)
        .status()
        .with_context(|| format!("cannot run {}", compiler.display()))?;
    ensure!(status.success(), "cannot build {} for {}", main.display(), arch.name());
    Ok(())
}

/// A hazard program and its libraries. Of the layouts that its `//# build:` line names the
/// first is taken, and the compiler's own linker.
fn hazard(places: &Places, arch: Arch, name: &str, to: &Path) -> Result<Vec<PathBuf>> {
    let directory = places.project.join("tests/programs").join(name);
    let main = main_file(&directory)?;
    let text = fs::read_to_string(&main)?;
    let value = |key: &str| {
        let prefix = format!("//# {key}: ");
        text.lines().find_map(|line| line.strip_prefix(&prefix)).unwrap_or_default().to_owned()
    };
    let mut made = Vec::new();
    let mut arguments: Vec<String> = value("flags").split_whitespace().map(str::to_owned).collect();
    let build = value("build");
    let is_pie = build.starts_with("pie");
    arguments.extend(
        (if is_pie { ["-fPIE", "-pie"] } else { ["-fno-pie", "-no-pie"] }).map(str::to_owned),
    );
    if build.contains("rdynamic") {
        arguments.push("-rdynamic".into());
    }
    arguments.push(main.display().to_string());
    if value("fill") != "none" {
        arguments.extend(fill_sizes(&main)?);
        arguments.push(places.project.join("tests/programs/common/fill.S").display().to_string());
    }
    for library in value("library").split_whitespace() {
        let source = directory.join(library);
        let stem = source.file_stem().context("no name")?.to_string_lossy().into_owned();
        let path = to.join(format!("lib{stem}.so"));
        let words = ["-shared", "-fPIC", &format!("-Wl,-soname,lib{stem}.so")].map(str::to_owned);
        let words = [&words[..], &[source.display().to_string()]].concat();
        run_compiler(places, arch, &source, &words, &path)?;
        // Whether or not the program names one of its symbols.
        arguments.extend(["-Wl,--no-as-needed".into(), path.display().to_string()]);
        made.push(path);
    }
    arguments.push("-Wl,-rpath,$ORIGIN".into());
    let path = to.join(name);
    run_compiler(places, arch, &main, &arguments, &path)?;
    made.push(path);
    Ok(made)
}

/// The definitions for fill.S that a program's `//# fill:` line asks for.
fn fill_sizes(main: &Path) -> Result<Vec<String>> {
    let text = fs::read_to_string(main)?;
    let line = text.lines().find_map(|line| line.strip_prefix("//# fill: ")).unwrap_or_default();
    let sizes = line.split_whitespace().filter_map(|word| word.split_once('='));
    Ok(sizes.map(|(class, pages)| format!("-D{}_PAGES={pages}", class.to_uppercase())).collect())
}
