//! Medians, the speed of one series against another, and how sure it is.

/// How much faster one series is than another.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Speed {
    /// How likely differences so much to one side are if there is no true one (Wilcoxon's
    /// signed-rank test of the pairs, both sides).
    pub chance: f64,
    /// Above 1: faster.
    pub ratio: f64,
    /// Lower end of the 95 % interval.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

/// What a [`Speed`] means.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Verdict {
    /// Faster, and not by chance.
    Gain,
    /// Not faster by as much as can be told from noise.
    NoGain,
    /// Slower, and not by chance.
    Loss,
}

/// The fewest pairs for which the test can come to a verdict at 95 % confidence.
pub const FEWEST: u32 = 6;

/// The most pairs that are looked at; the exact test's work grows with their cube.
pub const MOST: u32 = 200;

/// Differences below this are not worth a word, however sure they are.
const SMALLEST: f64 = 0.005;

impl Speed {
    /// The verdict at 95 % confidence. The interval alone would be wrong too often: bootstrap
    /// intervals of few values are too narrow, so the pairs have to agree as well.
    #[must_use]
    pub fn verdict(&self) -> Verdict {
        let sure = self.chance <= 0.05;
        if sure && self.low > 1.0 && self.ratio >= 1.0 + SMALLEST {
            Verdict::Gain
        } else if sure && self.high < 1.0 && self.ratio <= 1.0 - SMALLEST {
            Verdict::Loss
        } else {
            Verdict::NoGain
        }
    }
}

/// The middle value, or the mean of the middle two; `None` of nothing.
#[must_use]
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    Some(f64::midpoint(sorted[(sorted.len() - 1) / 2], upper))
}

/// The ratio of the medians of two series of equal length, measured in pairs, with its 95 %
/// percentile bootstrap interval. Whole pairs are drawn, so that a slow phase of the machine,
/// which both halves of a pair saw, weighs on both. `None` when a series is empty or holds a
/// value that is not above zero.
#[must_use]
pub fn ratio(numerators: &[f64], denominators: &[f64]) -> Option<Speed> {
    ratio_by(10_000, numerators, denominators)
}

fn ratio_by(draws: usize, numerators: &[f64], denominators: &[f64]) -> Option<Speed> {
    let n = numerators.len().min(denominators.len());
    let (numerators, denominators) = (&numerators[..n], &denominators[..n]);
    if !numerators.iter().chain(denominators).all(|&value| value > 0.0) {
        return None;
    }
    let ratio = median(numerators)? / median(denominators)?;
    let mut random = Random(n as u64);
    let mut sample = (vec![0.0; n], vec![0.0; n]);
    let mut ratios: Vec<f64> = (0..draws)
        .filter_map(|_| {
            for i in 0..n {
                let pair = random.below(n);
                sample.0[i] = numerators[pair];
                sample.1[i] = denominators[pair];
            }
            Some(median(&sample.0)? / median(&sample.1)?)
        })
        .collect();
    ratios.sort_unstable_by(f64::total_cmp);
    let tail = draws / 40;
    let (low, high) = (*ratios.get(tail)?, *ratios.get(draws - 1 - tail)?);
    Some(Speed { chance: signed_rank(numerators, denominators), ratio, low, high })
}

/// The two-sided probability of Wilcoxon's signed-rank test, exact for up to
/// [`MOST`] pairs. The differences are those of the logarithms; equal pairs are left out.
fn signed_rank(one: &[f64], other: &[f64]) -> f64 {
    let mut differences: Vec<f64> = one.iter().zip(other).map(|(a, b)| (a / b).ln()).collect();
    differences.retain(|&difference| difference != 0.0);
    differences.truncate(MOST as usize);
    differences.sort_unstable_by(|a, b| a.abs().total_cmp(&b.abs()));
    // Twice the rank, so that the mean rank of equal ones is a whole number.
    let mut ranks = Vec::new();
    for group in differences.chunk_by(|a, b| a.abs() == b.abs()) {
        let before = ranks.len();
        ranks.extend(group.iter().map(|_| 2 * before + group.len() + 1));
    }
    let all: usize = ranks.iter().sum();
    let positive = ranks.iter().zip(&differences).filter(|(_, d)| **d > 0.0);
    let positive: usize = positive.map(|(rank, _)| rank).sum();
    // The share of all choices of signs that gives each sum of positive ranks.
    let mut shares = vec![0.0; all + 1];
    shares[0] = 1.0;
    let mut reached = 0;
    for rank in ranks {
        reached += rank;
        for sum in (0..=reached).rev() {
            let with = if sum >= rank { shares[sum - rank] } else { 0.0 };
            shares[sum] = f64::midpoint(shares[sum], with);
        }
    }
    let tail: f64 = shares[..=positive.min(all - positive)].iter().sum();
    (2.0 * tail).min(1.0)
}

