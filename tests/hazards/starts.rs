//! Ways in which a program can be started, and things that are in the way.

use crate::build::{launcher, runs, tool};
use crate::scenario::{AMPLE, Backend, Case, Moved, in_parallel};
use crate::source::programs_dir;
use anyhow::{Context, Result, ensure};
use elfremap_tests::library;
use elfremap_tests::outcome::{Skip, trial};
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Output, Run};
use elfremap_tests::smaps::Snapshot;
use libtest_mimic::Trial;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::resource::Resource;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{PermissionsExt, chown, symlink};
use std::path::{Path, PathBuf};

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("start::through-the-loader", through_the_loader),
        trial("start::awkward-names", awkward_names),
        trial("start::replaced-file", replaced_file),
        trial("start::without-proc", without_proc),
        trial("start::no-write-then-execute", no_write_then_execute),
        trial("start::system-calls-denied", denied),
        trial("start::address-space-limit", address_space_limit),
        trial("start::closed-descriptors", closed_descriptors),
        trial("start::timer-from-before-exec", timer),
        trial("start::setuid-and-capabilities", secure),
        trial("start::static-programs", static_programs),
        trial("start::other-c-library", other_c_library),
        trial("start::other-word-size", other_word_size),
        trial("start::sanitizers", sanitizers),
        trial("start::small-programs", small_programs),
        trial("start::shell-script", shell_script),
        trial("start::preloaded-twice", preloaded_twice),
        trial("start::guest-in-every-failure", guest_in_every_failure),
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

/// As `ld.so PROGRAM`, where /proc/self/exe and the auxiliary vector are the loader's.
fn through_the_loader() -> Result<()> {
    with_plain(|case, host| {
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let run = Run::new("/lib64/ld-linux-x86-64.so.2").arg(&case.built.binary);
            let run = run.preload()?.env("ELFREMAP_BACKEND", backend.value());
            for run in [run.clone(), run.aslr_off()] {
                let running = run.until_ready()?;
                let snapshot =
                    Snapshot::take_by_file(running.pid(), &case.image, &case.built.binary)?;
                // What lies beside the program is the loader's choice here, and may
                // share its last block.
                let inspection =
                    case.inspect_as(running, &snapshot, backend, Moved::WholeBlocks)?;
                ensure!(inspection.used > 0, "nothing was moved");
                ensure!(inspection.output.warnings().len() <= 1, "{:?}", inspection.output);
                host.expect_idle()?;
            }
        }
        Ok(())
    })
}

/// Names that parsers of /proc/PID/maps take for something else. (O46)
fn awkward_names() -> Result<()> {
    let names: [&[u8]; 9] = [
        b"two words",
        b"new\nline",
        b"tab\tulator",
        b"gone (deleted)",
        b"0-1000 r-xp",
        b"00400000-00401000 rwxp 00000000 00:00 0",
        b"[heap]",
        b"not-utf-8-\xff\xfe",
        b"back\\slash\\012",
    ];
    with_plain(|case, host| {
        let scratch = tempfile::tempdir()?;
        let check = |path: &Path| -> Result<()> {
            let run = Run::new(path).preload()?.env("ELFREMAP_BACKEND", "hugetlb");
            let inspection = case.inspect(&run, Backend::Hugetlb, Moved::All);
            let inspection = inspection.with_context(|| format!("{path:?}"))?;
            inspection.output.silent()?;
            host.expect_idle()
        };
        for name in names {
            let copy = scratch.path().join(OsStr::from_bytes(name));
            elfremap_tests::library::copy_program(&case.built.binary, &copy)?;
            check(&copy)?;
        }
        let link = scratch.path().join("link");
        symlink(&case.built.binary, &link)?;
        check(&link)?;
        let hard = scratch.path().join("hard");
        fs::hard_link(scratch.path().join("two words"), &hard)?;
        check(&hard)?;
        // 3,900 bytes of path; exec(2) takes up to 4,095.
        let mut deep = scratch.path().to_owned();
        while deep.as_os_str().len() < 3700 {
            deep.push("d".repeat(200));
        }
        fs::create_dir_all(&deep)?;
        deep.push("program");
        elfremap_tests::library::copy_program(&case.built.binary, &deep)?;
        check(&deep)?;
        let bound = scratch.path().join("bound");
        fs::write(&bound, "")?;
        let none: Option<&str> = None;
        mount(Some(&case.built.binary), &bound, none, MsFlags::MS_BIND, none)?;
        let checked = check(&bound);
        umount(&bound)?;
        checked?;
        let directory = |name: &str| -> Result<PathBuf> {
            let path = scratch.path().join(name);
            fs::create_dir(&path)?;
            Ok(path)
        };
        let (lower, upper) = (directory("lower")?, directory("upper")?);
        let (work, merged) = (directory("work")?, directory("merged")?);
        elfremap_tests::library::copy_program(&case.built.binary, lower.join("program"))?;
        let options = format!(
            "lowerdir={},upperdir={},workdir={}",
            lower.display(),
            upper.display(),
            work.display()
        );
        let kind = Some("overlay");
        if mount(kind, &merged, kind, MsFlags::empty(), Some(options.as_str())).is_ok() {
            let checked = check(&merged.join("program"));
            umount(&merged)?;
            checked?;
        }
        Ok(())
    })
}

