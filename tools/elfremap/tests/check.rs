//! `elfremap-check`: verdicts on real files and on small ones made for the purpose.

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use elfremap_tests::outcome::{Skip, check as outcome};
use serde_json::Value;
use support::{big_source, check, compile};

const HELLO: &str = "#include <stdio.h>\nint main(void) { puts(\"hello\"); return 0; }\n";

fn text(path: &Path) -> &str {
    path.to_str().expect("a path in UTF-8")
}

/// The exit status, and how the first line begins.
fn expect(arguments: &[&str], code: i32, begins: &str) -> Result<support::Done> {
    let done = check(arguments)?;
    ensure!(done.code == Some(code), "{arguments:?}: {done:?}");
    ensure!(done.verdict().starts_with(begins), "{arguments:?}: {}", done.verdict());
    ensure!(done.err.lines().all(|line| line.starts_with("hint: ")), "{done:?}");
    for line in done.out.lines().skip(1) {
        let has_path = line.contains('/');
        ensure!(has_path || line.chars().count() <= 80, "too wide: {line}");
    }
    Ok(done)
}

fn refused(arguments: &[&str], words: &str) -> Result<()> {
    let done = expect(arguments, 3, "not suitable: ")?;
    ensure!(done.verdict().contains(words), "{}", done.verdict());
    Ok(())
}

#[test]
fn programs_that_cannot_be_remapped() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let make = |compiler, name, flags: &[&str]| {
            compile(directory.path(), compiler, name, HELLO, flags)
        };
        refused(&["/bin/true"], "less than one huge page to gain")?;
        refused(&[text(&make("gcc", "static", &["-static"])?)], "static program")?;
        refused(&[text(&make("gcc", "static_pie", &["-static-pie"])?)], "static-pie program")?;
        refused(&[text(&make("musl-gcc", "musl", &[])?)], "musl")?;
        refused(&[text(&make("gcc", "i386", &["-m32"])?)], "i386")?;
        refused(
            &[text(&make("gcc", "asan", &["-fsanitize=address"])?)],
            "AddressSanitizer (libasan",
        )?;
        refused(&[text(&make("gcc", "object", &["-c"])?)], "relocatable object file")?;
        let loader = "-Wl,--dynamic-linker=/nowhere/ld-linux-x86-64.so.2";
        refused(
            &[text(&make("gcc", "lost", &[loader])?)],
            "/nowhere/ld-linux-x86-64.so.2 is not on",
        )?;
        let loader = "-Wl,--dynamic-linker=/system/bin/linker64";
        refused(&[text(&make("gcc", "other", &[loader])?)], "/system/bin/linker64 is not glibc's")?;
        let script = directory.path().join("script");
        fs::write(&script, "#!/bin/sh\n")?;
        refused(&[text(&script)], "a script; what runs is its interpreter /bin/sh")?;
        // Sanitizers that start behind a preload are no reason.
        for (name, flag) in [("ubsan", "-fsanitize=undefined"), ("tsan", "-fsanitize=thread")] {
            refused(&[text(&make("gcc", name, &[flag])?)], "less than one huge page")?;
        }
        let built_in = make("gcc", "asan_in", &["-fsanitize=address", "-static-libasan"])?;
        let done = check(&[text(&built_in)])?;
        ensure!(done.out.contains("it is built with a sanitizer"), "{done:?}");
        ensure!(!done.verdict().contains("refuses"), "{done:?}");
        Ok(())
    })());
}

