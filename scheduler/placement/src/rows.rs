//! The dense rows of one node, kept inside the node itself where there are few, so that a filter over many nodes reads
//! memory in order.

use std::ops::{Deref, DerefMut};

use crate::amounts::Amounts;

/// Most rows that are kept in place; nodes rarely have more GPUs.
const N_IN_PLACE: usize = 8;

/// A device as requests see it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Row {
    /// What a new share may take: nothing if the device is sick.
    pub(crate) free: Amounts,
    /// What the device has, sick or not.
    pub(crate) total: Amounts,
}

/// A slice of rows of a length that rarely changes.
#[derive(Debug, Default)]
pub(crate) struct Rows {
    n: usize,
    in_place: [Row; N_IN_PLACE],
    /// All rows, if they are too many to be kept in place.
    elsewhere: Box<[Row]>,
}

impl Rows {
    /// Makes room for so many rows, whose contents are then anything.
    pub(crate) fn resize(&mut self, n: usize) {
        if n != self.n {
            self.elsewhere = if n > N_IN_PLACE {
                vec![Row::default(); n].into()
            } else {
                Box::default()
            };
            self.n = n;
        }
    }
}

impl Deref for Rows {
    type Target = [Row];

    #[inline]
    fn deref(&self) -> &[Row] {
        self.in_place.get(..self.n).unwrap_or(&self.elsewhere)
    }
}

impl DerefMut for Rows {
    fn deref_mut(&mut self) -> &mut [Row] {
        self.in_place.get_mut(..self.n).unwrap_or(&mut self.elsewhere)
    }
}
