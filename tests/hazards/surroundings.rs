//! What a program can be surrounded by: hardening, other libraries and tools, files that
//! other tools have changed, other languages.

use crate::build::{launcher, library as shared, tool};
use crate::scenario::{AMPLE, Backend, Case, Moved};
use crate::source::programs_dir;
use anyhow::{Context, Result, ensure};
use elfremap_tests::library::{self, cache_dir, copy_program};
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Output, Run, WATCHDOG};
use libtest_mimic::Trial;
use nix::sys::resource::Resource;
use std::fs;
use std::os::unix::fs::{PermissionsExt, chown};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("around::nothing-in-the-way", nothing_in_the_way),
        trial("around::narrow-limits", narrow_limits),
        trial("around::personalities", personalities),
        trial("around::broken-stderr", broken_stderr),
        trial("around::executed-from-memory", from_memory),
        trial("around::without-sys", without_sys),
        trial("around::ordinary-user", ordinary_user),
        trial("around::filter-that-kills", filter_that_kills),
        trial("around::sealed-text", sealed_text),
        trial("around::setuid-library", setuid_library),
        trial("around::allocators", allocators),
        trial("around::fault-handler", fault_handler),
        trial("around::core-dumps", core_dumps),
        trial("around::valgrind", valgrind),
        trial("around::strace", strace),
        trial("around::dynamic-sanitizers", dynamic_sanitizers),
        trial("around::patchelf", patchelf),
        trial("around::packed", packed),
        trial("around::go", go),
        trial("around::no-c-library", no_c_library),
    ]
}

const CELLS: [[&str; 2]; 2] = [["pie", "bfd"], ["no-pie", "bfd"]];

