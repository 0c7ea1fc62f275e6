//! `elfremap perfmap` on programs that move their own text, as the preload does, but without
//! needing huge pages or rights.

#[path = "perfmap/support.rs"]
mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use support::*;

#[test]
fn every_function_of_pie_and_fixed_programs() {
    let folder = Folder::new();
    for flags in [["-pie", "-fPIE"], ["-no-pie", "-fno-pie"]] {
        let program = folder.target(&flags);
        for what in ["text", "all", "whole"] {
            let target = Target::run(&program, &[what]);
            let map = target.map();
            let bias = target.address - address_of(&program, "main");
            assert_eq!(flags[0] == "-no-pie", bias == 0);
            check_against_nm(&map, &program, bias);
            assert_eq!(map.at(target.address), Some("main"));
            assert_eq!(map.named("printf@plt").len(), 1);
        }
    }
}

#[test]
fn static_programs_and_those_started_by_the_loader() {
    let folder = Folder::new();
    let program = folder.build("static", &["target.c"], &["-static"]);
    let target = Target::run(&program, &["all"]);
    check_against_nm(&target.map(), &program, 0);
    // A static program chooses its memcpy at start, through entries of a PLT without symbols.
    assert!(fs::read_to_string(target.map_path()).unwrap().contains("@plt\n"));

    let program = folder.target(&[]);
    let interpreter = run("readelf", ["-lW".as_ref(), program.as_os_str()]);
    let interpreter = interpreter.split("interpreter: ").nth(1).unwrap().split(']').next().unwrap();
    for what in ["text", "all", "whole"] {
        let target = Target::start(Command::new(interpreter).arg(&program).arg(what));
        let bias = target.address - address_of(&program, "main");
        check_against_nm(&target.map(), &program, bias);
    }
}

#[test]
fn shared_objects_by_mappings_and_by_link_map() {
    let folder = Folder::new();
    let object = folder.build("libshared.so", &["shared.c"], &["-shared", "-fPIC"]);
    let program = folder.build("program", &["object.c"], &[]);
    for what in ["text", "all", "whole"] {
        let target = Target::run(&program, &[object.to_str().unwrap(), what]);
        let bias = target.address - address_of(&object, "exported");
        let map = target.map();
        check_against_nm(&map, &object, bias);
        // The program itself was not moved.
        assert!(map.named("main").is_empty());
        let all = target.perfmap(&["--all", "-o", "-"], 3);
        let all = Map::parse(&all.stdout);
        assert_eq!(all.named("main").len(), 1);
        assert!(all.0.values().any(|(_, name)| name.contains("clock_gettime")), "no vdso");
    }
}

