//! `/proc/<pid>/smaps`, as described in proc_pid_smaps(5): the proof of what
//! really lies on huge pages.

use super::maps::{self, Mapping, ParseError};
use crate::prot::Prot;

/// One mapping with the kernel's account of its pages. Amounts are in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry<'a> {
    /// The mapping. Unlike in maps, its rights tell of [`Prot::BTI`] (the flag `bt` in
    /// `VmFlags`, Linux 5.8).
    pub mapping: Mapping<'a>,
    /// `Rss`: resident pages; hugetlb pages are not in it.
    pub rss: u64,
    /// `Anonymous`: resident pages that belong to no file (copied on write ones included).
    pub anonymous: u64,
    /// `AnonHugePages`: bytes mapped by transparent huge pages.
    pub anon_huge: u64,
    /// `FilePmdMapped`: bytes of the page cache mapped by huge entries (Linux 5.4).
    pub file_pmd: u64,
    /// `ShmemPmdMapped`.
    pub shmem_pmd: u64,
    /// `Private_Hugetlb` and `Shared_Hugetlb` together (Linux 4.4).
    pub hugetlb: u64,
    /// Whether it has an attribute that somebody gave it and that a new mapping would not
    /// have: locked, not dumped, not inherited or wiped by a fork, no huge pages, a
    /// userfaultfd, memory tags (`VmFlags`), a protection key.
    pub attributes: bool,
    /// `KernelPageSize`: the page size of the mapping's kind; above the base page
    /// size for hugetlb mappings only.
    pub kernel_page_size: u64,
}

/// The entries in `text`, in the file's order. An error is the last item.
pub fn parse(text: &[u8]) -> impl Iterator<Item = Result<Entry<'_>, ParseError>> {
    let mut lines = maps::lines(text).enumerate().peekable();
    let mut failed = false;
    core::iter::from_fn(move || {
        if failed {
            return None;
        }
        let (index, line) = lines.next()?;
        let Some(mapping) = maps::parse_line(line) else {
            failed = true;
            return Some(Err(ParseError { line: index + 1 }));
        };
        let mut entry = Entry {
            mapping,
            rss: 0,
            anonymous: 0,
            anon_huge: 0,
            file_pmd: 0,
            shmem_pmd: 0,
            hugetlb: 0,
            attributes: false,
            kernel_page_size: 0,
        };
        while let Some((_, line)) = lines.next_if(|(_, line)| is_field(line)) {
            entry.take(line);
        }
        Some(Ok(entry))
    })
}

/// Field lines begin with a capital letter, mapping lines with a hexadecimal digit
/// in lower case.
fn is_field(line: &[u8]) -> bool {
    line.first().is_some_and(u8::is_ascii_uppercase)
}

impl Entry<'_> {
    /// Takes over a line such as `Rss:      12 kB`; lines of other fields are passed over.
    fn take(&mut self, line: &[u8]) {
        let Some(colon) = line.iter().position(|&b| b == b':') else {
            return;
        };
        if &line[..colon] == b"VmFlags" {
            for flag in line[colon + 1..].split(|&b| b == b' ') {
                match flag {
                    b"bt" => self.mapping.prot = self.mapping.prot | Prot::BTI,
                    b"lo" | b"dd" | b"dc" | b"wf" | b"nh" | b"um" | b"uw" | b"ui" | b"mt" => {
                        self.attributes = true
                    }
                    _ => {}
                }
            }
            return;
        }
        if &line[..colon] == b"ProtectionKey" {
            self.attributes |= line[colon + 1..].iter().any(|b| (b'1'..=b'9').contains(b));
            return;
        }
        let field = match &line[..colon] {
            b"Rss" => &mut self.rss,
            b"Anonymous" => &mut self.anonymous,
            b"AnonHugePages" => &mut self.anon_huge,
            b"FilePmdMapped" => &mut self.file_pmd,
            b"ShmemPmdMapped" => &mut self.shmem_pmd,
            b"KernelPageSize" => &mut self.kernel_page_size,
            b"Private_Hugetlb" | b"Shared_Hugetlb" => &mut self.hugetlb,
            _ => return,
        };
        let digits = line[colon + 1..].iter().skip_while(|&&b| b == b' ');
        let kilobytes = digits
            .take_while(|b| b.is_ascii_digit())
            .fold(0u64, |sum, b| sum.saturating_mul(10).saturating_add(u64::from(b - b'0')));
        *field = field.saturating_add(kilobytes.saturating_mul(1024));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_kernels_own_file() {
        let text = std::fs::read("/proc/self/smaps").unwrap();
        let entries: Vec<_> = parse(&text).map(Result::unwrap).collect();
        assert!(entries.len() > 5);
        assert!(entries.iter().all(|e| e.kernel_page_size == 4096));
        assert!(entries.iter().any(|e| e.rss > 0 && e.anonymous > 0));
    }

    #[test]
    fn fields_are_added_up_in_bytes() {
        let text = b"200000-600000 r-xp 00000000 00:0f 7  /anon_hugepage (deleted)\n\
            Size:               4096 kB\nKernelPageSize:     2048 kB\nRss: 0 kB\n\
            Shared_Hugetlb:     2048 kB\nPrivate_Hugetlb:    2048 kB\n\
            VmFlags: rd ex mr mw me ht bt \n\
            600000-601000 rw-p 00000000 00:00 0 \nAnonHugePages: 2 kB\nFilePmdMapped: 3 kB\n\
            VmFlags: rd wr mr mw me ac \n";
        let entries: Vec<_> = parse(text).map(Result::unwrap).collect();
        assert_eq!(entries[0].hugetlb, 4 << 20);
        assert_eq!(entries[0].kernel_page_size, 2 << 20);
        assert_eq!((entries[1].anon_huge, entries[1].file_pmd), (2048, 3072));
        assert_eq!(entries[0].mapping.prot, Prot::RX | Prot::BTI);
        assert_eq!(entries[1].mapping.prot, Prot::RW);
    }

    #[test]
    fn attributes_that_somebody_gave() {
        let mapping = "600000-601000 rw-p 00000000 00:00 0 \n";
        let has = |lines: &str| {
            let text = format!("{mapping}{lines}");
            parse(text.as_bytes()).next().unwrap().unwrap().attributes
        };
        assert!(!has("ProtectionKey:         0\nVmFlags: rd wr mr mw me ac sd mg hg \n"));
        for flag in ["lo", "dd", "dc", "wf", "nh", "uw"] {
            assert!(has(&format!("VmFlags: rd wr mr mw me {flag} ac \n")), "{flag}");
        }
        assert!(has("ProtectionKey:        10\n"));
    }

    #[test]
    fn a_bad_line_ends_the_list() {
        let entries: Vec<_> = parse(b"1000-2000 rw-p 0 0:0 0\nRss: 1 kB\nnonsense\n").collect();
        assert_eq!(entries.len(), 2);
        assert_eq!(entries[1], Err(ParseError { line: 3 }));
    }
}
