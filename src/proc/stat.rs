//! `/proc/<pid>/stat` (proc_pid_stat(5)).

/// Field numbers of proc_pid_stat(5).
const NUM_THREADS: usize = 20;
const START_BRK: usize = 47;

/// What the planner needs of `/proc/<pid>/stat`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Stat {
    /// Number of threads.
    pub threads: u64,
    /// Where the brk heap begins; 0 when the kernel does not tell (Linux 3.5 and
    /// later tell those who may ptrace the process).
    pub start_brk: u64,
}

/// Reads the text of `/proc/<pid>/stat`.
#[must_use]
pub fn parse(text: &[u8]) -> Option<Stat> {
    // The second field is the command's name in parentheses, which may hold anything.
    let after_name = text.iter().rposition(|&b| b == b')')? + 1;
    let mut fields = text.get(after_name..)?.split(|&b| b == b' ').filter(|f| !f.is_empty());
    let mut field = |skip: usize| {
        let text = core::str::from_utf8(fields.nth(skip)?.trim_ascii()).ok()?;
        text.parse::<u64>().ok()
    };
    let threads = field(NUM_THREADS - 3)?;
    let start_brk = field(START_BRK - NUM_THREADS - 1)?;
    Some(Stat { threads, start_brk })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn own_process() {
        let stat = parse(&std::fs::read("/proc/self/stat").unwrap()).unwrap();
        assert!(stat.threads >= 1 && stat.threads < 1000);
        assert!(stat.start_brk > 0 && stat.start_brk.is_multiple_of(4096));
    }

    #[test]
    fn names_with_parentheses() {
        let mut text = String::from("12 (a) b) 5 () S");
        (4..=52).for_each(|n| text.push_str(&format!(" {n}")));
        assert_eq!(parse(text.as_bytes()), Some(Stat { threads: 20, start_brk: 47 }));
        assert_eq!(parse(b"1 (x) S 2 3"), None);
    }

    proptest! {
        #[test]
        fn never_panics(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = parse(&text);
        }
    }
}
