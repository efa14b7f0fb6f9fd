//! One simulated node: a kubelet, a file of GPUs, and the real device plugin as a process.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::api::PostParams;
use kube::{Api, Client, ResourceExt};
use proto::resource::{GPU_MEM, GPU_SHARED};
use serde_json::{Value, json};

use super::gpu_programs::{InventoryFile, memory_use};
use super::node_spec::{DriverSpecs, GpuFault, GpuSpec, NodeSetup, RuntimeSpec};
use super::{ADMIN, PLUGIN_USER, user_client};
use crate::apiserver::object;
use crate::apiserver::{ApiServer, User};
use crate::daemons::{Binaries, Crashes, Daemon, Invocation, Program};
use crate::files;
use crate::http_client::HttpClient;
use crate::kubelet::nvidia_runtime::VISIBLE_DEVICES;
use crate::kubelet::{Kubelet, KubeletConfig, MachineGpus};
use crate::observer::ClusterSnapshot;
use crate::ports::free_address;
use crate::vendor_plugin::{NVIDIA_GPU, VendorPlugin};

/// The longest time until kubelet notices that a plugin was killed.
const NOTICED: Duration = Duration::from_secs(10);

/// The extra attribute of a user in which the API server puts the node of a pod's service-account token.
const NODE_CLAIM: &str = "authentication.kubernetes.io/node-name";

/// The name of the plugin's inventory file in a node's directory.
const INVENTORY: &str = "inventory.json";

/// The version of every machine's driver.
const DRIVER_VERSION: &str = "550.54.15";
/// A driver that limits memory per cgroup.
const LIMITING_DRIVER_VERSION: &str = "615.71.09";

/// A running node.
#[derive(Debug)]
pub struct SimulatedNode {
    spec: NodeSetup,
    machine: MachineFiles,
    /// The command line of its plugin.
    invocation: Invocation,
    crashes: Crashes,
    plugin: Option<Daemon>,
    /// Address at which the plugin serves its metrics.
    metrics: SocketAddr,
    vendor: Option<VendorPlugin>,
    vendor_minors: Vec<u32>,
    kubelet: Kubelet,
    /// The process that injects CDI devices with containerd's own code, if the spec asks for it; it runs as long as this value
    /// lives.
    _cdi_injector: Option<Daemon>,
}

