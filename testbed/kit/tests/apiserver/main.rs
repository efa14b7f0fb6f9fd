//! The API server over HTTP on loopback: admission policies as kube-apiserver applies them, and faults of watches.

#[cfg(test)]
mod faults;
#[cfg(test)]
mod policies;
#[cfg(test)]
mod raw;
