//! The simulated kubelet against the testbed's API server and a scripted device plugin, over their real sockets: the behaviour
//! that gpushare's plugin depends on.

#[cfg(test)]
mod devices;
#[cfg(test)]
mod node;
#[cfg(test)]
mod plugin;
