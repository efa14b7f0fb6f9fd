//! Whole amounts as parts of others.

/// A part of a whole; nothing of nothing.
#[expect(
    clippy::cast_precision_loss,
    reason = "amounts of a cluster are far below 2^52"
)]
pub fn portion(part: i64, whole: i64) -> f64 {
    if whole == 0 {
        0.0
    } else {
        part as f64 / whole as f64
    }
}

/// A part of a whole in percent.
pub fn percent(part: i64, whole: i64) -> f64 {
    100.0 * portion(part, whole)
}

/// An amount, to calculate with.
pub fn real(amount: i64) -> f64 {
    portion(amount, 1)
}

/// The whole number below or at a number.
#[expect(clippy::cast_possible_truncation, reason = "scores and percents are small")]
pub fn floor(number: f64) -> i64 {
    number.floor() as i64
}
