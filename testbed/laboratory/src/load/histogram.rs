//! The daemon's own histogram of request times, read from its metrics.

/// The upper bound of each bucket in milliseconds, and the number of requests that took at most that long.
#[derive(Clone, Debug, Default)]
pub(super) struct Histogram(Vec<(f64, f64)>);

const METRIC: &str = "gpushare_scheduler_request_seconds_bucket{";

impl Histogram {
    pub(super) fn of(metrics: &str, verb: &str) -> Self {
        let verb = format!("verb=\"{verb}\"");
        let mut buckets = Vec::new();
        for line in metrics.lines() {
            if line.starts_with(METRIC)
                && line.contains(&verb)
                && let Some((_, bound)) = line.split_once("le=\"")
                && let Some((bound, _)) = bound.split_once('"')
                && let Some((_, count)) = line.rsplit_once(' ')
                && let (Ok(seconds), Ok(count)) = (bound.parse::<f64>(), count.parse())
            {
                buckets.push((seconds * 1000.0, count));
            }
        }
        Self(buckets)
    }

    pub(super) fn since(mut self, earlier: &Self) -> Self {
        for ((_, count), (_, before)) in self.0.iter_mut().zip(&earlier.0) {
            *count -= before;
        }
        self
    }

    /// A percentile in milliseconds, interpolated within its bucket.
    pub(super) fn millis(&self, percent: f64) -> f64 {
        // Prometheus' buckets are cumulative, so that the last count is the total.
        let total = self.0.last().map_or(0.0, |(_, count)| *count);
        let wanted = total * percent / 100.0;
        let (mut below, mut n_below) = (0.0, 0.0);
        for (bound, n) in self.0.iter().copied() {
            if n >= wanted && n > n_below {
                let part = (wanted - n_below) / (n - n_below);
                // The bucket `+Inf` says only that requests took longer than the bound before it.
                return if bound.is_infinite() {
                    below
                } else {
                    below + part * (bound - below)
                };
            }
            (below, n_below) = (bound, n);
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
