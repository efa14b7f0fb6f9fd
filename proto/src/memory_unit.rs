//! The size of one unit of `aliyun.com/gpu-mem`. Each node publishes its own in an annotation
//! ([`crate::resource::ResourceNames::memory_unit_annotation`]).

use std::fmt;
use std::str::FromStr;

use crate::excerpt::excerpt;
use crate::quantity::Quantity;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The size of one memory unit: a multiple of 1 MiB up to 1 TiB.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct MemoryUnit {
    bytes: u64,
}

impl MemoryUnit {
    /// The unit of one mebibyte (2^20 bytes).
    pub const MIB: Self = Self { bytes: MIB };
    /// The unit of one gibibyte (2^30 bytes), the default of the old gpushare plugin.
    pub const GIB: Self = Self { bytes: GIB };

    /// The unit of this size; `None` if it is no multiple of 1 MiB, is 0 or more than 1 TiB.
    pub fn from_bytes(bytes: u64) -> Option<Self> {
        // Of smaller units a GPU would have more, each with a device ID, than a message to kubelet holds; no GPU has 1 TiB.
        (bytes >= MIB && bytes.is_multiple_of(MIB) && bytes <= 1024 * GIB).then_some(Self { bytes })
    }

    /// The bytes of one unit.
    pub fn bytes(self) -> u64 {
        self.bytes
    }

    /// The number of whole units in an amount of bytes; the rest cannot be requested in this unit.
    pub fn units_in(self, bytes: u64) -> u64 {
        bytes / self.bytes
    }

    /// The bytes of a number of units; `None` if 64 bits do not hold them.
    pub fn bytes_of(self, units: u64) -> Option<u64> {
        self.bytes.checked_mul(units)
    }
}

impl FromStr for MemoryUnit {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let unit = match text {
            "MiB" => Some(Self::MIB),
            "GiB" => Some(Self::GIB),
            // A bare number would be bytes in Kubernetes and units to a reader, so a suffix is required.
            _ if !text.ends_with('i') => None,
            _ => {
                let quantity: Option<Quantity> = text.parse().ok();
                quantity.and_then(Quantity::unsigned).and_then(Self::from_bytes)
            }
        };
        let shown = excerpt(text);
        unit.ok_or_else(|| {
            format!("{shown:?} is no memory unit: write MiB, GiB or a quantity such as 256Mi (a whole number of MiB, at most 1Ti)")
        })
    }
}

impl fmt::Display for MemoryUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.bytes {
            // The values of the old gpushare plugin's flag, which its users know.
            MIB => f.write_str("MiB"),
            GIB => f.write_str("GiB"),
            bytes => Quantity::from_unsigned(bytes).fmt(f),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::MemoryUnit;

    #[rstest]
    #[case::mib("MiB", 1 << 20, "MiB")]
    #[case::gib("GiB", 1 << 30, "GiB")]
    #[case::quantity("256Mi", 256 << 20, "256Mi")]
    #[case::one_mi("1Mi", 1 << 20, "MiB")]
    #[case::one_gi("1Gi", 1 << 30, "GiB")]
    #[case::kibibytes("2048Ki", 2 << 20, "2Mi")]
    fn valid_units_are_read(#[case] text: &str, #[case] bytes: u64, #[case] shown: &str) {
        let unit: MemoryUnit = text.parse().unwrap();
        assert_eq!(unit.bytes(), bytes);
        assert_eq!(unit.to_string(), shown);
        assert_eq!(unit.to_string().parse::<MemoryUnit>().unwrap(), unit);
    }

    /// The old plugin took every unknown word for GiB.
    #[rstest]
    #[case::misspelt_gib("Gib")]
    #[case::misspelt_mib("Mib")]
    #[case::lower("gib")]
    #[case::bare_number("1024")]
    #[case::decimal("1G")]
    #[case::zero("0Mi")]
    #[case::negative("-1Mi")]
    #[case::half_a_mib("512Ki")]
    #[case::not_whole("1536Ki")]
    #[case::huge("2Ti")]
    #[case::empty("")]
    fn invalid_units_are_refused(#[case] text: &str) {
        let error = text.parse::<MemoryUnit>().unwrap_err();
        assert!(error.contains("write MiB, GiB or a quantity"), "{error}");
    }
}
