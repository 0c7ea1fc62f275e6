//! `elfremap status` against the kernel's account, read by other code than its own,
//! and on processes of every kind.

mod support;

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, ensure};
use elfremap_tests::image::{Class, Image};
use elfremap_tests::library;
use elfremap_tests::outcome::{Skip, check as outcome};
use elfremap_tests::pool::Host;
use elfremap_tests::smaps::Snapshot;
use serde_json::Value;
use support::{Done, ELFREMAP, big_source, compile};

/// A process of ours; ended when dropped.
struct Started(Child);

impl Started {
    /// Starts the command and waits for its line `ready`.
    fn ready(command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut started = Self(command.spawn().context("cannot start")?);
        let mut lines = BufReader::new(started.0.stdout.take().context("stdout")?).lines();
        if !lines.any(|line| line.is_ok_and(|line| line == "ready")) {
            let mut messages = String::new();
            started.0.stderr.take().context("stderr")?.read_to_string(&mut messages)?;
            anyhow::bail!("ended before it was ready: {messages}");
        }
        Ok(started)
    }

    fn pid(&self) -> String {
        self.0.id().to_string()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn status(arguments: &[&str]) -> Result<Done> {
    support::run(ELFREMAP, &[&["status"], arguments].concat())
}

fn preloaded(program: &Path, variables: &[(&str, &str)]) -> Result<Command> {
    let mut command = support::command(program);
    command.env("LD_PRELOAD", library::preload()?).envs(variables.iter().copied());
    Ok(command)
}

/// Every number of the JSON document against the kernel's account by class.
fn agrees(process: &Started, program: &Path) -> Result<Value> {
    let document = status(&["--json", &process.pid()])?.json()?;
    let image = Image::read(program)?;
    let snapshot = Snapshot::take(process.0.id(), &image)?;
    let covers = snapshot.coverage(&image);
    let object = &document["processes"][0]["objects"][0];
    ensure!(object["main"] == true, "{document}");
    let classes = object["classes"].as_array().context("classes")?;
    let mut count = 0;
    for (class, cover) in covers {
        if class == Class::HeapTail {
            continue;
        }
        count += 1;
        let found = classes.iter().find(|c| c["class"] == class.to_string());
        let found = found.with_context(|| format!("no {class} in {document}"))?;
        for (name, bytes) in [
            ("size", cover.total),
            ("hugetlb", cover.hugetlb),
            ("thp", cover.thp),
            ("small", cover.small),
        ] {
            // Segments are counted to the byte there, in whole pages here.
            let mut shown = found[name].as_u64().context("no number")?;
            if name == "small" {
                // What the kernel maps huge from the page cache counts as small there.
                shown += found["file_thp"].as_u64().context("no number")?;
            }
            let pages = 2 * 4096 * image.loads.len() as u64;
            ensure!(shown.abs_diff(bytes) < pages, "{class} {name}: {bytes} by smaps, {found}");
        }
    }
    ensure!(count == classes.len(), "{classes:?}");
    Ok(document)
}

#[test]
fn the_amounts_are_the_kernels() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        for (name, flag) in [("pie", "-pie"), ("fixed", "-no-pie")] {
            let program = compile(directory.path(), "gcc", name, &big_source(), &["-O1", flag])?;
            for backend in ["hugetlb", "auto", "thp"] {
                // The lock on the pool is held for a few starts at a time.
                let mut host = Host::lock()?;
                host.pages(20)?;
                for merge in ["none", "rx", "relro", "rwx"] {
                    let variables = [("ELFREMAP_BACKEND", backend), ("ELFREMAP_MERGE", merge)];
                    let process = Started::ready(&mut preloaded(&program, &variables)?)?;
                    let document = agrees(&process, &program)?;
                    ensure!(document["processes"][0]["remapped"] == true);
                    let done = status(&[&process.pid()])?;
                    ensure!(done.code == Some(0), "{done:?}");
                    ensure!(done.verdict().contains(": remapped, "), "{done:?}");
                    ensure!(done.out.contains("\npreload: "), "{done:?}");
                }
                host.finish()?;
            }
            let process = Started::ready(&mut support::command(&program))?;
            agrees(&process, &program)?;
            let done = status(&[&process.pid()])?;
            ensure!(done.code == Some(3), "{done:?}");
            ensure!(
                done.verdict()
                    .contains("not remapped (the preload is not loaded; try: elfremap attach "),
                "{done:?}"
            );
        }
        Ok(())
    })());
}

