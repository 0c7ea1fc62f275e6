//! TLB counts without hardware counters: programs run in a guest under a model of TLBs, a
//! plugin of QEMU (tools/bench/tlb). Plain and moved, and each twice: the counts
//! must be the same.

use crate::archive::Archive;
use crate::boot::{self, Boot, Outcome};
use crate::build::Places;
use crate::machine::Machine;
use crate::system;
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The machine whose kernel is taken: PAGEMAP_SCAN came with Linux 6.7.
pub(crate) const MACHINE: &str = "6.12-x86_64";
/// The column of the checks.
pub(crate) const GROUP: &str = "TLB";
/// Each variant of a program runs so many times.
const ROUNDS: u32 = 2;
const MARK: &str = "/tlb/mark.so";

/// A program to count.
struct Subject {
    name: &'static str,
    program: PathBuf,
    arguments: Vec<String>,
    /// What it reads, in the guest.
    stdin: &'static str,
    /// How many of the variants.
    variants: usize,
    /// Whether it does the same each time, to the last instruction; a program with
    /// threads does not.
    exact: bool,
}

/// A way to run it: name, environment.
const VARIANTS: [(&str, &[(&str, &str)]); 4] = [
    ("plain", &[]),
    ("elfremap, text", &[("ELFREMAP_BACKEND", "hugetlb"), ("ELFREMAP_SEGMENTS", "text")]),
    ("elfremap, all on the pool", &[("ELFREMAP_BACKEND", "hugetlb")]),
    ("elfremap, all on THP", &[("ELFREMAP_BACKEND", "thp")]),
];

/// What one run counted.
struct Count {
    subject: usize,
    variant: usize,
    round: u32,
    /// The plugin's line.
    value: Value,
}

/// A short form for tests: a smaller program.
pub(crate) fn test(places: &Places, kernel: &Path, root: &Path, machine: &Machine) -> Outcome {
    let subjects = generated(places, 16, 8, 500).map(|subject| vec![subject]);
    let counted = subjects.and_then(|subjects| {
        let counts = count(places, kernel, root, machine, &subjects, "test")?;
        Ok((subjects, counts))
    });
    let mut outcome = Outcome::default();
    match counted {
        Ok((subjects, (counts, guest))) => {
            outcome = guest;
            for (name, result) in judge(&subjects, &counts) {
                let failure = result.err().map(|error| format!("{error:#}"));
                outcome.checks.push((GROUP.into(), name, failure));
            }
        }
        Err(error) => outcome.failure = Some(format!("TLB model: {error:#}")),
    }
    outcome
}

/// The whole: 64 MiB of generated text, and real programs. Writes the raw data.
pub(crate) fn measure(
    places: &Places,
    kernel: &Path,
    root: &Path,
    machine: &Machine,
    to: &Path,
) -> Result<()> {
    let mut subjects = vec![generated(places, 64, 16, 2000)?];
    for subject in real(places)? {
        if subject.program.is_file() {
            subjects.push(subject);
        } else {
            eprintln!("skipped {}: no {}", subject.name, subject.program.display());
        }
    }
    let (counts, guest) = count(places, kernel, root, machine, &subjects, "measure")?;
    let mut text = json!({
        "record": "model",
        "schema": 1,
        "kernel": guest.fact("kernel"),
        "qemu": first_line(Command::new(format!("qemu-system-{}", machine.arch.name())).arg("--version"))?,
        "commit": first_line(Command::new("git").args(["describe", "--always", "--dirty", "--abbrev=12"]))?,
        "tlbs": counts.first().context("no counts")?.value["tlbs"],
    })
    .to_string();
    for count in &counts {
        let record = json!({
            "record": "tlb",
            "subject": subjects[count.subject].name,
            "variant": VARIANTS[count.variant].0,
            "round": count.round,
            "exact": subjects[count.subject].exact,
            "huge_pages": count.value["huge_pages"],
            "counts": count.value["counts"],
        });
        text += &format!("\n{record}");
    }
    text.push('\n');
    if let Some(directory) = to.parent() {
        fs::create_dir_all(directory)?;
    }
    fs::write(to, text).with_context(|| format!("cannot write {}", to.display()))?;
    let failures: Vec<String> = judge(&subjects, &counts)
        .into_iter()
        .filter_map(|(name, result)| Some(format!("{name}: {:#}", result.err()?)))
        .collect();
    ensure!(failures.is_empty(), "{}", failures.join("; "));
    println!("raw data in {}", to.display());
    Ok(())
}

fn first_line(command: &mut Command) -> Result<String> {
    let output = command.output().context("cannot run a program")?;
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(text.lines().next().context("a program says nothing")?.to_owned())
}

