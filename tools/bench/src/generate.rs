//! The generated program: a random chain of direct jumps through many MiB of text
//! and a pointer chase through the bss.
//!
//! The text is cut into strides; in each lies one short block, at a random cache
//! line. A block folds a number of its own into the checksum and jumps to the next
//! block of one random cycle through all of them. No data is read, so the time per
//! hop is that of fetching code: caches, branch targets and the instruction TLB.
//! With a stride of 4096 each hop needs another page (the worst case for the TLB);
//! with 256 the code is as dense as that of a large program running cold.

use crate::rng::Rng;
use anyhow::{Context, Result, bail, ensure};
use std::fmt::Write as _;
use std::fs;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

const DRIVER: &str = include_str!("../c/driver.c");
const LINE: usize = 64;

/// What to generate.
#[derive(clap::Args, Clone, Debug)]
pub(crate) struct Spec {
    /// Text, in MiB
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=128))]
    pub text_mb: u32,
    /// Bytes of text for each block: a multiple of 64, from 64 to 65536
    #[arg(long, default_value_t = 4096)]
    pub stride: u32,
    /// Bss, in MiB
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(0..=1024))]
    pub bss_mb: u32,
    /// The same seed gives the same program
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
}

/// Arguments of `elfremap-bench generate`.
#[derive(clap::Args, Debug)]
pub(crate) struct Args {
    #[command(flatten)]
    spec: Spec,
    /// Folder to put the sources and the program into
    #[arg(short, long, value_name = "DIR")]
    out: PathBuf,
}

/// Generates, builds and prints the path of the program.
pub(crate) fn run(args: &Args) -> Result<()> {
    println!("{}", build(&args.spec, &args.out)?.display());
    Ok(())
}

impl Spec {
    /// A name that tells the programs of one folder apart.
    pub(crate) fn name(&self) -> String {
        let mut name = format!("chain-{}m-{}", self.text_mb, self.stride);
        if self.bss_mb > 0 {
            let _ = write!(name, "-bss{}m", self.bss_mb);
        }
        if self.seed != 1 {
            let _ = write!(name, "-seed{}", self.seed);
        }
        name
    }
}

/// Generates and builds the program in `dir`; returns its path. A program that is
/// already there and is newer than this very binary is taken as it is.
pub(crate) fn build(spec: &Spec, dir: &Path) -> Result<PathBuf> {
    ensure!(
        spec.stride.is_multiple_of(64) && (64..=65536).contains(&spec.stride),
        "cannot use a stride of {}: not a multiple of 64 from 64 to 65536",
        spec.stride
    );
    fs::create_dir_all(dir).with_context(|| format!("cannot create {}", dir.display()))?;
    let program = dir.join(spec.name());
    if is_newer(&program, &std::env::current_exe()?) {
        return Ok(program);
    }
    let assembler = program.with_extension("s");
    let driver = dir.join("driver.c");
    let file = fs::File::create(&assembler)
        .with_context(|| format!("cannot write {}", assembler.display()))?;
    let mut file = BufWriter::new(file);
    write_assembler(spec, Target::host()?, &mut file)
        .and_then(|()| file.flush())
        .with_context(|| format!("cannot write {}", assembler.display()))?;
    fs::write(&driver, DRIVER).with_context(|| format!("cannot write {}", driver.display()))?;
    // Position-independent with the linker's own alignment, whatever the compiler's
    // default is: the page cache of a freshly written program at fixed addresses can
    // be mapped by huge entries without any help (Linux 6.18), and would make a
    // plain run that is none.
    let linked = program.with_extension("linked");
    compile(&["-O2", "-fPIE", "-pie"], &[&assembler, &driver], &linked)?;
    copy(&linked, &program, 64 << 20)?;
    fs::remove_file(&assembler)?;
    fs::remove_file(&linked)?;
    Ok(program)
}

/// Copies a program in pieces of `piece` bytes. The page cache keeps a file in the pieces in
/// which it was written (Linux 6.18, ext4): huge ones if the kernel finds them, or
/// single pages. Reading and mapping 4 KiB pieces costs several times as much, and what a
/// linker happens to write is neither.
///
/// Done by dd(1): our own peak memory would count as that of the programs we start.
pub(crate) fn copy(from: &Path, to: &Path, piece: usize) -> Result<()> {
    let partial = to.with_extension("partial");
    fs::copy(from, &partial).with_context(|| format!("cannot write {}", partial.display()))?;
    let operand = |name: &str, path: &Path| {
        let mut operand = std::ffi::OsString::from(name);
        operand.push(path);
        operand
    };
    let mut dd = Command::new("dd");
    dd.arg(operand("if=", from)).arg(operand("of=", &partial)).arg(format!("bs={piece}"));
    let done = dd.output().context("cannot run dd")?;
    ensure!(done.status.success(), "cannot copy {}: dd: {}", from.display(), done.status);
    fs::rename(&partial, to).with_context(|| format!("cannot write {}", to.display()))
}

/// Compiles `sources` into `output` with `$CC` or `cc`.
pub(crate) fn compile(flags: &[&str], sources: &[&Path], output: &Path) -> Result<()> {
    let cc = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    // Written under another name first: a half-written program never looks finished.
    let partial = output.with_extension("partial");
    let done = Command::new(&cc).args(flags).arg("-o").arg(&partial).args(sources).output();
    let done = done.with_context(|| format!("cannot run the C compiler {}", cc.display()))?;
    if !done.status.success() {
        let message = String::from_utf8_lossy(&done.stderr);
        bail!("cannot compile {}: {}", output.display(), message.trim());
    }
    fs::rename(&partial, output).with_context(|| format!("cannot write {}", output.display()))
}