#[test]
fn names_by_the_documented_rules() {
    let folder = Folder::new();
    let cc = ["names.S", "names.c", "names2.cc", "target.c"];
    let plain = folder.build("plain", &cc, &["-fno-pie", "-no-pie", "-x", "none", "-lstdc++"]);
    let program = folder.path("names");
    let rename = std::ffi::OsString::from("--redefine-sym=to_be_renamed=with\nnew \x1b[31mline");
    run("objcopy", [rename.as_os_str(), plain.as_os_str(), program.as_os_str()]);
    let at = |name| address_of(&plain, name);
    let target = Target::run(&program, &["text"]);
    let map = target.map();
    let record = |name: &str| match map.named(name)[..] {
        [record] => record,
        ref other => panic!("{name}: {other:?}"),
    };

    // Labels without size run to the next symbol; the last one to its section's end.
    assert_eq!(record("label_one"), (at("label_one"), 1));
    assert_eq!(record("label_two"), (at("label_two"), 2));
    assert_eq!(record("label_three"), (at("label_three"), 0x10 - 3));
    assert_eq!(record("last_label"), (at("last_label"), 5));
    // One name per address: global, then longest.
    assert_eq!(record("real_function").0, at("real"));
    for name in ["real", "weak_and_much_longer_name", "local_but_longest_name_of_all"] {
        assert_eq!(map.named(name), [], "{name}");
    }
    // Local functions of one name are two functions.
    assert_eq!(map.named("same_name").len(), 2);
    // What is chosen at run time: the function that chooses, and the entry that jumps.
    assert_eq!(map.at(at("chosen")), Some("chosen"));
    assert_eq!(map.named("chosen@plt").len(), 1);
    // Clones, whole demangled names, Rust old and new.
    for (name, symbol) in [
        ("work.cold", "work.cold"),
        ("work.part.0", "work.part.0"),
        ("mycrate::v0_fun", "_RNvCs1234_7mycrate6v0_fun"),
        ("mycrate::legacy", "_ZN7mycrate6legacy17h0123456789abcdefE"),
        ("operator new(unsigned long)", "_Znwm"),
        (
            "long space::join<long, char const*>(std::pair<long, char const*>)",
            "_ZN5space4joinIlPKcEET_St4pairIS3_T0_E",
        ),
        ("with?new ?[31mline", "to_be_renamed"),
    ] {
        assert_eq!(record(name).0, at(symbol), "{name}");
    }
    // A function inside another one.
    let outer = at("outer");
    assert_eq!(map.named("outer"), [(outer, 8), (outer + 12, 20)]);
    assert_eq!(record("inner"), (outer + 8, 4));
    // No data, nothing undefined, no mapping symbols.
    for name in ["some_data", "absent", "$x", "$d.1"] {
        assert_eq!(map.named(name), [], "{name}");
    }

    let raw = target.perfmap(&["--no-demangle", "-o", "-"], 0);
    let raw = Map::parse(&raw.stdout);
    assert_eq!(raw.named("_Znwm").len(), 1);
    assert_eq!(raw.0.len(), map.0.len());
}

#[test]
fn plt_entries_of_every_linker() {
    let folder = Folder::new();
    for (linker, flags) in [
        ("ld.bfd", &["-fuse-ld=bfd", "-Wl,-z,lazy"][..]),
        ("ld.bfd", &["-fuse-ld=bfd", "-Wl,-z,now"]),
        ("ld.bfd", &["-fuse-ld=bfd", "-Wl,-z,ibtplt"]),
        ("ld.gold", &["-fuse-ld=gold"]),
        ("ld.lld", &["-fuse-ld=lld"]),
    ] {
        if !have(linker) || (cfg!(not(target_arch = "x86_64")) && flags.contains(&"-Wl,-z,ibtplt"))
        {
            continue;
        }
        let program = folder.target(flags);
        let target = Target::run(&program, &["text"]);
        let map = target.map();
        // objdump finds the entries in a way of its own.
        let bias = target.address - address_of(&program, "main");
        let listing = run("objdump", ["-d".as_ref(), program.as_os_str()]);
        let entries: Vec<_> = listing
            .lines()
            .filter_map(|line| line.strip_suffix(">:")?.split_once(" <"))
            .filter(|(_, name)| name.ends_with("@plt"))
            .collect();
        assert!(!entries.is_empty() || linker == "ld.lld", "{flags:?}");
        for (address, name) in entries {
            let address = u64::from_str_radix(address, 16).unwrap() + bias;
            assert_eq!(map.at(address), Some(name), "{flags:?}");
        }
        assert!(!map.named("printf@plt").is_empty(), "{flags:?}");
    }
}

/// Splits the target into a stripped program and its debug file.
fn split(folder: &Folder, flags: &[&str]) -> (PathBuf, PathBuf) {
    let program = folder.target(flags);
    let debug = folder.path("target.debug");
    run("objcopy", ["--only-keep-debug".as_ref(), program.as_os_str(), debug.as_os_str()]);
    run("strip", ["--strip-all".as_ref(), program.as_os_str()]);
    (program, debug)
}

