//! The simulated kubelet against the testbed's API server and a scripted device plugin, over their real sockets.

#[cfg(test)]
mod admission;
#[cfg(test)]
mod allocation;
#[cfg(test)]
mod hold;
#[cfg(test)]
mod node;
#[cfg(test)]
mod plugin;
#[cfg(test)]
mod plugin_life;
#[cfg(test)]
mod pod_life;
#[cfg(test)]
mod pod_resources;
#[cfg(test)]
mod restart;
#[cfg(test)]
mod start;
#[cfg(test)]
mod vendor;
