//! Broken and hostile files: an answer or an error line, soon, with little memory;
//! never a panic, a signal, a hang.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use elfremap::policy::Policy;
use elfremap_tests::outcome::{Skip, check as outcome};
use elfremap_tools::check::{Analysis, document, render};
use elfremap_tools::elf::ElfError;
use elfremap_tools::output::Style;
use support::Done;

/// Offsets in the ELF header and in program headers, 64-bit (elf(5)).
const E_TYPE: usize = 16;
const E_MACHINE: usize = 18;
const E_PHOFF: usize = 32;
const E_SHOFF: usize = 40;
const E_PHENTSIZE: usize = 54;
const E_PHNUM: usize = 56;
const P_TYPE: usize = 0;
const P_FLAGS: usize = 4;
const P_OFFSET: usize = 8;
const P_VADDR: usize = 16;
const P_FILESZ: usize = 32;
const P_MEMSZ: usize = 40;
const P_ALIGN: usize = 48;
const PT_LOAD: u32 = 1;
const PT_DYNAMIC: u32 = 2;
const PT_INTERP: u32 = 3;
const PT_NOTE: u32 = 4;
const PT_GNU_RELRO: u32 = 0x6474_e552;

/// A good program to break: small, position-independent, dynamic.
fn good() -> Vec<u8> {
    fs::read("/bin/true").expect("/bin/true")
}

fn put(bytes: &mut [u8], at: usize, value: &[u8]) {
    bytes[at..at + value.len()].copy_from_slice(value);
}

fn word(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap())
}

/// Where the program headers of that type are in the file.
fn headers(bytes: &[u8], kind: u32) -> Vec<usize> {
    let start = usize::try_from(word(bytes, E_PHOFF)).unwrap();
    let count = usize::from(u16::from_le_bytes([bytes[E_PHNUM], bytes[E_PHNUM + 1]]));
    let all = (0..count).map(|index| start + index * 56);
    all.filter(|&at| word(bytes, at + P_TYPE) == kind).collect()
}

/// Everything the command does with a file's bytes.
fn analyse(bytes: &[u8]) -> Result<Analysis, ElfError> {
    let analysis = Analysis::of(&bytes, &Policy::default(), PageSize::SIZE_2M)?;
    let text = render(&analysis, None, Style::PLAIN);
    assert!(text.starts_with("suitable: ") || text.starts_with("not suitable: "), "{text}");
    for estimate in analysis.estimates.iter().flatten() {
        assert!(
            estimate.pages.min <= estimate.pages.max && estimate.pages.max <= 8192 + 8,
            "{text}"
        );
    }
    let _ = document(&analysis, None).to_string();
    Ok(analysis)
}

/// Runs the command on a file within 100 MB of address space and two seconds.
fn limited(path: &Path) -> Result<Done> {
    let begin = Instant::now();
    let output = Command::new("prlimit")
        .args(["--as=104857600", "--cpu=2", "--core=0"])
        .arg(support::CHECK)
        .arg(path)
        .output()
        .context("cannot run prlimit (package util-linux)")?;
    let done = Done::from(output);
    ensure!(begin.elapsed().as_secs() < 10, "took {:?}", begin.elapsed());
    ensure!(matches!(done.code, Some(0 | 1 | 3 | 4)), "{}: {done:?}", path.display());
    if matches!(done.code, Some(1 | 4)) {
        ensure!(done.out.is_empty(), "{done:?}");
        ensure!(done.err.starts_with("elfremap: error: cannot check "), "{done:?}");
        ensure!(
            done.err.lines().filter(|line| !line.starts_with("hint: ")).count() == 1,
            "{done:?}"
        );
    }
    Ok(done)
}

fn limited_bytes(bytes: &[u8]) -> Result<Done> {
    let directory = tempfile::tempdir()?;
    let path = directory.path().join("file");
    fs::write(&path, bytes)?;
    limited(&path)
}

type Change = fn(&mut Vec<u8>);

/// A change to the good file, what it is called, and a word that the answer holds.
type Case = (&'static str, Change, &'static str);

