//! The words of `build:` directives: what each adds to the build of a program.

use anyhow::{Result, bail};

/// What is done to the linked file.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Patch {
    /// p_align of every PT_LOAD.
    Align(u64),
    /// No section headers: e_shoff, e_shnum and e_shstrndx 0, after stripping.
    NoSections,
    /// The same, and the file ends with the last byte of the last PT_LOAD.
    Truncate,
}

/// What a word stands for.
#[derive(Clone, Default, Debug)]
pub(crate) struct Word {
    pub(crate) compile: &'static [&'static str],
    pub(crate) link: &'static [&'static str],
    pub(crate) patch: Option<Patch>,
    /// A linker script in programs/common or in the program's directory.
    pub(crate) script: Option<&'static str>,
}

fn link(link: &'static [&'static str]) -> Word {
    Word { link, ..Word::default() }
}

fn compile(compile: &'static [&'static str]) -> Word {
    Word { compile, ..Word::default() }
}

fn patch(patch: Patch) -> Word {
    Word { patch: Some(patch), ..Word::default() }
}

fn script(script: &'static str, link: &'static [&'static str]) -> Word {
    Word { script: Some(script), link, ..Word::default() }
}

/// The meaning of `word` in a cell with these words.
pub(crate) fn meaning(word: &str, cell: &[String]) -> Result<Word> {
    let has = |other: &str| cell.iter().any(|w| w == other);
    Ok(match word {
        "default" => Word::default(),
        "pie" => Word { compile: &["-fPIE"], link: &["-pie"], ..Word::default() },
        "no-pie" => Word { compile: &["-fno-pie"], link: &["-no-pie"], ..Word::default() },
        "bfd" => link(&["-fuse-ld=bfd"]),
        "gold" => link(&["-fuse-ld=gold"]),
        "lld" => link(&["-fuse-ld=lld"]),
        "mold" => link(&["-fuse-ld=mold"]),
        "noseparate-code" => link(&["-Wl,-z,noseparate-code"]),
        "separate-code" => link(&["-Wl,-z,separate-code"]),
        "separate-loadable" => link(&["-Wl,-z,separate-loadable-segments"]),
        "norelro" => link(&["-Wl,-z,norelro"]),
        "now" => link(&["-Wl,-z,relro,-z,now"]),
        "page64k" => link(&["-Wl,-z,max-page-size=0x10000"]),
        "page2m" => link(&["-Wl,-z,max-page-size=0x200000"]),
        // lld makes a relro region here that no C library can protect: it goes
        // on to the next 2 MiB, over addresses that are not mapped.
        "page2m-common" if has("lld") => {
            link(&["-Wl,-z,max-page-size=0x200000,-z,common-page-size=0x200000,-z,norelro"])
        }
        "page2m-common" => link(&["-Wl,-z,max-page-size=0x200000,-z,common-page-size=0x200000"]),
        "base300000" if has("lld") => link(&["-Wl,--image-base=0x300000"]),
        "base300000" => link(&["-Wl,-Ttext-segment=0x300000"]),
        "rosegment" => link(&["-Wl,--rosegment"]),
        "no-rosegment" => link(&["-Wl,--no-rosegment"]),
        "execstack" => link(&["-Wl,-z,execstack"]),
        "rdynamic" => link(&["-rdynamic"]),
        "loads12" if has("pie") => script("loads12.ld", &["-Wl,-z,now"]),
        "loads12" => script("loads12.ld", &["-Wl,-z,now", "-Wl,-Ttext-segment=0x400000"]),
        "edge=0" => script("edges.ld", &["-Wl,-z,now,-Ttext-segment=0x400000,--defsym,EDGE=0"]),
        "edge=1" => script("edges.ld", &["-Wl,-z,now,-Ttext-segment=0x400000,--defsym,EDGE=1"]),
        "edge=-1" => script("edges.ld", &["-Wl,-z,now,-Ttext-segment=0x400000,--defsym,EDGE=-1"]),
        "odd=rw" => script("odd.ld", &["-Wl,-z,now,-Ttext-segment=0x400000,--defsym,BSS_RIGHTS=6"]),
        "odd=rwx" => {
            script("odd.ld", &["-Wl,-z,now,-Ttext-segment=0x400000,--defsym,BSS_RIGHTS=7"])
        }
        "far" => Word {
            compile: &["-mcmodel=large"],
            link: &["-Wl,--section-start=.far=0x7e0000000000"],
            ..Word::default()
        },
        "data5ff000" => link(&["-Wl,-z,norelro,-Tdata=0x5ff000"]),
        "ubsan" => Word {
            compile: &["-fsanitize=undefined"],
            link: &["-fsanitize=undefined"],
            ..Word::default()
        },
        "asan-static" => Word {
            compile: &["-fsanitize=address"],
            link: &["-fsanitize=address", "-static-libasan"],
            ..Word::default()
        },
        "asan-dynamic" => Word {
            compile: &["-fsanitize=address"],
            link: &["-fsanitize=address"],
            ..Word::default()
        },
        "tsan" => Word {
            compile: &["-fsanitize=thread"],
            link: &["-fsanitize=thread"],
            ..Word::default()
        },
        "jemalloc" => {
            link(&["-Wl,--whole-archive,-l:libjemalloc.a,--no-whole-archive", "-lm", "-lstdc++"])
        }
        // The lowest address that may be mapped (vm.mmap_min_addr), and the next.
        "base10000" if has("lld") => link(&["-Wl,--image-base=0x10000"]),
        "base10000" => link(&["-Wl,-Ttext-segment=0x10000"]),
        "base200000" if has("lld") => link(&["-Wl,--image-base=0x200000"]),
        "base200000" => link(&["-Wl,-Ttext-segment=0x200000"]),
        "BSS4K" => compile(&["-DBSS=4096"]),
        "BSS1900K" => compile(&["-DBSS=1900*1024"]),
        "BSS2M" => compile(&["-DBSS=2*1024*1024"]),
        "align0" => patch(Patch::Align(0)),
        "align1" => patch(Patch::Align(1)),
        "align3" => patch(Patch::Align(3)),
        "align64k" => patch(Patch::Align(0x10000)),
        "align2m" => patch(Patch::Align(0x20_0000)),
        "align1g" => patch(Patch::Align(0x4000_0000)),
        "nosections" => patch(Patch::NoSections),
        "truncated" => patch(Patch::Truncate),
        // An option of the preload: Source::cell_env.
        _ if word.starts_with("ELFREMAP_") => Word::default(),
        _ => bail!("unknown word {word} in a build directive"),
    })
}

/// Whether the cell's linker cannot make it.
pub(crate) fn impossible(cell: &[String]) -> bool {
    let has = |word: &str| cell.iter().any(|w| w == word);
    // gold knows neither option, and has one layout only.
    has("gold") && (has("separate-code") || has("noseparate-code"))
        // mold has no option to keep code and data in one page.
        || has("mold") && (has("noseparate-code") || has("base300000"))
}
