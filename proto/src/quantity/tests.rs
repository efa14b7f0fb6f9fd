//! Tables and properties of quantity parsing.

use proptest::prelude::*;
use rstest::rstest;

use super::Quantity;

#[rstest]
#[case::plain("8138", 8138)]
#[case::zero("0", 0)]
#[case::negative("-5", -5)]
#[case::plus("+5", 5)]
#[case::binary("16Gi", 16 << 30)]
#[case::binary_fraction("1.5Gi", 3 << 29)]
#[case::decimal("3G", 3_000_000_000)]
#[case::exa("1E", 1_000_000_000_000_000_000)]
#[case::exponent("1E3", 1_000)]
#[case::small_exponent("5000e-3", 5)]
#[case::milli("2000m", 2)]
#[case::leading_dot(".5k", 500)]
#[case::trailing_dot("5.", 5)]
#[case::many_zeros("1.000000000000000000000", 1)]
#[case::largest("9223372036854775807", i64::MAX)]
fn whole_quantities_are_read(#[case] text: &str, #[case] units: i64) {
    assert_eq!(text.parse::<Quantity>().unwrap().integer(), Some(units));
}

#[rstest]
#[case::empty("")]
#[case::only_suffix("Gi")]
#[case::only_sign("-")]
#[case::two_points("1.2.3")]
#[case::lower_case_suffix("1gi")]
#[case::space("1 Gi")]
#[case::unknown_suffix("1GiB")]
#[case::too_large("9223372036854775808")]
#[case::far_too_large("1e400")]
#[case::too_fine("0.0000000001")]
#[case::not_ascii("１")]
#[case::dot(".")]
#[case::hex("0x10")]
fn malformed_quantities_are_refused(#[case] text: &str) {
    assert!(text.parse::<Quantity>().is_err(), "{text:?}");
}

#[test]
fn a_fraction_is_not_an_integer() {
    assert_eq!("1500m".parse::<Quantity>().unwrap().integer(), None);
    assert_eq!("-1".parse::<Quantity>().unwrap().unsigned(), None);
}

#[rstest]
#[case("250m", 250)]
#[case("4", 4_000)]
#[case("1n", 1)]
#[case("-1500u", -1)]
#[case("16Gi", 17_179_869_184_000)]
fn thousandths_are_rounded_up(#[case] text: &str, #[case] thousandths: i128) {
    assert_eq!(text.parse::<Quantity>().unwrap().thousandths(), thousandths);
}

#[test]
fn quantities_are_read_from_strings_and_numbers() {
    let values: Vec<Quantity> = serde_json::from_str(r#"["16Gi", 100, 0.5]"#).unwrap();
    assert_eq!(
        serde_json::to_string(&values).unwrap(),
        r#"["16Gi","100","500m"]"#
    );
}

#[test]
fn the_smallest_number_is_printed_as_it_is_read() {
    let least = Quantity::from_integer(i64::MIN);
    assert_eq!(least.to_string().parse(), Ok(least));
}

proptest! {
    #[test]
    fn a_displayed_quantity_is_read_back(nanos in any::<i64>()) {
        let quantity = Quantity { nanos: i128::from(nanos) };
        prop_assert_eq!(quantity.to_string().parse::<Quantity>().unwrap(), quantity);
        let whole = Quantity::from_integer(nanos);
        prop_assert_eq!(whole.to_string().parse::<Quantity>().unwrap(), whole);
    }

    #[test]
    fn no_text_panics(text in "\\PC{0,40}") {
        let _ = text.parse::<Quantity>();
    }

    #[test]
    fn no_text_that_looks_like_a_number_panics(text in "[-+]?[0-9.]{0,50}[numkMGTPEei+\\-0-9]{0,6}") {
        let _ = text.parse::<Quantity>();
    }
}