/// The generated program of tools/bench, with so many MiB of text and bss and so many
/// thousands of steps through each.
fn generated(places: &Places, text: u32, bss: u32, steps: u32) -> Result<Subject> {
    let bench = std::env::current_exe()?.with_file_name("elfremap-bench");
    let output = Command::new(&bench)
        .args(["generate", "--text-mb", &text.to_string(), "--bss-mb", &bss.to_string(), "--out"])
        .arg(places.output.join("tlb"))
        .output()
        .with_context(|| format!("cannot run {}", bench.display()))?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(Subject {
        name: if text == 64 { "generated, 64 MB of text, 16 MB of bss" } else { "generated" },
        program: String::from_utf8(output.stdout)?.trim().into(),
        arguments: [&steps.to_string(), "1", "untimed"].map(str::to_owned).to_vec(),
        stdin: "/dev/null",
        variants: VARIANTS.len(),
        exact: true,
    })
}

/// A compiler and a server, as Debian builds them.
fn real(places: &Places) -> Result<Vec<Subject>> {
    let words = |text: &str| text.split_whitespace().map(str::to_owned).collect();
    let compiler = first_line(Command::new("gcc").arg("-print-prog-name=cc1"))?;
    // Without its headers in the guest.
    let preprocessed = places.output.join("tlb/model.i");
    let status = Command::new("gcc")
        .arg("-E")
        .arg(places.project.join("tools/bench/tlb/model.c"))
        .arg("-o")
        .arg(&preprocessed)
        .status()?;
    ensure!(status.success(), "cannot preprocess a C file");
    Ok(vec![
        Subject {
            name: "gcc's cc1 -O2, one file",
            program: compiler.into(),
            arguments: words("-quiet -fpreprocessed -O2 -frandom-seed=1 /tlb/model.i -o /dev/null"),
            stdin: "/dev/null",
            variants: VARIANTS.len(),
            exact: true,
        },
        Subject {
            name: "mariadbd --bootstrap, bootstrap.sql",
            program: system::SERVER.into(),
            arguments: words(
                "--no-defaults --bootstrap --user=root --datadir=/tmp/data --log-warnings=0
                 --innodb-buffer-pool-size=8M --innodb-log-file-size=4M
                 --innodb-data-file-path=ibdata1:4M:autoextend --innodb-use-native-aio=0
                 --innodb-temp-data-file-path=ibtmp1:4M:autoextend --innodb-flush-method=nosync",
            ),
            stdin: "/tlb/bootstrap.sql",
            // It write-protects a part of its data later: the pages would not stay the same.
            variants: 2,
            exact: false,
        },
    ])
}

/// Runs each variant of each subject, the rounds one after the other.
fn count(
    places: &Places,
    kernel: &Path,
    root: &Path,
    machine: &Machine,
    subjects: &[Subject],
    name: &str,
) -> Result<(Vec<Count>, Outcome)> {
    let directory = places.output.join("tlb");
    fs::create_dir_all(&directory)?;
    let sources = places.project.join("tools/bench/tlb");
    let plugin = shared_object(&sources.join("model.c"), &directory.join("model.so"))?;
    let mark = shared_object(&sources.join("mark.c"), &directory.join("mark.so"))?;

    let mut archive = Archive::default();
    archive.parents(MARK);
    archive.file(MARK, &mark)?;
    let mut runs = Vec::new();
    let mut order = Vec::new();
    for round in 0..ROUNDS {
        for (subject, it) in subjects.iter().enumerate() {
            for (variant, (_, environment)) in VARIANTS.iter().enumerate().take(it.variants) {
                let is_plain = environment.is_empty();
                let preload =
                    if is_plain { MARK.into() } else { format!("{MARK}:/elfremap/libelfremap.so") };
                let mut env = vec![
                    ("LD_PRELOAD".to_owned(), preload),
                    ("TLB_RUN".to_owned(), runs.len().to_string()),
                ];
                env.extend(environment.iter().map(|&(n, v)| (n.to_owned(), v.to_owned())));
                runs.push(json!({
                    "subject": it.name, "program": it.program, "arguments": it.arguments,
                    "stdin": it.stdin, "env": env,
                }));
                order.push((subject, variant, round));
            }
        }
    }
    archive.bytes("tlb/runs.json", Value::from(runs).to_string().as_bytes());
    for subject in subjects {
        system::add_program(&mut archive, &subject.program)?;
    }
    for file in [sources.join("bootstrap.sql"), directory.join("model.i")] {
        let name = file.file_name().context("odd path")?.to_string_lossy().into_owned();
        if file.is_file() {
            archive.file(&format!("tlb/{name}"), &file)?;
        }
    }
    system::add_server_files(&mut archive)?;
    let extended = directory.join(format!("{name}.cpio"));
    system::extend_root(root, archive, &extended)?;

    let out = directory.join(format!("{name}.jsonl"));
    let machine = Machine { node_memory: 768, quiet_seconds: 150, ..*machine };
    let log = places.output.join("log").join(format!("tlb-{name}.log"));
    let plugin = format!("{},out={}", plugin.display(), out.display());
    let boot = Boot {
        kernel,
        root: &extended,
        groups: Some("tlb"),
        arguments: "",
        plugin: Some(&plugin),
        log: &log,
    };
    let outcome = boot::run(&machine, &boot)?;
    let failures: Vec<String> = outcome
        .checks
        .iter()
        .filter_map(|(_, name, why)| Some(format!("{name}: {}", why.as_ref()?)))
        .chain(outcome.failure.clone())
        .collect();
    ensure!(failures.is_empty(), "{} (see {})", failures.join("; "), log.display());
    let text = fs::read_to_string(&out).with_context(|| format!("no {}", out.display()))?;
    ensure!(
        text.lines().count() == order.len(),
        "{} of {} runs counted",
        text.lines().count(),
        order.len()
    );
    let mut counts = Vec::new();
    for (index, line) in text.lines().enumerate() {
        let value: Value = serde_json::from_str(line)?;
        ensure!(value["run"] == index, "run {index} counted as {}", value["run"]);
        let (subject, variant, round) = order[index];
        counts.push(Count { subject, variant, round, value });
    }
    Ok((counts, outcome))
}