fn build_id(file: &Path) -> String {
    let notes = run("readelf", ["-n".as_ref(), file.as_os_str()]);
    notes.split("Build ID: ").nth(1).unwrap().split_whitespace().next().unwrap().to_owned()
}

#[test]
fn separate_debug_file_by_build_id() {
    let folder = Folder::new();
    let (program, debug) = split(&folder, &["-Wl,--build-id"]);
    let id = build_id(&program);
    let place = folder.path("dbg/.build-id").join(&id[..2]);
    fs::create_dir_all(&place).unwrap();
    let place = place.join(format!("{}.debug", &id[2..]));
    fs::copy(&debug, &place).unwrap();
    let target = Target::run(&program, &["text"]);
    let dir = folder.path("dbg");
    let dir = dir.to_str().unwrap();

    // Without the debug file: what is exported for dlopen, which is nothing here.
    let without = target.perfmap(&[], 1);
    assert!(
        without.stderr.contains("no symbols") || without.stderr.contains("dynamic"),
        "{}",
        without.stderr
    );
    let with = target.perfmap(&["--debug-dir", dir], 0);
    assert_eq!(with.stderr, "");
    let map = Map::read(&target.map_path());
    let bias = target.address - address_of(&debug, "main");
    check_against_nm(&map, &debug, bias);
    assert_eq!(map.named("printf@plt").len(), 1);

    // A stale one: another build's id.
    let other = folder.build("other", &["threads.c"], &["-Wl,--build-id"]);
    fs::copy(&other, &place).unwrap();
    let stale = target.perfmap(&["--debug-dir", dir], 1);
    assert!(stale.stderr.contains("another build"), "{}", stale.stderr);
    assert!(stale.stderr.contains(place.to_str().unwrap()));
}

#[test]
fn separate_debug_file_by_debuglink() {
    let folder = Folder::new();
    let (program, debug) = split(&folder, &["-Wl,--build-id=none"]);
    let link = format!("--add-gnu-debuglink={}", debug.display());
    run("objcopy", [link.as_ref(), program.as_os_str()]);
    let target = Target::run(&program, &["text"]);
    let bias = target.address - address_of(&debug, "main");
    check_against_nm(&target.map(), &debug, bias);

    // In .debug beside it, and under a debug folder, by the program's own folder.
    for place in [
        folder.path(".debug"),
        folder.path("dbg").join(folder.path(".").strip_prefix("/").unwrap()),
    ] {
        fs::create_dir_all(&place).unwrap();
        fs::rename(&debug, place.join("target.debug")).unwrap();
        target.perfmap(&["--debug-dir", folder.path("dbg").to_str().unwrap()], 0);
        check_against_nm(&Map::read(&target.map_path()), &place.join("target.debug"), bias);
        fs::rename(place.join("target.debug"), &debug).unwrap();
    }

    // One byte more: another checksum.
    let mut content = fs::read(&debug).unwrap();
    content.push(0);
    fs::write(&debug, content).unwrap();
    let changed = target.perfmap(&[], 1);
    assert!(changed.stderr.contains("checksum"), "{}", changed.stderr);
}

#[test]
fn symbols_packed_into_the_program() {
    if !have("xz") {
        return;
    }
    let folder = Folder::new();
    let (program, debug) = split(&folder, &["-rdynamic"]);
    // As distributions make it: the symbol table alone, packed by xz.
    let mini = folder.path("mini");
    run("objcopy", ["--strip-debug".as_ref(), debug.as_os_str(), mini.as_os_str()]);
    run("xz", [mini.as_os_str()]);
    let section = format!(".gnu_debugdata={}", folder.path("mini.xz").display());
    run("objcopy", ["--add-section".as_ref(), section.as_ref(), program.as_os_str()]);
    let target = Target::run(&program, &["text"]);
    let bias = target.address - address_of(&debug, "main");
    check_against_nm(&target.map(), &debug, bias);
}

