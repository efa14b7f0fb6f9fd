//! Amounts of memory in words for people: one form in events, refusals, tables and the read API.

use crate::memory_unit::{GIB, MIB};

/// An amount of memory: in GiB or MiB with at most one digit after the point, below 1 MiB in bytes, so that none reads as zero.
#[expect(clippy::cast_precision_loss, reason = "one digit is shown, to people")]
pub fn memory_text(bytes: u64) -> String {
    let (amount, unit) = match bytes {
        1 => return "1 byte".to_owned(),
        0..MIB => return format!("{bytes} bytes"),
        MIB..GIB => (bytes as f64 / MIB as f64, "MiB"),
        GIB.. => (bytes as f64 / GIB as f64, "GiB"),
    };
    let text = format!("{amount:.1}");
    format!("{} {unit}", text.strip_suffix(".0").unwrap_or(&text))
}

/// A number of memory units: with their size as in `20 GiB (20480 units of 1 MiB)`, or `20480 memory units` if `unit`, the bytes
/// of one, is not known or not the same everywhere.
pub fn units_text(units: u64, unit: Option<u64>) -> String {
    let noun = if units == 1 { "unit" } else { "units" };
    match unit.and_then(|unit| Some((unit, units.checked_mul(unit)?))) {
        Some((unit, bytes)) => format!("{} ({units} {noun} of {})", memory_text(bytes), memory_text(unit)),
        None => format!("{units} memory {noun}"),
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::{GIB, MIB, memory_text, units_text};

    #[rstest]
    #[case::nothing(0, "0 bytes")]
    #[case::one(1, "1 byte")]
    #[case::habit_of_another_project(8192, "8192 bytes")]
    #[case::just_below(MIB - 1, "1048575 bytes")]
    #[case::mebibytes(256 * MIB, "256 MiB")]
    #[case::part_of_a_mebibyte(MIB + MIB / 2, "1.5 MiB")]
    #[case::gibibytes(8 * GIB, "8 GiB")]
    #[case::part_of_a_gibibyte(143_771 * MIB, "140.4 GiB")]
    #[case::most(u64::MAX, "17179869184 GiB")]
    fn amounts(#[case] bytes: u64, #[case] expected: &str) {
        assert_eq!(memory_text(bytes), expected);
    }

    #[rstest]
    #[case::of_a_mebibyte(20_480, Some(MIB), "20 GiB (20480 units of 1 MiB)")]
    #[case::of_a_gibibyte(1, Some(GIB), "1 GiB (1 unit of 1 GiB)")]
    #[case::of_unknown_size(8, None, "8 memory units")]
    #[case::absurd(u64::MAX, Some(GIB), "18446744073709551615 memory units")]
    fn numbers_of_units(#[case] units: u64, #[case] unit: Option<u64>, #[case] expected: &str) {
        assert_eq!(units_text(units, unit), expected);
    }
}
