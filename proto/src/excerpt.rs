//! Values of annotations and other fields, as errors show them: in part, and in quotes.

/// Most characters of a value that an error repeats: a pod's author may have written a file there.
const EXCERPT: usize = 64;

/// The first [`EXCERPT`] characters of a value.
pub(crate) fn excerpt(text: &str) -> String {
    text.chars().take(EXCERPT).collect()
}

/// The beginning of a value in quotes: in single ones if it has double ones, as JSON has, and then needs no backslash.
pub(crate) fn quoted(value: &str) -> String {
    let mut shown = excerpt(value);
    if shown.len() < value.len() {
        shown.push('…');
    }
    let escaped = format!("{shown:?}");
    if shown.contains('"') && !shown.contains('\'') && escaped.replace("\\\"", "\"") == format!("\"{shown}\"")
    {
        format!("'{shown}'")
    } else {
        escaped
    }
}
