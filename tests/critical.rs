//! Reads the built preload library: its critical section must not leave itself, and
//! the library must bring nothing into a program that the program did not ask for.

use anyhow::{Context, Result, bail, ensure};
use elfremap::range::Range;
use elfremap_tests::library::source_dir;
use elfremap_tests::outcome::trial;
use goblin::elf::program_header::{PF_W, PF_X, PT_GNU_STACK, PT_LOAD, PT_TLS};
use goblin::elf::{Elf, dynamic, sym};
use iced_x86::{
    Code, Decoder, DecoderOptions, FlowControl, Formatter, Instruction, IntelFormatter, Mnemonic,
    OpKind, Register,
};
use libtest_mimic::Arguments;
use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The section of the code that runs while the program's segments are away.
const SECTION: &str = "elfremap_critical";

/// All that the library may export.
const EXPORTS: [&str; 15] = [
    "elfremap_report",
    // What it wraps.
    "__register_atfork",
    "_Fork",
    "clone",
    "fork",
    "madvise",
    "mlock",
    "mlock2",
    "mmap",
    "mmap64",
    "mprotect",
    "mremap",
    "munmap",
    "pkey_mprotect",
    "posix_madvise",
];

/// The libraries that it may need.
const NEEDED: [&str; 2] = ["libc.so.6", "ld-linux-x86-64.so.2"];

/// The oldest C library that it promises to run with (2012; CentOS 7 has it).
const GLIBC: (u32, u32) = (2, 17);

fn main() {
    let arguments = Arguments::from_args();
    let mut trials = vec![trial("checker-finds-planted-violations", planted)];
    for profile in ["debug", "release"] {
        trials.push(trial(format!("{profile}::critical-section"), move || {
            let bytes = fs::read(built(profile)?)?;
            let found = violations(&bytes)?;
            ensure!(found.is_empty(), "{}", found.join("\n"));
            Ok(())
        }));
        trials.push(trial(format!("{profile}::guest-manners"), move || {
            manners(&fs::read(built(profile)?)?)
        }));
    }
    libtest_mimic::run(&arguments, trials).exit();
}

/// Builds the library in `profile` and says where it is.
fn built(profile: &str) -> Result<PathBuf> {
    let workspace = source_dir().parent().context("no workspace")?;
    let mut cargo = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    cargo.args(["build", "--quiet", "--package", "elfremap-preload"]).current_dir(workspace);
    if profile == "release" {
        cargo.arg("--release");
    }
    ensure!(cargo.status()?.success(), "cannot build the {profile} library");
    let target = elfremap_tests::library::profile_dir()?;
    Ok(target.parent().context("no target directory")?.join(profile).join("libelfremap.so"))
}

/// Every instruction of the critical section that could leave it, or that depends on
/// memory which another part of the process may change or take away.
fn violations(bytes: &[u8]) -> Result<Vec<String>> {
    let elf = Elf::parse(bytes)?;
    let section = elf
        .section_headers
        .iter()
        .find(|s| elf.shdr_strtab.get_at(s.sh_name) == Some(SECTION))
        .with_context(|| format!("no section {SECTION}"))?;
    let range = Range::with_len(section.sh_addr, section.sh_size).context("section wraps")?;
    ensure!(!range.is_empty(), "section {SECTION} is empty");
    let start = usize::try_from(section.sh_offset)?;
    let code = bytes
        .get(start..start + usize::try_from(section.sh_size)?)
        .context("section outside of the file")?;
    let writable: Vec<Range> = elf
        .program_headers
        .iter()
        .filter(|h| h.p_type == PT_LOAD && h.p_flags & PF_W != 0)
        .filter_map(|h| Range::with_len(h.p_vaddr, h.p_memsz))
        .collect();

    let decoder = Decoder::with_ip(64, code, range.start(), DecoderOptions::NONE);
    let instructions: Vec<Instruction> = decoder.into_iter().collect();
    let starts: BTreeSet<u64> = instructions.iter().map(Instruction::ip).collect();
    let mut found = Vec::new();
    for instruction in &instructions {
        if let Some(fault) = fault(instruction, range, &starts, &writable) {
            let mut text = String::new();
            IntelFormatter::new().format(instruction, &mut text);
            found.push(format!("{:#x}: {text}: {fault}", instruction.ip()));
        }
    }
    // Falling off the end is leaving, too.
    let last = instructions.last().context("no instruction")?;
    let ends = matches!(
        last.flow_control(),
        FlowControl::Return
            | FlowControl::UnconditionalBranch
            | FlowControl::IndirectBranch
            | FlowControl::Exception
    );
    if !ends && last.mnemonic() != Mnemonic::Int3 && last.mnemonic() != Mnemonic::Nop {
        found.push(format!("{:#x}: the section's last instruction falls through", last.ip()));
    }
    for relocation in elf.dynrelas.iter().chain(elf.dynrels.iter()).chain(elf.pltrelocs.iter()) {
        if range.contains(relocation.r_offset) {
            found.push(format!("{:#x}: relocated when loaded", relocation.r_offset));
        }
    }
    Ok(found)
}