fn shared_object(source: &Path, to: &Path) -> Result<PathBuf> {
    let status = Command::new("gcc")
        .args([
            "-O2",
            "-Wall",
            "-Werror",
            "-D_GNU_SOURCE",
            "-shared",
            "-fPIC",
            "-fvisibility=hidden",
            "-o",
        ])
        .arg(to)
        .arg(source)
        .status()
        .context("cannot run gcc")?;
    ensure!(status.success(), "cannot build {}", source.display());
    Ok(to.to_owned())
}

/// The promises: the same counts each time, from programs that do the same each time; for the generated programs, instruction walks
/// fall 50-fold and data walks rise by no more than 2 %.
fn judge(subjects: &[Subject], counts: &[Count]) -> Vec<(String, Result<()>)> {
    let mut results = Vec::new();
    let find = |subject, variant, round| {
        let mut all = counts.iter();
        all.find(|c| (c.subject, c.variant, c.round) == (subject, variant, round))
            .context("a run is missing")
    };
    for (subject, it) in subjects.iter().enumerate() {
        for (variant, (name, _)) in VARIANTS.iter().enumerate().take(it.variants) {
            let mut check = |what: &str, body: &dyn Fn() -> Result<()>| {
                results.push((format!("{}, {name}: {what}", it.name), body()));
            };
            check(if it.exact { "two runs give the same counts" } else { "two runs" }, &|| {
                let [a, b] = [find(subject, variant, 0)?, find(subject, variant, 1)?];
                let [x, y] = [a, b].map(|count| &count.value["counts"]);
                ensure!(x == y || !it.exact, "{x} and {y}");
                ensure!(a.value["huge_pages"] == b.value["huge_pages"], "not as many huge pages");
                ensure!(a.value["same_pages"] == true, "huge pages came or went during the run");
                let moved = a.value["huge_pages"].as_u64() > Some(0);
                ensure!(moved == (variant > 0), "huge pages: {}", a.value["huge_pages"]);
                Ok(())
            });
            if variant == 0 || !it.name.starts_with("generated") {
                continue;
            }
            let walks = |variant, name: &str| -> Result<u64> {
                let count = &find(subject, variant, 0)?.value["counts"];
                count[name].as_u64().context("no such count")
            };
            check("instruction walks fall 50-fold", &|| {
                let [plain, moved] = [walks(0, "itlb_walks")?, walks(variant, "itlb_walks")?];
                ensure!(plain >= 100_000 && plain >= 50 * moved, "from {plain} to {moved}");
                Ok(())
            });
            check("data walks do not rise", &|| {
                let [plain, moved] = [walks(0, "dtlb_walks")?, walks(variant, "dtlb_walks")?];
                ensure!(moved * 100 <= plain * 102, "from {plain} to {moved}");
                Ok(())
            });
        }
    }
    results
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(variant: usize, round: u32, itlb: u64, dtlb: u64) -> Count {
        let value = json!({
            "huge_pages": variant, "same_pages": true,
            "counts": { "itlb_walks": itlb, "dtlb_walks": dtlb },
        });
        Count { subject: 0, variant, round, value }
    }

    #[test]
    fn a_count_that_differs_or_falls_too_little_is_a_failure() {
        let subject = Subject {
            name: "generated",
            program: "x".into(),
            arguments: Vec::new(),
            stdin: "",
            variants: 4,
            exact: true,
        };
        let all = |last: Count| {
            let mut counts: Vec<Count> = (0..VARIANTS.len())
                .flat_map(|v| (0..2).map(move |round| (v, round)))
                .map(|(v, round)| {
                    if v == 0 {
                        count(v, round, 500_000, 100)
                    } else {
                        count(v, round, 10_000, 102)
                    }
                })
                .collect();
            counts.retain(|c| (c.variant, c.round) != (last.variant, last.round));
            counts.push(last);
            let results = judge(std::slice::from_ref(&subject), &counts);
            results.into_iter().filter(|(_, result)| result.is_err()).count()
        };
        assert_eq!(all(count(3, 1, 10_000, 102)), 0);
        assert_eq!(all(count(3, 1, 10_001, 102)), 1, "not the same");
        assert_eq!(all(count(3, 0, 10_001, 102)), 2, "nor 50-fold");
        assert_eq!(all(count(3, 0, 10_000, 103)), 2, "more data walks");
        assert_eq!(all(count(0, 0, 0, 100)), 1 + 3, "nothing to fall");
    }
}
