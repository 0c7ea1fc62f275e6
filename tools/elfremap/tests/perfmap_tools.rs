//! perf and gdb themselves, on programs under the preload: what they show must be as good as
//! without it.

#[path = "perfmap/support.rs"]
mod support;

use std::ffi::{OsStr, OsString};
use std::fmt::Write as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use elfremap_tests::outcome::{Skip, check};
use elfremap_tests::pool::Host;
use elfremap_tests::run::{Run, Running};

use support::{Folder, Map, Target, map_path, nm, run, source};

/// Functions of `spin.c`, a page each.
const FUNCTIONS: u32 = 1024;

/// Where the text of a program under test goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    SmallPages,
    Thp,
    Pool,
}

/// Programs that spend their time in many functions: a PIE, and one of fixed address. Built
/// once for all tests.
fn spin() -> &'static [PathBuf; 2] {
    static BUILT: OnceLock<[PathBuf; 2]> = OnceLock::new();
    BUILT.get_or_init(|| {
        let folder = elfremap_tests::library::cache_dir("perfmap").unwrap();
        let many: String = (0..FUNCTIONS).map(|number| format!("FUNCTION({number})\n")).collect();
        fs::write(folder.join("many.h"), many).unwrap();
        [("spin-pie", ["-pie", "-fPIE"]), ("spin-fixed", ["-no-pie", "-fno-pie"])].map(
            |(name, flags)| {
                let program = folder.join(name);
                let mut args = vec![OsString::from("-o"), program.clone().into()];
                args.extend(["-O1", "-g1"].iter().chain(&flags).map(OsString::from));
                args.extend(["-I".into(), folder.clone().into(), source("spin.c").into()]);
                run("cc", args);
                program
            },
        )
    })
}

/// The environment that puts text there.
fn on_environment(pages: On) -> Result<Vec<String>> {
    let backend = match pages {
        On::SmallPages => return Ok(Vec::new()),
        On::Thp => "thp",
        On::Pool => "hugetlb",
    };
    let library = elfremap_tests::library::preload()?;
    Ok(vec![format!("ELFREMAP_BACKEND={backend}"), format!("LD_PRELOAD={}", library.display())])
}

fn on(program: &Path, pages: On) -> Result<Run> {
    let run = Run::new(program).time_limit(Duration::from_secs(120));
    let variables = on_environment(pages)?;
    let variables = variables.iter().filter_map(|v| v.split_once('='));
    Ok(variables.fold(run, |run, (name, value)| run.env(name, value)))
}

/// Fails unless the program's text lies where it should: the test would prove nothing.
fn check_pages(running: &Running, program: &Path, pages: On) -> Result<()> {
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid()))?;
    let name = program.to_str().context("name")?;
    let code: u64 = maps
        .lines()
        .filter(|line| line.contains(" r-xp ") && line.ends_with(name))
        .map(|line| range_of(line).map_or(0, |(start, end)| end - start))
        .sum();
    let moved = maps.lines().filter(|line| {
        let large = range_of(line).is_some_and(|(start, end)| end - start >= 2 << 20);
        line.contains(" r-xp ") && large && !line.contains(".so")
    });
    let moved = moved.filter(|line| !line.ends_with(name)).count();
    match pages {
        On::SmallPages => ensure!(moved == 0 && code >= 4 << 20, "moved: {maps}"),
        On::Thp | On::Pool => ensure!(moved > 0, "not moved: {maps}"),
    }
    let huge = maps.lines().any(|line| line.contains(" r-xp ") && line.contains("/anon_hugepage"));
    ensure!(huge == (pages == On::Pool), "{maps}");
    Ok(())
}

fn range_of(line: &str) -> Option<(u64, u64)> {
    let (start, end) = line.split(' ').next()?.split_once('-')?;
    Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
}

/// A skip unless perf is there and may count.
fn need_perf(folder: &Folder) -> Result<()> {
    let data = folder.path("try.data");
    let tried = Command::new("perf")
        .args(["record", "-q", "-e", "cpu-clock", "-o"])
        .arg(data)
        .args(["--", "true"])
        .output();
    match tried {
        Err(_) => Err(Skip::because("needs perf (package linux-perf)")),
        Ok(output) if !output.status.success() => {
            let why = String::from_utf8_lossy(&output.stderr).into_owned();
            Err(Skip::because(format!("perf may not count here: {why}")))
        }
        Ok(_) => Ok(()),
    }
}

