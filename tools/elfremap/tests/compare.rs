//! `elfremap compare` with programs whose speed depends on the environment it sets: a
//! preloaded library that does nothing stands for the preload.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::Value;
use tempfile::TempDir;

/// A shared object that every program can be started with.
fn harmless() -> PathBuf {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    let mut objects = maps.lines().filter_map(|line| line.split_whitespace().nth(5));
    let libc = objects.find(|path| path.contains("/libc.so")).unwrap();
    Path::new(libc).with_file_name("libm.so.6")
}

struct Outcome {
    code: Option<i32>,
    stdout: String,
    stderr: String,
}

fn compare(args: &[&str]) -> Outcome {
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfremap"));
    command.env_remove("LD_PRELOAD").args(["compare", "--library"]).arg(harmless()).args(args);
    let output = command.output().unwrap();
    let text = |bytes| String::from_utf8(bytes).unwrap();
    Outcome { code: output.status.code(), stdout: text(output.stdout), stderr: text(output.stderr) }
}

/// A program that takes so many seconds plain, with the preload, and with THP.
fn program(plain: &str, remapped: &str, thp: &str) -> String {
    format!(
        "case \"$LD_PRELOAD,$ELFREMAP_BACKEND\" in ,) exec sleep {plain};; *,thp) exec sleep {thp};; \
         *) exec sleep {remapped};; esac"
    )
}

fn json(outcome: &Outcome) -> Value {
    serde_json::from_str(&outcome.stdout).unwrap()
}

