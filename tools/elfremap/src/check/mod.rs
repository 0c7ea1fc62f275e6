//! What `elfremap-check` finds out about a file, without running it.

mod advice;
mod estimate;
mod json;
mod placement;
mod text;
mod verdict;

use std::env;
use std::path::{Path, PathBuf};

use elfremap::hugepage::{PageSize, Pool};
use elfremap::policy::{Merge, Policy};

use crate::elf::{
    Dependency, ElfError, FileSource, Image, Kind, Loader, Search, Source, Symbols, huge_page_sizes,
};

use crate::host::Host;

pub use advice::notes;
pub use estimate::{Bounds, ClassEstimate, Estimate, Impossible, LeftEstimate};
pub use json::{SCHEMA, document};
pub use text::render;
pub use verdict::{Libc, Secure, Unfit, obstacle};

/// The merge levels, in order of what they join.
pub const LEVELS: [Merge; 4] = [Merge::None, Merge::Rx, Merge::Relro, Merge::Rwx];

/// Everything that a file tells.
#[derive(Debug)]
pub struct Analysis {
    /// The file.
    pub path: PathBuf,
    /// Its headers.
    pub image: Image,
    /// Names it imports and defines; else why they cannot be read.
    pub symbols: Result<Symbols, String>,
    /// Whether it is started in secure mode.
    pub secure: Secure,
    /// The shared objects it starts with.
    pub dependencies: Vec<Dependency>,
    /// What was planned for.
    pub policy: Policy,
    /// Base page size in bytes.
    pub page: u64,
    /// Huge page size in use.
    pub block: PageSize,
    /// The outcome at each of [`LEVELS`], the policy being the same otherwise.
    pub estimates: Result<[Estimate; 4], Impossible>,
    /// Whether it is judged for a machine of its own architecture, which is not this one's.
    pub abroad: bool,
    /// Then: the outcome for the other page sizes of such machines, at the merge level that
    /// was asked for.
    pub other_sizes: Vec<(PageSize, Result<Estimate, Impossible>)>,
}

impl Analysis {
    /// Reads the program at `path` and the headers of its shared objects. `choose`
    /// says for which huge page size to plan.
    ///
    /// # Errors
    /// [`ElfError`], when the file is no ELF file or a damaged one.
    pub fn read(
        path: &Path,
        policy: &Policy,
        choose: impl FnOnce(&Image) -> PageSize,
    ) -> Result<Self, ElfError> {
        let source = FileSource::open(path)?;
        let secure = Secure::of(&source);
        let image = Image::read(&source)?;
        let block = choose(&image);
        let mut analysis = Self::plan(&source, image, policy, block);
        analysis.path = path.into();
        analysis.secure = secure;
        // Reading the libraries of a foreign or secure program would tell nothing.
        if analysis.image.is_native() {
            let library_path = env::var("LD_LIBRARY_PATH").ok();
            let library_path = library_path.filter(|_| secure.describe().is_none());
            let search = Search::of_system(library_path.as_deref());
            analysis.dependencies = Loader::new(&search).closure(path, &analysis.image);
        }
        Ok(analysis)
    }

    /// As [`Analysis::read`], but from the program's bytes alone.
    ///
    /// # Errors
    /// As [`Analysis::read`].
    pub fn of(source: &impl Source, policy: &Policy, block: PageSize) -> Result<Self, ElfError> {
        Ok(Self::plan(source, Image::read(source)?, policy, block))
    }

    fn plan(source: &impl Source, image: Image, policy: &Policy, block: PageSize) -> Self {
        let symbols = Symbols::read(source, &image).map_err(|error| error.to_string());
        let page = page_size();
        let policies = LEVELS.map(|merge| Policy { merge, ..*policy });
        Self {
            estimates: estimate::estimate(&image, &policies, page, block.bytes()),
            path: PathBuf::new(),
            symbols,
            secure: Secure::default(),
            dependencies: Vec::new(),
            policy: *policy,
            page,
            block,
            // Who names a page size asks about a machine that has it, not about this one.
            abroad: image.is_for_other() && policy.page_size.is_some(),
            other_sizes: Vec::new(),
            image,
        }
    }