/// `perf record` with `args`, to the file `data`.
fn record(data: &Path, args: &[&str]) {
    let data = data.to_str().unwrap();
    let head = ["record", "-q", "-F", "2000", "-e", "cpu-clock", "-o", data];
    run("perf", head.iter().chain(args));
}

/// What perf report says about a recording: samples in user space code of the program or
/// without a file, and how many of them it names.
#[derive(Clone, Copy, Debug, Default)]
struct Samples {
    all: u64,
    named: u64,
}

impl Samples {
    /// Of `program` in the recording `data`, not counting what ran in shared objects and the
    /// kernel.
    fn of(data: &Path, program: &Path) -> Self {
        let comm = program.file_name().unwrap().to_str().unwrap();
        let args = ["report", "--stdio", "-t", "|", "-F", "sample,dso,sym", "--comm", comm, "-i"];
        let report = run("perf", args.iter().map(AsRef::as_ref).chain([data.as_os_str()]));
        let mut samples = Self::default();
        for line in report.lines().filter(|line| !line.starts_with('#')) {
            let fields: Vec<_> = line.split('|').map(str::trim).collect();
            let [count, object, symbol] = fields[..] else { continue };
            let Some(name) = symbol.strip_prefix("[.] ") else { continue };
            let shared = object.contains(".so") || object == "[vdso]" || object == "[unknown]";
            let Ok(count) = count.parse::<u64>() else { continue };
            if shared {
                continue;
            }
            samples.all += count;
            if !name.starts_with("0x") {
                samples.named += count;
            }
        }
        samples
    }

    fn share(self) -> f64 {
        self.named as f64 / self.all as f64
    }
}

/// Attaches perf to a process until it has a few hundred samples of the program.
fn record_enough(data: &Path, pid: u32, program: &Path) -> Result<()> {
    let mut samples = Samples::default();
    for seconds in ["1", "4", "16"] {
        record(data, &["-p", &pid.to_string(), "sleep", seconds]);
        samples = Samples::of(data, program);
        if samples.all > 500 {
            return Ok(());
        }
    }
    anyhow::bail!("too few samples: {samples:?}")
}

/// Checks each sample of `data` that lies in one of `functions` (address, size, name): perf must
/// give a name that the function has. Returns how many were right, and how many there were.
fn right_names(data: &Path, mut functions: Vec<(u64, u64, String)>, bias: u64) -> (u64, u64) {
    functions.sort();
    let args = ["script", "--no-demangle", "-F", "ip,sym", "-i"];
    let script = run("perf", args.iter().map(AsRef::as_ref).chain([data.as_os_str()]));
    let (mut right, mut all) = (0, 0);
    for line in script.lines() {
        let (ip, name) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
        let Ok(ip) = u64::from_str_radix(ip, 16) else { continue };
        let ip = ip.wrapping_sub(bias);
        let after = functions.partition_point(|f| f.0 <= ip);
        let Some(last) = functions[..after].last() else { continue };
        let first = functions[..after].partition_point(|f| f.0 < last.0);
        let mut here = functions[first..after].iter().filter(|f| ip - f.0 < f.1).peekable();
        if here.peek().is_some() {
            all += 1;
            right += u64::from(here.any(|f| f.2 == name.trim()));
        }
    }
    (right, all)
}

/// The functions in a symbol table as nm lists it, those with a size.
fn functions(program: &Path, dynamic: bool) -> Vec<(u64, u64, String)> {
    let symbols = nm(program, if dynamic { &["-D"] } else { &[] }).into_iter();
    let sized = symbols.filter(|s| "tTwWi".contains(s.2) && s.1 > 0);
    // A version, which nm appends to dynamic symbols, is not a part of the name.
    sized.map(|s| (s.0, s.1, s.3.split('@').next().unwrap().to_owned())).collect()
}

/// The load bias of a running program, by its own mapping of the ELF header, or 0 when it has
/// a fixed address.
fn bias(running: &Running, program: &Path) -> u64 {
    if run("readelf", ["-h".as_ref(), program.as_os_str()]).contains("EXEC") {
        return 0;
    }
    let maps = fs::read_to_string(format!("/proc/{}/maps", running.pid())).unwrap();
    let header = maps.lines().find(|line| {
        line.ends_with(program.to_str().unwrap()) && line.split(' ').nth(2) == Some("00000000")
    });
    range_of(header.expect("the ELF header stays on its file")).unwrap().0
}

