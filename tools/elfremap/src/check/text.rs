//! The analysis as text, fit for 80 columns.

use std::fmt::Write as _;

use elfremap::class::Class;
use elfremap::hugepage::{PageSize, Pool, ThpMode};
use elfremap::plan::{Reason, Refusal};
use elfremap::prot::Prot;

use super::advice::{LINKERS, linking_helps};
use super::{Analysis, Bounds, ClassEstimate, Estimate, LEVELS, mb, notes, percent};
use crate::elf::{Segment, machine_name};
use crate::host::{Facility, Host};
use crate::output::Style;

const WIDTH: usize = 80;
/// Shared objects with less text than this are only counted.
const MIN_LISTED: u64 = 1 << 20;

/// The whole text, the verdict in its first line.
#[must_use]
pub fn render(analysis: &Analysis, host: Option<&Host>, style: Style) -> String {
    let mut out = String::new();
    verdict(&mut out, analysis, style);
    program(&mut out, analysis, style);
    segments(&mut out, analysis, style);
    estimates(&mut out, analysis, style);
    stays(&mut out, analysis, style);
    other_sizes(&mut out, analysis, style);
    let notes = notes(analysis);
    if !notes.is_empty() {
        heading(&mut out, "notes", style);
        notes.iter().for_each(|note| paragraph(&mut out, "  - ", note));
    }
    if let Some(host) = host {
        machine(&mut out, analysis, host, style);
    }
    out
}

fn verdict(out: &mut String, analysis: &Analysis, style: Style) {
    if let Some(unfit) = analysis.unfit() {
        let _ = write!(out, "{}: {}", style.red("not suitable"), unfit.describe());
        if analysis.is_attachable() {
            let with = style.green("suitable with attach");
            let _ = write!(out, "; {with} (elfremap run --attach): {}", needs(analysis));
        }
        out.push('\n');
        return;
    }
    let _ = writeln!(out, "{}: {}", style.green("suitable"), needs(analysis));
}

/// The pages, and what they are for.
fn needs(analysis: &Analysis) -> String {
    let Ok(estimate) = analysis.chosen() else { return String::new() };
    let pages = estimate.pages.max;
    format!("{} ({}) for {}", counted(pages), total(pages, analysis.block), gains(analysis))
}

fn counted(pages: u64) -> String {
    format!("{pages} huge page{}", if pages == 1 { "" } else { "s" })
}

fn total(pages: u64, size: PageSize) -> String {
    format!("{} MiB", (u128::from(pages) * u128::from(size.bytes())) >> 20)
}

/// What moves, at the best address: relro counts as data.
fn gains(analysis: &Analysis) -> String {
    analysis.chosen().map_or_else(|_| String::new(), gains_of)
}

fn gains_of(estimate: &Estimate) -> String {
    let moved = |class| estimate.class(class).map_or(0, |c| c.moved.max);
    let parts = [
        ("text", moved(Class::Text)),
        ("rodata", moved(Class::Rodata)),
        ("data", moved(Class::Data) + moved(Class::Relro)),
        ("bss", moved(Class::Bss)),
    ];
    let parts = parts.iter().filter(|(_, bytes)| *bytes > 0);
    parts.map(|(name, bytes)| format!("{name} {} MB", mb(*bytes))).collect::<Vec<_>>().join(", ")
}

fn heading(out: &mut String, text: &str, style: Style) {
    let _ = writeln!(out, "\n{}", style.bold(text));
}

/// Text broken at blanks, the lines after the first indented like it.
fn paragraph(out: &mut String, first: &str, text: &str) {
    let indent = " ".repeat(first.chars().count());
    let mut line = String::from(first);
    let mut is_empty = true;
    for word in text.split(' ') {
        let length = line.chars().count() + 1 + word.chars().count();
        if !is_empty && length > WIDTH {
            let _ = writeln!(out, "{}", line.trim_end());
            line.clone_from(&indent);
            is_empty = true;
        }
        if !is_empty {
            line.push(' ');
        }
        line.push_str(word);
        is_empty = false;
    }
    let _ = writeln!(out, "{}", line.trim_end());
}

