//! `elfremap reserve` on machines made of files and on this one.

mod pool_fixture;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::{fs, process};

use pool_fixture::{
    Machine, Node, RealPool, assert_fits, elfremap, json, path_of_elfremap, skipped, stderr, stdout,
};

const PAGES: Option<[u64; 3]> = Some([0, 0, 0]);

/// Nodes 0, 2 and 5 with 512 MiB each, node 3 without memory.
fn sparse() -> Machine {
    Machine::new(&[Node(0, 512, PAGES), Node(2, 512, PAGES), Node(3, 0, None), Node(5, 512, PAGES)])
}

const SPARSE: [u32; 3] = [0, 2, 5];

fn reserve(machine: &Machine, args: &str) -> assert_cmd::Command {
    let mut command = machine.elfremap("reserve");
    command.args(args.split_whitespace());
    command
}

#[test]
fn uneven_over_sparse_nodes_absolute_and_relative() {
    let machine = sparse();
    reserve(&machine, "--pages 25 --node 0").assert().code(0);
    reserve(&machine, "--pages 75 --node 2").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["25", "75", "0", "0"]);
    reserve(&machine, "--pages 10 --node 2").assert().code(0);
    reserve(&machine, "--at-least 50 --node 2").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["25", "85", "0", "0"]);
    reserve(&machine, "--at-least 50 --node 5").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["25", "85", "50", "0"]);
    reserve(&machine, "--pages 30 --node all").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["35", "95", "60", "0"]);
}

#[test]
fn the_report() {
    let machine = sparse();
    reserve(&machine, "--pages 25 --node 0").assert().code(0);
    let text = stdout(&mut reserve(&machine, "--pages 75 --node 2,5"));
    assert_eq!(
        text,
        "\
reserved 75 huge pages of 2M (150 MB)
                asked    before     after      free
  node 0            0        25        25         0
  node 2           38         0        38         0
  node 5           37         0        37         0
free and promised to nobody: 0
"
    );
    assert_fits(&text);
    let value = json(&mut reserve(&machine, "--pages 3 --node 5 --json"));
    assert_eq!(value["schema"], 1);
    assert_eq!((&value["asked"], &value["got"]), (&3.into(), &3.into()));
    assert_eq!(value["places"][2]["node"], 5);
    assert_eq!(value["places"][2]["before"]["total"], 37);
    assert_eq!(value["places"][2]["after"]["total"], 40);
}

#[test]
fn one_node_two_nodes_eight_nodes() {
    for count in [1, 2, 8] {
        let numbers: Vec<u32> = (0..count).map(|n| n * 2).collect();
        let nodes: Vec<_> = numbers.iter().map(|&n| Node(n, 512, PAGES)).collect();
        let machine = Machine::new(&nodes);
        reserve(&machine, "--pages 80 --node all").assert().code(0);
        let mut expected = vec![(80 / count).to_string(); count as usize];
        expected.push(String::from("0"));
        assert_eq!(machine.counts(&numbers), expected);
    }
}

#[test]
fn a_machine_without_numa_support() {
    let machine = Machine::new(&[Node(0, 512, PAGES)]);
    fs::remove_dir_all(machine.root().join("sys/devices")).unwrap();
    reserve(&machine, "--pages 10").assert().code(0);
    assert_eq!(machine.counts(&[]), ["10"]);
    let value = json(&mut reserve(&machine, "--pages 5 --node 0 --json"));
    assert!(value["places"][0]["node"].is_null());
    reserve(&machine, "--pages 5 --node 1").assert().code(2);
    assert_eq!(machine.counts(&[]), ["15"]);
}

#[test]
fn a_dry_run_writes_nothing() {
    let machine = sparse();
    let mut command = reserve(&machine, "--pages 9 --node 0,2 --overcommit 4 --dry-run");
    command.assert().code(0);
    assert_eq!(
        stdout(&mut command),
        "\
would write 5 (now 0) to
  /sys/devices/system/node/node0/hugepages/hugepages-2048kB/nr_hugepages
would write 4 (now 0) to
  /sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages
would write 4 (now 0) to
  /sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages
"
    );
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
    assert_eq!(
        machine.get("sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages"),
        "0"
    );
}