    /// Judges a program for the other architecture for machines of that one: by its layout
    /// alone, for the page size in use and for all others that such machines have.
    pub fn judge_abroad(&mut self) {
        if !self.image.is_for_other() {
            return;
        }
        self.abroad = true;
        let sizes = huge_page_sizes(self.image.machine).into_iter();
        let others = sizes.filter(|&size| size != self.block).map(|size| {
            let one = [self.policy];
            let estimate = estimate::estimate(&self.image, &one, self.page, size.bytes());
            (size, estimate.map(|[estimate]| estimate))
        });
        self.other_sizes = others.collect();
    }

    /// The outcome at the merge level that was asked for.
    ///
    /// # Errors
    /// The planner could not take the program.
    pub fn chosen(&self) -> Result<&Estimate, &Impossible> {
        let level = LEVELS.iter().position(|&level| level == self.policy.merge);
        self.estimates.as_ref().map(|estimates| &estimates[level.unwrap_or(0)])
    }

    /// Why the program cannot be remapped; `None` when it can.
    #[must_use]
    pub fn unfit(&self) -> Option<Unfit> {
        verdict::unfit(self)
    }

    /// Whether only the loader is in the preload's way: `elfremap attach` and `elfremap run
    /// --attach` can move the program.
    #[must_use]
    pub fn is_attachable(&self) -> bool {
        let only_loader = matches!(
            self.unfit(),
            Some(Unfit::Static(_) | Unfit::OtherLibc(..) | Unfit::Sanitizer(_))
        );
        only_loader && self.chosen().is_ok_and(|estimate| estimate.refusal.is_none())
    }

    /// The huge pages it needs; all zero when it cannot be remapped.
    #[must_use]
    pub fn need(&self) -> Need {
        let estimate = self.chosen().ok().filter(|_| self.unfit().is_none());
        let zero = Bounds { min: 0, max: 0 };
        Need {
            size: self.block,
            pages: estimate.map_or(zero, |estimate| estimate.pages),
            pool_pages: estimate.map_or(zero, |estimate| estimate.pool_pages),
        }
    }
}

/// How many huge pages one instance of a program needs.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Need {
    /// The size of the pages.
    pub size: PageSize,
    /// All of them, from the pool or transparent.
    pub pages: Bounds,
    /// Those that the pool is asked for: with the largest number free there, the
    /// program gets all it asks for, wherever it is loaded.
    pub pool_pages: Bounds,
}

/// What `reserve --for` and `run --reserve` ask: the pages that one instance of the
/// program at `path` needs under `policy`.
///
/// # Errors
/// [`ElfError`], when the file cannot be read or is no ELF file.
pub fn need(
    path: &Path,
    policy: &Policy,
    block: PageSize,
) -> Result<(Need, Option<Unfit>), ElfError> {
    let analysis = Analysis::read(path, policy, |_| block)?;
    Ok((analysis.need(), analysis.unfit()))
}

/// The pages of the pool that the program at `path` needs at most when it is moved from outside.
///
/// # Errors
/// As [`need`].
pub fn need_attached(path: &Path, policy: &Policy, block: PageSize) -> Result<u64, ElfError> {
    let analysis = Analysis::read(path, policy, |_| block)?;
    let planned = analysis.chosen().ok().filter(|_| analysis.image.is_native());
    Ok(planned.filter(|e| e.refusal.is_none()).map_or(0, |estimate| estimate.pool_pages.max))
}