#[test]
fn dynamic_symbols_alone_are_told() {
    let folder = Folder::new();
    let (program, debug) = split(&folder, &["-rdynamic"]);
    let target = Target::run(&program, &["text"]);
    let outcome = target.perfmap(&[], 3);
    assert!(outcome.stderr.contains("dynamic symbols only"), "{}", outcome.stderr);
    let map = Map::read(&target.map_path());
    assert_eq!(map.at(target.address), Some("main"));
    let local = address_of(&debug, "move_segments") + target.address - address_of(&debug, "main");
    assert_ne!(map.at(local), Some("move_segments"));

    // The same without section headers: found by the dynamic segment.
    for style in ["sysv", "gnu"] {
        let style = format!("-Wl,--hash-style={style}");
        let (program, _) = split(&folder, &["-rdynamic", &style]);
        let mut content = fs::read(&program).unwrap();
        content[0x28..0x30].fill(0);
        content[0x3c..0x40].fill(0);
        fs::write(&program, content).unwrap();
        let target = Target::run(&program, &["text"]);
        target.perfmap(&[], 3);
        assert_eq!(Map::read(&target.map_path()).at(target.address), Some("main"), "{style}");
    }
}

#[test]
fn compressed_symbol_table() {
    // binutils packs debug sections only; these two are packed here, by hand.
    for zstd in [false, true] {
        if zstd && !have("zstd") {
            continue;
        }
        let folder = Folder::new();
        let program = folder.target(&[]);
        let plain = address_of(&program, "main");
        let packed = folder.path("packed");
        fs::write(&packed, compress_symtab(&fs::read(&program).unwrap(), zstd)).unwrap();
        fs::set_permissions(&packed, fs::Permissions::from_mode(0o755)).unwrap();
        let target = Target::run(&packed, &["text"]);
        check_against_nm(&target.map(), &program, target.address - plain);
    }
}

/// The ELF64 file with `.symtab` and `.strtab` packed and put at its end.
fn compress_symtab(file: &[u8], zstd: bool) -> Vec<u8> {
    let number = |at: usize, size: usize| {
        let mut bytes = [0; 8];
        bytes[..size].copy_from_slice(&file[at..at + size]);
        usize::try_from(u64::from_le_bytes(bytes)).unwrap()
    };
    let mut out = file.to_vec();
    let (table, count) = (number(0x28, 8), number(0x3c, 2));
    let header = |index: usize| table + index * 64;
    const SHT_SYMTAB: usize = 2;
    let symtab = (0..count).find(|&i| number(header(i) + 4, 4) == SHT_SYMTAB).unwrap();
    for index in [symtab, number(header(symtab) + 40, 4)] {
        let header = header(index);
        let (offset, size) = (number(header + 24, 8), number(header + 32, 8));
        let content = &file[offset..offset + size];
        // Chdr: type (1 zlib, 2 zstd), reserved, size, alignment.
        let mut section = vec![if zstd { 2 } else { 1 }, 0, 0, 0, 0, 0, 0, 0];
        section.extend((size as u64).to_le_bytes());
        section.extend(8u64.to_le_bytes());
        if zstd {
            let mut child = Command::new("zstd")
                .args(["-q", "-c"])
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap();
            let mut stdin = child.stdin.take().unwrap();
            let input = content.to_vec();
            let writer = std::thread::spawn(move || std::io::Write::write_all(&mut stdin, &input));
            section.extend(child.wait_with_output().unwrap().stdout);
            writer.join().unwrap().unwrap();
        } else {
            let mut encoder = flate2::write::ZlibEncoder::new(section, flate2::Compression::best());
            std::io::Write::write_all(&mut encoder, content).unwrap();
            section = encoder.finish().unwrap();
        }
        let end = out.len() as u64;
        out[header + 24..header + 32].copy_from_slice(&end.to_le_bytes());
        out[header + 32..header + 40].copy_from_slice(&(section.len() as u64).to_le_bytes());
        const SHF_COMPRESSED: u64 = 1 << 11;
        let flags = number(header + 8, 8) as u64 | SHF_COMPRESSED;
        out[header + 8..header + 16].copy_from_slice(&flags.to_le_bytes());
        out.extend(section);
    }
    out
}