#[test]
fn wrong_nodes_sizes_and_numbers() {
    let machine = sparse();
    for (args, code, message) in [
        ("--pages 5 --node 1", 2, "there is no node 1: this machine has node 0,2-3,5"),
        ("--pages 5 --node 0,3", 2, "node 3 has no memory of its own"),
        ("--pages 5 --node some", 2, "write auto, all, or a list of nodes"),
        ("--pages 5 --size 4M", 1, "no huge pages of 4M: this machine offers 2M, 1G"),
        ("--pages 5 --size 5M", 2, "not a page size"),
        ("", 2, "say how many pages"),
        ("--pages 5 --at-least 5", 2, "cannot be used with"),
        ("--release --hard", 2, "cannot be used with"),
        ("--pages 5 --instances 2", 2, "--instances multiplies the number of --for"),
        ("--pages -5", 2, "unexpected argument"),
    ] {
        let mut command = reserve(&machine, args);
        command.assert().code(code).stdout("");
        assert!(stderr(&mut command).contains(message), "{args}: {}", stderr(&mut command));
    }
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
}

#[test]
fn the_callers_cpuset_limits_auto() {
    let machine = sparse();
    machine.put("proc/self/status", "Name:\tx\nMems_allowed_list:\t2\n");
    reserve(&machine, "--pages 8").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["0", "8", "0", "0"]);
    machine.put("proc/self/status", "Mems_allowed_list:\t3\n");
    let mut command = reserve(&machine, "--pages 8");
    command.assert().code(2);
    assert!(stderr(&mut command).contains("may use only memory of node 3"));
}

#[test]
fn free_pages_elsewhere_do_not_help_a_bound_program() {
    // Node 1 has 50 free pages, but the program runs on node 0.
    let machine = Machine::new(&[Node(0, 512, PAGES), Node(1, 512, Some([50, 50, 0]))]);
    reserve(&machine, "--available 20 --node 1").assert().code(0);
    assert_eq!(machine.counts(&[0, 1]), ["0", "50", "50"]);
    reserve(&machine, "--available 20 --node 0").assert().code(0);
    assert_eq!(machine.counts(&[0, 1]), ["20", "50", "50"]);
}

#[test]
fn memory_is_kept_for_the_others() {
    // 512 MiB on each of three nodes: 128 MiB stay free, so 234 pages fit on each.
    let machine = sparse();
    let mut command = reserve(&machine, "--pages 1000 --all-or-nothing");
    command.assert().code(5);
    let message = stderr(&mut command);
    assert!(message.contains("reserve 1000 2M pages: there is memory for 702; nothing is kept"));
    assert!(message.contains("hint: ") && message.contains("--keep-free"));
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);

    let mut command = reserve(&machine, "--pages 1000 --dry-run");
    command.assert().code(5);
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
    reserve(&machine, "--pages 1000").assert().code(5);
    assert_eq!(machine.counts(&SPARSE), ["234", "234", "234", "0"]);
    let machine = sparse();
    reserve(&machine, "--pages 1000 --keep-free 1G").assert().code(5);
    assert_eq!(machine.counts(&SPARSE), ["85", "85", "85", "0"]);
    let machine = sparse();
    reserve(&machine, "--pages 1000 --keep-free 0").assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["334", "333", "333", "0"]);
}

#[test]
fn overcommit_is_raised_but_lowered_only_when_told() {
    let machine = sparse();
    let file = "sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages";
    for (args, count) in [
        ("--overcommit 8", "8"),
        ("--overcommit 3", "8"),
        ("--overcommit 9 --pages 1 --node 0", "9"),
        ("--release --overcommit 3", "3"),
    ] {
        reserve(&machine, args).assert().code(0);
        assert_eq!(machine.get(file), count, "{args}");
    }
    // Overcommit alone released no page.
    assert_eq!(machine.counts(&SPARSE), ["1", "0", "0", "0"]);
}

