//! `elfremap run`: the program is started as if by its caller, with the preload.

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use elfremap_tests::library;
use elfremap_tests::outcome::{Skip, check as outcome};
use elfremap_tests::pool::{Counters, Host};
use support::{Done, ELFREMAP, big_source, compile};

fn run(arguments: &[&str]) -> Result<Done> {
    support::run(ELFREMAP, &[&["run"], arguments].concat())
}

/// The lines of the environment that concern us.
fn ours(text: &str) -> Vec<&str> {
    let is_ours = |line: &&str| line.starts_with("ELFREMAP") || line.starts_with("LD_PRELOAD=");
    text.lines().filter(is_ours).collect()
}

#[test]
fn options_become_variables() {
    outcome((|| {
        let library = library::preload()?;
        let preload = format!("LD_PRELOAD={}", library.display());
        let options = [
            ("--segments", "text,bss"),
            ("--backend", "text:hugetlb,data:thp"),
            ("--page-size", "2M"),
            ("--merge", "rx"),
            ("--strategy", "swap"),
            ("--numa", "local"),
            ("--fork", "guard"),
            ("--exe", "none:such"),
            ("--inherit", "1"),
            ("--on-failure", "continue"),
            ("--log", "error"),
            ("--log-file", "/tmp/log.%p"),
        ];
        let mut arguments: Vec<&str> = options.iter().flat_map(|(o, v)| [*o, *v]).collect();
        arguments.extend(["--", "env"]);
        let mut expected: Vec<String> = options
            .iter()
            .map(|(option, value)| {
                let name = option.trim_start_matches('-').replace('-', "_").to_uppercase();
                format!("ELFREMAP_{name}={value}")
            })
            .collect();
        expected.push(preload.clone());
        expected.sort();
        let done = run(&arguments)?;
        let mut found = ours(&done.out);
        found.sort_unstable();
        ensure!(done.code == Some(0) && found == expected, "{found:?} instead of {expected:?}");
        // The same by --dry-run, which runs nothing.
        let dry = run(&[&["--dry-run"], arguments.as_slice()].concat())?;
        let mut found: Vec<_> = dry.out.lines().collect();
        found.sort_unstable();
        ensure!(dry.code == Some(0) && found == expected, "{found:?}");
        let done = run(&["--dry-run", "--log-file", "a 'b'", "--", "/nowhere"])?;
        ensure!(done.out.starts_with("ELFREMAP_LOG_FILE='a '\\''b'\\'''\n"), "{done:?}");
        // What is not given stays as the caller has it.
        let output = support::command(ELFREMAP)
            .args(["run", "--merge", "none", "--", "env"])
            .envs([("ELFREMAP_LOG", "off"), ("ELFREMAP_MERGE", "rx"), ("LD_PRELOAD", "libm.so.6")])
            .output()?;
        let done = Done::from(output);
        let mut found = ours(&done.out);
        found.sort_unstable();
        let preload = format!("LD_PRELOAD=libm.so.6:{}", library.display());
        ensure!(found == ["ELFREMAP_LOG=off", "ELFREMAP_MERGE=none", &preload], "{found:?}");
        Ok(())
    })());
}

#[test]
fn exit_status_and_signals_are_the_programs() {
    outcome((|| {
        ensure!(run(&["--", "true"])?.code == Some(0));
        ensure!(run(&["sh", "-c", "exit 7"])?.code == Some(7), "without --");
        ensure!(run(&["--", "sh", "-c", "exit 2"])?.code == Some(2));
        let status =
            support::command(ELFREMAP).args(["run", "--", "sh", "-c", "kill -TERM $$"]).status()?;
        ensure!(status.signal() == Some(15), "{status:?}");
        for (arguments, code, words) in [
            (&["--", "no-such-program"][..], 127, "cannot run no-such-program: No such file"),
            (&["--", "/nowhere/x"], 127, "cannot run /nowhere/x: No such file"),
            (&["--", "/"], 126, "cannot run /: Permission denied"),
            (&["--", "/etc/passwd"], 126, "Permission denied"),
            (&[], 125, "required"),
            (&["--bogus", "--", "true"], 125, "unexpected argument '--bogus'"),
            (&["--merge", "all", "--", "true"], 125, "none, rx, relro, rwx"),
            (&["--page-size", "3M", "--", "true"], 125, "power of two"),
            (&["--numa-node", "1000", "--", "true"], 125, "cannot bind to node 1000"),
            (&["--library", "/nowhere", "--", "true"], 125, "cannot use /nowhere: No such file"),
            (&["--library", "/bin/true", "--", "true"], 125, "not a shared library"),
        ] {
            let done = run(arguments)?;
            ensure!(done.code == Some(code) && done.err.contains(words), "{arguments:?}: {done:?}");
            ensure!(done.out.is_empty(), "{done:?}");
        }
        ensure!(run(&["--help"])?.code == Some(0));
        Ok(())
    })());
}

