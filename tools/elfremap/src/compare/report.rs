//! What `elfremap compare` found, as JSON and as text.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::process::ExitStatus;

use serde::Serialize;

use super::counters::Counts;
use super::measure::Cost;
use super::stats::{self, Verdict};
use super::variant::Variant;
use crate::exit::Status;
use crate::output::{self, Style, counted};

/// One run.
#[derive(Serialize, Clone, Debug)]
pub(crate) struct Run {
    /// What is compared: seconds, or the load's rate.
    pub(crate) value: f64,
    #[serde(flatten)]
    pub(crate) cost: Cost,
    #[serde(flatten)]
    pub(crate) counts: Counts,
    #[serde(skip)]
    pub(crate) status: ExitStatus,
}

/// The runs of one variant.
#[derive(Serialize, Debug)]
pub(crate) struct Series {
    pub(crate) name: String,
    pub(crate) environment: BTreeMap<&'static str, &'static str>,
    #[serde(skip)]
    pub(crate) variant: Variant,
    /// How the program ends.
    #[serde(skip)]
    pub(crate) status: Option<ExitStatus>,
    /// What the preload said it did.
    pub(crate) preload: Vec<String>,
    pub(crate) median: f64,
    #[serde(flatten)]
    pub(crate) speed: Option<SpeedEntry>,
    pub(crate) runs: Vec<Run>,
}

#[derive(Serialize, Clone, Copy, Debug)]
pub(crate) struct SpeedEntry {
    pub(crate) speed: f64,
    pub(crate) speed_low: f64,
    pub(crate) speed_high: f64,
    /// Probability of differences so much to one side by chance alone.
    pub(crate) chance: f64,
    pub(crate) verdict: &'static str,
}

/// What the command prints. Field by field, this is the JSON schema.
#[derive(Serialize, Debug)]
pub(crate) struct Report {
    pub(crate) schema: u32,
    pub(crate) command: Vec<String>,
    pub(crate) rounds: usize,
    /// `time` or `cpu`, both in seconds, or `rate`.
    pub(crate) metric: &'static str,
    /// Why there are no hardware counters.
    pub(crate) no_counters: Option<String>,
    pub(crate) variants: Vec<Series>,
}

impl Series {
    pub(crate) fn new(variant: &Variant) -> Self {
        Self {
            name: variant.name.clone(),
            environment: variant.variables.iter().copied().collect(),
            variant: variant.clone(),
            status: None,
            preload: Vec::new(),
            median: 0.0,
            speed: None,
            runs: Vec::new(),
        }
    }

    fn values(&self) -> Vec<f64> {
        self.runs.iter().map(|run| run.value).collect()
    }

    fn median_of(&self, of: impl Fn(&Run) -> Option<f64>) -> Option<f64> {
        let values: Option<Vec<_>> = self.runs.iter().map(of).collect();
        stats::median(&values?)
    }
}

impl Report {
    /// The report on `variants`, of which the plain program is the first; `metric` is `rate` when
    /// more is better.
    pub(crate) fn new(
        command: Vec<String>,
        metric: &'static str,
        mut variants: Vec<Series>,
        no_counters: Option<String>,
    ) -> Self {
        for series in &mut variants {
            series.median = stats::median(&series.values()).unwrap_or(0.0);
        }
        let mut rounds = 0;
        if let [plain, others @ ..] = &mut variants[..] {
            rounds = plain.runs.len();
            let plain = plain.values();
            for series in others {
                let values = series.values();
                let speed = match metric {
                    "rate" => stats::ratio(&values, &plain),
                    _ => stats::ratio(&plain, &values),
                };
                series.speed = speed.map(|speed| SpeedEntry {
                    speed: speed.ratio,
                    speed_low: speed.low,
                    speed_high: speed.high,
                    chance: speed.chance,
                    verdict: word(speed.verdict()),
                });
            }
        }
        Self { schema: 1, command, rounds, metric, no_counters, variants }
    }

    pub(crate) fn status(&self) -> Status {
        let gain = |series: &Series| series.speed.is_some_and(|speed| speed.verdict == "gain");
        if self.variants.iter().any(gain) { Status::Done } else { Status::Negative }
    }

