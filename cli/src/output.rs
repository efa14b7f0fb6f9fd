//! The terminal: its width and colours, tables, and the end of a pipe.

use std::io::{self, ErrorKind, IsTerminal, Write};

use console::{Term, measure_text_width};
use serde::Serialize;

use crate::args::{Format, OutputArgs};
use crate::failure::CommandFailure;

/// The least width of a last column with sentences, which are broken into lines of this width at least.
const MIN_SENTENCE: usize = 30;
const GAP: &str = "   ";

/// Standard output and standard error, and the form of answers on them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Screen {
    /// Columns; `None` if the output is no terminal, where lines may have any length.
    pub(crate) width: Option<usize>,
    /// True if texts may be painted: on a terminal that is not dumb, unless the user forbids it.
    pub(crate) has_colour: bool,
    /// False where the locale may not show block characters.
    pub(crate) has_blocks: bool,
    pub(crate) has_headers: bool,
    pub(crate) format: Format,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Colour {
    Red = 31,
    Green = 32,
    Yellow = 33,
    Blue = 34,
    Magenta = 35,
    Cyan = 36,
    Grey = 90,
}

impl Screen {
    /// The screen of this process, by its terminal, its environment and the flags.
    pub(crate) fn of_process(output: &OutputArgs) -> Self {
        let (_, columns) = Term::stdout().size();
        // A pipe has no width, so that tables there have all their columns.
        let width = io::stdout().is_terminal().then_some(columns.into());
        Self::new(output, width, |name| std::env::var(name).unwrap_or_default())
    }

    /// The screen of a terminal with this width, or of a pipe. `variable` reads an environment variable; an unset one is empty.
    fn new(output: &OutputArgs, width: Option<usize>, variable: impl Fn(&str) -> String) -> Self {
        // By no-color.org an empty variable does not count.
        let may_colour = variable("NO_COLOR").is_empty() && variable("TERM") != "dumb";
        // POSIX: the first that is set decides.
        let mut locales = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().map(&variable);
        let locale = locales
            .find(|locale| !locale.is_empty())
            .unwrap_or_default()
            .to_ascii_lowercase();
        Self {
            // A user who exports the variable wants this width, on a pipe too.
            width: variable("COLUMNS").parse().ok().filter(|n| *n > 0).or(width),
            has_colour: width.is_some() && may_colour,
            has_blocks: locale.contains("utf-8") || locale.contains("utf8"),
            has_headers: !output.no_headers,
            format: output.output,
        }
    }

    /// Returns true if answers are tables, and not JSON, YAML or names.
    pub(crate) fn is_table(&self) -> bool {
        matches!(self.format, Format::Table | Format::Wide)
    }

    /// The same screen, with tables without column names.
    pub(crate) fn without_headers(self) -> Self {
        Self {
            has_headers: false,
            ..self
        }
    }

    pub(crate) fn check_order(&self, sort_by: Option<&str>) -> Result<(), CommandFailure> {
        if sort_by.is_none() || self.is_table() {
            return Ok(());
        }
        let text = "--sort-by orders the rows of a table: leave it out, or use -o table or -o wide";
        Err(CommandFailure::Input(text.to_owned()))
    }

    pub(crate) fn paint(&self, colour: Colour, text: &str) -> String {
        if self.has_colour {
            format!("\u{1b}[{}m{text}\u{1b}[0m", colour as u8)
        } else {
            text.to_owned()
        }
    }

    /// A text whose lines are broken between words where the screen is narrower, with `indent` blanks before the rest of a line.
    /// A command in backticks stays in one line, so that it can be copied.
    pub(crate) fn wrap(&self, indent: usize, text: &str) -> String {
        let Some(width) = self.width else {
            return text.to_owned();
        };
        let mut wrapped = String::new();
        for line in text.split_inclusive('\n') {
            let (mut column, mut rest) = (0, line);
            while !rest.is_empty() {
                let (word, behind) = rest.split_at(end_of_word(rest));
                rest = behind;
                if column > indent && column + measure_text_width(word.trim_end()) > width {
                    wrapped.truncate(wrapped.trim_end_matches(' ').len());
                    wrapped += &format!("\n{:indent$}", "");
                    column = indent;
                }
                wrapped += word;
                column += measure_text_width(word.trim_end_matches('\n'));
            }
        }
        wrapped
    }

