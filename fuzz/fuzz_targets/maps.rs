//! `/proc/<pid>/maps`: every line is read, or named in the error that ends the list.
#![no_main]

use elfremap::proc::maps;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|text: &[u8]| {
    let lines = text.split(|&b| b == b'\n').count();
    let mut parsed = maps::parse(text);
    let count = parsed.by_ref().take_while(Result::is_ok).count();
    assert!(count <= lines);
    assert!(parsed.next().is_none());
});
