//! Memory of the target.

use std::io::{IoSlice, IoSliceMut};

use elfremap::errno::Errno;
use nix::sys::uio::{RemoteIoVec, process_vm_readv, process_vm_writev};
use nix::unistd::Pid;

fn word(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

/// Reads from `address` on until `buffer` is full. `thread` is any thread of the process.
pub(super) fn read(thread: i32, address: u64, buffer: &mut [u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < buffer.len() {
        let rest = &mut buffer[done..];
        let remote = RemoteIoVec { base: word(address) + done, len: rest.len() };
        match process_vm_readv(Pid::from_raw(thread), &mut [IoSliceMut::new(rest)], &[remote]) {
            Ok(0) => return Err(Errno(libc::EFAULT)),
            Ok(n) => done += n,
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(Errno(errno as i32)),
        }
    }
    Ok(())
}

/// Writes all of `bytes` from `address` on, which must be writable for the target itself.
pub(super) fn write(thread: i32, address: u64, bytes: &[u8]) -> Result<(), Errno> {
    let mut done = 0;
    while done < bytes.len() {
        let rest = &bytes[done..];
        let remote = RemoteIoVec { base: word(address) + done, len: rest.len() };
        match process_vm_writev(Pid::from_raw(thread), &[IoSlice::new(rest)], &[remote]) {
            Ok(0) => return Err(Errno(libc::EFAULT)),
            Ok(n) => done += n,
            Err(nix::errno::Errno::EINTR) => {}
            Err(errno) => return Err(Errno(errno as i32)),
        }
    }
    Ok(())
}