fn is_newer(file: &Path, than: &Path) -> bool {
    let time = |path: &Path| fs::metadata(path).and_then(|m| m.modified());
    matches!((time(file), time(than)), (Ok(a), Ok(b)) if a > b)
}

/// The instruction sets the generator knows.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Target {
    X86_64,
    Aarch64,
}

impl Target {
    fn host() -> Result<Self> {
        match std::env::consts::ARCH {
            "x86_64" => Ok(Self::X86_64),
            "aarch64" => Ok(Self::Aarch64),
            other => bail!("cannot generate a program for {other}: only x86_64 and aarch64"),
        }
    }

    /// `chain_walk(hops)`: enters block 0; the block that counts to zero leaves.
    const fn entry(self) -> &'static str {
        match self {
            Self::X86_64 => "\txorl %eax, %eax\n\tjmp b0\nleave:\tret\n",
            Self::Aarch64 => "\tmov w1, #0\n\tb b0\nleave:\tmov w0, w1\n\tret\n",
        }
    }

    /// sum = 3 * sum + number: depends on the order in which the blocks run, too.
    fn block(self, out: &mut impl Write, number: usize, next: usize) -> std::io::Result<()> {
        match self {
            Self::X86_64 => write!(
                out,
                "\tleal {number}(%rax,%rax,2), %eax\n\tdecq %rdi\n\tje leave\n\tjmp b{next}\n"
            ),
            Self::Aarch64 => write!(
                out,
                "\tadd w1, w1, w1, lsl 1\n\tadd w1, w1, #{number}\n\tsubs x0, x0, #1\n\
                 \tb.ne 1f\n\tb leave\n1:\tb b{next}\n"
            ),
        }
    }
}

fn write_assembler(spec: &Spec, target: Target, out: &mut impl Write) -> std::io::Result<()> {
    let stride = spec.stride as usize;
    let bss = (spec.bss_mb as usize) << 20;
    let blocks = ((spec.text_mb as usize) << 20) / stride;
    let mut rng = Rng::new(spec.seed);
    let mut cycle: Vec<usize> = (0..blocks).collect();
    rng.shuffle(&mut cycle);
    let mut next = vec![0; blocks];
    for (at, &block) in cycle.iter().enumerate() {
        next[block] = cycle[(at + 1) % blocks];
    }
    write!(
        out,
        "\t.text\n\t.globl chain_walk\n\t.type chain_walk, %function\nchain_walk:\n{}\t.p2align 12\nchain:\n",
        target.entry()
    )?;
    for (block, &next) in next.iter().enumerate() {
        let at = block * stride + rng.below(stride / LINE) * LINE;
        write!(out, "\t.org chain+{at}\nb{block}:\n")?;
        target.block(out, 1 + rng.below(2000), next)?;
    }
    write!(
        out,
        "\t.org chain+{}\n\t.section .rodata\n\t.p2align 3\n\
         \t.globl chain_blocks, chase_size\nchain_blocks:\t.quad {blocks}\nchase_size:\t.quad {bss}\n\
         \t.bss\n\t.globl chase\n\t.p2align 12\nchase:\t.zero {}\n\
         \t.section .note.GNU-stack,\"\",%progbits\n",
        blocks * stride,
        bss.max(8)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(spec: &Spec, target: Target) -> String {
        let mut out = Vec::new();
        write_assembler(spec, target, &mut out).unwrap();
        String::from_utf8(out).unwrap()
    }

    #[test]
    fn the_chain_is_one_cycle_through_all_blocks() {
        let spec = Spec { text_mb: 1, stride: 4096, bss_mb: 0, seed: 3 };
        let source = text(&spec, Target::X86_64);
        assert_eq!(source, text(&spec, Target::X86_64), "same seed, same program");
        let next: Vec<usize> = source
            .lines()
            .filter_map(|line| line.strip_prefix("\tjmp b"))
            .skip(1)
            .map(|n| n.parse().unwrap())
            .collect();
        assert_eq!(next.len(), 256);
        let mut at = 0;
        for hop in 1..=256 {
            at = next[at];
            assert_eq!(at == 0, hop == 256, "back at the start after {hop} hops");
        }
    }

    #[test]
    fn both_targets_have_the_same_chain() {
        let spec = Spec { text_mb: 1, stride: 256, bss_mb: 1, seed: 3 };
        let orgs = |target| -> Vec<String> {
            let source = text(&spec, target);
            source.lines().filter(|line| line.contains(".org")).map(String::from).collect()
        };
        assert_eq!(orgs(Target::X86_64), orgs(Target::Aarch64));
    }

    #[test]
    fn the_built_program_runs_and_its_checksum_does_not_depend_on_time() {
        let dir = std::env::temp_dir().join(format!("elfremap-bench-{}", std::process::id()));
        let spec = Spec { text_mb: 1, stride: 4096, bss_mb: 1, seed: 5 };
        let program = build(&spec, &dir).unwrap();
        let sums: Vec<String> = (0..2)
            .map(|_| {
                let done = Command::new(&program).args(["10", "2"]).output().unwrap();
                assert!(done.status.success());
                let line = String::from_utf8(done.stdout).unwrap();
                let value: serde_json::Value = serde_json::from_str(&line).unwrap();
                assert_eq!(value["text_ns"].as_array().unwrap().len(), 2);
                assert_eq!(value["bss_ns"].as_array().unwrap().len(), 2);
                value["checksum"].to_string()
            })
            .collect();
        fs::remove_dir_all(&dir).unwrap();
        assert_eq!(sums[0], sums[1]);
    }
}