/// A perf map, removed in the end.
struct Written(PathBuf);

impl Drop for Written {
    fn drop(&mut self) {
        // Never written when the test failed before.
        let _ = fs::remove_file(&self.0);
    }
}

fn perfmap(pid: u32, args: &[&str], status: i32) -> Written {
    support::perfmap(&[args, &[&pid.to_string()]].concat(), status);
    Written(map_path(pid))
}

/// Attaches perf to the program on these pages: (samples, right names, names to check).
fn attached(folder: &Folder, program: &Path, pages: On) -> Result<(Samples, (u64, u64))> {
    let running = on(program, pages)?.until_ready()?;
    check_pages(&running, program, pages)?;
    let data = folder.path("attached.data");
    record_enough(&data, running.pid(), program)?;
    let _map = (pages != On::SmallPages).then(|| perfmap(running.pid(), &[], 0));
    let bias = bias(&running, program);
    Ok((Samples::of(&data, program), right_names(&data, functions(program, false), bias)))
}

fn perf_names_as_before(pages: On) -> Result<()> {
    let mut host = if pages == On::Pool { Some(Host::lock()?) } else { None };
    let folder = Folder::new();
    need_perf(&folder)?;
    for program in spin() {
        if let Some(host) = &mut host {
            host.pages(16)?;
        }
        let (plain, _) = attached(&folder, program, On::SmallPages)?;
        let (moved, (right, checked)) = attached(&folder, program, pages)?;
        println!(
            "{} {pages:?}: plain {plain:?}, moved {moved:?}, right {right}/{checked}",
            program.display()
        );
        ensure!(moved.share() >= 0.99 * plain.share(), "{moved:?} after {plain:?}");
        ensure!(checked * 10 > moved.all * 9 && right * 100 >= checked * 99, "{right}/{checked}");
    }
    host.map_or(Ok(()), Host::finish)
}

#[test]
fn perf_attached_names_text_on_thp() {
    check(perf_names_as_before(On::Thp));
}

#[test]
fn perf_attached_names_text_on_the_pool() {
    check(perf_names_as_before(On::Pool));
}

#[test]
fn perf_from_the_start_needs_no_map() {
    check((|| {
        let folder = Folder::new();
        need_perf(&folder)?;
        let program = &spin()[0];
        let library = elfremap_tests::library::preload()?;
        let data = folder.path("start.data");
        let preload = format!("LD_PRELOAD={}", library.display());
        let name = program.to_str().context("name")?;
        record(&data, &["--", "env", "ELFREMAP_BACKEND=thp", &preload, name, "rounds", "4000"]);
        let samples = Samples::of(&data, program);
        println!("from the start: {samples:?}");
        ensure!(samples.all > 300 && samples.share() >= 0.99, "{samples:?}");
        Ok(())
    })());
}

#[test]
fn perf_of_the_whole_machine() {
    check((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root: perf record -a"));
        }
        let folder = Folder::new();
        need_perf(&folder)?;
        let program = &spin()[0];
        let running = on(program, On::Thp)?.until_ready()?;
        check_pages(&running, program, On::Thp)?;
        let data = folder.path("machine.data");
        record(&data, &["-a", "sleep", "1"]);
        let _map = perfmap(running.pid(), &[], 0);
        let samples = Samples::of(&data, program);
        println!("of the whole machine: {samples:?}");
        ensure!(samples.all > 100 && samples.share() >= 0.99, "{samples:?}");
        Ok(())
    })());
}

