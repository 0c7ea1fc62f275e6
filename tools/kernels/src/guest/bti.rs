//! Branch target identification (arm64): kept where it was, and only there.

use crate::checks::Checks;
use crate::launch::Launch;
use crate::moves::{Subject, only_pool};
use crate::probe::Machine;
use crate::snapshot::{Kind, Snapshot};
use anyhow::{Result, ensure};
use elfremap::hugepage::PageSize;
use elfremap::prot::Prot;

pub(crate) fn run(checks: &mut Checks, machine: &Machine) -> Result<()> {
    if !machine.bti {
        return Ok(());
    }
    let size = PageSize::SIZE_2M;
    for name in ["plain-page2m", "bti-page2m"] {
        let subject = Subject::named(name)?;
        for source in ["hugetlb", "thp"] {
            for strategy in ["swap", "move"] {
                checks.check("BTI", format!("{name}: {source}, {strategy}"), || {
                    only_pool(machine, size, if source == "thp" { 0 } else { 32 })?;
                    let launch = subject.hugetlb(size).env("ELFREMAP_STRATEGY", strategy);
                    let launch = launch.env("ELFREMAP_BACKEND", source);
                    let kind = if source == "thp" { Kind::Thp } else { Kind::Hugetlb(size) };
                    kept(&subject, &launch, kind, name.starts_with("bti"))
                })?;
            }
        }
    }
    Ok(())
}

fn kept(subject: &Subject, launch: &Launch, kind: Kind, wants: bool) -> Result<()> {
    let size = PageSize::SIZE_2M;
    let movable = subject.movable(size);
    // The comparison of rights with the plain run is made by `run`.
    subject
        .run(launch, |_, now: &Snapshot| {
            now.moved_exactly(&movable, kind)?;
            let text = now.areas.iter().filter(|area| {
                area.prot.has(Prot::EXEC) && movable.certain.iter().any(|b| b.overlaps(area.range))
            });
            let protected: Vec<bool> = text.map(|area| area.prot.has(Prot::BTI)).collect();
            ensure!(!protected.is_empty(), "no text moved");
            ensure!(protected.iter().all(|&has| has == wants), "BTI of the text: {protected:?}");
            Ok(())
        })?
        .silent()
}
