//! Parsers of `/proc` text: bytes in, values out, no input or output.

pub mod maps;
pub mod smaps;
pub mod stat;
