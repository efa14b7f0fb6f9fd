//! Kubernetes quantities (`"16Gi"`, `"1e3"`, `100`), parsed exactly.
//!
//! Holds no floating point: a value is a whole number of nano-units. Finer values, which Kubernetes rounds up, are refused.

use std::fmt;
use std::str::FromStr;

use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::excerpt::excerpt;

const NANOS: i128 = 1_000_000_000;

/// An exact quantity, from -2^63 to 2^63 - 1 units in steps of 10^-9. Compares by value, and displays in the shortest exact form.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Quantity {
    nanos: i128,
}

impl Quantity {
    /// The quantity of a whole number of units.
    pub fn from_integer(units: i64) -> Self {
        Self {
            nanos: i128::from(units) * NANOS,
        }
    }

    /// The quantity of a whole, unsigned number of units; 2^63 - 1 for larger numbers.
    pub fn from_unsigned(units: u64) -> Self {
        Self::from_integer(i64::try_from(units).unwrap_or(i64::MAX))
    }

    /// The value in units; `None` if the value is not a whole number.
    pub fn integer(self) -> Option<i64> {
        if self.nanos % NANOS != 0 {
            return None;
        }
        i64::try_from(self.nanos / NANOS).ok()
    }

    /// The value in thousandths of a unit, rounded up as Kubernetes does.
    pub fn thousandths(self) -> i128 {
        // Euclidean division rounds down for negative values too.
        self.nanos.div_euclid(NANOS / 1000) + i128::from(self.nanos.rem_euclid(NANOS / 1000) != 0)
    }

    /// The value in units; `None` if the value is negative or not a whole number.
    pub fn unsigned(self) -> Option<u64> {
        u64::try_from(self.integer()?).ok()
    }
}

impl FromStr for Quantity {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let fail = |rule| format!("{:?} is not a quantity: {rule}", excerpt(text));
        let unsigned = text.strip_prefix(['-', '+']).unwrap_or(text);
        let is_of_suffix = |c: char| !c.is_ascii_digit() && c != '.';
        let number_len = unsigned.find(is_of_suffix).unwrap_or(unsigned.len());
        let (number, suffix) = unsigned.split_at(number_len);
        let scale = Scale::parse(suffix).ok_or_else(|| {
            fail("the suffix is none of n u m k M G T P E Ki Mi Gi Ti Pi Ei or an exponent")
        })?;
        let nanos = scale.nanos_of(number).map_err(fail)?;
        // Kubernetes holds quantities in 64 bits; larger ones would wrap in its components.
        let nanos = if text.starts_with('-') { -nanos } else { nanos };
        let (least, most) = (i128::from(i64::MIN) * NANOS, i128::from(i64::MAX) * NANOS);
        if nanos < least || nanos > most {
            return Err(fail("the value is out of range"));
        }
        Ok(Self { nanos })
    }
}

/// The factor of a suffix: a power of ten or a power of 1024.
enum Scale {
    Decimal(i32),
    Binary(u32),
}

impl Scale {
    /// The factor of a suffix such as `Gi`, `m` or `e3`; `None` for a suffix that Kubernetes does not know.
    fn parse(suffix: &str) -> Option<Self> {
        Some(match suffix {
            "n" => Self::Decimal(-9),
            "u" => Self::Decimal(-6),
            "m" => Self::Decimal(-3),
            // No `K`: Kubernetes has no such suffix.
            "" => Self::Decimal(0),
            "k" => Self::Decimal(3),
            "M" => Self::Decimal(6),
            "G" => Self::Decimal(9),
            "T" => Self::Decimal(12),
            "P" => Self::Decimal(15),
            "E" => Self::Decimal(18),
            "Ki" => Self::Binary(1),
            "Mi" => Self::Binary(2),
            "Gi" => Self::Binary(3),
            "Ti" => Self::Binary(4),
            "Pi" => Self::Binary(5),
            "Ei" => Self::Binary(6),
            exponent => {
                let power: i32 = exponent.strip_prefix(['e', 'E'])?.parse().ok()?;
                // Any other power is out of range for every number but 0.
                return (-40..=40).contains(&power).then_some(Self::Decimal(power));
            }
        })
    }

