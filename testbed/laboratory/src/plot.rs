//! Plots as SVG: panels side by side with axes, curves and bars, and one legend above them.

use std::path::Path;

use anyhow::Result;

use testbed::console::Console;
use testbed::files;

/// Colours that are distinct for colour-blind readers too; they begin again after the last.
const COLOURS: [&str; 8] = [
    "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f3c8d", "#4d4d4d",
];
const INK: &str = "#333333";
/// Size of a panel of curves.
pub(crate) const PANEL: (f64, f64) = (380.0, 260.0);
/// Room for the labels left of the first panel.
pub(crate) const LEFT: f64 = 56.0;
const TOP: f64 = 76.0;
const GAP: f64 = 34.0;
const BOTTOM: f64 = 48.0;
const RIGHT: f64 = 20.0;
/// Width of a character of the legend, about.
const CHARACTER: f64 = 7.2;
const BAR: f64 = 18.0;
/// Most lines of a grid over a range with even steps, but for the first.
const MOST_LINES: f64 = 8.0;
/// Most labels along a logarithmic axis; of more than these only every third is written.
const MOST_LABELS: usize = 9;

/// One axis of a panel.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Axis {
    range: (f64, f64),
    /// The distance of two lines of the grid; none on a logarithmic axis.
    step: Option<f64>,
}

impl Axis {
    /// From one value to another, with lines at multiples of a step.
    pub(crate) fn even(range: (f64, f64), step: f64) -> Self {
        Self {
            range,
            step: Some(step),
        }
    }

    /// From zero to a value or just above it.
    pub(crate) fn from_zero(highest: f64) -> Self {
        let step = step_of(highest);
        Self::even((0.0, (highest / step).ceil() * step), step)
    }

    /// Logarithmic, from one value or just below it to another or just above it; both are positive.
    pub(crate) fn log(lowest: f64, highest: f64) -> Self {
        let from = rounds()
            .take_while(|round| *round <= lowest * NEARLY)
            .last()
            .unwrap_or(lowest);
        let to = rounds()
            .find(|round| round * NEARLY >= highest && *round > from * NEARLY)
            .unwrap_or(highest);
        Self {
            range: (from, to),
            step: None,
        }
    }

    /// Logarithmic, from one positive value to another.
    pub(crate) fn log_between(from: f64, to: f64) -> Self {
        Self {
            range: (from, to),
            step: None,
        }
    }

    /// The part of the axis before a value, from 0 to 1.
    fn part(&self, value: f64) -> f64 {
        let place = |value: f64| if self.step.is_some() { value } else { value.ln() };
        let (from, to) = (place(self.range.0), place(self.range.1));
        (place(value.clamp(self.range.0, self.range.1)) - from) / (to - from).max(f64::EPSILON)
    }

    /// The values at which an axis has a line, with their labels.
    fn ticks(&self) -> Vec<(f64, String)> {
        let (from, to) = self.range;
        if let Some(step) = self.step {
            let decimals = decimals(step);
            let ticks = (0_u32..)
                .map(|nth| ((from / step).ceil() + f64::from(nth)) * step)
                .take_while(|tick| *tick <= to + step * 1e-9);
            return ticks
                .map(|tick| (tick, grouped(&format!("{tick:.decimals$}"))))
                .collect();
        }
        let ticks: Vec<f64> = rounds()
            .filter(|round| (from..=to * NEARLY).contains(&(round * NEARLY)))
            .collect();
        let every = if ticks.len() > MOST_LABELS { 3 } else { 1 };
        ticks
            .into_iter()
            .step_by(every)
            .map(|tick| (tick, grouped(&format!("{tick:.0$}", decimals(tick)))))
            .collect()
    }
}

/// Slightly more than one: a tolerance for the rounding of floats.
const NEARLY: f64 = 1.0 + 1e-9;

/// The round numbers 1, 2, 5, 10, 20 and so on, from a millionth to billions.
fn rounds() -> impl Iterator<Item = f64> {
    (-6..=9).flat_map(|power| [1.0, 2.0, 5.0].map(|digit| digit * 10_f64.powi(power)))
}

