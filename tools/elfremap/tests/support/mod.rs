//! What the tests of check, status and run share.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use anyhow::{Context, Result, ensure};

pub const CHECK: &str = env!("CARGO_BIN_EXE_elfremap-check");
pub const ELFREMAP: &str = env!("CARGO_BIN_EXE_elfremap");

/// A command without the variables of the preload and of colours.
pub fn command(program: impl AsRef<OsStr>) -> Command {
    let mut command = Command::new(program);
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("ELFREMAP") {
            command.env_remove(name);
        }
    }
    command.env_remove("LD_PRELOAD").env_remove("LD_LIBRARY_PATH").stdin(Stdio::null());
    command
}

/// What a finished command left behind.
#[derive(Debug)]
pub struct Done {
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code(),
            out: String::from_utf8_lossy(&output.stdout).into_owned(),
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Done {
    /// The first line of stdout.
    pub fn verdict(&self) -> &str {
        self.out.lines().next().unwrap_or_default()
    }

    /// stdout as JSON.
    pub fn json(&self) -> Result<serde_json::Value> {
        serde_json::from_str(&self.out).with_context(|| format!("not JSON: {self:?}"))
    }
}

pub fn run(program: impl AsRef<OsStr>, arguments: &[&str]) -> Result<Done> {
    let program = program.as_ref();
    let output = command(program).args(arguments).output();
    Ok(output.with_context(|| format!("cannot run {}", program.display()))?.into())
}

pub fn check(arguments: &[&str]) -> Result<Done> {
    run(CHECK, arguments)
}

/// Compiles C source in `directory`; the source comes first in the arguments.
pub fn compile(
    directory: &Path,
    compiler: &str,
    name: &str,
    source: &str,
    flags: &[&str],
) -> Result<PathBuf> {
    let file = directory.join(format!("{name}.c"));
    fs::write(&file, source)?;
    let output = directory.join(name);
    let done = Command::new(compiler).arg(&file).arg("-o").arg(&output).args(flags).output();
    let done = done.with_context(|| format!("cannot run {compiler}"))?;
    ensure!(
        done.status.success(),
        "{compiler} {flags:?} failed: {}",
        String::from_utf8_lossy(&done.stderr)
    );
    Ok(output)
}

/// A program with 5 MB of text in many functions, 3 MB of rodata, 1 MB of relro when
/// position-independent, 2.5 MB of data, 5 MB of bss. It prints a sum over all of them
/// and `ready`, and ends when its input does.
pub fn big_source() -> String {
    use std::fmt::Write as _;
    let mut source = String::from("#include <stdio.h>\n");
    for i in 0..1200 {
        let _ = writeln!(
            source,
            "__attribute__((noinline)) int f{i}(int x) {{ __asm__ volatile(\".fill 4000, 1, 0x90\"); return x * {i} + {i}; }}"
        );
    }
    source.push_str("int (*const table[])(int) = {");
    (0..1200).for_each(|i| source += &format!("f{i},"));
    source.push_str("};\nint (*const more[100000])(int) = {f1, f2, f3};\n");
    source.push_str(
        "const char ro[3000000] = {1, 2, 3}; char data[2500000] = {1, 2, 3}; char bss[5000000];\n\
         int main(int argc, char **argv) { (void)argv; unsigned sum = 0;\n\
         for (int i = 0; i < 1200; i++) sum += table[i](argc);\n\
         for (unsigned i = 0; i < sizeof bss; i += 4096) bss[i] = i;\n\
         for (unsigned i = 0; i < sizeof bss; i += 4096) sum += bss[i] + ro[i % sizeof ro] + data[i % sizeof data];\n\
         printf(\"%u %p\\nready\\n\", sum + more[argc](1), (void *)0); fflush(stdout);\n\
         while (getchar() != EOF) ; return 0; }\n",
    );
    source
}