/// A program for the other architecture, by its header: judged by its layout, for each page
/// size of its machines.
#[test]
fn programs_for_the_other_architecture() {
    outcome((|| {
        const E_MACHINE: usize = 18;
        let (here, there) = if cfg!(target_arch = "aarch64") { (183, 62) } else { (62, 183) };
        let directory = tempfile::tempdir()?;
        let native = compile(directory.path(), "gcc", "native", &big_source(), &["-O1"])?;
        let mut bytes = fs::read(&native)?;
        ensure!(bytes[E_MACHINE] == here, "not a program for this machine");
        bytes[E_MACHINE] = there;
        let path = directory.path().join("foreign");
        fs::write(&path, bytes)?;
        let other = expect(&[text(&path)], 0, "suitable: ")?;
        let foreign = expect(&["--page-size", "2M", text(&path)], 0, "suitable: ")?;
        let native = expect(&["--page-size", "2M", text(&native)], 0, "suitable: ")?;
        ensure!(foreign.verdict() == native.verdict(), "{foreign:?} {native:?}");
        ensure!(other.verdict() == native.verdict(), "{other:?} {native:?}");
        // A list of the others, as each would be judged by itself; nothing about this machine.
        let heading = format!(
            "other page sizes of {} machines",
            if there == 183 { "arm64" } else { "x86-64" }
        );
        ensure!(other.out.contains(&heading) && !other.out.contains("this machine"), "{other:?}");
        if there == 183 {
            let small = expect(&["--page-size", "64K", text(&path)], 0, "suitable: ")?;
            let pages = small.verdict().split_whitespace().nth(1).unwrap_or_default();
            ensure!(other.out.contains(&format!("  64K   {pages} huge pages for ")), "{other:?}");
            ensure!(other.out.contains("  32M   nothing moves: "), "{other:?}");
        }
        // Nor can it be run here.
        let mut reserve = std::process::Command::new(env!("CARGO_BIN_EXE_elfremap"));
        let reserve = reserve.args(["reserve", "--dry-run", "--for"]).arg(&path).output()?;
        let message = String::from_utf8_lossy(&reserve.stderr).into_owned();
        ensure!(
            reserve.status.code() == Some(3) && message.contains("and this machine is"),
            "{message}"
        );
        Ok(())
    })());
}

#[test]
fn secure_mode() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1"])?;
        expect(&[text(&program)], 0, "suitable: ")?;
        for (mode, word) in [(0o4755, "setuid"), (0o2755, "setgid")] {
            fs::set_permissions(&program, fs::Permissions::from_mode(mode))?;
            refused(&[text(&program)], word)?;
        }
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        if !nix::unistd::geteuid().is_root() {
            return Err(Skip::because("needs root, to give a file capabilities"));
        }
        let status = Command::new("setcap").arg("cap_net_raw+ep").arg(&program).status();
        ensure!(status.context("cannot run setcap (package libcap2-bin)")?.success());
        refused(&[text(&program)], "with file capabilities")
    })());
}

#[test]
fn shared_objects_are_named_with_their_text() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let dir = directory.path();
        let source = big_source().replace("int main(", "int library_main(");
        let library = compile(dir, "gcc", "libbig.so", &source, &["-O1", "-shared", "-fPIC"])?;
        refused(&[text(&library)], "a shared object")?;
        let main = "int library_main(int, char **); int main(int c, char **v) { return library_main(c, v); }";
        let here = format!("-L{}", dir.display());
        for (name, rpath) in [
            ("by_runpath", "-Wl,--enable-new-dtags,-rpath,$ORIGIN"),
            ("by_rpath", "-Wl,--disable-new-dtags,-rpath,${ORIGIN}/."),
        ] {
            let program = compile(dir, "gcc", name, main, &[&here, "-lbig", rpath])?;
            refused(&[text(&program)], "most code in libbig.so, 4.6 MB")?;
            let found = check(&["--json", text(&program)])?.json()?;
            let objects = found["shared_objects"].as_array().context("shared_objects")?;
            let paths: Vec<_> = objects.iter().filter_map(|o| o["path"].as_str()).collect();
            let canonical = |path: &str| fs::canonicalize(path).unwrap_or_default();
            ensure!(paths.iter().any(|path| canonical(path) == library), "{paths:?}");
            // The same as the loader itself says.
            let listed = Command::new(&program).env("LD_TRACE_LOADED_OBJECTS", "1").output()?;
            let listed = String::from_utf8(listed.stdout)?;
            for line in listed.lines().filter_map(|line| line.split_once(" => ")) {
                let path = line.1.split(" (").next().unwrap_or_default();
                ensure!(paths.iter().any(|p| canonical(p) == canonical(path)), "{path}: {paths:?}");
            }
        }
        // Found by LD_LIBRARY_PATH only.
        let program = compile(dir, "gcc", "by_variable", main, &[&here, "-lbig"])?;
        let output =
            support::command(support::CHECK).arg(&program).env("LD_LIBRARY_PATH", dir).output()?;
        ensure!(String::from_utf8_lossy(&output.stdout).contains("libbig.so, 4.6 MB"));
        let lost = check(&[text(&program)])?;
        ensure!(lost.out.contains("1 shared object(s) not found, libbig.so first"), "{lost:?}");
        Ok(())
    })());
}

