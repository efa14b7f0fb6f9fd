//! Plots of replays: curves over offered demand, a panel for each condition, and bars of the unallocated GPUs.

use super::summary::{AllocationSpread, Summary};
use crate::plot::{Axis, Drawing, LEFT, PANEL, Panel, colour, height_of_bars, left_of, number, step_of};

/// Room for names of policies left of the first panel.
const BARS_LEFT: f64 = 120.0;
/// Curves begin where this part of the greatest demand is offered: before that all policies place everything.
const FROM: f64 = 0.6;
/// The horizontal axis of curves.
const OFFERED: &str = "GPUs asked for, % of all";

/// The vertical axis of a curve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlottedValue {
    /// GPUs that are allocated.
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
pub fn curves(title: &str, measure: PlottedValue, summaries: &[&Summary]) -> String {
    let conditions = distinct(summaries.iter().map(|summary| summary.conditions.as_str()));
    let policies = distinct(summaries.iter().map(|summary| summary.policy.as_str()));
    let points = || summaries.iter().flat_map(|summary| &summary.curve);
    let last = points().map(|spread| number(spread.offered)).fold(1.0, f64::max);
    let first = (last * FROM / 10.0).floor() * 10.0;
    let shown = || {
        points()
            .filter(|spread| number(spread.offered) >= first)
            .map(|spread| measure.of(spread))
    };
    let lowest = shown()
        .map(|(mean, deviation)| mean - deviation)
        .fold(100.0, f64::min)
        .max(0.0);
    let highest = shown()
        .map(|(mean, deviation)| mean + deviation)
        .fold(1.0, f64::max)
        .min(100.0);
    let step = step_of(highest - lowest);
    let y = Axis::even(
        ((lowest / step).floor() * step, (highest / step).ceil() * step),
        step,
    );
    let mut drawing = Drawing::new(title, conditions.len(), LEFT, PANEL.1);
    drawing.legend(&policies);
    drawing.y_label(measure.label());
    for (nth, condition) in (0..).zip(&conditions) {
        let panel = Panel::nth(nth, Axis::even((first, last), 10.0), y);
        drawing.axes(&panel, &format!("condition {condition}"), OFFERED, nth == 0);
        for summary in summaries
            .iter()
            .filter(|summary| summary.conditions == *condition)
        {
            let colour = colour(
                policies
                    .iter()
                    .position(|policy| *policy == summary.policy)
                    .unwrap_or(0),
            );
            let curve: Vec<&AllocationSpread> = summary
                .curve
                .iter()
                .filter(|spread| number(spread.offered) >= first)
                .collect();
            let at = |spread: &AllocationSpread, deviations: f64| {
                let (mean, deviation) = measure.of(spread);
                (number(spread.offered), mean + deviations * deviation)
            };
            let upper = curve.iter().map(|spread| at(spread, 1.0));
            drawing.shade(
                &panel,
                upper.chain(curve.iter().rev().map(|spread| at(spread, -1.0))),
                colour,
            );
            drawing.curve(&panel, curve.iter().map(|spread| at(spread, 0.0)), colour);
        }
    }
    drawing.end()
}

/// Bars of the GPUs that stay unallocated at a percentage of offered demand, a panel for each condition; shorter is better.
pub fn bars(title: &str, offered: usize, summaries: &[&Summary]) -> String {
    let conditions = distinct(summaries.iter().map(|summary| summary.conditions.as_str()));
    let policies = distinct(summaries.iter().map(|summary| summary.policy.as_str()));
    let idle = |summary: &Summary| {
        summary
            .at(offered)
            .map(|spread| (100.0 - spread.allocated, spread.allocated_sd))
    };
    let most = summaries
        .iter()
        .filter_map(|summary| idle(summary))
        .map(|(mean, deviation)| mean + deviation)
        .fold(0.1, f64::max);
    let step = step_of(most);
    let height = height_of_bars(policies.len());
    let mut drawing = Drawing::new(title, conditions.len(), BARS_LEFT, height);
    let x = Axis::even((0.0, (most * 1.2 / step).ceil() * step), step);
    let x_label = format!("GPUs unallocated at {offered} % offered, % (shorter is better)");
    for (nth, condition) in (0..).zip(&conditions) {
        let panel = Panel {
            left: left_of(nth, BARS_LEFT),
            height,
            x,
            y: Axis::from_zero(1.0),
        };
        drawing.bar_axis(&panel, &format!("condition {condition}"), &x_label);
        for summary in summaries
            .iter()
            .filter(|summary| summary.conditions == *condition)
        {
            let (Some(at), Some(idle)) = (
                policies.iter().position(|policy| *policy == summary.policy),
                idle(summary),
            ) else {
                continue;
            };
            drawing.bar(&panel, at, (nth == 0).then_some(summary.policy.as_str()), idle);
        }
    }
    drawing.end()
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    let mut found: Vec<&str> = Vec::new();
    for name in names {
        if !found.contains(&name) {
            found.push(name);
        }
    }
    found
}