#[test]
fn real_programs() {
    outcome((|| {
        for (program, arguments) in [
            ("/usr/bin/node", ["-e", "console.log('ready'); setTimeout(() => {}, 60000)"]),
            ("/usr/bin/gdb", ["-nx", "--eval-command=echo ready\\n"]),
            ("/usr/bin/php", ["-r", "echo \"ready\\n\"; sleep(60);"]),
        ] {
            if !Path::new(program).exists() {
                return Err(Skip::because(format!("needs {program}")));
            }
            let mut host = Host::lock()?;
            host.pages(24)?;
            for backend in ["auto", "hugetlb"] {
                let variables = [("ELFREMAP_BACKEND", backend), ("ELFREMAP_MERGE", "rx")];
                let mut command = preloaded(Path::new(program), &variables)?;
                let process = Started::ready(command.args(arguments))?;
                let document = agrees(&process, Path::new(program))?;
                ensure!(document["processes"][0]["remapped"] == true, "{document}");
            }
            host.finish()?;
        }
        Ok(())
    })());
}

#[test]
fn what_the_preload_refused_or_could_not_have() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let mut host = Host::lock()?;
        host.pages(0)?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1"])?;
        let short = [("ELFREMAP_BACKEND", "hugetlb")];
        let process = Started::ready(&mut preloaded(&program, &short)?)?;
        let done = status(&[&process.pid()])?;
        ensure!(done.code == Some(3), "{done:?}");
        ensure!(done.out.contains("short: ") && done.out.contains("ENOMEM"), "{done:?}");
        ensure!(done.out.contains("bytes of several protections share the block"), "{done:?}");
        let off = [("ELFREMAP", "off")];
        let process = Started::ready(&mut preloaded(&program, &off)?)?;
        let done = status(&[&process.pid()])?;
        ensure!(
            done.code == Some(3) && done.verdict().contains("switched off: ELFREMAP=off"),
            "{done:?}"
        );
        let small = compile(
            directory.path(),
            "gcc",
            "small",
            "#include <stdio.h>\nint main(void) { puts(\"ready\"); fflush(stdout); getchar(); return 0; }\n",
            &[],
        )?;
        let process = Started::ready(&mut preloaded(&small, &[])?)?;
        let done = status(&[&process.pid()])?;
        ensure!(done.code == Some(3), "{done:?}");
        ensure!(done.verdict().contains("less than one huge page to gain"), "{done:?}");
        drop(process);
        let other = [("ELFREMAP_EXE", "other"), ("ELFREMAP_BACKEND", "thp")];
        let process = Started::ready(&mut preloaded(&program, &other)?)?;
        let done = status(&[&process.pid()])?;
        ensure!(done.code == Some(3) && done.verdict().contains("ELFREMAP_EXE"), "{done:?}");
        drop(process);
        host.finish()
    })());
}

#[test]
fn other_ways_to_start() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let mut host = Host::lock()?;
        host.pages(20)?;
        let program = compile(directory.path(), "gcc", "a b (deleted)", &big_source(), &["-O1"])?;
        let hugetlb = [("ELFREMAP_BACKEND", "hugetlb")];
        let through_loader = {
            let mut command = preloaded(Path::new("/lib64/ld-linux-x86-64.so.2"), &hugetlb)?;
            Started::ready(command.arg(&program))?
        };
        let document = status(&["--json", &through_loader.pid()])?.json()?;
        let object = &document["processes"][0]["objects"][0];
        ensure!(
            object["main"] == true && object["path"] == program.to_string_lossy().as_ref(),
            "{object}"
        );
        let plain = Started::ready(&mut preloaded(&program, &hugetlb)?)?;
        let huge = |document: &Value| -> u64 {
            let classes = document["processes"][0]["objects"][0]["classes"].as_array().cloned();
            classes.unwrap_or_default().iter().filter_map(|c| c["hugetlb"].as_u64()).sum()
        };
        let known = agrees(&plain, &program)?;
        ensure!(huge(&document) > 4 << 20 && huge(&known) > 4 << 20, "{document}");
        // The file is gone, the process is still known.
        fs::remove_file(&program)?;
        let after = status(&["--json", &plain.pid()])?.json()?;
        ensure!(huge(&after) == huge(&known), "{after}");
        drop((through_loader, plain));
        host.finish()
    })());
}

