//! From symbols as the tables hold them to a list of named pieces of code: sorted, without
//! overlaps, one name per address. Pure.

use std::cmp::Ordering;

use elfremap::range::Range;

/// How widely a symbol is known. Ordered by preference, least first.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Binding {
    /// Made up here, for an entry of a procedure linkage table.
    Plt,
    /// `STB_LOCAL`.
    Local,
    /// `STB_WEAK`.
    Weak,
    /// `STB_GLOBAL`, `STB_GNU_UNIQUE`.
    Global,
}

/// Where a name is: a string in one of the tables of [`Names`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NameRef {
    /// Number of the table.
    pub table: u32,
    /// Offset of the first byte.
    pub offset: u32,
    /// Length in bytes.
    pub length: u32,
}

/// The string tables that names point into.
#[derive(Debug, Default)]
pub struct Names {
    tables: Vec<Vec<u8>>,
}

impl Names {
    /// The number that the next table gets.
    #[must_use]
    pub fn next(&self) -> u32 {
        u32::try_from(self.tables.len()).expect("a handful of string tables")
    }

    /// Takes a string table over; returns its number.
    pub fn add(&mut self, table: Vec<u8>) -> u32 {
        let number = self.next();
        self.tables.push(table);
        number
    }

    /// The bytes of a name; empty when it points nowhere.
    #[must_use]
    pub fn get(&self, name: NameRef) -> &[u8] {
        let table = self.tables.get(name.table as usize).map(Vec::as_slice).unwrap_or_default();
        let start = name.offset as usize;
        table.get(start..start + name.length as usize).unwrap_or_default()
    }
}

/// A symbol of code, in the file's own addresses.
#[derive(Clone, Copy, Debug)]
pub struct Symbol {
    /// First address.
    pub start: u64,
    /// Size in bytes; 0 when the table does not say.
    pub size: u64,
    /// Binding.
    pub binding: Binding,
    /// Name.
    pub name: NameRef,
}

/// A stretch of code with its name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Addresses; never empty.
    pub range: Range,
    /// Name.
    pub name: NameRef,
    /// Whether it is an entry of a procedure linkage table.
    pub plt: bool,
}

/// Whether `a` names an address better than `b`: the wider binding (global, weak, local, PLT
/// entry), then the longer name, then the one that sorts first.
#[must_use]
pub fn better(a: &Symbol, b: &Symbol, names: &Names) -> bool {
    let by_name = || names.get(b.name).cmp(names.get(a.name));
    let order = a.binding.cmp(&b.binding).then(a.name.length.cmp(&b.name.length));
    order.then_with(by_name) == Ordering::Greater
}

/// The pieces that `symbols` name. `regions` are the stretches that hold code, sorted;
/// symbols that start elsewhere are dropped.
///
/// - Of several symbols at one address the one that is [`better`] gives the name, and the
///   largest size counts.
/// - A symbol without size ends at the next symbol, at the end of the sized symbol it lies
///   in, or at the region's end, whichever comes first. No symbol goes beyond its region.
/// - Where a symbol begins inside another, it interrupts that one: the outer name is used
///   again after the inner one's end.
#[must_use]
pub fn pieces(mut symbols: Vec<Symbol>, regions: &[Range], names: &Names) -> Vec<Piece> {
    symbols.sort_unstable_by_key(|s| s.start);
    symbols.dedup_by(|later, kept| {
        if later.start != kept.start {
            return false;
        }
        let size = later.size.max(kept.size);
        if better(later, kept, names) {
            *kept = *later;
        }
        kept.size = size;
        true
    });

    let mut out = Vec::with_capacity(symbols.len());
    let mut regions = regions.iter().copied().peekable();
    let mut open = Open::default();
    for (index, symbol) in symbols.iter().enumerate() {
        while regions.next_if(|r| r.end() <= symbol.start).is_some() {}
        let Some(&region) = regions.peek() else { break };
        if !region.contains(symbol.start) {
            continue;
        }
        open.emit_until(symbol.start, &mut out);
        let end = match symbol.size {
            0 => {
                let next = symbols.get(index + 1).map_or(u64::MAX, |s| s.start);
                next.min(open.end().unwrap_or(u64::MAX))
            }
            size => symbol.start.saturating_add(size),
        };
        open.begin(symbol, end.min(region.end()));
    }
    open.emit_until(u64::MAX, &mut out);
    out
}

/// The symbols that have begun and not ended yet, the innermost last.
#[derive(Default)]
struct Open<'a> {
    stack: Vec<(u64, &'a Symbol)>,
    position: u64,
}

impl<'a> Open<'a> {
    /// Where the innermost open symbol ends.
    fn end(&self) -> Option<u64> {
        self.stack.last().map(|&(end, _)| end)
    }

    fn begin(&mut self, symbol: &'a Symbol, end: u64) {
        self.position = symbol.start;
        self.stack.push((end, symbol));
    }