/// perf inside and outside of a container with a /tmp and process numbers of its own. The
/// target moves itself: the container needs no more than it.
#[test]
fn perf_inside_and_outside_of_a_container() {
    check((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root: namespaces"));
        }
        let folder = Folder::new();
        need_perf(&folder)?;
        let program = folder.build("target", &["target.c"], &[]);
        let place = tempfile::Builder::new().prefix("perfmap").tempdir_in("/var/tmp")?;
        let copy = place.path().join("target");
        elfremap_tests::library::copy_program(&program, &copy)?;
        let script = format!("mount -t tmpfs none /tmp && exec {} text spin", copy.display());
        let unshare = ["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c"];
        let parent = Target::start(Command::new("unshare").args(unshare).arg(&script));
        let pid = parent.child_pid();
        let outside = place.path().join("outside.data");
        record(&outside, &["-p", &pid.to_string(), "sleep", "0.5"]);
        ensure!(Samples::of(&outside, &copy).named == 0, "named without a map");
        {
            let _map = perfmap(pid, &[], 0);
            let samples = Samples::of(&outside, &copy);
            ensure!(samples.all > 50 && samples.share() >= 0.99, "outside: {samples:?}");
        }

        // Inside, with a perf that sees the container's processes and folders only.
        support::perfmap(&["--in-container", &pid.to_string()], 0);
        let inside = place.path().join("inside.data");
        let inside = inside.to_str().context("name")?;
        let pid = pid.to_string();
        let enter = ["-t", &pid, "--pid", "--mount", "perf"];
        let record = [
            "record",
            "-q",
            "-F",
            "2000",
            "-e",
            "cpu-clock",
            "-o",
            inside,
            "-p",
            "1",
            "sleep",
            "0.5",
        ];
        run("nsenter", enter.iter().chain(&record));
        let report = ["report", "--stdio", "-F", "sample,sym", "-i", inside];
        let report = run("nsenter", enter.iter().chain(&report));
        ensure!(report.contains("[.] innermost") && !report.contains("[.] 0x"), "{report}");
        Ok(())
    })());
}

/// mariadbd at work in a bootstrap session, on these pages.
fn mariadbd(folder: &Folder, pages: On) -> Result<Running> {
    let program = Path::new("/usr/sbin/mariadbd");
    if !program.exists() {
        return Err(Skip::because("needs mariadbd (package mariadb-server-core)"));
    }
    let data = folder.path(&format!("data-{pages:?}"));
    fs::create_dir_all(&data)?;
    let mut running = on(program, pages)?
        .args(["--no-defaults", "--bootstrap", "--user=root", "--innodb-buffer-pool-size=8M"])
        .arg(format!("--datadir={}", data.display()))
        .start_waiting()?;
    // Parsing, evaluating and sorting, not one hot loop.
    running.write("SELECT 'ready';\n")?;
    for _ in 0..200 {
        running.write(
            "SELECT BENCHMARK(2000000, CONCAT(UPPER('abc'), SUBSTR(MD5(RAND()), 3, 9), \
             REPLACE('a,b,c', ',', ';'), FORMAT(PI() * 1000, 3), DATE_ADD(NOW(), INTERVAL 3 DAY)));\n",
        )?;
    }
    std::thread::sleep(Duration::from_secs(4));
    Ok(running)
}

#[test]
fn perf_names_mariadbd_as_before() {
    check((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root: mariadbd runs as the user it is started as"));
        }
        let folder = Folder::new();
        need_perf(&folder)?;
        let mut shares = Vec::new();
        for pages in [On::SmallPages, On::Thp] {
            let running = mariadbd(&folder, pages)?;
            check_pages(&running, Path::new("/usr/sbin/mariadbd"), pages)?;
            let data = folder.path("mariadbd.data");
            record_enough(&data, running.pid(), Path::new("/usr/sbin/mariadbd"))?;
            // Debian's mariadbd is stripped: dynamic symbols only, for perf as for us.
            let _map =
                (pages != On::SmallPages).then(|| perfmap(running.pid(), &["--no-demangle"], 3));
            let program = Path::new("/usr/sbin/mariadbd");
            let samples = Samples::of(&data, program);
            let bias = bias(&running, program);
            let (right, checked) = right_names(&data, functions(program, true), bias);
            println!("mariadbd on {pages:?}: {samples:?}, right {right}/{checked}");
            if pages != On::SmallPages {
                // What the file's symbol table can name, is named.
                ensure!(right * 100 >= checked * 99, "{right}/{checked}");
                ensure!(checked * 5 > samples.all, "{checked} of {samples:?} can be named");
            }
            shares.push(samples);
        }
        // Two recordings differ by chance: three times the deviation of the share.
        let [plain, moved] = shares[..] else { unreachable!("two recordings") };
        let deviation = |s: Samples| (s.share() * (1.0 - s.share()) / s.all as f64).sqrt();
        let margin = 3.0 * deviation(plain).hypot(deviation(moved));
        ensure!(moved.share() >= 0.99 * plain.share() - margin, "{moved:?} after {plain:?}");
        Ok(())
    })());
}

