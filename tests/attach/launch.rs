//! `elfremap run --attach`: programs that load no preload, moved at their entry point.

use crate::with_pool;
use anyhow::{Context, Result, ensure};
use elfremap_tests::attach::{build, subject, succeed};
use elfremap_tests::image::{Class, Image};
use elfremap_tests::library::{source_dir, tool};
use elfremap_tests::run::{Output, Run, Running};
use elfremap_tests::smaps::{Backing, Snapshot};
use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::path::Path;
use std::thread::sleep;
use std::time::Duration;

/// Pages of the pool that suffice for each program here.
const PAGES: u64 = 16;

/// Drivers and flags that make programs which cannot be preloaded.
const KINDS: [(&str, &str, &[&str]); 5] = [
    ("static", "gcc", &["-static"]),
    ("static_pie", "gcc", &["-static-pie"]),
    ("musl_static", "musl-gcc", &["-static"]),
    ("musl_static_pie", "musl-gcc", &["-static-pie"]),
    ("musl", "musl-gcc", &["-fPIE", "-pie"]),
];

pub(crate) fn trials() -> Vec<Trial> {
    let mut trials: Vec<Trial> = KINDS
        .into_iter()
        .map(|(name, driver, flags)| {
            with_pool(&format!("launch::{name}"), PAGES, move |_| kind(driver, flags))
        })
        .collect();
    trials.push(with_pool("launch::go", 64, |_| go()));
    trials.push(with_pool("launch::a_preloadable_program_too", PAGES, |_| kind("gcc", &[])));
    trials.push(with_pool("launch::exit_status_and_signals", PAGES, |_| statuses()));
    trials.push(with_pool("launch::shortages_are_told", 0, |_| shortage()));
    trials
}

fn attached(options: &[&str], program: &Path) -> Result<Run> {
    Ok(Run::new(tool("elfremap")?).arg("run").arg("--attach").args(options).arg("--").arg(program))
}

/// The same output and status as plain, no child, its text on huge pages, the pool as before.
fn kind(driver: &str, flags: &[&str]) -> Result<()> {
    let program = subject(driver, flags)?;
    let threads = ["alone", "caller", "writer", "nanosleep", "poll", "forker"];
    let plain = Run::new(&program).args(threads).output()?;
    let strip = |output: &Output| -> String {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.lines().filter(|line| !line.starts_with("gap ")).collect::<Vec<_>>().join("\n")
    };
    ensure!(plain.status.code() == Some(42), "the plain run failed: {plain:?}");
    let image = Image::read(&program)?;
    let running = attached(&[], &program)?.args(threads).until_ready()?;
    let now = Snapshot::take(running.pid(), &image)?;
    expect_huge(&now, &image, &[Class::Text])?;
    ensure!(now.write_exec() == 0, "a mapping became writable and executable");
    let tracer = fs::read_to_string(format!("/proc/{}/status", running.pid()))?;
    ensure!(tracer.contains("\nTracerPid:\t0\n"), "it is still traced");
    // What it can be told of from outside.
    let status =
        Run::new(tool("elfremap")?).args(["status", &running.pid().to_string()]).output()?;
    ensure!(String::from_utf8_lossy(&status.stdout).contains("attached"), "{status:?}");
    let output = running.finish()?;
    ensure!(output.status == plain.status && strip(&output) == strip(&plain), "{output:?}");
    ensure!(output.stderr == plain.stderr, "{output:?}");
    Ok(())
}

/// All whole blocks of these classes lie on the pool's pages.
fn expect_huge(now: &Snapshot, image: &Image, classes: &[Class]) -> Result<()> {
    let mut bytes = 0;
    for (part, class) in image.parts.iter().filter(|(_, class)| classes.contains(class)) {
        let range = part.rebase(part.start() + now.bias).context("beyond the address space")?;
        for block in range.align_in(elfremap_tests::BLOCK).blocks(elfremap_tests::BLOCK) {
            let header = image.header.is_some_and(|h| block.contains(h + now.bias));
            ensure!(
                header || now.is_all(block, Backing::Hugetlb),
                "{block} {class}: {:?}",
                now.backing(block)
            );
            bytes += if header { 0 } else { block.len() };
        }
    }
    ensure!(bytes >= 2 << 20, "only {bytes} bytes are huge");
    Ok(())
}