#[test]
fn objects_of_real_programs_are_those_the_loader_takes() {
    outcome((|| {
        for program in
            ["/usr/sbin/mariadbd", "/usr/bin/node", "/usr/bin/clang", "/usr/bin/gdb", "/bin/ls"]
        {
            if !Path::new(program).exists() {
                return Err(Skip::because(format!("needs {program}")));
            }
            let found = check(&["--json", program])?.json()?;
            let objects = found["shared_objects"].as_array().context("shared_objects")?;
            let mut paths: Vec<PathBuf> = objects
                .iter()
                .map(|o| {
                    fs::canonicalize(o["path"].as_str().unwrap_or_default()).unwrap_or_default()
                })
                .collect();
            let output = Command::new(program).env("LD_TRACE_LOADED_OBJECTS", "1").output()?;
            let listed = String::from_utf8(output.stdout)?;
            let mut expected: Vec<PathBuf> = listed
                .lines()
                .filter_map(|line| line.trim().split(" => ").last()?.split(" (").next())
                .filter(|path| path.starts_with('/'))
                .map(|path| fs::canonicalize(path).unwrap_or_default())
                .collect();
            paths.sort();
            expected.sort();
            ensure!(paths == expected, "{program}: {paths:?} instead of {expected:?}");
        }
        Ok(())
    })());
}

/// Pages at best and at worst, and the share of each class in percent.
type Coverage = (u64, u64, Vec<(String, f64)>);

/// At the default level.
fn coverage(done: &Value) -> Result<Coverage> {
    let level = &done["levels"]["none"];
    let number = |value: &Value| value.as_u64().context("not a number");
    let classes = level["classes"].as_object().context("classes")?;
    let shares = classes.iter().map(|(name, class)| {
        let share = class["moved"]["min"].as_f64()? / class["size"].as_f64()?;
        Some((name.clone(), share * 100.0))
    });
    let shares = shares.collect::<Option<Vec<_>>>().context("moved")?;
    Ok((number(&level["pages"]["best"])?, number(&level["pages"]["worst"])?, shares))
}

/// The flags that are printed give full coverage, with every linker, and the program
/// still runs.
#[test]
fn advised_flags_give_full_coverage() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        for kind in ["-no-pie", "-pie"] {
            let source = big_source();
            let plain = compile(directory.path(), "gcc", "plain", &source, &["-O1", kind])?;
            let found = check(&["--json", text(&plain)])?.json()?;
            let (_, _, shares) = coverage(&found)?;
            ensure!(shares.iter().any(|(class, share)| class != "rodata" && *share < 99.0));
            let advice = found["linker_flags"].as_object().context("linker_flags")?;
            for linker in ["bfd", "gold", "lld", "mold"] {
                let advised = advice[linker].as_str().context("no flags")?;
                let chosen = format!("-fuse-ld={linker}");
                let mut flags = vec!["-O1", kind, "-Wl,-z,now", &chosen];
                flags.extend(advised.split(' '));
                let program = compile(directory.path(), "gcc", linker, &source, &flags)?;
                let output = Command::new(&program).stdin(std::process::Stdio::null()).output()?;
                ensure!(output.status.success(), "{linker} {kind}: {output:?}");
                // gold puts the ELF header into the text segment.
                let header: &[&str] =
                    if linker == "gold" { &["--segments", "text,data,bss,header"] } else { &[] };
                let arguments = [&["--json", text(&program)], header].concat();
                let (best, worst, shares) = coverage(&check(&arguments)?.json()?)?;
                ensure!(best == worst, "{linker} {kind}: {best} to {worst}");
                for (class, share) in shares {
                    ensure!(class == "rodata" || share > 99.9, "{linker} {kind}: {class} {share}");
                }
            }
        }
        Ok(())
    })());
}