const BROKEN: [Case; 19] = [
    ("e_phoff beyond everything", |b| put(b, E_PHOFF, &u64::MAX.to_le_bytes()), "program headers"),
    ("65535 headers", |b| put(b, E_PHNUM, &[0xff, 0xff]), "65535 program headers"),
    (
        "65535 headers without sections",
        |b| {
            put(b, E_PHNUM, &[0xff, 0xff]);
            put(b, E_SHOFF, &[0; 8]);
        },
        "65535 program headers",
    ),
    ("no headers", |b| put(b, E_PHNUM, &[0, 0]), "no program headers"),
    ("header size 0", |b| put(b, E_PHENTSIZE, &[0, 0]), "program headers of 0 bytes"),
    ("header size 32", |b| put(b, E_PHENTSIZE, &[32, 0]), "program headers of 32 bytes"),
    ("header size 57", |b| put(b, E_PHENTSIZE, &[57, 0]), "program headers of 57 bytes"),
    (
        "segment beyond the end",
        |b| {
            let at = headers(b, PT_LOAD)[1];
            put(b, at + P_OFFSET, &(1u64 << 40).to_le_bytes());
        },
        "segment",
    ),
    (
        "more in the file than in memory",
        |b| {
            let at = headers(b, PT_LOAD)[1];
            put(b, at + P_MEMSZ, &1u64.to_le_bytes());
        },
        "more bytes in the file",
    ),
    (
        "wrapping addresses",
        |b| {
            let at = headers(b, PT_LOAD)[3];
            put(b, at + P_MEMSZ, &(u64::MAX - 4096).to_le_bytes());
        },
        "beyond the address space",
    ),
    (
        "huge bss",
        |b| {
            let at = headers(b, PT_LOAD)[3];
            put(b, at + P_MEMSZ, &(1u64 << 46).to_le_bytes());
        },
        "more than the",
    ),
    (
        "duplicated segments",
        |b| {
            let loads = headers(b, PT_LOAD);
            let copy = b[loads[1]..loads[1] + 56].to_vec();
            put(b, loads[2], &copy);
        },
        "overlap",
    ),
    (
        "offset and address differ within a page",
        |b| {
            let at = headers(b, PT_LOAD)[1];
            put(b, at + P_VADDR, &0x1801u64.to_le_bytes());
        },
        "differ within a page",
    ),
    (
        "interpreter without NUL",
        |b| {
            let at = headers(b, PT_INTERP)[0];
            let size = u64::from(word(b, at + P_FILESZ)) - 1;
            put(b, at + P_FILESZ, &size.to_le_bytes());
        },
        "NUL",
    ),
    (
        "interpreter of no bytes",
        |b| {
            let at = headers(b, PT_INTERP)[0];
            put(b, at + P_FILESZ, &[0; 8]);
        },
        "PT_INTERP of 0 bytes",
    ),
    (
        "relro elsewhere",
        |b| {
            let at = headers(b, PT_GNU_RELRO)[0];
            put(b, at + P_VADDR, &(1u64 << 45).to_le_bytes());
        },
        "PT_GNU_RELRO",
    ),
    (
        "dynamic table beyond the end",
        |b| {
            let at = headers(b, PT_DYNAMIC)[0];
            put(b, at + P_OFFSET, &(1u64 << 62).to_le_bytes());
        },
        "PT_DYNAMIC",
    ),
    (
        "huge dynamic table",
        |b| {
            let at = headers(b, PT_DYNAMIC)[0];
            put(b, at + P_FILESZ, &(1u64 << 40).to_le_bytes());
        },
        "PT_DYNAMIC",
    ),
    ("unknown class", |b| put(b, 4, &[7]), "class"),
];

#[test]
fn broken_headers_are_named() {
    for (name, change, words) in BROKEN {
        let mut bytes = good();
        change(&mut bytes);
        let answer = match analyse(&bytes) {
            Ok(analysis) => analysis.unfit().expect(name).describe(),
            Err(error) => error.to_string(),
        };
        assert!(answer.contains(words), "{name}: {answer}");
    }
}

#[test]
fn broken_headers_by_the_command_within_100_mb() {
    outcome((|| {
        for (name, change, _) in BROKEN {
            let mut bytes = good();
            change(&mut bytes);
            let done = limited_bytes(&bytes).context(name)?;
            ensure!(matches!(done.code, Some(1 | 3)), "{name}: {done:?}");
        }
        Ok(())
    })());
}

