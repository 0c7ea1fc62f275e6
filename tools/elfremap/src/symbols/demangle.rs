//! Names as people read them: C++ and Rust symbols demangled, unsafe bytes replaced.

use std::fmt::{self, Write};

/// Demangled names are cut off here: a mangled name of a few hundred bytes can stand for
/// megabytes of text.
const MAX_DEMANGLED: usize = 16 << 10;

/// Appends the name `raw` to `out`, demangled on request, with `@plt` after the name of a PLT
/// entry. Control characters become `?`, bytes that are not UTF-8 the replacement character:
/// the result has no line break, and does nothing to a terminal.
pub fn append_name(out: &mut Vec<u8>, raw: &[u8], plt: bool, demangle: bool) {
    let start = out.len();
    if !demangle || !append_demangled(out, raw) {
        out.truncate(start);
        out.extend_from_slice(raw);
    }
    make_safe(out, start);
    if plt {
        out.extend_from_slice(b"@plt");
    }
}

/// Appends the demangled name; `false` when `raw` is not a mangled name (`out` may then hold a
/// part of one).
fn append_demangled(out: &mut Vec<u8>, raw: &[u8]) -> bool {
    let (v0, cpp) = (raw.starts_with(b"_R"), raw.starts_with(b"_Z"));
    if !v0 && !cpp {
        return false;
    }
    // A symbol version is not part of the mangled name.
    let end = raw.iter().position(|&b| b == b'@').unwrap_or(raw.len());
    let (mangled, version) = raw.split_at(end);
    let Ok(mangled) = std::str::from_utf8(mangled) else { return false };
    let mut sink = Sink { out, left: MAX_DEMANGLED };
    // Rust's older names are C++ names whose last part is a hash: `17h` and 16 digits.
    let rust = (v0 || mangled.contains("17h"))
        .then(|| rustc_demangle::try_demangle(mangled).ok())
        .flatten();
    let done = if let Some(name) = rust {
        // The alternate form leaves the hash out, as nm and perf do.
        write!(sink, "{name:#}").is_ok()
    } else if let Ok(symbol) = cpp_demangle::BorrowedSymbol::new(mangled.as_bytes()) {
        let options = cpp_demangle::DemangleOptions::new();
        symbol.structured_demangle(&mut sink, &options).is_ok()
    } else {
        false
    };
    if done {
        out.extend_from_slice(version);
    }
    done
}

/// Writes up to a number of bytes.
struct Sink<'a> {
    out: &'a mut Vec<u8>,
    left: usize,
}

impl Write for Sink<'_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.left = self.left.checked_sub(text.len()).ok_or(fmt::Error)?;
        self.out.extend_from_slice(text.as_bytes());
        Ok(())
    }
}

fn make_safe(out: &mut Vec<u8>, start: usize) {
    if out[start..].iter().all(|b| (b' '..=b'~').contains(b)) {
        return;
    }
    let text = String::from_utf8_lossy(&out[start..]);
    let safe: String = text.chars().map(|c| if c.is_control() { '?' } else { c }).collect();
    out.truncate(start);
    out.extend_from_slice(safe.as_bytes());
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn name(raw: &[u8], plt: bool, demangle: bool) -> String {
        let mut out = b"kept ".to_vec();
        append_name(&mut out, raw, plt, demangle);
        String::from_utf8(out).unwrap().strip_prefix("kept ").unwrap().to_owned()
    }

    #[test]
    fn cpp_rust_and_plain_names() {
        for (raw, wanted) in [
            ("_Znwm", "operator new(unsigned long)"),
            ("_ZN5space3fooEibc", "space::foo(int, bool, char)"),
            ("_ZN4core3fmt5Write9write_fmt17h0123456789abcdefE", "core::fmt::Write::write_fmt"),
            ("_RNvC6_123foo3bar", "123foo::bar"),
            ("_ZN5space3fooEibc.cold", "space::foo(int, bool, char) [clone .cold]"),
            ("_Znwm@@VERS_1", "operator new(unsigned long)@@VERS_1"),
            ("memcpy@GLIBC_2.2.5", "memcpy@GLIBC_2.2.5"),
            ("work.part.0", "work.part.0"),
            ("_Zbroken", "_Zbroken"),
            ("_R", "_R"),
        ] {
            assert_eq!(name(raw.as_bytes(), false, true), wanted);
            assert_eq!(name(raw.as_bytes(), false, false), raw);
        }
        assert_eq!(name(b"_Znwm", true, true), "operator new(unsigned long)@plt");
        assert_eq!(name(b"puts", true, false), "puts@plt");
    }

    #[test]
    fn unsafe_bytes_are_replaced() {
        assert_eq!(name(b"a\nb\x1b[2J\x7f", false, true), "a?b?[2J?");
        assert_eq!(name(b"\xc2\x9b\xff", false, true), "?\u{fffd}");
        assert_eq!(name("grün".as_bytes(), false, true), "grün");
    }

    #[test]
    fn an_exploding_name_stays_mangled() {
        // Each S_ substitution doubles what the one before stands for.
        let mut raw = String::from("_Z1fI");
        raw.push_str(&"1AIS_S_E".repeat(2));
        assert!(name(raw.as_bytes(), false, true).len() < MAX_DEMANGLED);
        let mut big = String::from("_Z1f1AI1BS0_E");
        for level in 1..30 {
            let last =
                format!("S{}_", char::from_digit(level % 36, 36).unwrap().to_ascii_uppercase());
            write!(big, "1CI{last}{last}E").unwrap();
        }
        assert!(name(big.as_bytes(), false, true).len() < MAX_DEMANGLED);
    }

    proptest! {
        #[test]
        fn no_line_breaks_and_no_panic(raw in proptest::collection::vec(any::<u8>(), 0..60)) {
            let text = name(&raw, false, true);
            prop_assert!(!text.chars().any(char::is_control));
        }

        #[test]
        fn no_panic_on_nearly_mangled_names(raw in "_[ZR][A-Za-z0-9_]{0,60}") {
            prop_assert!(name(raw.as_bytes(), true, true).ends_with("@plt"));
        }
    }
}