/// The distance of two lines of a grid, so that there are three to eight of them; a tenth at least.
pub(crate) fn step_of(range: f64) -> f64 {
    rounds()
        .find(|step| *step >= 0.1 / NEARLY && range / step <= MOST_LINES)
        .unwrap_or(range)
}

/// The number of decimals that a round number needs.
fn decimals(round: f64) -> usize {
    (0..6)
        .find(|places| round * 10_f64.powi(*places) >= 1.0 / NEARLY)
        .and_then(|places| usize::try_from(places).ok())
        .unwrap_or(6)
}

/// A number with commas between thousands.
pub(crate) fn grouped(number: &str) -> String {
    let n_whole = number.find('.').unwrap_or(number.len());
    let is_gap = |at: usize| at > 0 && at < n_whole && (n_whole - at).is_multiple_of(3);
    number
        .chars()
        .enumerate()
        .flat_map(|(at, digit)| is_gap(at).then_some(',').into_iter().chain([digit]))
        .collect()
}

/// A rectangle of a drawing with the values at its edges.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Panel {
    pub(crate) left: f64,
    pub(crate) height: f64,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
}

impl Panel {
    /// A panel of curves, beside others.
    pub(crate) fn nth(nth: u32, x: Axis, y: Axis) -> Self {
        Self {
            left: left_of(nth, LEFT),
            height: PANEL.1,
            x,
            y,
        }
    }

    /// The horizontal place of a value, in pixels.
    fn x(&self, value: f64) -> f64 {
        self.left + PANEL.0 * self.x.part(value)
    }

    /// The vertical place of a value, in pixels from the top.
    fn y(&self, value: f64) -> f64 {
        TOP + self.height * (1.0 - self.y.part(value))
    }
}

/// The left edge of a panel.
pub(crate) fn left_of(nth: u32, first: f64) -> f64 {
    first + f64::from(nth) * (PANEL.0 + GAP)
}

/// The height of `n` bars.
pub(crate) fn height_of_bars(n_bars: usize) -> f64 {
    number(n_bars) * BAR * 1.5
}

/// The colour of a curve or bar.
pub(crate) fn colour(nth: usize) -> &'static str {
    COLOURS.get(nth % COLOURS.len()).copied().unwrap_or(INK)
}

/// A small whole number as a float.
pub(crate) fn number(n: usize) -> f64 {
    u32::try_from(n).map_or(f64::INFINITY, f64::from)
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('>', "&gt;")
}

/// Writes plots into a directory, each under its name.
pub(crate) fn write(dir: &Path, plots: &[(String, String)], console: &Console) -> Result<()> {
    files::make_dir(dir)?;
    for (name, svg) in plots {
        let path = dir.join(format!("{name}.svg"));
        files::write(&path, svg)?;
        console.say(&format!("drawn: {}", path.display()));
    }
    Ok(())
}

/// An SVG document under construction.
#[derive(Debug)]
pub(crate) struct Drawing(String);

