//! What programs do once they run: fork, start others, play with their own pages; and
//! very large ones.

use crate::scenario::{AMPLE, Backend, Case, Moved};
use anyhow::{Context, Result, ensure};
use elfremap_tests::BLOCK;
use elfremap_tests::image::Class;
use elfremap_tests::outcome::{Skip, trial};
use elfremap_tests::pool::{Counters, Host};
use elfremap_tests::run::Run;
use elfremap_tests::smaps::{Cover, Snapshot};
use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount, umount};
use std::fs::{self, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("behaviour::150-megabytes-of-text", large_text),
        trial("behaviour::gigabytes-of-bss", huge_bss),
        trial("behaviour::fork-with-an-empty-pool", fork),
        trial("behaviour::workers-share-text", workers),
        trial("behaviour::starts-commands", spawn),
        trial("behaviour::page-tricks", page_tricks),
        trial("behaviour::remaps-itself", self_remap),
        trial("behaviour::threads-before-the-constructor", threads),
        trial("behaviour::armed-uprobe", uprobe),
        trial("behaviour::debugger", debugger),
    ]
}

const CELLS: [[&str; 2]; 2] = [["pie", "bfd"], ["no-pie", "bfd"]];

/// 150 MB of text: all of it with enough pages; with too few, both numbers are named. (O12)
fn large_text() -> Result<()> {
    let case = Case::named("bigtext", &["pie", "bfd"])?;
    let mut host = Host::lock()?;
    host.pages(100)?;
    let inspection = case.inspect(&case.run(Backend::Hugetlb)?, Backend::Hugetlb, Moved::All)?;
    inspection.output.silent()?;
    ensure!(inspection.used >= 70, "{} pages for 150 MB of text", inspection.used);
    host.pages(60)?;
    let inspection =
        case.inspect(&case.run(Backend::Hugetlb)?, Backend::Hugetlb, Moved::WholeBlocks)?;
    let needed = format!("{}", 150_000_000 / BLOCK);
    inspection.output.warned_once(&[&needed[..1], "60"])?;
    host.finish()
}

/// `VmRSS` of a process in bytes.
fn resident(pid: u32) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|l| l.strip_prefix("VmRSS:")).context("no VmRSS")?;
    let number = line.trim().strip_suffix(" kB").context("no kB")?;
    Ok(number.trim().parse::<u64>()? << 10)
}

/// 4 GiB of bss, next to nothing of it touched: it does not become resident. (O13)
fn huge_bss() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("hugebss", &cell)?;
        let mut host = Host::lock()?;
        host.pages(64)?;
        let running = case.plain_run().until_ready()?;
        let plain = resident(running.pid())?;
        running.finish()?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            let running = case.run(backend)?.until_ready()?;
            let snapshot = Snapshot::take(running.pid(), &case.image)?;
            let bytes = resident(running.pid())? + snapshot.hugetlb_bytes();
            let output = running.finish()?;
            output.same_as(&case.plain)?;
            output.warned_once(&[]).context(backend.value())?;
            // Text and data move, with up to one block at each of their edges.
            let most = plain + 12 * BLOCK;
            ensure!(bytes < most, "{}: {bytes} bytes instead of {plain}", backend.value());
            host.expect_idle()?;
        }
        host.finish()?;
    }
    Ok(())
}

/// Children and the parent write to data when no huge page is left. (O31)
fn fork() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("fork", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            let run = case.run(backend)?.aslr_off();
            host.pages(AMPLE)?;
            let running = run.until_ready()?;
            let taken = Snapshot::take(running.pid(), &case.image)?.hugetlb_bytes() / BLOCK;
            running.finish()?.same_as(&case.plain)?;
            ensure!((taken > 0) == (backend != Backend::Thp), "{taken} pages on hugetlb");
            host.pages(taken)?;
            for strategy in ["swap", "move"] {
                let output = run.clone().env("ELFREMAP_STRATEGY", strategy).output()?;
                output
                    .same_as(&case.plain)
                    .with_context(|| format!("{cell:?}, {}, {strategy}", backend.value()))?;
                output.silent()?;
                host.expect_idle()?;
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// Workers that run the parent's text take no page of their own. (O32)
fn workers() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("workers", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let running = case.run(backend)?.until_ready()?;
            let snapshot = Snapshot::take(running.pid(), &case.image)?;
            let used = Counters::read()?.used();
            ensure!(
                used == snapshot.hugetlb_bytes() / BLOCK,
                "{used} pages in use by the parent's {} bytes and 20 workers",
                snapshot.hugetlb_bytes()
            );
            case.inspect_as(running, &snapshot, backend, Moved::All)?;
            host.expect_idle()?;
        }
        host.finish()?;
    }
    Ok(())
}