fn program(out: &mut String, analysis: &Analysis, style: Style) {
    let image = &analysis.image;
    let path = crate::elf::printable(analysis.path.as_os_str().as_encoded_bytes());
    heading(out, &path, style);
    let mut item = |name: &str, text: &str| paragraph(out, &format!("  {name:<9}"), text);
    item(
        "type",
        &format!("{}, {}", image.kind.describe(), machine_name(image.machine, image.class)),
    );
    item("loader", image.interpreter.as_deref().unwrap_or("none"));
    let bind_now = image.dynamic.as_ref().is_some_and(|dynamic| dynamic.bind_now);
    item(
        "relro",
        &match (image.relro, bind_now) {
            (Some(relro), true) => format!("{} MB, bind now", mb(relro.len())),
            (Some(relro), false) => {
                format!("{} MB, lazy binding (the GOT stays writable)", mb(relro.len()))
            }
            (None, true) => "none, bind now".into(),
            (None, false) => "none".into(),
        },
    );
    item("code", &code(analysis));
}

/// Where the text is.
fn code(analysis: &Analysis) -> String {
    let own = mb(analysis.image.text_bytes());
    if analysis.dependencies.is_empty() {
        return format!("{own} MB in the file, no shared objects");
    }
    let mut others: Vec<_> = analysis.dependencies.iter().collect();
    others.sort_by_key(|other| std::cmp::Reverse(other.text_bytes));
    let sum: u64 = others.iter().map(|other| other.text_bytes).sum();
    let (large, small) = others.split_at(others.partition_point(|o| o.text_bytes >= MIN_LISTED));
    let mut text =
        format!("{own} MB in the file, {} MB in {} shared objects", mb(sum), others.len());
    if !large.is_empty() {
        let names = large.iter().map(|o| format!("{} {}", o.name, mb(o.text_bytes)));
        text += &format!(": {}", names.collect::<Vec<_>>().join(", "));
        if !small.is_empty() {
            text += &format!(", {} below 1.0", small.len());
        }
    }
    text
}

fn segments(out: &mut String, analysis: &Analysis, style: Style) {
    let image = &analysis.image;
    if image.segments.is_empty() {
        return;
    }
    heading(
        out,
        "segment          offset            address     size MB  rights      align",
        style,
    );
    for segment in &image.segments {
        let _ = writeln!(
            out,
            "{:<14} {:>#9x} {:>#18x} {:>11} {:>7} {:>#10x}",
            classes(segment, image.relro.is_some_and(|r| r.overlaps(segment.memory))),
            segment.offset,
            segment.memory.start(),
            mb(segment.memory.len()),
            segment.prot.to_string(),
            segment.align
        );
    }
}

/// The classes of a segment's bytes.
fn classes(segment: &Segment, has_relro: bool) -> String {
    if segment.prot.has(Prot::EXEC) {
        return if segment.prot.has(Prot::WRITE) { "text, writable" } else { "text" }.into();
    }
    if !segment.prot.has(Prot::WRITE) {
        return "rodata".into();
    }
    let data = segment.file_size > 0 && !(has_relro && segment.file_size == segment.memory.len());
    let parts =
        [(has_relro, "relro"), (data, "data"), (segment.memory.len() > segment.file_size, "bss")];
    let parts = parts.iter().filter(|(is, _)| *is).map(|(_, name)| *name);
    parts.collect::<Vec<_>>().join("+")
}

