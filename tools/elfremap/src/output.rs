//! Results on stdout: written at once, a closed pipe is no error, colour only for people.

use std::env;
use std::io::{self, ErrorKind, IsTerminal, Write};

/// Writes a command's results to stdout. A reader that has gone (`| head`) is no error.
///
/// # Errors
/// Stdout cannot be written otherwise (a full disk).
pub fn print(text: &str) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => {
            Err(anyhow::Error::new(error).context("write stdout"))
        }
        _ => Ok(()),
    }
}

/// Writes a result as one JSON document with a line end.
///
/// # Errors
/// As [`print`].
pub fn print_json(value: &impl serde::Serialize) -> anyhow::Result<()> {
    print(&(serde_json::to_string_pretty(value)? + "\n"))
}

/// Text attributes for stdout; none when it is no terminal or `NO_COLOR`
/// (<https://no-color.org>) is set to anything.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Style {
    colour: bool,
}

impl Style {
    /// As stdout and the environment ask.
    #[must_use]
    pub fn for_stdout() -> Self {
        let set = |name| env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = env::var_os("TERM").is_some_and(|term| term == "dumb");
        Self { colour: io::stdout().is_terminal() && !set("NO_COLOR") && !dumb }
    }

    /// Without any attribute.
    pub const PLAIN: Self = Self { colour: false };

    /// For headings.
    #[must_use]
    pub fn bold(self, text: &str) -> String {
        self.with("1", text)
    }

    /// For good verdicts.
    #[must_use]
    pub fn green(self, text: &str) -> String {
        self.with("32", text)
    }

    /// For bad verdicts.
    #[must_use]
    pub fn red(self, text: &str) -> String {
        self.with("31", text)
    }

    /// For warnings.
    #[must_use]
    pub fn yellow(self, text: &str) -> String {
        self.with("33", text)
    }

    fn with(self, code: &str, text: &str) -> String {
        if self.colour { format!("\x1b[{code}m{text}\x1b[0m") } else { String::from(text) }
    }
}

/// An amount of memory for people: in MB (of 2^20 bytes) up to ten thousand, then in GB;
/// one decimal below ten.
#[must_use]
pub fn megabytes(bytes: u64) -> String {
    let (unit, shift) = if bytes >> 20 >= 10_000 { ("GB", 30) } else { ("MB", 20) };
    let tenths = (u128::from(bytes) * 10 + (1 << (shift - 1))) >> shift;
    if tenths == 0 || tenths >= 100 || tenths % 10 == 0 {
        format!("{} {unit}", (u128::from(bytes) + (1 << (shift - 1))) >> shift)
    } else {
        format!("{}.{} {unit}", tenths / 10, tenths % 10)
    }
}

/// The text in lines of at most `width` columns where blanks allow it, those after the first
/// set in by two; each with its line end.
#[must_use]
pub fn wrapped(text: &str, width: usize) -> String {
    let mut lines = String::new();
    let mut column = 0;
    for word in text.split_whitespace() {
        let length = word.chars().count();
        if column > 0 && column + 1 + length > width {
            lines += "\n  ";
            column = 2;
        } else if column > 0 {
            lines.push(' ');
            column += 1;
        }
        lines += word;
        column += length;
    }
    lines + "\n"
}

/// `1 page`, `2 pages`.
#[must_use]
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts() {
        for (bytes, text) in [
            (0, "0 MB"),
            (2 << 20, "2 MB"),
            ((2 << 20) + (1 << 19), "2.5 MB"),
            (82 << 20, "82 MB"),
            ((10 << 20) + (1 << 19), "11 MB"),
            (9_999 << 20, "9999 MB"),
            (10_240 << 20, "10 GB"),
            (u64::MAX, "17179869184 GB"),
        ] {
            assert_eq!(megabytes(bytes), text);
        }
        assert_eq!((counted(1, "page"), counted(0, "page")), ("1 page".into(), "0 pages".into()));
    }

    #[test]
    fn long_lines_are_wrapped_at_blanks() {
        assert_eq!(wrapped("one two three four", 9), "one two\n  three\n  four\n");
        assert_eq!(wrapped("a-long-word x", 4), "a-long-word\n  x\n");
        assert_eq!(wrapped("", 4), "\n");
    }

    #[test]
    fn no_colour_in_plain_style() {
        assert_eq!(Style::PLAIN.bold("x"), "x");
        assert_eq!(Style { colour: true }.red("x"), "\x1b[31mx\x1b[0m");
    }
}
