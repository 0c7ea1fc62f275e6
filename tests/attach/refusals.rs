//! Processes that cannot be attached to: the line says why, and nothing happens to them.

use crate::with_pool;
use anyhow::{Context, Result, bail, ensure};
use elfremap_tests::attach::{Subject, build, elfremap, subject, succeed};
use elfremap_tests::image::Class;
use elfremap_tests::lab::wait_until;
use elfremap_tests::library::{copy_program, tool};
use elfremap_tests::outcome::{Skip, trial};
use elfremap_tests::run::{Output, Run};
use elfremap_tests::smaps::Backing;
use libtest_mimic::Trial;
use nix::sys::ptrace;
use nix::sys::resource::Resource;
use nix::sys::wait::waitpid;
use nix::unistd::Pid;
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use tempfile::TempDir;

/// The number of the user `nobody`.
const NOBODY: u32 = 65534;

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        trial("refusals::no_such_process", no_such_process),
        trial("refusals::kernel_threads_and_zombies", kernel_threads_and_zombies),
        trial("refusals::already_traced", already_traced),
        trial("refusals::traced_by_gdb", traced_by_gdb),
        trial("refusals::frozen", frozen),
        trial("refusals::another_machine", another_machine),
        trial("refusals::too_small", too_small),
        trial("refusals::dry_run_touches_nothing", dry_run),
        with_pool("refusals::other_users", 0, |_| other_users()),
        with_pool("refusals::seccomp", 0, |_| seccomp()),
        with_pool("refusals::mdwe", 0, |_| mdwe()),
        with_pool("refusals::no_thread_can_be_made", 0, |_| no_thread()),
        with_pool("refusals::no_huge_pages", 0, |_| no_huge_pages()),
        with_pool("refusals::too_few_huge_pages", 2, |_| too_few_huge_pages()),
    ]
}

/// That the command ended with `code` and said `words` on stderr.
fn expect(output: &Output, code: i32, words: &[&str]) -> Result<()> {
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.code() == Some(code), "{}: {error}", output.status);
    for word in words {
        ensure!(error.contains(word), "{word:?} is missing: {error}");
    }
    ensure!(error.lines().next().is_some_and(|l| l.starts_with("elfremap: error: ")), "{error}");
    Ok(())
}

fn both(pid: u32, code: i32, words: &[&str]) -> Result<()> {
    for command in ["attach", "detach"] {
        expect(&elfremap(&[command, &pid.to_string()])?, code, words)?;
    }
    Ok(())
}

fn no_such_process() -> Result<()> {
    // Above the largest number that the kernel gives (4194304).
    both(2_000_000_000, 1, &["no process 2000000000"])
}

fn kernel_threads_and_zombies() -> Result<()> {
    let mut child = Command::new("true").stdin(Stdio::null()).spawn()?;
    let state = || fs::read_to_string(format!("/proc/{}/stat", child.id())).unwrap_or_default();
    while !state().contains(") Z ") {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let result = both(child.id(), 3, &["zombie"]);
    child.wait()?;
    result?;
    let is_kernel = |pid: &u32| {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let flags = stat
            .rsplit_once(')')
            .and_then(|(_, rest)| rest.split_whitespace().nth(6)?.parse::<u64>().ok());
        flags.is_some_and(|flags| flags & 0x0020_0000 != 0)
    };
    let Some(pid) = (2..200).find(is_kernel) else {
        return Err(Skip::because("needs to see a kernel thread"));
    };
    both(pid, 3, &["is a kernel thread"])
}

fn already_traced() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).arg("caller"))?;
    let pid = Pid::from_raw(i32::try_from(subject.pid())?);
    ptrace::seize(pid, ptrace::Options::empty())?;
    // The tracer is the thread that seized it.
    let result = both(subject.pid(), 3, &["already traced", "by process"]);
    ptrace::interrupt(pid)?;
    waitpid(pid, None)?;
    ptrace::detach(pid, None)?;
    result?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// gdb goes on with the program as if nobody had asked.