/// What Rust's runtime changes is put back; nothing of ours is left.
#[test]
fn the_process_is_as_the_caller_left_it() {
    outcome((|| {
        let plain = |script: &str| -> Result<Done> {
            Ok(support::command("bash").args(["-c", script]).output()?.into())
        };
        let look = "grep -E '^(Sig[PBIC]|Shd)' /proc/self/status; ls /proc/self/fd; \
                    cat /proc/self/limits; umask; pwd";
        for begin in ["", "trap '' PIPE; ", "trap '' INT; ", "umask 077; ", "exec 3</dev/null; "] {
            for redirect in ["", "<&-", "2>&-", "<&- 2>&-"] {
                let direct = plain(&format!("{begin}exec bash -c \"{look}\" {redirect}"))?;
                let through = plain(&format!(
                    "{begin}exec {ELFREMAP} run --inherit 0 -- bash -c \"{look}\" {redirect}"
                ))?;
                ensure!(direct.out == through.out, "{begin}{redirect}: {direct:?} {through:?}");
                ensure!(direct.err == through.err, "{begin}{redirect}: {direct:?} {through:?}");
            }
        }
        // The pid stays, and no child is there.
        let script = format!(
            "echo $$; exec {ELFREMAP} run -- bash -c 'echo $$; cat /proc/$$/task/$$/children'"
        );
        let done = plain(&script)?;
        let lines: Vec<&str> = done.out.split_whitespace().collect();
        ensure!(lines.len() >= 2 && lines[0] == lines[1], "{done:?}");
        Ok(())
    })());
}

#[test]
fn standard_input_and_output_are_untouched() {
    outcome((|| {
        let mut child = support::command(ELFREMAP)
            .args(["run", "--", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()?;
        let bytes: Vec<u8> = (0..=255).cycle().take(300_000).collect();
        let mut input = child.stdin.take().context("stdin")?;
        let sent = bytes.clone();
        let writer = std::thread::spawn(move || input.write_all(&sent));
        let output = child.wait_with_output()?;
        writer.join().map_err(|_| anyhow::anyhow!("writer"))??;
        ensure!(output.stdout == bytes && output.stderr.is_empty());
        Ok(())
    })());
}

/// Found beside the command, in the prefix, or by the option.
#[test]
fn where_the_library_is_found() {
    outcome((|| {
        let library = library::preload()?;
        for place in ["bin", "lib", "lib/x86_64-linux-gnu", "lib64"] {
            let prefix = tempfile::tempdir()?;
            let bin = prefix.path().join("bin");
            let directory = prefix.path().join(place);
            fs::create_dir_all(&bin)?;
            fs::create_dir_all(&directory)?;
            let command = bin.join("elfremap");
            elfremap_tests::library::copy_program(ELFREMAP, &command)?;
            let done = support::run(&command, &["run", "--dry-run", "--", "true"])?;
            ensure!(
                done.code == Some(125) && done.err.contains("cannot find libelfremap.so"),
                "{done:?}"
            );
            ensure!(done.err.contains("hint: elfremap run --library"), "{done:?}");
            let copy = directory.join("libelfremap.so");
            fs::copy(&library, &copy)?;
            let done = support::run(&command, &["run", "--dry-run", "--", "true"])?;
            let path = fs::canonicalize(&copy)?;
            ensure!(done.out == format!("LD_PRELOAD={}\n", path.display()), "{place}: {done:?}");
            // Through a symbolic link to the command.
            let link = prefix.path().join("link");
            std::os::unix::fs::symlink(&command, &link)?;
            ensure!(support::run(&link, &["run", "--dry-run", "--", "true"])?.out == done.out);
            let given = copy.to_str().context("path")?;
            let done = run(&["--library", given, "--dry-run", "--", "true"])?;
            ensure!(done.out.contains(given), "{done:?}");
        }
        let odd = tempfile::Builder::new().prefix("a:b c").tempdir()?;
        let copy = odd.path().join("libelfremap.so");
        fs::copy(&library, &copy)?;
        let done = run(&["--library", copy.to_str().context("path")?, "--", "true"])?;
        ensure!(done.code == Some(125) && done.err.contains("colons or blanks"), "{done:?}");
        // A relative path becomes an absolute one: the program may change directory.
        let output = support::command(ELFREMAP)
            .args(["run", "--dry-run", "--library", "libelfremap.so", "--", "true"])
            .current_dir(library.parent().context("no directory")?)
            .output()?;
        let done = Done::from(output);
        ensure!(done.out.starts_with("LD_PRELOAD=/"), "{done:?}");
        Ok(())
    })());
}

#[test]
fn programs_that_run_as_they_are() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let source = "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 5; }\n";
        let make = |compiler, name, flags: &[&str]| -> Result<PathBuf> {
            compile(directory.path(), compiler, name, source, flags)
        };
        let cases = [
            (make("gcc", "static", &["-static"])?, "static program"),
            (make("gcc", "static_pie", &["-static-pie"])?, "static-pie program"),
            (make("gcc", "asan", &["-fsanitize=address"])?, "AddressSanitizer"),
        ];
        for (program, words) in &cases {
            let program = program.to_str().context("path")?;
            let done = run(&["--", program])?;
            ensure!(done.code == Some(5) && done.out == "hello\n", "{done:?}");
            ensure!(done.err.contains(words) && done.err.contains("runs as it is"), "{done:?}");
            ensure!(done.err.lines().count() == 1, "{done:?}");
        }
        // A script hands the preload on to its interpreter.
        let script = directory.path().join("script");
        fs::write(&script, "#!/bin/sh\nenv\nexit 6\n")?;
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755))?;
        let done = run(&["--", script.to_str().context("path")?])?;
        ensure!(
            done.code == Some(6) && ours(&done.out).len() == 1 && done.err.is_empty(),
            "{done:?}"
        );
        Ok(())
    })());
}

