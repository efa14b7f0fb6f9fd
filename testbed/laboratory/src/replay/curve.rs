//! Allocation and fragmentation as demand grows: averages by whole percent of the cluster's GPUs.

use std::collections::BTreeMap;

use serde::Serialize;

use super::portion::{floor, real};

#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
pub struct Point {
    pub offered: usize,
    pub allocated: f64,
    pub fragment: f64,
}

#[derive(Clone, Debug, Default)]
pub struct Curve(BTreeMap<usize, Bin>);

#[derive(Clone, Copy, Debug, Default)]
struct Bin {
    n_measured: i64,
    allocated: f64,
    fragment: f64,
}

impl Curve {
    /// Adds a measurement; all numbers are percents.
    pub fn add(&mut self, offered: f64, allocated: f64, fragment: f64) {
        let at = usize::try_from(floor(offered + 0.5)).unwrap_or(0);
        let bin = self.0.entry(at).or_default();
        bin.n_measured += 1;
        bin.allocated += allocated;
        bin.fragment += fragment;
    }

    /// The averages, by growing demand, where something was measured.
    pub fn points(&self) -> Vec<Point> {
        let averages = self.0.iter().map(|(offered, bin)| Point {
            offered: *offered,
            allocated: bin.allocated / real(bin.n_measured),
            fragment: bin.fragment / real(bin.n_measured),
        });
        averages.collect()
    }
}

/// The points, with one at every percentage up to `last`: a missing one repeats the point before it.
pub fn without_gaps(points: &[Point], last: usize) -> Vec<Point> {
    let mut filled: Vec<Point> = Vec::with_capacity(last + 1);
    for offered in 0..=last {
        let before = filled.last().copied().unwrap_or_default();
        let measured = points.iter().find(|point| point.offered == offered);
        filled.push(Point {
            offered,
            ..measured.copied().unwrap_or(before)
        });
    }
    filled
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn points_are_averaged_by_rounded_percent() {
        let mut curve = Curve::default();
        for (offered, allocated) in [(0.4, 0.0), (1.5, 10.0), (2.4, 20.0)] {
            curve.add(offered, allocated, 2.0 * allocated);
        }
        let point = |offered, allocated, fragment| Point {
            offered,
            allocated,
            fragment,
        };
        assert_eq!(curve.points(), [point(0, 0.0, 0.0), point(2, 15.0, 30.0)]);
        let filled = [
            point(0, 0.0, 0.0),
            point(1, 0.0, 0.0),
            point(2, 15.0, 30.0),
            point(3, 15.0, 30.0),
        ];
        assert_eq!(without_gaps(&curve.points(), 3), filled);
    }
}