#[test]
fn oddities_that_run_all_the_same_change_nothing() {
    let plain = analyse(&good()).unwrap();
    let cases: [(&str, Change); 4] = [
        ("no power of two", |b| {
            let at = headers(b, PT_LOAD)[0];
            put(b, at + P_ALIGN, &3u64.to_le_bytes());
        }),
        ("unsorted", |b| {
            let loads = headers(b, PT_LOAD);
            for at in 0..56 {
                b.swap(loads[1] + at, loads[2] + at);
            }
        }),
        ("an empty segment", |b| {
            let at = headers(b, PT_NOTE)[0];
            put(b, at + P_TYPE, &PT_LOAD.to_le_bytes());
            put(b, at + P_FILESZ, &[0; 16]);
        }),
        ("two interpreters", |b| {
            let interpreter = headers(b, PT_INTERP)[0];
            let note = headers(b, PT_NOTE)[0];
            let copy = b[interpreter..interpreter + 56].to_vec();
            put(b, note, &copy);
        }),
    ];
    for (name, change) in cases {
        let mut bytes = good();
        change(&mut bytes);
        let analysis = analyse(&bytes).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert_eq!(analysis.estimates, plain.estimates, "{name}");
        assert!(!analysis.image.oddities.is_empty(), "{name}");
    }
}

#[test]
fn alignments_of_all_sorts() {
    for align in [0u64, 1, 3, 0x10000, 0x20_0000, 0x4000_0000, 1 << 63, u64::MAX] {
        let mut bytes = good();
        for at in headers(&good(), PT_LOAD) {
            put(&mut bytes, at + P_ALIGN, &align.to_le_bytes());
        }
        let analysis = analyse(&bytes).unwrap_or_else(|error| panic!("{align:#x}: {error}"));
        let odd = align > 1 && !align.is_power_of_two();
        assert_eq!(!analysis.image.oddities.is_empty(), odd, "{align:#x}");
    }
}

#[test]
fn every_truncation_is_an_error() {
    let bytes = good();
    let loads = headers(&bytes, PT_LOAD);
    let file_end = loads.iter().map(|&at| {
        usize::try_from(word(&bytes, at + P_OFFSET) + word(&bytes, at + P_FILESZ)).unwrap()
    });
    let end = file_end.max().unwrap();
    for length in (0..4096).chain((4096..end).step_by(509)) {
        assert!(analyse(&bytes[..length]).is_err(), "{length}");
    }
    // Section headers and what else lies behind the segments is not needed.
    let whole = analyse(&bytes).unwrap();
    let cut = analyse(&bytes[..end]).unwrap();
    assert_eq!((cut.estimates, cut.symbols), (whole.estimates, whole.symbols));
}

#[test]
fn dynamic_table_without_an_end_and_strings_beyond_theirs() {
    // Every entry DT_NEEDED, no DT_NULL: the table ends where the segment does.
    let mut bytes = good();
    let at = headers(&bytes, PT_DYNAMIC)[0];
    let start = usize::try_from(word(&bytes, at + P_OFFSET)).unwrap();
    let size = usize::try_from(word(&bytes, at + P_FILESZ)).unwrap();
    for entry in (start..start + size).step_by(16) {
        put(&mut bytes, entry, &[1, 0, 0, 0, 0, 0, 0, 0]);
        put(&mut bytes, entry + 8, &u64::MAX.to_le_bytes());
    }
    assert!(analyse(&bytes).is_err());
    // A string table that is said to fill the address space.
    for (tag, value) in
        [(10u64, u64::MAX), (10, 1 << 40), (5, 0), (5, u64::MAX), (6, u64::MAX), (6, 0)]
    {
        let mut bytes = good();
        for entry in (start..start + size).step_by(16) {
            if bytes[entry..entry + 8] == tag.to_le_bytes() {
                put(&mut bytes, entry + 8, &value.to_le_bytes());
            }
        }
        let _ = analyse(&bytes).map(|analysis| analysis.symbols);
    }
}

#[test]
fn random_changes() {
    // A generator of our own: the same files in every run.
    let mut state = 0x9e37_79b9_7f4a_7c15u64;
    let mut random = move |limit: usize| {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        usize::try_from(state >> 33).unwrap() % limit
    };
    let plain = good();
    // Where the tables are that are read.
    let at = headers(&plain, PT_DYNAMIC)[0];
    let dynamic = usize::try_from(word(&plain, at + P_OFFSET)).unwrap();
    for round in 0..10_000 {
        let mut bytes = plain.clone();
        for _ in 0..=random(6) {
            let place = match round % 4 {
                0 => random(bytes.len()),
                1 => random(64),
                2 => 64 + random(13 * 56),
                _ => dynamic + random(400),
            };
            let value = [0, 1, 0x7f, 0x80, 0xff, u8::try_from(random(256)).unwrap()][random(6)];
            if let Some(byte) = bytes.get_mut(place) {
                *byte = value;
            }
        }
        let _ = analyse(&bytes);
    }
}

