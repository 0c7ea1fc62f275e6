//! Control groups, made for one check each.

use crate::init::CGROUPS;
use anyhow::{Context, Result};
use std::fs;
use std::path::{Path, PathBuf};

/// A control group, removed when dropped.
#[derive(Debug)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    /// A new group with these files set.
    pub(crate) fn new(name: &str, settings: &[(&str, String)]) -> Result<Self> {
        let group = Self(Path::new(CGROUPS).join(name));
        fs::create_dir(&group.0).with_context(|| format!("cannot make {}", group.0.display()))?;
        settings.iter().try_for_each(|(file, value)| group.set(file, value))?;
        Ok(group)
    }

    pub(crate) fn set(&self, file: &str, value: &str) -> Result<()> {
        let path = self.0.join(file);
        fs::write(&path, value).with_context(|| format!("cannot write {}", path.display()))
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn has(&self, file: &str) -> bool {
        self.0.join(file).exists()
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A member that has just been waited for may still be leaving.
        for _ in 0..50 {
            if fs::remove_dir(&self.0).is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
    }
}
