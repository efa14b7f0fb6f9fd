//! The API server's admission policies as kube-apiserver applies them, over HTTP on loopback.

#[cfg(test)]
mod policies;
#[cfg(test)]
mod raw;