#[test]
fn release_gives_back_free_pages_only() {
    let machine = Machine::new(&[Node(0, 512, Some([30, 20, 0])), Node(1, 512, Some([10, 10, 0]))]);
    machine.put("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "6\n");
    reserve(&machine, "--release --pages 3 --node 1").assert().code(0);
    assert_eq!(machine.counts(&[0, 1]), ["30", "7", "40"]);
    reserve(&machine, "--release --node 0 --dry-run").assert().code(0);
    assert_eq!(machine.counts(&[0, 1]), ["30", "7", "40"]);
    reserve(&machine, "--release --node 0").assert().code(0);
    assert_eq!(machine.counts(&[0, 1]), ["10", "7", "40"]);
    let mut command = reserve(&machine, "--release --pages 30 --node 1 --dry-run");
    command.assert().code(5);
    assert!(stderr(&mut command).contains("release 30 2M pages: only 7 were free"));
}

#[test]
fn texts_that_last() {
    let machine = sparse();
    let text =
        stdout(&mut reserve(&machine, "--pages 75 --node 2 --overcommit 4 --persist tmpfiles"));
    assert_eq!(
        text,
        "\
# /etc/tmpfiles.d/elfremap.conf, see tmpfiles.d(5)
w /sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages - - - - 75
w /sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages - - - - 4
"
    );
    assert_eq!(machine.counts(&SPARSE), ["0", "75", "0", "0"]);

    let machine = sparse();
    let mut command = reserve(&machine, "--pages 75 --persist sysctl --dry-run");
    assert!(stdout(&mut command).ends_with("\nvm.nr_hugepages = 75\n"));
    for args in ["--node 2", "--size 1G"] {
        let mut command = reserve(&machine, &format!("--pages 1 --persist sysctl {args}"));
        command.assert().code(2);
        assert!(stderr(&mut command).contains("use --persist tmpfiles"));
    }

    // What was asked counts for the next boot, not what could be had now.
    let text = stdout(&mut reserve(&machine, "--pages 900 --dry-run --persist systemd"));
    for node in SPARSE {
        let line = format!(" reserve --size 2M --node {node} --at-least 300 --hard\n");
        assert!(text.contains(&line), "{text}");
    }

    let file = machine.root().join("unit");
    let mut command = reserve(&machine, "--pages 3 --node 0 --persist systemd -o");
    command.arg(&file).assert().code(0);
    assert!(stdout(&mut command).starts_with("reserved 3 huge pages"));
    assert!(fs::read_to_string(&file).unwrap().contains("Type=oneshot\n"));
}

#[test]
fn the_unit_is_one_that_systemd_reads() {
    if skipped(
        "needs systemd-analyze",
        process::Command::new("systemd-analyze").arg("--version").output().is_err(),
    ) {
        return;
    }
    let machine = sparse();
    let file = machine.root().join("elfremap-reserve.service");
    reserve(&machine, "--pages 3 --dry-run --persist systemd").assert().code(0);
    let text = stdout(&mut reserve(&machine, "--pages 3 --dry-run --persist systemd"));
    fs::write(&file, text).unwrap();
    let output =
        process::Command::new("systemd-analyze").arg("verify").arg(&file).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(!message.contains("elfremap-reserve.service"), "{message}");
}

#[test]
fn texts_for_containers_and_services() {
    let machine = sparse();
    let text = stdout(&mut reserve(&machine, "--pages 41 --instances 3 --format kubernetes"));
    assert!(text.contains("41 huge pages of 2M for each of 3 instances: 123 in all"));
    assert_eq!(text.matches("hugepages-2Mi: 82Mi").count(), 2);
    let text = stdout(&mut reserve(&machine, "--pages 2 --size 1G --format kubernetes"));
    assert_eq!(text.matches("hugepages-1Gi: 2Gi").count(), 2);
    let text = stdout(&mut reserve(&machine, "--pages 41 --instances 3 --format docker"));
    assert!(text.contains("\nelfremap reserve --size 2M --pages 123\n"));
    assert!(text.contains("-e LD_PRELOAD=/") && text.contains("/libelfremap.so IMAGE"));
    let text = stdout(&mut reserve(&machine, "--pages 41 --format systemd"));
    assert!(text.contains("\nEnvironment=LD_PRELOAD=/") && text.contains("/libelfremap.so\n"));
    assert!(text.contains("ExecStartPre=-+"));
    for kind in ["kubernetes", "docker", "systemd"] {
        let text = stdout(&mut reserve(&machine, &format!("--pages 41 --format {kind}")));
        let elfremap = path_of_elfremap();
        let directory = elfremap.parent().unwrap().to_string_lossy().into_owned();
        assert_fits(&text.replace(&directory, "/usr/bin"));
    }
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
}

#[test]
fn instances_lie_on_one_node_each_and_the_plan_comes_first() {
    let program = path_of_elfremap().display().to_string();
    let value = json(elfremap().args(["check", "--json", "--backend", "hugetlb", &program]));
    let each = value["need"]["pool_pages"]["worst"].as_u64().unwrap();
    let counts = |instances: [u64; 3]| {
        let counts = instances.iter().map(|instances| (instances * each).to_string());
        counts.chain([String::from("0")]).collect::<Vec<_>>()
    };
    let args = |more: &str| format!("--for {program} --backend hugetlb {more}");
    let machine = sparse();
    let dry = stdout(&mut reserve(&machine, &args("--instances 4 --node auto --dry-run")));
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
    let text = stdout(&mut reserve(&machine, &args("--instances 4 --node auto")));
    assert_eq!(machine.counts(&SPARSE), counts([2, 1, 1]));
    let plan = format!(
        "\
plan: 4 instances of {program}, each {each} pages of 2M
  node 0    2 instances: {twice} pages, 0 free now, {twice} to add
  node 2    1 instance: {each} pages, 0 free now, {each} to add
  node 5    1 instance: {each} pages, 0 free now, {each} to add
",
        twice = 2 * each
    );
    assert!(dry.starts_with(&plan) && dry.contains("would write"), "{dry}");
    assert!(text.starts_with(&format!("{plan}reserved ")), "{text}");

    // Two instances have their pages on node 0 already, and each node has memory for one more.
    let memory = 2 * each + 1;
    let free = Some([2 * each, 2 * each, 0]);
    let machine = Machine::new(&[Node(0, memory, free), Node(1, memory, PAGES)]);
    let keep = "--keep-free 1M --instances 5 --node auto --overcommit auto --json --dry-run";
    let mut command = reserve(&machine, &args(keep));
    let output = command.assert().code(5).get_output().clone();
    let value: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(value["pages_each"], each);
    assert_eq!(
        (&value["places"][0]["instances"], &value["places"][1]["instances"]),
        (&3.into(), &1.into())
    );
    assert_eq!((&value["asked"], &value["held_back"]), (&(3 * each).into(), &each.into()));
    assert_eq!(value["overcommit"]["after"], 2 * each, "one more, and the one without a place");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(message.contains("no place has memory for 1 instance as a whole"), "{message}");
    let mut command = reserve(&machine, "--pages 1 --overcommit auto");
    command.assert().code(2);
    assert!(stderr(&mut command).contains("--for BINARY"), "{}", stderr(&mut command));
}

#[test]
fn the_number_of_a_program_is_the_checks() {
    let machine = sparse();
    let program = path_of_elfremap().display().to_string();
    let mut check = elfremap();
    let value = json(check.args(["check", "--json", "--backend", "hugetlb", &program]));
    let worst = value["need"]["pool_pages"]["worst"].as_u64().unwrap();
    assert!(worst > 0, "{value}");
    let args = format!("--for {program} --backend hugetlb --instances 3 --node 2");
    reserve(&machine, &args).assert().code(0);
    assert_eq!(machine.counts(&SPARSE), ["0", &(3 * worst).to_string(), "0", "0"]);
    // The pages are free now, as far as the kernel says: nothing is missing any more.
    let free = "sys/devices/system/node/node2/hugepages/hugepages-2048kB/free_hugepages";
    machine.put(free, &format!("{}\n", 3 * worst));
    let global = "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages";
    machine.put(global, &format!("{}\n", 3 * worst));
    assert!(stdout(&mut reserve(&machine, &args)).contains("\nnothing to do"));

    let text = stdout(&mut reserve(&machine, &format!("{args} --format kubernetes")));
    assert_eq!(text.matches(&format!("hugepages-2Mi: {}Mi", 2 * worst)).count(), 2);
    assert!(text.contains("- name: elfremap\n"));
    let text = stdout(&mut reserve(&machine, &format!("{args} --format systemd")));
    assert!(text.contains(&format!(" --for {program} --instances 3\n")));

    for (program, code, message) in [
        ("/bin/true", 3, "/bin/true is not suitable: less than one huge page"),
        ("/etc/passwd", 1, "reserve: /etc/passwd: not an ELF file"),
        ("/nonexistent", 1, "reserve: /nonexistent: No such file"),
    ] {
        let mut command = reserve(&machine, &format!("--for {program}"));
        command.assert().code(code).stdout("");
        assert!(stderr(&mut command).contains(message), "{}", stderr(&mut command));
    }
    for args in ["--pages 1 --merge rx", "--release --backend thp", "--merge rx"] {
        reserve(&machine, args).assert().code(2);
    }
}

#[test]
fn without_the_right_it_says_what_to_type() {
    if skipped("needs root", !nix::unistd::geteuid().is_root()) {
        return;
    }
    let machine = sparse();
    let copy = machine.root().join("elfremap");
    elfremap_tests::library::copy_program(path_of_elfremap(), &copy).unwrap();
    fs::set_permissions(machine.root(), fs::Permissions::from_mode(0o755)).unwrap();
    let output = process::Command::new(&copy)
        .args(["reserve", "--pages", "3", "--node", "2", "--sysfs-root"])
        .arg(machine.root())
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(4));
    let message = String::from_utf8(output.stderr).unwrap();
    assert!(message.contains(
        "write /sys/devices/system/node/node2/hugepages/hugepages-2048kB/nr_hugepages: "
    ));
    let hint = format!("hint: sudo {} reserve --pages 3 --node 2 --sysfs-root ", copy.display());
    assert!(message.contains(&hint), "{message}");
    assert_eq!(machine.counts(&SPARSE), ["0", "0", "0", "0"]);
}

