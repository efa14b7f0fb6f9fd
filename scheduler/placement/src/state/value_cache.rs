//! The value of a node and its unusable idle capacity by one workload model, kept until the node changes.

use std::sync::atomic::{AtomicU64, Ordering};

/// Bits of the value, and of the unusable capacity: [`MAX_GPUS`](crate::choice::simulate::MAX_GPUS) GPUs in thousandths, for each
/// simulated sequence.
const BITS: u32 = 20;
const MASK: u32 = (1 << BITS) - 1;

/// A value by the model that was asked for last, which readers share without locks.
///
/// The word has the model's number in its upper bits, plus one, which repeats after 16 million models; 0 is no value.
#[derive(Debug, Default)]
pub(crate) struct ValueCache(AtomicU64);

impl ValueCache {
    /// The value and the unusable capacity by the model of this number.
    pub(crate) fn get_or_compute(&self, model: u64, compute: impl FnOnce() -> (u32, u32)) -> (u32, u32) {
        let number = (model + 1) << (2 * BITS);
        let cached = self.0.load(Ordering::Relaxed);
        if cached >> (2 * BITS) == number >> (2 * BITS) {
            let part = |bits: u64| u32::try_from(bits & u64::from(MASK)).unwrap_or(0);
            return (part(cached >> BITS), part(cached));
        }
        let (value, unusable) = compute();
        // No more than the bits hold, since the GPUs that count are limited.
        if value <= MASK && unusable <= MASK {
            let word = number | u64::from(value) << BITS | u64::from(unusable);
            self.0.store(word, Ordering::Relaxed);
        }
        (value, unusable)
    }

    /// Drops the values, for a change of the node.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_counts_for_its_model_until_the_node_changes() {
        let mut values = ValueCache::default();
        let most = (MASK, MASK);
        assert_eq!(values.get_or_compute(0, || most), most);
        assert_eq!(values.get_or_compute(0, || (0, 0)), most);
        assert_eq!(values.get_or_compute(1, || (1, 2)), (1, 2));
        assert_eq!(values.get_or_compute(1, || (0, 0)), (1, 2));
        // The other model's took the place of the first.
        assert_eq!(values.get_or_compute(0, || (5, 6)), (5, 6));
        values.clear();
        assert_eq!(values.get_or_compute(0, || (7, 8)), (7, 8));
    }
}
