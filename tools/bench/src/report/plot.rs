//! A plot of medians with their intervals, one line for each.

use crate::stats::Estimate;
use std::fmt::Write as _;

/// Estimates on one axis.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Plot {
    pub title: String,
    /// What the axis shows.
    pub axis: String,
    /// Where a line is drawn for comparison, and what it means.
    pub reference: (f64, &'static str),
    /// Label and estimate, in order; an empty label starts a new group.
    pub rows: Vec<(String, Option<Estimate>)>,
}

const WIDTH: f64 = 760.0;
const LEFT: f64 = 270.0;
const RIGHT: f64 = 120.0;
const TOP: f64 = 54.0;
const ROW: f64 = 20.0;

impl Plot {
    /// The plot as an SVG document.
    pub(super) fn svg(&self) -> String {
        let values = || {
            let rows = self.rows.iter().filter_map(|(_, estimate)| *estimate);
            rows.flat_map(|e| [e.low, e.high]).chain([self.reference.0])
        };
        let low = values().fold(f64::INFINITY, f64::min);
        let high = values().fold(f64::NEG_INFINITY, f64::max);
        let step = step(high - low);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        let x = |value: f64| LEFT + (value - low) / (high - low) * (WIDTH - LEFT - RIGHT);
        let bottom = TOP + ROW * self.rows.len() as f64;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {}\" \
             font-family=\"sans-serif\" font-size=\"12\" fill=\"#222\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"#fff\"/>\n\
             <text x=\"12\" y=\"22\" font-size=\"15\" font-weight=\"bold\">{}</text>\n",
            bottom + 40.0,
            escape(&self.title)
        );
        let mut tick = low;
        while tick < high + step / 2.0 {
            let _ = writeln!(
                out,
                "<line x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
                 <text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"middle\">{tick:.2}</text>",
                x(tick),
                bottom + 15.0
            );
            tick += step;
        }
        let _ = writeln!(
            out,
            "<line x1=\"{0:.1}\" y1=\"{TOP}\" x2=\"{0:.1}\" y2=\"{bottom}\" stroke=\"#c33\"/>\
             <text x=\"{0:.1}\" y=\"{1}\" text-anchor=\"middle\" fill=\"#c33\">{2}</text>\n\
             <text x=\"{3:.1}\" y=\"{4}\" text-anchor=\"middle\">{5}</text>",
            x(self.reference.0),
            TOP - 6.0,
            escape(self.reference.1),
            (LEFT + WIDTH - RIGHT) / 2.0,
            bottom + 32.0,
            escape(&self.axis)
        );
        for (index, (label, estimate)) in self.rows.iter().enumerate() {
            let y = TOP + ROW * (index as f64 + 0.5);
            let Some(e) = estimate else {
                let _ = writeln!(
                    out,
                    "<text x=\"12\" y=\"{:.1}\" font-weight=\"bold\">{}</text>",
                    y + 4.0,
                    escape(label)
                );
                continue;
            };
            let _ = writeln!(
                out,
                "<text x=\"24\" y=\"{0:.1}\">{label}</text>\
                 <line x1=\"{1:.1}\" y1=\"{y:.1}\" x2=\"{2:.1}\" y2=\"{y:.1}\" stroke=\"#36c\" stroke-width=\"3\"/>\
                 <circle cx=\"{3:.1}\" cy=\"{y:.1}\" r=\"4\" fill=\"#36c\"/>\
                 <text x=\"{4:.1}\" y=\"{0:.1}\" text-anchor=\"end\">{5:.3}</text>",
                y + 4.0,
                x(e.low),
                x(e.high),
                x(e.median),
                WIDTH - 24.0,
                e.median,
                label = escape(label)
            );
        }
        out.push_str("</svg>\n");
        out
    }
}

/// A round distance of ticks for an axis of `span`: 5 to 12 of them.
fn step(span: f64) -> f64 {
    let rough = (span / 6.0).max(1e-3);
    let power = 10f64.powf(rough.log10().floor());
    let factor = [1.0, 2.0, 5.0].into_iter().find(|factor| factor * power >= rough);
    factor.unwrap_or(10.0) * power
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_are_round_and_few() {
        for span in [0.01, 0.1, 0.34, 1.0, 7.0, 123.0] {
            let ticks = span / step(span);
            assert!((2.0..=7.0).contains(&ticks), "{span}: {ticks}");
        }
    }

    #[test]
    fn every_row_is_drawn_inside_the_picture() {
        let estimate = Estimate { median: 0.8, low: 0.7, high: 0.9, n: 5 };
        let rows = vec![("a <group>".into(), None), ("one".into(), Some(estimate))];
        let plot = Plot { title: "t".into(), axis: "a".into(), reference: (1.0, "plain"), rows };
        let svg = plot.svg();
        assert!(svg.contains("a &lt;group&gt;") && svg.contains(">one<"));
        let circle = svg.split("cx=\"").nth(1).unwrap().split('"').next().unwrap();
        let x: f64 = circle.parse().unwrap();
        assert!((LEFT..WIDTH - RIGHT).contains(&x), "{x}");
    }
}