impl Drawing {
    /// A drawing of panels of one height, the first at `left`.
    pub(crate) fn new(title: &str, n_panels: usize, left: f64, panel_height: f64) -> Self {
        let n_panels = number(n_panels.max(1));
        let width = left + n_panels * PANEL.0 + (n_panels - 1.0) * GAP + RIGHT;
        let height = TOP + panel_height + BOTTOM;
        let mut drawing = Self(String::new());
        drawing.put(&format!(
            r#"<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0} {height:.0}" width="{width:.0}" height="{height:.0}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">"#
        ));
        // Without a background, dark mode would show dark text on black.
        drawing.put(r##"<rect width="100%" height="100%" fill="#ffffff"/>"##);
        drawing.put(&format!(
            r#"<text x="{LEFT:.0}" y="22" font-size="15" font-weight="600">{}</text>"#,
            escaped(title)
        ));
        drawing
    }

    /// Appends a line of SVG.
    fn put(&mut self, line: &str) {
        self.0.push_str(line);
        self.0.push('\n');
    }

    /// The legend of the colours, from the first on.
    pub(crate) fn legend(&mut self, names: &[&str]) {
        let mut x = LEFT;
        for (nth, name) in names.iter().enumerate() {
            let colour = colour(nth);
            self.put(&format!(
                r#"<line x1="{x:.0}" x2="{:.0}" y1="40" y2="40" stroke="{colour}" stroke-width="3"/>"#,
                x + 18.0
            ));
            self.put(&format!(
                r#"<text x="{:.0}" y="44">{}</text>"#,
                x + 24.0,
                escaped(name)
            ));
            x += 42.0 + CHARACTER * number(name.chars().count());
        }
    }

    /// The label of the first panel's vertical axis.
    pub(crate) fn y_label(&mut self, label: &str) {
        let y = TOP + PANEL.1 / 2.0;
        self.put(&format!(
            r#"<text x="16" y="{y:.0}" text-anchor="middle" transform="rotate(-90 16 {y:.0})">{label}</text>"#
        ));
    }

    fn heading(&mut self, panel: &Panel, text: &str) {
        self.put(&format!(
            r#"<text x="{:.0}" y="{:.0}" font-weight="600">{}</text>"#,
            panel.left,
            TOP - 10.0,
            escaped(text)
        ));
    }

    fn x_label(&mut self, panel: &Panel, label: &str) {
        let (middle, y) = (panel.left + PANEL.0 / 2.0, TOP + panel.height + 36.0);
        self.put(&format!(
            r#"<text x="{middle:.1}" y="{y:.1}" text-anchor="middle">{label}</text>"#
        ));
    }

    /// The axes of a panel of curves; without numbers on the vertical axis if those of the panel before hold
    /// here too.
    pub(crate) fn axes(&mut self, panel: &Panel, heading: &str, x_label: &str, has_numbers: bool) {
        let (left, right, bottom) = (panel.left, panel.left + PANEL.0, TOP + panel.height);
        self.heading(panel, heading);
        for (tick, text) in panel.y.ticks() {
            let y = panel.y(tick);
            self.put(&format!(
                r##"<line x1="{left:.1}" x2="{right:.1}" y1="{y:.1}" y2="{y:.1}" stroke="#e3e3e3"/>"##
            ));
            if has_numbers {
                self.put(&format!(
                    r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{text}</text>"#,
                    left - 6.0,
                    y + 4.0
                ));
            }
        }
        for (tick, text) in panel.x.ticks() {
            let x = panel.x(tick);
            self.put(&format!(
                r#"<line x1="{x:.1}" x2="{x:.1}" y1="{bottom:.1}" y2="{:.1}" stroke="{INK}"/>"#,
                bottom + 4.0
            ));
            self.put(&format!(
                r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{text}</text>"#,
                bottom + 17.0
            ));
        }
        self.put(&format!(
            r#"<path d="M{left:.1} {TOP:.1}V{bottom:.1}H{right:.1}" fill="none" stroke="{INK}"/>"#
        ));
        self.x_label(panel, x_label);
    }

    fn points(panel: &Panel, points: impl Iterator<Item = (f64, f64)>) -> String {
        points
            .map(|(x, y)| format!("{:.1},{:.1}", panel.x(x), panel.y(y)))
            .collect::<Vec<_>>()
            .join(" ")
    }

    /// A shade between the points of its outline.
    pub(crate) fn shade(&mut self, panel: &Panel, outline: impl Iterator<Item = (f64, f64)>, colour: &str) {
        self.put(&format!(
            r#"<polygon points="{}" fill="{colour}" opacity="0.15"/>"#,
            Self::points(panel, outline)
        ));
    }

    /// A curve through points.
    pub(crate) fn curve(&mut self, panel: &Panel, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
        self.put(&format!(
            r#"<polyline points="{}" fill="none" stroke="{colour}" stroke-width="1.8" stroke-linejoin="round"/>"#,
            Self::points(panel, points)
        ));
    }

    /// A dot at each point.
    pub(crate) fn dots(&mut self, panel: &Panel, points: impl Iterator<Item = (f64, f64)>, colour: &str) {
        for (x, y) in points {
            self.put(&format!(
                r#"<circle cx="{:.1}" cy="{:.1}" r="3" fill="{colour}"/>"#,
                panel.x(x),
                panel.y(y)
            ));
        }
    }

    /// The axes of a panel of bars.
    pub(crate) fn bar_axis(&mut self, panel: &Panel, heading: &str, label: &str) {
        let (left, bottom) = (panel.left, TOP + panel.height);
        self.heading(panel, heading);
        for (tick, text) in panel.x.ticks() {
            let x = panel.x(tick);
            self.put(&format!(
                r##"<line x1="{x:.1}" x2="{x:.1}" y1="{TOP:.1}" y2="{bottom:.1}" stroke="#e3e3e3"/>"##
            ));
            self.put(&format!(
                r#"<text x="{x:.1}" y="{:.1}" text-anchor="middle">{text}</text>"#,
                bottom + 15.0
            ));
        }
        self.put(&format!(
            r#"<path d="M{left:.1} {TOP:.1}V{bottom:.1}" stroke="{INK}"/>"#
        ));
        self.x_label(panel, label);
    }

    /// A bar with its name, its length, and a line for the deviation.
    pub(crate) fn bar(
        &mut self,
        panel: &Panel,
        at: usize,
        name: Option<&str>,
        (mean, deviation): (f64, f64),
    ) {
        let top = TOP + height_of_bars(at) + BAR / 4.0;
        let middle = top + BAR / 2.0;
        let (left, end) = (panel.left, panel.x(mean));
        if let Some(name) = name {
            self.put(&format!(
                r#"<text x="{:.1}" y="{:.1}" text-anchor="end">{}</text>"#,
                left - 6.0,
                middle + 4.0,
                escaped(name)
            ));
        }
        let width = (end - left).max(0.0);
        self.put(&format!(
            r#"<rect x="{left:.1}" y="{top:.1}" width="{width:.1}" height="{BAR}" fill="{}"/>"#,
            colour(at)
        ));
        let (from, to) = (panel.x((mean - deviation).max(0.0)), panel.x(mean + deviation));
        self.put(&format!(
            r#"<line x1="{from:.1}" x2="{to:.1}" y1="{middle:.1}" y2="{middle:.1}" stroke="{INK}"/>"#
        ));
        self.put(&format!(
            r#"<text x="{:.1}" y="{:.1}">{mean:.2}</text>"#,
            to + 5.0,
            middle + 4.0
        ));
    }

    /// Ends the document and returns it.
    pub(crate) fn end(mut self) -> String {
        self.put("</svg>");
        self.0
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::percent(Axis::even((60.0, 95.0), 10.0), "60 70 80 90")]
    #[case::tenths(Axis::even((0.0, 0.5), 0.1), "0.0 0.1 0.2 0.3 0.4 0.5")]
    #[case::up_from_zero(
        Axis::from_zero(15_000.0),
        "0 2,000 4,000 6,000 8,000 10,000 12,000 14,000 16,000"
    )]
    #[case::parts_of_one(Axis::log(0.03, 1.2), "0.02 0.05 0.1 0.2 0.5 1 2")]
    #[case::thousands(Axis::log(100.0, 15_000.0), "100 200 500 1,000 2,000 5,000 10,000 20,000")]
    #[case::round_already(Axis::log(0.1, 0.5), "0.1 0.2 0.5")]
    #[case::one_value(Axis::log(500.0, 500.0), "500 1,000")]
    #[case::between(Axis::log_between(100.0, 15_000.0), "100 200 500 1,000 2,000 5,000 10,000")]
    #[case::many_powers(Axis::log(0.01, 100.0), "0.01 0.1 1 10 100")]
    fn axes_have_few_round_numbers(#[case] axis: Axis, #[case] numbers: &str) {
        let ticks = axis.ticks();
        assert_eq!(
            ticks
                .iter()
                .map(|(_, text)| text.as_str())
                .collect::<Vec<_>>()
                .join(" "),
            numbers
        );
        assert!(
            ticks
                .iter()
                .all(|(tick, _)| (-1e-9..=NEARLY).contains(&axis.part(*tick))),
            "{ticks:?}"
        );
    }

    #[test]
    fn equal_factors_are_equally_far_on_a_logarithmic_axis() {
        let axis = Axis::log(1.0, 100.0);
        assert!((axis.part(10.0) - 0.5).abs() < 1e-9 && axis.part(0.1).abs() < 1e-9);
        assert!((Axis::even((0.0, 100.0), 10.0).part(10.0) - 0.1).abs() < 1e-9);
    }
}
