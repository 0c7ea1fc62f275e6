//! Threads in every state: none of them notices.

use crate::with_pool;
use anyhow::{Result, ensure};
use elfremap_tests::attach::{Subject, build, elfremap, subject, succeed};
use elfremap_tests::image::Class;
use elfremap_tests::library::source_dir;
use elfremap_tests::run::Run;
use elfremap_tests::smaps::Backing;
use libtest_mimic::Trial;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::process::Command;
use std::thread::sleep;
use std::time::Duration;

/// Pages of the pool that suffice for the subject's text and read-only data.
pub(crate) const PAGES: u64 = 8;
const READ_ONLY: &[Class] = &[Class::Text, Class::Rodata];
const ALL: &[Class] = &[Class::Text, Class::Rodata, Class::Relro, Class::Data, Class::Bss];

pub(crate) fn trials() -> Vec<Trial> {
    vec![
        with_pool("states::threads_of_all_kinds", PAGES, |_| {
            let threads = [
                "clock",
                "caller",
                "nanosleep",
                "clock_nanosleep",
                "poll",
                "ppoll",
                "select",
                "epoll",
                "futex",
                "sigtimedwait",
                "reader",
                "waiter",
                "handler",
            ];
            back_and_forth(&threads, &[], READ_ONLY, Backing::Hugetlb, 8)
        }),
        with_pool("states::ends_meanwhile", 16, |_| ends_meanwhile()),
        with_pool("states::threads_and_children_come_and_go", PAGES, |_| {
            back_and_forth(
                &["maker", "forker", "vforker", "caller"],
                &[],
                READ_ONLY,
                Backing::Hugetlb,
                5,
            )
        }),
        with_pool("states::writers", PAGES, |_| {
            let threads = ["writer", "caller", "nanosleep", "poll", "futex", "reader", "waiter"];
            let options = ["--segments", "text,rodata,data,bss", "--backend", "thp"];
            back_and_forth(&threads, &options, ALL, Backing::Thp, 5)
        }),
        with_pool("states::writable_pages_of_the_pool", 2 * PAGES, |_| {
            let options = ["--segments", "text,rodata,data,bss", "--backend", "hugetlb"];
            back_and_forth(&["writer", "caller"], &options, ALL, Backing::Hugetlb, 3)
        }),
        with_pool("states::each_kind_alone", PAGES, |_| each_alone()),
        #[cfg(target_arch = "x86_64")]
        with_pool("states::disturbed_sections_begin_anew", PAGES, |_| {
            back_and_forth(&["section"], &[], READ_ONLY, Backing::Hugetlb, 5)
        }),
        #[cfg(target_arch = "x86_64")]
        with_pool("states::single_steps", PAGES, |_| {
            back_and_forth(&["stepper"], &[], READ_ONLY, Backing::Hugetlb, 5)
        }),
        #[cfg(target_arch = "x86_64")]
        with_pool("states::no_vdso", PAGES, |_| {
            back_and_forth(&["no-vdso", "caller"], &[], READ_ONLY, Backing::Hugetlb, 2)
        }),
        with_pool("states::the_first_thread_has_ended", PAGES, |_| {
            back_and_forth(&["caller", "nanosleep", "leave"], &[], READ_ONLY, Backing::Hugetlb, 2)
        }),
        with_pool("states::a_stopped_process_stays_stopped", PAGES, |_| stopped()),
        with_pool("states::signals_are_delivered", PAGES, |_| signalled()),
        with_pool("states::patched_text_stays", PAGES, |_| patched()),
        with_pool("states::long_vfork", PAGES, |_| long_vfork()),
    ]
}

/// Attached and detached again and again, and all threads go on as if nothing were.
fn back_and_forth(
    threads: &[&str],
    options: &[&str],
    classes: &[Class],
    backing: Backing,
    rounds: usize,
) -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(threads))?;
    for _ in 0..rounds {
        succeed("attach", subject.pid(), options)?;
        let huge = subject.expect(classes, backing)?;
        ensure!(huge >= 8 << 20, "only {huge} bytes are huge");
        sleep(Duration::from_millis(150));
        succeed("detach", subject.pid(), &[])?;
        subject.expect_untouched()?;
    }
    // The calls under way now end in their own time.
    sleep(Duration::from_millis(500));
    subject.finish().map(drop)
}

/// With one thread beside the first, which sleeps in read(2), it is soon its turn to be
/// borrowed.
fn each_alone() -> Result<()> {
    for thread in
        ["clock", "nanosleep", "poll", "epoll", "futex", "sigtimedwait", "waiter", "handler"]
    {
        back_and_forth(&[thread], &["--backend", "thp"], READ_ONLY, Backing::Thp, 1)?;
    }
    // And with none.
    back_and_forth(&[], &[], READ_ONLY, Backing::Hugetlb, 3)
}

fn state(pid: u32) -> Result<String> {
    let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
    Ok(status.lines().find(|l| l.starts_with("State:")).unwrap_or_default().to_owned())
}