/// What gdb prints when it is started with `args` and given `commands`.
fn gdb_commands<S: AsRef<OsStr>>(args: &[S], commands: &[&str]) -> Result<String> {
    let head = ["-nx", "-batch", "-iex", "set debuginfod enabled off"];
    let commands = commands.iter().flat_map(|command| ["-ex", command]);
    let tried = Command::new("gdb").args(head).args(args).args(commands).output();
    let Ok(output) = tried else { return Err(Skip::because("needs gdb")) };
    let text = [output.stdout, output.stderr].concat();
    Ok(String::from_utf8_lossy(&text).into_owned())
}

/// Checks that the frames come in this order, each with its name.
fn check_frames(text: &str, names: &[&str]) -> Result<()> {
    let frames: Vec<_> = text.lines().filter(|line| line.starts_with('#')).collect();
    let mut rest = frames.iter();
    for name in names {
        let wanted = format!("{name} (");
        ensure!(rest.any(|frame| frame.contains(&wanted)), "no {name} in order: {text}");
    }
    Ok(())
}

const FRAMES: [&str; 4] = ["innermost", "middle", "outer", "main"];

fn gdb_works(pages: On) -> Result<()> {
    let mut host = if pages == On::Pool { Some(Host::lock()?) } else { None };
    if let Some(host) = &mut host {
        host.pages(16)?;
    }
    let folder = Folder::new();
    for program in spin() {
        // Attach: names of a program that waits, three functions deep.
        let waiting = on(program, pages)?.arg("wait").until_ready()?;
        check_pages(&waiting, program, pages)?;
        let pid = waiting.pid().to_string();
        check_frames(&gdb_commands(&["-p", &pid], &["bt"])?, &FRAMES)?;

        // A hardware breakpoint in one that runs, and steps from there.
        let spinning = on(program, pages)?.until_ready()?;
        check_pages(&spinning, program, pages)?;
        let pid = spinning.pid().to_string();
        let commands = ["hbreak work_77", "continue", "bt", "stepi", "stepi", "x/i $pc"];
        let text = gdb_commands(&["-p", &pid], &commands)?;
        check_frames(&text, &["work_77", "main"])?;
        ensure!(text.lines().any(|l| l.starts_with("=>") && l.contains("<work_77+")), "{text}");

        // Software breakpoints, which some kernels cannot set in text on pool pages.
        if pages != On::Pool {
            let commands =
                ["break work_99", "continue", "bt", "finish", "print ((long(*)(long))work_5)(1)"];
            let text = gdb_commands(&["-p", &pid], &commands)?;
            check_frames(&text, &["work_99", "main"])?;
            ensure!(text.contains("$1 = "), "{text}");
        }

        // A core file taken from the outside.
        let core = folder.path("core");
        let pid = waiting.pid().to_string();
        let text = gdb_commands(&["-p", &pid], &[&format!("gcore {}", core.display())])?;
        ensure!(core.exists(), "no core file: {text}");
        let opened = gdb_commands(&[program, &core], &["bt"])?;
        check_frames(&opened, &FRAMES)?;
        fs::remove_file(&core)?;

        // Breakpoints set before the start: hit, and the program goes on.
        let mut commands: Vec<_> =
            on_environment(pages)?.iter().map(|v| format!("set environment {v}")).collect();
        let rest =
            ["break innermost", "run wait", "bt", "watch counter", "continue", "print counter"];
        commands.extend(rest.map(String::from));
        let commands: Vec<_> = commands.iter().map(String::as_str).collect();
        let text = gdb_commands(&[program], &commands)?;
        check_frames(&text, &FRAMES)?;
        ensure!(text.contains("New value = 6") && text.contains("$1 = 6"), "{text}");

        // A core file written by the kernel.
        for filter in ["0x33", "0x13"] {
            let opened = kernel_core(program, pages, filter)?;
            check_frames(&opened, &FRAMES)?;
        }
    }
    host.map_or(Ok(()), Host::finish)
}

