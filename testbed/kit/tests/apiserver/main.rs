//! The API server as real clients see it, over HTTP on loopback.

#[cfg(test)]
mod admission;
#[cfg(test)]
mod clients;
#[cfg(test)]
mod faults;
#[cfg(test)]
mod policies;
#[cfg(test)]
mod raw;
#[cfg(test)]
mod setup;
#[cfg(test)]
mod wire;