#[test]
fn deleted_and_replaced_programs() {
    let folder = Folder::new();
    let program = folder.target(&[]);
    let copy = folder.path("copy");
    let main = address_of(&program, "main");
    for what in ["none", "text", "all", "whole"] {
        for replaced in [false, true] {
            elfremap_tests::library::copy_program(&program, &copy).unwrap();
            let target = Target::run(&copy, &[what]);
            fs::remove_file(&copy).unwrap();
            if replaced {
                // The same name, but another program.
                folder.build("copy", &["threads.c"], &[]);
            }
            let map = target.map();
            check_against_nm(&map, &program, target.address - main);
        }
    }
}

#[test]
fn shared_object_replaced_by_another_build() {
    let folder = Folder::new();
    let flags = ["-shared", "-fPIC", "-Wl,--build-id"];
    let object = folder.build("libshared.so", &["shared.c"], &flags);
    let kept = folder.path("kept.so");
    fs::copy(&object, &kept).unwrap();
    let program = folder.build("program", &["object.c"], &[]);
    // Moved whole: nothing but the dynamic linker's list knows its name.
    let target = Target::run(&program, &[object.to_str().unwrap(), "whole"]);
    fs::remove_file(&object).unwrap();
    folder.build("libshared.so", &["shared.c"], &["-shared", "-fPIC", "-Wl,--build-id=md5"]);
    let outcome = target.perfmap(&[], 1);
    assert!(outcome.stderr.contains("not the file that was loaded"), "{}", outcome.stderr);
    assert!(!target.map_path().exists());
}

#[test]
fn processes_that_have_nothing_to_name() {
    let folder = Folder::new();
    let program = folder.target(&[]);
    let target = Target::run(&program, &["none"]);
    let outcome = target.perfmap(&[], 3);
    assert!(outcome.stderr.contains("was not remapped"), "{}", outcome.stderr);
    assert_eq!(outcome.stderr.lines().count(), 2);
    assert!(outcome.stdout.is_empty() && !target.map_path().exists());
}

