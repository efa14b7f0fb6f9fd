//! Plots as SVG: panels side by side with curves or bars, drawn by `plotters`.

use std::error::Error;
use std::ops::Range;
use std::path::Path;

use anyhow::{Result, anyhow};
use kit::console::Console;
use kit::files;
use plotters::coord::Shift;
use plotters::coord::combinators::LogCoord;
use plotters::coord::ranged1d::{DefaultFormatting, KeyPointHint, Ranged};
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Colours that are distinct for colour-blind readers too; they begin again after the last.
const COLOURS: [RGBColor; 8] = [
    RGBColor(0, 114, 178),
    RGBColor(213, 94, 0),
    RGBColor(0, 158, 115),
    RGBColor(204, 121, 167),
    RGBColor(230, 159, 0),
    RGBColor(86, 180, 233),
    RGBColor(127, 60, 141),
    RGBColor(77, 77, 77),
];
const FONT: &str = "sans-serif";
/// Width and height of a panel with its axes, in pixels.
const PANEL: (u32, u32) = (420, 340);
/// Height of the title above the panels, and of a bar with the gap behind it.
const TITLE: u32 = 36;
const BAR: u32 = 26;

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;
type DrawError = Box<dyn Error>;

/// An axis of a panel with its least and its greatest value.
#[derive(Clone, Debug)]
pub(crate) enum Axis {
    Linear(Range<f64>),
    /// Both values are positive.
    Logarithmic(Range<f64>),
}

impl Axis {
    fn logarithmic(range: &Range<f64>) -> LogCoord<f64> {
        range.clone().log_scale().into()
    }
}

impl Ranged for Axis {
    type FormatOption = DefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        match self {
            Self::Linear(range) => RangedCoordf64::from(range.clone()).map(value, limit),
            Self::Logarithmic(range) => Self::logarithmic(range).map(value, limit),
        }
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        match self {
            Self::Linear(range) => RangedCoordf64::from(range.clone()).key_points(hint),
            Self::Logarithmic(range) => Self::logarithmic(range).key_points(hint),
        }
    }

    fn range(&self) -> Range<f64> {
        match self {
            Self::Linear(range) | Self::Logarithmic(range) => range.clone(),
        }
    }
}

/// A curve through points. Deviations are shown as a shade above and below the curve.
#[derive(Clone, Debug, Default)]
pub(crate) struct Curve {
    pub(crate) points: Vec<(f64, f64)>,
    /// One for each point, or none at all.
    pub(crate) deviations: Vec<f64>,
}

/// A panel of curves; the n-th curve has the n-th of [`COLOURS`].
pub(crate) struct CurvePanel {
    pub(crate) heading: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    pub(crate) curves: Vec<Curve>,
}

/// A panel of bars, each with its length and deviation; the n-th bar has the n-th of [`COLOURS`], and may be absent.
pub(crate) struct BarPanel {
    pub(crate) heading: String,
    pub(crate) bars: Vec<Option<(f64, f64)>>,
}

/// Draws curves; `legend` has the names of the curves of each panel, in their order.
pub(crate) fn curves(
    title: &str,
    (x_label, y_label): (&str, &str),
    legend: &[&str],
    panels: &[CurvePanel],
) -> Result<String> {
    draw(title, PANEL.1, panels, |area, nth, panel| {
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.heading, (FONT, 14))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(58)
            .build_cartesian_2d(panel.x.clone(), panel.y.clone())?;
        chart
            .configure_mesh()
            .x_desc(x_label)
            .y_desc(if nth == 0 { y_label } else { "" })
            .x_labels(6)
            .label_style((FONT, 12))
            .x_label_formatter(&|value| grouped(*value))
            .y_label_formatter(&|value| grouped(*value))
            .light_line_style(TRANSPARENT)
            .draw()?;
        for (at, curve) in panel.curves.iter().enumerate() {
            let colour = colour(at);
            chart.draw_series(std::iter::once(Polygon::new(curve.outline(), colour.mix(0.15))))?;
            let line = LineSeries::new(curve.points.iter().copied(), colour.stroke_width(2));
            let line = chart.draw_series(line)?;
            if let Some(name) = legend.get(at).filter(|_| nth == 0) {
                line.label(*name)
                    .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], colour.stroke_width(2)));
            }
            // Circles of many points would cover the line.
            if curve.points.len() <= 20 {
                chart.draw_series(
                    curve
                        .points
                        .iter()
                        .map(|point| Circle::new(*point, 3, colour.filled())),
                )?;
            }
        }
        if nth == 0 && !legend.is_empty() {
            chart
                .configure_series_labels()
                .position(SeriesLabelPosition::UpperLeft)
                .label_font((FONT, 12))
                .background_style(WHITE.mix(0.8))
                .draw()?;
        }
        Ok(())
    })
}