fn fault(
    instruction: &Instruction,
    section: Range,
    starts: &BTreeSet<u64>,
    writable: &[Range],
) -> Option<&'static str> {
    if instruction.is_invalid() {
        return Some("not an instruction");
    }
    match instruction.flow_control() {
        FlowControl::Next | FlowControl::Return | FlowControl::Exception => {}
        FlowControl::Interrupt if instruction.mnemonic() == Mnemonic::Int3 => {}
        // A system call comes back to the next instruction.
        FlowControl::Call if instruction.code() == Code::Syscall => {}
        FlowControl::Call => return Some("a call"),
        FlowControl::IndirectCall => return Some("an indirect call"),
        FlowControl::IndirectBranch => return Some("an indirect jump"),
        FlowControl::UnconditionalBranch | FlowControl::ConditionalBranch => {
            let target = instruction.near_branch_target();
            if !section.contains(target) {
                return Some("a jump out of the section");
            }
            if !starts.contains(&target) {
                return Some("a jump into the middle of an instruction");
            }
        }
        FlowControl::Interrupt | FlowControl::XbeginXabortXend => return Some("not expected here"),
    }
    if (0..instruction.op_count()).any(|i| instruction.op_kind(i) == OpKind::Memory) {
        if matches!(instruction.memory_segment(), Register::FS | Register::GS) {
            return Some("thread-local memory");
        }
        if instruction.is_ip_rel_memory_operand() {
            let address = instruction.ip_rel_memory_address();
            if writable.iter().any(|r| r.contains(address)) {
                return Some("refers to writable memory of the library");
            }
            if !section.contains(address) && instruction.mnemonic() != Mnemonic::Lea {
                let written = instruction.op0_kind() == OpKind::Memory
                    && !matches!(
                        instruction.mnemonic(),
                        Mnemonic::Cmp | Mnemonic::Test | Mnemonic::Push
                    );
                return written.then_some("writes outside of the section");
            }
        }
    }
    None
}

