//! The property note of an ELF file (`PT_GNU_PROPERTY`), as the ABI supplements define it.

/// Type of the program header that finds the note.
pub const PT_GNU_PROPERTY: u32 = 0x6474_e553;

const NT_GNU_PROPERTY_TYPE_0: u32 = 5;
/// "ELF for the Arm 64-bit Architecture": what all objects of the file support.
const GNU_PROPERTY_AARCH64_FEATURE_1_AND: u32 = 0xc000_0000;
const FEATURE_1_BTI: u32 = 1;

/// Whether the note of an arm64 file says that its code has landing pads, so that the
/// loader may map it with `PROT_BTI`.
#[must_use]
pub fn supports_bti(mut notes: &[u8]) -> bool {
    while let Some((kind, description, rest)) = next_note(notes) {
        if kind == NT_GNU_PROPERTY_TYPE_0
            && let Some(features) = property(description, GNU_PROPERTY_AARCH64_FEATURE_1_AND)
        {
            return features & FEATURE_1_BTI != 0;
        }
        notes = rest;
    }
    false
}

/// Type and description of the first note, when its name is GNU's (else type 0), and
/// what follows it.
fn next_note(notes: &[u8]) -> Option<(u32, &[u8], &[u8])> {
    let name_len = usize::try_from(word(notes, 0)?).ok()?;
    let len = usize::try_from(word(notes, 4)?).ok()?;
    let kind = word(notes, 8)?;
    let body = notes.get(12..)?;
    let name = body.get(..name_len)?;
    let start = name_len.checked_next_multiple_of(4)?;
    let description = body.get(start..start.checked_add(len)?)?;
    // In a 64-bit file's property segment everything is aligned to 8 bytes.
    let end = 12usize.checked_add(start)?.checked_add(len)?.checked_next_multiple_of(8)?;
    let rest = notes.get(end..).unwrap_or_default();
    Some((if name == b"GNU\0" { kind } else { 0 }, description, rest))
}

/// The 32-bit value of the property of that type.
fn property(mut properties: &[u8], wanted: u32) -> Option<u32> {
    loop {
        let kind = word(properties, 0)?;
        let len = usize::try_from(word(properties, 4)?).ok()?;
        let value = properties.get(8..8usize.checked_add(len)?)?;
        if kind == wanted {
            return word(value, 0);
        }
        let end = 8usize.checked_add(len)?.checked_next_multiple_of(8)?;
        properties = properties.get(end..)?;
    }
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..)?.first_chunk::<4>()?;
    Some(u32::from_ne_bytes(*bytes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn note(name: &[u8; 4], kind: u32, properties: &[(u32, &[u8])]) -> Vec<u8> {
        let mut description = Vec::new();
        for (kind, value) in properties {
            description.extend(kind.to_ne_bytes());
            description.extend(u32::try_from(value.len()).unwrap().to_ne_bytes());
            description.extend(*value);
            description.resize(description.len().next_multiple_of(8), 0);
        }
        let len = u32::try_from(description.len()).unwrap();
        let mut bytes: Vec<u8> = [4, len, kind].iter().flat_map(|n| n.to_ne_bytes()).collect();
        bytes.extend(name);
        bytes.extend(description);
        bytes
    }

    #[test]
    fn the_flag_is_found_behind_others() {
        let features = |value: u32| (GNU_PROPERTY_AARCH64_FEATURE_1_AND, value.to_ne_bytes());
        let other: (u32, &[u8]) = (1, b"12345678");
        for (value, expected) in [(3, true), (1, true), (2, false), (0, false)] {
            let (kind, bytes) = features(value);
            let found = note(b"GNU\0", 5, &[other, (kind, &bytes)]);
            assert_eq!(supports_bti(&found), expected);
            let second = [note(b"XXX\0", 5, &[(kind, &[1, 0, 0, 0])]), found].concat();
            assert_eq!(supports_bti(&second), expected);
        }
        assert!(!supports_bti(&note(b"GNU\0", 5, &[other])));
        assert!(!supports_bti(&[]));
    }

    proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..100), name in 0u8..9) {
            let _ = supports_bti(&bytes);
            let mut nearly = note(b"GNU\0", 5, &[(GNU_PROPERTY_AARCH64_FEATURE_1_AND, &bytes)]);
            nearly[0] = name;
            let _ = supports_bti(&nearly);
        }
    }
}
