//! Conversions between whole amounts and fractions.

/// A part of a whole, from 0 to 1; 0 if the whole is 0.
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

/// An amount as a float.
pub fn real(amount: i64) -> f64 {
    portion(amount, 1)
}

/// A count as a float.
pub fn float(n: usize) -> f64 {
    i64::try_from(n).map_or(f64::INFINITY, real)
}

/// The greatest whole number at or below a number.
#[expect(clippy::cast_possible_truncation, reason = "scores and percents are small")]
pub fn floor(number: f64) -> i64 {
    number.floor() as i64
}