/// What the library brings into a program.
fn manners(bytes: &[u8]) -> Result<()> {
    let elf = Elf::parse(bytes)?;
    let exported: Vec<&str> = elf
        .dynsyms
        .iter()
        .filter(|s| s.st_shndx != 0 && s.st_bind() != sym::STB_LOCAL)
        .filter_map(|s| elf.dynstrtab.get_at(s.st_name))
        .filter(|name| !EXPORTS.contains(name))
        .collect();
    ensure!(exported.is_empty(), "exports {exported:?}, which a program could bind to");

    let needed: Vec<_> = elf.libraries.iter().filter(|l| !NEEDED.contains(l)).collect();
    ensure!(needed.is_empty(), "needs {needed:?}");
    ensure!(elf.rpaths.is_empty() && elf.runpaths.is_empty(), "has a library search path");

    let mut newest = (0, 0);
    for need in elf.verneed.iter().flat_map(|section| section.iter()) {
        for version in need.iter() {
            let name = elf.dynstrtab.get_at(version.vna_name).context("no name of a version")?;
            let numbers = name.strip_prefix("GLIBC_").with_context(|| format!("needs {name}"))?;
            let mut numbers = numbers.split('.').map(str::parse);
            let (Some(Ok(major)), Some(Ok(minor))) = (numbers.next(), numbers.next()) else {
                bail!("needs {name}");
            };
            newest = newest.max((major, minor));
        }
    }
    println!("newest symbol version: GLIBC_{}.{}", newest.0, newest.1);
    ensure!(newest <= GLIBC, "needs symbols of glibc {newest:?}, newer than {GLIBC:?}");

    for header in &elf.program_headers {
        let (write, execute) = (header.p_flags & PF_W != 0, header.p_flags & PF_X != 0);
        match header.p_type {
            PT_LOAD => ensure!(!(write && execute), "a segment is writable and executable"),
            PT_GNU_STACK => ensure!(!execute, "asks for an executable stack"),
            PT_TLS => bail!("has thread-local variables"),
            _ => {}
        }
    }
    ensure!(
        elf.program_headers.iter().any(|h| h.p_type == PT_GNU_STACK),
        "no PT_GNU_STACK: that means an executable stack"
    );
    let dynamic = elf.dynamic.as_ref().context("no dynamic section")?;
    ensure!(
        dynamic.info.flags & dynamic::DF_TEXTREL == 0
            && !dynamic.dyns.iter().any(|d| d.d_tag == dynamic::DT_TEXTREL),
        "relocates its text"
    );
    ensure!(
        dynamic.info.flags & dynamic::DF_BIND_NOW != 0
            || dynamic.info.flags_1 & dynamic::DF_1_NOW != 0,
        "binds its symbols lazily"
    );
    Ok(())
}

/// The checker must find what is planted, and nothing in a clean section.
fn planted() -> Result<()> {
    let clean = "1: mov $9, %eax; syscall; lea table(%rip), %rcx; cmp (%rcx), %eax; jne 1b; ret";
    let cases = [
        (clean, None),
        ("call other; ret", Some("a call")),
        ("call *%rax; ret", Some("an indirect call")),
        ("jmp *(%rdx)", Some("an indirect jump")),
        ("jmp outside", Some("a jump out of the section")),
        ("je outside; ret", Some("a jump out of the section")),
        ("jmp 1f + 1; 1: mov $0x90909090, %eax; ret", Some("a jump into the middle")),
        ("incl counter(%rip); ret", Some("refers to writable memory")),
        ("lea counter(%rip), %rax; ret", Some("refers to writable memory")),
        ("mov other@GOTPCREL(%rip), %rax; ret", Some("refers to writable memory")),
        ("mov %fs:0x28, %rax; ret", Some("thread-local memory")),
        ("mov $1, %eax", Some("falls through")),
        ("int $0x80; ret", Some("not expected")),
        (".byte 0x06; ret", Some("not an instruction")),
    ];
    let directory = tempfile::tempdir()?;
    for (code, expected) in cases {
        let found = violations(&fs::read(assemble(directory.path(), code)?)?)?;
        match expected {
            None => ensure!(found.is_empty(), "`{code}`: {found:?}"),
            Some(words) => ensure!(
                found.len() == 1 && found[0].contains(words),
                "`{code}`: {words:?} expected, found {found:?}"
            ),
        }
    }
    let clean = fs::read(assemble(directory.path(), clean)?)?;
    let error = manners(&clean).expect_err("a library that exports `outside`");
    ensure!(error.to_string().contains("outside"), "{error:#}");
    Ok(())
}

fn assemble(directory: &Path, code: &str) -> Result<PathBuf> {
    let (source, library) = (directory.join("planted.S"), directory.join("planted.so"));
    // An exported `outside` would be reached through the PLT.
    let export = if code.contains("outside") { "" } else { ".globl outside\n" };
    let text = format!(
        ".section {SECTION}, \"ax\", @progbits\n{code}\n\
         .text\n{export}.type outside, @function\noutside: ret\n\
         .section .rodata\ntable: .long 1, 2\n\
         .data\ncounter: .long 1\n.section .note.GNU-stack, \"\", @progbits\n"
    );
    fs::write(&source, text)?;
    let output = Command::new("gcc")
        .args(["-shared", "-nostdlib", "-o"])
        .arg(&library)
        .arg(&source)
        .output()
        .context("cannot run gcc")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(library)
}