/// Draws bars from 0; `names` are those of the bars in their order.
pub(crate) fn bars(title: &str, x_label: &str, names: &[&str], panels: &[BarPanel]) -> Result<String> {
    let n_bars = u32::try_from(names.len()).unwrap_or(u32::MAX);
    let mut longest = 0.1_f64;
    for (mean, deviation) in panels.iter().flat_map(|panel| &panel.bars).flatten() {
        longest = longest.max(mean + deviation);
    }
    let height = n_bars.saturating_mul(BAR).saturating_add(90);
    draw(title, height, panels, |area, _, panel| {
        let mut chart = ChartBuilder::on(area)
            .caption(&panel.heading, (FONT, 14))
            .margin(10)
            .x_label_area_size(42)
            .y_label_area_size(96)
            .build_cartesian_2d(0.0..longest * 1.2, f64::from(n_bars)..0.0)?;
        chart
            .configure_mesh()
            .x_desc(x_label)
            .x_labels(6)
            .label_style((FONT, 12))
            .disable_y_mesh()
            .disable_y_axis()
            .light_line_style(TRANSPARENT)
            .draw()?;
        let mut top = 0.0;
        for (at, (name, bar)) in names.iter().zip(&panel.bars).enumerate() {
            let middle = top + 0.5;
            let label = Text::new(format!("{name:>12}"), (-92, -6), (FONT, 12));
            chart.draw_series(std::iter::once(EmptyElement::at((0.0, middle)) + label))?;
            if let Some((mean, deviation)) = *bar {
                let corners = [(0.0, top + 0.15), (mean, top + 0.85)];
                chart.draw_series([Rectangle::new(corners, colour(at).filled())])?;
                let ends = [((mean - deviation).max(0.0), middle), (mean + deviation, middle)];
                chart.draw_series([PathElement::new(ends, BLACK)])?;
                let length = Text::new(format!("{mean:.2}"), (5, -6), (FONT, 12));
                chart.draw_series(std::iter::once(EmptyElement::at(ends[1]) + length))?;
            }
            top += 1.0;
        }
        Ok(())
    })
}

/// Draws panels of one height side by side under a title.
fn draw<P>(
    title: &str,
    height: u32,
    panels: &[P],
    draw_panel: impl Fn(&Area<'_>, usize, &P) -> Result<(), DrawError>,
) -> Result<String> {
    let mut svg = String::new();
    let n_panels = u32::try_from(panels.len().max(1)).unwrap_or(u32::MAX);
    let size = (PANEL.0.saturating_mul(n_panels), height.saturating_add(TITLE));
    let mut draw_all = || -> Result<(), DrawError> {
        let root = SVGBackend::with_string(&mut svg, size).into_drawing_area();
        // Without a background, dark mode would show dark text on black.
        root.fill(&WHITE)?;
        let root = root.titled(title, (FONT, 16))?;
        for (nth, (area, panel)) in root
            .split_evenly((1, panels.len().max(1)))
            .iter()
            .zip(panels)
            .enumerate()
        {
            draw_panel(area, nth, panel)?;
        }
        root.present()?;
        Ok(())
    };
    draw_all().map_err(|error| anyhow!("cannot draw {title:?}: {error}"))?;
    Ok(svg)
}

impl Curve {
    /// The outline of the shade: along its upper edge, and back along the lower one.
    fn outline(&self) -> Vec<(f64, f64)> {
        let points = || self.points.iter().zip(&self.deviations);
        let upper = points().map(|((x, y), deviation)| (*x, y + deviation));
        let lower = points().map(|((x, y), deviation)| (*x, y - deviation));
        upper.chain(lower.rev()).collect()
    }
}

fn colour(nth: usize) -> RGBColor {
    COLOURS.get(nth % COLOURS.len()).copied().unwrap_or(BLACK)
}

/// A number with commas between thousands, and with at most four decimals if it is below 10.
pub(crate) fn grouped(number: f64) -> String {
    if number.abs() < 10.0 {
        let text = format!("{number:.4}");
        return text.trim_end_matches('0').trim_end_matches('.').to_owned();
    }
    let text = format!("{number:.0}");
    let mut grouped = String::with_capacity(text.len() + 4);
    for (at, digit) in text.chars().enumerate() {
        if at > 0 && (text.len() - at).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
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

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case(0.0, "0")]
    #[case(0.1 + 0.2, "0.3")]
    #[case(2.0, "2")]
    #[case(20.0, "20")]
    #[case(999.0, "999")]
    #[case(15_000.0, "15,000")]
    #[case(1_234_567.0, "1,234,567")]
    fn thousands_are_grouped(#[case] number: f64, #[case] text: &str) {
        assert_eq!(grouped(number), text);
    }
}