#[test]
fn gain_loss_and_neither() {
    let script = program("0.06", "0.02", "0.15");
    let outcome = compare(&["-n", "6", "--variants", "remapped,thp", "--", "sh", "-c", &script]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    assert_eq!(outcome.stderr, "");
    assert!(outcome.stdout.contains("\ngain: remapped is "), "{}", outcome.stdout);
    assert!(outcome.stdout.contains("\nloss: thp is "), "{}", outcome.stdout);
    assert!(outcome.stdout.lines().all(|line| line.chars().count() <= 80), "{}", outcome.stdout);

    let outcome = compare(&["-n", "6", "--variants", "thp", "--", "sh", "-c", &script]);
    assert_eq!(outcome.code, Some(3));
    let script = program("0.03", "0.03", "0.03");
    let outcome = compare(&["-n", "7", "--json", "--", "sh", "-c", &script]);
    let value = json(&outcome);
    let speed = value["variants"][1]["speed"].as_f64().unwrap();
    assert!((0.5..2.0).contains(&speed), "{value}");
}

#[test]
fn json_has_every_run() {
    let script = program("0.05", "0.01", "0.01");
    let outcome =
        compare(&["-n", "6", "--variants", "thp+rx", "--json", "--", "sh", "-c", &script]);
    let value = json(&outcome);
    assert_eq!((&value["schema"], &value["rounds"]), (&1.into(), &6.into()));
    assert_eq!(value["metric"], "time");
    assert_eq!(value["command"][0], "sh");
    let [plain, remapped] = [0, 1].map(|i| &value["variants"][i]);
    assert_eq!(plain["name"], "plain");
    assert_eq!(remapped["environment"]["ELFREMAP_BACKEND"], "thp");
    assert_eq!(remapped["environment"]["ELFREMAP_MERGE"], "rx");
    assert_eq!(remapped["verdict"], "gain");
    for field in ["speed", "speed_low", "speed_high"] {
        assert!(remapped[field].as_f64().unwrap() > 1.5, "{value}");
    }
    for variant in [plain, remapped] {
        let runs = variant["runs"].as_array().unwrap();
        assert_eq!(runs.len(), 6);
        for run in runs {
            assert_eq!(run["value"], run["wall_seconds"]);
            assert!(run["minor_faults"].as_i64().unwrap() > 10);
            assert!(run["max_resident"].as_i64().unwrap() > 1 << 16);
        }
    }
}

#[test]
fn a_different_end_is_an_error_not_a_measurement() {
    let script = "[ -z \"$LD_PRELOAD\" ] || kill -SEGV $$; exit 3";
    let outcome = compare(&["-n", "6", "--", "sh", "-c", script]);
    assert_eq!(outcome.code, Some(1));
    assert_eq!(outcome.stdout, "");
    let message = "compare: remapped ended with signal 11, but before with exit status 3";
    assert!(outcome.stderr.contains(message), "{}", outcome.stderr);
    // The same failure in both is the program's own business.
    let outcome = compare(&["-n", "6", "--json", "--", "sh", "-c", "exit 3"]);
    assert!(matches!(outcome.code, Some(0 | 3)));
}

#[test]
fn wrong_usage_and_missing_programs() {
    for (args, code, message) in [
        (&["--"][..], 2, "required"),
        (&["--variants", "fast", "--", "true"], 2, "no variant 'fast'"),
        (&["--variants", "thp+hugetlb", "--", "true"], 2, "no variant 'thp+hugetlb'"),
        (&["-n", "5", "--", "true"], 2, "6.."),
        (&["--server", "x"], 2, "--load"),
        (&["--", "/nonexistent/program"], 1, "run /nonexistent/program: No such file"),
        (&["--library", "/nonexistent.so", "--", "true"], 2, "cannot be used multiple times"),
    ] {
        let outcome = compare(args);
        assert_eq!(outcome.code, Some(code), "{args:?}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(message), "{args:?}: {}", outcome.stderr);
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfremap"));
    let output = command.args(["compare", "--library", "/no.so", "--", "true"]).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("compare: cannot use /no.so"));
}

/// A server that says in a file how it was started, until it's told to stop.
fn server(dir: &Path, end: &str) -> [String; 2] {
    let state = dir.join("state").display().to_string();
    [
        format!(
            "trap 'rm {state}; {end}' TERM; echo \"rate ${{LD_PRELOAD:+2}}1000 per second\" >{state}; \
             while :; do sleep 0.01; done"
        ),
        state,
    ]
}

#[test]
fn a_server_by_the_rate_its_load_prints() {
    let dir = TempDir::new().unwrap();
    let [server, state] = server(dir.path(), "exit 0");
    let [ready, load] = [format!("test -s {state}"), format!("cat {state}")];
    let outcome = compare(&[
        "-n", "6", "--json", "--server", &server, "--ready", &ready, "--load", &load, "--rate",
        "rate ",
    ]);
    assert_eq!(outcome.code, Some(0), "{}", outcome.stderr);
    let value = json(&outcome);
    assert_eq!(value["metric"], "rate");
    assert_eq!(value["variants"][0]["median"], 1000.0);
    assert_eq!(value["variants"][1]["median"], 21000.0);
    assert_eq!(value["variants"][1]["speed"], 21.0);
    assert!(!Path::new(&state).exists(), "the server was not stopped");
}

#[test]
fn servers_that_misbehave() {
    let dir = TempDir::new().unwrap();
    let [good, state] = server(dir.path(), "exit 0");
    let ready = format!("test -s {state}");
    let stubborn = format!("trap '' TERM; echo x >{state}; while :; do sleep 0.01; done");
    let [crashing, _] = server(dir.path(), "kill -SEGV $$");
    for (server, ready, load, message) in [
        ("exit 7", &ready[..], "true", "the server ended before it was ready: exit status: 7"),
        (&good[..], "false", "true", "the server was not ready after 1 s: 'false' still fails"),
        (&good[..], &ready, "exit 9", "the load failed: exit status: 9"),
        (&stubborn[..], &ready, "true", "the server still runs 1 s after SIGTERM"),
        (&crashing[..], &ready, "true", "the server crashed while it stopped: signal: 11"),
    ] {
        let _ = fs::remove_file(&state);
        let outcome = compare(&[
            "-n",
            "6",
            "--server",
            server,
            "--ready",
            ready,
            "--load",
            load,
            "--ready-timeout",
            "1",
            "--stop-timeout",
            "1",
        ]);
        assert_eq!(outcome.code, Some(1), "{message}: {}", outcome.stderr);
        assert!(outcome.stderr.contains(message), "{message}: {}", outcome.stderr);
    }
    let left = Command::new("pgrep").args(["-f", &state]).output().unwrap();
    assert_eq!(String::from_utf8(left.stdout).unwrap(), "", "a server was left behind");
}

#[test]
fn an_interruption_leaves_nothing_behind() {
    let dir = TempDir::new().unwrap();
    let [server, state] = server(dir.path(), "exit 0");
    let mut command = Command::new(env!("CARGO_BIN_EXE_elfremap"));
    command.args(["compare", "--library"]).arg(harmless());
    command.args(["--server", &server, "--ready", "false", "--load", "true"]);
    let child = command.stderr(std::process::Stdio::piped()).spawn().unwrap();
    while !Path::new(&state).exists() {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    let pid = nix::unistd::Pid::from_raw(child.id().cast_signed());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    let output = child.wait_with_output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8(output.stderr).unwrap().contains("interrupted by signal 15"));
    let left = Command::new("pgrep").args(["-f", &state]).output().unwrap();
    assert_eq!(String::from_utf8(left.stdout).unwrap(), "", "a server was left behind");
}
