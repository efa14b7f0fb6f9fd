//! Plots of the cost of a filter over the number of names in a request, and over the size of the cluster.

use anyhow::Result;

use super::filter::FilterMeasurement;
use crate::plot::{self, Axis, Curve, CurvePanel, grouped};

/// The number of node names in a request by which clusters of several sizes are compared, if it was measured: as many as
/// kube-scheduler samples by default in a cluster of 5,000 nodes.
const N_SAMPLED_NAMES: u32 = 500;
/// The legend of the latency plots: where each curve was measured.
const MEASURED_BY: [&str; 3] = [
    "seen by the client",
    "the same of a server that does nothing",
    "in the daemon",
];

/// The plots for which there are at least two measurements, with their names.
pub(super) fn plots(measured: &[FilterMeasurement]) -> Result<Vec<(String, String)>> {
    let Some(largest) = measured.iter().max_by_key(|one| one.nodes) else {
        return Ok(Vec::new());
    };
    let of_largest = measured.iter().filter(|one| one.nodes == largest.nodes);
    let of_largest: Vec<&FilterMeasurement> = of_largest.collect();
    let is_sampled = measured.iter().any(|one| one.names == N_SAMPLED_NAMES);
    let n_names = if is_sampled {
        N_SAMPLED_NAMES
    } else {
        largest.names
    };
    let alike: Vec<&FilterMeasurement> = measured.iter().filter(|one| one.names == n_names).collect();
    let clusters = measured.chunk_by(|one, other| one.nodes == other.nodes);
    // The last measurement of a cluster has its final memory.
    let clusters: Vec<&FilterMeasurement> = clusters.filter_map(<[_]>::last).collect();
    let (nodes, pods) = (with_commas(largest.nodes), with_commas(largest.pods));
    let mut plots = Vec::new();
    if of_largest.len() > 1 {
        let title = format!("Filter by names in the request: {nodes} nodes, {pods} pods");
        let svg = latencies(&title, "names in the request", &of_largest, n_names_of)?;
        plots.push(("latency-by-names".to_owned(), svg));
    }
    if alike.len() > 1 {
        let names = with_commas(n_names);
        let title = format!("Filter by nodes of the cluster: requests of {names} names");
        let svg = latencies(&title, "nodes of the cluster", &alike, n_nodes)?;
        plots.push(("latency-by-nodes".to_owned(), svg));
    }
    if clusters.len() > 1 {
        plots.push(("memory-and-start".to_owned(), memory_and_start(&clusters)?));
    }
    Ok(plots)
}

fn n_names_of(measured: &FilterMeasurement) -> f64 {
    f64::from(measured.names)
}

fn n_nodes(measured: &FilterMeasurement) -> f64 {
    f64::from(measured.nodes)
}

/// Plots median and 99th percentile over a size of the measurement, on logarithmic axes.
fn latencies(
    title: &str,
    x_label: &str,
    measured: &[&FilterMeasurement],
    size: fn(&FilterMeasurement) -> f64,
) -> Result<String> {
    let (mut medians, mut slowest) = (vec![Curve::default(); 3], vec![Curve::default(); 3]);
    for one in measured {
        let x = size(one);
        // The arrays have the median first, and the 99th percentile at 2, of the daemon at 1.
        let of_one = [one.millis[0], one.floor_millis[0], one.daemon_millis[0]];
        push(&mut medians, x, of_one);
        let of_one = [one.millis[2], one.floor_millis[2], one.daemon_millis[1]];
        push(&mut slowest, x, of_one);
    }
    let (from, to) = extent(measured.iter().map(|one| size(one)));
    let (lowest, highest) = extent(heights(medians.iter().chain(&slowest)));
    let mut panels = Vec::new();
    for (heading, curves) in [("median", medians), ("99th percentile", slowest)] {
        panels.push(CurvePanel {
            heading: heading.to_owned(),
            x: Axis::Logarithmic(from..to),
            // Both panels have one scale, so that median and 99th percentile can be compared by eye.
            y: Axis::Logarithmic(lowest..highest),
            curves,
        });
    }
    plot::curves(title, (x_label, "milliseconds"), &MEASURED_BY, &panels)
}

/// Plots resident memory, and the time from the process's start until it is ready, over the nodes of the cluster.
fn memory_and_start(clusters: &[&FilterMeasurement]) -> Result<String> {
    let (mut memory, mut start) = (vec![Curve::default(); 2], vec![Curve::default()]);
    for one in clusters {
        // Resident memory when the scheduler was ready, and at the end.
        push(&mut memory, n_nodes(one), [one.rss_mib[0], one.rss_mib[1]]);
        push(&mut start, n_nodes(one), [one.ready_seconds]);
    }
    let (_, widest) = extent(clusters.iter().map(|one| n_nodes(one)));
    let mut panels = Vec::new();
    for (heading, curves) in [("resident memory, MiB", memory), ("start to ready, s", start)] {
        let (_, highest) = extent(heights(&curves));
        panels.push(CurvePanel {
            heading: heading.to_owned(),
            x: Axis::Linear(0.0..widest),
            y: Axis::Linear(0.0..highest),
            curves,
        });
    }
    let most = clusters.iter().max_by_key(|one| one.nodes);
    let (nodes, pods) = most.map_or((0, 0), |most| (most.nodes, most.pods));
    let (nodes, pods) = (with_commas(nodes), with_commas(pods));
    let title = format!("Memory and start by nodes of the cluster: up to {nodes} nodes with {pods} pods");
    let legend = ["when it is ready", "after all questions"];
    plot::curves(&title, ("nodes of the cluster", ""), &legend, &panels)
}

fn heights<'a>(curves: impl IntoIterator<Item = &'a Curve>) -> impl Iterator<Item = f64> {
    let points = curves.into_iter().flat_map(|curve| &curve.points);
    points.map(|(_, y)| *y)
}

fn push<const N: usize>(curves: &mut [Curve], x: f64, values: [f64; N]) {
    for (curve, value) in curves.iter_mut().zip(values) {
        curve.points.push((x, value));
        curve.points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
    }
}

/// The least and the greatest of some positive values, neither below 0.0001.
fn extent(values: impl Iterator<Item = f64>) -> (f64, f64) {
    let (mut least, mut greatest) = (f64::INFINITY, 0.0_f64);
    for value in values {
        (least, greatest) = (least.min(value), greatest.max(value));
    }
    // A duration may be zero by the clock, and zero has no place on a logarithmic axis.
    (least.max(1e-4).min(greatest.max(1e-4)), greatest.max(1e-4))
}

fn with_commas(n: u32) -> String {
    grouped(f64::from(n))
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
            step_millis: [0.0; 2],
            daemon_millis: [millis(3e-5), 2.0 * millis(3e-5)],
            binds_per_second: 0.0,
            failed_binds: 0,
            views_per_second: 0.0,
            view_mib: 0.0,
            throughput: Vec::new(),
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
        for (name, svg) in plots(&all.collect::<Vec<_>>()).unwrap() {
            assert_snapshot!(name, svg);
        }
    }

    #[test]
    fn a_single_size_gives_no_plot() {
        let names = |measured: &[FilterMeasurement]| {
            plots(measured)
                .unwrap()
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
