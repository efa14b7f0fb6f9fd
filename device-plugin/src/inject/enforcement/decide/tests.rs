//! The decision on every kind of node, as tables.

use rstest::rstest;

use super::*;
use crate::inject::mode::Certainty;

/// A node from a row: driver, cgroup version, way of the hook, and marks (`on`: --driver-limits, `hook`, `mig`, `hami`, `mps`).
fn row(driver: &str, cgroup: &str, route: &str, marks: &str) -> Enforcement {
    let has = |mark: &str| marks.split_whitespace().any(|word| word == mark);
    let node = EnforcementFacts {
        is_enabled: has("on"),
        driver: (driver != "-").then(|| driver.to_owned()),
        cgroup: match cgroup {
            "v1" => Cgroup::V1,
            "v2" => Cgroup::V2,
            _ => Cgroup::Unknown,
        },
        route: match route {
            "spec" => HookRoute::Spec,
            "others" => HookRoute::ReadsOthers,
            "runtime" => HookRoute::Runtime,
            "legacy" => HookRoute::Legacy,
            _ => HookRoute::Unknown,
        },
        has_hami_core: has("hami"),
        mps: has("mps").then(|| "/tmp/nvidia-mps".to_owned()),
    };
    let gpu = GpuFacts {
        has_hook: has("hook"),
        is_mig: has("mig"),
    };
    decide(&node, gpu)
}

/// Driver, cgroup version, way of the hook, marks; level and reason.
const ROWS: &str = "
    # Everything is there.
    615.71.09 | v2 | spec | on hook | driver DriverLimits
    615.71.09 | v2 | runtime | on hook | driver DriverLimits
    620.10 | v2 | spec | on hook | driver DriverLimits
    1000.1 | v2 | spec | on hook | driver DriverLimits
    615 | v2 | spec | on hook | driver DriverLimits
    615.71.09 | v2 | spec | on hook hami | driver DriverLimits
    615.71.09 | v2 | spec | on hook mps | driver DriverLimits
    # The operator has not turned it on.
    615.71.09 | v2 | spec | hook | none NotEnabled
    615.71.09 | v2 | runtime | hook | none NotEnabled
    615.71.09 | v2 | spec | hook hami | hami-core NotEnabled
    615.71.09 | v2 | spec | hook mps | none NotEnabled
    # The vendor's spec has no hook for the GPU.
    615.71.09 | v2 | spec | on | none HookMissing
    615.71.09 | v2 | runtime | on | none HookMissing
    615.71.09 | v2 | spec | on hami | hami-core HookMissing
    615.71.09 | v2 | spec |  | none HookMissing
    # The hook does not get into containers, or reads the wrong values.
    615.71.09 | v2 | others | on hook | none VariableOrder
    615.71.09 | v2 | others | on hook hami | hami-core VariableOrder
    615.71.09 | v2 | others | hook | none VariableOrder
    615.71.09 | v2 | legacy | on hook | none LegacyRuntime
    615.71.09 | v2 | legacy | on hook hami | hami-core LegacyRuntime
    615.71.09 | v2 | legacy |  | none LegacyRuntime
    615.71.09 | v2 | unknown | on hook | none RuntimeUnknown
    615.71.09 | v2 | unknown | on hook hami | hami-core RuntimeUnknown
    # The node has not the right cgroup version.
    615.71.09 | v1 | spec | on hook | none CgroupV1
    615.71.09 | v1 | runtime | on hook | none CgroupV1
    615.71.09 | v1 | legacy | on hook | none CgroupV1
    615.71.09 | v1 | spec | on hook hami | hami-core CgroupV1
    615.71.09 | - | spec | on hook | none CgroupUnknown
    615.71.09 | - | runtime | on hook hami | hami-core CgroupUnknown
    # The driver is too old, or not known.
    614.99 | v2 | spec | on hook | none DriverTooOld
    580.65.06 | v2 | spec | on hook | none DriverTooOld
    570.86.15 | v2 | runtime | on hook | none DriverTooOld
    570.86.15 | v1 | legacy |  | none DriverTooOld
    550.54.15 | v2 | spec | on hook hami | hami-core DriverTooOld
    not-a-version | v2 | spec | on hook | none DriverTooOld
     | v2 | spec | on hook | none DriverTooOld
    - | v2 | spec | on hook | none DriverUnknown
    - | v1 | unknown |  | none DriverUnknown
    - | v2 | spec | on hook hami | hami-core DriverUnknown
    # MIG excludes it whatever else there is.
    615.71.09 | v2 | spec | on hook mig | none MigMode
    615.71.09 | v2 | runtime | on hook mig | none MigMode
    615.71.09 | v2 | spec | on hook mig hami | hami-core MigMode
    570.86.15 | v1 | legacy | mig | none MigMode
    - | - | unknown | mig mps | none MigMode
