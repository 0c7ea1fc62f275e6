//! What the planner makes of a file: huge pages and coverage at best and at worst
//! over the addresses at which it may be loaded.

use std::collections::BTreeMap;

use elfremap::class::Class;
use elfremap::facts::Facts;
use elfremap::plan::{self, Plan, Reason, Refusal};
use elfremap::policy::Policy;

use super::placement;
use crate::elf::{Image, layout};

/// A program with more blocks than this is not planned for (16 GiB with pages of
/// 2 MiB); it bounds the time that hostile files can take.
const MAX_BLOCKS: u64 = 8192;

/// The smallest and the largest value over all load addresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Bounds {
    /// Smallest.
    pub min: u64,
    /// Largest.
    pub max: u64,
}

impl Bounds {
    /// Takes another value in.
    fn add(bounds: &mut Option<Self>, value: u64) {
        *bounds = Some(match *bounds {
            None => Self { min: value, max: value },
            Some(old) => Self { min: old.min.min(value), max: old.max.max(value) },
        });
    }

    /// Whether the load address makes no difference.
    #[must_use]
    pub const fn is_exact(&self) -> bool {
        self.min == self.max
    }
}

const NONE: Bounds = Bounds { min: 0, max: 0 };

/// One class of the program.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ClassEstimate {
    /// Which.
    pub class: Class,
    /// Bytes in whole pages, moved or not.
    pub total: u64,
    /// Bytes that move.
    pub moved: Bounds,
    /// Huge pages; one that several classes share is counted for the first of them.
    pub pages: Bounds,
}

/// A reason for which bytes of a selected class stay.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LeftEstimate {
    /// Why.
    pub reason: Reason,
    /// How many bytes of selected classes.
    pub bytes: Bounds,
}

/// The outcome under one policy.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Estimate {
    /// Block size in bytes.
    pub block: u64,
    /// Huge pages of the block size, from the pool or not.
    pub pages: Bounds,
    /// Huge pages that the pool is asked for: the largest is always enough.
    pub pool_pages: Bounds,
    /// The classes that the program has, in order.
    pub classes: Vec<ClassEstimate>,
    /// What stays, most bytes first.
    pub left: Vec<LeftEstimate>,
    /// Why nothing moves, at the address where most would; `None` when it moves.
    pub refusal: Option<Refusal>,
    /// Whether at some addresses the program is left alone although at others it moves.
    pub sometimes_refused: bool,
}

impl Estimate {
    /// What is known of a class; `None` when the program has no byte of it.
    #[must_use]
    pub fn class(&self, class: Class) -> Option<&ClassEstimate> {
        self.classes.iter().find(|c| c.class == class)
    }
}

/// The program cannot be planned for.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Impossible {
    /// Its segments are too large.
    #[error("its segments have {size} bytes, more than the {limit} that are planned for")]
    TooLarge {
        /// Of all segments together.
        size: u64,
        /// The limit for this block size.
        limit: u64,
    },
    /// An address is beyond 2^64.
    #[error("its segments lie beyond the address space")]
    Beyond,
}

/// Plans `image` under each of `policies`, at every load address that makes a
/// difference. `page` is the base page size, `block` the huge page size, both in bytes.
pub(super) fn estimate<const N: usize>(
    image: &Image,
    policies: &[Policy; N],
    page: u64,
    block: u64,
) -> Result<[Estimate; N], Impossible> {
    let biases = placement::biases(image, page, block);
    over(image, policies, page, block, &biases)
}

/// As [`estimate`], at these load biases.
fn over<const N: usize>(
    image: &Image,
    policies: &[Policy; N],
    page: u64,
    block: u64,
    biases: &[u64],
) -> Result<[Estimate; N], Impossible> {
    let limit = block.saturating_mul(MAX_BLOCKS);
    let mut sums = [const { Sums::new() }; N];
    for &bias in biases {
        let facts = facts(image, bias, page, block).ok_or(Impossible::Beyond)?;
        let size = facts.areas.iter().fold(0u64, |sum, a| sum.saturating_add(a.range.len()));
        if size > limit {
            return Err(Impossible::TooLarge { size, limit });
        }
        sums.iter_mut().zip(policies).for_each(|(sums, policy)| sums.add(&facts, policy));
    }
    Ok(sums.map(|sums| sums.finish(block)))
}

/// The program as the preload will find it at that address: alone, not yet running.
fn facts(image: &Image, bias: u64, page: u64, block: u64) -> Option<Facts> {
    let object = layout::object(image, bias)?;
    let areas: Vec<_> = layout::pages(&object, page).into_iter().map(|(area, _)| area).collect();
    if areas.is_empty() && !object.segments.is_empty() {
        return None;
    }
    // The heap makes no difference to the number of pages: where it begins in the
    // last block of bss it moves along, else that block grows into unmapped space.
    Some(Facts {
        page,
        block,
        object,
        areas,
        heap: None,
        threaded: false,
        limited: false,
        pinned: Vec::new(),
    })
}