/// The huge page size that the preload would take for `image`: the one asked for; 2 MiB
/// where it is offered and its pool has pages; else the size of whose pool the program
/// can get most; else that of transparent huge pages.
#[must_use]
pub fn block_for(image: &Image, policy: &Policy, host: &Host) -> PageSize {
    const USUAL: PageSize = PageSize::SIZE_2M;
    if let Some(size) = policy.page_size.and_then(PageSize::new) {
        return size;
    }
    // This machine's pools say nothing about the other architecture's, which have it, too.
    if image.is_for_other() {
        return USUAL;
    }
    let thp = host.thp.and_then(|thp| thp.size);
    let offered = host.pool(USUAL).is_some() || thp == Some(USUAL);
    let is_void = host.pool(USUAL).is_none_or(|pool| pool.total == 0 && pool.overcommit == 0);
    let others = || host.pools.iter().filter(|pool| pool.size != USUAL);
    if offered && !(is_void && others().next().is_some()) {
        return USUAL;
    }
    let planned = |size: PageSize| {
        let [estimate] = estimate::estimate(image, &[*policy], page_size(), size.bytes()).ok()?;
        estimate.refusal.is_none().then_some(estimate)
    };
    let bytes = |pool: &Pool| {
        let pages = pool.available().saturating_add(pool.may_grow());
        let wanted = planned(pool.size).map_or(0, |estimate| estimate.pool_pages.max);
        wanted.min(pages).saturating_mul(pool.size.bytes())
    };
    let best = others().map(|pool| (bytes(pool), pool.size)).max().filter(|(bytes, _)| *bytes > 0);
    let usable_thp = thp.filter(|&size| size != USUAL && planned(size).is_some());
    let larger = host.pools.iter().map(|pool| pool.size).chain(thp).filter(|&s| s > USUAL).min();
    let fallback = if offered { Some(USUAL) } else { larger };
    best.map(|(_, size)| size).or(usable_thp).or(fallback).unwrap_or(USUAL)
}

/// The file that a command line would run: a name without a slash is looked up in
/// `PATH` unless there is such a file here. The name itself when nothing is found.
#[must_use]
pub fn find_program(name: &Path) -> PathBuf {
    let is_plain =
        name.components().count() == 1 && !name.as_os_str().as_encoded_bytes().contains(&b'/');
    if !is_plain || name.exists() {
        return name.into();
    }
    let paths = env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    let mut candidates = env::split_paths(&paths).map(|directory| directory.join(name));
    candidates.find(|path| path.is_file()).unwrap_or_else(|| name.into())
}

/// The base page size in bytes.
#[must_use]
pub fn page_size() -> u64 {
    let size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE);
    size.ok().flatten().and_then(|size| u64::try_from(size).ok()).unwrap_or(4096)
}

/// MB of 2^20 bytes with one decimal; what is there at all is never shown as 0.
#[must_use]
pub fn mb(bytes: u64) -> String {
    let tenths = (u128::from(bytes) * 10 + (1 << 19)) >> 20;
    let tenths = if bytes > 0 { tenths.max(1) } else { tenths };
    format!("{}.{}", tenths / 10, tenths % 10)
}

/// A share in whole percent; 100 and 0 only when all or nothing is meant.
#[must_use]
pub fn percent(part: u64, whole: u64) -> u64 {
    if whole == 0 {
        return 0;
    }
    let rounded = (u128::from(part) * 200 + u128::from(whole)) / (u128::from(whole) * 2);
    match u64::try_from(rounded).unwrap_or(100) {
        0 if part > 0 => 1,
        100 if part < whole => 99,
        other => other,
    }
}

/// Whether a file of this kind has a load address of the kernel's choice.
#[must_use]
pub const fn is_relocatable(kind: Kind) -> bool {
    matches!(kind, Kind::Pie | Kind::StaticPie | Kind::SharedObject)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_and_shares() {
        assert_eq!((mb(0), mb(1), mb(39_217_070)), ("0.0".into(), "0.1".into(), "37.4".into()));
        assert_eq!([percent(1, 1_000_000), percent(999_999, 1_000_000)], [1, 99]);
        assert_eq!([percent(5, 5), percent(0, 5), percent(0, 0)], [100, 0, 0]);
    }

    #[test]
    fn programs_are_found_as_a_shell_finds_them() {
        assert_eq!(find_program(Path::new("./x")), Path::new("./x"));
        assert_eq!(find_program(Path::new("no such program")), Path::new("no such program"));
        assert!(find_program(Path::new("sh")).is_absolute());
    }
}