impl SimulatedNode {
    /// Starts a node: its kubelet with its runtime, and the device plugin as a real process if the spec has one.
    pub(super) async fn start(
        spec: NodeSetup,
        dir: &Path,
        api: &ApiServer,
        (binaries, crashes): (&Binaries, &Crashes),
        seed: u64,
    ) -> Result<Self> {
        let node_dir = dir.join(&spec.name);
        files::make_dir(&node_dir)?;
        let user = format!("system:node:{}", spec.name);
        let client = user_client(api, dir, &user, &["system:nodes"]).await?;
        let cluster = api.objects().clone();
        let mut config = KubeletConfig {
            labels: spec.labels.clone(),
            seed,
            delays: spec.delays,
            started: spec.started.clone(),
            has_nri: spec.runtime != RuntimeSpec::Plain,
            needs_nri: spec.runtime == RuntimeSpec::RequiredPlugins,
            runtime: spec.container_runtime.clone(),
            probe: spec.probe.clone(),
            cdi_dirs: vec![node_dir.join("etc-cdi"), node_dir.join("cdi")],
            log: Arc::new(move |namespace, pod, container, text| {
                cluster.append_log(namespace, pod, container, &text);
            }),
            ..KubeletConfig::new(&spec.name, &node_dir, client)
        };
        config
            .capacity
            .insert("pods".to_owned(), spec.max_pods.to_string());
        let mut cdi_injector = None;
        if let Some(program) = &spec.cdi_injector {
            let socket = node_dir.join("cdi-injector.sock");
            let name = format!("cdi-injector of {}", spec.name);
            let dirs = format!("{0}/etc-cdi,{0}/cdi", node_dir.display());
            let invocation = Invocation::new(name, program.clone(), &node_dir, "cdi-injector")
                .args([socket.display().to_string(), dirs]);
            config.cdi_injector = Some(socket);
            cdi_injector = Some(Daemon::start(invocation, crashes)?);
        }
        // `Kubelet::start` takes the configuration.
        let plugin_dir = config.plugin_dir();
        let machine = MachineFiles {
            dir: node_dir.clone(),
            gpus: config.gpus.clone(),
            inventory: Arc::new(InventoryFile::at(node_dir.join(INVENTORY))),
        };
        if spec.uses_memory || spec.probe.is_some() {
            let inventory = Arc::clone(&machine.inventory);
            config.containers = memory_use(api.objects().clone(), inventory, spec.probe.is_some());
        }
        // The machine's files are written before kubelet and plugin start, as on a machine that has booted.
        machine.set(&spec)?;
        let kubelet =
            Kubelet::start(config).with_context(|| format!("cannot start the kubelet of {}", spec.name))?;
        let kubeconfig = plugin_kubeconfig(api, &node_dir, &spec.name)?;
        let metrics = free_address()?;
        let mut invocation = plugin_invocation(
            &spec,
            binaries.path(Program::DevicePlugin)?,
            [&plugin_dir, machine.inventory.path(), &kubeconfig, &node_dir],
            metrics,
        );
        if let Some(class) = spec.container_runtime.nvidia_class {
            let admin = user_client(api, dir, ADMIN, &["system:masters"]).await?;
            invocation = invocation.flag("--pod-uid", &create_plugin_pod(admin, &spec.name, class).await?);
        }
        let plugin = if spec.has_plugin {
            Some(Daemon::start(invocation.clone(), crashes)?)
        } else {
            None
        };
        Ok(Self {
            spec,
            machine,
            invocation,
            crashes: crashes.clone(),
            plugin,
            metrics,
            vendor: None,
            vendor_minors: Vec::new(),
            kubelet,
            _cdi_injector: cdi_injector,
        })
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.spec.name
    }

    /// The GPUs as they were last written.
    pub fn gpus(&self) -> &[GpuSpec] {
        &self.spec.gpus
    }

    /// Its kubelet.
    pub fn kubelet(&self) -> &Kubelet {
        &self.kubelet
    }

    /// Kills and starts its kubelet; containers go on running.
    pub async fn restart_kubelet(&mut self) -> Result<()> {
        self.restart_kubelet_with(|_| {}).await
    }

    /// Kills its kubelet, runs `meanwhile`, such as the removal of a file, and starts kubelet again.
    pub async fn restart_kubelet_with(&mut self, meanwhile: impl FnOnce(&KubeletConfig)) -> Result<()> {
        self.kubelet.restart_with(meanwhile).await?;
        if self.vendor.is_some() {
            // A kubelet that starts removes all sockets of its plugin directory, so the vendor's plugin needs a new one.
            self.start_vendor_plugin(&self.vendor_minors.clone()).await?;
        }
        Ok(())
    }

    /// Starts the stand-in for the vendor's plugin, in place of one that runs; it offers the GPUs of these minors whole.
    pub async fn start_vendor_plugin(&mut self, minors: &[u32]) -> Result<()> {
        self.vendor_minors = minors.to_vec();
        self.vendor = None;
        let mut offered = Vec::new();
        for gpu in &self.spec.gpus {
            if minors.contains(&gpu.minor) {
                offered.push(gpu.uuid.clone());
            }
        }
        let plugin_dir = self.kubelet.config().plugin_dir();
        self.vendor = Some(VendorPlugin::start(&plugin_dir, NVIDIA_GPU, offered).await?);
        Ok(())
    }

    /// Ends the stand-in for the vendor's plugin.
    pub fn stop_vendor_plugin(&mut self) {
        self.vendor = None;
    }

    /// Its device plugin, if one was started.
    pub fn plugin(&self) -> Option<&Daemon> {
        self.plugin.as_ref()
    }

    /// The address at which its plugin serves metrics.
    pub fn metrics_address(&self) -> SocketAddr {
        self.metrics
    }