";

#[test]
fn the_level_of_every_kind_of_node() {
    for line in ROWS.lines().map(str::trim).filter(|line| line.contains('|')) {
        let columns: Vec<&str> = line.split('|').map(str::trim).collect();
        let &[driver, cgroup, route, marks, expected] = columns.as_slice() else {
            panic!("{line}")
        };
        let found = row(driver, cgroup, route, marks);
        assert_eq!(
            format!("{} {}", found.level.as_str(), found.reason),
            expected,
            "{line}"
        );
    }
}

/// Only all facts together allow it: the table of all combinations has the level once for each way that works.
#[test]
fn the_driver_s_level_needs_every_fact() {
    let mut allowed = Vec::new();
    for driver in ["-", "614.1", "615.1"] {
        for cgroup in ["-", "v1", "v2"] {
            for route in ["spec", "others", "runtime", "legacy", "unknown"] {
                for marks in ["", "on", "hook", "on hook", "on hook mig", "hook mig"] {
                    if row(driver, cgroup, route, marks).level == Level::Driver {
                        allowed.push(format!("{driver} {cgroup} {route} {marks}"));
                    }
                }
            }
        }
    }
    assert_eq!(allowed, ["615.1 v2 spec on hook", "615.1 v2 runtime on hook"]);
}

#[test]
fn messages_say_what_to_change_and_name_mps() {
    let message = |marks| row("615.71.09", "v2", "spec", marks).message;
    insta::assert_snapshot!(message("on hook mps"), @"the driver refuses allocations beyond a container's limit; an MPS control daemon runs on the node (/tmp/nvidia-mps), with limits of its own");
    insta::assert_snapshot!(message("hook hami"), @"HAMi-core's library limits containers that load it; the driver does not: --driver-limits of the device plugin is off");
    let old = row("570.86.15", "v2", "spec", "on hook").message;
    insta::assert_snapshot!(old, @"nothing limits the memory that a container uses; the driver does not: driver 570.86.15 cannot do it, 615 (CUDA 13.4) is the first that can");
}

fn injection(mode: Mode, certainty: Certainty) -> Injection {
    Injection {
        mode,
        certainty,
        reason: "",
        message: String::new(),
        exposure: None,
    }
}

#[rstest]
#[case::replaces("cdi", "all", "containerd://2.4.0", false, HookRoute::Spec)]
#[case::beta("cdi", "all", "containerd://v2.4.0-beta.0", false, HookRoute::Spec)]
#[case::later("cdi", "all", "containerd://3.0.1", false, HookRoute::Spec)]
#[case::appends("cdi", "all", "containerd://2.3.4", false, HookRoute::ReadsOthers)]
#[case::appends_long_ago("cdi", "all", "containerd://1.7.27", false, HookRoute::ReadsOthers)]
#[case::appends_and_nri("cdi", "all", "containerd://1.7.27", true, HookRoute::Spec)]
#[case::other_runtime("cdi", "all", "cri-o://1.36.0", false, HookRoute::ReadsOthers)]
#[case::no_version("cdi", "all", "", false, HookRoute::ReadsOthers)]
#[case::nvidia_s_runtime_by_cdi("envvar", "void", "containerd://1.7.27", true, HookRoute::Runtime)]
#[case::nvidia_s_runtime_without_nri("envvar", "void", "containerd://2.4.0", false, HookRoute::ReadsOthers)]
#[case::nvidia_s_runtime_in_legacy_mode("envvar", "all", "containerd://2.4.0", false, HookRoute::Legacy)]
#[case::no_variable("envvar", "-", "containerd://2.4.0", false, HookRoute::Unknown)]
#[case::set_by_the_operator("envvar", "root", "containerd://2.4.0", false, HookRoute::Unknown)]
#[case::impossible("impossible", "void", "containerd://2.4.0", true, HookRoute::Unknown)]
fn the_way_of_the_hook(
    #[case] mode: &str,
    #[case] value: &str,
    #[case] runtime: &str,
    #[case] has_nri: bool,
    #[case] expected: HookRoute,
) {
    let injection = match mode {
        "cdi" => injection(Mode::Cdi, Certainty::Assumed),
        "envvar" => injection(Mode::Envvar, Certainty::Proven),
        _ => injection(Mode::Cdi, Certainty::Impossible),
    };
    let own = OwnContainer {
        has_driver_root: value == "root",
        visible_devices: (value != "-").then(|| value.replace("root", "void")),
        ..OwnContainer::default()
    };
    assert_eq!(hook_route(&injection, &own, runtime, has_nri), expected);
}