/// Go's own compiler: a program of its own linker, with a runtime that starts threads, preempts
/// them by signals and walks its own text.
fn go() -> Result<()> {
    let tools = Run::new("go").args(["env", "GOTOOLDIR"]).env("HOME", "/").output()?;
    let tools = String::from_utf8(tools.stdout)?;
    let compiler = Path::new(tools.trim()).join("compile");
    let image = Image::read(&compiler).context("needs Debian's golang-go")?;
    let directory = tempfile::tempdir()?;
    let mut text = String::from("package p\n\ntype T struct{ a, b int; s []string }\n");
    for n in 0..1500 {
        text += &format!(
            "func f{n}(t *T, m map[string]int) (r int) {{\n\
             for i, s := range t.s {{ if m[s] > {n} {{ r += i*t.a }} else {{ t.s[i] += \"x\" }} }}\n\
             defer func() {{ recover(); r += t.b }}()\nreturn r / t.a\n}}\n"
        );
    }
    let compile = |run: Run, name: &str| {
        run.args(["-p", "p", "-c", "4", "-o"]).arg(directory.path().join(name)).arg("/dev/stdin")
    };
    let object = |name: &str| fs::read(directory.path().join(name));
    let feed = |mut running: Running, name: &str| -> Result<Vec<u8>> {
        running.write(&text)?;
        let output = running.finish()?;
        ensure!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        Ok(object(name)?)
    };
    let plain = feed(compile(Run::new(&compiler), "plain").start_waiting()?, "plain")?;
    ensure!(plain.len() > 100_000, "only {} bytes", plain.len());
    // Moved at its entry point.
    let running = compile(attached(&["--segments", "text,rodata"], &compiler)?, "started");
    let running = running.start_waiting()?;
    let exe = format!("/proc/{}/exe", running.pid());
    let status = format!("/proc/{}/status", running.pid());
    let is_let_go = || -> Result<bool> {
        Ok(fs::read_link(&exe)? == compiler.canonicalize()?
            && fs::read_to_string(&status)?.contains("\nTracerPid:\t0\n"))
    };
    for _ in 0..3000 {
        if is_let_go()? {
            break;
        }
        sleep(Duration::from_millis(10));
    }
    expect_huge(&Snapshot::take(running.pid(), &image)?, &image, &[Class::Text])?;
    ensure!(feed(running, "started")? == plain, "it has compiled something else");
    // Moved in flight, and back, while it compiles.
    let mut running = compile(Run::new(&compiler), "flight").start_waiting()?;
    running.write(&text)?;
    let pid = running.pid();
    succeed("attach", pid, &[])?;
    expect_huge(&Snapshot::take(pid, &image)?, &image, &[Class::Text])?;
    succeed("detach", pid, &[])?;
    succeed("attach", pid, &["--backend", "thp"])?;
    let output = running.finish()?;
    ensure!(output.status.success() && object("flight")? == plain, "{output:?}");
    Ok(())
}

fn statuses() -> Result<()> {
    let code = |output: &Output| output.status.code();
    ensure!(code(&attached(&[], Path::new("/nowhere/at-all"))?.output()?) == Some(127), "127");
    ensure!(code(&attached(&[], Path::new("/etc/passwd"))?.output()?) == Some(126), "126");
    let wrong = attached(&["--page-size", "3"], Path::new("/bin/true"))?.output()?;
    ensure!(code(&wrong) == Some(125), "{wrong:?}");
    let output = attached(&[], Path::new("/bin/sh"))?.args(["-c", "exit 9"]).output()?;
    ensure!(code(&output) == Some(9) && output.stderr.is_empty(), "{output:?}");
    // It is the process that was started, and dies of its signals.
    let small = build(&source_dir().join("attach/small.c"), "gcc", &["-static"])?;
    let running = attached(&[], &small)?.until_ready()?;
    kill(Pid::from_raw(i32::try_from(running.pid())?), Signal::SIGUSR1)?;
    let output = running.finish()?;
    let plain = Run::new(&small).until_ready()?;
    kill(Pid::from_raw(i32::try_from(plain.pid())?), Signal::SIGUSR1)?;
    ensure!(output.status == plain.finish()?.status, "{output:?}");
    // A script's interpreter.
    let directory = tempfile::tempdir()?;
    let script = directory.path().join("script");
    fs::write(&script, "#!/bin/sh\nexit 6\n")?;
    let output = Run::new("chmod").arg("755").arg(&script).output()?;
    ensure!(output.status.success(), "{output:?}");
    ensure!(code(&attached(&[], &script)?.output()?) == Some(6), "the script");
    Ok(())
}

/// Without a page the program runs on transparent ones, or as it is; and one line says so.
fn shortage() -> Result<()> {
    let program = subject("gcc", &["-static"])?;
    let output = attached(&["--backend", "hugetlb"], &program)?.arg("caller").output()?;
    ensure!(output.status.code() == Some(42), "{output:?}");
    output.warned_once(&["huge pages (hugetlb 2M)", "left on small pages", "elfremap reserve"])?;
    let image = Image::read(&program)?;
    let running = attached(&[], &program)?.arg("caller").until_ready()?;
    let cover = Snapshot::take(running.pid(), &image)?.coverage(&image);
    ensure!(cover[&Class::Text].thp >= 2 << 20, "{cover:?}");
    let output = running.finish()?;
    ensure!(output.status.code() == Some(42), "{output:?}");
    output.warned_once(&["on transparent huge pages instead"])
}
