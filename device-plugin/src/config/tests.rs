//! Valid and invalid flags.

use proptest::prelude::*;
use rstest::rstest;

use super::*;

fn parse(flags: &[&str]) -> Result<Config, String> {
    let args = ["gpushare-device-plugin", "--node-name", "n1"]
        .iter()
        .chain(flags);
    Config::try_parse_from(args).map_err(|error| error.to_string())
}

#[test]
fn the_default_settings() {
    let config = parse(&[]).unwrap();
    assert_eq!((config.slots.get(), config.memory_unit), (100, MemoryUnit::GIB));
    assert_eq!(config.resource_names(), ExtendedResourceNames::default());
    assert_eq!(config.shared_devices, SharedDevices::All);
    assert_eq!(config.reserved_memory, ReservedMemory::Withhold);
    assert_eq!(
        crate::node::kubelet_pod_resources::socket(&config.device_plugin_dir),
        PathBuf::from("/var/lib/kubelet/pod-resources/kubelet.sock")
    );
    assert_eq!(
        config.served_by(VendorServer::Vendor).collect::<Vec<_>>(),
        ["nvidia.com/gpu"]
    );
    assert_eq!(config.dra_drivers, ["gpu.nvidia.com".to_owned()].into());
}

#[rstest]
#[case::unit(&["--memory-unit", "Gib"], "write MiB, GiB or a quantity")]
#[case::no_slots(&["--slots", "0"], "--slots")]
#[case::inventory(&["--inventory", "nvlm"], "write nvml, or file:")]
#[case::file_without_path(&["--inventory", "file:"], "write nvml, or file:")]
#[case::eviction_reason(&["--evict", "mismatch,sick"], "possible values: mismatch, unhealthy")]
#[case::xids(&["--xids", "13=reset,x"], r#""x" is not XID=CLASS"#)]
#[case::resource_without_domain(&["--memory-resource", "gpu-mem"], "not of the form domain/name")]
#[case::resource_of_kubernetes(&["--memory-resource", "kubernetes.io/gpu-mem"], "belongs to Kubernetes")]
#[case::resource_in_node_status(&["--memory-resource", "koordinator.sh/gpu-memory"], "another meaning")]
#[case::resource_of_a_vendor(&["--memory-resource", "nvidia.com/gpu"], "another meaning")]
#[case::resource_name(&["--memory-resource", "a.b/-x"], "not the name of an extended resource")]
#[case::vendor_without_server(&["--vendor-resource", "nvidia.com/gpu"], "and one of vendor, ours, ignore")]
#[case::vendor_server(&["--vendor-resource", "nvidia.com/gpu=theirs"], "and one of vendor, ours, ignore")]
#[case::vendor_name(&["--vendor-resource", "gpu=vendor"], "not of the form domain/name")]
#[case::vendor_that_cannot_be_served(&["--vendor-resource", "nvidia.com/mig-1g.5gb=ours"], "this plugin can serve one of nvidia.com/gpu")]
#[case::dra_driver(&["--dra-drivers", "gpu.nvidia.com,GPU"], r#""GPU" is not the name of a DRA driver"#)]
#[case::no_dra_driver(&["--dra-drivers", ""], "write names such as gpu.nvidia.com, or none")]
#[case::partition_policy(&["--gpu-partition-policy", "maybe"], "possible values: honor, prefer")]
#[case::shared_devices(&["--shared-devices", "0,,1"], "write all, or UUIDs and minor numbers")]
#[case::level(&["--log-level", "loud"], "\"loud\" is none of off, error, warn, info")]
#[case::address(&["--health-listen", "8081"], "--health-listen")]
fn invalid_flags_are_refused(#[case] flags: &[&str], #[case] expected: &str) {
    let error = parse(flags).map(|_| ()).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case::empty("")]
#[case::path("a/b")]
#[case::selector("a,b=c")]
#[case::upper("N1")]
fn invalid_node_names_are_refused(#[case] name: &str) {
    assert!(node_name(name).is_err());
}

#[test]
fn the_help_text_is_current() {
    use clap::CommandFactory;
    // The values of variables would depend on who runs the test.
    let mut command = Config::command()
        .term_width(120)
        .mut_args(|arg| arg.hide_env_values(true));
    insta::assert_snapshot!(command.render_long_help());
}

#[test]
fn vendors_resources_may_be_listed_and_the_last_entry_counts() {
    let listed = [
        "--vendor-resource",
        "nvidia.com/gpu=vendor,amd.com/gpu=ignore",
        "--vendor-resource",
        "nvidia.com/gpu=ours",
    ];
    let config = parse(&listed).unwrap();
    let served_by = |server| config.served_by(server).collect::<Vec<_>>();
    assert_eq!(served_by(VendorServer::Ours), ["nvidia.com/gpu"]);
    assert_eq!(served_by(VendorServer::Ignore), ["amd.com/gpu"]);
    assert!(served_by(VendorServer::Vendor).is_empty());
    assert_eq!(config.resource_names().whole.as_deref(), Some("nvidia.com/gpu"));
}

#[rstest]
#[case::none("none", &[])]
#[case::several("b.com, a.com,b.com", &["a.com", "b.com"])]
fn dra_drivers_are_read_as_a_list(#[case] text: &str, #[case] expected: &[&str]) {
    let drivers = parse(&["--dra-drivers", text]).unwrap().dra_drivers;
    assert_eq!(drivers.iter().collect::<Vec<_>>(), expected);
}

#[rstest]
#[case::nothing_mounted(&[], "/sys", "/")]
#[case::sysfs_mounted(&["sys"], "ROOT/sys", "/")]
#[case::all_mounted(&["sys", "dev"], "ROOT/sys", "ROOT")]
fn sysfs_and_device_nodes_are_those_of_the_node_where_it_is_mounted(
    #[case] mounted: &[&str],
    #[case] sysfs: &str,
    #[case] device_root: &str,
) {
    let root = tempfile::tempdir().unwrap();
    let below = |path: &str| PathBuf::from(path.replace("ROOT", root.path().to_str().unwrap()));
    for name in mounted {
        std::fs::create_dir(root.path().join(name)).unwrap();
    }
    let config = parse(&["--host-root", root.path().to_str().unwrap()]).unwrap();
    let source = NvmlSource {
        sysfs: below(sysfs),
        ..NvmlSource::default()
    };
    assert_eq!(config.source(), DeviceSource::Machine(source));
    let settings = config.settings();
    assert_eq!(
        (settings.sysfs_root, settings.device_root),
        (below(sysfs), below(device_root))
    );
}

proptest! {
    /// Every value is accepted or refused.
    #[test]
    fn no_value_panics(flag in 0..8_usize, value in "([a-z0-9.=/,_ -]{0,20}|\\PC{0,12}|-?[0-9]{1,22}(ms|s|m|h|Mi|Gi)?)", named in "[a-z./]{0,12}=(vendor|ours|ignore)") {
        let flags = ["vendor-resource", "memory-unit", "memory-resource", "slots", "shared-devices", "xids", "inventory", "log-level"];
        for value in [value, named] {
            let _ = parse(&[&format!("--{}={value}", flags[flag])]);
        }
    }
}