/// A segment that ends on, just behind and just before a block's edge.
#[test]
fn sizes_at_block_edges() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let need = |name: &str, bytes: u64| -> Result<u64> {
            let source = format!(
                "__attribute__((section(\".edge\"), aligned(4096))) char edge[{bytes}] = {{1}};\n\
                 int main(void) {{ return edge[{}] + edge[0] - 1; }}\n",
                bytes - 1
            );
            let flags = ["-no-pie", "-Wl,--section-start=.edge=0x40000000"];
            let program = compile(directory.path(), "gcc", name, &source, &flags)?;
            let found = check(&["--json", "--segments", "data", text(&program)])?.json()?;
            let (best, worst, _) = coverage(&found)?;
            ensure!(best == worst, "{name}: {best} to {worst}");
            Ok(worst)
        };
        const BLOCK: u64 = 2 << 20;
        ensure!(need("on", 3 * BLOCK)? == 3);
        ensure!(need("behind", 3 * BLOCK + 1)? == 4);
        ensure!(need("before", 3 * BLOCK - 1)? == 3);
        ensure!(need("one_page", 4096)? == 0, "one page is not worth a huge page");
        ensure!(need("one_byte", 1)? == 0, "one byte is not worth a huge page");
        Ok(())
    })());
}

#[test]
fn stripped_to_the_bone_needs_the_same() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "whole", &big_source(), &["-O1"])?;
        let stripped = directory.path().join("stripped");
        fs::copy(&program, &stripped)?;
        ensure!(Command::new("strip").arg("--strip-all").arg(&stripped).status()?.success());
        let mut bytes = fs::read(&stripped)?;
        // e_shoff; e_shentsize, e_shnum, e_shstrndx
        bytes[40..48].fill(0);
        bytes[58..64].fill(0);
        fs::write(&stripped, bytes)?;
        let need = |path: &Path| check(&["--json", text(path)])?.json();
        let (whole, bare) = (need(&program)?, need(&stripped)?);
        for part in ["need", "levels", "symbols", "segments", "shared_objects"] {
            ensure!(whole[part] == bare[part], "{part}: {} and {}", whole[part], bare[part]);
        }
        Ok(())
    })());
}

#[test]
fn options_are_the_variables_of_the_preload() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1", "-no-pie"])?;
        let program = text(&program);
        for (option, variable, value) in [
            ("--merge", "ELFREMAP_MERGE", "rwx"),
            ("--segments", "ELFREMAP_SEGMENTS", "bss"),
            ("--backend", "ELFREMAP_BACKEND", "hugetlb"),
            ("--page-size", "ELFREMAP_PAGE_SIZE", "4M"),
        ] {
            let by_option = check(&[option, value, program])?;
            let output =
                support::command(support::CHECK).arg(program).env(variable, value).output()?;
            let by_variable = support::Done::from(output);
            ensure!(by_option.verdict() == by_variable.verdict(), "{by_option:?} {by_variable:?}");
            ensure!(by_option.verdict() != check(&[program])?.verdict() || option == "--backend");
            ensure!(check(&[option, "nonsense", program])?.code == Some(2));
        }
        let output = support::command(support::CHECK)
            .arg(program)
            .env("ELFREMAP_MERGE", "nonsense")
            .output()?;
        let done = support::Done::from(output);
        ensure!(done.code == Some(0), "{done:?}");
        ensure!(done.err.contains("ELFREMAP_MERGE=nonsense is not accepted"), "{done:?}");
        Ok(())
    })());
}

/// A tree of sysfs and proc files below `root`.
fn fixture(root: &Path, files: &[(&str, &str)]) -> Result<()> {
    for (path, content) in files {
        let path = root.join(path.trim_start_matches('/'));
        fs::create_dir_all(path.parent().context("no parent")?)?;
        fs::write(path, content)?;
    }
    Ok(())
}

fn pool_files(pages: &'static str, free: &'static str) -> Vec<(&'static str, &'static str)> {
    const POOL: [&str; 5] = [
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/surplus_hugepages",
        "/sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages",
    ];
    POOL.into_iter().zip([pages, free, "0", "0", "0"]).collect()
}

