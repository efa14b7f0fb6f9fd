//! Bytes as whole memory units: a GPU never shows more units used than it has, nor its pods more than are used of it.
//!
//! Pure. The answers carry the exact bytes beside the rounded numbers.

use std::cmp::Reverse;

/// Whole units of the used bytes of a GPU, rounded up, but not above the whole units of its total. A GPU that is overcommitted
/// shows that.
pub(super) fn used_units(used: u64, total: u64, unit: u64) -> u64 {
    let rounded_up = used.div_ceil(unit);
    if used <= total {
        rounded_up.min(total / unit)
    } else {
        rounded_up
    }
}

/// Whole units of pods that hold so many bytes each, of the `used` units of their GPU: rounded down, and the units that this
/// leaves go to the pods that have lost most by it.
pub(super) fn shares(bytes: &[u64], used: u64, unit: u64) -> Vec<u64> {
    let mut shares: Vec<u64> = bytes.iter().map(|bytes| bytes / unit).collect();
    let left = used.saturating_sub(shares.iter().sum());
    let mut losers: Vec<(u64, &mut u64)> = bytes
        .iter()
        .map(|bytes| bytes % unit)
        .zip(&mut shares)
        .filter(|(lost, _)| *lost > 0)
        .collect();
    losers.sort_by_key(|(lost, _)| Reverse(*lost));
    for (_, share) in losers
        .into_iter()
        .take(usize::try_from(left).unwrap_or(usize::MAX))
    {
        *share += 1;
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rstest::rstest;

    use super::*;

    /// A GPU of 159 bytes in units of 10.
    #[rstest]
    #[case::nothing(&[], 0, &[])]
    #[case::whole_units(&[20, 30], 5, &[2, 3])]
    #[case::one_byte(&[1], 1, &[1])]
    #[case::full_to_the_last_byte(&[159], 15, &[15])]
    #[case::full_by_thirds(&[53, 53, 53], 15, &[5, 5, 5])]
    #[case::the_largest_rest_first(&[12, 14, 19], 5, &[1, 2, 2])]
    #[case::overcommitted(&[159, 20], 18, &[16, 2])]
    fn rounded(#[case] bytes: &[u64], #[case] used: u64, #[case] expected: &[u64]) {
        let found = used_units(bytes.iter().sum(), 159, 10);
        assert_eq!((found, shares(bytes, found, 10).as_slice()), (used, expected));
    }

    proptest! {
        #[test]
        fn sums_never_exceed_what_there_is(unit in 1_u64..50, total in 0_u64..1000, parts in prop::collection::vec(0_u64..300, 0..8)) {
            let used: u64 = parts.iter().sum();
            let shown = used_units(used, total, unit);
            let shares = shares(&parts, shown, unit);
            prop_assert!(shares.iter().sum::<u64>() <= shown);
            prop_assert!(used > total || shown <= total / unit);
            prop_assert!(shown.abs_diff(used / unit) <= 1 && shares.iter().zip(&parts).all(|(share, part)| share.abs_diff(part / unit) <= 1));
        }
    }
}
