//! A process that takes huge pages of a node and keeps them: run by this program for
//! itself, as `elfremap-guest hold NODE PAGES BYTES`.

use crate::launch::{Launch, Running};
use crate::node::MemoryPolicy;
use anyhow::{Context, Result, ensure};
use elfremap::hugepage::PageSize;
use std::io::Read;

/// Starts one and waits until it has its pages.
pub(crate) fn start(node: u32, pages: u64, size: PageSize) -> Result<Running> {
    let words = ["hold".to_owned(), pages.to_string(), size.bytes().to_string()];
    let launch = Launch::new("/init").args(words.iter().map(String::as_str));
    launch.policy(MemoryPolicy::Bind(node)).until_ready().context("the rival got no pages")
}

/// The rival's own part.
pub(crate) fn hold(arguments: &[String]) -> Result<()> {
    let mut numbers = arguments.iter().map(|text| text.parse::<usize>());
    let mut next = || -> Result<usize> { Ok(numbers.next().context("a number is missing")??) };
    let (pages, size) = (next()?, next()?);
    let flags = libc::MAP_PRIVATE
        | libc::MAP_ANONYMOUS
        | libc::MAP_HUGETLB
        | PageSize::new(size as u64).context("not a page size")?.mmap_flags();
    let rights = libc::PROT_READ | libc::PROT_WRITE;
    // SAFETY: a new mapping; each page of it is written once.
    unsafe {
        let start = libc::mmap(std::ptr::null_mut(), pages * size, rights, flags, -1, 0);
        ensure!(start != libc::MAP_FAILED, "mmap: {}", std::io::Error::last_os_error());
        for page in 0..pages {
            start.cast::<u8>().add(page * size).write_volatile(1);
        }
    }
    println!("ready");
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}
