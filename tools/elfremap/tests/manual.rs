//! What `elfremap manual` writes for `make install`.

use std::fs;
use std::path::Path;
use std::process::Command;

use clap::CommandFactory;
use elfremap_tools::cli::{CheckCli, Cli};
use tempfile::TempDir;

fn written() -> TempDir {
    let dir = TempDir::new().unwrap();
    let status =
        Command::new(env!("CARGO_BIN_EXE_elfremap")).arg("manual").arg(dir.path()).status();
    assert!(status.unwrap().success());
    dir
}

fn read(dir: &TempDir, path: &str) -> String {
    fs::read_to_string(dir.path().join(path)).unwrap_or_else(|error| panic!("{path}: {error}"))
}

/// Options as the page writes them.
fn assert_describes(page: &str, command: &clap::Command) {
    for option in command.get_opts() {
        let name = option.get_long().unwrap().replace('-', "\\-");
        assert!(page.contains(&format!("\\-\\-{name}")), "{}: --{name}", command.get_name());
    }
}

#[test]
fn every_command_has_a_page_with_all_its_options() {
    let dir = written();
    let cli = Cli::command();
    let main = read(&dir, "man/man1/elfremap.1");
    for command in cli.get_subcommands().filter(|command| !command.is_hide_set()) {
        let name = command.get_name();
        assert!(main.contains(&format!("elfremap\\-{name}(1)")), "{name}");
        let page = read(&dir, &format!("man/man1/elfremap-{name}.1"));
        assert_describes(&page, command);
        for section in [".SH NAME", ".SH EXAMPLES", ".SH \"EXIT STATUS\""] {
            assert!(page.contains(section), "{name}: {section}");
        }
    }
    assert_describes(&read(&dir, "man/man1/elfremap-check.1"), &CheckCli::command());
    assert!(!main.contains("elfremap\\-manual"));
}

#[test]
fn the_librarys_page_names_every_variable() {
    let page = read(&written(), "man/man7/elfremap.7");
    let options = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../remap-preload/src/options.rs");
    let options = fs::read_to_string(options).unwrap();
    let names: Vec<_> =
        options.split("b\"ELFREMAP").skip(1).filter_map(|s| s.split('"').next()).collect();
    assert!(names.len() > 10, "{names:?}");
    for name in names {
        assert!(page.contains(&format!("\\fBELFREMAP{name}\\fR")), "ELFREMAP{name}");
    }
}

#[test]
fn groff_has_no_complaint() {
    let dir = written();
    for section in ["man1", "man7"] {
        for page in fs::read_dir(dir.path().join("man").join(section)).unwrap() {
            let page = page.unwrap().path();
            let output =
                Command::new("groff").args(["-man", "-Tutf8", "-ww", "-z"]).arg(&page).output();
            let Ok(output) = output else {
                assert!(
                    std::env::var_os("ELFREMAP_TEST_NO_SKIP").is_none(),
                    "skipped: needs groff"
                );
                eprintln!("skipped: needs groff");
                return;
            };
            let complaint = String::from_utf8(output.stderr).unwrap();
            assert!(
                output.status.success() && complaint.is_empty(),
                "{}: {complaint}",
                page.display()
            );
        }
    }
}

#[test]
fn bash_completes_commands_and_options() {
    let dir = written();
    let complete = |file: &str, words: &str| {
        let script = format!(
            "source {}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); \
             _{} {} \"${{COMP_WORDS[COMP_CWORD]}}\" \"${{COMP_WORDS[COMP_CWORD-1]}}\"; \
             echo \"${{COMPREPLY[@]}}\"",
            dir.path().join("bash-completion/completions").join(file).display(),
            file.replace('-', "__"),
            file,
        );
        let output = Command::new("bash").args(["-c", &script]).output().unwrap();
        String::from_utf8(output.stdout).unwrap() + &String::from_utf8(output.stderr).unwrap()
    };
    assert_eq!(complete("elfremap", "elfremap re").trim(), "reserve");
    assert_eq!(complete("elfremap", "elfremap reserve --at").trim(), "--at-least");
    assert_eq!(complete("elfremap", "elfremap man").trim(), "");
    assert_eq!(complete("elfremap-check", "elfremap-check --js").trim(), "--json");
}

#[test]
fn zsh_and_fish_know_the_options_too() {
    let dir = written();
    let zsh = read(&dir, "zsh/site-functions/_elfremap");
    assert!(zsh.starts_with("#compdef elfremap\n") && zsh.contains("--at-least=["));
    assert!(
        read(&dir, "zsh/site-functions/_elfremap-check").starts_with("#compdef elfremap-check\n")
    );
    let fish = read(&dir, "fish/vendor_completions.d/elfremap.fish");
    assert!(fish.contains("-l at-least"));
    assert!(read(&dir, "fish/vendor_completions.d/elfremap-check.fish").contains("-l json"));
}

#[test]
fn a_directory_that_cannot_be_written_is_an_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_elfremap"))
        .args(["manual", "/dev/null"])
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        String::from_utf8(output.stderr).unwrap().contains("write /dev/null/man/man1/elfremap.1")
    );
}