fn estimates(out: &mut String, analysis: &Analysis, style: Style) {
    let Ok(estimates) = &analysis.estimates else { return };
    let any = &estimates[0];
    if any.classes.is_empty() {
        return;
    }
    heading(
        out,
        &format!("pages of {}B and share of the bytes on them, by merge level", analysis.block),
        style,
    );
    let mut line = format!("{:<8}{:>7}", "", "MB");
    for level in LEVELS {
        let chosen = if level == analysis.policy.merge { "*" } else { "" };
        line += &format!("{:>16}", format!("{level}{chosen}"));
    }
    let _ = writeln!(out, "{line}");
    for class in Class::ALL {
        let Some(known) = any.class(class) else { continue };
        let mut line = format!("{:<8}{:>7}", class.name(), mb(known.total));
        for estimate in estimates {
            line += &estimate.class(class).map_or_else(String::new, cell);
        }
        let _ = writeln!(out, "{line}");
    }
    for (name, bounds) in [
        ("all", estimates.each_ref().map(|estimate| estimate.pages)),
        ("pool", estimates.each_ref().map(|estimate| estimate.pool_pages)),
    ] {
        let cells = bounds.map(|bounds| format!("{:>8}{:>8}", range(bounds), ""));
        let _ = writeln!(out, "{}", format!("{name:<15}{}", cells.concat()).trim_end());
    }
    let rest = if any.classes.iter().all(|c| c.moved.is_exact()) && any.pages.is_exact() {
        "* as asked for; pool: pages that the pool is asked for, the others are THP"
    } else {
        "* as asked for; ranges: by load address; pool: asked of the pool, the others THP"
    };
    let _ = writeln!(out, "{rest}");
}

/// For a program of the other architecture: what its machines may have instead.
fn other_sizes(out: &mut String, analysis: &Analysis, style: Style) {
    if !analysis.abroad {
        return;
    }
    let machine = machine_name(analysis.image.machine, analysis.image.class);
    heading(out, &format!("other page sizes of {machine} machines (--page-size)"), style);
    for (size, estimate) in &analysis.other_sizes {
        let text = match estimate {
            Err(cause) => cause.to_string(),
            Ok(Estimate { refusal: Some(refusal), .. }) => format!("nothing moves: {refusal}"),
            Ok(estimate) => {
                format!("{} for {}", counted(estimate.pages.max), gains_of(estimate))
            }
        };
        paragraph(out, &format!("  {:<6}", size.to_string()), &text);
    }
    let text = "judged by its layout alone; which sizes a machine has depends on its kernel's \
                base page";
    paragraph(out, "  ", text);
}

fn cell(class: &ClassEstimate) -> String {
    if class.moved.max == 0 {
        return format!("{:>8}{:>8}", "-", "-");
    }
    let share = Bounds {
        min: percent(class.moved.min, class.total),
        max: percent(class.moved.max, class.total),
    };
    format!("{:>8}{:>8}", range(class.pages), range(share) + "%")
}

fn range(bounds: Bounds) -> String {
    if bounds.is_exact() {
        bounds.max.to_string()
    } else {
        format!("{}-{}", bounds.min, bounds.max)
    }
}

fn stays(out: &mut String, analysis: &Analysis, style: Style) {
    let Ok(estimate) = analysis.chosen() else { return };
    if estimate.refusal == Some(Refusal::TooSmall) {
        return;
    }
    let left: Vec<_> = estimate.left.iter().filter(|left| left.bytes.max > 0).collect();
    if left.is_empty() {
        return;
    }
    heading(out, &format!("what stays at level {}", analysis.policy.merge), style);
    for left in &left {
        let (min, max) = (mb(left.bytes.min), mb(left.bytes.max));
        let amount = if min == max { max } else { format!("{min}-{max}") };
        paragraph(out, &format!("{amount:>10} MB  "), &left.reason.to_string());
    }
    if left.iter().any(|left| left.reason == Reason::Header) {
        paragraph(out, "  ", "the block with the ELF header moves with --segments ...,header");
    }
    if linking_helps(analysis) {
        let _ = writeln!(
            out,
            "  full coverage needs a new link (by gold also: --segments ...,header):"
        );
        for linker in LINKERS {
            let flags = linker.flags(analysis.block.bytes());
            paragraph(out, &format!("  {:<6}", linker.name), &flags);
        }
    }
}