fn stopped() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "nanosleep"]))?;
    let pid = Pid::from_raw(i32::try_from(subject.pid())?);
    kill(pid, Signal::SIGSTOP)?;
    let is_stopped = || -> Result<bool> { Ok(state(subject.pid())?.contains("stopped")) };
    for _ in 0..500 {
        if is_stopped()? {
            break;
        }
        sleep(Duration::from_millis(10));
    }
    succeed("attach", subject.pid(), &[])?;
    subject.expect(READ_ONLY, Backing::Hugetlb)?;
    ensure!(is_stopped()?, "{}", state(subject.pid())?);
    succeed("detach", subject.pid(), &[])?;
    subject.expect_untouched()?;
    ensure!(is_stopped()?, "{}", state(subject.pid())?);
    kill(pid, Signal::SIGCONT)?;
    subject.finish().map(drop)
}

/// A stop signal that comes at any moment stops it, and the next one lets it go on.
fn signalled() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["caller", "handler"]))?;
    let pid = Pid::from_raw(i32::try_from(subject.pid())?);
    let sender = std::thread::spawn(move || {
        for round in 0..400 {
            let signal = if round % 2 == 0 { Signal::SIGSTOP } else { Signal::SIGCONT };
            let _ = kill(pid, signal);
            sleep(Duration::from_micros(700));
        }
        let _ = kill(pid, Signal::SIGCONT);
    });
    for _ in 0..5 {
        succeed("attach", subject.pid(), &["--timeout", "50"])?;
        succeed("detach", subject.pid(), &["--timeout", "50"])?;
    }
    sender.join().map_err(|_| anyhow::anyhow!("the sender panicked"))?;
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// The block of a function that the program patches stays on the file or reads as patched, the
/// others move.
fn patched() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["patcher", "caller"]))?;
    for _ in 0..5 {
        succeed("attach", subject.pid(), &[])?;
        let now = subject.now()?;
        let cover = now.coverage(&subject.image);
        let text = cover.get(&Class::Text).copied().unwrap_or_default();
        ensure!(text.hugetlb >= 2 << 20 && text.small >= 2 << 20, "{text:?}");
        succeed("detach", subject.pid(), &[])?;
    }
    subject.finish().map(drop)
}

/// A thread in vfork cannot be stopped: given up after the time, and nothing has happened.
fn long_vfork() -> Result<()> {
    let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(["long-vfork", "caller"]))?;
    // So that it is in there.
    let is_inside = |tid: &str| {
        let stat = fs::read_to_string(format!("/proc/{}/task/{tid}/stat", subject.pid()));
        stat.unwrap_or_default().contains(") D ")
    };
    let tasks = || -> Result<Vec<String>> {
        let tasks = fs::read_dir(format!("/proc/{}/task", subject.pid()))?;
        Ok(tasks.flatten().map(|t| t.file_name().to_string_lossy().into_owned()).collect())
    };
    for _ in 0..500 {
        if tasks()?.iter().any(|tid| is_inside(tid)) {
            break;
        }
        sleep(Duration::from_millis(10));
    }
    let pid = subject.pid().to_string();
    let output = elfremap(&["attach", &pid, "--timeout", "1"])?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && error.contains("vfork"), "{error}");
    subject.expect_untouched()?;
    // The same when the user gives up.
    let running = Run::new(elfremap_tests::library::tool("elfremap")?)
        .args(["attach", &pid, "--timeout", "60"])
        .start_waiting()?;
    sleep(Duration::from_millis(700));
    kill(Pid::from_raw(i32::try_from(running.pid())?), Signal::SIGINT)?;
    let output = running.finish()?;
    let error = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1) && error.contains("interrupted"), "{error}");
    subject.expect_untouched()?;
    subject.finish().map(drop)
}

/// A process may end at any moment of the work on it: that is what it is then told to have done,
/// whatever it was that failed.
fn ends_meanwhile() -> Result<()> {
    let program = build(&source_dir().join("attach/short.c"), "gcc", &["-O1"])?;
    let mut ended = 0;
    for milliseconds in (1..=30).cycle().take(90) {
        let mut child = Command::new(&program).arg(milliseconds.to_string()).spawn()?;
        let pid = child.id().to_string();
        for command in ["attach", "detach"] {
            let output = elfremap(&[command, &pid])?;
            let error = String::from_utf8_lossy(&output.stderr).into_owned();
            let is_over = ["ended", "no process"].iter().any(|words| error.contains(words));
            ensure!(
                output.status.success() && error.is_empty() || is_over,
                "{command} after {milliseconds} ms: {output:?}"
            );
            ended += usize::from(error.contains("ended"));
        }
        let status = child.wait()?;
        ensure!(status.success(), "after {milliseconds} ms: {status}");
    }
    ensure!(ended > 0, "none has ended meanwhile");
    Ok(())
}