/// fork, vfork, posix_spawn, system, popen; the preload reaches the children or not. (O33)
fn spawn() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("spawn", &cell)?;
        let mut host = Host::lock()?;
        for pages in [AMPLE, 0] {
            host.pages(pages)?;
            for inherit in ["0", "1"] {
                let run = case.run(Backend::Auto)?.env("ELFREMAP_INHERIT", inherit);
                let output = run.output()?;
                output.same_as(&case.plain).with_context(|| format!("inherit {inherit}"))?;
                ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
                host.expect_idle()?;
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// mprotect, madvise, mmap and munmap of single pages of bss: as before, on
/// transparent huge pages and on those of the pool. (O50)
fn page_tricks() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("page-tricks", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for run in [
            case.run(Backend::Auto)?,
            case.run(Backend::Thp)?,
            case.run(Backend::Hugetlb)?,
            case.run(Backend::Hugetlb)?.env("ELFREMAP_SEGMENTS", "text"),
        ] {
            for run in [run.clone(), run.aslr_off()] {
                let output = run.output()?;
                output.same_as(&case.plain)?;
                output.silent()?;
                host.expect_idle()?;
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// A program that does the same trick on itself. (O51)
fn self_remap() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("self-remap", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            let output = case.run(backend)?.output()?;
            output.same_as(&case.plain).context(backend.value())?;
            output.silent()?;
        }
        host.finish()?;
    }
    Ok(())
}

/// Another thread runs already: what is only read is swapped under its feet, what it
/// may write stays, and that is said.
fn threads() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("threads", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for (backend, strategy) in [
            (Backend::Auto, "auto"),
            (Backend::Hugetlb, "auto"),
            (Backend::Hugetlb, "swap"),
            (Backend::Hugetlb, "move"),
            (Backend::Thp, "swap"),
        ] {
            let name = || format!("{cell:?}, {}, {strategy}", backend.value());
            for _ in 0..10 {
                let run = case.run(backend)?.env("ELFREMAP_STRATEGY", strategy);
                let running = run.until_ready().with_context(name)?;
                let snapshot = Snapshot::take(running.pid(), &case.image)?;
                let cover = snapshot.coverage(&case.image);
                let huge = |class| cover.get(&class).map_or(0, |c: &Cover| c.hugetlb + c.thp);
                let written = huge(Class::Data) + huge(Class::Bss);
                ensure!(written == 0, "{}: {written} bytes of data were moved", name());
                // Whatever the strategy asked for, text is swapped: to move it is to take
                // it away for a moment, with a thread in it.
                ensure!(huge(Class::Text) > 0, "{}: no text was moved", name());
                let inspection = case
                    .inspect_as(running, &snapshot, backend, Moved::WholeBlocks)
                    .with_context(name)?;
                inspection.output.warned_once(&["thread"]).with_context(name)?;
                host.expect_idle()?;
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// A probe that the kernel has put into a program's text, for the time of a test.
struct Probe {
    events: PathBuf,
    name: String,
    mounted: Option<PathBuf>,
}

impl Probe {
    /// Arms a uprobe at `offset` of `binary`.
    fn arm(binary: &Path, offset: u64, scratch: &Path) -> Result<Self> {
        let known = Path::new("/sys/kernel/tracing");
        let (tracing, mounted) = if known.join("uprobe_events").exists() {
            (known.to_owned(), None)
        } else {
            let place = scratch.join("tracing");
            fs::create_dir(&place)?;
            let kind = Some("tracefs");
            let none: Option<&str> = None;
            mount(kind, &place, kind, MsFlags::empty(), none)
                .map_err(|errno| Skip::because(format!("needs tracefs (mount: {errno})")))?;
            (place.clone(), Some(place))
        };
        let events = tracing.join("uprobe_events");
        let name = format!("elfremap_test_{}", std::process::id());
        let probe = Self { events, name, mounted };
        if !probe.events.exists() {
            return Err(Skip::because("needs uprobes in the kernel"));
        }
        probe.write(&format!("p:{0}/{0} {1}:{offset:#x}\n", probe.name, binary.display()))?;
        fs::write(tracing.join(format!("events/{}/enable", probe.name)), "1")?;
        Ok(probe)
    }

    fn write(&self, line: &str) -> Result<()> {
        let mut file = OpenOptions::new().append(true).open(&self.events)?;
        file.write_all(line.as_bytes()).with_context(|| format!("cannot write {line:?}"))
    }

    /// How often it was hit.
    fn hits(&self) -> Result<u64> {
        let profile = fs::read_to_string(self.events.with_file_name("uprobe_profile"))?;
        let line = profile.lines().find(|l| l.contains(&self.name)).context("no such probe")?;
        let hits = line.split_whitespace().last().context("no number")?;
        Ok(hits.parse()?)
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let enable = self.events.with_file_name(format!("events/{}/enable", self.name));
        let removed = fs::write(enable, "0").map_err(anyhow::Error::from);
        let removed = removed.and_then(|()| self.write(&format!("-:{0}/{0}\n", self.name)));
        if let Err(error) = removed {
            eprintln!("cannot remove the uprobe {}: {error:#}", self.name);
        }
        if let Some(place) = &self.mounted
            && let Err(errno) = umount(place)
        {
            eprintln!("cannot unmount {}: {errno}", place.display());
        }
    }
}

/// Where the function of page `page` of the fill's text is in the file.
fn fill_offset(binary: &Path, page: u64) -> Result<u64> {
    let bytes = fs::read(binary)?;
    let elf = goblin::elf::Elf::parse(&bytes)?;
    let symbol = elf
        .syms
        .iter()
        .find(|s| elf.strtab.get_at(s.st_name) == Some("fill_text"))
        .context("no fill_text")?;
    let address = symbol.st_value + page * 4096;
    let load = elf.program_headers.iter().find(|h| {
        h.p_type == goblin::elf::program_header::PT_LOAD
            && (h.p_vaddr..h.p_vaddr + h.p_filesz).contains(&address)
    });
    let load = load.context("fill_text is not loaded")?;
    Ok(address - load.p_vaddr + load.p_offset)
}

/// A uprobe that is armed when the program starts: a copied breakpoint would kill it,
/// so that block stays, the rest moves, and the probe is hit as before.
fn uprobe() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("plain", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        let scratch = tempfile::tempdir()?;
        // A copy, so that the probe is in no other process.
        let binary = scratch.path().join("probed");
        elfremap_tests::library::copy_program(&case.built.binary, &binary)?;
        let offset = fill_offset(&binary, 600)?;
        let probe = Probe::arm(&binary, offset, scratch.path())?;
        let plain = Run::new(&binary).output()?;
        let hits = probe.hits()?;
        ensure!(hits > 0, "the probe was not hit in the plain run");
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            for strategy in ["swap", "move"] {
                let name = || format!("{cell:?}, {}, {strategy}", backend.value());
                let before = probe.hits()?;
                let run = case.run_binary(&binary, backend)?.env("ELFREMAP_STRATEGY", strategy);
                let running = run.until_ready().with_context(name)?;
                let snapshot = Snapshot::take(running.pid(), &case.image)?;
                let huge = snapshot.huge_bytes(&case.image);
                let output = running.finish()?;
                output.same_as(&plain).with_context(name)?;
                output.warned_once(&["uprobe"]).with_context(name)?;
                ensure!(huge >= 2 * BLOCK, "{}: only {huge} bytes were moved", name());
                ensure!(probe.hits()? == before + hits, "{}: the probe was missed", name());
                host.expect_idle()?;
            }
        }
        drop(probe);
        host.finish()?;
    }
    Ok(())
}

/// A breakpoint that was set before the program starts is hit, whatever is moved. (O52)
fn debugger() -> Result<()> {
    let gdb = Path::new("/usr/bin/gdb");
    if !gdb.exists() {
        return Err(Skip::because("needs gdb"));
    }
    for cell in CELLS {
        let case = Case::named("exec", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        let debug = |settings: &[String]| -> Result<String> {
            let commands = [
                // On the fill's 600th page, well inside of what is moved.
                "break *((char*)&fill_text+600*4096)",
                "run",
                "backtrace",
                "continue",
                "backtrace",
                "delete",
                "continue",
            ];
            let settings = settings.iter().map(String::as_str);
            let first = ["set debuginfod enabled off", "set startup-with-shell off"];
            let run = Run::new(gdb).arg("-batch").arg("-nx");
            let run = first
                .into_iter()
                .chain(settings)
                .chain(commands)
                .fold(run, |run, command| run.arg("-ex").arg(command));
            let output = run.arg(&case.built.binary).output()?;
            Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
        };
        // It stops twice, both times with a backtrace that leads to main, and ends.
        let is_right = |text: &str| {
            text.matches("Breakpoint 1, ").count() == 2
                && text.lines().filter(|l| l.starts_with('#') && l.contains(" main (")).count() == 2
                && text.contains("exited with code 052")
        };
        let plain = debug(&[])?;
        ensure!(is_right(&plain), "without the preload: {plain}");
        for backend in ["auto", "hugetlb", "thp"] {
            for strategy in ["swap", "move"] {
                let library = elfremap_tests::library::preload()?;
                let text = debug(&[
                    format!("set environment LD_PRELOAD {}", library.display()),
                    format!("set environment ELFREMAP_BACKEND {backend}"),
                    format!("set environment ELFREMAP_STRATEGY {strategy}"),
                ])?;
                ensure!(is_right(&text), "{cell:?}, {backend}, {strategy}: {text}");
            }
        }
        host.finish()?;
    }
    Ok(())
}
