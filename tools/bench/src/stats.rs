//! Medians, and bootstrap intervals of them.

use crate::rng::Rng;

/// A median with its 95 % bootstrap interval.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Estimate {
    pub median: f64,
    pub low: f64,
    pub high: f64,
    /// How many values it was made of.
    pub n: usize,
}

/// The median of `values` (the mean of the middle two for an even number of them);
/// `None` when there are none.
pub(crate) fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_unstable_by(f64::total_cmp);
    let upper = *sorted.get(sorted.len() / 2)?;
    let lower = sorted[(sorted.len() - 1) / 2];
    Some(f64::midpoint(lower, upper))
}

/// The median of `values` and its percentile bootstrap interval. The values must be
/// independent of each other: one for each round, not one for each slice of it.
pub(crate) fn estimate(values: &[f64]) -> Option<Estimate> {
    const RESAMPLES: usize = 4000;
    let median_of_all = median(values)?;
    let mut rng = Rng::new(1);
    let mut medians: Vec<f64> = (0..RESAMPLES)
        .filter_map(|_| {
            let sample: Vec<f64> = values.iter().map(|_| values[rng.below(values.len())]).collect();
            median(&sample)
        })
        .collect();
    medians.sort_unstable_by(f64::total_cmp);
    Some(Estimate {
        median: median_of_all,
        low: medians[RESAMPLES / 40],
        high: medians[RESAMPLES - 1 - RESAMPLES / 40],
        n: values.len(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 4.0]), Some(4.0));
        assert_eq!(median(&[4.0, 1.0, 9.0, 2.0]), Some(3.0));
    }

    #[test]
    fn the_interval_holds_the_median_and_narrows_with_more_values() {
        let mut rng = Rng::new(2);
        let mut draw =
            |n: usize| -> Vec<f64> { (0..n).map(|_| rng.below(1000) as f64 / 1000.0).collect() };
        let few = estimate(&draw(8)).unwrap();
        let many = estimate(&draw(800)).unwrap();
        for e in [few, many] {
            assert!(e.low <= e.median && e.median <= e.high, "{e:?}");
        }
        assert!(many.high - many.low < (few.high - few.low) / 2.0, "{few:?} {many:?}");
        assert!(many.low < 0.5 && many.high > 0.45);
        assert_eq!(
            estimate(&[2.0, 2.0]).unwrap(),
            Estimate { median: 2.0, low: 2.0, high: 2.0, n: 2 }
        );
    }
}