/// The file at the program's path is another one by the time that the preload looks:
/// nothing of it may reach the program. (O18)
fn replaced_file() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("replaced", &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb] {
            for deleted in [false, true] {
                let scratch = tempfile::tempdir()?;
                let (program, other) =
                    (scratch.path().join("program"), scratch.path().join("other"));
                elfremap_tests::library::copy_program(&case.built.binary, &program)?;
                let size = usize::try_from(fs::metadata(&program)?.len())?;
                fs::write(&other, vec![0xcc; size])?;
                let run = case.run_binary(&program, backend)?;
                let run = if deleted {
                    // A name that cannot be taken: only the old file goes away.
                    run.env("REPLACEMENT", scratch.path().join("none"))
                } else {
                    run.env("REPLACEMENT", &other)
                };
                let running = run.until_ready()?;
                if deleted {
                    fs::remove_file(&program)?;
                }
                let snapshot = Snapshot::take(running.pid(), &case.image)?;
                ensure!(deleted || !other.exists(), "the file was not replaced");
                let output = running.finish()?;
                ensure!(output.stdout == case.plain.stdout, "{output:?}");
                ensure!(output.status == case.plain.status, "{output:?}");
                ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
                ensure!(snapshot.write_exec() == 0, "mappings that are writable and executable");
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// No /proc to read. (O47)
fn without_proc() -> Result<()> {
    with_plain(|case, host| {
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let run = case.run(backend)?.through(launcher()?, &["no-proc"]);
            case.inspect_refused(&run, backend)?;
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// PR_SET_MDWE, or a filter such as systemd's: what was writable never becomes executable.
/// Code comes from a file on the pool then. (O38)
fn no_write_then_execute() -> Result<()> {
    for (cell, how) in [
        (&["pie", "bfd"][..], "mdwe"),
        (&["pie", "bfd"], "deny-exec=EPERM:0"),
        (&["no-pie", "bfd"], "mdwe"),
        (&["no-pie", "bfd", "page2m"], "mdwe"),
    ] {
        let case = Case::named("plain", cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        for backend in [Backend::Auto, Backend::Hugetlb, Backend::Thp] {
            for strategy in ["swap", "move"] {
                let run = case.run(backend)?.env("ELFREMAP_STRATEGY", strategy);
                let run = run.through(launcher()?, &[how]);
                let inspection = case
                    .inspect_refused(&run, backend)
                    .with_context(|| format!("{cell:?}, {}, {strategy}", backend.value()))?;
                ensure!(
                    inspection.complete == (strategy == "swap" && backend != Backend::Thp),
                    "{cell:?}, {how}, {}, {strategy}: {inspection:?}",
                    backend.value()
                );
                host.expect_idle()?;
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// A filter refuses system calls that a remap may need. (O39, O40)
fn denied() -> Result<()> {
    with_plain(|case, host| {
        for step in [
            "deny=mremap:EPERM",
            "deny=mremap:ENOSYS",
            "deny=madvise:EPERM",
            "deny=madvise:EINVAL",
            "deny=mincore:EPERM",
            "deny=prctl:EPERM",
            "deny=brk:EPERM",
            "deny=rt_sigprocmask:EPERM",
            "deny=process_vm_readv:EPERM",
            "deny-exec=EACCES:0",
            "deny-exec=EACCES:9",
            "deny-exec=EACCES:10",
        ] {
            let plain = case.plain_run().through(launcher()?, &[step]).output()?;
            ensure!(plain == case.plain, "{step}: the plain program cannot run: {plain:?}");
            for (backend, strategy) in [
                (Backend::Auto, "auto"),
                (Backend::Hugetlb, "swap"),
                (Backend::Hugetlb, "move"),
                (Backend::Thp, "swap"),
                (Backend::Thp, "move"),
            ] {
                for aslr_off in [false, true] {
                    let run = case.run(backend)?.env("ELFREMAP_STRATEGY", strategy);
                    let run = if aslr_off { run.aslr_off() } else { run };
                    let run = run.through(launcher()?, &[step]);
                    case.inspect_refused(&run, backend).with_context(|| {
                        format!("{step}, {}, {strategy}, ASLR off {aslr_off}", backend.value())
                    })?;
                    host.expect_idle()?;
                }
            }
        }
        Ok(())
    })
}

/// Under every RLIMIT_AS that the program itself can live with, it does. (O36)
fn address_space_limit() -> Result<()> {
    with_plain(|case, host| {
        let step = 512 << 10;
        let limited = |run: &Run, n: u64| run.clone().limit(Resource::RLIMIT_AS, n * step).output();
        // The library itself takes room, too.
        let plain = case.run(Backend::Auto)?.env("ELFREMAP", "off").aslr_off();
        let enough = (8..400).find(|&n| limited(&plain, n).is_ok_and(|o| o == case.plain));
        let enough = enough.context("no limit is enough for the plain run")?;
        for backend in [Backend::Auto, Backend::Hugetlb] {
            let run = case.run(backend)?.aslr_off();
            let mut warned = 0;
            for n in enough..enough + 60 {
                let output = limited(&run, n)?;
                let name = || format!("limit {} KiB, {}", (n * step) >> 10, backend.value());
                output.same_as(&case.plain).with_context(name)?;
                ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
                warned += output.warnings().len();
            }
            ensure!(warned > 0, "no limit was too small for {}", backend.value());
            let output = limited(&run, enough + 200)?;
            output.silent()?;
            output.same_as(&case.plain)?;
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// With descriptors closed, a warning that is due must not end up in a file of the
/// program. (O44)
fn closed_descriptors() -> Result<()> {
    for cell in CELLS {
        let source = crate::source::named("fds")?;
        let cell: Vec<_> = cell.iter().map(|w| (*w).to_owned()).collect();
        let built = crate::build::build(&source, &cell)?;
        let scratch = tempfile::tempdir()?;
        let mut host = Host::lock()?;
        host.pages(0)?;
        for closed in ["", "0", "1", "2", "01", "02", "12", "012"] {
            let lowest = (0..3).find(|fd| closed.contains(&fd.to_string())).unwrap_or(3);
            for backend in ["hugetlb", "thp"] {
                let run = Run::new(&built.binary).preload()?.env("ELFREMAP_BACKEND", backend);
                let run = run.env("HAZARD_FD", lowest.to_string()).directory(scratch.path());
                let step = format!("close={closed}");
                let output = run.through(launcher()?, &[&step]).output()?;
                let what = format!("closed {closed:?}, {backend}: {output:?}");
                ensure!(output.status.code() == Some(42), "{what}");
                ensure!(output.stdout.is_empty(), "{what}");
                ensure!(fs::read(scratch.path().join("out"))? == b"12345", "{what}");
                if !closed.contains('2') && backend == "hugetlb" {
                    output.warned_once(&[]).context(what)?;
                }
            }
        }
        host.finish()?;
    }
    Ok(())
}

/// An interval timer that runs since before exec, its signal ignored. (O48)
fn timer() -> Result<()> {
    with_plain(|case, host| {
        host.pages(2 * AMPLE)?;
        let timed = |backend| {
            case.run(backend)?.through(launcher()?, &["timer=200"]).output()?.same_as(&case.plain)
        };
        in_parallel(runs()?, |index| {
            timed(if index % 2 == 0 { Backend::Auto } else { Backend::Hugetlb })
        })?;
        host.expect_idle()
    })
}

/// Programs that run in secure mode, where the loader ignores the preload. (O41)
fn secure() -> Result<()> {
    with_plain(|case, host| {
        let scratch = tempfile::tempdir()?;
        fs::set_permissions(scratch.path(), fs::Permissions::from_mode(0o755))?;
        let program = scratch.path().join("program");
        elfremap_tests::library::copy_program(&case.built.binary, &program)?;
        let user = "user=65534";
        // Files under a private directory are no use to another user.
        let library = scratch.path().join("libelfremap.so");
        fs::copy(library::preload()?, &library)?;
        let reachable = Run::new(&program)
            .preload_too(&library)
            .env("ELFREMAP_BACKEND", "hugetlb")
            .through(launcher_in(scratch.path())?, &[user]);
        // The capability to use raw sockets, permitted and effective: a version 2
        // attribute of linux/capability.h.
        let attribute: [u32; 5] = [0x0200_0001, 1 << 13, 0, 0, 0];
        let bytes: Vec<u8> = attribute.iter().flat_map(|word| word.to_le_bytes()).collect();
        let path = std::ffi::CString::new(program.as_os_str().as_bytes())?;
        // SAFETY: two strings that end with NUL, and the bytes with their length.
        let set = unsafe {
            libc::setxattr(
                path.as_ptr(),
                c"security.capability".as_ptr(),
                bytes.as_ptr().cast(),
                bytes.len(),
                0,
            )
        };
        ensure!(set == 0, "setxattr: {}", std::io::Error::last_os_error());
        check_ignored(case, &reachable).context("file capability")?;
        chown(&program, Some(0), Some(0))?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o4755))?;
        check_ignored(case, &reachable).context("setuid")?;
        host.expect_idle()
    })
}

fn launcher_in(directory: &Path) -> Result<PathBuf> {
    let copy = directory.join("launch");
    if !copy.exists() {
        elfremap_tests::library::copy_program(launcher()?, &copy)?;
    }
    Ok(copy)
}

fn check_ignored(case: &Case, run: &Run) -> Result<()> {
    let running = run.until_ready()?;
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid()))?;
    ensure!(!maps.contains("libelfremap"), "the library was loaded");
    let mut output = running.finish()?;
    // The loader names the library that it ignores.
    output.stderr.clear();
    output.same_as(&case.plain)
}

/// A small self-checking program by one driver; `None` when it cannot be built here.
fn hello(driver: &str, arguments: &[&str]) -> Result<PathBuf> {
    tool(&programs_dir().join("tools/hello.c"), driver, arguments)
}

/// The output with and without the preload is the same.
fn same_under_preload(program: &Path) -> Result<Output> {
    let plain = Run::new(program).output()?;
    ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
    let output = Run::new(program).preload()?.output()?;
    ensure!(output.status == plain.status && output.stdout == plain.stdout, "{output:?}");
    Ok(output)
}

/// No loader, so no preload: nothing happens. (O15)
fn static_programs() -> Result<()> {
    for link in ["-static", "-static-pie"] {
        let output = same_under_preload(&hello("gcc", &["-O1", link])?)?;
        ensure!(output.stderr.is_empty(), "{output:?}");
    }
    Ok(())
}

/// The loader of musl: whatever it makes of the library, a program that runs does so
/// as before. (O16)
fn other_c_library() -> Result<()> {
    let program = hello("musl-gcc", &["-O1"]).map_err(|error| {
        if error.to_string().contains("cannot run") {
            Skip::because("needs musl-gcc")
        } else {
            error
        }
    })?;
    let plain = Run::new(&program).output()?;
    ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
    let output = Run::new(&program).preload()?.output()?;
    // musl refuses to start a program with a preload that needs glibc's symbols, and
    // names them: docs/limitations.
    let refused = output.status.code() == Some(127)
        && String::from_utf8_lossy(&output.stderr).contains("libelfremap.so");
    ensure!(refused || output.status == plain.status, "{output:?}");
    Ok(())
}

/// A 32-bit program: its loader names the library of the wrong class, and goes on.
fn other_word_size() -> Result<()> {
    same_under_preload(&hello("gcc", &["-O1", "-m32"])?).map(drop)
}

/// Sanitizers that are linked in. (O42)
fn sanitizers() -> Result<()> {
    for kind in ["ubsan", "asan-static"] {
        let source = crate::source::named("sanitized")?;
        let cell: Vec<_> = ["pie", "bfd", kind].iter().map(|w| (*w).to_owned()).collect();
        let built = crate::build::build(&source, &cell)?;
        let mut host = Host::lock()?;
        host.pages(AMPLE)?;
        let plain = Run::new(&built.binary).output()?;
        ensure!(plain.status.code() == Some(42), "the plain run: {plain:?}");
        for backend in ["auto", "hugetlb", "thp"] {
            let run = Run::new(&built.binary).preload()?.env("ELFREMAP_BACKEND", backend);
            run.output()?.same_as(&plain).with_context(|| format!("{kind}, {backend}"))?;
        }
        host.finish()?;
    }
    Ok(())
}

/// Programs with less than a huge page's worth: silent, and no page taken. (O35)
fn small_programs() -> Result<()> {
    let small = hello("gcc", &["-O1"])?;
    let mut host = Host::lock()?;
    host.pages(4)?;
    for program in [Path::new("/bin/true"), Path::new("/bin/ls"), &small] {
        let plain = Run::new(program).output()?;
        for backend in ["auto", "hugetlb", "thp"] {
            let run = Run::new(program).preload()?.env("ELFREMAP_BACKEND", backend);
            let output = run.output()?;
            output.same_as(&plain)?;
            output.silent()?;
        }
    }
    let running = Run::new(&small).preload()?.env("ELFREMAP_BACKEND", "hugetlb").until_ready()?;
    let image = elfremap_tests::image::Image::read(&small)?;
    let bytes = Snapshot::take(running.pid(), &image)?.hugetlb_bytes();
    ensure!(bytes == 0, "a small program took {bytes} bytes of huge pages");
    running.finish()?;
    host.finish()
}

/// A script that looks at the output and the errors of all that it starts. (O34)
fn shell_script() -> Result<()> {
    let script = "
        n=0
        for i in 1 2 3 4 5 6 7 8 9 10; do
            text=$(printf 'b\\na\\n' | sort | head -n 1 | tr a x 2>&1)
            [ \"$text\" = x ] || echo \"wrong: $text\"
            errors=$({ ls /nonexistent || true; } 2>&1 >/dev/null | wc -l)
            [ \"$errors\" = 1 ] || echo \"lines on stderr: $errors\"
            silent=$({ true; cat /dev/null; env >/dev/null; } 2>&1)
            [ -z \"$silent\" ] || echo \"said: $silent\"
            n=$((n + 1))
        done
        echo \"$n rounds\"";
    let run = Run::new("/bin/sh").arg("-c").arg(script);
    let plain = run.output()?;
    ensure!(plain.stdout == b"10 rounds\n", "the plain run: {plain:?}");
    let mut host = Host::lock()?;
    for pages in [4, 0] {
        host.pages(pages)?;
        for backend in ["auto", "hugetlb"] {
            let output = run.clone().preload()?.env("ELFREMAP_BACKEND", backend).output()?;
            output.same_as(&plain)?;
            output.silent()?;
            host.expect_idle()?;
        }
    }
    host.finish()
}

/// Twice in LD_PRELOAD, by the same name and by another: one move. (O51)
fn preloaded_twice() -> Result<()> {
    with_plain(|case, host| {
        let scratch = tempfile::tempdir()?;
        let copy = scratch.path().join("other.so");
        fs::copy(library::preload()?, &copy)?;
        for second in [library::preload()?, copy] {
            let run = case.run(Backend::Hugetlb)?.preload_too(second);
            case.inspect(&run, Backend::Hugetlb, Moved::All)?.output.silent()?;
            host.expect_idle()?;
        }
        Ok(())
    })
}

/// A failure leaves as little behind as success: the program that prints all that
/// could be left over says the same. (O45)
fn guest_in_every_failure() -> Result<()> {
    for cell in CELLS {
        let case = Case::named("guest", &cell)?;
        let mut host = Host::lock()?;
        for pages in [AMPLE, 1, 0] {
            host.pages(pages)?;
            for step in [
                "timer=100000000",
                "deny=mremap:EPERM",
                "deny=madvise:EPERM",
                "deny-exec=EACCES:0",
                "no-proc",
            ] {
                // What the step itself changes is in this plain run, too.
                let plain = case.plain_run().through(launcher()?, &[step]).output()?;
                for strategy in ["swap", "move"] {
                    let run = case.run(Backend::Hugetlb)?.env("ELFREMAP_STRATEGY", strategy);
                    let output = run.through(launcher()?, &[step]).output()?;
                    let name = || format!("{pages} pages, {step}, {strategy}");
                    output.same_as(&plain).with_context(name)?;
                    ensure!(output.warnings().len() <= 1, "{:?}", output.warnings());
                }
            }
        }
        host.finish()?;
    }
    Ok(())
}
