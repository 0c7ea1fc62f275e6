//! `/proc/<pid>/maps`, as described in proc_pid_maps(5).

use crate::prot::Prot;
use crate::range::Range;

/// One mapping (VMA) of a process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mapping<'a> {
    /// Addresses.
    pub range: Range,
    /// Access rights.
    pub prot: Prot,
    /// `MAP_SHARED`.
    pub shared: bool,
    /// Offset into the file, in bytes.
    pub offset: u64,
    /// Device of the file, major and minor number.
    pub device: (u32, u32),
    /// Inode of the file; 0 when the mapping is anonymous.
    pub inode: u64,
    /// Name as the kernel prints it (newlines as `\012`, " (deleted)" appended to
    /// removed files); empty when there is none. Not always a path.
    pub name: &'a [u8],
}

impl Mapping<'_> {
    /// Whether no file is behind it. Hugetlb mappings have a file of their own.
    #[must_use]
    pub const fn is_anonymous(&self) -> bool {
        self.inode == 0
    }
}

/// A line that is not what proc_pid_maps(5) describes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("cannot read line {line} of the maps file")]
pub struct ParseError {
    /// Number of the line, from 1.
    pub line: usize,
}

/// The mappings in `text`, in the file's order. An error is the last item.
pub fn parse(text: &[u8]) -> impl Iterator<Item = Result<Mapping<'_>, ParseError>> {
    let mut failed = false;
    lines(text).enumerate().map_while(move |(index, line)| {
        if failed {
            return None;
        }
        let mapping = parse_line(line).ok_or(ParseError { line: index + 1 });
        failed = mapping.is_err();
        Some(mapping)
    })
}

/// The lines of `text` without their line ends; no empty line after the last one.
pub(crate) fn lines(text: &[u8]) -> impl Iterator<Item = &[u8]> {
    text.strip_suffix(b"\n")
        .unwrap_or(text)
        .split(|&b| b == b'\n')
        .filter(move |_| !text.is_empty())
}

/// A line such as `7f0000000000-7f0000001000 r-xp 00000000 fe:01 42   /bin/true`.
pub(crate) fn parse_line(line: &[u8]) -> Option<Mapping<'_>> {
    let (start, rest) = hex_until(line, b'-')?;
    let (end, rest) = hex_until(rest, b' ')?;
    let (flags, rest) = rest.split_at_checked(4)?;
    let rest = rest.strip_prefix(b" ")?;
    let (offset, rest) = hex_until(rest, b' ')?;
    let (major, rest) = hex_until(rest, b':')?;
    let (minor, rest) = hex_until(rest, b' ')?;
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    let (inode, rest) = rest.split_at(digits);
    let inode = core::str::from_utf8(inode).ok()?.parse().ok()?;
    // The kernel pads with spaces up to a fixed column, so a name that itself
    // begins with spaces cannot be told from padding; it prints none such.
    let blanks = rest.iter().take_while(|&&b| b == b' ').count();
    if blanks == 0 && !rest.is_empty() {
        return None;
    }
    Some(Mapping {
        range: Range::new(start, end)?,
        prot: prot(flags)?,
        shared: match flags[3] {
            b's' => true,
            b'p' => false,
            _ => return None,
        },
        offset,
        device: (u32::try_from(major).ok()?, u32::try_from(minor).ok()?),
        inode,
        name: &rest[blanks..],
    })
}

fn prot(flags: &[u8]) -> Option<Prot> {
    let mut prot = Prot::NONE;
    for (flag, letter, right) in
        [(flags[0], b'r', Prot::READ), (flags[1], b'w', Prot::WRITE), (flags[2], b'x', Prot::EXEC)]
    {
        if flag == letter {
            prot = prot | right;
        } else if flag != b'-' {
            return None;
        }
    }
    Some(prot)
}

/// A hexadecimal number (1 to 16 digits) and what follows the byte `until` after it.
fn hex_until(text: &[u8], until: u8) -> Option<(u64, &[u8])> {
    let at = text.iter().take(17).position(|&b| b == until)?;
    let mut value = 0u64;
    for &digit in &text[..at] {
        value = value << 4 | u64::from(char::from(digit).to_digit(16)?);
    }
    if at == 0 { None } else { Some((value, &text[at + 1..])) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn reads_the_kernels_own_file() {
        let text = std::fs::read("/proc/self/maps").unwrap();
        let maps: Vec<_> = parse(&text).map(Result::unwrap).collect();
        assert_eq!(maps.len(), text.iter().filter(|&&b| b == b'\n').count());
        let here = reads_the_kernels_own_file as *const () as u64;
        let own = maps.iter().find(|m| m.range.contains(here)).unwrap();
        assert_eq!(own.prot, Prot::RX);
        assert!(maps.iter().any(|m| m.name == b"[stack]" && m.is_anonymous()));
    }

    #[test]
    fn awkward_names_and_no_name() {
        let text = b"1000-2000 rw-s 0000a000 fe:01 42                     /tmp/a b (deleted)\n\
                     ffffffffff600000-ffffffffff601000 --xp 00000000 00:00 0 \n\
                     3000-4000 r--p 00000000 00:00 0\n";
        let maps: Vec<_> = parse(text).map(Result::unwrap).collect();
        assert_eq!(maps[0].name, b"/tmp/a b (deleted)");
        assert!(maps[0].shared && maps[0].offset == 0xa000 && maps[0].device == (0xfe, 1));
        assert_eq!(maps[1].prot, Prot::EXEC);
        assert_eq!((maps[1].name, maps[2].name), (&b""[..], &b""[..]));
    }

    #[test]
    fn a_bad_line_ends_the_list_with_its_number() {
        let text = b"1000-2000 rw-p 0 0:0 0\n2000-1000 rw-p 0 0:0 0\n1000-2000 rw-p 0 0:0 0\n";
        let maps: Vec<_> = parse(text).collect();
        assert_eq!(maps.len(), 2);
        assert_eq!(maps[1], Err(ParseError { line: 2 }));
        assert_eq!(parse(b"").count(), 0);
    }

    proptest! {
        #[test]
        fn never_panics(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            parse(&text).for_each(drop);
        }

        #[test]
        fn never_panics_on_nearly_right_lines(
            text in "[0-9a-f]{1,17}-[0-9a-f]{1,17} [r-][w-][x-][ps ]? [0-9a-f]{0,8} [0-9a-f:]{0,6} [0-9]{0,21} {0,3}.{0,5}"
        ) {
            parse(text.as_bytes()).for_each(drop);
        }
    }
}
