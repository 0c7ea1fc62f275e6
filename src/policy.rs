//! What the user asked for: the options of the preload and of the tools, and how
//! they are written.

use core::fmt;
use core::str::FromStr;

use crate::class::{Class, Classes};

/// Which protections may share a huge page.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub enum Merge {
    /// Only one protection. No byte gains a right.
    #[default]
    None,
    /// Read-only data may join text and become executable, as in a program
    /// linked with `-z noseparate-code`.
    Rx,
    /// As `Rx`; relro may also join data and become writable.
    Relro,
    /// Everything may join; pages become writable and executable.
    Rwx,
}

/// How a range is brought onto its huge pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Strategy {
    /// Swap where the kernel can, else move.
    #[default]
    Auto,
    /// Fill huge pages elsewhere, then drop them onto the range by one `mremap`.
    Swap,
    /// Take the old pages away, map huge pages in their place, copy back.
    Move,
}

/// Where huge pages come from.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Backend {
    /// The pool for ranges that are only read; transparent huge pages for writable
    /// ones, and for the others when the pool is short.
    #[default]
    Auto,
    /// The huge page pool only.
    Hugetlb,
    /// Transparent huge pages only, even where the machine's THP mode is `never`.
    Thp,
}

/// The backend of each class. Relro goes with data.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Backends {
    /// For text.
    pub text: Backend,
    /// For read-only data.
    pub rodata: Backend,
    /// For data and relro.
    pub data: Backend,
    /// For bss.
    pub bss: Backend,
    /// Whether bss was named by itself (`bss:thp`): then it moves whatever its size.
    pub any_bss: bool,
}

impl Backends {
    /// The same backend for every class.
    #[must_use]
    pub const fn all(backend: Backend) -> Self {
        Self { text: backend, rodata: backend, data: backend, bss: backend, any_bss: false }
    }

    /// Whether a class has this backend.
    #[must_use]
    pub fn any_is(&self, backend: Backend) -> bool {
        [self.text, self.rodata, self.data, self.bss].contains(&backend)
    }

    /// The backend of `class`.
    #[must_use]
    pub const fn of(&self, class: Class) -> Backend {
        match class {
            Class::Text => self.text,
            Class::Rodata => self.rodata,
            Class::Relro | Class::Data => self.data,
            Class::Bss | Class::Heap => self.bss,
        }
    }
}

/// Which classes of the program move.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Segments {
    /// The classes. Relro goes with data.
    pub classes: Classes,
    /// Whether the block with the ELF header moves as well. Symbolizers that look
    /// up the program's path in `/proc/<pid>/maps` then no longer find it.
    pub header: bool,
}

impl Default for Segments {
    fn default() -> Self {
        Self {
            classes: Classes::EMPTY
                .with(Class::Text)
                .with(Class::Relro)
                .with(Class::Data)
                .with(Class::Bss),
            header: false,
        }
    }
}

/// On which NUMA nodes the huge pages are taken.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Numa {
    /// Where the program's own memory policy and cpuset say.
    #[default]
    Inherit,
    /// On the node of the processor that the start runs on; another when it has none.
    Local,
    /// On this node and no other. At most [`Numa::MAX_NODE`].
    Node(u32),
    /// On all nodes that the cpuset allows, in turn.
    Interleave,
}

impl Numa {
    /// The largest node number that the kernel can be built for (`CONFIG_NODES_SHIFT`
    /// is at most 10).
    pub const MAX_NODE: u32 = 1023;
}

/// What to do when something could not be moved.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum OnFailure {
    /// Run the program all the same.
    #[default]
    Continue,
    /// End the program with SIGABRT before its `main`.
    Abort,
}

/// Everything that decides what is planned and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Policy {
    /// Classes to move.
    pub segments: Segments,
    /// Source of the huge pages.
    pub backends: Backends,
    /// Wanted huge page size in bytes, a power of two; `None`: 2 MiB where the
    /// machine offers it, else its default size.
    pub page_size: Option<u64>,
    /// What may share a block.
    pub merge: Merge,
    /// How to commit.
    pub strategy: Strategy,
    /// Where the pages are taken.
    pub numa: Numa,
    /// What a shortage leads to.
    pub on_failure: OnFailure,
    /// Whether writable ranges keep away from the pool though it was asked for: their
    /// backend is then as with `auto`.
    pub writable_off_pool: bool,
}

/// A value that is not accepted; prints the accepted ones.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("accepted: {accepted}")]
pub struct BadValue {
    /// The accepted values, for the user.
    pub accepted: &'static str,
}

/// Generates `FromStr` and `Display` from one table of names.
macro_rules! named {
    ($type:ty, $accepted:literal, $($variant:path => $name:literal),+) => {
        impl FromStr for $type {
            type Err = BadValue;
            fn from_str(text: &str) -> Result<Self, BadValue> {
                match text {
                    $($name => Ok($variant),)+
                    _ => Err(BadValue { accepted: $accepted }),
                }
            }
        }

        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self { $($variant => $name,)+ })
            }
        }
    };
}

