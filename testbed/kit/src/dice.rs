//! Random generators that depend on a seed and the name of a decision, and so not on how tasks interleave.

use rand::SeedableRng;
use rand::rngs::StdRng;

/// The constants of the hash FNV-1a.
const OFFSET: u64 = 0xcbf2_9ce4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01b3;

/// A generator for one decision, named by `parts`.
pub fn dice(seed: u64, parts: &[&str]) -> StdRng {
    let bytes = parts.iter().flat_map(|part| part.bytes().chain([0]));
    let hash = seed
        .to_le_bytes()
        .into_iter()
        .chain(bytes)
        .fold(OFFSET, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(PRIME));
    StdRng::seed_from_u64(hash)
}