    /// Writes pieces up to `limit` and closes the symbols that end by then.
    fn emit_until(&mut self, limit: u64, out: &mut Vec<Piece>) {
        while let Some(&(end, symbol)) = self.stack.last() {
            if let Some(range) = Range::new(self.position, end.min(limit))
                && !range.is_empty()
            {
                let plt = symbol.binding == Binding::Plt;
                out.push(Piece { range, name: symbol.name, plt });
                self.position = range.end();
            }
            if end > limit {
                return;
            }
            self.stack.pop();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Builds symbols from (start, size, binding, name).
    fn symbols(list: &[(u64, u64, Binding, &str)]) -> (Vec<Symbol>, Names) {
        let mut table = Vec::new();
        let mut symbols = Vec::new();
        for &(start, size, binding, name) in list {
            let offset = u32::try_from(table.len()).unwrap();
            table.extend_from_slice(name.as_bytes());
            let length = u32::try_from(name.len()).unwrap();
            symbols.push(Symbol {
                start,
                size,
                binding,
                name: NameRef { table: 0, offset, length },
            });
        }
        let mut names = Names::default();
        names.add(table);
        (symbols, names)
    }

    fn laid_out(list: &[(u64, u64, Binding, &str)], regions: &[(u64, u64)]) -> Vec<String> {
        let (symbols, names) = symbols(list);
        let regions: Vec<_> = regions.iter().map(|&(a, b)| Range::new(a, b).unwrap()).collect();
        pieces(symbols, &regions, &names)
            .iter()
            .map(|p| {
                let name = String::from_utf8_lossy(names.get(p.name));
                format!("{}-{} {name}", p.range.start(), p.range.end())
            })
            .collect()
    }

    use Binding::{Global, Local, Plt, Weak};

    #[test]
    fn one_name_per_address_by_binding_then_length_then_order() {
        let all = [
            (10, 4, Local, "a_long_local_name"),
            (10, 4, Weak, "weak_name"),
            (10, 4, Global, "bb"),
            (10, 4, Global, "aa"),
            (10, 4, Plt, "the_longest_of_all_names_here"),
        ];
        for count in 1..=all.len() {
            let best = ["a_long_local_name", "weak_name", "bb", "aa", "aa"][count - 1];
            assert_eq!(laid_out(&all[..count], &[(0, 100)]), [format!("10-14 {best}")]);
        }
        let names = [(1, 1, Global, "ab"), (1, 1, Global, "abc"), (1, 9, Local, "x")];
        assert_eq!(laid_out(&names, &[(0, 100)]), ["1-10 abc"]);
    }

    #[test]
    fn symbols_without_size_run_to_the_next_or_the_end() {
        let labels = [(10, 0, Local, "one"), (12, 0, Local, "two"), (20, 0, Local, "last")];
        assert_eq!(laid_out(&labels, &[(0, 32)]), ["10-12 one", "12-20 two", "20-32 last"]);
        // The next symbol lies in another section.
        assert_eq!(
            laid_out(&labels, &[(0, 16), (18, 32)]),
            ["10-12 one", "12-16 two", "20-32 last"]
        );
    }

    #[test]
    fn inner_symbols_interrupt_outer_ones() {
        let nested = [(0, 100, Global, "outer"), (40, 10, Local, "inner")];
        assert_eq!(laid_out(&nested, &[(0, 200)]), ["0-40 outer", "40-50 inner", "50-100 outer"]);
        let label = [(0, 100, Global, "outer"), (40, 0, Local, "label"), (150, 1, Global, "next")];
        assert_eq!(laid_out(&label, &[(0, 200)]), ["0-40 outer", "40-100 label", "150-151 next"]);
        let crossing = [(0, 10, Global, "first"), (5, 10, Global, "second")];
        assert_eq!(laid_out(&crossing, &[(0, 200)]), ["0-5 first", "5-15 second"]);
    }

    #[test]
    fn nothing_outside_the_regions() {
        let all = [
            (5, 10, Global, "before"),
            (15, 100, Global, "too_long"),
            (25, 1, Global, "between"),
            (35, u64::MAX, Global, "huge"),
            (50, 1, Global, "after"),
        ];
        assert_eq!(laid_out(&all, &[(10, 20), (30, 40)]), ["15-20 too_long", "35-40 huge"]);
    }

    proptest! {
        /// Every byte of a region that a sized symbol covers has a name; the pieces are
        /// sorted, do not overlap, and every start that a symbol has begins a piece.
        #[test]
        fn sorted_complete_and_without_overlaps(
            list in proptest::collection::vec((0u64..90, 0u64..30), 0..20)
        ) {
            let list: Vec<_> = list.into_iter().map(|(a, n)| (a, n, Local, "name")).collect();
            let (symbols, names) = symbols(&list);
            let regions = [Range::new(8, 40).unwrap(), Range::new(50, 80).unwrap()];
            let pieces = pieces(symbols, &regions, &names);
            for pair in pieces.windows(2) {
                prop_assert!(pair[0].range.end() <= pair[1].range.start());
            }
            let inside = |x| regions.iter().find(|r| r.contains(x));
            for &(start, size, ..) in &list {
                let Some(region) = inside(start) else { continue };
                prop_assert!(pieces.iter().any(|p| p.range.start() == start));
                for x in start..(start + size).min(region.end()) {
                    prop_assert!(pieces.iter().any(|p| p.range.contains(x)), "{x}");
                }
            }
            for piece in &pieces {
                prop_assert!(!piece.range.is_empty());
                prop_assert!(regions.iter().any(|r| r.covers(piece.range)));
            }
        }
    }
}