named!(Merge, "none, rx, relro, rwx",
    Merge::None => "none", Merge::Rx => "rx", Merge::Relro => "relro", Merge::Rwx => "rwx");
named!(Strategy, "auto, swap, move",
    Strategy::Auto => "auto", Strategy::Swap => "swap", Strategy::Move => "move");
named!(Backend, "auto, hugetlb, thp",
    Backend::Auto => "auto", Backend::Hugetlb => "hugetlb", Backend::Thp => "thp");
named!(OnFailure, "continue, abort",
    OnFailure::Continue => "continue", OnFailure::Abort => "abort");

impl FromStr for Numa {
    type Err = BadValue;

    fn from_str(text: &str) -> Result<Self, BadValue> {
        match text {
            "inherit" => Ok(Self::Inherit),
            "local" => Ok(Self::Local),
            "interleave" => Ok(Self::Interleave),
            _ => crate::hugepage::number(text.as_bytes())
                .and_then(|node| u32::try_from(node).ok())
                .filter(|&node| node <= Self::MAX_NODE)
                .map(Self::Node)
                .ok_or(BadValue { accepted: "inherit, local, interleave, or a node's number" }),
        }
    }
}

impl fmt::Display for Numa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inherit => f.write_str("inherit"),
            Self::Local => f.write_str("local"),
            Self::Interleave => f.write_str("interleave"),
            Self::Node(node) => write!(f, "{node}"),
        }
    }
}

impl FromStr for Segments {
    type Err = BadValue;

    /// A comma-separated list, such as `text,data,bss`.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        let mut segments = Self { classes: Classes::EMPTY, header: false };
        for name in text.split(',') {
            let classes = &mut segments.classes;
            match name.trim() {
                "text" => *classes = classes.with(Class::Text),
                "rodata" => *classes = classes.with(Class::Rodata),
                "data" => *classes = classes.with(Class::Relro).with(Class::Data),
                "bss" => *classes = classes.with(Class::Bss),
                "header" => segments.header = true,
                _ => {
                    return Err(BadValue { accepted: "a list of text, rodata, data, bss, header" });
                }
            }
        }
        Ok(segments)
    }
}

impl FromStr for Backends {
    type Err = BadValue;

    /// One backend for all classes, or a list such as `text:hugetlb,data:thp`, in
    /// which classes that are not named stay `auto`.
    fn from_str(text: &str) -> Result<Self, BadValue> {
        const BAD: BadValue =
            BadValue { accepted: "auto, hugetlb, thp, or a list such as text:hugetlb,data:thp" };
        if let Ok(backend) = text.parse() {
            return Ok(Self::all(backend));
        }
        let mut backends = Self::default();
        for item in text.split(',') {
            let (class, backend) = item.split_once(':').ok_or(BAD)?;
            let slot = match class.trim() {
                "text" => &mut backends.text,
                "rodata" => &mut backends.rodata,
                "data" => &mut backends.data,
                "bss" => &mut backends.bss,
                _ => return Err(BAD),
            };
            *slot = backend.trim().parse().map_err(|_| BAD)?;
            backends.any_bss |= class.trim() == "bss";
        }
        Ok(backends)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_printed() {
        for merge in [Merge::None, Merge::Rx, Merge::Relro, Merge::Rwx] {
            assert_eq!(merge.to_string().parse(), Ok(merge));
        }
        assert_eq!("RX".parse::<Merge>().unwrap_err().accepted, "none, rx, relro, rwx");
        assert_eq!("move".parse(), Ok(Strategy::Move));
        assert_eq!("abort".parse(), Ok(OnFailure::Abort));
        for numa in [Numa::Inherit, Numa::Local, Numa::Interleave, Numa::Node(1023)] {
            assert_eq!(numa.to_string().parse(), Ok(numa));
        }
        assert!(["", "-1", "1024", "0-1", "all"].iter().all(|text| text.parse::<Numa>().is_err()));
    }

    #[test]
    fn lists() {
        let segments: Segments = "text, bss".parse().unwrap();
        assert!(segments.classes.has(Class::Text) && segments.classes.has(Class::Bss));
        assert!(!segments.classes.has(Class::Data) && !segments.header);
        assert!("".parse::<Segments>().is_err() && "text,".parse::<Segments>().is_err());
        let backends: Backends = "text:hugetlb,data:thp".parse().unwrap();
        assert_eq!((backends.text, backends.data), (Backend::Hugetlb, Backend::Thp));
        assert!(backends.bss == Backend::Auto && !backends.any_bss);
        assert!("bss:thp".parse::<Backends>().unwrap().any_bss);
        assert!(!"thp".parse::<Backends>().unwrap().any_bss);
        assert!("text:".parse::<Backends>().is_err() && "heap:thp".parse::<Backends>().is_err());
    }
}
