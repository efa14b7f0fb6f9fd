//! Amounts as text, and the bar of a GPU's memory.

use proto::memory_text::memory_text;
use proto::read_api::Gpu;

use crate::output::{Cell, Colour, Screen};

const BAR_WIDTH: usize = 20;
/// The colours of the pods on a bar, in turn.
const POD_COLOURS: [Colour; 4] = [Colour::Blue, Colour::Cyan, Colour::Magenta, Colour::Green];

/// An amount of memory in a column: in MiB, GiB or TiB, with one digit after the point; below 1 MiB in bytes.
#[expect(clippy::cast_precision_loss, reason = "one digit is shown, to people")]
pub(crate) fn memory(bytes: u64) -> String {
    if bytes == 0 {
        "0".to_owned()
    } else if bytes < 1 << 20 {
        memory_text(bytes)
    } else if bytes < 1 << 30 {
        format!("{:.0} MiB", bytes as f64 / f64::from(1 << 20))
    } else if bytes < 1 << 40 {
        format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
    } else {
        format!("{:.1} TiB", (bytes >> 30) as f64 / 1024.0)
    }
}

pub(crate) fn memory_cell(bytes: u64) -> Cell {
    Cell::from(memory(bytes)).with_amount(bytes)
}

/// A part of a whole in percent, rounded.
pub(crate) fn percent(part: u64, whole: u64) -> u64 {
    // Bytes times a hundred do not fit into 64 bits for a large cluster.
    let rounded = (u128::from(part) * 100 + u128::from(whole / 2)) / u128::from(whole.max(1));
    u64::try_from(rounded).unwrap_or(u64::MAX)
}

/// A number with its noun, in the plural where it is not one.
pub(crate) fn count(n: impl Into<u64>, noun: &str) -> String {
    match n.into() {
        1 => format!("1 {noun}"),
        n => format!("{n} {noun}s"),
    }
}

/// Numbers, such as minors of GPUs, in one text.
pub(crate) fn joined(numbers: &[u32], separator: &str) -> String {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    numbers.join(separator)
}

/// A GPU's memory as a bar: a piece for each pod, then stranded or free memory.
pub(crate) fn bar(gpu: &Gpu, screen: &Screen) -> String {
    let total = gpu.memory.total.max(1);
    let (pieces, stranded, free) = if screen.has_blocks {
        (["█", "▓"], "░", "·")
    } else {
        (["#", "="], "~", ".")
    };
    let mut drawn = String::new();
    let (mut column, mut held) = (0, 0_u64);
    // Neighbours differ in their character, and where the screen has colours in their colour.
    let looks = pieces.into_iter().cycle().zip(POD_COLOURS.into_iter().cycle());
    for (holder, (piece, colour)) in gpu.holders.iter().zip(looks) {
        held = held.saturating_add(holder.memory);
        // Sums are rounded down, not each pod's memory, so that the pieces of many small pods are as long as their sum.
        let rounded = u128::from(held) * BAR_WIDTH as u128 / u128::from(total);
        let rounded = usize::try_from(rounded).unwrap_or(BAR_WIDTH).min(BAR_WIDTH);
        // A pod whose share rounds to nothing still gets a column, as long as there are any.
        let end = rounded.max((column + 1).min(BAR_WIDTH));
        drawn += &screen.paint(colour, &piece.repeat(end - column));
        column = end;
    }
    let (rest, colour) = if gpu.stranded > 0 {
        (stranded, Colour::Yellow)
    } else {
        (free, Colour::Grey)
    };
    drawn += &screen.paint(colour, &rest.repeat(BAR_WIDTH - column));
    format!("[{drawn}]")
}

#[cfg(test)]
mod tests {
    use proto::read_api::{Amount, Holder};
    use rstest::rstest;

    use super::*;

    #[rstest]
    #[case::empty(&[], 0, "[....................]")]
    #[case::two_pods(&[25, 25], 0, "[#####=====..........]")]
    #[case::stranded(&[50, 40], 10, "[##########========~~]")]
    #[case::many_small_pods(&[1; 12], 0, "[#=#=#=#=#=#=........]")]
    #[case::overcommitted(&[80, 80], 0, "[################====]")]
    fn bars(#[case] pods: &[u64], #[case] stranded: u64, #[case] expected: &str) {
        let holders = pods.iter().map(|memory| Holder {
            memory: *memory,
            ..Holder::default()
        });
        let gpu = Gpu {
            memory: Amount {
                total: 100,
                allocated: pods.iter().sum(),
            },
            stranded,
            holders: holders.collect(),
            ..Gpu::default()
        };
        assert_eq!(bar(&gpu, &Screen::PLAIN), expected);
    }

    #[rstest]
    #[case(0, "0")]
    #[case(512 << 20, "512 MiB")]
    #[case(3 << 29, "1.5 GiB")]
    #[case(5 << 39, "2.5 TiB")]
    fn amounts(#[case] bytes: u64, #[case] expected: &str) {
        assert_eq!(memory(bytes), expected);
    }
}
