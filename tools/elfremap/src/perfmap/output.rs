//! Writing a perf map: whole or not at all, and where nobody can lead it astray.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::{Mode, SFlag};
use nix::unistd::{Gid, Uid, UnlinkatFlags, setfsgid, setfsuid};

/// A folder and the name of the file to be in it.
#[derive(Debug)]
pub struct Place {
    folder: OwnedFd,
    name: PathBuf,
    /// For messages.
    shown: PathBuf,
    /// The user and group that the file will belong to; by default whoever writes it.
    owner: Option<(u32, u32)>,
}

impl Place {
    /// `/tmp/perf-PID.map`, where perf outside of any container looks.
    ///
    /// # Errors
    /// When `/tmp` cannot be opened.
    pub fn of_host(pid: u32) -> io::Result<Self> {
        Self::of_file(Path::new(&format!("/tmp/perf-{pid}.map")))
    }

    /// The same inside a container: `tmp` under `root`, the process's root folder, with its
    /// number in there.
    ///
    /// # Errors
    /// When the folder cannot be opened. `openat2` is needed: Linux 5.6.
    pub fn of_container(
        root: &Path,
        inner_pid: u32,
        owner: Option<(u32, u32)>,
    ) -> io::Result<Self> {
        let options = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        let root = nix::fcntl::open(root, options, Mode::empty())?;
        // A symbolic link in there must not lead out of the container.
        let how = OpenHow::new().flags(options).resolve(ResolveFlag::RESOLVE_IN_ROOT);
        let folder = nix::fcntl::openat2(&root, "tmp", how)?;
        let name = PathBuf::from(format!("perf-{inner_pid}.map"));
        let shown = Path::new("/tmp").join(&name);
        Ok(Self { folder, name, shown, owner })
    }

    /// A file anywhere.
    ///
    /// # Errors
    /// When its folder cannot be opened.
    pub fn of_file(path: &Path) -> io::Result<Self> {
        let name = path.file_name().ok_or(io::ErrorKind::IsADirectory)?;
        let folder = path.parent().filter(|p| !p.as_os_str().is_empty());
        let folder = File::options()
            .read(true)
            .custom_flags(libc::O_DIRECTORY)
            .open(folder.unwrap_or(Path::new(".")))?;
        let (name, shown) = (PathBuf::from(name), path.to_owned());
        Ok(Self { folder: folder.into(), name, shown, owner: None })
    }

    /// The path to show to people.
    #[must_use]
    pub fn shown(&self) -> &Path {
        &self.shown
    }

    /// Whether something other than a regular file is there (a symbolic link, a device, ...).
    /// Replacing it would not do what its user expects.
    #[must_use]
    pub fn is_special(&self) -> bool {
        let status =
            nix::sys::stat::fstatat(self.folder.as_fd(), &self.name, AtFlags::AT_SYMLINK_NOFOLLOW);
        status.is_ok_and(|s| SFlag::from_bits_truncate(s.st_mode & libc::S_IFMT) != SFlag::S_IFREG)
    }

    /// What is there now, when it is a regular file of an owner that `trusted` accepts, written
    /// at `since` (seconds since 1970) or later.
    #[must_use]
    pub fn current(&self, since: i64, trusted: impl Fn(u32) -> bool) -> Option<Vec<u8>> {
        /// A larger map than this is no map.
        const LIMIT: u64 = 1 << 30;
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = nix::fcntl::openat(&self.folder, &self.name, flags, Mode::empty()).ok()?;
        let file = File::from(file);
        let status = file.metadata().ok()?;
        if !status.is_file() || !trusted(status.uid()) || status.mtime() < since {
            return None;
        }
        let mut content = Vec::new();
        file.take(LIMIT).read_to_end(&mut content).ok()?;
        Some(content)
    }

    /// Writes `content` to a new file in the folder and gives it the name, in one step: a
    /// reader finds the old file or the whole new one. Mode 0644: perf takes no file that it
    /// cannot read, or that belongs to neither its user nor root.
    ///
    /// # Errors
    /// When a step fails; the new file is then removed again.
    pub fn write(&self, content: &[&[u8]]) -> io::Result<()> {
        let _owner = self.owner.map(|(user, group)| ActAs::new(user, group));
        let (temporary, file) = self.create_temporary()?;
        let written = fill(file, content).and_then(|()| {
            nix::fcntl::renameat(&self.folder, &temporary, &self.folder, &self.name)?;
            Ok(())
        });
        if written.is_err() {
            // The error to tell is the first one.
            let _ = nix::unistd::unlinkat(&self.folder, &temporary, UnlinkatFlags::NoRemoveDir);
        }
        written
    }

    fn create_temporary(&self) -> io::Result<(PathBuf, File)> {
        let flags =
            OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_WRONLY | OFlag::O_CLOEXEC;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        for attempt in 0..100 {
            let mut name = std::ffi::OsString::from(".");
            name.push(&self.name);
            name.push(format!(".{}.{attempt}", std::process::id()));
            match nix::fcntl::openat(&self.folder, name.as_os_str(), flags, mode) {
                Ok(file) => return Ok((name.into(), file.into())),
                Err(Errno::EEXIST) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Err(io::ErrorKind::AlreadyExists.into())
    }
}

fn fill(mut file: File, content: &[&[u8]]) -> io::Result<()> {
    content.iter().try_for_each(|part| file.write_all(part))?;
    nix::sys::stat::fchmod(&file, Mode::from_bits_truncate(0o644))?;
    Ok(())
}

/// While it lives, this thread makes files as another user. Changing the owner afterwards
/// would not do: a file system that was mounted in a user namespace takes no file from users
/// that do not exist in there.
struct ActAs {
    user: Uid,
    group: Gid,
}

impl ActAs {
    fn new(user: u32, group: u32) -> Self {
        // The group first: the user's rights may not suffice for it.
        let group = setfsgid(Gid::from_raw(group));
        Self { user: setfsuid(Uid::from_raw(user)), group }
    }
}

impl Drop for ActAs {
    fn drop(&mut self) {
        setfsuid(self.user);
        setfsgid(self.group);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn replaces_a_file_and_never_follows_a_link() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("perf-1.map");
        let victim = folder.path().join("victim");
        fs::write(&victim, "precious").unwrap();
        symlink(&victim, &path).unwrap();
        let place = Place::of_file(&path).unwrap();
        assert!(place.is_special());
        place.write(&[b"1 2", b" name\n"]).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"precious");
        assert_eq!(fs::read(&path).unwrap(), b"1 2 name\n");
        let status = fs::symlink_metadata(&path).unwrap();
        assert!(status.is_file() && status.permissions().mode() & 0o777 == 0o644);
        assert!(!place.is_special());
        place.write(&[b"new\n"]).unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new\n");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 2);
    }

    #[test]
    fn a_failure_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("map");
        fs::create_dir(&path).unwrap();
        let place = Place::of_file(&path).unwrap();
        assert!(place.is_special());
        place.write(&[b"text"]).unwrap_err();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_in_a_container_stays_in_the_container() {
        let root = tempfile::tempdir().unwrap();
        let outside = tempfile::tempdir().unwrap();
        symlink(outside.path(), root.path().join("tmp")).unwrap();
        // The link's target does not exist inside the root.
        Place::of_container(root.path(), 1, None).unwrap_err();
        fs::remove_file(root.path().join("tmp")).unwrap();
        fs::create_dir(root.path().join("tmp")).unwrap();
        Place::of_container(root.path(), 1, None).unwrap().write(&[b"x"]).unwrap();
        assert_eq!(fs::read(root.path().join("tmp/perf-1.map")).unwrap(), b"x");
    }
}