/// `--reserve` makes the pool just large enough, and the program is remapped from it.
#[test]
fn reserve_grows_the_pool_by_what_is_missing() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1", "-no-pie"])?;
        let program = program.to_str().context("path")?;
        let mut host = Host::lock()?;
        host.pages(1)?;
        let options = ["--reserve", "--backend", "hugetlb", "--log", "info", "--", program];
        let done = run(&options)?;
        let grown = Counters::read()?;
        ensure!(done.code == Some(0) && done.out.ends_with("ready\n"), "{done:?}");
        ensure!(grown.total == 5 && grown.is_idle(), "{grown:?}");
        ensure!(done.err.contains("on 5 huge pages (hugetlb 2M)"), "{done:?}");
        // Enough is there: nothing is added.
        run(&options)?;
        ensure!(Counters::read()? == grown);
        // A program with nothing to gain takes nothing.
        run(&["--reserve", "--", "true"])?;
        ensure!(Counters::read()? == grown);
        host.finish()
    })());
}

#[test]
fn reserve_without_the_right_to_it_runs_the_program_all_the_same() {
    outcome((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root, to become another user"));
        }
        let directory = tempfile::tempdir()?;
        let everyone = fs::Permissions::from_mode(0o755);
        fs::set_permissions(directory.path(), everyone)?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1", "-no-pie"])?;
        for (from, name) in
            [(Path::new(ELFREMAP), "elfremap"), (&library::preload()?, "libelfremap.so")]
        {
            elfremap_tests::library::copy_program(from, directory.path().join(name))?;
        }
        let mut host = Host::lock()?;
        host.pages(0)?;
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(directory.path().join("elfremap"))
            .args(["run", "--reserve", "--"])
            .arg(&program)
            .stdin(Stdio::null())
            .output()?;
        let done = Done::from(output);
        ensure!(done.code == Some(0) && done.out.ends_with("ready\n"), "{done:?}");
        ensure!(done.err.contains("elfremap: error: ") && done.err.contains("hint: "), "{done:?}");
        host.finish()
    })());
}

#[test]
fn binding_to_a_node() {
    outcome((|| {
        let first = fs::read_to_string("/sys/devices/system/node/online");
        let Ok(first) = first else {
            return Err(Skip::because("needs a kernel with NUMA support"));
        };
        let node = first.trim().split([',', '-']).next().context("no node")?;
        let cpus = fs::read_to_string(format!("/sys/devices/system/node/node{node}/cpulist"))?;
        let look = "grep Cpus_allowed_list /proc/self/status; grep -m1 ' heap' /proc/self/numa_maps \
                    || grep -m1 stack /proc/self/numa_maps";
        let done = run(&["--numa-node", node, "--", "sh", "-c", look])?;
        ensure!(done.code == Some(0), "{done:?}");
        ensure!(done.out.contains(&format!("Cpus_allowed_list:\t{}", cpus.trim())), "{done:?}");
        ensure!(done.out.contains(&format!("bind:{node}")), "{done:?}");
        Ok(())
    })());
}

/// The map is there soon after the start, written by nobody's child.
#[test]
fn perf_map_of_the_program() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "mapped", &big_source(), &["-O1"])?;
        let mut child = support::command(ELFREMAP)
            .args(["run", "--perfmap", "--backend", "thp", "--"])
            .arg(&program)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let map = PathBuf::from(format!("/tmp/perf-{}.map", child.id()));
        let begin = std::time::Instant::now();
        while !map.exists() && begin.elapsed().as_secs() < 10 {
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        let text = fs::read_to_string(&map);
        let children = fs::read_to_string(format!("/proc/{0}/task/{0}/children", child.id()))?;
        drop(child.stdin.take());
        let output = child.wait_with_output()?;
        let _ = fs::remove_file(&map);
        ensure!(output.status.success(), "{output:?}");
        ensure!(children.is_empty(), "children: {children}");
        let text = text.context("no perf map")?;
        // A block of 2 MiB at least has moved, with some 500 functions of 4 kB.
        let name = |line: &str| line.splitn(3, ' ').nth(2).map(str::to_owned);
        let functions = text.lines().filter_map(name).filter(|name| name.starts_with('f'));
        let count = functions.count();
        ensure!(count > 500, "{count} functions");
        Ok(())
    })());
}
