//! `/proc/<pid>/smaps`: amounts are never more than what was written.
#![no_main]

use elfremap::proc::smaps;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let mut parsed = smaps::parse(text);
    let count = parsed.by_ref().take_while(Result::is_ok).count();
    assert!(count <= text.len());
    assert!(parsed.next().is_none());
});
