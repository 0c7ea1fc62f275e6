//! Lists of NUMA node numbers, as sysfs prints them and numactl(8) takes them: `0-3,5`.

use alloc::collections::BTreeSet;
use core::fmt;
use core::str::FromStr;

/// A set of NUMA nodes. Numbers may have gaps.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct NodeSet(BTreeSet<u32>);

/// A text that is no list of nodes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("not a list of nodes: write numbers and ranges such as 0 or 0-3,5")]
pub struct ParseNodesError;

impl NodeSet {
    /// The largest node number accepted. The kernel's own limit is 1023
    /// (`CONFIG_NODES_SHIFT` is at most 10); a bound keeps `0-4294967295` from
    /// filling the memory.
    pub const MAX: u32 = 4095;

    /// Whether `node` is in the set.
    #[must_use]
    pub fn contains(&self, node: u32) -> bool {
        self.0.contains(&node)
    }

    /// The nodes in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u32> + '_ {
        self.0.iter().copied()
    }

    /// How many nodes are in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether the set is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The nodes in both sets.
    #[must_use]
    pub fn intersection(&self, other: &Self) -> Self {
        self.iter().filter(|&node| other.contains(node)).collect()
    }

    /// The set in a list such as `0-3,5`; an empty text is the empty set, as sysfs
    /// prints it. `None` when it is no list or a number is above [`Self::MAX`].
    #[must_use]
    pub fn parse(text: &[u8]) -> Option<Self> {
        let text = text.trim_ascii();
        let mut set = BTreeSet::new();
        if text.is_empty() {
            return Some(Self(set));
        }
        for part in text.split(|&b| b == b',') {
            let (first, last) = match part.iter().position(|&b| b == b'-') {
                Some(dash) => (node(&part[..dash])?, node(&part[dash + 1..])?),
                None => (node(part)?, node(part)?),
            };
            if first > last {
                return None;
            }
            set.extend(first..=last);
        }
        Some(Self(set))
    }

    /// The number in a directory name such as `node12`; `None` for other names.
    #[must_use]
    pub fn from_sysfs_name(name: &[u8]) -> Option<u32> {
        node(name.strip_prefix(b"node")?)
    }
}

fn node(digits: &[u8]) -> Option<u32> {
    let digits = digits.trim_ascii();
    let number = u32::try_from(super::number(digits)?).ok()?;
    (number <= NodeSet::MAX).then_some(number)
}

impl FromIterator<u32> for NodeSet {
    fn from_iter<I: IntoIterator<Item = u32>>(nodes: I) -> Self {
        Self(nodes.into_iter().collect())
    }
}

/// Accepts what [`NodeSet::parse`] does, but not the empty set.
impl FromStr for NodeSet {
    type Err = ParseNodesError;

    fn from_str(text: &str) -> Result<Self, ParseNodesError> {
        Self::parse(text.as_bytes()).filter(|set| !set.is_empty()).ok_or(ParseNodesError)
    }
}

/// As sysfs prints it: `0-3,5`.
impl fmt::Display for NodeSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut nodes = self.iter().peekable();
        let mut comma = "";
        while let Some(first) = nodes.next() {
            let mut last = first;
            while let Some(next) = nodes.next_if(|&next| next == last + 1) {
                last = next;
            }
            write!(f, "{comma}{first}")?;
            if last > first {
                write!(f, "-{last}")?;
            }
            comma = ",";
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn lists() {
        let set: NodeSet = "0-2,5, 7-7".parse().unwrap();
        assert_eq!(set.iter().collect::<Vec<_>>(), [0, 1, 2, 5, 7]);
        assert_eq!(set.to_string(), "0-2,5,7");
        assert_eq!(NodeSet::parse(b"\n").unwrap().len(), 0);
        for text in ["", "a", "1-", "-1", "2-1", "1,,2", "0-4294967295", "4096", "1-2-3", "all"] {
            assert_eq!(text.parse::<NodeSet>(), Err(ParseNodesError), "{text}");
        }
        assert_eq!(NodeSet::from_sysfs_name(b"node5"), Some(5));
        assert_eq!(NodeSet::from_sysfs_name(b"node"), None);
        assert_eq!(NodeSet::from_sysfs_name(b"possible"), None);
    }

    proptest! {
        #[test]
        fn printed_and_read_back(nodes in proptest::collection::vec(0..=NodeSet::MAX, 1..40)) {
            let set: NodeSet = nodes.into_iter().collect();
            prop_assert_eq!(set.to_string().parse(), Ok(set));
        }

        #[test]
        fn never_panics(text in proptest::collection::vec(any::<u8>(), 0..60)) {
            let _ = NodeSet::parse(&text);
        }

        #[test]
        fn never_panics_on_nearly_right_text(text in "([0-9]{0,5}[-, ]?){0,8}") {
            let _ = NodeSet::parse(text.as_bytes());
        }
    }
}