struct Sums {
    pages: Option<Bounds>,
    pool_pages: Option<Bounds>,
    classes: BTreeMap<Class, (u64, Option<Bounds>, Option<Bounds>)>,
    left: Vec<(Reason, Bounds)>,
    places: u64,
    refused: u64,
    refusal: Option<(u64, Refusal)>,
}

impl Sums {
    const fn new() -> Self {
        Self {
            pages: None,
            pool_pages: None,
            classes: BTreeMap::new(),
            left: Vec::new(),
            places: 0,
            refused: 0,
            refusal: None,
        }
    }

    fn add(&mut self, facts: &Facts, policy: &Policy) {
        self.places += 1;
        // A plan is the survey of a program that is worth it.
        let (survey, is_refused) = match plan::plan(facts, policy) {
            Ok(plan) => (plan, false),
            Err(refusal) => {
                let survey = plan::survey(facts, policy);
                self.refused += 1;
                let moved = survey.moved().total();
                if self.refusal.is_none_or(|(most, _)| most < moved) {
                    self.refusal = Some((moved, refusal));
                }
                (survey, true)
            }
        };
        let plan = (!is_refused).then_some(&survey);
        Bounds::add(&mut self.pages, plan.map_or(0, Plan::pages));
        Bounds::add(&mut self.pool_pages, plan.map_or(0, Plan::pool_pages));
        for class in Class::ALL {
            let total = survey.total.get(class);
            if total > 0 {
                let (sum, moved, pages) = self.classes.entry(class).or_default();
                *sum = total;
                Bounds::add(moved, plan.map_or(0, |plan| plan.moved().get(class)));
                Bounds::add(pages, plan.map_or(0, |plan| pages_of(plan, class)));
            }
        }
        self.add_left(&survey, policy);
    }

    /// A reason that does not come up at some address counts as no bytes there.
    fn add_left(&mut self, survey: &Plan, policy: &Policy) {
        let mut here: BTreeMap<Reason, u64> = BTreeMap::new();
        for left in &survey.left {
            let selected = Class::ALL.iter().filter(|&&c| policy.segments.classes.has(c));
            let bytes: u64 = selected.map(|&class| left.bytes.get(class)).sum();
            *here.entry(left.reason).or_default() += bytes;
        }
        for (reason, bounds) in &mut self.left {
            let bytes = here.remove(reason).unwrap_or(0);
            *bounds = Bounds { min: bounds.min.min(bytes), max: bounds.max.max(bytes) };
        }
        for (reason, bytes) in here {
            let min = if self.places == 1 { bytes } else { 0 };
            self.left.push((reason, Bounds { min, max: bytes }));
        }
    }

    fn finish(self, block: u64) -> Estimate {
        let classes =
            self.classes.into_iter().map(|(class, (total, moved, pages))| ClassEstimate {
                class,
                total,
                moved: moved.unwrap_or(NONE),
                pages: pages.unwrap_or(NONE),
            });
        let mut left: Vec<_> =
            self.left.into_iter().map(|(reason, bytes)| LeftEstimate { reason, bytes }).collect();
        left.sort_by_key(|left| std::cmp::Reverse(left.bytes.max));
        let never_moves = self.refused == self.places;
        Estimate {
            block,
            pages: self.pages.unwrap_or(NONE),
            pool_pages: self.pool_pages.unwrap_or(NONE),
            classes: classes.collect(),
            left,
            refusal: self
                .refusal
                .filter(|_| never_moves)
                .map(|(_, refusal)| refusal)
                .or((self.places == 0).then_some(Refusal::TooSmall)),
            sometimes_refused: self.refused > 0 && !never_moves,
        }
    }
}

