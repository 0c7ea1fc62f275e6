//! What the perfmap tests share: building targets, running them, reading perf maps.
#![allow(dead_code, reason = "each test binary uses its part")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Output, Stdio};

use tempfile::TempDir;

/// Says why a test does nothing; a failure when skips are not allowed.
pub(crate) fn skip(reason: &str) {
    assert!(
        std::env::var_os("ELFREMAP_TEST_NO_SKIP").is_none_or(|v| v != "1"),
        "skips are not allowed: {reason}"
    );
    eprintln!("skipped: {reason}");
}

/// Whether the command is in PATH; otherwise the skip is told.
pub(crate) fn have(command: &str) -> bool {
    let paths = std::env::var_os("PATH").unwrap_or_default();
    let found = std::env::split_paths(&paths).any(|dir| dir.join(command).is_file());
    if !found {
        skip(&format!("needs {command}"));
    }
    found
}

/// Whether we are root; otherwise the skip is told.
pub(crate) fn root() -> bool {
    let root = nix::unistd::geteuid().is_root();
    if !root {
        skip("needs root");
    }
    root
}

/// A file of this folder.
pub(crate) fn source(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/perfmap").join(name)
}

/// Runs a command that must succeed; its standard output.
pub(crate) fn run<S: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = S>) -> String {
    let mut command = Command::new(program);
    let output = command.args(args).output().unwrap_or_else(|e| panic!("{program}: {e}"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{command:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// A folder for the files of one test.
pub(crate) struct Folder(TempDir);

impl Folder {
    pub(crate) fn new() -> Self {
        Self(tempfile::Builder::new().prefix("perfmap").tempdir().unwrap())
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    /// Compiles `sources` to the file `name`.
    pub(crate) fn build(&self, name: &str, sources: &[&str], flags: &[&str]) -> PathBuf {
        let out = self.path(name);
        let mut args: Vec<std::ffi::OsString> =
            ["-O1", "-Wall", "-D_GNU_SOURCE", "-o"].map(Into::into).into();
        args.push(out.clone().into());
        args.extend(sources.iter().map(|s| source(s).into()));
        args.extend(flags.iter().map(Into::into));
        run("cc", args);
        out
    }

    /// `target.c`, compiled.
    pub(crate) fn target(&self, flags: &[&str]) -> PathBuf {
        self.build("target", &["target.c"], flags)
    }
}

/// A running target; ended, and its perf map removed, when dropped.
pub(crate) struct Target {
    child: Child,
    pub(crate) lines: Lines<BufReader<ChildStdout>>,
    /// The address that it said.
    pub(crate) address: u64,
}

impl Target {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let line = lines.next().expect("the target says that it is ready").unwrap();
        let address = line.strip_prefix("ready ").unwrap();
        let address = u64::from_str_radix(address, 16).unwrap();
        Self { child, lines, address }
    }

    pub(crate) fn run(program: &Path, args: &[&str]) -> Self {
        Self::start(Command::new(program).args(args))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The number of the one process that it started.
    pub(crate) fn child_pid(&self) -> u32 {
        let children = format!("/proc/{0}/task/{0}/children", self.pid());
        std::fs::read_to_string(children).unwrap().trim().parse().unwrap()
    }

    pub(crate) fn map_path(&self) -> PathBuf {
        map_path(self.pid())
    }

    /// Runs perfmap on it with `args`, which must give `status`; its output.
    pub(crate) fn perfmap(&self, args: &[&str], status: i32) -> Outcome {
        perfmap(&[args, &[&self.pid().to_string()]].concat(), status)
    }

    /// Runs perfmap without arguments, which must succeed in silence; the map.
    pub(crate) fn map(&self) -> Map {
        let outcome = self.perfmap(&[], 0);
        assert_eq!(outcome.stderr, "");
        Map::read(&self.map_path())
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        // Either may be gone already.
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_file(self.map_path());
    }
}

pub(crate) fn map_path(pid: u32) -> PathBuf {
    format!("/tmp/perf-{pid}.map").into()
}

/// What a command printed.
pub(crate) struct Outcome {
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Outcome {
    pub(crate) fn of(output: &Output, status: i32) -> Self {
        let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
        let outcome = Self { stdout: text(&output.stdout), stderr: text(&output.stderr) };
        assert_eq!(output.status.code(), Some(status), "{}{}", outcome.stdout, outcome.stderr);
        outcome
    }
}

/// Runs `elfremap perfmap`, which must end with `status`.
pub(crate) fn perfmap(args: &[&str], status: i32) -> Outcome {
    let elfremap = env!("CARGO_BIN_EXE_elfremap");
    Outcome::of(&Command::new(elfremap).arg("perfmap").args(args).output().unwrap(), status)
}

/// A perf map, checked to be well formed, sorted and without overlaps.
#[derive(Debug)]
pub(crate) struct Map(pub(crate) BTreeMap<u64, (u64, String)>);

impl Map {
    pub(crate) fn read(path: &Path) -> Self {
        Self::parse(&std::fs::read_to_string(path).unwrap())
    }

    pub(crate) fn parse(text: &str) -> Self {
        assert!(text.ends_with('\n'));
        let mut map = BTreeMap::new();
        let mut last = 0;
        for line in text.lines() {
            let mut fields = line.splitn(3, ' ');
            let mut number = || {
                let field = fields.next().unwrap();
                assert!(field.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')), "{line}");
                u64::from_str_radix(field, 16).unwrap()
            };
            let (start, size) = (number(), number());
            let name = fields.next().unwrap();
            assert!(name.len() >= 3 && !name.chars().any(char::is_control), "{line}");
            assert!(last <= start && size > 0, "not sorted, empty or overlapping: {line}");
            last = start + size;
            map.insert(start, (size, name.trim_end().to_owned()));
        }
        Self(map)
    }

    /// The name that perf shows for an address.
    pub(crate) fn at(&self, address: u64) -> Option<&str> {
        let (start, (size, name)) = self.0.range(..=address).next_back()?;
        (address < start + size).then_some(name)
    }

    /// All records of that name, as (address, size).
    pub(crate) fn named(&self, name: &str) -> Vec<(u64, u64)> {
        let records = self.0.iter().filter(|(_, (_, n))| n == name);
        records.map(|(&start, &(size, _))| (start, size)).collect()
    }
}

/// The symbols of a file as nm lists them: (address, size, type, name); size 0 when unknown.
pub(crate) fn nm(file: &Path, flags: &[&str]) -> Vec<(u64, u64, char, String)> {
    let args = ["-S", "--defined-only"].iter().chain(flags).map(OsStr::new).chain([file.as_ref()]);
    let hex = |text: &str| u64::from_str_radix(text, 16).unwrap();
    run("nm", args)
        .lines()
        .filter_map(|line| {
            let fields: Vec<_> = line.split(' ').collect();
            match fields[..] {
                [at, size, kind, name] if kind.len() == 1 => {
                    Some((hex(at), hex(size), kind.chars().next()?, name.to_owned()))
                }
                [at, kind, name] if kind.len() == 1 => {
                    Some((hex(at), 0, kind.chars().next()?, name.to_owned()))
                }
                _ => None,
            }
        })
        .collect()
}

/// The address that nm gives for `name`.
pub(crate) fn address_of(file: &Path, name: &str) -> u64 {
    let symbols = nm(file, &[]);
    symbols.iter().find(|s| s.3 == name).unwrap_or_else(|| panic!("no symbol {name}")).0
}

/// Checks that each function that nm finds in `file` has its own record, `bias` higher up,
/// and that its name is one of those that nm lists for that address.
pub(crate) fn check_against_nm(map: &Map, file: &Path, bias: u64) {
    // Weak data is listed as weak functions are, but has no size where it occurs.
    let functions = nm(file, &[]).into_iter();
    let functions: Vec<_> =
        functions.filter(|s| "tTi".contains(s.2) || ("wW".contains(s.2) && s.1 > 0)).collect();
    assert!(functions.len() > 3, "nm found {} functions in {}", functions.len(), file.display());
    for (address, size, _, _) in &functions {
        let names: Vec<_> =
            functions.iter().filter(|s| s.0 == *address).map(|s| s.3.as_str()).collect();
        let (length, name) = map
            .0
            .get(&address.wrapping_add(bias))
            .unwrap_or_else(|| panic!("no record for {names:?}"));
        assert!(names.contains(&name.as_str()), "{name} instead of {names:?}");
        assert!(*size == 0 || length == size, "{name} has size {length} instead of {size}");
    }
}
