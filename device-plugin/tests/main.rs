//! The plugin through its sockets, on simulated devices and on a stand-in for the driver's library: one program, since most of
//! these tests wait.

#[cfg(test)]
#[path = "scene/kubelet.rs"]
mod fake_kubelet;
mod kubelet;
#[cfg(test)]
#[path = "stand_in/machine.rs"]
mod machine;
mod memory_use;
#[cfg(test)]
#[path = "scene/node.rs"]
mod node;
mod nvml;
mod old_plugin_bugs;
mod other_resources;
mod process;