fn machine(out: &mut String, analysis: &Analysis, host: &Host, style: Style) {
    heading(out, "this machine", style);
    let need = analysis.need().pool_pages.max;
    if host.pools.is_empty() {
        let _ = writeln!(out, "  the kernel has no huge page pools");
    }
    if !host.offers(analysis.block) {
        let text = format!(
            "no huge pages of {}B here: the preload would leave the program alone",
            analysis.block
        );
        paragraph(out, "  ", &style.yellow(&text));
    }
    for pool in &host.pools {
        if pool.size == analysis.block || pool.total > 0 || pool.overcommit > 0 {
            describe_pool(out, pool);
        }
    }
    for limit in &host.limits {
        let pages = |bytes| bytes / limit.size.bytes();
        let text = format!(
            "{}: {} pages of {}B, {} used",
            limit.path.display(),
            pages(limit.limit),
            limit.size,
            pages(limit.used)
        );
        paragraph(out, "  cgroup limit ", &text);
    }
    let thp = match host.thp {
        None => "the kernel has none".into(),
        Some(thp) => format!("mode {}", thp.mode),
    };
    let _ = writeln!(out, "  transparent huge pages: {thp}");
    if let Some(probes) = host.probe(analysis.block) {
        let facilities = [
            ("huge page mappings", probes.hugetlb),
            ("moving them (swap)", probes.mremap_huge),
            ("populating", probes.populate),
            ("collapsing", probes.collapse),
            ("new executable memory", probes.executable),
        ];
        let text = facilities.iter().map(|(name, facility)| match facility {
            Facility::Works => format!("{name} yes"),
            Facility::Fails(errno) => format!("{name} NO (errno {errno})"),
        });
        paragraph(out, "  kernel: ", &text.collect::<Vec<_>>().join(", "));
    }
    host.traps.iter().for_each(|trap| paragraph(out, "  processor: ", trap));
    if analysis.unfit().is_none() {
        now(out, analysis, host, need, style);
    }
}

fn describe_pool(out: &mut String, pool: &Pool) {
    let _ = writeln!(
        out,
        "  pool {}B: {} pages, {} free, {} reserved, {} surplus of {} allowed",
        pool.size,
        pool.total,
        pool.free,
        pool.promised(),
        pool.surplus,
        pool.overcommit
    );
    if pool.nodes.len() > 1 {
        for node in &pool.nodes {
            let _ =
                writeln!(out, "    node {}: {} pages, {} free", node.node, node.total, node.free);
        }
    }
}

/// Whether the machine can give the pages now, and what to type if not.
fn now(out: &mut String, analysis: &Analysis, host: &Host, need: u64, style: Style) {
    let available = host.available(analysis.block);
    if need > available {
        let text = format!(
            "the pool can give {available} of {need} pages now; the rest stays small or goes to THP"
        );
        paragraph(out, "  ", &style.yellow(&text));
        if host.limit(analysis.block) < need {
            paragraph(
                out,
                "  ",
                "a cgroup limit stands in the way: more pages in the pool do not help",
            );
            return;
        }
        let path = crate::elf::printable(analysis.path.as_os_str().as_encoded_bytes());
        let _ = writeln!(out, "  hint: elfremap reserve --for {path}");
    } else if need > 0 {
        paragraph(
            out,
            "  ",
            &style.green(&format!("the pool has the {need} pages for a start now")),
        );
    }
    let uses_thp = analysis.chosen().is_ok_and(|e| e.pages.max > e.pool_pages.max);
    if uses_thp && host.thp.is_none_or(|thp| thp.mode == ThpMode::Never) {
        let text = "THP is off here: data and bss stay small unless --backend hugetlb or thp asks";
        paragraph(out, "  ", &style.yellow(text));
    }
}
