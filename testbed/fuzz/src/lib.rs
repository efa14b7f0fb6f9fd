//! Inputs for the tests of everything that reads bytes from outside: sound ones, damaged a few times.
//!
//! A strategy of `proptest` damages seeds, so that a failure shrinks to the fewest damages, and `PROPTEST_CASES` sets the number
//! of inputs. Seeds are the recorded data of the crate under test. What the damages do is not guided by coverage: seeds have to
//! reach the code.

mod bytes;
mod json;

pub use bytes::damaged;
pub use json::damaged_json;

/// `proptest`'s configuration for a target: this number of inputs, unless `PROPTEST_CASES` names another.
pub fn config(cases: u32) -> proptest::test_runner::Config {
    let usual = proptest::test_runner::Config::default();
    let is_set = std::env::var_os("PROPTEST_CASES").is_some();
    proptest::test_runner::Config {
        cases: if is_set { usual.cases } else { cases },
        // The failing input is printed; findings become seeds or tests of their own.
        failure_persistence: None,
        ..usual
    }
}
