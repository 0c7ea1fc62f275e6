//! Every system call that `attach` and `detach` make inside of a process fails once, with two
//! kinds of errors: the process goes on, each of its ranges whole, and nothing of ours is left in it.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use elfremap::errno::Errno;
use elfremap::policy::{Backends, Policy, Segments};
use elfremap_tests::attach::{Subject, subject};
use elfremap_tests::image::Class;
use elfremap_tests::outcome::trial;
use elfremap_tests::pool::Host;
use elfremap_tests::run::Run;
use elfremap_tests::smaps::Snapshot;
use elfremap_tools::attach::{self, Calls, Options, Target};
use libtest_mimic::Arguments;
use std::cell::RefCell;
use std::rc::Rc;

/// What is seen of the calls, and which of them is to fail.
#[derive(Default)]
struct Plan {
    seen: Vec<libc::c_long>,
    fails: Option<(usize, i32)>,
    /// A failing mremap takes its target away first, as the kernel's may.
    tears: bool,
}

struct Failing {
    inner: Box<dyn Calls>,
    plan: Rc<RefCell<Plan>>,
}

impl Calls for Failing {
    fn call(&mut self, number: libc::c_long, arguments: [u64; 6]) -> Result<u64, Errno> {
        let (fails, tears) = {
            let mut plan = self.plan.borrow_mut();
            plan.seen.push(number);
            let nth = plan.seen.len() - 1;
            (plan.fails.filter(|(wanted, _)| *wanted == nth), plan.tears)
        };
        let Some((_, errno)) = fails else { return self.inner.call(number, arguments) };
        if tears && number == libc::SYS_mremap {
            let target = [arguments[4], arguments[2], 0, 0, 0, 0];
            self.inner.call(libc::SYS_munmap, target)?;
        }
        Err(Errno(errno))
    }

    fn thread(&self) -> i32 {
        self.inner.thread()
    }

    fn move_to(&mut self, code: Option<u64>) {
        self.inner.move_to(code);
    }

    fn end(&mut self) {
        self.inner.end();
    }
}

const TIMEOUT: Duration = Duration::from_secs(60);

fn options(segments: &str, backend: &str) -> Options {
    let policy = Policy {
        segments: segments.parse::<Segments>().unwrap(),
        backends: backend.parse::<Backends>().unwrap(),
        ..Policy::default()
    };
    Options { policy, block: 2 << 20, objects: Some(String::new()), timeout: TIMEOUT }
}

/// Does one or the other under `plan`; whether it worked does not matter.
fn go(command: &str, target: &Target, options: &Options, plan: &Rc<RefCell<Plan>>) -> Result<()> {
    let wrap = |inner: Box<dyn Calls>| -> Box<dyn Calls> {
        Box::new(Failing { inner, plan: Rc::clone(plan) })
    };
    match command {
        "attach" => attach::attach(target, options, None, &wrap).map(drop),
        _ => attach::detach(target, None, TIMEOUT, &wrap).map(drop),
    }
}

/// Every mapping of ours is gone: all that is executable is a file's or one of the program's
/// blocks, and there is no more huge memory than the program's.
fn expect_whole(subject: &Subject) -> Result<()> {
    subject.expect_no_trace()?;
    let now = subject.now()?;
    let image = &subject.image;
    let before = subject.before.protections(image);
    let changed = before.differences(&now.protections(image), |_, _| false);
    ensure!(changed.is_empty(), "protections changed: {changed:?}");
    let span = image.span().align_out(2 << 20).context("span")?;
    let inside = span.rebase(span.start() + now.bias).context("span")?;
    let inside = elfremap::range::Range::new(inside.start() & !0x1f_ffff, inside.end() + (2 << 20))
        .context("span")?;
    for vma in now.vmas.iter().filter(|v| v.kernel_page_size > 4096 || v.anon_huge > 0) {
        ensure!(inside.covers(vma.range), "left behind: {vma:?}");
    }
    let code = now.vmas.iter().filter(|v| v.prot == elfremap::prot::Prot::RX && v.inode == 0);
    for vma in code.filter(|v| !v.name.starts_with('[')) {
        ensure!(inside.covers(vma.range), "left behind: {vma:?}");
    }
    let elsewhere = |snapshot: &Snapshot| -> u64 {
        let others = snapshot.vmas.iter().filter(|v| !v.range.overlaps(inside));
        others.filter(|v| !v.name.starts_with("[stack")).map(|v| v.range.len()).sum()
    };
    let (then, now) = (elsewhere(&subject.before), elsewhere(&now));
    ensure!(now == then, "{now} bytes are mapped elsewhere instead of {then}");
    Ok(())
}