/// The backtrace that gdb finds in the core file of a crash, written with this filter.
fn kernel_core(program: &Path, pages: On, filter: &str) -> Result<String> {
    let pattern = fs::read_to_string("/proc/sys/kernel/core_pattern")?;
    if pattern.starts_with(['|', '@', '/']) {
        return Err(Skip::because("needs core files in the current folder (kernel.core_pattern)"));
    }
    let place = tempfile::tempdir()?;
    let script = format!(
        "echo {filter} >/proc/self/coredump_filter; ulimit -c unlimited; exec {} crash",
        program.display()
    );
    let output =
        on(Path::new("/bin/sh"), pages)?.args(["-c", &script]).directory(place.path()).output()?;
    let core = fs::read_dir(place.path())?.next();
    let core = core.with_context(|| format!("no core file: {output:?}"))??.path();
    gdb_commands(&[program, &core], &["bt"])
}

#[test]
fn gdb_on_text_on_thp() {
    check(gdb_works(On::Thp));
}

#[test]
fn gdb_on_text_on_the_pool() {
    check(gdb_works(On::Pool));
}

/// The assembler text of half a million functions with mangled names, as large programs
/// have them: C++ with and without templates, Rust in both manners.
fn half_a_million_functions() -> String {
    let mut text = String::from(".text\n");
    for number in 0..500_000 {
        let tail = format!("{:08x}", number * 7);
        let mangled = match number % 10 {
            0..=3 => format!("_ZN4llvm14Class_{tail}6methodERKNS_9StringRefEPNS_5ValueEi"),
            4..=6 => format!(
                "_ZNSt6vectorIN5space16Element_{tail}ESaIS1_EE17_M_realloc_insertIJRKS1_EEEvv"
            ),
            7 | 8 => format!("_ZN5crate6module13func_{tail}17h0123456789abcdefE"),
            _ => format!("_RNvNtCs1234_5crate6module13func_{tail}"),
        };
        writeln!(text, ".type {mangled}, @function\n{mangled}: nop\n.size {mangled}, 1").unwrap();
    }
    text.push_str(".section .note.GNU-stack,\"\",@progbits\n");
    text
}

/// Processor seconds that the command takes, which other work on the machine hardly changes.
/// The shell's `times` says what its children took.
fn seconds(program: &Path, args: &[&str]) -> Result<f64> {
    let mut command = Command::new("sh");
    command.args(["-c", "\"$@\" >/dev/null && times", "sh"]).arg(program).args(args);
    let output = command.output()?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    let times = String::from_utf8(output.stdout)?;
    let children = times.lines().nth(1).context("times of children")?;
    let second = |time: &str| -> Option<f64> {
        let (minutes, seconds) = time.strip_suffix('s')?.split_once('m')?;
        Some(minutes.parse::<f64>().ok()? * 60.0 + seconds.parse::<f64>().ok()?)
    };
    children.split_whitespace().map(second).sum::<Option<f64>>().context("a time")
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

#[test]
fn half_a_million_names_in_less_than_three_times_what_nm_takes() {
    check((|| {
        let elfremap = Path::new(env!("CARGO_BIN_EXE_elfremap"));
        let release =
            elfremap.ancestors().nth(2).context("target folder")?.join("release/elfremap");
        if !release.exists() {
            return Err(Skip::because("needs the release build: make release"));
        }
        let folder = Folder::new();
        let assembler = folder.path("functions.s");
        fs::write(&assembler, half_a_million_functions())?;
        let program = folder.target(&[assembler.to_str().context("name")?]);
        let target = Target::run(&program, &["text"]);
        let (mut ours, mut nms) = (Vec::new(), Vec::new());
        for _ in 0..5 {
            let file = program.to_str().context("name")?;
            nms.push(seconds(Path::new("nm"), &["--demangle", file])?);
            ours.push(seconds(&release, &["perfmap", &target.pid().to_string()])?);
        }
        let map = Map::read(&target.map_path());
        ensure!(map.0.len() >= 500_000, "{} names", map.0.len());
        ensure!(
            map.0.values().all(|(_, name)| !name.starts_with("_ZN") && !name.starts_with("_R"))
        );
        let (ours, nm) = (median(ours), median(nms));
        println!("perfmap {ours:.2} s, nm --demangle {nm:.2} s, ratio {:.2}", ours / nm);
        ensure!(ours < 3.0 * nm, "perfmap {ours:.2} s, nm {nm:.2} s");
        Ok(())
    })());
}
