//! A small generator of pseudo-random numbers (SplitMix64): the generated programs
//! and the bootstrap must come out the same for the same seed, on every machine
//! and with every version of every crate.

/// SplitMix64 with its whole state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `bound` (which must not be 0). The bias of the multiply-shift
    /// is below `bound` / 2^64.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let wide = u128::from(self.next()) * bound as u128;
        usize::try_from(wide >> 64).unwrap_or_default()
    }

    /// Puts `items` into random order (Fisher and Yates).
    pub(crate) fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn same_seed_same_order_and_nothing_lost() {
        let mut one: Vec<u32> = (0..1000).collect();
        let mut two = one.clone();
        Rng::new(7).shuffle(&mut one);
        Rng::new(7).shuffle(&mut two);
        assert_eq!(one, two);
        assert_ne!(one[..10], [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]);
        one.sort_unstable();
        assert!(one.iter().copied().eq(0..1000));
    }

    #[test]
    fn below_reaches_every_value() {
        let mut rng = Rng::new(1);
        let mut seen = [0u32; 6];
        for _ in 0..6000 {
            seen[rng.below(6)] += 1;
        }
        assert!(seen.iter().all(|&n| (800..1200).contains(&n)), "{seen:?}");
    }
}
