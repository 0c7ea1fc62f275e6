//! The heap and the break where the program's last block is moved.

use crate::build::{launcher, runs};
use crate::scenario::{AMPLE, Backend, Case, Moved, in_parallel};
use anyhow::{Context, Result, ensure};
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Output, Run};
use libtest_mimic::Trial;
use nix::sys::resource::Resource;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("heap::close-to-bss", close_to_bss),
        trial("heap::allocated-by-a-preloaded-library", preloaded_allocator),
        trial("heap::data-limit", data_limit),
        trial("heap::break-after-a-shortage", break_after_shortage),
    ]
}

/// Where the heap begins is the kernel's choice: in some runs within bss's last block.
/// None may fail, and some have to be such runs. (O23)
fn close_to_bss() -> Result<()> {
    for cell in [["no-pie", "bfd"], ["pie", "bfd"]] {
        let case = Case::named("earlyheap", &cell)?;
        for level in [2, 1] {
            let mut host = Host::lock()?;
            host.pages(2 * AMPLE)?;
            host.aslr(level)?;
            let close = AtomicU32::new(0);
            let run = |backend| case.run(backend).map(|run| run.env("HAZARD_CLOSE", "1"));
            let both = [run(Backend::Auto)?, run(Backend::Hugetlb)?];
            in_parallel(runs()?, |index| {
                let mut output = both[index as usize % 2].output()?;
                if take_line(&mut output, "the heap begins")?.contains("last block") {
                    close.fetch_add(1, Relaxed);
                }
                output.same_as(&case.plain)
            })
            .with_context(|| format!("{cell:?}, randomize_va_space {level}"))?;
            // At level 2 it begins within a gigabyte (32 MiB before Linux 5.18): rarely
            // so close. At level 1 it follows bss at once.
            let close = close.into_inner();
            ensure!(
                level == 2 || close > 0,
                "in no run the heap began in the last block of {cell:?}"
            );
            host.finish()?;
        }
    }
    Ok(())
}

/// Takes the first line that begins with `start` out of stdout.
fn take_line(output: &mut Output, start: &str) -> Result<String> {
    let text = String::from_utf8(std::mem::take(&mut output.stdout))?;
    let line = text.lines().find(|l| l.starts_with(start));
    let line = line.with_context(|| format!("no line {start:?}: {text}"))?.to_owned();
    output.stdout = text.replacen(&format!("{line}\n"), "", 1).into_bytes();
    Ok(line)
}

/// The library that allocates early is itself preloaded, before ours and after. (O21)
fn preloaded_allocator() -> Result<()> {
    let case = Case::named("earlyheap", &["no-pie", "bfd"])?;
    let allocator = case.built.libraries.first().context("no library")?;
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    for backend in [Backend::Auto, Backend::Hugetlb] {
        let after = case.run(backend)?.preload_too(allocator);
        let before = Run::new(&case.built.binary).preload_too(allocator).preload()?;
        for run in [after, before.env("ELFREMAP_BACKEND", backend.value())] {
            case.inspect(&run.clone().aslr_off(), backend, Moved::All)?;
            run.output()?.same_as(&case.plain)?;
        }
    }
    host.finish()
}

/// Under every RLIMIT_DATA that the program itself can live with, it does. (O24)
fn data_limit() -> Result<()> {
    let case = Case::named("sbrk", &["no-pie", "bfd", "BSS1900K"])?;
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let step = 256 << 10;
    let limited = |run: &Run, n: u64| run.clone().limit(Resource::RLIMIT_DATA, n * step).output();
    let plain = case.plain_run().aslr_off();
    let enough = (1..200).find(|&n| limited(&plain, n).is_ok_and(|o| o == case.plain));
    let enough = enough.context("no limit is enough for the plain run")?;
    let mut warned = 0;
    for backend in [Backend::Auto, Backend::Hugetlb] {
        let run = case.run(backend)?.aslr_off();
        for n in enough..enough + 40 {
            let output = limited(&run, n)?;
            output
                .same_as(&case.plain)
                .with_context(|| format!("limit {} KiB", (n * step) >> 10))?;
            ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
            warned += output.warnings().len();
        }
    }
    ensure!(warned > 0, "no limit was too small to raise the break");
    host.finish()
}

/// When nothing can be moved, the break is where it was. (O25)
fn break_after_shortage() -> Result<()> {
    for bss in ["BSS4K", "BSS1900K", "BSS2M"] {
        let case = Case::named("sbrk", &["no-pie", "bfd", bss])?;
        let mut host = Host::lock()?;
        host.pages(0)?;
        let plain = case.plain_run().env("HAZARD_BREAK", "1").aslr_off().output()?;
        let line = take_line(&mut plain.clone(), "break - end")?;
        for strategy in ["swap", "move"] {
            let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_STRATEGY", strategy);
            let output = run.env("HAZARD_BREAK", "1").aslr_off().output()?;
            output.same_as(&plain).with_context(|| format!("{bss}, {strategy}, plain {line}"))?;
            output.warned_once(&[])?;
        }
        // A failure in the middle, when the break may have been raised already.
        for call in ["mremap", "madvise"] {
            let deny = format!("deny={call}:ENOMEM");
            host.pages(AMPLE)?;
            let run = case.run(Backend::Hugetlb)?.env("HAZARD_BREAK", "1").aslr_off();
            let output = run.through(launcher()?, &[&deny]).output()?;
            output.same_as(&plain).with_context(|| format!("{bss}, {call} denied, {line}"))?;
            output.warned_once(&[])?;
            host.expect_idle()?;
        }
        host.finish()?;
    }
    Ok(())
}