/// Waits until the process, or its first thread, has ended.
fn wait_for_zombie(pid: u32) {
    let stat = format!("/proc/{pid}/stat");
    while !fs::read_to_string(&stat).unwrap().contains(") Z ") {
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
}

#[test]
fn bad_process_numbers() {
    for bad in ["0", "-1", "2147483648", "99999999999999999999", "mysqld", "", "1.5"] {
        perfmap(&[bad], 2);
    }
    let none = perfmap(&["2147483647"], 1);
    assert!(none.stderr.contains("no such process"), "{}", none.stderr);
    assert_eq!(none.stderr.lines().count(), 2);

    let mut zombie = Command::new("true").spawn().unwrap();
    wait_for_zombie(zombie.id());
    let outcome = perfmap(&[&zombie.id().to_string()], 1);
    assert!(outcome.stderr.contains("zombie"), "{}", outcome.stderr);
    assert!(!map_path(zombie.id()).exists());
    zombie.wait().unwrap();

    // A kernel thread, where one can be seen: kthreadd.
    if fs::read_to_string("/proc/2/comm").is_ok_and(|name| name == "kthreadd\n") {
        let outcome = perfmap(&["2"], 1);
        assert!(outcome.stderr.contains("kernel thread"), "{}", outcome.stderr);
    } else {
        skip("needs a process number namespace with kernel threads");
    }
}

#[test]
fn threads_are_resolved_to_their_process() {
    let folder = Folder::new();
    let program = folder.build("threads", &["threads.c"], &["-pthread"]);
    for args in [&[][..], &["leave"]] {
        let mut target = Target::run(&program, args);
        let tid = target.lines.next().unwrap().unwrap();
        if args == ["leave"] {
            wait_for_zombie(target.pid());
        }
        let outcome = perfmap(&[&tid], 0);
        assert!(outcome.stderr.contains(&format!("thread of process {}", target.pid())));
        let map = Map::read(&target.map_path());
        assert_eq!(map.at(target.address), Some("main"));
        assert!(!map_path(tid.parse().unwrap()).exists());
        // By the process's own number, also when its first thread has ended.
        assert_eq!(target.map().0.len(), map.0.len());
    }
}

#[test]
fn a_process_that_ends_meanwhile_leaves_no_map() {
    let folder = Folder::new();
    let program = folder.target(&[]);
    for delay in 0..20 {
        let target = Target::run(&program, &["text"]);
        let (pid, map_path) = (target.pid(), target.map_path());
        let elfremap = Command::new(env!("CARGO_BIN_EXE_elfremap"))
            .args(["perfmap", &pid.to_string()])
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        std::thread::sleep(std::time::Duration::from_micros(delay * 300));
        nix::sys::signal::kill(
            nix::unistd::Pid::from_raw(pid.try_into().unwrap()),
            nix::sys::signal::SIGKILL,
        )
        .unwrap();
        let output = elfremap.wait_with_output().unwrap();
        match output.status.code() {
            Some(0) => drop(Map::read(&map_path)),
            Some(1) => assert!(!map_path.exists()),
            other => panic!("{other:?} {}", String::from_utf8_lossy(&output.stderr)),
        }
        let left = fs::read_dir("/tmp").unwrap().filter_map(Result::ok);
        let left =
            left.filter(|e| e.file_name().to_string_lossy().contains(&format!("perf-{pid}.map.")));
        assert_eq!(left.count(), 0);
    }
}

#[test]
fn the_file_is_replaced_and_links_are_not_followed() {
    let folder = Folder::new();
    let target = Target::run(&folder.target(&[]), &["text"]);
    let victim = folder.path("victim");
    fs::write(&victim, "precious").unwrap();
    symlink(&victim, target.map_path()).unwrap();
    target.map();
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    let status = fs::symlink_metadata(target.map_path()).unwrap();
    assert!(status.is_file());
    assert_eq!(status.permissions().mode() & 0o7777, 0o644);
    assert_eq!(status.uid(), nix::unistd::geteuid().as_raw());

    // A file of one's choice; a strict umask changes nothing.
    let file = folder.path("own.map");
    let elfremap = env!("CARGO_BIN_EXE_elfremap");
    let command =
        format!("umask 077; exec {elfremap} perfmap -o {} {}", file.display(), target.pid());
    run("sh", ["-c", &command]);
    assert_eq!(fs::metadata(&file).unwrap().permissions().mode() & 0o7777, 0o644);
    assert_eq!(fs::read(&file).unwrap(), fs::read(target.map_path()).unwrap());
    assert_eq!(target.perfmap(&["-o", "-"], 0).stdout.as_bytes(), fs::read(&file).unwrap());
    // A link is refused there, and left as it is.
    let link = folder.path("link");
    symlink(&victim, &link).unwrap();
    target.perfmap(&["-o", link.to_str().unwrap()], 1);
    assert_eq!(fs::read_link(&link).unwrap(), victim);
    assert_eq!(fs::read(&victim).unwrap(), b"precious");
    target.perfmap(&["-o", "/dev/null"], 1);
    target.perfmap(&["-o", folder.path("absent/map").to_str().unwrap()], 1);
    // A full disk: nothing half-written is left.
    if Path::new("/dev/full").exists() {
        let command = format!("{elfremap} perfmap -o - {} > /dev/full", target.pid());
        let output = Command::new("sh").args(["-c", &command]).output().unwrap();
        let outcome = Outcome::of(&output, 1);
        assert!(outcome.stderr.contains("cannot write"), "{}", outcome.stderr);
    }
}

#[test]
fn names_of_a_jit_compiler_are_kept() {
    let folder = Folder::new();
    let target = Target::run(&folder.build("jit", &["jit.c"], &[]), &[]);
    let outcome = target.perfmap(&[], 0);
    assert!(outcome.stderr.contains("is writing"), "{}", outcome.stderr);
    let text = fs::read_to_string(target.map_path()).unwrap();
    let map = Map::parse(&text);
    assert_eq!(map.named("js:first").len(), 1);
    assert_eq!(map.named("js:later").len(), 1);
    assert!(map.named("stale:elsewhere").is_empty());
    assert_eq!(map.at(target.address), Some("main"));
}

#[test]
fn other_users_processes() {
    if !root() || !have("setpriv") {
        return;
    }
    let folder = Folder::new();
    fs::set_permissions(folder.path("."), fs::Permissions::from_mode(0o755)).unwrap();
    let program = folder.target(&[]);
    let elfremap = folder.path("elfremap");
    elfremap_tests::library::copy_program(env!("CARGO_BIN_EXE_elfremap"), &elfremap).unwrap();
    let as_user = |user: &str, program: &Path| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", user, "--regid", user, "--clear-groups"]).arg(program);
        command
    };
    let target = Target::start(as_user("65533", &program).arg("text"));
    let pid = target.pid().to_string();

    let foreign = as_user("65534", &elfremap).args(["perfmap", &pid]).output().unwrap();
    let outcome = Outcome::of(&foreign, 4);
    assert!(outcome.stderr.contains("sudo elfremap perfmap"), "{}", outcome.stderr);
    assert!(!target.map_path().exists());

    // The owner: an ordinary user reads its own process, without any capability.
    let own = as_user("65533", &elfremap).args(["perfmap", &pid]).output().unwrap();
    Outcome::of(&own, 0);
    assert_eq!(fs::metadata(target.map_path()).unwrap().uid(), 65533);
    check_against_nm(
        &Map::read(&target.map_path()),
        &program,
        target.address - address_of(&program, "main"),
    );
    // Root, for an ordinary user's process: root's file, which every perf accepts.
    target.perfmap(&[], 0);
    let status = fs::metadata(target.map_path()).unwrap();
    assert_eq!((status.uid(), status.permissions().mode() & 0o7777), (0, 0o644));
    // And now the owner may not replace it.
    let refused = as_user("65533", &elfremap).args(["perfmap", &pid]).output().unwrap();
    Outcome::of(&refused, 4);
}

