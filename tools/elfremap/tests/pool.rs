//! `elfremap pool` on machines made of files and on this one.

mod pool_fixture;

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::{fs, process};

use pool_fixture::{
    Machine, Node, RealPool, assert_fits, elfremap, json, path_of_elfremap, stderr, stdout,
};

fn sparse() -> Machine {
    let machine = Machine::new(&[
        Node(0, 512, Some([10, 3, 0])),
        Node(2, 0, None),
        Node(5, 512, Some([20, 17, 2])),
    ]);
    machine.put("sys/kernel/mm/hugepages/hugepages-2048kB/resv_hugepages", "4\n");
    machine.put("sys/kernel/mm/hugepages/hugepages-2048kB/nr_overcommit_hugepages", "8\n");
    machine
}

fn with_processes() -> Machine {
    let machine = sparse();
    for (pid, name, total, private, shared) in [
        (7, "mariadbd\n", 18432, 14336, 4096),
        (12, "evil\u{1b}[31m\n", 2048, 2048, 0),
        (13, "plain\n", 0, 0, 0),
    ] {
        machine.put(
            &format!("proc/{pid}/status"),
            &format!("Name:\tx\nHugetlbPages:\t   {total} kB\n"),
        );
        machine.put(&format!("proc/{pid}/comm"), name);
        machine.put(
            &format!("proc/{pid}/smaps_rollup"),
            &format!("0-1 ---p 0 0:0 0 [rollup]\nShared_Hugetlb:  {shared} kB\nPrivate_Hugetlb: {private} kB\n"),
        );
    }
    machine.put("proc/14/status", "Name:\tkthread\n");
    machine
}

#[test]
fn every_size_and_node() {
    let machine = sparse();
    let text = stdout(machine.elfremap("pool").env("COLUMNS", "80"));
    assert_eq!(
        text,
        "\
size   where         total      free  reserved   surplus  overcommit    memory
2M *   machine           30        20         4         2           8     60 MB
       node 0            10         3                   0                 20 MB
       node 5            20        17                   2                 40 MB
1G     machine            0         0         0         0           0      0 MB
       node 0             0         0                   0                  0 MB
       node 5             0         0                   0                  0 MB
* the default size

transparent huge pages: madvise, 2M
no process uses pages of the pools
20 MB in no process seen here: shared memory, hugetlbfs files, other containers
"
    );
    assert_fits(&text);
}

#[test]
fn json_says_the_same() {
    let value = json(sparse().elfremap("pool").args(["--json", "--size", "2048kB"]));
    assert_eq!(value["schema"], 1);
    assert_eq!(value["default_page_size"], 2 << 20);
    assert_eq!(value["pools"].as_array().unwrap().len(), 1);
    let pool = &value["pools"][0];
    for (field, count) in [
        ("page_size", 2 << 20),
        ("total", 30),
        ("free", 20),
        ("reserved", 4),
        ("surplus", 2),
        ("overcommit", 8),
        ("available", 16),
    ] {
        assert_eq!(pool[field], count, "{field}");
    }
    assert_eq!(
        pool["nodes"][1],
        serde_json::json!({"node": 5, "total": 20, "free": 17, "surplus": 2})
    );
    assert_eq!(value["thp"], serde_json::json!({"mode": "madvise", "page_size": 2 << 20}));
}

#[test]
fn eight_nodes() {
    let nodes: Vec<_> = (0..8).map(|n| Node(n, 64, Some([u64::from(n), 0, 0]))).collect();
    let machine = Machine::new(&nodes);
    let value = json(machine.elfremap("pool").arg("--json"));
    assert_eq!(value["pools"][0]["nodes"].as_array().unwrap().len(), 8);
    assert_eq!(value["pools"][0]["total"], 28);
    assert_fits(&stdout(&mut machine.elfremap("pool")));
}