fn each_call_fails(command: &str, segments: &str, backend: &str, tears: bool) -> Result<()> {
    let mut host = Host::lock()?;
    host.overcommit(0)?;
    host.thp("madvise")?;
    host.pages(24)?;
    let threads = ["caller", "nanosleep", "poll", "writer"];
    let start = || -> Result<(Subject, Target)> {
        let subject = Subject::start(&Run::new(subject("gcc", &[])?).args(threads))?;
        let target = Target::open(subject.pid())?;
        Ok((subject, target))
    };
    let options = options(segments, backend);
    // All is on the file, and for `detach` then on huge pages.
    let prepare = |target: &Target| -> Result<()> {
        go("detach", target, &options, &Rc::default()).context("detach before")?;
        if command == "detach" {
            go("attach", target, &options, &Rc::default()).context("attach before")?;
        }
        Ok(())
    };
    let calls = |target: &Target| -> Result<Vec<libc::c_long>> {
        prepare(target)?;
        let plan: Rc<RefCell<Plan>> = Rc::default();
        go(command, target, &options, &plan).context("nothing was to fail")?;
        Ok(plan.take().seen)
    };
    // What is there to fail?
    let (mut subject, mut target) = start()?;
    let seen = calls(&target)?;
    let kinds: BTreeSet<_> = seen.iter().copied().collect();
    ensure!(kinds.contains(&libc::SYS_mremap) && seen.len() > 15, "{seen:?}");
    let mut failed = BTreeSet::new();
    for (nth, &number) in seen.iter().enumerate() {
        if tears && number != libc::SYS_mremap {
            continue;
        }
        // The many calls of one kind for one block after another are alike.
        if number != libc::SYS_munmap
            && nth > 3
            && seen.get(nth - 3..nth) == Some(&[number; 3][..])
            && nth % 4 != 0
        {
            continue;
        }
        for errno in [libc::ENOMEM, libc::EPERM] {
            // A failure may leave less to do for good: then it takes another process.
            if calls(&target)? != seen {
                subject.finish()?;
                (subject, target) = start()?;
            }
            prepare(&target)?;
            let plan =
                Rc::new(RefCell::new(Plan { fails: Some((nth, errno)), tears, ..Plan::default() }));
            let done = go(command, &target, &options, &plan);
            expect_whole(&subject).with_context(|| {
                format!("{command}: call {nth} (number {number}), error {errno}: {done:?}")
            })?;
            failed.extend(plan.take().seen.get(nth));
        }
    }
    let to_fail = if tears { BTreeSet::from([libc::SYS_mremap]) } else { kinds };
    ensure!(failed.is_superset(&to_fail), "only {failed:?} of {to_fail:?} have failed");
    // It can still be moved there and back.
    go("detach", &target, &options, &Rc::default())?;
    go("attach", &target, &options, &Rc::default())?;
    let cover = subject.now()?.coverage(&subject.image);
    let text = cover[&Class::Text];
    ensure!(text.hugetlb + text.thp >= 2 << 20, "{text:?}");
    go("detach", &target, &options, &Rc::default())?;
    subject.finish()?;
    host.finish()
}

fn main() {
    let trial =
        |name: &str,
         command: &'static str,
         segments: &'static str,
         backend: &'static str,
         tears| { trial(name, move || each_call_fails(command, segments, backend, tears)) };
    let all = "text,rodata,data,bss";
    let trials = vec![
        trial("each_call_of_attach", "attach", "text,rodata", "auto", false),
        trial("each_call_of_attach_with_data", "attach", "text,data,bss", "thp", false),
        trial("each_call_of_detach", "detach", all, "hugetlb", false),
        trial("attach::each_mremap_takes_its_target_away", "attach", all, "hugetlb", true),
        trial("detach::each_mremap_takes_its_target_away", "detach", all, "hugetlb", true),
    ];
    // A thread is traced by one thread, to which its signals come: all in the first one.
    let mut arguments = Arguments::from_args();
    arguments.test_threads = Some(1);
    libtest_mimic::run(&arguments, trials).exit();
}
