//! The simulated kubelet against the testbed's API server and a scripted device plugin, over their real sockets.

mod admission;
mod allocation;
#[cfg(test)]
mod node;
#[cfg(test)]
mod plugin;
mod plugin_life;
mod pod_life;
mod pod_resources;
mod restart;
mod start;
