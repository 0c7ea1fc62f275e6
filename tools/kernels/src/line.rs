//! What a guest says on its console and the host reads: one line each, behind a mark,
//! so that the kernel's own lines do not matter.

use std::fmt;

/// What a guest reports.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Line {
    /// A property of the machine.
    Fact(String, String),
    /// A check of a group: its name, and the reason when it failed.
    Check {
        /// The group, a column of the table.
        group: String,
        /// What was checked.
        name: String,
        /// Why it failed.
        failure: Option<String>,
    },
    /// All checks were made.
    End,
}

const MARK: &str = "@elfremap ";
const SEPARATOR: &str = " | ";

impl fmt::Display for Line {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let one_line = |text: &str| text.replace(['\n', '\r'], " ");
        f.write_str(MARK)?;
        match self {
            Self::Fact(name, value) => write!(f, "fact{SEPARATOR}{name}{SEPARATOR}{value}"),
            Self::Check { group, name, failure: None } => {
                write!(f, "pass{SEPARATOR}{group}{SEPARATOR}{name}")
            }
            Self::Check { group, name, failure: Some(why) } => {
                write!(f, "fail{SEPARATOR}{group}{SEPARATOR}{name}{SEPARATOR}{}", one_line(why))
            }
            Self::End => write!(f, "end"),
        }
    }
}

impl Line {
    /// The report in a line of the console; `None` for other lines.
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim_end().split_once(MARK)?.1;
        let (kind, rest) = text.split_once(SEPARATOR).unwrap_or((text, ""));
        let mut fields = rest.splitn(3, SEPARATOR);
        let mut next = || fields.next().map(str::to_owned);
        Some(match kind {
            "end" => Self::End,
            "fact" => {
                let (name, value) = rest.split_once(SEPARATOR)?;
                Self::Fact(name.into(), value.into())
            }
            "pass" => Self::Check { group: next()?, name: next()?, failure: None },
            "fail" => Self::Check {
                group: next()?,
                name: next()?,
                failure: Some(next().unwrap_or_default()),
            },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_and_read_back() {
        let check = |failure: Option<&str>| Line::Check {
            group: "2M".into(),
            name: "plain: swap".into(),
            failure: failure.map(str::to_owned),
        };
        for line in [
            Line::Fact("kernel".into(), "6.1.0 | x".into()),
            check(None),
            check(Some("status 1")),
            Line::End,
        ] {
            assert_eq!(Line::parse(&format!("[    1.0] {line}\r\n")), Some(line));
        }
        assert_eq!(Line::parse("Linux version 6.1"), None);
        assert!(check(Some("a\nb")).to_string().lines().count() == 1);
    }
}
