//! Reads traces: nodes and pods, one per line, in comma-separated columns that the first line names.
//!
//! Cells have neither quotes nor commas. The models that a pod accepts, and its times, may be missing.
//! `objects` translates the rows to Kubernetes objects.

use std::path::Path;
use std::str::FromStr;

use anyhow::{Context, Result, ensure};
use kit::files;

/// GPU thousandths of a whole device.
pub const WHOLE: i64 = 1000;
/// Thousandths of a GPU in one percent: requests are in whole percents.
pub const PERCENT: i64 = 10;
/// The most GPUs of a node or a pod; a larger number in a trace is taken for a mistake.
const MAX_GPUS: usize = 1024;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeRow {
    pub name: String,
    pub cpu_milli: i64,
    pub memory_mib: i64,
    pub gpus: usize,
    pub model: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TracePod {
    pub name: String,
    pub cpu_milli: i64,
    pub memory_mib: i64,
    pub gpus: usize,
    pub gpu_milli: i64,
    /// The GPU models that it accepts, as the trace writes them (`T4|V100`); empty if it accepts any.
    pub models: String,
    /// True if it asks for whole GPUs by a vendor's resource.
    pub wants_vendor_resource: bool,
    /// Time of its arrival, in seconds, if the trace has it.
    pub created: Option<i64>,
    /// Time of its end, in seconds, if the trace has it.
    pub deleted: Option<i64>,
}

pub fn nodes(path: &Path) -> Result<Vec<NodeRow>> {
    nodes_of(&files::read(path)?).with_context(|| path.display().to_string())
}

pub fn pods(path: &Path) -> Result<Vec<TracePod>> {
    pods_of(&files::read(path)?).with_context(|| path.display().to_string())
}

pub fn nodes_of(text: &str) -> Result<Vec<NodeRow>> {
    parse(text, |row| {
        let gpus = row.number("gpu")?;
        ensure!(gpus <= MAX_GPUS, "gpu is {gpus}, which is absurd");
        Ok(NodeRow {
            name: row.text("sn")?.to_owned(),
            cpu_milli: row.number("cpu_milli")?,
            memory_mib: row.number("memory_mib")?,
            gpus,
            model: row.text("model")?.to_owned(),
        })
    })
}

pub fn pods_of(text: &str) -> Result<Vec<TracePod>> {
    parse(text, |row| {
        let pod = TracePod {
            name: row.text("name")?.to_owned(),
            cpu_milli: row.number("cpu_milli")?,
            memory_mib: row.number("memory_mib")?,
            gpus: row.number("num_gpu")?,
            gpu_milli: row.number("gpu_milli")?,
            models: row.cell("gpu_spec").unwrap_or_default().to_owned(),
            wants_vendor_resource: false,
            created: row.time("creation_time")?,
            deleted: row.time("deletion_time")?,
        };
        let (gpus, milli) = (pod.gpus, pod.gpu_milli);
        ensure!(gpus <= MAX_GPUS, "num_gpu is {gpus}, which is absurd");
        let is_amount = gpus == 0 || ((PERCENT..=WHOLE).contains(&milli) && milli % PERCENT == 0);
        ensure!(
            is_amount,
            "gpu_milli is {milli}: a pod asks for whole percents of a GPU, 10 to 1000 thousandths in steps of 10"
        );
        Ok(TracePod {
            // Published traces have leftovers in this column for pods without GPUs.
            gpu_milli: if gpus == 0 { 0 } else { milli },
            ..pod
        })
    })
}

/// Parses the rows of a CSV file whose first line names the columns.
fn parse<T>(text: &str, parse: impl Fn(TraceRow<'_>) -> Result<T>) -> Result<Vec<T>> {
    let mut lines = text.lines();
    let heads: Vec<&str> = lines
        .next()
        .context("the file is empty: its first line must name the columns")?
        .split(',')
        .map(str::trim)
        .collect();
    // Numbered as editors do: the first line names the columns.
    let filled = (2..).zip(lines).filter(|(_, line)| !line.trim().is_empty());
    let rows = filled.map(|(number, line)| {
        let cells = line.split(',').map(str::trim).collect();
        parse(TraceRow { heads: &heads, cells }).with_context(|| format!("line {number}"))
    });
    rows.collect()
}

struct TraceRow<'a> {
    heads: &'a [&'a str],
    cells: Vec<&'a str>,
}

impl TraceRow<'_> {
    /// The text in a column of the row; `None` if the file has no such column.
    fn cell(&self, column: &str) -> Option<&str> {
        let at = self.heads.iter().position(|head| *head == column)?;
        Some(self.cells.get(at).copied().unwrap_or_default())
    }

    fn text(&self, column: &str) -> Result<&str> {
        self.cell(column)
            .with_context(|| format!("there is no column {column}"))
    }

    /// The whole number in a column, zero or more; traces write some of them as `8.0`.
    fn number<T: FromStr>(&self, column: &str) -> Result<T> {
        let text = self.text(column)?;
        let whole = text.strip_suffix(".0").unwrap_or(text);
        let number = whole.parse().ok().filter(|_| !whole.starts_with(['-', '+']));
        number.with_context(|| format!("{column} is {text:?}, not a whole number"))
    }

    /// A time of a row, in seconds; `None` if the column is missing or empty.
    fn time(&self, column: &str) -> Result<Option<i64>> {
        match self.cell(column) {
            None | Some("") => Ok(None),
            Some(_) => self.number(column).map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    #[test]
    fn columns_of_a_trace_are_found_by_name() {
        let nodes = nodes_of("model,sn,gpu,memory_mib,cpu_milli\nT4,n1,2,1024,8000\n\n").unwrap();
        let model = "T4".to_owned();
        assert_eq!(
            nodes,
            [NodeRow {
                name: "n1".to_owned(),
                cpu_milli: 8000,
                memory_mib: 1024,
                gpus: 2,
                model
            }]
        );
        let pods =
            pods_of("name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,deletion_time\np1,500,64,1,460,A|B,7.0\np2,500,64,0,1000,,\n")
                .unwrap();
        assert_eq!(
            pods.iter()
                .map(|pod| (pod.gpu_milli, &*pod.models, pod.created, pod.deleted))
                .collect::<Vec<_>>(),
            [(460, "A|B", None, Some(7)), (0, "", None, None),]
        );
    }

    /// Four public lists have no column `gpu_spec`.
    #[test]
    fn columns_that_are_empty_may_be_absent() {
        let with = pods_of(
            "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,creation_time\np1,500,64,1,460,,\n",
        )
        .unwrap();
        let without = pods_of("name,cpu_milli,memory_mib,num_gpu,gpu_milli\np1,500,64,1,460\n").unwrap();
        assert_eq!(with, without);
        assert_eq!((&*without[0].models, without[0].created), ("", None));
    }

    #[rstest]
    #[case::empty("", "the file is empty: its first line must name the columns")]
    #[case::column("name\np", "line 2: there is no column cpu_milli")]
    #[case::negative(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np,-5,1,0,0,",
        r#"line 2: cpu_milli is "-5", not a whole number"#
    )]
    #[case::grain(
        "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec\np,5,1,1,455,",
        "line 2: gpu_milli is 455: a pod asks for whole percents of a GPU, 10 to 1000 thousandths in steps of 10"
    )]
    fn the_error_names_an_unreadable_object(#[case] text: &str, #[case] message: &str) {
        assert_eq!(format!("{:#}", pods_of(text).unwrap_err()), message);
    }
}
