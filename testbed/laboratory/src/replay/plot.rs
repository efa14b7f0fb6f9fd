//! Plots of replays: curves over offered demand, a panel for each condition, and bars of the unallocated GPUs.

use anyhow::Result;

use super::portion::float;
use super::summary::{AllocationSpread, Summary};
use crate::plot::{self, Axis, BarPanel, Curve, CurvePanel};

/// Curves begin where this part of the greatest demand is offered: before that all policies place everything.
const CURVES_FROM: f64 = 0.6;
const OFFERED: &str = "GPUs asked for, % of all";

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlottedValue {
    Allocated,
    /// Idle GPUs that typical pods could not use.
    Fragment,
}

impl PlottedValue {
    fn of(self, spread: &AllocationSpread) -> (f64, f64) {
        match self {
            Self::Allocated => (spread.allocated, spread.allocated_sd),
            Self::Fragment => (spread.fragment, spread.fragment_sd),
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Allocated => "GPUs allocated, %",
            Self::Fragment => "GPUs idle that typical pods cannot use, %",
        }
    }
}

/// Curves of all policies over offered demand, a panel for each condition, with their standard deviation as a shade.
pub fn curves(title: &str, measure: PlottedValue, summaries: &[&Summary]) -> Result<String> {
    let (conditions, policies) = heads(summaries);
    let points = || summaries.iter().flat_map(|summary| &summary.curve);
    let mut last: f64 = 1.0;
    for spread in points() {
        last = last.max(float(spread.offered));
    }
    let first = (last * CURVES_FROM / 10.0).floor() * 10.0;
    let (mut lowest, mut highest): (f64, f64) = (100.0, 1.0);
    for spread in points().filter(|spread| float(spread.offered) >= first) {
        let (mean, deviation) = measure.of(spread);
        lowest = lowest.min(mean - deviation).max(0.0);
        highest = highest.max(mean + deviation).min(100.0);
    }
    let mut panels = Vec::new();
    for condition in &conditions {
        let mut curves = vec![Curve::default(); policies.len()];
        for (summary, curve) in of_policies(summaries, condition, &policies)
            .into_iter()
            .zip(&mut curves)
        {
            for spread in summary.iter().flat_map(|summary| &summary.curve) {
                let (mean, deviation) = measure.of(spread);
                if float(spread.offered) >= first {
                    curve.points.push((float(spread.offered), mean));
                    curve.deviations.push(deviation);
                }
            }
        }
        panels.push(CurvePanel {
            heading: format!("condition {condition}"),
            x: Axis::Linear(first..last),
            y: Axis::Linear(lowest..highest),
            curves,
        });
    }
    plot::curves(title, (OFFERED, measure.label()), &policies, &panels)
}

/// Bars of the GPUs that stay unallocated at a percentage of offered demand, a panel for each condition; shorter is better.
pub fn bars(title: &str, offered: usize, summaries: &[&Summary]) -> Result<String> {
    let (conditions, policies) = heads(summaries);
    let x_label = format!("GPUs unallocated at {offered} % offered, % (shorter is better)");
    let mut panels = Vec::new();
    for condition in &conditions {
        let mut bars = Vec::with_capacity(policies.len());
        for summary in of_policies(summaries, condition, &policies) {
            let spread = summary.and_then(|summary| summary.at(offered));
            bars.push(spread.map(|spread| (100.0 - spread.allocated, spread.allocated_sd)));
        }
        panels.push(BarPanel {
            heading: format!("condition {condition}"),
            bars,
        });
    }
    plot::bars(title, &x_label, &policies, &panels)
}

fn heads<'a>(summaries: &[&'a Summary]) -> (Vec<&'a str>, Vec<&'a str>) {
    let (mut conditions, mut policies) = (Vec::new(), Vec::new());
    for summary in summaries {
        for (names, name) in [
            (&mut conditions, summary.conditions.as_str()),
            (&mut policies, &summary.policy),
        ] {
            if !names.contains(&name) {
                names.push(name);
            }
        }
    }
    (conditions, policies)
}

/// The summary of each policy under one condition, in the order of the policies.
fn of_policies<'a>(
    summaries: &[&'a Summary],
    condition: &str,
    policies: &[&str],
) -> Vec<Option<&'a Summary>> {
    let mut found = Vec::with_capacity(policies.len());
    for policy in policies {
        let is_wanted = |summary: &&&Summary| summary.conditions == condition && summary.policy == *policy;
        found.push(summaries.iter().find(is_wanted).copied());
    }
    found
}
