//! Plots of replays as SVG: curves over offered demand, a panel for each condition, and bars of what stays unallocated.

use super::portion::{floor, real};
use super::summary::{Spread, Summary};

/// Colours that people with any sight can tell apart; they begin again after the last.
const COLOURS: [&str; 8] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#4d4d4d"];
const INK: &str = "#333333";
const PANEL: (f64, f64) = (380.0, 260.0);
/// Room for labels left of the first panel.
const LEFT: f64 = 56.0;
/// The same where policies are named there.
const BARS_LEFT: f64 = 120.0;
const TOP: f64 = 76.0;
const GAP: f64 = 34.0;
const BOTTOM: f64 = 48.0;
const RIGHT: f64 = 20.0;
/// Width of a character of the legend, about.
const CHARACTER: f64 = 7.2;
/// Curves begin where this part of the greatest demand is offered: before that all policies place everything.
const FROM: f64 = 0.6;
const BAR: f64 = 18.0;

/// What a curve shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Measure {
    /// GPUs that are allocated.
    Allocated,
    /// Idle GPUs that typical pods could not use.
    Fragment,
}

impl Measure {
    fn of(self, spread: &Spread) -> (f64, f64) {
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

/// A rectangle of a drawing with the values at its edges.
#[derive(Clone, Copy, Debug)]
struct Panel {
    left: f64,
    x: (f64, f64),
    y: (f64, f64),
}

impl Panel {
    fn x(&self, value: f64) -> f64 {
        self.left + PANEL.0 * (value - self.x.0) / (self.x.1 - self.x.0).max(f64::EPSILON)
    }

    fn y(&self, value: f64) -> f64 {
        TOP + PANEL.1 * (1.0 - (value - self.y.0) / (self.y.1 - self.y.0).max(f64::EPSILON))
    }
}

/// Curves of all policies over offered demand, a panel for each condition, with their standard deviation as a shade.
pub fn curves(title: &str, measure: Measure, summaries: &[&Summary]) -> String {
    let conditions = distinct(summaries.iter().map(|summary| summary.conditions.as_str()));
    let policies = distinct(summaries.iter().map(|summary| summary.policy.as_str()));
    let points = || summaries.iter().flat_map(|summary| &summary.curve);
    let last = points().map(|spread| number(spread.offered)).fold(1.0, f64::max);
    let first = (last * FROM / 10.0).floor() * 10.0;
    let shown = || points().filter(|spread| number(spread.offered) >= first).map(|spread| measure.of(spread));
    let lowest = shown().map(|(mean, deviation)| mean - deviation).fold(100.0, f64::min).max(0.0);
    let highest = shown().map(|(mean, deviation)| mean + deviation).fold(1.0, f64::max).min(100.0);
    let step = step_of(highest - lowest);
    let y = ((lowest / step).floor() * step, (highest / step).ceil() * step);
    let mut drawing = Drawing::new(title, conditions.len(), LEFT, PANEL.1);
    drawing.legend(&policies);
    drawing.y_label(measure.label());
    for (nth, condition) in (0..).zip(&conditions) {
        let panel = Panel { left: LEFT + real(nth) * (PANEL.0 + GAP), x: (first, last), y };
        drawing.axes(&panel, step, condition, nth == 0);
        for summary in summaries.iter().filter(|summary| summary.conditions == *condition) {
            let nth_policy = policies.iter().position(|policy| *policy == summary.policy).unwrap_or(0);
            let curve: Vec<&Spread> = summary.curve.iter().filter(|spread| number(spread.offered) >= first).collect();
            drawing.curve(&panel, &curve, measure, colour(nth_policy));
        }
    }
    drawing.end()
}

/// Bars of the GPUs that stay unallocated at a percentage of offered demand, a panel for each condition; shorter is better.
pub fn bars(title: &str, offered: usize, summaries: &[&Summary]) -> String {
    let conditions = distinct(summaries.iter().map(|summary| summary.conditions.as_str()));
    let policies = distinct(summaries.iter().map(|summary| summary.policy.as_str()));
    let idle = |summary: &Summary| summary.at(offered).map(|spread| (100.0 - spread.allocated, spread.allocated_sd));
    let most = summaries.iter().filter_map(|summary| idle(summary)).map(|(mean, deviation)| mean + deviation).fold(0.1, f64::max);
    let step = step_of(most);
    let height = number(policies.len()) * BAR * 1.5;
    let mut drawing = Drawing::new(title, conditions.len(), BARS_LEFT, height);
    let x_label = format!("GPUs unallocated at {offered} % offered, % (shorter is better)");
    for (nth, condition) in (0..).zip(&conditions) {
        let panel = Panel { left: BARS_LEFT + real(nth) * (PANEL.0 + GAP), x: (0.0, (most * 1.2 / step).ceil() * step), y: (0.0, 1.0) };
        drawing.bar_axis(&panel, step, condition, height, &x_label);
        for summary in summaries.iter().filter(|summary| summary.conditions == *condition) {
            let (Some(at), Some(idle)) = (policies.iter().position(|policy| *policy == summary.policy), idle(summary)) else { continue };
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

fn number(n: usize) -> f64 {
    real(i64::try_from(n).unwrap_or(0))
}

fn colour(nth: usize) -> &'static str {
    COLOURS.get(nth % COLOURS.len()).copied().unwrap_or(INK)
}

/// The distance of two lines of a grid, so that there are three to eight of them.
fn step_of(range: f64) -> f64 {
    [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0].into_iter().find(|step| range / step <= 8.0).unwrap_or(25.0)
}

fn ticks(range: (f64, f64), step: f64) -> impl Iterator<Item = f64> {
    let first = (range.0 / step).ceil();
    let n = floor((range.1 / step + 1e-9).floor() - first).max(0);
    (0..=n).map(move |nth| (first + real(nth)) * step)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// SVG as it is written.
struct Drawing(String);

impl Drawing {
    fn new(title: &str, n_panels: usize, left: f64, panel_height: f64) -> Self {
        let n_panels = number(n_panels.max(1));
        let width = left + n_panels * PANEL.0 + (n_panels - 1.0) * GAP + RIGHT;
        let height = TOP + panel_height + BOTTOM;
        let mut drawing = Self(String::new());
        drawing.put(&format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">"#
        ));
        drawing.put(r##"<rect width="100%" height="100%" fill="#ffffff"/>"##);
        drawing.put(&format!(r#"<text x="{LEFT:.0}" y="22" font-size="15" font-weight="600">{}</text>"#, escaped(title)));
        drawing
    }

    fn put(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    fn legend(&mut self, policies: &[&str]) {
        let mut x = LEFT;
        for (nth, policy) in policies.iter().enumerate() {
            let colour = colour(nth);
            self.put(&format!(r#"<line x1="{x:.0}" x2="{:.0}" y1="40" y2="40" stroke="{colour}" stroke-width="3"/>"#, x + 18.0));
            self.put(&format!(r#"<text x="{:.0}" y="44">{}</text>"#, x + 24.0, escaped(policy)));
            x += 42.0 + CHARACTER * number(policy.chars().count());
        }
    }

    fn y_label(&mut self, label: &str) {
        let y = TOP + PANEL.1 / 2.0;
        self.put(&format!(r#"<text x="16" y="{y:.0}" text-anchor="middle" transform="rotate(-90 16 {y:.0})">{label}</text>"#));
    }

    fn axes(&mut self, panel: &Panel, step: f64, condition: &str, is_first: bool) {
        let (left, right, bottom) = (panel.left, panel.left + PANEL.0, TOP + PANEL.1);
        self.put(&format!(r#"<text x="{left:.0}" y="{:.0}" font-weight="600">condition {}</text>"#, TOP - 10.0, escaped(condition)));
        for tick in ticks(panel.y, step) {
            let y = panel.y(tick);
            self.put(&format!(r##"<line x1="{left:.1}" x2="{right:.1}" y1="{y:.1}" y2="{y:.1}" stroke="#e3e3e3"/>"##));
            if is_first {
                let decimals = usize::from(step < 1.0);
                self.put(&format!(r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{tick:.decimals$}</text>"#, left - 6.0, y + 4.0));
            }
        }
        for tick in ticks(panel.x, 10.0) {
            let x = panel.x(tick);
            self.put(&format!(r#"<line x1="{x:.1}" x2="{x:.1}" y1="{bottom:.1}" y2="{:.1}" stroke="{INK}"/>"#, bottom + 4.0));
            self.put(&format!(r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{tick:.0}</text>"#, bottom + 17.0));
        }
        self.put(&format!(r#"<path d="M{left:.1} {TOP:.1}V{bottom:.1}H{right:.1}" fill="none" stroke="{INK}"/>"#));
        let middle = left + PANEL.0 / 2.0;
        self.put(&format!(r#"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">GPUs asked for, % of all</text>"#, bottom + 36.0));
    }

    fn curve(&mut self, panel: &Panel, curve: &[&Spread], measure: Measure, colour: &str) {
        let at = |spread: &Spread, deviations: f64| {
            let (mean, deviation) = measure.of(spread);
            let value = (mean + deviations * deviation).clamp(panel.y.0, panel.y.1);
            format!("{:.1},{:.1}", panel.x(number(spread.offered)), panel.y(value))
        };
        let upper = curve.iter().map(|spread| at(spread, 1.0));
        let lower = curve.iter().rev().map(|spread| at(spread, -1.0));
        let shade: Vec<String> = upper.chain(lower).collect();
        self.put(&format!(r#"<polygon points="{}" fill="{colour}" opacity="0.15"/>"#, shade.join(" ")));
        let line: Vec<String> = curve.iter().map(|spread| at(spread, 0.0)).collect();
        self.put(&format!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>"#,
            line.join(" ")
        ));
    }

    fn bar_axis(&mut self, panel: &Panel, step: f64, condition: &str, height: f64, label: &str) {
        let (left, bottom) = (panel.left, TOP + height);
        self.put(&format!(r#"<text x="{left:.0}" y="{:.0}" font-weight="600">condition {}</text>"#, TOP - 10.0, escaped(condition)));
        for tick in ticks(panel.x, step) {
            let x = panel.x(tick);
            let decimals = usize::from(step < 1.0);
            self.put(&format!(r##"<line x1="{x:.1}" x2="{x:.1}" y1="{TOP:.1}" y2="{bottom:.1}" stroke="#e3e3e3"/>"##));
            self.put(&format!(r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{tick:.decimals$}</text>"#, bottom + 15.0));
        }
        self.put(&format!(r#"<path d="M{left:.1} {TOP:.1}V{bottom:.1}" stroke="{INK}"/>"#));
        let middle = left + PANEL.0 / 2.0;
        self.put(&format!(r#"<text x="{middle:.1}" y="{:.1}" text-anchor="middle">{label}</text>"#, bottom + 36.0));
    }

    fn bar(&mut self, panel: &Panel, at: usize, name: Option<&str>, (mean, deviation): (f64, f64)) {
        let top = TOP + number(at) * BAR * 1.5 + BAR / 4.0;
        let middle = top + BAR / 2.0;
        let (left, end) = (panel.left, panel.x(mean));
        if let Some(name) = name {
            self.put(&format!(r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#, left - 6.0, middle + 4.0, escaped(name)));
        }
        let width = (end - left).max(0.0);
        self.put(&format!(r#"<rect x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{BAR}" fill="{}"/>"#, colour(at)));
        let (from, to) = (panel.x((mean - deviation).max(0.0)), panel.x(mean + deviation));
        self.put(&format!(r#"<line x1="{from:.1}" x2="{to:.1}" y1="{middle:.1}" y2="{middle:.1}" stroke="{INK}"/>"#));
        self.put(&format!(r#"<text x="{:.1}" y="{:.1}">{mean:.2}</text>"#, to + 5.0, middle + 4.0));
    }

    fn end(mut self) -> String {
        self.put("</svg>");
        self.0
    }
}
