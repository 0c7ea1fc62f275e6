//! The preload's options: an environment of any strings, separated by NUL bytes.
#![no_main]
#![allow(dead_code)]

extern crate elfremap as core_lib;

use libfuzzer_sys::fuzz_target;
use options::{Bad, Options};
use std::ffi::{CString, c_char};

/// What the option parser needs of the preload's logger.
mod logger {
    #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
    pub(crate) enum Level {
        Off,
        Error,
        Warn,
        Info,
        Debug,
    }

    pub(crate) fn start(_: Level, _: Option<&[u8]>) {}
}

// The preload is no library that Rust can link with.
#[path = "../../remap-preload/src/options.rs"]
mod options;

fuzz_target!(|bytes: &[u8]| {
    let entries: Vec<CString> = bytes
        .split(|&b| b == 0)
        .filter_map(|entry| CString::new(entry).ok())
        .collect();
    let mut pointers: Vec<*const c_char> = entries.iter().map(|entry| entry.as_ptr()).collect();
    pointers.push(std::ptr::null());
    // SAFETY: a null-terminated array of C strings; the options do not outlive them.
    let options = unsafe { Options::from_environment(pointers.as_ptr()) };
    if let Some((name, value, accepted)) = options.bad {
        assert!(name.starts_with(b"ELFREMAP") && !value.is_empty() && !accepted.is_empty());
        let named = [name, b"=", value].concat();
        assert!(entries.iter().any(|entry| entry.as_bytes() == named));
    }
    let line = Bad(options.bad).to_string();
    assert!(line.is_ascii() && !line.contains('\n'));
    assert!(options.policy.page_size.is_none_or(u64::is_power_of_two));
    if !entries.iter().any(|entry| entry.as_bytes().starts_with(b"ELFREMAP")) {
        assert!(options.on && options.bad.is_none());
    }
});
