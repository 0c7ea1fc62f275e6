//! Which shared objects a program gets, found as ld.so(8) finds them, without
//! running anything.

use std::collections::{HashSet, VecDeque};
use std::path::{Path, PathBuf};
use std::rc::Rc;

use super::{Dynamic, FileSource, Image, LdCache};

/// More objects than this are not followed.
const MAX_OBJECTS: usize = 1024;
/// The hardware subdirectories of glibc 2.33 and later, best first.
#[cfg(target_arch = "x86_64")]
const HWCAPS: [&str; 3] = ["x86-64-v4", "x86-64-v3", "x86-64-v2"];

/// One object of the closure over DT_NEEDED.
#[derive(Clone, Debug)]
pub struct Dependency {
    /// The DT_NEEDED entry.
    pub name: String,
    /// Where it was found; `None` when it is missing.
    pub path: Option<PathBuf>,
    /// Bytes in its executable segments.
    pub text_bytes: u64,
}

/// Where to look.
#[derive(Clone, Debug)]
pub struct Search {
    /// `/etc/ld.so.cache`.
    pub cache: LdCache,
    /// `LD_LIBRARY_PATH`; empty for programs in secure mode.
    pub library_path: Vec<PathBuf>,
    /// The loader's built-in directories.
    pub default_directories: Vec<PathBuf>,
    /// Subdirectories of `glibc-hwcaps` that this CPU can use, best first.
    pub hwcaps: Vec<&'static str>,
}

impl Search {
    /// What the loader of this system uses, given the value of `LD_LIBRARY_PATH`.
    #[must_use]
    pub fn of_system(library_path: Option<&str>) -> Self {
        let triplet =
            if cfg!(target_arch = "aarch64") { "aarch64-linux-gnu" } else { "x86_64-linux-gnu" };
        let default_directories = ["/lib", "/usr/lib"]
            .iter()
            .map(|directory| Path::new(directory).join(triplet))
            .chain(["/lib64", "/usr/lib64", "/lib", "/usr/lib"].map(PathBuf::from))
            .collect();
        Self {
            cache: LdCache::open(Path::new("/etc/ld.so.cache")),
            // An empty element is the current directory.
            library_path: library_path.filter(|p| !p.is_empty()).map_or_else(Vec::new, |path| {
                path.split([':', ';']).map(|p| if p.is_empty() { "." } else { p }.into()).collect()
            }),
            default_directories,
            hwcaps: hwcaps(),
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn hwcaps() -> Vec<&'static str> {
    let v2 = std::is_x86_feature_detected!("sse4.2") && std::is_x86_feature_detected!("popcnt");
    let v3 = v2
        && std::is_x86_feature_detected!("avx2")
        && std::is_x86_feature_detected!("bmi2")
        && std::is_x86_feature_detected!("fma")
        && std::is_x86_feature_detected!("movbe");
    let v4 = v3
        && std::is_x86_feature_detected!("avx512f")
        && std::is_x86_feature_detected!("avx512bw")
        && std::is_x86_feature_detected!("avx512cd")
        && std::is_x86_feature_detected!("avx512dq")
        && std::is_x86_feature_detected!("avx512vl");
    HWCAPS.into_iter().zip([v4, v3, v2]).filter(|(_, has)| *has).map(|(name, _)| name).collect()
}

#[cfg(not(target_arch = "x86_64"))]
fn hwcaps() -> Vec<&'static str> {
    Vec::new()
}

/// An object whose DT_NEEDED entries are to be found, with the search paths that
/// its loaders (the objects that needed it) hand down.
struct Node {
    dynamic: Rc<Dynamic>,
    origin: PathBuf,
    parent: Option<Rc<Node>>,
}

/// Finds shared objects.
#[derive(Debug)]
pub struct Loader<'a> {
    search: &'a Search,
}

impl<'a> Loader<'a> {
    /// A loader that looks in `search`.
    #[must_use]
    pub const fn new(search: &'a Search) -> Self {
        Self { search }
    }