#[test]
fn other_machines_and_kinds_get_a_verdict() {
    let with = |at: usize, value: &[u8]| {
        let mut bytes = good();
        put(&mut bytes, at, value);
        analyse(&bytes).unwrap().unfit().unwrap().describe()
    };
    assert!(with(E_MACHINE, &[183, 0]).contains("arm64"), "{}", with(E_MACHINE, &[183, 0]));
    assert!(with(E_MACHINE, &[243, 0]).contains("riscv"));
    assert!(with(E_TYPE, &[1, 0]).contains("relocatable object"));
    assert!(with(E_TYPE, &[4, 0]).contains("core dump"));
    assert!(with(E_TYPE, &[0x34, 0x12]).contains("0x1234"));
}

#[test]
fn writable_and_executable_segments_are_shown_as_such() {
    let mut bytes = good();
    let at = headers(&bytes, PT_LOAD)[1];
    put(&mut bytes, at + P_FLAGS, &[7]);
    let text = render(&analyse(&bytes).unwrap(), None, Style::PLAIN);
    assert!(text.contains("text, writable"), "{text}");
    assert!(text.contains("rwx"), "{text}");
}

#[test]
fn what_is_no_regular_file() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let fifo = directory.path().join("fifo");
        nix::unistd::mkfifo(&fifo, nix::sys::stat::Mode::S_IRWXU)?;
        let _socket = std::os::unix::net::UnixListener::bind(directory.path().join("socket"))?;
        for (path, words) in [
            (Path::new("/"), "a directory"),
            (&fifo, "a FIFO"),
            (&directory.path().join("socket"), "a socket"),
            (Path::new("/dev/zero"), "a character device"),
            (Path::new("/nowhere"), "No such file"),
            (Path::new("/bin/true/x"), "Not a directory"),
        ] {
            let done = limited(path)?;
            ensure!(done.code == Some(1) && done.err.contains(words), "{done:?}");
        }
        // Regular by name only: their size is 0 whatever they hold.
        for path in ["/proc/self/maps", "/sys/kernel/mm/transparent_hugepage/enabled"] {
            limited(Path::new(path))?;
        }
        Ok(())
    })());
}

#[test]
fn what_is_no_elf_file() {
    outcome((|| {
        for (bytes, words) in [
            (&b""[..], "the file is empty"),
            (b"#!/bin/sh -e\nexit 0\n", "interpreter /bin/sh"),
            (b"#!", "a script"),
            (b"#! \x1b[31m/x\n", "a script"),
            (b"\x7fEL", "no ELF header"),
            (b"hello", "no ELF header"),
        ] {
            let done = limited_bytes(bytes)?;
            ensure!(done.code == Some(3), "{done:?}");
            ensure!(done.verdict().starts_with("not suitable: not an ELF file"), "{done:?}");
            ensure!(done.out.contains(words) && !done.out.contains('\x1b'), "{done:?}");
        }
        let done = limited_bytes(b"\x7fELF")?;
        ensure!(done.code == Some(1) && done.err.contains("damaged"), "{done:?}");
        Ok(())
    })());
}

#[test]
fn a_file_that_may_not_be_read() {
    outcome((|| {
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root, to become another user"));
        }
        let directory = tempfile::tempdir()?;
        let everyone = fs::Permissions::from_mode(0o755);
        fs::set_permissions(directory.path(), everyone.clone())?;
        let command = directory.path().join("elfremap-check");
        elfremap_tests::library::copy_program(support::CHECK, &command)?;
        fs::set_permissions(&command, everyone)?;
        let secret = directory.path().join("secret");
        elfremap_tests::library::copy_program("/bin/true", &secret)?;
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o700))?;
        let output = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(&command)
            .arg(&secret)
            .output()?;
        let done = Done::from(output);
        ensure!(done.code == Some(4), "{done:?}");
        ensure!(
            done.err.contains("Permission denied") && done.err.contains("hint: sudo"),
            "{done:?}"
        );
        Ok(())
    })());
}
