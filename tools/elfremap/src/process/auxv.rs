//! `/proc/<pid>/auxv`: what the kernel told the program at its start.

/// `AT_ENTRY` of elf.h: address of the program's entry point, load bias applied.
const AT_ENTRY: u64 = 9;

/// The address of the program's entry point.
pub(super) fn entry(auxv: &[u8]) -> Option<u64> {
    let words = auxv.chunks_exact(16).filter_map(|pair| {
        let (key, value) = pair.split_first_chunk::<8>()?;
        let value: [u8; 8] = value.try_into().ok()?;
        Some((u64::from_ne_bytes(*key), u64::from_ne_bytes(value)))
    });
    words.into_iter().find(|(key, _)| *key == AT_ENTRY).map(|(_, value)| value)
}
