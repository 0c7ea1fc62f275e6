//! `/proc/meminfo` (proc_meminfo(5)) and each node's own `meminfo`, whose lines begin
//! with `Node 0 `.

use super::number;
use super::size::PageSize;

/// The default huge page size (`Hugepagesize`), used by `MAP_HUGETLB` without size bits;
/// `None` when the kernel has no hugetlb support.
#[must_use]
pub fn default_size(text: &[u8]) -> Option<PageSize> {
    bytes(text, "Hugepagesize").and_then(PageSize::new)
}

/// The amount in the line of that name, in bytes; `None` when there is no such line or
/// its amount is not in kB.
#[must_use]
pub fn bytes(text: &[u8], name: &str) -> Option<u64> {
    text.split(|&b| b == b'\n').find_map(|line| {
        let amount = without_node(line).strip_prefix(name.as_bytes())?.strip_prefix(b":")?;
        number(amount.strip_suffix(b" kB")?.trim_ascii())?.checked_mul(1024)
    })
}

fn without_node(line: &[u8]) -> &[u8] {
    let Some(rest) = line.strip_prefix(b"Node ") else { return line };
    let digits = rest.iter().take_while(|b| b.is_ascii_digit()).count();
    rest[digits..].trim_ascii_start()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn global_and_per_node_lines() {
        let text = b"MemTotal:       24683644 kB\nHugePages_Total:       8\n\
                     Hugepagesize:       2048 kB\nHugetlb:         16384 kB\n";
        assert_eq!(default_size(text), Some(PageSize::SIZE_2M));
        assert_eq!(bytes(text, "Hugetlb"), Some(16 << 20));
        assert_eq!(bytes(text, "HugePages_Total"), None);
        assert_eq!(bytes(text, "Mem"), None);
        let text = b"Node 12 MemTotal:       1024 kB\nNode 12 MemFree: 512 kB\n";
        assert_eq!(bytes(text, "MemFree"), Some(512 << 10));
        assert_eq!(default_size(b"Hugepagesize: 0 kB\n"), None);
    }

    #[test]
    fn the_kernels_own_file() {
        let text = std::fs::read("/proc/meminfo").unwrap();
        assert!(bytes(&text, "MemTotal").unwrap() > 1 << 20);
    }

    proptest! {
        #[test]
        fn never_panics(text in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = default_size(&text);
        }

        #[test]
        fn never_panics_on_nearly_right_lines(
            text in "(Node )?[0-9]{0,3} ?Hugepagesize:? {0,3}[0-9]{0,21}( kB)?\n?"
        ) {
            let _ = default_size(text.as_bytes());
        }
    }
}
