//! Classes of a program's bytes.

/// What a byte of a program is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub enum Class {
    /// Executable code.
    Text,
    /// Data that was never writable.
    Rodata,
    /// Data that was made read-only after relocation.
    Relro,
    /// Writable, from the file.
    Data,
    /// Writable, beyond the file's content.
    Bss,
    /// The part of the brk heap inside a block of the program.
    Heap,
}

impl Class {
    /// Every class.
    pub const ALL: [Self; 6] =
        [Self::Text, Self::Rodata, Self::Relro, Self::Data, Self::Bss, Self::Heap];

    /// The field's name for it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Rodata => "rodata",
            Self::Relro => "relro",
            Self::Data => "data",
            Self::Bss => "bss",
            Self::Heap => "heap",
        }
    }
}

/// A set of classes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Classes(u8);

impl Classes {
    /// No class.
    pub const EMPTY: Self = Self(0);

    /// The set with `class` in it.
    #[must_use]
    pub const fn with(self, class: Class) -> Self {
        Self(self.0 | 1 << class as u8)
    }

    /// Whether `class` is in the set.
    #[must_use]
    pub const fn has(self, class: Class) -> bool {
        self.0 & 1 << class as u8 != 0
    }
}

/// An amount of bytes for each class.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClassBytes([u64; 6]);

impl ClassBytes {
    /// Nothing of any class.
    pub const EMPTY: Self = Self([0; 6]);

    /// The bytes of `class`.
    #[must_use]
    pub const fn get(&self, class: Class) -> u64 {
        self.0[class as usize]
    }

    /// Adds `bytes` to `class`.
    pub fn add(&mut self, class: Class, bytes: u64) {
        let slot = &mut self.0[class as usize];
        *slot = slot.saturating_add(bytes);
    }

    /// Adds every amount of `other`.
    pub fn add_all(&mut self, other: &Self) {
        for class in Class::ALL {
            self.add(class, other.get(class));
        }
    }

    /// The bytes of all classes together.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.0.iter().fold(0, |sum, &n| u64::saturating_add(sum, n))
    }
}
