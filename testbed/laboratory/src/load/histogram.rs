//! The daemon's own histogram of request times, read from its metrics.

use std::collections::BTreeMap;

/// Requests by bucket: the bucket's upper bound in nanoseconds, and the number of requests that took at most
/// that long.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Histogram(BTreeMap<u64, u64>);

const METRIC: &str = "gpushare_scheduler_request_seconds_bucket{";

impl Histogram {
    /// Reads the histogram of one verb from the text of `/metrics`.
    pub(super) fn of(metrics: &str, verb: &str) -> Self {
        let verb = format!("verb=\"{verb}\"");
        let lines = metrics
            .lines()
            .filter_map(|line| line.strip_prefix(METRIC))
            .filter(|line| line.contains(&verb));
        let bucket = |line: &str| {
            let (_, bound) = line.split_once("le=\"")?;
            let (bound, _) = bound.split_once('"')?;
            let (_, count) = line.rsplit_once("} ")?;
            let seconds: f64 = if bound == "+Inf" {
                f64::from(u32::MAX)
            } else {
                bound.parse().ok()?
            };
            Some((
                std::time::Duration::from_secs_f64(seconds)
                    .as_nanos()
                    .try_into()
                    .ok()?,
                count.trim().parse().ok()?,
            ))
        };
        Self(lines.filter_map(bucket).collect())
    }

    /// The requests since an earlier state of the histogram.
    pub(super) fn since(&self, earlier: &Self) -> Self {
        let count = |bound| earlier.0.get(bound).copied().unwrap_or(0);
        Self(
            self.0
                .iter()
                .map(|(bound, n)| (*bound, n.saturating_sub(count(bound))))
                .collect(),
        )
    }

    /// A percentile in milliseconds, interpolated within its bucket.
    pub(super) fn millis(&self, percent: f64) -> f64 {
        // Prometheus' buckets are cumulative, so that the largest count is the total.
        let float = |n: u64| f64::from(u32::try_from(n).unwrap_or(u32::MAX));
        let millis = |nanos: u64| std::time::Duration::from_nanos(nanos).as_secs_f64() * 1000.0;
        let total = self.0.values().copied().max().unwrap_or(0);
        let wanted = float(total) * percent / 100.0;
        let (mut below, mut n_below) = (0, 0);
        for (bound, n) in &self.0 {
            if float(*n) >= wanted && *n > n_below {
                let part = (wanted - float(n_below)) / float(n - n_below);
                // The bucket `+Inf` says only that requests took longer than the bound before it.
                return if *bound > 1 << 40 {
                    millis(below)
                } else {
                    millis(below) + part * (millis(*bound) - millis(below))
                };
            }
            (below, n_below) = (*bound, *n);
        }
        0.0
    }
}

#[cfg(test)]
mod tests {
    use super::Histogram;

    const BEFORE: &str = r#"
# TYPE gpushare_scheduler_request_seconds histogram
gpushare_scheduler_request_seconds_bucket{le="0.0001",verb="filter"} 10
gpushare_scheduler_request_seconds_bucket{le="0.0003",verb="filter"} 10
gpushare_scheduler_request_seconds_bucket{le="+Inf",verb="filter"} 10
"#;
    const AFTER: &str = r#"
gpushare_scheduler_request_seconds_sum{verb="filter"} 0.5
gpushare_scheduler_request_seconds_bucket{le="0.0001",verb="filter"} 60
gpushare_scheduler_request_seconds_bucket{le="0.0003",verb="filter"} 100
gpushare_scheduler_request_seconds_bucket{le="+Inf",verb="filter"} 110
gpushare_scheduler_request_seconds_bucket{le="0.0001",verb="bind"} 7
"#;

    #[test]
    fn latencies_are_read_from_the_difference_of_two_scrapes() {
        let news = Histogram::of(AFTER, "filter").since(&Histogram::of(BEFORE, "filter"));
        let close = |percent: f64, millis: f64| {
            assert!(
                (news.millis(percent) - millis).abs() < 1e-6,
                "{percent}: {}",
                news.millis(percent)
            );
        };
        close(25.0, 0.05);
        close(50.0, 0.1);
        close(70.0, 0.2);
        close(100.0, 0.3);
        assert!(Histogram::default().millis(50.0).abs() < f64::EPSILON);
    }
}