#[test]
fn read_only_sysfs_points_to_the_host() {
    if skipped("needs root", !nix::unistd::geteuid().is_root()) {
        return;
    }
    let script = format!(
        "mount -o remount,ro,bind /sys && exec {} reserve --pages 1",
        path_of_elfremap().display()
    );
    let output =
        process::Command::new("unshare").args(["-m", "sh", "-c", &script]).output().unwrap();
    let message = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(4), "{message}");
    assert!(message.contains("hint: sysfs is read-only here"), "{message}");
}

#[test]
fn the_real_pool() {
    let Some(pool) = RealPool::take() else { return };
    pool.set(4);
    assert_eq!((RealPool::count("free_hugepages"), RealPool::count("resv_hugepages")), (4, 0));
    elfremap().args(["reserve", "--pages", "6"]).assert().code(0);
    assert_eq!(RealPool::count("nr_hugepages"), 10);
    elfremap().args(["reserve", "--available", "8", "--all-or-nothing"]).assert().code(0);
    assert_eq!(RealPool::count("nr_hugepages"), 10);
    elfremap().args(["reserve", "--available", "12", "--node", "0", "--hard"]).assert().code(0);
    assert_eq!(RealPool::count("nr_hugepages"), 12);
    // More than the machine has memory for: nothing is touched.
    let mut command = elfremap();
    command.args(["reserve", "--pages", "99999999", "--all-or-nothing"]).assert().code(5);
    assert_eq!(RealPool::count("nr_hugepages"), 12);
    elfremap().args(["reserve", "--release", "--pages", "5"]).assert().code(0);
    assert_eq!(RealPool::count("nr_hugepages"), 7);
    elfremap().args(["reserve", "--release"]).assert().code(0);
    assert_eq!(RealPool::count("nr_hugepages"), 0);
}