#[test]
fn the_machines_part() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1", "-no-pie"])?;
        let root = directory.path().join("root");
        fixture(&root, &pool_files("7", "5"))?;
        fixture(
            &root,
            &[
                ("/proc/meminfo", "Hugepagesize:    2048 kB\n"),
                ("/sys/kernel/mm/transparent_hugepage/enabled", "always madvise [never]\n"),
                ("/proc/self/cgroup", "0::/job\n"),
                ("/proc/self/mountinfo", "30 1 0:26 / /cg rw - cgroup2 cgroup2 rw\n"),
                ("/cg/job/hugetlb.2MB.max", "max\n"),
            ],
        )?;
        let root_text = text(&root);
        let run = |extra: &[&str]| {
            let base = ["--sysfs-root", root_text, "--backend", "hugetlb", text(&program)];
            check(&[&base, extra].concat())
        };
        let done = run(&[])?;
        ensure!(done.code == Some(0), "{done:?}");
        ensure!(done.out.contains("pool 2MB: 7 pages, 5 free"), "{done:?}");
        ensure!(done.out.contains("the pool has the 5 pages for a start now"), "{done:?}");
        ensure!(run(&["--now"])?.code == Some(0));
        // The cgroup leaves three.
        fixture(&root, &[("/cg/job/hugetlb.2MB.max", "6291456\n")])?;
        let done = run(&["--now"])?;
        ensure!(done.code == Some(5), "{done:?}");
        ensure!(done.out.contains("the pool can give 3 of 5 pages now"), "{done:?}");
        ensure!(done.out.contains("a cgroup limit stands in the way"), "{done:?}");
        fixture(&root, &[("/cg/job/hugetlb.2MB.max", "max\n")])?;
        fixture(&root, &pool_files("7", "4"))?;
        let short = run(&["--now"])?;
        ensure!(short.code == Some(5), "{short:?}");
        ensure!(short.out.contains("hint: elfremap reserve --for "), "{short:?}");
        fixture(&root, &[("/cg/job/hugetlb.2MB.max", "6291456\n")])?;
        ensure!(run(&[])?.code == Some(0), "without --now it is about the file only");
        let json = run(&["--json"])?.json()?;
        ensure!(json["host"]["pages_available"] == 3, "{json}");
        ensure!(json["host"]["cgroup_limits"][0]["limit"] == 6_291_456, "{json}");
        ensure!(json["host"]["kernel"].is_null(), "another machine's kernel cannot be probed");
        Ok(())
    })());
}

/// Without a wish the size is the preload's choice: 2 MiB, unless that pool is empty
/// and another has pages.
#[test]
fn the_page_size_that_is_planned_for() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1", "-no-pie"])?;
        let size = |root: &Path, extra: &[&str]| -> Result<Value> {
            let base = ["--json", "--sysfs-root", text(root), text(&program)];
            let found = check(&[&base, extra].concat())?.json()?;
            Ok(found["need"]["page_size"].clone())
        };
        let root = directory.path().join("root");
        fixture(&root, &pool_files("0", "0"))?;
        fixture(&root, &[("/proc/meminfo", "Hugepagesize:    2048 kB\n")])?;
        ensure!(size(&root, &[])? == 2 << 20);
        let small: Vec<(String, &str)> = pool_files("100", "100")
            .into_iter()
            .map(|(path, content)| (path.replace("2048kB", "64kB"), content))
            .collect();
        let small: Vec<(&str, &str)> = small.iter().map(|(p, c)| (p.as_str(), *c)).collect();
        fixture(&root, &small)?;
        ensure!(size(&root, &[])? == 64 << 10, "the pool with pages");
        ensure!(size(&root, &["--page-size", "2M"])? == 2 << 20);
        fixture(&root, &pool_files("1", "0"))?;
        ensure!(size(&root, &[])? == 2 << 20, "a pool that holds pages, if in use");
        let done = check(&["--sysfs-root", text(&root), "--page-size", "4M", text(&program)])?;
        ensure!(done.out.contains("no huge pages of 4MB here"), "{done:?}");
        Ok(())
    })());
}

#[test]
fn json_says_what_the_text_says() {
    outcome((|| {
        let directory = tempfile::tempdir()?;
        let program = compile(directory.path(), "gcc", "big", &big_source(), &["-O1"])?;
        let json = check(&["--json", text(&program)])?.json()?;
        let done = check(&[text(&program)])?;
        ensure!(json["schema"] == 1 && json["suitable"] == true && json["type"] == "pie", "{json}");
        let worst = json["need"]["pages"]["worst"].as_u64().context("worst")?;
        let begin = format!("suitable: {worst} huge pages ({} MiB) for text ", 2 * worst);
        ensure!(done.verdict().starts_with(&begin), "{}", done.verdict());
        let json = check(&["--json", "/bin/true"])?;
        ensure!(json.code == Some(3), "{json:?}");
        ensure!(json.json()?["reason"]["code"] == "too-small");
        ensure!(check(&["--json", "/"])?.out.is_empty());
        ensure!(!check(&["true"])?.out.contains('\x1b'), "colour without a terminal");
        Ok(())
    })());
}
