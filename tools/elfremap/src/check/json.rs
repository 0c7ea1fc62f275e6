//! The analysis as JSON. Addresses are hexadecimal strings, amounts are bytes.

use serde_json::{Value, json};

use super::advice::{LINKERS, linking_helps};
use super::{Analysis, Bounds, Estimate, LEVELS, notes};
use crate::elf::{Class, machine_name};
use crate::host::{Facility, Host};

/// Version of the document, raised when a field changes its meaning or goes.
pub const SCHEMA: u32 = 1;

/// The whole document.
#[must_use]
pub fn document(analysis: &Analysis, host: Option<&Host>) -> Value {
    let image = &analysis.image;
    let unfit = analysis.unfit();
    let need = analysis.need();
    json!({
        "schema": SCHEMA,
        "path": analysis.path.to_string_lossy(),
        "suitable": unfit.is_none(),
        "suitable_with_attach": analysis.is_attachable(),
        "reason": unfit.as_ref().map(|unfit| json!({
            "code": unfit.code(),
            "text": unfit.describe(),
        })),
        "need": {
            "page_size": need.size.bytes(),
            "pages": bounds(need.pages),
            "pool_pages": bounds(need.pool_pages),
        },
        "type": image.kind.code(),
        "machine": machine_name(image.machine, image.class),
        "bits": if image.class == Class::Bits64 { 64 } else { 32 },
        "interpreter": image.interpreter,
        "build_id": image.notes.build_id,
        "bind_now": image.dynamic.as_ref().is_some_and(|dynamic| dynamic.bind_now),
        "relro": image.relro.map(|relro| json!({
            "address": hex(relro.start()),
            "size": relro.len(),
        })),
        "secure": analysis.secure.describe(),
        "segments": image.segments.iter().map(|segment| json!({
            "offset": hex(segment.offset),
            "address": hex(segment.memory.start()),
            "file_size": segment.file_size,
            "memory_size": segment.memory.len(),
            "rights": segment.prot.to_string(),
            "align": segment.align,
        })).collect::<Vec<_>>(),
        "text_size": image.text_bytes(),
        "shared_objects": analysis.dependencies.iter().map(|dependency| json!({
            "name": dependency.name,
            "path": dependency.path.as_ref().map(|path| path.to_string_lossy()),
            "text_size": dependency.text_bytes,
        })).collect::<Vec<_>>(),
        "merge": analysis.policy.merge.to_string(),
        "levels": analysis.estimates.as_ref().ok().map(|estimates| {
            let levels = LEVELS.iter().zip(estimates);
            levels
                .map(|(level, estimate)| (level.to_string(), level_json(estimate)))
                .collect::<serde_json::Map<_, _>>()
        }),
        "other_sizes": analysis.other_sizes.iter().map(|(size, estimate)| json!({
            "page_size": size.bytes(),
            "pages": estimate.as_ref().ok().map(|estimate| bounds(estimate.pages)),
            "pool_pages": estimate.as_ref().ok().map(|estimate| bounds(estimate.pool_pages)),
        })).collect::<Vec<_>>(),
        "linker_flags": linking_helps(analysis).then(|| {
            LINKERS.iter().map(|linker| {
                (linker.name.to_owned(), json!(linker.flags(analysis.block.bytes())))
            }).collect::<serde_json::Map<_, _>>()
        }),
        "symbols": analysis.symbols.as_ref().ok().map(|symbols| json!({
            "imported": symbols.imported,
            "defined": symbols.defined,
        })),
        "notes": notes(analysis),
        "host": host.map(|host| host_json(analysis, host)),
    })
}

fn hex(address: u64) -> String {
    format!("{address:#x}")
}

fn bounds(bounds: Bounds) -> Value {
    json!({ "best": bounds.min, "worst": bounds.max })
}

fn level_json(estimate: &Estimate) -> Value {
    json!({
        "pages": bounds(estimate.pages),
        "pool_pages": bounds(estimate.pool_pages),
        "classes": estimate.classes.iter().map(|class| {
            (class.class.name().to_owned(), json!({
                "size": class.total,
                "moved": { "min": class.moved.min, "max": class.moved.max },
                "pages": bounds(class.pages),
            }))
        }).collect::<serde_json::Map<_, _>>(),
        "left": estimate.left.iter().map(|left| json!({
            "code": left.reason.code(),
            "text": left.reason.to_string(),
            "bytes": { "min": left.bytes.min, "max": left.bytes.max },
        })).collect::<Vec<_>>(),
        "refusal": estimate.refusal.map(|refusal| refusal.code()),
    })
}

fn host_json(analysis: &Analysis, host: &Host) -> Value {
    let facility = |facility: Facility| match facility {
        Facility::Works => json!(true),
        Facility::Fails(errno) => json!({ "errno": errno }),
    };
    json!({
        "pools": host.pools.iter().map(|pool| json!({
            "page_size": pool.size.bytes(),
            "total": pool.total,
            "free": pool.free,
            "reserved": pool.promised(),
            "surplus": pool.surplus,
            "overcommit": pool.overcommit,
            "nodes": pool.nodes.iter().map(|node| json!({
                "node": node.node,
                "total": node.total,
                "free": node.free,
                "surplus": node.surplus,
            })).collect::<Vec<_>>(),
        })).collect::<Vec<_>>(),
        "cgroup_limits": host.limits.iter().map(|limit| json!({
            "path": limit.path.to_string_lossy(),
            "page_size": limit.size.bytes(),
            "limit": limit.limit,
            "used": limit.used,
        })).collect::<Vec<_>>(),
        "pages_available": host.available(analysis.block),
        "thp": host.thp.map(|thp| thp.mode.to_string()),
        "kernel": host.probe(analysis.block).map(|probes| json!({
            "hugetlb": facility(probes.hugetlb),
            "mremap_huge": facility(probes.mremap_huge),
            "populate": facility(probes.populate),
            "collapse": facility(probes.collapse),
            "executable": facility(probes.executable),
        })),
        "processor_traps": host.traps,
    })
}