    pub(crate) fn text(&self, style: Style) -> String {
        let is_rate = self.metric == "rate";
        let heading = format!(
            "{:<14}{:>9} {:>10} {:>10} {:>10}  {:>6}  95 % interval",
            counted(self.rounds as u64, "round"),
            self.metric,
            "user",
            "system",
            "faults",
            "speed",
        );
        let mut text = style.bold(&heading) + "\n";
        for series in &self.variants {
            let median = |of: fn(&Run) -> f64| series.median_of(|run| Some(of(run))).unwrap_or(0.0);
            let value = if is_rate { format!("{:.1}", series.median) } else { time(series.median) };
            let _ = write!(
                text,
                "{:<14}{value:>9} {:>10} {:>10} {:>10.0}",
                series.name,
                time(median(|run| run.cost.user_seconds)),
                time(median(|run| run.cost.system_seconds)),
                median(|run| run.cost.minor_faults as f64 + run.cost.major_faults as f64),
            );
            match series.speed {
                Some(SpeedEntry { speed, speed_low, speed_high, .. }) => {
                    let _ = writeln!(text, "  {speed:>6.3}  {speed_low:.3} .. {speed_high:.3}");
                }
                None => text += "\n",
            }
        }
        text += "\n";
        match &self.no_counters {
            Some(reason) => {
                let _ = writeln!(text, "TLB misses: not counted, {reason}");
            }
            None => self.counts(&mut text, style),
        }
        for series in &self.variants {
            for line in series.preload.iter().take(3) {
                text += &output::wrapped(&format!("{}: {line}", series.name), 80);
            }
            if series.variant.preload && series.preload.is_empty() {
                let name = &series.name;
                let _ = writeln!(text, "{name}: the preload said nothing: was it loaded?");
            }
        }
        for series in &self.variants {
            if let Some(speed) = series.speed {
                let line = sentence(&series.name, speed);
                text += &match speed.verdict {
                    "gain" => style.green(&line),
                    "loss" => style.red(&line),
                    _ => style.yellow(&line),
                };
                text += "\n";
            }
        }
        text
    }

    pub(crate) fn counts(&self, text: &mut String, style: Style) {
        let heading = format!(
            "{:<14}{:>14} {:>14} {:>14} {:>14}",
            "in user space", "instructions", "cycles", "iTLB misses", "dTLB misses"
        );
        let _ = writeln!(text, "{}", style.bold(&heading));
        for series in &self.variants {
            let count = |of: fn(&Counts) -> Option<f64>| {
                let median = series.median_of(|run| of(&run.counts));
                median.map_or(String::from("-"), |count| format!("{count:.4e}"))
            };
            let _ = writeln!(
                text,
                "{:<14}{:>14} {:>14} {:>14} {:>14}",
                series.name,
                count(|counts| counts.instructions),
                count(|counts| counts.cycles),
                count(|counts| counts.itlb_misses),
                count(|counts| counts.dtlb_misses),
            );
        }
    }
}

fn word(verdict: Verdict) -> &'static str {
    match verdict {
        Verdict::Gain => "gain",
        Verdict::NoGain => "no gain",
        Verdict::Loss => "loss",
    }
}

fn sentence(name: &str, speed: SpeedEntry) -> String {
    let percent = |ratio: f64| (ratio - 1.0) * 100.0;
    let SpeedEntry { speed, speed_low, speed_high, verdict, .. } = speed;
    match verdict {
        "gain" => format!(
            "gain: {name} is {:.1} % faster (95 % sure: {:.1} to {:.1} %)",
            percent(speed),
            percent(speed_low),
            percent(speed_high)
        ),
        "loss" => format!(
            "loss: {name} is {:.1} % slower (95 % sure: {:.1} to {:.1} %)",
            -percent(speed),
            -percent(speed_high),
            -percent(speed_low)
        ),
        _ => format!(
            "no gain: {name} is within chance of plain ({:+.1} %, 95 % sure: {:+.1} to {:+.1} %)",
            percent(speed),
            percent(speed_low),
            percent(speed_high)
        ),
    }
}

/// A time with about four figures.
fn time(seconds: f64) -> String {
    match seconds {
        s if s >= 100.0 => format!("{s:.0} s"),
        s if s >= 10.0 => format!("{s:.1} s"),
        s if s >= 1.0 => format!("{s:.3} s"),
        s if s >= 0.1 => format!("{:.0} ms", s * 1e3),
        s => format!("{:.1} ms", s * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times() {
        for (seconds, text) in [
            (123.4, "123 s"),
            (12.34, "12.3 s"),
            (1.2345, "1.234 s"),
            (0.1, "100 ms"),
            (0.0, "0.0 ms"),
        ] {
            assert_eq!(time(seconds), text);
        }
    }
}
