//! The part of Markdown that the pages in `docs/` shown as manual pages use, as man(7):
//! paragraphs, lists, tables, indented code, and code, bold text and links in a line.

use super::roff::{escape, start_of_line};

/// The text behind the first heading.
pub(super) fn without_title(text: &str) -> &str {
    let title = text.strip_prefix("# ").and_then(|rest| rest.split_once('\n'));
    title.map_or(text, |(_, rest)| rest)
}

/// The requests that show the text.
pub(super) fn to_roff(text: &str) -> String {
    let mut page = String::new();
    for block in blocks(text) {
        match block {
            Block::Heading(title) => page += &format!(".SS \"{}\"\n", escape(&plain(title))),
            Block::Code(lines) => {
                page += ".PP\n.nf\n";
                for line in lines {
                    page += &format!("{}\n", start_of_line(&escape(line)));
                }
                page += ".fi\n";
            }
            Block::Row(cells) => {
                let [first, others @ ..] = &cells[..] else { continue };
                let others: Vec<_> = others.iter().map(|cell| inline(cell)).collect();
                page += &format!(".TP\n{}\n{}\n", inline(first), start_of_line(&others.join("; ")));
            }
            Block::Item(text) => {
                page += &match text.strip_prefix("**").and_then(|rest| rest.split_once("**: ")) {
                    Some((name, rest)) => {
                        format!(".TP\n\\fB{}\\fR\n{}\n", escape(name), inline(rest))
                    }
                    None => format!(".IP \\(bu 2\n{}\n", start_of_line(&inline(&text))),
                };
            }
            Block::Paragraph(text) => page += &format!(".PP\n{}\n", start_of_line(&inline(&text))),
        }
    }
    page
}

enum Block<'a> {
    Heading(&'a str),
    Code(Vec<&'a str>),
    /// A row of a table, from the third cell on with the column's title.
    Row(Vec<String>),
    Item(String),
    Paragraph(String),
}

fn blocks(text: &str) -> Vec<Block<'_>> {
    let mut blocks = Vec::new();
    let mut titles = Vec::new();
    let mut lines = text.lines().peekable();
    while let Some(line) = lines.next() {
        let continued = |next: &&str| !next.trim().is_empty() && !starts_block(next);
        if line.trim().is_empty() {
            continue;
        } else if let Some(title) = line.strip_prefix('#') {
            blocks.push(Block::Heading(title.trim_start_matches('#').trim()));
        } else if let Some(code) = line.strip_prefix("    ") {
            let mut code = vec![code];
            while let Some(next) = lines.next_if(|next| next.starts_with("    ")) {
                code.push(&next[4..]);
            }
            blocks.push(Block::Code(code));
        } else if line.starts_with("```") {
            let code: Vec<_> = lines.by_ref().take_while(|next| !next.starts_with("```")).collect();
            blocks.push(Block::Code(code));
        } else if line.starts_with('|') {
            let mut row = cells(line);
            if lines.next_if(|next| next.starts_with("|-") || next.starts_with("| -")).is_some() {
                titles = row;
                continue;
            }
            for (cell, title) in row.iter_mut().zip(&titles).skip(2) {
                *cell = format!("{title}: {cell}");
            }
            blocks.push(Block::Row(row));
        } else {
            let item = line.strip_prefix("- ");
            let mut text = String::from(item.unwrap_or(line).trim());
            while let Some(next) = lines.next_if(continued) {
                text.push(' ');
                text += next.trim();
            }
            blocks.push(if item.is_some() { Block::Item(text) } else { Block::Paragraph(text) });
        }
    }
    blocks
}

fn starts_block(line: &str) -> bool {
    ["#", "    ", "```", "|", "- "].iter().any(|start| line.starts_with(start))
}

fn cells(row: &str) -> Vec<String> {
    row.trim().trim_matches('|').split('|').map(|cell| String::from(cell.trim())).collect()
}

/// Text in a line: code and bold text in bold, links as their text.
fn inline(text: &str) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some(at) = rest.find(['`', '*', '[']) {
        let (before, marked) = rest.split_at(at);
        out += &escape(before);
        let span = |open: &str, close: &str| marked.strip_prefix(open)?.split_once(close);
        if let Some((code, behind)) = span("`", "`") {
            out += &format!("\\fB{}\\fR", escape(code));
            rest = behind;
        } else if let Some((bold, behind)) = span("**", "**") {
            out += &format!("\\fB{}\\fR", escape(bold));
            rest = behind;
        } else if let Some((link, behind)) = span("[", "](").and_then(|(link, target)| {
            let (_, behind) = target.split_once(')')?;
            Some((link, behind))
        }) {
            out += &inline(link);
            rest = behind;
        } else {
            out += &escape(&marked[..1]);
            rest = &marked[1..];
        }
    }
    out + &escape(rest)
}

/// As [`inline`], but without any mark.
fn plain(text: &str) -> String {
    text.replace(['`', '*'], "")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_and_marks() {
        let text = "# Title\n\nSome `code-x` and\n**bold** [link](a.md#b).\n\n| a | b | c |\n|---|---|---|\n\
                    | `X` | one, `two` | y |\n\n- **NAME**: what\n  it does\n- plain\n\n    .code 'x'\n";
        assert_eq!(
            to_roff(without_title(text)),
            ".PP\nSome \\fBcode\\-x\\fR and \\fBbold\\fR link.\n\
             .TP\n\\fBX\\fR\none, \\fBtwo\\fR; c: y\n\
             .TP\n\\fBNAME\\fR\nwhat it does\n\
             .IP \\(bu 2\nplain\n\
             .PP\n.nf\n\\&.code \\(aqx\\(aq\n.fi\n"
        );
    }

    #[test]
    fn marks_without_an_end_are_text() {
        assert_eq!(inline("a `b * [c"), "a \\(gab * [c");
        assert_eq!(inline(""), "");
    }
}
