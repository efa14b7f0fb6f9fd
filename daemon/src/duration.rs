//! Durations as values of flags.

use std::time::Duration;

/// Parses a duration such as `500ms`, `4s` or `2m`; at most 24 hours. The error says how to write one.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    let units = [("ms", 1), ("s", 1000), ("m", 60_000), ("h", 3_600_000)];
    match parse_time(text, &units) {
        Some(time) if time <= Duration::from_secs(86_400) => Ok(time),
        _ => Err("write a whole number and ms, s, m or h, such as 500ms or 4s; at most 24h".to_owned()),
    }
}

/// Parses a whole number and one of these units, each with its length in milliseconds; `None` for any other text.
pub fn parse_time(text: &str, units: &[(&str, u64)]) -> Option<Duration> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let (number, unit) = text.split_at(digits);
    let (_, millis) = units.iter().find(|(name, _)| *name == unit)?;
    let number: u64 = number.parse().ok()?;
    Some(Duration::from_millis(number.checked_mul(*millis)?))
}