/// A copy of `file` outside of /tmp, which containers cover with their own.
fn outside_of_tmp(file: &Path) -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::Builder::new().prefix("perfmap").tempdir_in("/var/tmp").unwrap();
    fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = folder.path().join("target");
    fs::copy(file, &copy).unwrap();
    (folder, copy)
}

#[test]
fn containers_with_their_own_tmp_and_process_numbers() {
    if !root() || !have("unshare") || !have("nsenter") {
        return;
    }
    let folder = Folder::new();
    let program = folder.target(&[]);
    let (place, copy) = outside_of_tmp(&program);
    let script = format!("mount -t tmpfs none /tmp && exec {} text", copy.display());
    // unshare forks: the target is its child.
    let unshare = ["--pid", "--mount", "--fork", "--kill-child", "--mount-proc", "sh", "-c"];
    let parent = Target::start(Command::new("unshare").args(unshare).arg(&script));
    let pid = parent.child_pid();
    let bias = parent.address - address_of(&program, "main");

    perfmap(&[&pid.to_string()], 0);
    check_against_nm(&Map::read(&map_path(pid)), &program, bias);
    fs::remove_file(map_path(pid)).unwrap();
    let inside = format!("/proc/{pid}/root/tmp/perf-1.map");
    let inside = Path::new(&inside);
    assert!(!inside.exists());

    let outcome = perfmap(&["--in-container", &pid.to_string()], 0);
    assert!(outcome.stdout.starts_with("/tmp/perf-1.map: "), "{}", outcome.stdout);
    check_against_nm(&Map::read(inside), &program, bias);
    let status = fs::metadata(inside).unwrap();
    assert_eq!((status.uid(), status.permissions().mode() & 0o7777), (0, 0o644));
    assert!(!map_path(pid).exists());

    // From inside, by the number in there: the same file.
    fs::remove_file(inside).unwrap();
    let elfremap = place.path().join("elfremap");
    elfremap_tests::library::copy_program(env!("CARGO_BIN_EXE_elfremap"), &elfremap).unwrap();
    let target = pid.to_string();
    let args = ["-t", &target, "--pid", "--mount", elfremap.to_str().unwrap(), "perfmap", "1"];
    run("nsenter", args);
    check_against_nm(&Map::read(inside), &program, bias);
}

