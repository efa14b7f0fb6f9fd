//! Plots of replays: curves over offered demand, a panel for each condition, and bars of the unallocated GPUs.

use super::summary::{AllocationSpread, Summary};
use crate::plot::{Axis, Drawing, LEFT, PANEL, Panel, colour, height_of_bars, left_of, number, step_of};

/// Room for names of policies left of the first panel.
const BARS_LEFT: f64 = 120.0;
/// Curves begin where this part of the greatest demand is offered: before that all policies place everything.
const FROM: f64 = 0.6;
/// The horizontal axis of curves.
const OFFERED: &str = "GPUs asked for, % of all";

/// The value on the vertical axis of a plot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlottedValue {
    /// GPUs that are allocated.
    Allocated,
    /// Idle GPUs that typical pods could not use.
    Fragment,
}

impl PlottedValue {
    /// The plotted mean of a point, and its standard deviation.
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
    let (conditions, policies) = heads(summaries);
    let points = || summaries.iter().flat_map(|summary| &summary.curve);
    let mut last: f64 = 1.0;
    for spread in points() {
        last = last.max(number(spread.offered));
    }
    let first = (last * FROM / 10.0).floor() * 10.0;
    let (mut lowest, mut highest): (f64, f64) = (100.0, 1.0);
    for spread in points().filter(|spread| number(spread.offered) >= first) {
        let (mean, deviation) = measure.of(spread);
        lowest = lowest.min(mean - deviation).max(0.0);
        highest = highest.max(mean + deviation).min(100.0);
    }
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
        for (policy, summary) in under(summaries, condition, &policies) {
            let (mut upper, mut lower, mut middle) = (Vec::new(), Vec::new(), Vec::new());
            for spread in summary
                .curve
                .iter()
                .filter(|spread| number(spread.offered) >= first)
            {
                let (x, (mean, deviation)) = (number(spread.offered), measure.of(spread));
                upper.push((x, mean + deviation));
                lower.push((x, mean - deviation));
                middle.push((x, mean));
            }
            // The outline of the shade: along the upper edge, and back along the lower one.
            upper.extend(lower.into_iter().rev());
            drawing.shade(&panel, upper.into_iter(), colour(policy));
            drawing.curve(&panel, middle.into_iter(), colour(policy));
        }
    }
    drawing.end()
}

/// Bars of the GPUs that stay unallocated at a percentage of offered demand, a panel for each condition; shorter is better.
pub fn bars(title: &str, offered: usize, summaries: &[&Summary]) -> String {
    let (conditions, policies) = heads(summaries);
    let mut most: f64 = 0.1;
    for spread in summaries.iter().filter_map(|summary| summary.at(offered)) {
        most = most.max(100.0 - spread.allocated + spread.allocated_sd);
    }
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
        for (policy, summary) in under(summaries, condition, &policies) {
            if let Some(spread) = summary.at(offered) {
                let idle = (100.0 - spread.allocated, spread.allocated_sd);
                drawing.bar(
                    &panel,
                    policy,
                    (nth == 0).then_some(summary.policy.as_str()),
                    idle,
                );
            }
        }
    }
    drawing.end()
}

/// The conditions and the policies of the summaries, without repetition.
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

/// The summaries of one condition, with the indices of their policies.
fn under<'a>(summaries: &[&'a Summary], condition: &str, policies: &[&str]) -> Vec<(usize, &'a Summary)> {
    let mut found = Vec::new();
    for summary in summaries {
        let policy = policies.iter().position(|policy| *policy == summary.policy);
        if let Some(policy) = policy
            && summary.conditions == condition
        {
            found.push((policy, *summary));
        }
    }
    found
}