/// By name, all of them, and by a thread's number.
#[test]
fn names_and_threads() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let source = big_source().replace("int main(", "int big_main(")
            + "#include <pthread.h>\n#include <unistd.h>\n#include <sys/syscall.h>\n\
               static void *idle(void *p) { *(volatile int *)p = syscall(SYS_gettid); pause(); return p; }\n\
               int main(int argc, char **argv) { static volatile int tid; pthread_t t;\n\
               pthread_create(&t, 0, idle, (void *)&tid); while (!tid) usleep(1000);\n\
               fprintf(stderr, \"%d\\n\", tid); return big_main(argc, argv); }\n";
        let name = format!("st-{}", std::process::id());
        let program = compile(directory.path(), "gcc", &name, &source, &["-O1", "-pthread"])?;
        let mut first = Started::ready(&mut support::command(&program))?;
        let second = Started::ready(support::command(&program).arg0("renamed"))?;
        let document = status(&["--json", &name])?;
        ensure!(document.code == Some(3), "{document:?}");
        let document = document.json()?;
        let pids: Vec<_> = document["processes"]
            .as_array()
            .context("processes")?
            .iter()
            .map(|process| process["pid"].to_string())
            .collect();
        let mut expected = [first.pid(), second.pid()];
        expected.sort_by_key(|pid| pid.parse::<u32>().unwrap_or(0));
        ensure!(pids == expected, "{pids:?}");
        let mut tid = String::new();
        let messages = first.0.stderr.take().context("stderr")?;
        BufReader::new(messages).read_line(&mut tid)?;
        let by_thread = status(&["--json", tid.trim()])?.json()?;
        ensure!(by_thread["processes"][0]["pid"] == first.0.id(), "{tid}: {by_thread}");
        Ok(())
    })());
}

#[test]
fn processes_that_are_none() {
    outcome((|| {
        let mut zombie = Started(Command::new("true").stdout(Stdio::piped()).spawn()?);
        // Its end of the pipe closes when it has ended.
        zombie.0.stdout.take().context("stdout")?.read_to_end(&mut Vec::new())?;
        let zombie_pid = zombie.pid();
        while !fs::read_to_string(format!("/proc/{zombie_pid}/stat"))?.contains(") Z ") {
            std::thread::yield_now();
        }
        for (process, words) in [
            ("0", "no process 0"),
            ("2147483648", "no process 2147483648"),
            ("99999999999999999999", "no process"),
            ("no such name", "no process is named no such name"),
            ("2", "kernel thread"),
            (&zombie_pid, "zombie"),
        ] {
            if process == "2" && fs::read("/proc/2/cmdline").map_or(true, |line| !line.is_empty()) {
                continue;
            }
            let done = status(&[process])?;
            ensure!(done.code == Some(1) && done.out.is_empty(), "{process}: {done:?}");
            ensure!(done.err.starts_with("elfremap: error: "), "{done:?}");
            ensure!(done.err.contains(words), "{process}: {done:?}");
        }
        ensure!(status(&["-1"])?.code == Some(2));
        ensure!(status(&[])?.code == Some(2));
        Ok(())
    })());
}

#[test]
fn another_users_process() {
    outcome((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root, to become another user"));
        }
        let directory = tempfile::tempdir()?;
        let everyone = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(directory.path(), everyone)?;
        let copy = directory.path().join("elfremap");
        elfremap_tests::library::copy_program(ELFREMAP, &copy)?;
        let as_nobody = |argument: &str| -> Result<Done> {
            let output = Command::new("setpriv")
                .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
                .arg(&copy)
                .args(["status", argument])
                .output()?;
            Ok(output.into())
        };
        let done = as_nobody(&std::process::id().to_string())?;
        ensure!(done.code == Some(4), "{done:?}");
        ensure!(
            done.err.contains("not permitted") && done.err.contains("hint: sudo elfremap status")
        );
        let done = as_nobody("--all")?;
        ensure!(matches!(done.code, Some(0 | 3)), "{done:?}");
        ensure!(done.out.contains("not permitted to look into"), "{done:?}");
        Ok(())
    })());
}

#[test]
fn all_lists_what_has_the_preload() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "listed", &big_source(), &["-O1"])?;
        let thp = [("ELFREMAP_BACKEND", "thp")];
        let process = Started::ready(&mut preloaded(&program, &thp)?)?;
        let plain = Started::ready(&mut support::command(&program))?;
        let done = status(&["--all"])?;
        ensure!(done.code == Some(0), "{done:?}");
        let line = |pid: &str| done.out.lines().find(|l| l.split_whitespace().next() == Some(pid));
        ensure!(line(&process.pid()).is_some_and(|line| line.ends_with("yes")), "{done:?}");
        ensure!(line(&plain.pid()).is_none(), "{done:?}");
        Ok(())
    })());
}

#[test]
fn watching_ends_with_the_process() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "watched", &big_source(), &["-O1"])?;
        let mut process = Started::ready(&mut support::command(&program))?;
        let mut watch = support::command(ELFREMAP);
        watch.args(["status", "--json", "--watch", "1", &process.pid()]);
        let mut watch = watch.stdout(Stdio::piped()).spawn()?;
        let mut lines = BufReader::new(watch.stdout.take().context("stdout")?).lines();
        for _ in 0..2 {
            let line = lines.next().context("no line")??;
            let document: Value = serde_json::from_str(&line)?;
            ensure!(document["processes"][0]["pid"] == process.0.id(), "{document}");
        }
        process.0.kill()?;
        process.0.wait()?;
        lines.for_each(drop);
        ensure!(watch.wait()?.code() == Some(3));
        Ok(())
    })());
}
