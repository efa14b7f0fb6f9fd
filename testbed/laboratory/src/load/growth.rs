//! Plots of the cost of a filter over the number of names in a request, and over the size of the cluster.

use super::filter::FilterMeasurement;
use crate::plot::{Axis, Drawing, LEFT, PANEL, Panel, colour, grouped, step_of};

/// The number of names that is compared over clusters of several sizes, where it was measured: what kube-scheduler samples
/// of 5,000 nodes.
const SAMPLED: u32 = 500;
/// Whose latencies are shown.
const MEASURED_BY: [&str; 3] = [
    "seen by the client",
    "the same of a server that does nothing",
    "in the daemon",
];

/// A curve.
type Points = Vec<(f64, f64)>;

/// The content of one panel.
struct PanelContent<'a> {
    heading: &'a str,
    y: Axis,
    /// A curve for each name of the legend; some may have no points.
    curves: Vec<Points>,
}

/// All plots that the measurements are enough for, with their names.
pub(super) fn plots(measured: &[FilterMeasurement]) -> Vec<(String, String)> {
    let Some(largest) = measured.iter().max_by_key(|one| one.nodes) else {
        return Vec::new();
    };
    let (nodes, pods) = (counted(largest.nodes), counted(largest.pods));
    let in_largest: Vec<&FilterMeasurement> =
        measured.iter().filter(|one| one.nodes == largest.nodes).collect();
    let n_names = if measured.iter().any(|one| one.names == SAMPLED) {
        SAMPLED
    } else {
        largest.names
    };
    let alike: Vec<&FilterMeasurement> = measured.iter().filter(|one| one.names == n_names).collect();
    let mut clusters: Vec<&FilterMeasurement> = measured.iter().collect();
    // The last measurement of a cluster has its final memory.
    clusters.reverse();
    clusters.dedup_by_key(|one| one.nodes);
    let mut plots = Vec::new();
    if in_largest.len() > 1 {
        let title = format!("Filter by names in the request: {nodes} nodes, {pods} pods");
        plots.push((
            "latency-by-names",
            latencies(&title, "names in the request", &in_largest, |one| {
                f64::from(one.names)
            }),
        ));
    }
    if alike.len() > 1 {
        let title = format!(
            "Filter by nodes of the cluster: requests of {} names",
            counted(n_names)
        );
        plots.push((
            "latency-by-nodes",
            latencies(&title, "nodes of the cluster", &alike, |one| f64::from(one.nodes)),
        ));
    }
    if clusters.len() > 1 {
        plots.push(("memory-and-start", memory_and_start(&clusters)));
    }
    plots
        .into_iter()
        .map(|(name, svg)| (name.to_owned(), svg))
        .collect()
}

/// Median and 99th percentile over a size, both logarithmic.
fn latencies(
    title: &str,
    x_label: &str,
    measured: &[&FilterMeasurement],
    size: fn(&FilterMeasurement) -> f64,
) -> String {
    let curve = |value: fn(&FilterMeasurement) -> f64| -> Points {
        measured.iter().map(|one| (size(one), value(one))).collect()
    };
    let medians = vec![
        curve(|one| one.millis[0]),
        curve(|one| one.floor_millis[0]),
        curve(|one| one.daemon_millis[0]),
    ];
    let slowest = vec![
        curve(|one| one.millis[2]),
        curve(|one| one.floor_millis[2]),
        curve(|one| one.daemon_millis[1]),
    ];
    let (from, to) = extent(measured.iter().map(|one| size(one)));
    let (lowest, highest) = extent(
        medians
            .iter()
            .chain(&slowest)
            .flatten()
            .map(|(_, millis)| *millis),
    );
    let y = Axis::log(lowest, highest);
    let panels = [
        PanelContent {
            heading: "median",
            y,
            curves: medians,
        },
        PanelContent {
            heading: "99th percentile",
            y,
            curves: slowest,
        },
    ];
    let mut drawing = Drawing::new(title, panels.len(), LEFT, PANEL.1);
    drawing.legend(&MEASURED_BY);
    drawing.y_label("milliseconds");
    draw(&mut drawing, Axis::log_between(from, to), x_label, &panels, false);
    drawing.end()
}

