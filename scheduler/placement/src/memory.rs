//! Device memory, exact to a hundredth of a byte.

use std::fmt;

const HUNDREDTHS: u64 = 100;

/// An amount of memory, kept in hundredths of a byte so that any whole percentage of a device is exact.
///
/// Arithmetic stops at the ends of the range (0 and about 160 PiB) instead of wrapping around.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Memory(u64);

impl Memory {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// The amount of so many bytes.
    pub const fn from_bytes(bytes: u64) -> Self {
        Self(bytes.saturating_mul(HUNDREDTHS))
    }

    /// The amount of so many hundredths of a byte.
    pub const fn from_hundredths(hundredths: u64) -> Self {
        Self(hundredths)
    }

    /// Hundredths of a byte.
    pub const fn hundredths(self) -> u64 {
        self.0
    }

    /// Whole bytes, rounded down.
    pub const fn bytes_floor(self) -> u64 {
        self.0 / HUNDREDTHS
    }

    /// Whole bytes, rounded up.
    pub const fn bytes_ceil(self) -> u64 {
        self.0.div_ceil(HUNDREDTHS)
    }

    /// So many percent of this amount; exact when this amount is a whole number of bytes.
    #[must_use]
    pub const fn percent(self, percent: u32) -> Self {
        // Lossless widening; `From` is not const.
        Self((self.0 / HUNDREDTHS).saturating_mul(percent as u64))
    }

    /// How many percent of `total` this amount is, rounded up; 0 if `total` is zero.
    pub fn percent_of(self, total: Self) -> u32 {
        let scaled = u128::from(self.0) * 100;
        let percent = if total.0 == 0 {
            0
        } else {
            scaled.div_ceil(u128::from(total.0))
        };
        u32::try_from(percent).unwrap_or(u32::MAX)
    }

    /// The sum, at most the largest amount there is.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// The difference, at least zero.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 % HUNDREDTHS {
            0 => write!(f, "{}", self.0 / HUNDREDTHS),
            rest => write!(f, "{}.{rest:02}", self.0 / HUNDREDTHS),
        }
    }
}