#[test]
fn a_chrooted_program() {
    if !root() || !have("chroot") {
        return;
    }
    let folder = Folder::new();
    let program = folder.build("static", &["target.c"], &["-static"]);
    let jail = folder.path("jail");
    fs::create_dir_all(jail.join("tmp")).unwrap();
    elfremap_tests::library::copy_program(&program, jail.join("target")).unwrap();
    let target = Target::start(Command::new("chroot").arg(&jail).args(["/target", "all"]));
    check_against_nm(&target.map(), &program, 0);
    target.perfmap(&["--in-container"], 0);
    let inside = jail.join(format!("tmp/perf-{}.map", target.pid()));
    check_against_nm(&Map::read(&inside), &program, 0);
}

#[test]
fn a_user_namespace_gets_a_file_of_its_own_root() {
    if !root() || !have("unshare") || !have("setpriv") {
        return;
    }
    let folder = Folder::new();
    let program = folder.target(&[]);
    let (_place, copy) = outside_of_tmp(&program);
    let mut command = Command::new("setpriv");
    command.args(["--reuid", "65533", "--regid", "65533", "--clear-groups"]);
    command.args(["unshare", "--user", "--map-root-user", "--mount", "sh", "-c"]);
    command.arg(format!("mount -t tmpfs none /tmp && exec {} text", copy.display()));
    let target = Target::start(&mut command);
    target.perfmap(&["--in-container"], 0);
    let inside = format!("/proc/{}/root/tmp/perf-{}.map", target.pid(), target.pid());
    let status = fs::metadata(&inside).unwrap();
    // Root in there is this user out here.
    assert_eq!(status.uid(), 65533);
    check_against_nm(
        &Map::read(Path::new(&inside)),
        &program,
        target.address - address_of(&program, "main"),
    );
}

#[test]
fn a_million_symbols_in_little_memory() {
    let folder = Folder::new();
    let assembler = folder.path("million.s");
    let mut text = String::from(".text\n");
    for number in 0..1_000_000 {
        text.push_str(&format!("fn_{number}: nop\n"));
    }
    text.push_str(".section .note.GNU-stack,\"\",@progbits\n");
    fs::write(&assembler, text).unwrap();
    let program = folder.target(&["-no-pie", assembler.to_str().unwrap()]);
    let target = Target::run(&program, &["text"]);
    // 500 MiB of address space, which is more than memory.
    let elfremap = env!("CARGO_BIN_EXE_elfremap");
    let command = format!("ulimit -v 512000; exec {elfremap} perfmap {}", target.pid());
    let output = Command::new("sh").args(["-c", &command]).output().unwrap();
    Outcome::of(&output, 0);
    let map = Map::read(&target.map_path());
    let first = address_of(&program, "fn_0");
    for number in 0..1_000_000 {
        let (size, name) = &map.0[&(first + number)];
        assert_eq!(name, &format!("fn_{number}"));
        assert!(*size == 1 || number == 999_999);
    }
}