#[test]
fn who_uses_the_pages() {
    let machine = with_processes();
    let text = stdout(&mut machine.elfremap("pool"));
    assert_fits(&text);
    let tail = text.split("2M\n").last().unwrap();
    assert_eq!(
        tail,
        "
    pid  used by              memory    private     shared
      7  mariadbd              18 MB      14 MB       4 MB
     12  evil\\u{1b}[31m         2 MB       2 MB       0 MB
"
    );
    let value = json(machine.elfremap("pool").arg("--json"));
    assert_eq!(
        value["users"]["processes"][0],
        serde_json::json!({"pid": 7, "command": "mariadbd", "total": 18 << 20,
            "private": 14 << 20, "shared": 4 << 20})
    );
    assert_eq!(value["users"]["processes"].as_array().unwrap().len(), 2);
    let without = json(machine.elfremap("pool").args(["--json", "--no-users"]));
    assert!(without["users"].is_null());
}

#[test]
fn transparent_huge_pages_do_not_change_the_pools() {
    let machine = sparse();
    let pools = |mode: &str| {
        machine.put("sys/kernel/mm/transparent_hugepage/enabled", mode);
        json(machine.elfremap("pool").arg("--json"))
    };
    let modes =
        ["[always] madvise never\n", "always [madvise] never\n", "always madvise [never]\n"];
    let seen = modes.map(pools);
    for (value, mode) in seen.iter().zip(["always", "madvise", "never"]) {
        assert_eq!(value["thp"]["mode"], mode);
        assert_eq!(value["pools"], seen[0]["pools"]);
    }
}

#[test]
fn what_the_machine_does_not_have() {
    let machine = sparse();
    let mut command = machine.elfremap("pool");
    command.args(["--size", "64K"]).assert().code(1);
    assert!(stderr(&mut command).contains("no huge pages of 64K: this machine offers 2M, 1G"));
    machine.elfremap("pool").args(["--size", "3M"]).assert().code(2);

    let empty = tempfile::TempDir::new().unwrap();
    let mut command = elfremap();
    command.arg("pool").arg("--sysfs-root").arg(empty.path()).assert().code(1);
    assert!(stderr(&mut command).contains("no pools of huge pages"));
}

#[test]
fn a_counter_that_is_no_number_is_an_error() {
    let machine = sparse();
    machine.put("sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages", "lots\n");
    let mut command = machine.elfremap("pool");
    command.assert().code(1).stdout("");
    assert!(stderr(&mut command).contains("hugepages-2048kB/free_hugepages: unexpected content"));
}

#[test]
fn help_fits_and_a_closed_pipe_is_no_error() {
    for command in ["pool", "reserve"] {
        assert_fits(&stdout(elfremap().args([command, "--help"]).env("COLUMNS", "80")));
    }
    let elfremap = path_of_elfremap();
    let script = format!(
        "{} pool 2>&1 >/dev/full; echo $?; {0} pool | true; echo ${{PIPESTATUS[0]}}",
        elfremap.display()
    );
    let output = process::Command::new("bash").args(["-c", &script]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("write stdout: No space left") && text.ends_with("1\n0\n"), "{text}");
}

#[test]
fn this_machine_and_this_process() {
    let Some(pool) = RealPool::take() else { return };
    pool.set(3);
    let length = std::num::NonZeroUsize::new(4 << 20).unwrap();
    let huge = nix::sys::mman::MapFlags::MAP_PRIVATE | nix::sys::mman::MapFlags::MAP_HUGETLB;
    let prot = nix::sys::mman::ProtFlags::PROT_READ | nix::sys::mman::ProtFlags::PROT_WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches nothing that exists.
    let pages = unsafe { nix::sys::mman::mmap_anonymous(None, length, prot, huge) }.unwrap();
    // SAFETY: the first byte of the mapping above, writable and not otherwise used.
    unsafe { pages.cast::<u8>().write(1) };

    let value = json(elfremap().args(["pool", "--json"]));
    let two = value["pools"]
        .as_array()
        .unwrap()
        .iter()
        .find(|pool| pool["page_size"] == 2 << 20)
        .unwrap();
    for (field, file) in [
        ("total", "nr_hugepages"),
        ("free", "free_hugepages"),
        ("reserved", "resv_hugepages"),
        ("surplus", "surplus_hugepages"),
    ] {
        assert_eq!(two[field], RealPool::count(file), "{field}");
    }
    assert_eq!(
        (&two["free"], &two["reserved"], &two["available"]),
        (&2.into(), &1.into(), &1.into())
    );
    let own = |value: &serde_json::Value| {
        let pid = process::id();
        let users = value["users"]["processes"].as_array().unwrap();
        users.iter().find(|user| user["pid"] == pid).unwrap().clone()
    };
    let user = own(&value);
    assert_eq!((&user["total"], &user["private"]), (&(2 << 20).into(), &(2 << 20).into()));

    // Somebody else sees that this process uses a page, but not how.
    let dir = tempfile::TempDir::new_in("/tmp").unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let copy = dir.path().join("elfremap");
    elfremap_tests::library::copy_program(path_of_elfremap(), &copy).unwrap();
    let output = process::Command::new(&copy)
        .args(["pool", "--json"])
        .uid(65534)
        .gid(65534)
        .output()
        .unwrap();
    let user = own(&serde_json::from_slice(&output.stdout).unwrap());
    assert_eq!(user["total"], 2 << 20);
    assert!(user["private"].is_null());
    // SAFETY: the mapping made above, as a whole; nothing refers to it any more.
    unsafe { nix::sys::mman::munmap(pages, length.get()) }.unwrap();
}