    /// The digits of a quantity times the factor, in nano-units; else the rule that they break.
    fn nanos_of(&self, number: &str) -> Result<i128, &'static str> {
        const RANGE: &str = "the value is out of range";
        const FINE: &str = "the value is finer than a billionth";
        let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
        if whole.is_empty() && fraction.is_empty() {
            return Err("there is no number in front of the suffix");
        }
        if fraction.contains('.') {
            return Err("there is more than one decimal point");
        }
        // Trailing zeros carry no value, and must not make a quantity too fine.
        let fraction = fraction.trim_end_matches('0');
        // The zero in front stands for a whole part that is left out, as in `.5`.
        let digits: i128 = format!("0{whole}{fraction}").parse().map_err(|_| RANGE)?;
        // The digits count units of 10^-(number of digits after the point), the result nano-units.
        let mut power = 9 - i32::try_from(fraction.len()).map_err(|_| FINE)?;
        let mut value = digits;
        match *self {
            Self::Decimal(ten) => power += ten,
            Self::Binary(times) => value = value.checked_mul(1024_i128.pow(times)).ok_or(RANGE)?,
        }
        // A zero has no digits to lose, whatever its exponent.
        if value == 0 {
            return Ok(0);
        }
        // More digits after the point than 128 bits hold are finer than a billionth, too.
        let factor = 10_i128
            .checked_pow(power.unsigned_abs())
            .ok_or(if power < 0 { FINE } else { RANGE })?;
        if power >= 0 {
            return value.checked_mul(factor).ok_or(RANGE);
        }
        if value % factor == 0 {
            Ok(value / factor)
        } else {
            Err(FINE)
        }
    }
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.nanos % NANOS == 0 {
            let units = self.nanos / NANOS;
            // Binary suffixes: memory is what people read here, and 100 has no shorter decimal form.
            for (bits, suffix) in [
                (60, "Ei"),
                (50, "Pi"),
                (40, "Ti"),
                (30, "Gi"),
                (20, "Mi"),
                (10, "Ki"),
            ] {
                if units != 0 && units % (1 << bits) == 0 {
                    return write!(f, "{}{suffix}", units >> bits);
                }
            }
            return write!(f, "{units}");
        }
        for (nanos, suffix) in [(1_000_000, "m"), (1_000, "u")] {
            if self.nanos % nanos == 0 {
                return write!(f, "{}{suffix}", self.nanos / nanos);
            }
        }
        write!(f, "{}n", self.nanos)
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(QuantityVisitor)
    }
}

/// Accepts a string or, as Kubernetes does, a bare number.
struct QuantityVisitor;

impl Visitor<'_> for QuantityVisitor {
    type Value = Quantity;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a quantity such as \"16Gi\" or 100")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Quantity, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_i64<E: de::Error>(self, units: i64) -> Result<Quantity, E> {
        Ok(Quantity::from_integer(units))
    }

    fn visit_u64<E: de::Error>(self, units: u64) -> Result<Quantity, E> {
        match i64::try_from(units) {
            Ok(units) => self.visit_i64(units),
            // Out of range: the error names the number.
            Err(_) => self.visit_str(&units.to_string()),
        }
    }

    fn visit_f64<E: de::Error>(self, units: f64) -> Result<Quantity, E> {
        // The shortest text that reads back as the number is the one that the manifest had.
        units.to_string().parse().map_err(E::custom)
    }
}

impl schemars::JsonSchema for Quantity {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Quantity".into()
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            // The pattern that Kubernetes publishes for `resource.Quantity`.
            "x-kubernetes-int-or-string": true,
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$"
        })
    }
}

#[cfg(test)]
mod tests;