    /// Writes a text to standard output, and shows it at once.
    #[expect(clippy::unused_self, reason = "the screen stands for the process's output")]
    pub(crate) fn print(&self, text: &str) -> Result<(), CommandFailure> {
        let mut out = io::stdout().lock();
        let written = out.write_all(text.as_bytes());
        // Flushed, since standard output may hold back the end of a text.
        match written.and(out.flush()) {
            Ok(()) => Ok(()),
            // `head` and pagers end early, which is no failure of the command.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Err(CommandFailure::ClosedPipe),
            Err(error) => Err(CommandFailure::Output(error)),
        }
    }

    pub(crate) fn complain(&self, line: &str) {
        // Nothing is left to do if standard error is closed.
        let _ = writeln!(io::stderr(), "{}", self.wrap(0, line));
    }

    /// Writes an answer in the form of `-o`: the answer itself as JSON or YAML, its names line by line, or a text. `text` is
    /// called with true for `wide`.
    pub(crate) fn show(
        &self,
        answer: &impl Serialize,
        names: impl IntoIterator<Item = String>,
        text: impl FnOnce(bool) -> String,
    ) -> Result<(), CommandFailure> {
        let shown = match self.format {
            Format::Yaml => serde_yaml_ng::to_string(answer).map_err(CommandFailure::input)?,
            Format::Json => serde_json::to_string_pretty(answer).map_err(CommandFailure::input)? + "\n",
            Format::Name => names.into_iter().map(|name| name + "\n").collect(),
            Format::Table | Format::Wide => text(self.format == Format::Wide),
        };
        self.print(&shown)
    }
}

/// The index behind the first word of a text and the blank after it. A command in backticks is one word.
fn end_of_word(text: &str) -> usize {
    let mut is_command = false;
    for (idx, letter) in text.char_indices() {
        is_command ^= letter == '`';
        if letter == ' ' && !is_command {
            return idx + 1;
        }
    }
    text.len()
}