fn traced_by_gdb() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).arg("caller"))?;
    let pid = subject.pid().to_string();
    let run = Run::new("gdb").args(["-nx", "-q", "-ex", "set debuginfod enabled off", "-p", &pid]);
    let mut gdb = run.start_waiting()?;
    let status = || fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    wait_until(|| Ok(!status().contains("TracerPid:\t0\n")))?;
    both(subject.pid(), 3, &["already traced", "(gdb)"])?;
    gdb.write("print stop + 42\ndetach\nquit\n")?;
    let output = gdb.finish()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success() && said.contains("$1 = 42"), "{}: {said}", output.status);
    wait_until(|| Ok(status().contains("TracerPid:\t0\n")))?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// The freezer's group, gone in the end with whoever was in it thawed.
struct Frozen(PathBuf);

impl Drop for Frozen {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("freezer.state"), "THAWED");
    }
}

/// A frozen program can't be stopped: given up after the time.
fn frozen() -> Result<()> {
    let directory = Path::new("/sys/fs/cgroup/freezer").join(format!("a{}", std::process::id()));
    if fs::create_dir(&directory).is_err() {
        return Err(Skip::because("needs root and the freezer of cgroup v1"));
    }
    let result = (|| {
        let run = Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]).group(&directory);
        let subject = Subject::start(&run)?;
        let frozen = Frozen(directory.clone());
        fs::write(directory.join("freezer.state"), "FROZEN")?;
        let state = || fs::read_to_string(directory.join("freezer.state")).unwrap_or_default();
        wait_until(|| Ok(state().trim() == "FROZEN"))?;
        let output = elfremap(&["attach", &subject.pid().to_string(), "--timeout", "1"])?;
        expect(&output, 1, &["did not stop in time"])?;
        drop(frozen);
        subject.expect_untouched()?;
        subject.finish().map(drop)
    })();
    wait_until(|| Ok(fs::remove_dir(&directory).is_ok()))?;
    result
}

fn another_machine() -> Result<()> {
    let source = elfremap_tests::library::source_dir().join("attach/small.c");
    let program = build(&source, "gcc", &["-m32"])?;
    let running = Run::new(program).until_ready()?;
    both(running.pid(), 3, &["i386"])?;
    ensure!(running.finish()?.status.code() == Some(42), "it has noticed");
    Ok(())
}

fn too_small() -> Result<()> {
    let source = elfremap_tests::library::source_dir().join("attach/small.c");
    let running = Run::new(build(&source, "gcc", &[])?).until_ready()?;
    let output = elfremap(&["attach", &running.pid().to_string(), "--objects", ""])?;
    ensure!(output.status.code() == Some(3), "{}", output.status);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(said.contains("less than one huge page to gain"), "{said}");
    let output = elfremap(&["detach", &running.pid().to_string()])?;
    ensure!(output.status.code() == Some(3), "{}", output.status);
    ensure!(running.finish()?.status.code() == Some(42), "it has noticed");
    Ok(())
}

fn dry_run() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).arg("caller"))?;
    let output = succeed("attach", subject.pid(), &["--dry-run", "--json"])?;
    let plan: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    ensure!(plan["schema"] == 1 && plan["dry_run"] == true, "{plan}");
    let moved = plan["objects"][0]["moved"].as_array().context("no ranges")?;
    ensure!(moved.iter().any(|range| range["rights"] == "r-x"), "{plan}");
    let said = succeed("attach", subject.pid(), &["--dry-run"])?;
    ensure!(String::from_utf8_lossy(&said.stdout).contains("would move"), "{said:?}");
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// What another user may run: the command and the subject, in a directory for everybody.
struct Public {
    directory: TempDir,
}