/// Resident memory, and from the start of the process until it is ready.
fn memory_and_start(clusters: &[&FilterMeasurement]) -> String {
    let curve = |value: fn(&FilterMeasurement) -> f64| -> Points {
        clusters
            .iter()
            .map(|one| (f64::from(one.nodes), value(one)))
            .collect()
    };
    let memory = vec![curve(|one| one.rss_mib[0]), curve(|one| one.rss_mib[1])];
    let start = vec![curve(|one| one.ready_seconds)];
    let highest = |curves: &[Points]| extent(curves.iter().flatten().map(|(_, value)| *value)).1;
    let panels = [
        PanelContent {
            heading: "resident memory, MiB",
            y: Axis::from_zero(highest(&memory)),
            curves: memory,
        },
        PanelContent {
            heading: "start to ready, s",
            y: Axis::from_zero(highest(&start)),
            curves: start,
        },
    ];
    let most = clusters.iter().max_by_key(|one| one.nodes);
    let title = most.map_or_else(String::new, |most| {
        format!(
            "Memory and start by nodes of the cluster: up to {} nodes with {} pods",
            counted(most.nodes),
            counted(most.pods)
        )
    });
    let mut drawing = Drawing::new(&title, panels.len(), LEFT, PANEL.1);
    drawing.legend(&["when it is ready", "after all questions"]);
    let (_, widest) = extent(clusters.iter().map(|one| f64::from(one.nodes)));
    // Labels are wide: half as many as there may be lines.
    draw(
        &mut drawing,
        Axis::even((0.0, widest), step_of(2.0 * widest)),
        "nodes of the cluster",
        &panels,
        true,
    );
    drawing.end()
}

fn draw(drawing: &mut Drawing, x: Axis, x_label: &str, panels: &[PanelContent<'_>], each_has_numbers: bool) {
    for (nth, shown) in (0..).zip(panels) {
        let panel = Panel::nth(nth, x, shown.y);
        drawing.axes(&panel, shown.heading, x_label, nth == 0 || each_has_numbers);
        for (nth, points) in shown.curves.iter().enumerate() {
            let mut points = points.clone();
            points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
            drawing.curve(&panel, points.iter().copied(), colour(nth));
            drawing.dots(&panel, points.iter().copied(), colour(nth));
        }
    }
}

/// The least and the greatest of some positive values.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (least, greatest) = values.fold((f64::INFINITY, 0.0), |(least, greatest), value| {
        (value.min(least), value.max(greatest))
    });
    // A clock may have seen nothing at all.
    (least.max(1e-4).min(greatest.max(1e-4)), greatest.max(1e-4))
}

fn counted(n: u32) -> String {
    grouped(&n.to_string())
}

#[cfg(test)]
mod tests {
    use insta::assert_snapshot;

    use super::*;

    fn measured(nodes: u32, names: u32) -> FilterMeasurement {
        let (size, fleet) = (f64::from(names), f64::from(nodes));
        let millis = |per_name: f64| 0.05 + size * per_name;
        let three = |median: f64| [median, 2.0 * median, 3.0 * median, 10.0 * median];
        FilterMeasurement {
            nodes,
            pods: nodes * 8,
            names,
            shapes: 4,
            request_bytes: 0,
            answer_bytes: 0,
            ready_seconds: fleet * 6e-4,
            rss_mib: [
                10.0 + fleet * 0.02,
                12.0 + fleet * 0.021 + size * 0.001,
                12.0 + fleet * 0.022,
            ],
            millis: three(millis(6e-5)),
            floor_millis: three(millis(2e-5)),
            daemon_millis: [millis(3e-5), 2.0 * millis(3e-5)],
            binds_per_second: 0.0,
            failed_binds: 0,
            views_per_second: 0.0,
            view_mib: 0.0,
        }
    }

    #[test]
    fn the_plots_of_several_sizes() {
        let sizes = [100, 500, 1000, 2000, 5000, 10_000, 15_000];
        let all = sizes.iter().flat_map(|nodes| {
            sizes
                .iter()
                .filter(move |names| *names <= nodes)
                .map(|names| measured(*nodes, *names))
        });
        for (name, svg) in plots(&all.collect::<Vec<_>>()) {
            assert_snapshot!(name, svg);
        }
    }

    #[test]
    fn a_single_size_gives_no_plot() {
        let names = |measured: &[FilterMeasurement]| {
            plots(measured)
                .into_iter()
                .map(|(name, _)| name)
                .collect::<Vec<_>>()
        };
        assert_eq!(
            names(&[measured(500, 100), measured(500, 500)]),
            ["latency-by-names"]
        );
        assert_eq!(
            names(&[measured(500, 50), measured(1000, 50)]),
            ["latency-by-nodes", "memory-and-start"]
        );
        assert!(names(&[measured(500, 500)]).is_empty());
    }
}