/// A table of text, which leaves columns out where it is wider than the screen.
#[derive(Debug)]
pub(crate) struct TextTable {
    columns: Vec<Column>,
    rows: Vec<Vec<Cell>>,
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Column {
    pub(crate) name: &'static str,
    /// If the screen is too narrow, columns of higher ranks are left out first, and those of rank 0 never.
    pub(crate) rank: u8,
    pub(crate) is_number: bool,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Cell {
    text: String,
    colour: Option<Colour>,
    /// The amount by which [`TextTable::sort_by`] orders the rows.
    amount: Option<u64>,
}

/// A column of text, with its [`Column::rank`].
pub(crate) const fn text(name: &'static str, rank: u8) -> Column {
    Column {
        name,
        rank,
        is_number: false,
    }
}

/// A column of numbers, aligned to the right, with its [`Column::rank`].
pub(crate) const fn number(name: &'static str, rank: u8) -> Column {
    Column {
        name,
        rank,
        is_number: true,
    }
}

impl<T: Into<String>> From<T> for Cell {
    fn from(text: T) -> Self {
        Self {
            text: text.into(),
            ..Self::default()
        }
    }
}

impl Cell {
    pub(crate) fn coloured(text: impl Into<String>, colour: Colour) -> Self {
        Self {
            colour: Some(colour),
            ..Self::from(text)
        }
    }

    pub(crate) fn red_if(self, is_wrong: bool) -> Self {
        Self {
            colour: is_wrong.then_some(Colour::Red),
            ..self
        }
    }

    pub(crate) fn or_dash(text: &str) -> Self {
        Self::from(if text.is_empty() { "-" } else { text })
    }

    pub(crate) fn number(n: u64) -> Self {
        Self::from(n.to_string()).with_amount(n)
    }

    pub(crate) fn percent(percent: u64) -> Self {
        Self::from(format!("{percent} %")).with_amount(percent)
    }

    /// The same text for this amount, which orders the rows of a table.
    pub(crate) fn with_amount(self, amount: u64) -> Self {
        Self {
            amount: Some(amount),
            ..self
        }
    }

    /// The number of columns of the screen that the text takes, without control sequences.
    fn width(&self) -> usize {
        measure_text_width(&self.text)
    }
}

impl TextTable {
    pub(crate) fn new(columns: impl Into<Vec<Column>>) -> Self {
        Self {
            columns: columns.into(),
            rows: Vec::new(),
        }
    }

    pub(crate) fn push(&mut self, row: impl Into<Vec<Cell>>) {
        self.rows.push(row.into());
    }

    /// Removes the columns with these names, and their cells, unless `is_shown`.
    pub(crate) fn show_if(&mut self, is_shown: bool, names: &[&str]) {
        if is_shown {
            return;
        }
        let is_left_out = |column: &Column| names.contains(&column.name);
        for row in &mut self.rows {
            let mut columns = self.columns.iter();
            row.retain(|_| !columns.next().is_some_and(is_left_out));
        }
        self.columns.retain(|column| !is_left_out(column));
    }

    /// Orders the rows by a column: the largest amount first, rows without one last; texts by the alphabet.
    pub(crate) fn sort_by(&mut self, name: &str) -> Result<(), CommandFailure> {
        let mut columns = self.columns.iter();
        let Some(idx) = columns.position(|column| column.name.eq_ignore_ascii_case(name)) else {
            let names: Vec<&str> = self.columns.iter().map(|column| column.name).collect();
            return Err(CommandFailure::Input(format!(
                "--sort-by {name}: the table has no such column; name one of {}",
                names.join(", ")
            )));
        };
        let empty = Cell::default();
        self.rows.sort_by(|one, other| {
            let (one, other) = (one.get(idx).unwrap_or(&empty), other.get(idx).unwrap_or(&empty));
            let by_amount = other.amount.cmp(&one.amount);
            by_amount.then_with(|| one.text.cmp(&other.text))
        });
        Ok(())
    }

    /// The table as text, without the columns for which the screen has no room.
    pub(crate) fn render(&self, screen: &Screen) -> String {
        let mut rows = self.rows.clone();
        if screen.has_headers {
            let names = self.columns.iter().map(|column| Cell::from(column.name));
            rows.insert(0, names.collect());
        }
        let mut widths = vec![0; self.columns.len()];
        for row in &rows {
            for (width, cell) in widths.iter_mut().zip(row) {
                *width = cell.width().max(*width);
            }
        }
        let shown = self.columns_that_fit(&widths, screen.width);
        let mut lines = String::new();
        for row in &rows {
            // `start` is the column of the screen in which the cell begins.
            let (mut separator, mut start) = ("", 0);
            for (idx, ((column, cell), width)) in self.columns.iter().zip(row).zip(&widths).enumerate() {
                if !shown.contains(&idx) {
                    continue;
                }
                let padding = " ".repeat(width.saturating_sub(cell.width()));
                let is_last_text = !column.is_number && shown.last() == Some(&idx);
                // The blanks, which are cut off again, have `wrap` count the columns in front of the cell.
                let text = if is_last_text {
                    let text = screen.wrap(start, &format!("{:start$}{}", "", cell.text));
                    text.get(start..).unwrap_or_default().to_owned()
                } else {
                    cell.text.clone()
                };
                let painted = match cell.colour {
                    Some(colour) => screen.paint(colour, &text),
                    None => text,
                };
                start += width + GAP.len();
                lines += separator;
                if column.is_number {
                    lines += &padding;
                }
                lines += &painted;
                // Blanks at the end of a line would wrap on a narrow terminal.
                if !column.is_number && !is_last_text {
                    lines += &padding;
                }
                separator = GAP;
            }
            lines += "\n";
        }
        lines
    }

    /// The indices of the columns that fit a screen `limit` wide: those of the highest rank are left out first, from the right.
    fn columns_that_fit(&self, widths: &[usize], limit: Option<usize>) -> Vec<usize> {
        let mut shown: Vec<usize> = (0..self.columns.len()).collect();
        let Some(limit) = limit else { return shown };
        let mut widths = widths.to_vec();
        // Sentences in a last column of rank 0 are broken into lines, so that a part of the column's width is enough.
        if let (Some(width), Some(column)) = (widths.last_mut(), self.columns.last())
            && column.rank == 0
            && !column.is_number
        {
            *width = MIN_SENTENCE.min(*width);
        }
        let mut total = widths.iter().sum::<usize>() + GAP.len() * widths.len().saturating_sub(1);
        while total > limit {
            let columns = self.columns.iter().enumerate();
            let ranked = columns.filter(|(idx, column)| column.rank > 0 && shown.contains(idx));
            // If all columns that are left have rank 0, the terminal wraps their lines.
            let Some((left_out, _)) = ranked.max_by_key(|(_, column)| column.rank) else {
                break;
            };
            shown.retain(|idx| *idx != left_out);
            total = total.saturating_sub(widths.get(left_out).copied().unwrap_or_default() + GAP.len());
        }
        shown
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Screen {
        /// A pipe that shows neither colours nor blocks.
        pub(crate) const PLAIN: Self = Self {
            width: None,
            has_colour: false,
            has_blocks: false,
            has_headers: true,
            format: Format::Table,
        };

        pub(crate) fn plain(width: usize) -> Self {
            Self {
                width: Some(width),
                ..Self::PLAIN
            }
        }
    }

    fn screen(width: usize) -> Screen {
        Screen {
            has_blocks: true,
            ..Screen::plain(width)
        }
    }

    #[test]
    fn columns_of_low_importance_go_when_the_terminal_is_narrow() {
        let mut table = TextTable::new([
            text("NODE", 0),
            number("FREE", 1),
            text("UUID", 3),
            text("HEALTH", 2),
        ]);
        table.push([Cell::from("n1"), "7.5 GiB".into(), "GPU-1234".into(), "ok".into()]);
        assert_eq!(
            table.render(&screen(80)),
            "NODE      FREE   UUID       HEALTH\nn1     7.5 GiB   GPU-1234   ok\n"
        );
        assert_eq!(
            table.render(&screen(25)),
            "NODE      FREE   HEALTH\nn1     7.5 GiB   ok\n"
        );
        assert_eq!(table.render(&screen(5)), "NODE\nn1\n");
    }

    #[test]
    fn sentences_are_broken_between_words_and_commands_are_not() {
        let sentence = "the node waits: `kubectl label node n1 gpushare=true` ends that\n";
        assert_eq!(
            screen(24).wrap(2, sentence),
            "the node waits:\n  `kubectl label node n1 gpushare=true`\n  ends that\n"
        );
        let mut table = TextTable::new([text("NODE", 0), text("NEXT STEP", 0)]);
        table.push([
            Cell::from("n1"),
            "remove the old plugin's label from the node".into(),
        ]);
        assert_eq!(
            table.render(&screen(40)),
            "NODE   NEXT STEP\nn1     remove the old plugin's label\n       from the node\n"
        );
    }

    #[test]
    fn a_table_without_headers_has_only_rows() {
        let mut table = TextTable::new([text("NODE", 0), number("FREE", 1)]);
        table.push([Cell::from("n1"), "7.5 GiB".into()]);
        assert_eq!(table.render(&screen(80).without_headers()), "n1   7.5 GiB\n");
    }

    #[test]
    fn the_environment_decides_on_colours_and_blocks() {
        let screen = |width, variables: &[(&str, &str)]| {
            let value = |name: &str| variables.iter().find(|(key, _)| *key == name);
            let variable = |name: &str| value(name).map_or("", |(_, text)| text).to_owned();
            let screen = Screen::new(&OutputArgs::default(), width, variable);
            (screen.has_colour, screen.has_blocks)
        };
        let terminal = Some(80);
        assert_eq!(screen(terminal, &[("LANG", "en_US.UTF-8")]), (true, true));
        assert_eq!(screen(None, &[("LANG", "C.utf8")]), (false, true));
        assert_eq!(screen(terminal, &[("NO_COLOR", "1")]), (false, false));
        assert_eq!(screen(terminal, &[("NO_COLOR", "")]), (true, false));
        assert_eq!(screen(terminal, &[("TERM", "dumb")]), (false, false));
        assert_eq!(
            screen(terminal, &[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")]),
            (true, false)
        );
    }

    #[test]
    fn colours_take_no_columns() {
        let mut table = TextTable::new([text("A", 0), text("B", 0)]);
        table.push([Cell::coloured("x", Colour::Red), "y".into()]);
        let coloured = Screen {
            has_colour: true,
            ..screen(80)
        };
        assert_eq!(table.render(&coloured), "A   B\n\u{1b}[31mx\u{1b}[0m   y\n");
    }
}
