//! The text of a perf map: one record a line, `START SIZE NAME`, the numbers in hexadecimal
//! without prefix, sorted by address (tools/perf/Documentation/jit-interface.txt in Linux).

use std::io::Write;
use std::path::PathBuf;
use std::thread;

use elfremap::range::Range;

use super::objects::Object;
use crate::symbols::demangle::append_name;
use crate::symbols::layout::{Names, Piece};
use crate::symbols::{CodeNames, Source};

/// perf (6.1, and by its source since 2009) passes over records whose name is shorter.
const SHORTEST_NAME: usize = 3;

/// A perf map in the making.
#[derive(Debug, Default)]
pub struct Map {
    /// Records that follow each other, with the first address.
    parts: Vec<(u64, Vec<u8>)>,
    /// How many records there are.
    pub records: usize,
    /// Objects with dynamic symbols alone.
    pub dynamic_only: Vec<PathBuf>,
    /// Objects without any symbol.
    pub nameless: Vec<PathBuf>,
}

impl Map {
    /// Adds the pieces of `object` that touch one of its ranges.
    pub fn add(&mut self, object: &Object, code: &CodeNames, demangle: bool) {
        let records: Vec<_> =
            code.pieces.iter().filter_map(|piece| placed(piece, object)).collect();
        match code.source {
            Source::None => self.nameless.push(object.path.clone()),
            Source::Dynamic => self.dynamic_only.push(object.path.clone()),
            Source::Own | Source::Debug(_) | Source::Mini => {}
        }
        self.records += records.len();

        // Demangling takes most of the time.
        let threads = thread::available_parallelism().map_or(1, |n| n.get().min(8));
        let chunk = records.len().div_ceil(threads).max(4096);
        thread::scope(|scope| {
            let parts: Vec<_> = records
                .chunks(chunk)
                .map(|part| {
                    let text = scope.spawn(|| text_of(part, &code.names, demangle));
                    (part[0].range.start(), text)
                })
                .collect();
            self.parts.extend(parts.into_iter().map(|(start, text)| {
                (start, text.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            }));
        });
    }

    /// Adds the records of the perf map `old` that lie in one of `ranges`, code that belongs to
    /// no file: those that a JIT compiler wrote, into the very file that is about to be
    /// replaced. Returns whether there were any.
    pub fn keep(&mut self, old: &[u8], ranges: &[Range]) -> bool {
        let before = self.parts.len();
        let lines = old.split(|&b| b == b'\n');
        self.parts.extend(lines.filter_map(|line| {
            let record = range_of(line).filter(|r| !r.is_empty())?;
            let inside = ranges.iter().any(|range| range.covers(record));
            inside.then(|| (record.start(), [line, b"\n"].concat()))
        }));
        self.parts.len() > before
    }

    /// The text, in pieces, by address. Of several kept records for one address the later one
    /// comes later, as in the file they are from.
    #[must_use]
    pub fn text(&mut self) -> Vec<&[u8]> {
        self.parts.sort_by_key(|&(start, _)| start);
        self.parts.iter().map(|(_, text)| text.as_slice()).collect()
    }

    /// Whether every object has a full symbol table.
    #[must_use]
    pub fn is_complete(&self) -> bool {
        self.dynamic_only.is_empty() && self.nameless.is_empty()
    }
}

/// The piece at its address in the process, when that touches a range of the object.
fn placed(piece: &Piece, object: &Object) -> Option<Piece> {
    let range = piece.range.rebase(piece.range.start().wrapping_add(object.bias))?;
    let first = object.ranges.partition_point(|r| r.end() <= range.start());
    object.ranges.get(first)?.overlaps(range).then_some(Piece { range, ..*piece })
}

fn text_of(records: &[Piece], names: &Names, demangle: bool) -> Vec<u8> {
    let mut text = Vec::with_capacity(records.len() * 64);
    for record in records {
        let (start, size) = (record.range.start(), record.range.len());
        write!(text, "{start:x} {size:x} ").expect("writing to memory");
        let name = text.len();
        append_name(&mut text, names.get(record.name), record.plt, demangle);
        while text.len() < name + SHORTEST_NAME {
            text.push(b' ');
        }
        text.push(b'\n');
    }
    text
}

/// The addresses of a record; `None` when the line is none.
fn range_of(line: &[u8]) -> Option<Range> {
    let hex = |text: &[u8]| u64::from_str_radix(std::str::from_utf8(text).ok()?, 16).ok();
    let mut fields = line.splitn(3, |&b| b == b' ');
    let range = Range::with_len(hex(fields.next()?)?, hex(fields.next()?)?)?;
    fields.next().map(|_| range)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_jit_compilers_records_are_kept() {
        let old = b"2010 8 js:second\n2000 10 js first\n5000 10 stale\n2ff8 9 beyond\n\
                    junk\n2020 0 empty\n2030 10\n";
        let mut map = Map::default();
        assert!(!map.keep(old, &[]));
        assert!(map.keep(old, &[Range::new(0x2000, 0x3000).unwrap()]));
        assert_eq!(map.text().concat(), b"2000 10 js first\n2010 8 js:second\n");
    }

    #[test]
    fn short_names_are_long_enough_for_perf() {
        let mut names = Names::default();
        let table = names.add(b"f".to_vec());
        let name = crate::symbols::layout::NameRef { table, offset: 0, length: 1 };
        let piece = Piece { range: Range::new(0x1000, 0x1010).unwrap(), name, plt: false };
        assert_eq!(text_of(&[piece], &names, true), b"1000 10 f  \n");
    }
}