/// Huge pages on which `class` comes first among the classes that share them.
fn pages_of(plan: &Plan, class: Class) -> u64 {
    let mut count = 0;
    for planned in plan.moves.iter().filter(|m| m.bytes.get(class) > 0) {
        // Most moves hold one class: no need to look block by block.
        if planned.bytes.get(class) == planned.bytes.total() {
            count += planned.pages(plan.block);
            continue;
        }
        for block in planned.range.blocks(plan.block) {
            let inside = planned.pieces.iter().filter(|piece| piece.range.overlaps(block));
            count += u64::from(inside.map(|piece| piece.class).min() == Some(class));
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::{Kind, Segment};
    use elfremap::policy::{Backend, Backends, Merge};
    use elfremap::prot::Prot;
    use elfremap::range::Range;
    use proptest::prelude::*;

    /// A program such as linkers make: R, RX, R, RW with relro; sizes in pages.
    fn program(kind: Kind, align: u64, sizes: [u64; 6], holes: [u64; 3]) -> Image {
        const P: u64 = 4096;
        let [head, text, rodata, relro, data, bss] = sizes;
        let mut image = Image::empty(kind);
        let mut at = if kind == Kind::Exec { 0x400000 } else { 0 };
        let mut add = |pages: u64, beyond: u64, prot, hole| {
            let memory = Range::with_len(at, (pages + beyond) * P).unwrap();
            if !memory.is_empty() {
                let file_size = pages * P;
                image.segments.push(Segment { offset: at, memory, file_size, prot, align });
            }
            at += (pages + beyond + hole) * P;
            memory
        };
        add(head, 0, Prot::READ, holes[0]);
        add(text, 0, Prot::RX, holes[1]);
        add(rodata, 0, Prot::READ, holes[2]);
        let rw = add(relro + data, bss, Prot::RW, 0);
        image.relro = Range::with_len(rw.start(), relro * P).filter(|r| !r.is_empty());
        image
    }

    fn programs() -> impl Strategy<Value = Image> {
        let kinds = prop_oneof![Just(Kind::Pie), Just(Kind::Exec)];
        let aligns =
            prop_oneof![Just(4096u64), Just(0), Just(1), Just(3), Just(0x10000), Just(0x200000)];
        let sizes = (0u64..600, 0u64..2500, 0u64..1200, 0u64..600, 0u64..700, 0u64..2000);
        let holes = (0u64..600, 0u64..3, 0u64..600);
        (kinds, aligns, sizes, holes).prop_map(|(kind, align, s, h)| {
            program(kind, align, [s.0 + 1, s.1, s.2, s.3, s.4, s.5], [h.0, h.1, h.2])
        })
    }

    fn policies() -> impl Strategy<Value = Policy> {
        let merges =
            prop_oneof![Just(Merge::None), Just(Merge::Rx), Just(Merge::Relro), Just(Merge::Rwx)];
        let backends = prop_oneof![Just(Backend::Auto), Just(Backend::Hugetlb)];
        (merges, backends).prop_map(|(merge, backend)| Policy {
            merge,
            backends: Backends::all(backend),
            ..Policy::default()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// The chosen load addresses give the same bounds as all of them do.
        #[test]
        fn chosen_addresses_stand_for_all(image in programs(), policy in policies()) {
            let (page, block) = (4096, 2 << 20);
            let all = placement::all_biases(&image, page, block);
            let all = if image.kind == Kind::Exec { vec![0] } else { all };
            let full = over(&image, &[policy], page, block, &all);
            let chosen = estimate(&image, &[policy], page, block);
            prop_assert_eq!(full, chosen);
        }
    }

    fn one(image: &Image) -> Result<Estimate, Impossible> {
        estimate(image, &[Policy::default()], 4096, 2 << 20).map(|[estimate]| estimate)
    }

    #[test]
    fn bounds_of_a_known_program() {
        // 9 MiB of text after 3 pages: 4 whole blocks at any address but the best.
        let image = program(Kind::Pie, 4096, [3, 2304, 600, 20, 30, 1100], [0, 0, 0]);
        let found = one(&image).unwrap();
        let text = found.class(Class::Text).unwrap();
        assert_eq!((text.total, text.pages), (9 << 20, Bounds { min: 3, max: 4 }));
        assert_eq!(found.refusal, None);
        assert!(!found.sometimes_refused && found.pages.max >= 5);
        // Fixed addresses: one outcome.
        let image = program(Kind::Exec, 4096, [3, 2304, 600, 20, 30, 1100], [0, 0, 0]);
        assert!(one(&image).unwrap().pages.is_exact());
    }

    #[test]
    fn alignment_values_do_not_change_the_outcome_at_fixed_addresses() {
        let with = |align| {
            let image = program(Kind::Exec, align, [3, 2304, 600, 20, 30, 1100], [0, 0, 0]);
            one(&image).unwrap()
        };
        for align in [0, 1, 3, 0x10000, 0x200000, 0x4000_0000] {
            assert_eq!(with(align), with(4096));
        }
    }

    #[test]
    fn a_huge_program_is_refused_at_once() {
        let image = program(Kind::Pie, 4096, [3, 100, 1, 1, 1, 1 << 34], [0, 0, 0]);
        let found = one(&image);
        assert!(matches!(found, Err(Impossible::TooLarge { .. })));
    }
}
