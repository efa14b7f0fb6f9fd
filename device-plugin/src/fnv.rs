//! A hash of texts, for device IDs and the names of CDI devices.

/// FNV-1a with 64 bits. Every version of the plugin computes the same hash: kubelet's checkpoint outlives the process.
pub(crate) fn fnv1a(text: &str) -> u64 {
    // The two numbers are the offset basis and the prime of FNV-1a.
    let mut hash = 0xcbf2_9ce4_8422_2325_u64;
    for byte in text.bytes() {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
    }
    hash
}
