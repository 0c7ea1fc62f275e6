//! Limits of the hugetlb controller (Documentation/admin-guide/cgroup-v2.rst and
//! cgroup-v1/hugetlb.rst) for the cgroups that this process is in.

use std::path::{Component, Path, PathBuf};

use elfremap::hugepage::{PageSize, number};

use crate::system::System;

/// One limit that is set.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Limit {
    /// The page size it is for.
    pub size: PageSize,
    /// The file that holds it.
    pub path: PathBuf,
    /// In bytes.
    pub limit: u64,
    /// What is used of it, in bytes.
    pub used: u64,
}

impl Limit {
    /// Bytes that are left.
    #[must_use]
    pub const fn room(&self) -> u64 {
        self.limit.saturating_sub(self.used)
    }
}

/// The names of a limit and of its usage, without `hugetlb.<size>.` in front.
const V2: [(&str, &str); 2] = [("max", "current"), ("rsvd.max", "rsvd.current")];
const V1: [(&str, &str); 2] =
    [("limit_in_bytes", "usage_in_bytes"), ("rsvd.limit_in_bytes", "rsvd.usage_in_bytes")];

/// A v1 controller without a limit shows the largest number of bytes in whole pages.
const UNLIMITED: u64 = 1 << 62;

/// All limits on pages of `size` from this process's cgroup up to the root of the
/// hierarchy, as far as it is visible.
pub(super) fn limits(system: &System, size: PageSize) -> Vec<Limit> {
    let content = |path: &str| system.content(path).ok().flatten().unwrap_or_default();
    let own = content("/proc/self/cgroup");
    let mounts = content("/proc/self/mountinfo");
    let (own, mounts) = (String::from_utf8_lossy(&own), String::from_utf8_lossy(&mounts));
    let mut limits = Vec::new();
    for (mount, names) in mounts.lines().filter_map(hugetlb_mount) {
        let path = own.lines().find_map(|line| group(line, mount.version2));
        let Some(path) = path else { continue };
        for directory in directories(&mount, path) {
            for (limit, used) in names {
                let file = |name| format!("{}/hugetlb.{size:#}.{name}", directory.display());
                let value = |name| number(content(&file(name)).as_slice());
                // "max" is no number, and no limit.
                if let Some(bytes) = value(limit).filter(|&bytes| bytes < UNLIMITED) {
                    let used = value(used).unwrap_or(0);
                    limits.push(Limit { size, path: file(limit).into(), limit: bytes, used });
                }
            }
        }
    }
    limits
}

struct Mount {
    version2: bool,
    /// The cgroup that is mounted there.
    root: String,
    point: String,
}

/// A mount of a hierarchy that may have the hugetlb controller, from a line of
/// mountinfo (proc_pid_mountinfo(5)).
fn hugetlb_mount(line: &str) -> Option<(Mount, [(&'static str, &'static str); 2])> {
    let (fields, rest) = line.split_once(" - ")?;
    let mut fields = fields.split(' ').skip(3);
    let (root, point) = (unescaped(fields.next()?), unescaped(fields.next()?));
    let mut rest = rest.split(' ');
    let version2 = match rest.next()? {
        "cgroup2" => true,
        "cgroup" if rest.nth(1)?.split(',').any(|option| option == "hugetlb") => false,
        _ => return None,
    };
    Some((Mount { version2, root, point }, if version2 { V2 } else { V1 }))
}

/// The path of the cgroup, from a line of `/proc/self/cgroup` (cgroups(7)).
fn group(line: &str, version2: bool) -> Option<&str> {
    let mut fields = line.splitn(3, ':');
    let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
    let fits = if version2 {
        hierarchy == "0"
    } else {
        controllers.split(',').any(|controller| controller == "hugetlb")
    };
    fits.then_some(path)
}

/// The directories of the cgroup and of those above it, innermost first.
fn directories(mount: &Mount, group: &str) -> Vec<PathBuf> {
    let below = Path::new(group).strip_prefix(&mount.root).unwrap_or_else(|_| Path::new(""));
    // A cgroup outside of our namespace is shown with `..`; only the mount is visible.
    let visible = below.components().all(|c| matches!(c, Component::Normal(_)));
    let below = if visible { below } else { Path::new("") };
    below.ancestors().map(|path| Path::new(&mount.point).join(path)).collect()
}

/// Undoes the octal escapes of mountinfo for blanks.
fn unescaped(text: &str) -> String {
    text.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, System) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path.trim_start_matches('/'));
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        let system = System::below(root.path());
        (root, system)
    }

    #[test]
    fn version_2_with_a_limit_above() {
        let (_root, system) = tree(&[
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/proc/self/mountinfo", "30 1 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"),
            ("/sys/fs/cgroup/a/hugetlb.2MB.max", "4194304\n"),
            ("/sys/fs/cgroup/a/hugetlb.2MB.current", "2097152\n"),
            ("/sys/fs/cgroup/a/b/hugetlb.2MB.max", "max\n"),
            ("/sys/fs/cgroup/a/b/hugetlb.2MB.rsvd.max", "0\n"),
        ]);
        let found = limits(&system, PageSize::SIZE_2M);
        let short: Vec<_> = found.iter().map(|l| (l.limit, l.room())).collect();
        assert_eq!(short, [(0, 0), (4 << 20, 2 << 20)]);
        assert!(limits(&system, PageSize::SIZE_1G).is_empty());
    }

    #[test]
    fn version_1_in_a_container() {
        let (_root, system) = tree(&[
            ("/proc/self/cgroup", "4:cpu:/x\n3:hugetlb:/docker/42\n0::/\n"),
            (
                "/proc/self/mountinfo",
                "31 1 0:27 /docker/42 /sys/fs/cgroup/huge\\040tlb rw - cgroup cgroup rw,hugetlb\n",
            ),
            ("/sys/fs/cgroup/huge tlb/hugetlb.2MB.limit_in_bytes", "9223372036854771712\n"),
            ("/sys/fs/cgroup/huge tlb/hugetlb.2MB.rsvd.limit_in_bytes", "6291456\n"),
            ("/sys/fs/cgroup/huge tlb/hugetlb.2MB.rsvd.usage_in_bytes", "8388608\n"),
        ]);
        let found = limits(&system, PageSize::SIZE_2M);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].limit, found[0].room()), (6 << 20, 0));
    }

    #[test]
    fn outside_of_the_namespace_only_the_mount_is_looked_at() {
        let mount = Mount { version2: true, root: "/".into(), point: "/cg".into() };
        assert_eq!(directories(&mount, "/../../x"), [Path::new("/cg")]);
        assert_eq!(directories(&mount, "/a"), [Path::new("/cg/a"), Path::new("/cg")]);
    }
}