impl Public {
    fn new() -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("elfremap-attach-").tempdir_in("/tmp")?;
        fs::set_permissions(directory.path(), Permissions::from_mode(0o755))?;
        for (from, name) in [(tool("elfremap")?, "elfremap"), (subject("gcc", &[])?, "subject")] {
            copy_program(from, directory.path().join(name))?;
            fs::set_permissions(directory.path().join(name), Permissions::from_mode(0o755))?;
        }
        Ok(Self { directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    fn subject(&self, threads: &[&str]) -> Run {
        Run::new(self.path("subject")).directory("/").user(NOBODY).args(threads)
    }

    fn attach(&self, pid: u32) -> Result<Output> {
        let run = Run::new(self.path("elfremap")).directory("/").user(NOBODY);
        run.args(["attach", &pid.to_string(), "--backend", "thp"]).output()
    }
}

fn other_users() -> Result<()> {
    let public = Public::new()?;
    let roots = Subject::start(&Run::new(public.path("subject")).arg("caller"))?;
    expect(&public.attach(roots.pid())?, 4, &["user 0", "CAP_SYS_PTRACE", "sudo elfremap attach"])?;
    roots.expect_untouched()?;
    roots.finish()?;
    // Its own process it may move, unless Yama forbids it.
    let own = Subject::start(&public.subject(&["caller"]))?;
    let scope = fs::read_to_string("/proc/sys/kernel/yama/ptrace_scope").unwrap_or_default();
    let output = public.attach(own.pid())?;
    if matches!(scope.trim(), "" | "0") {
        let error = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{}: {error}", output.status);
        own.expect(&[Class::Text, Class::Rodata], Backing::Thp)?;
    } else {
        expect(&output, 4, &["ptrace_scope"])?;
        own.expect_untouched()?;
    }
    own.finish().map(drop)
}

/// A filter that ends the program at any call that it does not make itself.
fn seccomp() -> Result<()> {
    let public = Public::new()?;
    // Root suspends it for the one thread that makes other calls.
    let subject = Subject::start(&public.subject(&["caller", "nanosleep", "futex", "filter"]))?;
    succeed("attach", subject.pid(), &["--backend", "thp"])?;
    subject.expect(&[Class::Text, Class::Rodata], Backing::Thp)?;
    succeed("detach", subject.pid(), &[])?;
    subject.expect_untouched()?;
    // Others are told so.
    expect(&public.attach(subject.pid())?, 4, &["seccomp", "CAP_SYS_ADMIN"])?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

fn mdwe() -> Result<()> {
    let run = Run::new(subject("gcc", &[])?).args(["caller", "mdwe"]);
    let subject = match Subject::start(&run) {
        Ok(subject) => subject,
        Err(error) => {
            // Status 6: the kernel does not know it.
            if run.output()?.status.code() == Some(6) {
                return Err(Skip::because("needs PR_SET_MDWE (Linux 6.3)"));
            }
            bail!(error);
        }
    };
    let pid = subject.pid().to_string();
    expect(&elfremap(&["attach", &pid, "--backend", "thp"])?, 3, &["PR_SET_MDWE"])?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// The clone(2) of the helper fails: RLIMIT_NPROC counts threads too.
fn no_thread() -> Result<()> {
    let public = Public::new()?;
    let subject = Subject::start(&public.subject(&[]).limit(Resource::RLIMIT_NPROC, 1))?;
    let output = elfremap(&["attach", &subject.pid().to_string(), "--backend", "thp"])?;
    expect(&output, 1, &["clone failed: EAGAIN"])?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

fn no_huge_pages() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]))?;
    let output = elfremap(&["attach", &subject.pid().to_string(), "--backend", "hugetlb"])?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(5), "{}: {error}", output.status);
    ensure!(error.contains("huge pages (hugetlb 2M)") && error.contains("reserve"), "{error}");
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// Where the pool is short for a range, the range goes to transparent pages as a whole.
fn too_few_huge_pages() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]))?;
    let output = succeed("attach", subject.pid(), &["--segments", "text"])?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(error.contains("on transparent huge pages instead"), "{error}");
    subject.expect(&[Class::Text], Backing::Thp)?;
    subject.finish().map(drop)
}
