//! Pages in the language of man(7).

use std::fmt::Write;

use clap_mangen::Man;

use super::markdown;

/// The text of `docs/exit-codes.md`.
const EXIT_CODES: &str = include_str!("../../../../docs/exit-codes.md");
/// The text of `docs/environment.md`.
const ENVIRONMENT: &str = include_str!("../../../../docs/environment.md");
/// The text of `docs/limitations.md`.
const LIMITATIONS: &str = include_str!("../../../../docs/limitations.md");

const MANUAL: &str = "elfremap";
/// No words torn apart or stretched: names of variables and options are to be searched for.
const LAYOUT: &str = ".nh\n.ad l\n";
const SEE_ALSO: &str = ".SH \"SEE ALSO\"\n.BR elfremap (1),\n.BR elfremap\\-check (1),\n\
    .BR elfremap (7),\n.BR ld.so (8),\n.BR proc_pid_smaps (5)\n";

/// The page of a command whose page is called `name`.
pub(super) fn command(command: &clap::Command, name: &str) -> String {
    let man = Man::new(command.clone())
        .title(name)
        .section("1")
        .manual(MANUAL)
        .source(format!("elfremap {}", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    // Writing into memory does not fail.
    let _ = man.render_title(&mut page);
    let about = command.get_about().map(ToString::to_string).unwrap_or_default();
    let mut text = format!("{LAYOUT}.SH NAME\n{} \\- {}\n", escape(name), escape(&about));
    let mut rendered = Vec::new();
    let _ = man.render_synopsis_section(&mut rendered);
    let _ = man.render_description_section(&mut rendered);
    let _ = man.render_options_section(&mut rendered);
    if command.get_subcommands().any(|sub| !sub.is_hide_set()) {
        let _ = man.render_subcommands_section(&mut rendered);
    }
    text += &String::from_utf8_lossy(&rendered);
    if let Some(help) = command.get_after_help() {
        after_help(&mut text, &help.to_string());
    } else {
        text += ".SH \"EXIT STATUS\"\n";
        text += &markdown::to_roff(markdown::without_title(EXIT_CODES));
    }
    text += SEE_ALSO;
    String::from_utf8_lossy(&page).into_owned() + &text
}

/// The paragraphs behind the options: examples and exit status in sections of their own.
fn after_help(text: &mut String, help: &str) {
    let mut in_notes = false;
    for paragraph in help.split("\n\n") {
        if let Some(examples) = paragraph.strip_prefix("Examples:\n") {
            *text += ".SH EXAMPLES\n.nf\n";
            for line in examples.lines() {
                *text += &start_of_line(&escape(line.strip_prefix("  ").unwrap_or(line)));
                *text += "\n";
            }
            *text += ".fi\n";
            in_notes = false;
        } else if let Some(status) = paragraph.strip_prefix("Exit status:") {
            let _ = write!(text, ".SH \"EXIT STATUS\"\n{}\n", prose(status.trim_start()));
            in_notes = false;
        } else {
            *text += if in_notes { ".PP\n" } else { ".SH NOTES\n" };
            *text += &prose(paragraph);
            *text += "\n";
            in_notes = true;
        }
    }
}

/// elfremap(7): the preload library.
pub(super) fn library() -> String {
    let mut text = format!(
        ".TH elfremap 7 \"\" \"elfremap {}\" \"{MANUAL}\"\n{LAYOUT}\
         .SH NAME\nelfremap, libelfremap.so \\- a program's text, data and bss on huge pages\n\
         .SH SYNOPSIS\n.BI LD_PRELOAD=libelfremap.so \" program\"\n.RI [ argument \"] ...\"\n\
         .SH DESCRIPTION\n{}\n",
        env!("CARGO_PKG_VERSION"),
        prose(
            "Preloaded by the dynamic loader (see ld.so(8)), libelfremap.so moves the main \
             program's text, data and bss onto huge pages before its main function runs, so that \
             the processor finds them through fewer TLB entries. A range is moved as a whole or \
             stays as it was; no byte gains an access right unless ELFREMAP_MERGE asks for it; \
             when huge pages are short the program runs on small ones. What has been moved is \
             seen in /proc/PID/smaps and by elfremap status PID. elfremap-check says beforehand \
             whether a program is suitable and how many huge pages it needs, elfremap reserve \
             provides them, and elfremap run starts a program with everything set."
        )
    );
    text += ".SH ENVIRONMENT\n";
    text += &markdown::to_roff(markdown::without_title(ENVIRONMENT));
    text += ".SH \"EXIT STATUS\"\n";
    text += &prose(
        "The program's own. With ELFREMAP_ON_FAILURE=abort a program that could not be moved ends \
         with SIGABRT before its main function.",
    );
    text += "\n.SH LIMITATIONS\n";
    text += &markdown::to_roff(markdown::without_title(LIMITATIONS));
    text + SEE_ALSO
}

/// Running text: one line for each line, none of which begins with a request.
pub(super) fn prose(text: &str) -> String {
    let lines: Vec<_> = text.lines().map(|line| start_of_line(&escape(line.trim()))).collect();
    lines.join("\n")
}

/// Characters that are not what they look like in man(7).
pub(super) fn escape(text: &str) -> String {
    let mut escaped = String::new();
    for c in text.chars() {
        match c {
            '\\' => escaped += "\\e",
            '-' => escaped += "\\-",
            '\'' => escaped += "\\(aq",
            '`' => escaped += "\\(ga",
            '^' => escaped += "\\(ha",
            '~' => escaped += "\\(ti",
            '"' => escaped += "\\(dq",
            _ => escaped.push(c),
        }
    }
    escaped
}

/// A line that begins with a full stop would be a request.
pub(super) fn start_of_line(line: &str) -> String {
    if line.starts_with('.') { format!("\\&{line}") } else { String::from(line) }
}
