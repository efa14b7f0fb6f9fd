//! The history: the totals of each GPU model, one point a minute for 24 hours, in memory.

use std::collections::{BTreeMap, VecDeque};

use proto::read_api::{History, HistoryPoint, Totals, VERSION};

/// Most points of the history: those of 24 hours.
const MAX_POINTS: usize = 24 * 60;
/// Most models of a point, so that a day takes at most 10 MB; all further models are summed up.
const MAX_MODELS: usize = 32;
const OTHERS: &str = "others";

/// The points of the last 24 hours, the oldest first.
#[derive(Debug, Default)]
pub(super) struct HistoryRecorder(VecDeque<HistoryPoint>);

impl HistoryRecorder {
    /// Adds a point at a time in unix seconds.
    pub(super) fn record(&mut self, time: u64, pending: usize, models: &BTreeMap<String, Totals>) {
        let mut kept: BTreeMap<String, Totals> = BTreeMap::new();
        // In the order of names: while the models stay the same, every point sums up the same ones under `OTHERS`.
        for (model, totals) in models {
            let name = if kept.len() < MAX_MODELS { model } else { OTHERS };
            match kept.get_mut(name) {
                Some(sum) => sum.add(totals),
                None => drop(kept.insert(name.to_owned(), *totals)),
            }
        }
        // The oldest point makes room, so that the memory is bounded.
        if self.0.len() == MAX_POINTS {
            self.0.pop_front();
        }
        self.0.push_back(HistoryPoint {
            time,
            pending,
            models: kept,
        });
    }

    pub(super) fn history(&self) -> History {
        History {
            api_version: VERSION.to_owned(),
            points: self.0.iter().cloned().collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_day_has_at_most_1440_points_and_32_models() {
        let mut recorder = HistoryRecorder::default();
        let totals = Totals {
            gpus: 1,
            ..Totals::default()
        };
        let models = (0..100)
            .map(|n| (format!("{:>03}{}", n, "m".repeat(60)), totals))
            .collect();
        for minute in 0..2000 {
            recorder.record(minute * 60, 0, &models);
        }
        let history = recorder.history();
        assert_eq!(history.points.len(), 1440);
        assert_eq!(history.points[0].time, 560 * 60);
        let point = &history.points[1439];
        assert_eq!(point.models.len(), 33);
        assert_eq!(point.models.values().map(|model| model.gpus).sum::<u32>(), 100);
        let in_memory = 1440 * 33 * (size_of::<(String, Totals)>() + 63);
        assert!(in_memory < 10_000_000, "{in_memory} bytes");
    }
}