    /// The metrics of its plugin.
    pub async fn plugin_metrics(&self) -> Result<String> {
        let url = format!("http://{}/metrics", self.metrics);
        let (_, text) = HttpClient::new().get(&url).await?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    /// Kills the plugin and waits until kubelet has noticed. Before that kubelet would count the old devices as
    /// those of the next plugin.
    async fn kill_plugin(&mut self) -> Result<&mut Daemon> {
        let plugin = self.plugin.as_mut().context("no plugin runs on this node")?;
        plugin.kill().await;
        // The stand-in for the vendor's plugin goes on running, and its resource stays healthy.
        let vendors = self.vendor.as_ref().map(|_| NVIDIA_GPU);
        let is_missed = |kubelet: &Kubelet| {
            let mut counts = kubelet.capacity().into_iter();
            counts.all(|(resource, (_, healthy))| healthy == 0 || Some(resource.as_str()) == vendors)
        };
        let name = &self.spec.name;
        self.kubelet
            .expect_until(
                NOTICED,
                format!("{NOTICED:?} after its end kubelet of {name} does not miss the plugin"),
                is_missed,
            )
            .await?;
        Ok(plugin)
    }

    /// Kills its plugin and starts it again with the same command line.
    pub async fn restart_plugin(&mut self) -> Result<()> {
        self.kill_plugin().await?.restart().await
    }

    /// Kills its plugin and starts it by another command line, this once.
    pub async fn restart_plugin_as(&mut self, change: impl FnOnce(Invocation) -> Invocation) -> Result<()> {
        let changed = change(self.invocation.clone());
        self.kill_plugin().await?.restart_as(changed).await
    }

    /// Ends its plugin by SIGTERM, and then starts another one, as a `DaemonSet` does; true if the old one ended cleanly.
    pub async fn replace_plugin(&mut self, grace: Duration) -> Result<bool> {
        let old = self.plugin.take().context("no plugin runs on this node")?;
        let is_clean = old.stop(grace).await;
        self.start_plugin(&[])?;
        Ok(is_clean)
    }

    /// Reboots the node: everything ends, and container runtime, kubelet and the vendor's services start. The
    /// plugin stays away until [`SimulatedNode::start_plugin`].
    pub async fn reboot(&mut self) -> Result<()> {
        self.remove_plugin().await;
        self.kubelet.reboot().await?;
        self.write_vendor_specs()
    }

    /// Lets the vendor's services write their CDI specs again.
    pub fn write_vendor_specs(&self) -> Result<()> {
        self.machine.write_vendor_specs(&self.spec)
    }

    /// Starts the plugin; none may run. The extra flags hold for this process and its plain restarts.
    pub fn start_plugin(&mut self, extra_args: &[&str]) -> Result<()> {
        let invocation = self.invocation.clone().args(extra_args.iter().copied());
        self.plugin = Some(Daemon::start(invocation, &self.crashes)?);
        Ok(())
    }

    /// Kills the plugin and forgets it.
    pub async fn remove_plugin(&mut self) {
        if let Some(plugin) = self.plugin.take() {
            plugin.kill().await;
        }
    }

    /// The sockets that the plugin serves.
    pub fn plugin_sockets(&self) -> Result<Vec<PathBuf>> {
        let mut sockets = files::with_extension(&self.kubelet.config().plugin_dir(), "sock")?;
        // kubelet's own socket lies in the same directory.
        sockets.retain(|path| !path.ends_with("kubelet.sock"));
        Ok(sockets)
    }

    /// Sets the health of a GPU in the plugin's inventory file.
    pub fn set_health(&mut self, minor: u32, health: GpuFault) -> Result<()> {
        let gpu = self.spec.gpus.iter_mut().find(|gpu| gpu.minor == minor);
        gpu.with_context(|| format!("{} has no GPU {minor}", self.spec.name))?
            .health = health;
        self.machine.set(&self.spec)
    }

    /// Replaces the GPUs in the plugin's inventory file.
    pub fn set_gpus(&mut self, gpus: Vec<GpuSpec>) -> Result<()> {
        self.spec.gpus = gpus;
        self.machine.set(&self.spec)
    }

    /// The Device object, devices or resources of this node that the API server does not show yet; `None` if all are there.
    pub fn missing(&self, snapshot: &ClusterSnapshot) -> Option<String> {
        let name = &self.spec.name;
        let Some(device) = snapshot.devices.get(name) else {
            return Some(format!("{name} has no Device object"));
        };
        let (n_devices, n_shown) = (
            self.spec.gpus.len() + self.spec.others.len(),
            device.spec.devices.len(),
        );
        if n_shown != n_devices {
            return Some(format!(
                "{n_shown} of {n_devices} devices in the Device object of {name}"
            ));
        }
        let missing = [GPU_SHARED, GPU_MEM]
            .into_iter()
            .find(|resource| !snapshot.offers(name, resource))?;
        Some(format!("{name} has no allocatable {missing}"))
    }

    /// Stops the plugin and kubelet; returns false if the plugin did not end by itself with success.
    pub(super) async fn stop(self, grace: Duration) -> bool {
        let clean = match self.plugin {
            Some(plugin) if !plugin.is_down() => plugin.stop(grace).await,
            _ => true,
        };
        self.kubelet.stop().await;
        clean
    }
}

/// The kubeconfig of a node's plugin, with a token that names the node, as a pod's service-account token does.
fn plugin_kubeconfig(api: &ApiServer, dir: &Path, node: &str) -> Result<PathBuf> {
    let token = format!("token-of-plugin-{node}");
    let user = User {
        name: PLUGIN_USER.to_owned(),
        groups: Vec::new(),
        extra: [(NODE_CLAIM.to_owned(), vec![node.to_owned()])].into(),
    };
    api.add_token(&token, user);
    let path = dir.join("gpushare-device-plugin.kubeconfig");
    api.kubeconfig_with(&path, PLUGIN_USER, Some(&token))?;
    Ok(path)
}

/// Creates the pod of a node's plugin, with this `RuntimeClass`. The plugin itself runs beside it. Returns its UID.
async fn create_plugin_pod(client: Client, node: &str, class: &str) -> Result<String> {
    let pod = serde_json::from_value(json!({
        "metadata": {"name": format!("gpushare-device-plugin-{node}")},
        "spec": {"nodeName": node, "runtimeClassName": class, "containers": [{"name": "c", "image": "i"}]},
    }))?;
    let pods = Api::<Pod>::namespaced(client, "gpushare-system");
    let created = pods.create(&PostParams::default(), &pod).await;
    created
        .context("cannot create the plugin's pod")?
        .uid()
        .context("the plugin's pod has no UID")
}

/// The command line of a node's device plugin. A shell script stands before it if the spec demands one.
fn plugin_invocation(
    spec: &NodeSetup,
    program: PathBuf,
    [plugin_dir, inventory, kubeconfig, node_dir]: [&Path; 4],
    metrics: SocketAddr,
) -> Invocation {
    // Each node has its own directories in place of the machine's: many nodes share one machine.
    let below = |name: &str| node_dir.join(name).display().to_string();
    let name = format!("gpushare-device-plugin of {}", spec.name);
    let invocation = match script(spec) {
        Some(script) => Invocation::new(name, "/bin/sh".into(), node_dir, "device-plugin").args([
            "-c".to_owned(),
            script,
            program.display().to_string(),
        ]),
        None => Invocation::new(name, program, node_dir, "device-plugin"),
    };
    let mut invocation = invocation
        .flag("--node-name", &spec.name)
        .flag("--device-plugin-dir", &plugin_dir.display())
        .flag("--inventory", &format!("file:{}", inventory.display()))
        .flag("--memory-unit", &spec.memory_unit)
        .flag("--inject", spec.inject)
        .flag(
            "--cdi-spec-dirs",
            &format!("{},{}", below("etc-cdi"), below("cdi")),
        )
        .flag("--host-root", &below("root"))
        .kubeconfig(kubeconfig)
        .flag("--health-listen", &metrics);
    if spec.runtime != RuntimeSpec::Plain {
        invocation = invocation.flag("--nri-socket", &below("nri.sock"));
    }
    if spec.driver_limits {
        invocation = invocation.args(["--driver-limits"]);
    }
    invocation.args(spec.plugin_args.clone())
}

/// The shell script that prepares and starts the plugin; none if nothing has to be prepared.
fn script(spec: &NodeSetup) -> Option<String> {
    // A write beyond the limit on file sizes also raises SIGXFSZ, which kills. A full disk only fails the write.
    let trap = if spec.disk_may_be_full {
        "trap '' XFSZ; "
    } else {
        ""
    };
    let (mut variable, mut rights) = (String::new(), "");
    if let Some(value) = &spec.plugin_variable {
        variable = format!("export {VISIBLE_DEVICES}='{value}'; ");
        // `plugin_variable` stands for the plugin's own container, which is unprivileged: the plugin draws no conclusion from the
        // variable in a privileged one.
        if is_privileged() {
            rights = "setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin ";
        }
    }
    let is_needed = spec.disk_may_be_full || spec.plugin_variable.is_some();
    is_needed.then(|| format!(r#"{trap}{variable}exec {rights}"$0" "$@""#))
}

/// Returns true if this process has `CAP_SYS_ADMIN`, by which the plugin recognises privileged containers.
fn is_privileged() -> bool {
    const CAP_SYS_ADMIN: u32 = 21;
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let mask = u64::from_str_radix(mask.unwrap_or_default().trim(), 16).unwrap_or(0);
    mask >> CAP_SYS_ADMIN & 1 == 1
}

/// The files of a node's machine: the plugin's inventory, device nodes, and the vendor's CDI specs.
#[derive(Debug)]
struct MachineFiles {
    dir: PathBuf,
    /// The GPUs that the driver lists to the container runtime.
    gpus: MachineGpus,
    inventory: Arc<InventoryFile>,
}

impl MachineFiles {
    /// Writes all files of the machine as the node is now.
    fn set(&self, spec: &NodeSetup) -> Result<()> {
        // A lost GPU keeps its device node and is missing from the driver's list.
        let mut listed = Vec::new();
        let nodes = self.dir.join("root/dev");
        files::make_dir(&nodes)?;
        files::write(&nodes.join("nvidiactl"), "")?;
        for gpu in &spec.gpus {
            files::write(&nodes.join(format!("nvidia{}", gpu.minor)), "")?;
            if gpu.health != GpuFault::Lost {
                listed.push((gpu.uuid.clone(), gpu.minor));
            }
        }
        self.gpus.set(listed);
        self.inventory.set_machine(inventory(spec))?;
        files::make_dir(&self.dir.join("etc-cdi"))?;
        if spec.driver_limits {
            let cgroups = self.dir.join("root/sys/fs/cgroup");
            files::make_dir(&cgroups)?;
            // The plugin takes a directory with this file for the root of cgroup v2.
            files::write(&cgroups.join("cgroup.controllers"), "cpu memory\n")?;
            write_whole(&self.dir.join("etc-cdi/limits.json"), &limit_spec(spec))?;
        }
        self.write_vendor_specs(spec)
    }

    /// Writes the specs that the vendor's services write when the machine starts, where they do it.
    fn write_vendor_specs(&self, spec: &NodeSetup) -> Result<()> {
        let (file, document) = match spec.driver {
            DriverSpecs::Toolkit => ("nvidia.json", toolkit_spec(spec, &driver_edits())),
            DriverSpecs::LongToolkit => ("nvidia.json", toolkit_spec(spec, &long_driver_edits())),
            DriverSpecs::Management => ("management.nvidia.com-gpu.json", management_spec(spec)),
            DriverSpecs::NotNeeded | DriverSpecs::Missing => return Ok(()),
        };
        let dir = self.dir.join("cdi");
        files::make_dir(&dir)?;
        write_whole(&dir.join(file), &document)
    }
}

/// Writes a JSON document in one step, so that no reader sees half of it.
fn write_whole(path: &Path, document: &Value) -> Result<()> {
    files::replace(path, &format!("{document:#}\n"))
}

/// The inventory file from which the plugin reads its simulated GPUs and other devices.
fn inventory(spec: &NodeSetup) -> Value {
    let mut gpus = Vec::new();
    for gpu in &spec.gpus {
        let health = match gpu.health {
            GpuFault::Healthy => "Healthy".to_owned(),
            GpuFault::Xid(number) => format!("Xid {number}"),
            GpuFault::Lost => "Lost".to_owned(),
        };
        let memory = format!("{}Mi", gpu.mib);
        let mut entry = json!({"uuid": gpu.uuid, "minor": gpu.minor, "memory": memory, "model": "Simulated", "health": health});
        object::make_object(&mut entry).extend(gpu.details.clone());
        gpus.push(entry);
    }
    let driver = if spec.driver_limits {
        LIMITING_DRIVER_VERSION
    } else {
        DRIVER_VERSION
    };
    let needs_driver = spec.driver != DriverSpecs::NotNeeded;
    let mut document =
        json!({"driverVersion": driver, "gpus": gpus, "devices": spec.others, "needsDriver": needs_driver});
    object::make_object(&mut document).extend(spec.machine.clone());
    document
}

/// The CDI spec that nvidia-ctk writes for such a machine, as far as its effect is seen in a container of the testbed.
fn toolkit_spec(spec: &NodeSetup, driver: &Value) -> Value {
    let (mut by_uuid, mut by_index) = (Vec::new(), Vec::new());
    for (at, gpu) in spec.gpus.iter().enumerate() {
        let node = character_device(&format!("/dev/nvidia{}", gpu.minor), gpu.minor);
        let edits = json!({"deviceNodes": [node]});
        by_uuid.push(json!({"name": gpu.uuid, "containerEdits": edits}));
        // nvidia-ctk names each GPU twice; runtimes ask by UUID, and people by index.
        by_index.push(json!({"name": at.to_string(), "containerEdits": edits}));
    }
    let devices = [by_uuid, by_index, vec![all(spec)]].concat();
    json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "containerEdits": driver, "devices": devices})
}

/// A CDI spec with NVIDIA's hook for memory limits of each GPU, and nothing else.
fn limit_spec(spec: &NodeSetup) -> Value {
    let mut devices = Vec::new();
    for gpu in &spec.gpus {
        let hook = json!({"hookName": "createRuntime", "path": "/usr/bin/nvidia-cdi-hook",
            "args": ["nvidia-cdi-hook", "apply-cuda-memory-limits", "--driver-root", "/", "--gpu-id", gpu.uuid]});
        devices.push(json!({"name": gpu.uuid, "containerEdits": {"hooks": [hook]}}));
    }
    json!({"cdiVersion": "0.5.0", "kind": "nvidia.com/gpu", "devices": devices})
}

/// The CDI spec that GPU Operator writes.
fn management_spec(spec: &NodeSetup) -> Value {
    json!({"cdiVersion": "0.5.0", "kind": "management.nvidia.com/gpu", "containerEdits": driver_edits(), "devices": [all(spec)]})
}

/// The device that stands for every GPU.
fn all(spec: &NodeSetup) -> Value {
    let path = |gpu: &GpuSpec| json!({"path": format!("/dev/nvidia{}", gpu.minor)});
    let nodes: Vec<Value> = spec.gpus.iter().map(path).collect();
    json!({"name": "all", "containerEdits": {"deviceNodes": nodes}})
}

/// The edits of a CDI spec that the GPU driver of a real node would add to containers: a library and device nodes.
fn driver_edits() -> Value {
    let library = format!("/usr/lib/x86_64-linux-gnu/libcuda.so.{DRIVER_VERSION}");
    json!({
        "env": ["NVIDIA_VISIBLE_DEVICES=void"],
        "deviceNodes": [{"path": "/dev/nvidiactl"}, {"path": "/dev/nvidia-uvm"}],
        "mounts": [{"hostPath": library, "containerPath": library}],
        "hooks": [{"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "update-ldcache"]}],
    })
}

/// A device node with its numbers, which can be injected although the file does not exist.
fn character_device(path: &str, minor: u32) -> Value {
    json!({"path": path, "type": "c", "major": 195, "minor": minor})
}

/// The edits that a driver with graphics brings to a container: the load test of containerd's injection needs a spec as long as
/// nvidia-ctk's, some 17 kB.
fn long_driver_edits() -> Value {
    const LIBRARIES: &str = "libEGL_nvidia libGLESv1_CM_nvidia libGLESv2_nvidia libGLX_nvidia libcuda libcudadebugger \
        libnvcuvid libnvidia-allocator libnvidia-api libnvidia-cfg libnvidia-egl-gbm libnvidia-egl-wayland libnvidia-eglcore \
        libnvidia-encode libnvidia-fbc libnvidia-glcore libnvidia-glsi libnvidia-glvkspirv libnvidia-gpucomp libnvidia-gtk3 \
        libnvidia-ml libnvidia-ngx libnvidia-nscq libnvidia-nvvm libnvidia-opencl libnvidia-opticalflow libnvidia-pkcs11-openssl3 \
        libnvidia-pkcs11 libnvidia-ptxjitcompiler libnvidia-rtcore libnvidia-sandboxutils libnvidia-tls libnvidia-vksc-core \
        libnvidia-wayland-client libnvoptix libvdpau_nvidia libnvidia-present";
    const FILES: &str = "/lib/firmware/nvidia/550.54.15/gsp_ga10x.bin /lib/firmware/nvidia/550.54.15/gsp_tu10x.bin \
        /usr/bin/nvidia-cuda-mps-control /usr/bin/nvidia-cuda-mps-server /usr/bin/nvidia-debugdump /usr/bin/nvidia-persistenced \
        /usr/bin/nvidia-smi /usr/share/nvidia/nvoptix.bin /etc/vulkan/icd.d/nvidia_icd.json \
        /etc/vulkan/implicit_layer.d/nvidia_layers.json /usr/share/egl/egl_external_platform.d/10_nvidia_wayland.json \
        /usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json /usr/share/glvnd/egl_vendor.d/10_nvidia.json \
        /usr/share/X11/xorg.conf.d/10-nvidia.conf /run/nvidia-persistenced/socket";
    const DIR: &str = "/usr/lib/x86_64-linux-gnu";
    let mut paths: Vec<String> = FILES.split_whitespace().map(str::to_owned).collect();
    for name in LIBRARIES.split_whitespace() {
        paths.push(format!("{DIR}/{name}.so.{DRIVER_VERSION}"));
    }
    let options = ["ro", "nosuid", "nodev", "rbind", "rprivate"];
    let mut mounts = Vec::new();
    for path in paths {
        mounts.push(json!({"hostPath": path, "containerPath": path, "options": options}));
    }
    let arguments = [
        format!(
            "create-symlinks --link libcuda.so.1::{DIR}/libcuda.so \
             --link libnvidia-opticalflow.so.1::{DIR}/libnvidia-opticalflow.so \
             --link libGLX_nvidia.so.0::{DIR}/libGLX_indirect.so.0"
        ),
        format!("enable-cuda-compat --host-driver-version={DRIVER_VERSION}"),
        format!("update-ldcache --folder {DIR} --folder {DIR}/vdpau"),
        "disable-device-node-modification".to_owned(),
    ];
    let mut hooks = Vec::new();
    for arguments in &arguments {
        let mut args = vec!["nvidia-cdi-hook"];
        args.extend(arguments.split(' '));
        let env = ["NVIDIA_CTK_DEBUG=false"];
        hooks.push(json!({"hookName": "createContainer", "path": "/usr/bin/nvidia-cdi-hook", "args": args, "env": env}));
    }
    let control = [
        character_device("/dev/nvidia-modeset", 254),
        character_device("/dev/nvidia-uvm", 0),
        character_device("/dev/nvidia-uvm-tools", 1),
        character_device("/dev/nvidiactl", 255),
    ];
    json!({"env": ["NVIDIA_VISIBLE_DEVICES=void"], "deviceNodes": control, "mounts": mounts, "hooks": hooks})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_long_driver_spec_is_as_long_as_a_real_one() {
        let n_bytes = format!("{:#}", long_driver_edits()).len();
        assert!((15_000..20_000).contains(&n_bytes), "{n_bytes}");
    }
}