/// `body` with the program `plain` of both kinds, and pages enough.
fn with_plain(body: impl Fn(&Case, &mut Host) -> Result<()>) -> Result<()> {
    for cell in CELLS {
        let case = Case::named("plain", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        body(&case, &mut host).with_context(|| format!("{cell:?}"))?;
        host.finish()?;
    }
    Ok(())
}

/// Confinement that takes nothing away that is needed: all moves.
fn nothing_in_the_way() -> Result<()> {
    with_plain(|case, host| {
        for steps in [
            &["hidepid"][..],
            &["read-only-sys"],
            &["no-new-privs"],
            &["user-namespace"],
            &["memory-lock=0"],
            &["read-only-sys", "hidepid", "no-new-privs", "user-namespace"],
        ] {
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let run = case.run(backend)?.through(launcher()?, steps);
                let name = || format!("{steps:?}, {}", backend.value());
                let inspection = case.inspect(&run, backend, Moved::All).with_context(name)?;
                inspection.output.silent().with_context(name)?;
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// A stack of 64 KiB, the fewest descriptors that the program itself can live with,
/// and no byte of a file.
fn narrow_limits() -> Result<()> {
    with_plain(|case, host| {
        for (limit, values) in [
            (Resource::RLIMIT_STACK, (64..200).step_by(32).map(|kib| kib << 10).collect()),
            (Resource::RLIMIT_NOFILE, (3..12).collect()),
            (Resource::RLIMIT_FSIZE, vec![0]),
            (Resource::RLIMIT_NPROC, vec![0]),
            (Resource::RLIMIT_SIGPENDING, vec![0]),
        ] {
            let values: Vec<u64> = values;
            let mut lived = 0;
            for value in values {
                let name = |backend: Backend| format!("{limit:?} {value}, {}", backend.value());
                let plain = case.plain_run().limit(limit, value).output();
                if !plain.is_ok_and(|output| output == case.plain) {
                    continue;
                }
                // One for the library's own file, which the loader opens.
                let value = value + u64::from(limit == Resource::RLIMIT_NOFILE);
                for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                    let output = case.run(backend)?.limit(limit, value).output()?;
                    output.same_as(&case.plain).with_context(|| name(backend))?;
                    ensure!(output.warnings().len() <= 1, "{}: {output:?}", name(backend));
                    host.expect_idle()?;
                }
                lived += 1;
            }
            ensure!(lived > 0, "the program lives with no {limit:?}");
        }
        Ok(())
    })
}

/// Address spaces laid out for old programs, readable memory that may be executed, no
/// transparent huge pages for this process.
fn personalities() -> Result<()> {
    with_plain(|case, host| {
        // ADDR_COMPAT_LAYOUT, ADDR_LIMIT_3GB, UNAME26, READ_IMPLIES_EXEC (personality(2)).
        for step in [
            "personality=200000",
            "personality=8000000",
            "personality=20000",
            "personality=400000",
            "no-thp",
        ] {
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let run = case.run(backend)?.through(launcher()?, &[step]);
                let output = run.output()?;
                let name = || format!("{step}, {}", backend.value());
                output.same_as(&case.plain).with_context(name)?;
                ensure!(output.warnings().len() <= 1, "{}: {output:?}", name());
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// A warning is due, and whoever read stderr is gone: no SIGPIPE.
fn broken_stderr() -> Result<()> {
    with_plain(|case, host| {
        host.pages(0)?;
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let run = case.run(backend)?.through(launcher()?, &["broken-stderr"]);
            run.output()?.same_as(&case.plain).with_context(|| backend.value())?;
        }
        Ok(())
    })
}

/// The program's file is in memory and has no name that leads to it. (O46)
fn from_memory() -> Result<()> {
    with_plain(|case, host| {
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            let run = case.run(backend)?.through(launcher()?, &["in-memory"]);
            let inspection = case.inspect(&run, backend, Moved::All)?;
            inspection.output.silent()?;
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// No /sys, with /proc and without, as in a bare chroot.
fn without_sys() -> Result<()> {
    with_plain(|case, host| {
        for steps in [&["no-sys"][..], &["no-sys", "no-proc"]] {
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let run = case.run(backend)?.through(launcher()?, steps);
                case.inspect_refused(&run, backend)
                    .with_context(|| format!("{steps:?}, {}", backend.value()))?;
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// A directory with copies that every user can reach.
struct Public(tempfile::TempDir);

impl Public {
    fn new() -> Result<Self> {
        let directory = tempfile::tempdir()?;
        fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o755))?;
        Ok(Self(directory))
    }

    fn copy(&self, from: &Path, name: &str) -> Result<PathBuf> {
        let to = self.0.path().join(name);
        copy_program(from, &to)?;
        fs::set_permissions(&to, fs::Permissions::from_mode(0o755))?;
        Ok(to)
    }
}

/// An ordinary user, who sees no other process, may lock no memory and gains no rights.
fn ordinary_user() -> Result<()> {
    with_plain(|case, host| {
        let public = Public::new()?;
        let program = public.copy(&case.built.binary, "program")?;
        let library = public.copy(&library::preload()?, "libelfremap.so")?;
        let launcher = public.copy(&launcher()?, "launch")?;
        for steps in [
            &["user=65534"][..],
            &["hidepid", "read-only-sys", "memory-lock=0", "user=65534", "no-new-privs"],
            &["user=65534", "user-namespace", "no-new-privs"],
        ] {
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let run = Run::new(&program).preload_too(&library);
                let run = run.env("ELFREMAP_BACKEND", backend.value()).through(&launcher, steps);
                let name = || format!("{steps:?}, {}", backend.value());
                let inspection = case.inspect(&run, backend, Moved::All).with_context(name)?;
                inspection.output.silent().with_context(name)?;
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// A filter that ends the process at a call that a remap needs: a child runs into it
/// first, and leaves no trace. (O40)
fn filter_that_kills() -> Result<()> {
    with_plain(|case, host| {
        for call in ["mremap", "madvise", "process_vm_readv"] {
            let step = format!("kill={call}");
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let run = case.run(backend)?.through(launcher()?, &[&step]);
                let inspection = case.inspect(&run, backend, Moved::Nothing).context(call)?;
                inspection.output.warned_once(&["seccomp"]).context(call)?;
                host.expect_idle()?;
            }
            // Whether a child is left over, and what else a guest must not leave.
            let guest = Case::named("guest", &["pie", "bfd"])?;
            let plain = guest.plain_run().through(launcher()?, &[&step]).output()?;
            let output = guest.run(Backend::Auto)?.through(launcher()?, &[&step]).output()?;
            output.same_as(&plain).with_context(|| format!("guest, {call}"))?;
        }
        // A filter that forbids nothing of ours.
        let run = case.run(Backend::Auto)?.through(launcher()?, &["deny=getdents64:EPERM"]);
        case.inspect_refused(&run, Backend::Auto)?;
        Ok(())
    })
}

/// Only text is sealed: it stays, what is written moves.
fn sealed_text() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("sealed", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            for strategy in ["swap", "move"] {
                for what in ["text", "all"] {
                    let plain = case.plain_run().env("HAZARD_SEAL", what).output()?;
                    let run = case.run(backend)?.env("ELFREMAP_STRATEGY", strategy);
                    let output = run.env("HAZARD_SEAL", what).output()?;
                    let name = || format!("{cell:?}, {}, {strategy}, {what}", backend.value());
                    output.same_as(&plain).with_context(name)?;
                    ensure!(output.warnings().len() <= 1, "{}: {:?}", name(), output.warnings());
                    host.expect_idle()?;
                }
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// Removes a file when dropped.
struct Removed(PathBuf);

impl Drop for Removed {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("cannot remove {}: {error}", self.0.display());
        }
    }
}

/// The library is itself setuid in a system directory, and named without a path: then the
/// loader takes it into setuid programs. It must not do there what the caller's environment
/// says, and write no file. (O41)
fn setuid_library() -> Result<()> {
    let case = Case::named("plain", &["pie", "bfd"])?;
    let mut host = Host::lock()?;
    host.pages(AMPLE)?;
    let name = format!("libelfremap-test-{}.so", std::process::id());
    let installed = Path::new("/usr/lib/x86_64-linux-gnu").join(&name);
    fs::copy(library::preload()?, &installed)?;
    let removed = Removed(installed);
    fs::set_permissions(&removed.0, fs::Permissions::from_mode(0o4755))?;
    let public = Public::new()?;
    let program = public.copy(&case.built.binary, "program")?;
    chown(&program, Some(0), Some(0))?;
    fs::set_permissions(&program, fs::Permissions::from_mode(0o4755))?;
    let launcher = public.copy(&launcher()?, "launch")?;
    let log = public.0.path().join("log");
    let run = Run::new(&program)
        .preload_too(&name)
        .env("ELFREMAP_LOG", "debug")
        .env("ELFREMAP_LOG_FILE", &log)
        .env("ELFREMAP_BACKEND", "thp")
        .env("ELFREMAP_ON_FAILURE", "abort")
        .through(&launcher, &["user=65534"]);
    let running = run.until_ready()?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid()))?;
    ensure!(maps.contains(&name), "the library was not loaded: {maps}");
    // What the default says, not what the environment does: text is on the pool.
    let snapshot = elfremap_tests::smaps::Snapshot::take(running.pid(), &case.image)?;
    ensure!(snapshot.hugetlb_bytes() > 0, "the environment was obeyed");
    let output = running.finish()?;
    output.same_as(&case.plain)?;
    output.silent()?;
    ensure!(!log.exists(), "a file was written in secure mode");
    host.finish()
}

/// Where Debian's packages put a library.
fn debian(name: &str) -> Result<PathBuf> {
    let path = Path::new("/usr/lib/x86_64-linux-gnu").join(name);
    ensure!(path.exists(), "no {}: run tests/install-packages.sh as root", path.display());
    Ok(path)
}

/// Allocators that are preloaded, before ours and after.
fn allocators() -> Result<()> {
    for name in ["libjemalloc.so.2", "libtcmalloc_minimal.so.4", "libmimalloc.so.2"] {
        let allocator = debian(name)?;
        for (program, cell) in [
            ("layout", ["pie", "bfd", "default"]),
            ("earlyheap", ["no-pie", "bfd", ""]),
            ("stacks", ["pie", "bfd", ""]),
            ("fork", ["no-pie", "bfd", ""]),
        ] {
            let cell: Vec<_> = cell.into_iter().filter(|word| !word.is_empty()).collect();
            let case = Case::named(program, &cell)?;
            let plain = case.plain_run().preload_too(&allocator).output()?;
            ensure!(plain.status == case.plain.status, "{name}: {plain:?}");
            let mut host = Host::lock()?;
            host.pages(AMPLE)?;
            for backend in [Backend::Auto, Backend::Hugetlb] {
                let after = case.run(backend)?.preload_too(&allocator);
                let before = Run::new(&case.built.binary).preload_too(&allocator).preload()?;
                let before = before.env("ELFREMAP_BACKEND", backend.value());
                for (place, run) in [("after", after), ("before", before)] {
                    for run in [run.clone(), run.aslr_off()] {
                        let output = run.output()?;
                        let name = || format!("{program}, {name} {place}, {}", backend.value());
                        output.same_as(&plain).with_context(name)?;
                        output.silent().with_context(name)?;
                        host.expect_idle()?;
                    }
                }
            }
            host.finish()?;
        }
    }
    Ok(())
}

/// A library that handles faults and prints the way to them, by the loader's knowledge.
fn fault_handler() -> Result<()> {
    let handler = shared(&programs_dir().join("crash/handler.c"))?;
    for cell in CELLS {
        let case = Case::named("crash", &[&cell[..], &["rdynamic"]].concat())?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for (mode, status) in [("1", 34), ("2", 33)] {
            let crash = |run: Run| run.env("HAZARD_CRASH", mode).output();
            let plain = crash(case.plain_run().preload_too(&handler))?;
            let text = String::from_utf8_lossy(&plain.stdout).into_owned();
            ensure!(plain.status.code() == Some(status), "{plain:?}");
            ensure!(text.contains("middle_function\nouter_function\nmain\n"), "{text}");
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                let after = case.run(backend)?.preload_too(&handler);
                let before = Run::new(&case.built.binary).preload_too(&handler).preload()?;
                for run in [after, before.env("ELFREMAP_BACKEND", backend.value())] {
                    let output = crash(run)?;
                    output.same_as(&plain).with_context(|| backend.value())?;
                    output.silent()?;
                }
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// gdb's backtrace of a core file.
fn backtrace(program: &Path, core: &Path) -> Result<String> {
    let run = Run::new("gdb").args(["-batch", "-nx", "-ex", "set debuginfod enabled off"]);
    let output = run
        .args(["-ex", "bt", "-ex", "print *(int *)&fill_bss"])
        .arg(program)
        .arg(core)
        .output()?;
    Ok(String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned())
}

/// Core files hold what moved: the kernel's, with the usual filter, and gcore's. With
/// private hugetlb pages filtered out, what was written on pool pages is missing; gdb takes text from
/// the program's file. (O53)
fn core_dumps() -> Result<()> {
    let names = ["innermost", "middle_function", "outer_function", "main"];
    for cell in CELLS {
        let case = Case::named("crash", &[&cell[..], &["rdynamic"]].concat())?;
        let scratch = tempfile::tempdir()?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        host.core_pattern(&format!("{}/core.%p", scratch.path().display()))?;
        let complete = |text: &str| names.iter().all(|name| text.contains(&format!(" {name} (")));
        let core = scratch.path().join("core");
        for (backend, filter) in [
            (None, "0x33"),
            (Some(Backend::Auto), "0x33"),
            (Some(Backend::Hugetlb), "0x33"),
            (Some(Backend::Thp), "0x33"),
            (Some(Backend::Hugetlb), "0x13"),
        ] {
            let run = match backend {
                Some(backend) => case.run(backend)?,
                None => case.plain_run(),
            };
            // The filter is inherited (core(5)).
            let script = "echo $1 > /proc/self/coredump_filter; ulimit -c unlimited; exec \"$0\"";
            let shell = Run::new("/bin/sh").args(["-c", script]).arg(run.program()).arg(filter);
            let shell = shell.env("HAZARD_CRASH", "1").directory(scratch.path());
            let shell = match backend {
                Some(backend) => shell.preload()?.env("ELFREMAP_BACKEND", backend.value()),
                None => shell,
            };
            let running = shell.start_waiting()?;
            let pid = running.pid();
            let output = running.finish()?;
            let name = || format!("{cell:?}, {backend:?}, filter {filter}");
            ensure!(output.status.signal() == Some(libc::SIGABRT), "{}: {output:?}", name());
            let written = core.with_extension(pid.to_string());
            let text = backtrace(&case.built.binary, &written).with_context(name)?;
            ensure!(complete(&text), "{}: {text}", name());
            // The first word of bss, written at the start (hazard.h).
            let data = text.lines().any(|line| line == "$1 = 5");
            ensure!(data == (filter == "0x33"), "{}: data {data}: {text}", name());
            fs::remove_file(written)?;
        }
        let running = case.run(Backend::Hugetlb)?.until_ready()?;
        let pid = running.pid().to_string();
        let made = Run::new("gcore").arg("-o").arg(&core).arg(&pid).output()?;
        ensure!(made.status.success(), "{made:?}");
        let text = backtrace(&case.built.binary, &core.with_extension(pid))?;
        ensure!(complete(&text), "gcore: {text}");
        running.finish()?.same_as(&case.plain)?;
        host.finish()?;
    }
    Ok(())
}

/// Runs `wrapper PROGRAM` with and without the preload in the program.
fn wrapped(wrapper: &[&str], program: &Path, backend: Backend) -> Result<(Output, Output)> {
    let (first, rest) = wrapper.split_first().context("no wrapper")?;
    let run = Run::new(first).args(rest).arg(program).time_limit(4 * WATCHDOG);
    let plain = run.output()?;
    ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
    let output = run.preload()?.env("ELFREMAP_BACKEND", backend.value()).output()?;
    Ok((plain, output))
}

/// Under an instrumented processor. (O62)
fn valgrind() -> Result<()> {
    with_plain(|case, host| {
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let wrapper = ["valgrind", "-q", "--error-exitcode=99"];
            let (plain, output) = wrapped(&wrapper, &case.built.binary, backend)?;
            ensure!(output.status == plain.status && output.stdout == plain.stdout, "{output:?}");
            ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// Traced from its first system call on. (O62)
fn strace() -> Result<()> {
    with_plain(|case, host| {
        let wrapper = ["strace", "-f", "-qq", "-o", "/dev/null"];
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let (plain, output) = wrapped(&wrapper, &case.built.binary, backend)?;
            output.same_as(&plain)?;
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// Sanitizers whose runtime is a library. ASan's wants to be the first in the process and
/// refuses to start otherwise, which `elfremap-check` says beforehand; behind it all is
/// well. (O42)
fn dynamic_sanitizers() -> Result<()> {
    for kind in ["asan-dynamic", "tsan"] {
        let source = crate::source::named("sanitized")?;
        let cell: Vec<_> = ["pie", "bfd", kind].iter().map(|w| (*w).to_owned()).collect();
        let binary = crate::build::build(&source, &cell)?.binary;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        let plain = Run::new(&binary).output()?;
        ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
        for backend in ["auto", "hugetlb", "thp"] {
            let name = || format!("{kind}, {backend}");
            let run = Run::new(&binary).preload()?.env("ELFREMAP_BACKEND", backend);
            let output = run.output()?;
            if kind == "asan-dynamic" {
                let text = String::from_utf8_lossy(&output.stderr).into_owned();
                ensure!(text.contains("does not come first"), "{}: {output:?}", name());
                let runtime = Run::new("gcc").arg("-print-file-name=libasan.so").output()?;
                let runtime = PathBuf::from(String::from_utf8(runtime.stdout)?.trim());
                let run = Run::new(&binary).preload_too(runtime.canonicalize()?).preload()?;
                run.env("ELFREMAP_BACKEND", backend)
                    .output()?
                    .same_as(&plain)
                    .with_context(name)?;
            } else {
                output.same_as(&plain).with_context(name)?;
            }
            host.expect_idle()?;
        }
        host.finish()?;
        if kind == "asan-dynamic" {
            let check = Run::new(library::tool("elfremap-check")?).arg(&binary).output()?;
            let text = String::from_utf8_lossy(&check.stdout).into_owned();
            ensure!(check.status.code() == Some(3), "{check:?}");
            ensure!(text.contains("AddressSanitizer"), "{text}");
        }
    }
    Ok(())
}

/// Programs that patchelf has changed: more segments, in another order.
fn patchelf() -> Result<()> {
    let long = format!("/nonexistent/{}", "x".repeat(3000));
    with_plain(|case, host| {
        let scratch = tempfile::tempdir()?;
        for (name, arguments) in [
            ("rpath", &["--set-rpath", &long][..]),
            ("interpreter", &["--set-interpreter", "/lib/../lib64/ld-linux-x86-64.so.2"]),
            ("needed", &["--add-needed", "libm.so.6", "--add-needed", "libresolv.so.2"]),
            ("page-size", &["--page-size", "2097152", "--set-rpath", &long]),
        ] {
            let (fresh, program) =
                (scratch.path().join(format!("{name}.new")), scratch.path().join(name));
            copy_program(&case.built.binary, &fresh)?;
            let status = Command::new("patchelf").args(arguments).arg(&fresh).status()?;
            ensure!(status.success(), "patchelf failed");
            // It was open for writing here, by a child.
            copy_program(&fresh, &program)?;
            let patched = case.with_binary(program)?;
            for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
                for run in [patched.run(backend)?, patched.run(backend)?.aslr_off()] {
                    let name = || format!("{name}, {}", backend.value());
                    let inspection =
                        patched.inspect(&run, backend, Moved::All).with_context(name)?;
                    inspection.output.silent().with_context(name)?;
                    host.expect_idle()?;
                }
            }
        }
        Ok(())
    })
}

/// A stub has unpacked the program into anonymous memory: the program headers that the
/// loader has and the file behind /proc/self/exe are of two programs. (O18)
fn packed() -> Result<()> {
    let stub = tool(&programs_dir().join("tools/pack.c"), "gcc", &["-O1", "-static-pie"])?;
    with_plain(|case, host| {
        let run = Run::new(&stub).arg(&case.built.binary);
        run.output()?.same_as(&case.plain).context("plain")?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            for strategy in ["swap", "move"] {
                let run = run.clone().preload()?.env("ELFREMAP_BACKEND", backend.value());
                let running = run.env("ELFREMAP_STRATEGY", strategy).until_ready()?;
                let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid()))?;
                ensure!(maps.contains("libelfremap"), "the library was not loaded");
                let output = running.finish()?;
                let name = || format!("{}, {strategy}", backend.value());
                output.same_as(&case.plain).with_context(name)?;
                ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// Go: without a loader nothing happens; with cgo the program has one. (O15, O49)
fn go() -> Result<()> {
    let source = programs_dir().join("tools/hello.go");
    let directory = cache_dir("go")?;
    // A program for each: static; with a loader and no C library; with one.
    for (cgo, mode) in [("0", "exe"), ("0", "pie"), ("1", "exe")] {
        let program = directory.join(format!("hello-{mode}-{cgo}"));
        let time = |path: &Path| path.metadata().and_then(|m| m.modified()).ok();
        if time(&program) < time(&source) {
            let status = Command::new("/usr/bin/go")
                .args(["build", &format!("-buildmode={mode}"), "-o"])
                .arg(&program)
                .arg(&source)
                .args((cgo == "1").then(|| programs_dir().join("tools/hello_cgo.go")))
                .env("CGO_ENABLED", cgo)
                .env("GOCACHE", directory.join("cache"))
                .env("GO111MODULE", "off")
                .status()
                .context("cannot run go")?;
            ensure!(status.success(), "go build failed");
        }
        let plain = Run::new(&program).output()?;
        ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in ["auto", "hugetlb", "thp"] {
            for merge in ["none", "rx"] {
                for strategy in ["swap", "move"] {
                    let run = Run::new(&program).preload()?.env("ELFREMAP_BACKEND", backend);
                    let run = run.env("ELFREMAP_MERGE", merge).env("ELFREMAP_STRATEGY", strategy);
                    let output = run.output()?;
                    let name = || format!("cgo {cgo}, {mode}, {backend}, {merge}, {strategy}");
                    output.same_as(&plain).with_context(name)?;
                    output.silent().with_context(name)?;
                    host.expect_idle()?;
                }
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// A program with a loader and no C library: nothing to work with, nothing done.
fn no_c_library() -> Result<()> {
    let arguments = ["-O1", "-nostdlib", "-nostartfiles", "-fno-stack-protector", "-pie"];
    let program = tool(&programs_dir().join("tools/bare.c"), "gcc", &arguments)?;
    let plain = Run::new(&program).output()?;
    ensure!(plain.status.code() == Some(42) && plain.stdout == b"bare\n", "plain: {plain:?}");
    for backend in ["auto", "hugetlb", "thp"] {
        let run = Run::new(&program).preload()?.env("ELFREMAP_BACKEND", backend);
        let output = run.output()?;
        output.same_as(&plain)?;
        output.silent()?;
    }
    Ok(())
}