/// SplitMix64: small, and the same in every run, so that the same figures give the same
/// interval.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^= mixed >> 31;
        usize::try_from((u128::from(mixed) * bound as u128) >> 64).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0, 1.0, 2.0]), Some(2.0));
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
    }

    #[test]
    fn a_clear_gain_and_a_clear_loss() {
        let slow = [1.10, 1.12, 1.09, 1.11, 1.13, 1.10, 1.11, 1.12];
        let fast = [1.00, 1.01, 0.99, 1.00, 1.02, 1.00, 1.01, 1.01];
        let gain = ratio(&slow, &fast).unwrap();
        assert!((gain.ratio - 1.1).abs() < 0.02 && gain.low > 1.08 && gain.high < 1.12, "{gain:?}");
        assert_eq!(gain.verdict(), Verdict::Gain);
        assert_eq!(ratio(&fast, &slow).unwrap().verdict(), Verdict::Loss);
    }

    #[test]
    fn noise_is_no_gain() {
        let one = [1.0, 1.3, 0.9, 1.1, 1.2, 0.8];
        let other = [1.1, 0.9, 1.2, 0.8, 1.0, 1.3];
        assert_eq!(ratio(&one, &other).unwrap().verdict(), Verdict::NoGain);
        // Sure, but not worth a word.
        let speed = ratio(&[1.001; 9], &[1.0; 9]).unwrap();
        assert!(speed.low > 1.0);
        assert_eq!(speed.verdict(), Verdict::NoGain);
    }

    #[test]
    fn pairs_cancel_what_the_machine_does_to_both() {
        let drift: Vec<f64> = (0..20).map(|i| 1.0 + f64::from(i) * 0.1).collect();
        let faster: Vec<f64> = drift.iter().map(|value| value / 1.05).collect();
        let speed = ratio(&drift, &faster).unwrap();
        assert!((speed.low - 1.05).abs() < 1e-9 && (speed.high - 1.05).abs() < 1e-9, "{speed:?}");
    }

    #[test]
    fn the_signed_rank_test_agrees_with_tables() {
        let pairs = |differences: &[f64]| {
            let one: Vec<f64> = differences.iter().map(|d| d.exp()).collect();
            signed_rank(&one, &vec![1.0; one.len()])
        };
        // All on one side: 2 / 2^n. Six is the fewest for 5 %.
        assert!((pairs(&[1.0, 2.0, 3.0, 4.0, 5.0]) - 0.0625).abs() < 1e-12);
        assert!((pairs(&[-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]) - 0.03125).abs() < 1e-12);
        // Critical value 8 for ten pairs at 5 %: P(W <= 8) = 25/1024, P(W <= 9) = 33/1024.
        let mut ten: Vec<f64> = (1..=10).map(f64::from).collect();
        ten[7] = -8.0;
        assert!((pairs(&ten) - 50.0 / 1024.0).abs() < 1e-12);
        (ten[7], ten[8]) = (8.0, -9.0);
        assert!((pairs(&ten) - 66.0 / 1024.0).abs() < 1e-12);
        assert!((pairs(&[1.0, -1.0]) - 1.0).abs() < 1e-12);
        assert!((pairs(&[0.0, 0.0]) - 1.0).abs() < 1e-12);
        assert!(pairs(&[0.5; MOST as usize]) < 1e-9);
    }

    #[test]
    fn no_gain_is_found_where_there_is_none() {
        // Two series from the same skewed distribution: at most 5 % false alarms (with room
        // for the luck of 400 draws).
        let mut random = Random(7);
        let mut draw = || {
            let long = if random.below(5) == 0 { 1.0 } else { 0.0 };
            1.0 + random.below(1000) as f64 / 2000.0 + long
        };
        let mut alarms = 0;
        for _ in 0..400 {
            let (one, other): (Vec<f64>, Vec<f64>) = (0..6).map(|_| (draw(), draw())).unzip();
            alarms += u32::from(ratio_by(400, &one, &other).unwrap().verdict() != Verdict::NoGain);
        }
        assert!(alarms <= 28, "{alarms} of 400");
    }

    #[test]
    fn nothing_to_compare() {
        assert_eq!(ratio(&[], &[]), None);
        assert_eq!(ratio(&[0.0], &[1.0]), None);
        assert_eq!(ratio(&[1.0], &[f64::NAN]), None);
    }

    proptest! {
        #[test]
        fn the_interval_holds_its_order(
            pairs in proptest::collection::vec((0.1f64..10.0, 0.1f64..10.0), 1..12)
        ) {
            let (a, b): (Vec<f64>, Vec<f64>) = pairs.into_iter().unzip();
            let speed = ratio_by(400, &a, &b).unwrap();
            prop_assert!(speed.low <= speed.high && speed.low > 0.0);
        }
    }
}