    /// The objects that `image`, the file at `path`, is started with, in the order
    /// of their loading.
    #[must_use]
    pub fn closure(&self, path: &Path, image: &Image) -> Vec<Dependency> {
        let Some(dynamic) = &image.dynamic else { return Vec::new() };
        let origin = |path: &Path| {
            let path = path.canonicalize().unwrap_or_else(|_| path.into());
            path.parent().map_or_else(PathBuf::new, Path::to_path_buf)
        };
        let root = Node { dynamic: Rc::new(dynamic.clone()), origin: origin(path), parent: None };
        let mut queue = VecDeque::from([Rc::new(root)]);
        let mut names: HashSet<String> = HashSet::new();
        let mut files = HashSet::new();
        let mut found = Vec::new();
        while let Some(node) = queue.pop_front() {
            for name in &node.dynamic.needed {
                if found.len() >= MAX_OBJECTS || !names.insert(name.clone()) {
                    continue;
                }
                let mut dependency = Dependency { name: name.clone(), path: None, text_bytes: 0 };
                if let Some((path, source, image)) = self.find(name, &node) {
                    if !files.insert(source.identity()) {
                        continue;
                    }
                    dependency.text_bytes = image.text_bytes();
                    if let Some(dynamic) = image.dynamic {
                        names.extend(dynamic.soname.clone());
                        queue.push_back(Rc::new(Node {
                            dynamic: Rc::new(dynamic),
                            origin: origin(&path),
                            parent: Some(Rc::clone(&node)),
                        }));
                    }
                    dependency.path = Some(path);
                }
                found.push(dependency);
            }
        }
        found
    }

    /// The first file that fits, in the order of ld.so(8).
    fn find(&self, name: &str, node: &Node) -> Option<(PathBuf, FileSource, Image)> {
        if name.contains('/') {
            return usable(expand(name, &node.origin)?);
        }
        let directories = self.directories(node);
        let in_directories = |directories: &[PathBuf]| {
            directories.iter().find_map(|directory| self.in_directory(directory, name))
        };
        in_directories(&directories)
            .or_else(|| {
                let usable_here = |path: &&Path| self.hwcap_fits(path);
                self.search.cache.paths(name).filter(usable_here).find_map(|p| usable(p.into()))
            })
            .or_else(|| {
                if node.dynamic.no_default_directories {
                    return None;
                }
                in_directories(&self.search.default_directories)
            })
    }

    /// DT_RPATH of the object and of those that led to it (unless it has a
    /// DT_RUNPATH), then LD_LIBRARY_PATH, then its DT_RUNPATH.
    fn directories(&self, node: &Node) -> Vec<PathBuf> {
        let split = |paths: &Option<String>, origin: &Path| -> Vec<PathBuf> {
            let paths = paths.iter().flat_map(|paths| paths.split(':'));
            paths.filter(|p| !p.is_empty()).filter_map(|p| expand(p, origin)).collect()
        };
        let mut directories = Vec::new();
        if node.dynamic.runpath.is_none() {
            let mut next = Some(node);
            while let Some(node) = next {
                directories.extend(split(&node.dynamic.rpath, &node.origin));
                next = node.parent.as_deref();
            }
        }
        directories.extend(self.search.library_path.iter().cloned());
        directories.extend(split(&node.dynamic.runpath, &node.origin));
        directories
    }

    fn in_directory(&self, directory: &Path, name: &str) -> Option<(PathBuf, FileSource, Image)> {
        let hwcaps =
            self.search.hwcaps.iter().map(|level| directory.join("glibc-hwcaps").join(level));
        hwcaps.chain([directory.into()]).find_map(|directory| usable(directory.join(name)))
    }

    /// Whether the CPU can use a path of the cache: those in a subdirectory of
    /// `glibc-hwcaps` are for some CPUs only.
    fn hwcap_fits(&self, path: &Path) -> bool {
        let mut parts = path.iter();
        match parts.find(|part| *part == "glibc-hwcaps").and_then(|_| parts.next()) {
            Some(level) => self.search.hwcaps.iter().any(|&usable| level == usable),
            None => true,
        }
    }
}

/// The file, when it is an object of this machine; the loader passes over others.
fn usable(path: PathBuf) -> Option<(PathBuf, FileSource, Image)> {
    let source = FileSource::open(&path).ok()?;
    let image = Image::read(&source).ok().filter(Image::is_native)?;
    Some((path, source, image))
}

/// Replaces the dynamic string tokens of ld.so(8); `None` when one is unknown.
fn expand(path: &str, origin: &Path) -> Option<PathBuf> {
    let (lib, platform) = if cfg!(target_arch = "aarch64") {
        ("lib/aarch64-linux-gnu", "aarch64")
    } else {
        ("lib/x86_64-linux-gnu", "x86_64")
    };
    let origin = origin.to_str()?;
    let mut expanded = path.to_owned();
    for (token, value) in [("ORIGIN", origin), ("LIB", lib), ("PLATFORM", platform)] {
        expanded = expanded.replace(&format!("${{{token}}}"), value);
        expanded = expanded.replace(&format!("${token}"), value);
    }
    if expanded.contains('$') { None } else { Some(expanded.into()) }
}
