//! The use of GPU memory from which on a container counts as over its share: one rule for the device plugin's events, the
//! read API, the CLI and the alert `GpushareLimitOverrun`.

/// The percent of its share by which a container may exceed the share, for the rounding of shares and of the driver's pages, and
/// for processes that end while the driver lists them. The CUDA context of each process is part of the use.
pub const OVERRUN_TOLERANCE_PERCENT: u64 = 5;

/// Returns true if a container that uses `used` bytes exceeds its share of `given` bytes by more than the tolerance.
pub fn is_over_share(used: u64, given: u64) -> bool {
    // 128 bits, because percent times bytes may pass 64.
    u128::from(used) * 100 > u128::from(given) * u128::from(100 + OVERRUN_TOLERANCE_PERCENT)
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::is_over_share;

    #[rstest]
    #[case::at_the_share(100, 100, false)]
    #[case::at_the_tolerance(105, 100, false)]
    #[case::beyond_it(106, 100, true)]
    #[case::of_most(u64::MAX, u64::MAX - 1, false)]
    #[case::of_nothing(1, 0, true)]
    fn a_use_is_over_its_share_beyond_the_tolerance(
        #[case] used: u64,
        #[case] given: u64,
        #[case] expected: bool,
    ) {
        assert_eq!(is_over_share(used, given), expected);
    }
}
