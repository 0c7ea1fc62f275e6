//! docs/json.md names every field that the commands print.

mod pool_fixture;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

use pool_fixture::{Machine, Node, elfremap, json, path_of_elfremap};
use serde_json::Value;

/// All names of fields in the document; those below `free_form` are data, not fields.
fn names(value: &Value, free_form: &[&str], found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                found.insert(name.clone());
                if !free_form.contains(&name.as_str()) {
                    names(value, free_form, found);
                }
            }
        }
        Value::Array(values) => values.iter().for_each(|value| names(value, free_form, found)),
        _ => {}
    }
}

#[test]
fn every_field_is_documented() {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/json.md"))
        .unwrap();
    let machine = Machine::new(&[Node(0, 512, Some([3, 1, 0]))]);
    machine.put("proc/7/status", "HugetlbPages: 2048 kB\n");
    machine.put("proc/7/comm", "server\n");
    let program = path_of_elfremap();
    let program = program.to_str().unwrap();
    let own = std::process::id().to_string();
    let documents = [
        ("pool", json(machine.elfremap("pool").arg("--json"))),
        (
            "reserve",
            json(machine.elfremap("reserve").args([
                "--json",
                "--pages",
                "2",
                "--dry-run",
                "--overcommit",
                "1",
                "--persist",
                "tmpfiles",
            ])),
        ),
        ("check", json(elfremap().args(["check", "--json", program]))),
        ("check", json(elfremap().args(["check", "--json", "/etc/passwd"]))),
        ("status", json(elfremap().args(["status", "--json", "--objects", &own]))),
        (
            "compare",
            json(elfremap().args([
                "compare",
                "--json",
                "-n",
                "6",
                "--library",
                &harmless(),
                "--variants",
                "thp",
                "--",
                "true",
            ])),
        ),
    ];
    let section_of =
        |name: &str| text.split("\n## ").find(|section| section.starts_with(name)).unwrap();
    let pools = section_of("pool");
    for (command, document) in documents {
        let section = section_of(command);
        let mut found = BTreeSet::new();
        names(&document, &["environment", "linker_flags", "symbols"], &mut found);
        assert!(found.remove("schema") && document["schema"] == 1, "{command}");
        for name in found {
            // `check` has the pools as well.
            let places = [section, if command == "check" { pools } else { "" }];
            let is_named = places.iter().any(|place| {
                place.contains(&format!("`{name}`")) || place.contains(&format!(".{name}`"))
            });
            assert!(is_named, "{command}: {name} is not in docs/json.md");
        }
    }
}

/// A shared object that every program can be started with.
fn harmless() -> String {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut objects = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let libc = objects.find(|path| path.contains("/libc.so")).unwrap();
    Path::new(libc).with_file_name("libm.so.6").display().to_string()
}
