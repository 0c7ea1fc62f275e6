//! Lists of NUMA nodes: what is accepted is printed as the kernel would, and read back.
#![no_main]

use elfremap::hugepage::NodeSet;
use elfremap::policy::Numa;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    if let Some(set) = NodeSet::parse(text) {
        let printed = set.to_string();
        let again = NodeSet::parse(printed.as_bytes());
        assert_eq!(again.as_ref(), Some(&set), "{printed}");
        assert_eq!(set.len(), set.iter().count());
        assert!(set.iter().all(|node| set.contains(node) && node <= NodeSet::MAX));
        assert_eq!(set.intersection(&set), set);
    }
    let _ = NodeSet::from_sysfs_name(text);
    if let Ok(text) = core::str::from_utf8(text)
        && let Ok(numa) = text.parse::<Numa>()
    {
        assert_eq!(numa.to_string().parse(), Ok(numa));
    }
});
