//! Decides the injection mode from the facts of the node. Pure.
//!
//! The variable is `NVIDIA_VISIBLE_DEVICES`: on some nodes NVIDIA's runtime gives a container the GPUs that it names.

use crate::inject::mode::{CDI_OFF, Certainty, Exposure, Injection, Mode, NO_DRIVER_SPEC};
use crate::inject::own_container::OwnContainer;

use super::runtime_files::ConfiguredRuntime;

/// The runtime's support for CDI, as far as this plugin has seen it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Cdi {
    /// A spec was read soon after it was written.
    Read,
    /// No read was seen, which may be because the runtime started before the directory existed.
    Unknown,
    /// A container started although the runtime had not read its spec.
    Off,
    /// Specs cannot be written; the text says why.
    Unwritable(String),
}

/// The source of the driver's libraries that a CDI device brings into a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Driver {
    /// The devices are simulated.
    NotNeeded,
    /// A spec of this kind names the libraries.
    Spec(&'static str),
    /// No spec can be used; the text says why.
    Missing(String),
}

/// The runtime's support for giving unprivileged containers the devices that the variable names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum VariableSupport {
    /// The runtime gave this plugin's own container its GPUs.
    Works,
    /// The runtime does not act on the variable; the text says why.
    Fails(String),
    Unknown,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct InjectionFacts {
    pub(crate) cdi: Cdi,
    pub(crate) driver: Driver,
    pub(crate) variable: VariableSupport,
    /// The pods in which the runtime acts on the variable of an image, as far as is known.
    pub(crate) exposure: Option<Exposure>,
    /// True if the runtime hook is on, which gives the variable the value `void` in containers that request no GPU.
    pub(crate) has_hook: bool,
}

/// The facts that show whether the runtime acts on the variable.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct VariableFacts {
    /// True if the devices are simulated, so that no runtime has to act.
    pub(crate) is_simulated: bool,
    pub(crate) own: OwnContainer,
    /// The configuration of the node's container runtime; `None` if the node's root is not mounted.
    pub(crate) configured: Option<ConfiguredRuntime>,
    /// True if a spec of NVIDIA's toolkit names one of this node's GPUs by UUID.
    pub(crate) toolkit_names_uuid: bool,
    /// True once GPU Operator's spec has been seen: the runtime goes on using it when the file comes back. It names `all` alone.
    pub(crate) has_management_spec: bool,
}

/// Infers the variable's effect in other pods from its effect in this plugin's own.
pub(crate) fn variable(facts: &VariableFacts) -> VariableSupport {
    if facts.is_simulated {
        return VariableSupport::Works;
    }
    let own = &facts.own;
    if let Some(class) = &own.runtime_class {
        return VariableSupport::Fails(format!(
            "the runtime acts on it only in pods with runtimeClassName: {class}"
        ));
    }
    if own.why_inconclusive().is_some() {
        return VariableSupport::Unknown;
    }
    match own.visible_devices.as_deref() {
        Some("void") if facts.has_management_spec && !facts.toolkit_names_uuid => VariableSupport::Fails(
            "the runtime resolves it by GPU Operator's CDI spec, which names no single GPU".to_owned(),
        ),
        // Either spec may be the one that the runtime resolves it by, and GPU Operator's runtime then refuses the container.
        Some("void") if facts.has_management_spec => VariableSupport::Unknown,
        // The runtime gave this container NVML. In legacy mode it leaves the variable as it is, in the modes cdi and jit-cdi it
        // replaces the value; a UUID resolves in jit-cdi mode, and where a spec names it.
        Some("all" | "void") => VariableSupport::Works,
        _ => VariableSupport::Unknown,
    }
}

/// The pods in which the runtime acts on the value `all` of the variable, which CUDA's images set; a runtime that does may still
/// be unable to resolve UUIDs. `None` if no runtime shows the devices to any pod.
pub(crate) fn exposure(facts: &VariableFacts) -> Option<Exposure> {
    if facts.is_simulated {
        return None;
    }
    let seen = exposure_by_own_container(&facts.own);
    let is_seen = !matches!(seen, Exposure::Unknown(_));
    match facts.configured {
        // The configuration may have changed since this container was created.
        Some(ConfiguredRuntime::Default) => Some(Exposure::EveryPod),
        // What was seen counts more than files that may be those of another runtime.
        _ if is_seen => Some(seen),
        Some(ConfiguredRuntime::OfRuntimeClass) => Some(Exposure::RuntimeClass("nvidia".to_owned())),
        Some(ConfiguredRuntime::Inactive) => None,
        Some(ConfiguredRuntime::Unknown) => Some(Exposure::Unknown(
            "no configuration of the container runtime is below --host-root",
        )),
        None => Some(seen),
    }
}

/// The pods in which the runtime acts on the variable, as far as this plugin's own container shows them.
fn exposure_by_own_container(own: &OwnContainer) -> Exposure {
    match (own.why_inconclusive(), own.visible_devices.as_deref()) {
        (Some(why), _) => Exposure::Unknown(why),
        (None, Some("all" | "void")) => match &own.runtime_class {
            Some(class) => Exposure::RuntimeClass(class.clone()),
            None => Exposure::EveryPod,
        },
        (None, _) => Exposure::Unknown("the plugin's own container does not set NVIDIA_VISIBLE_DEVICES=all"),
    }
}

/// The mode of a node with these facts: the one that the operator asks for, else the best that works.
pub(crate) fn decide(requested: Option<Mode>, facts: &InjectionFacts) -> Injection {
    let cdi = by_cdi(facts);
    let by_variable_works = facts.variable == VariableSupport::Works;
    let mode = match requested {
        Some(mode) => mode,
        None if cdi.0 != Certainty::Proven && by_variable_works => Mode::Envvar,
        // Without CDI a container gets nothing, so trying CDI shows no device to the wrong container.
        None => Mode::Cdi,
    };
    let (certainty, reason, message) = match mode {
        Mode::Cdi => cdi,
        Mode::Envvar => by_variable(&facts.variable),
    };
    Injection {
        mode,
        certainty,
        reason,
        message,
        // With the runtime hook the variable is `void` in containers that request no GPU.
        exposure: facts.exposure.clone().filter(|_| !facts.has_hook),
    }
}

/// The evidence that a mode works, and the reason as a word and a sentence.
type Evidence = (Certainty, &'static str, String);

/// The evidence that CDI specs give containers their devices.
fn by_cdi(facts: &InjectionFacts) -> Evidence {
    let mut of_variable = String::new();
    if let VariableSupport::Fails(why) = &facts.variable {
        of_variable = format!("; the variable cannot stand in for it: {why}");
    }
    match (&facts.cdi, &facts.driver) {
        (Cdi::Unwritable(why), _) => {
            let message = format!("{why}{of_variable}");
            (Certainty::Impossible, "CdiDirNotWritable", message)
        }
        (Cdi::Off, _) => {
            let message = "the container runtime ignores CDI devices: set enable_cdi = true in containerd's configuration and restart it";
            (Certainty::Impossible, CDI_OFF, format!("{message}{of_variable}"))
        }
        (_, Driver::Missing(why)) => {
            let message = format!("{why}{of_variable}");
            (Certainty::Impossible, NO_DRIVER_SPEC, message)
        }
        (Cdi::Read, Driver::Spec(kind)) => {
            let message = format!("the container runtime reads CDI specs, and the driver comes from {kind}");
            (Certainty::Proven, "Cdi", message)
        }
        (Cdi::Read, Driver::NotNeeded) => {
            let message = "the container runtime reads CDI specs".to_owned();
            (Certainty::Proven, "Cdi", message)
        }
        (Cdi::Unknown, _) => {
            let message = "the container runtime has not been seen reading CDI specs yet; if it started before their directory existed, \
                           it does so at its first container";
            (Certainty::Assumed, "CdiAssumed", message.to_owned())
        }
    }
}

/// The evidence that the vendor's variable gives containers their devices.
fn by_variable(variable: &VariableSupport) -> Evidence {
    match variable {
        VariableSupport::Works => {
            let message = "the container runtime acts on the variable".to_owned();
            (Certainty::Proven, "Variable", message)
        }
        VariableSupport::Unknown => {
            let message = "as --inject=envvar says; nothing has shown that it works".to_owned();
            (Certainty::Assumed, "VariableAssumed", message)
        }
        // The operator may know more; a runtime that cannot resolve the variable refuses the container.
        VariableSupport::Fails(why) => {
            let message = format!("as --inject=envvar says, although {why}");
            (Certainty::Assumed, "VariableAssumed", message)
        }
    }
}

#[cfg(test)]
mod tests {
    use rstest::rstest;

    use super::*;

    fn facts(cdi: &str, driver: &str, variable: &str) -> InjectionFacts {
        InjectionFacts {
            cdi: match cdi {
                "read" => Cdi::Read,
                "unknown" => Cdi::Unknown,
                "off" => Cdi::Off,
                _ => Cdi::Unwritable("cannot write /var/run/cdi".to_owned()),
            },
            driver: match driver {
                "simulated" => Driver::NotNeeded,
                "none" => Driver::Missing("no CDI spec of the NVIDIA driver".to_owned()),
                kind => Driver::Spec(if kind == "toolkit" {
                    "nvidia.com/gpu"
                } else {
                    "management.nvidia.com/gpu"
                }),
            },
            variable: match variable {
                "works" => VariableSupport::Works,
                "fails" => VariableSupport::Fails("the runtime says no".to_owned()),
                _ => VariableSupport::Unknown,
            },
            exposure: (variable == "works" && driver != "simulated").then_some(Exposure::EveryPod),
            has_hook: false,
        }
    }

    /// Every combination, for each value of `--inject`: mode, certainty, reason.
    #[test]
    fn the_mode_certainty_and_reason_on_every_kind_of_node() {
        let mut rows = Vec::new();
        for requested in [None, Some(Mode::Cdi), Some(Mode::Envvar)] {
            for cdi in ["read", "unknown", "off", "unwritable"] {
                for driver in ["toolkit", "none", "simulated"] {
                    for variable in ["works", "fails", "unknown"] {
                        let Injection {
                            mode,
                            certainty,
                            reason,
                            ..
                        } = decide(requested, &facts(cdi, driver, variable));
                        let requested = requested.map_or("auto", Mode::as_str);
                        let (mode, certainty) = (mode.as_str(), certainty.as_str());
                        rows.push(format!("{requested:6} {cdi:10} {driver:9} {variable:7} -> {mode:6} {certainty:10} {reason}"));
                    }
                }
            }
        }
        insta::assert_snapshot!(rows.join("\n"));
    }

    /// A mode that cannot work is never chosen where one that works is there.
    #[test]
    fn auto_chooses_a_mode_that_works_if_there_is_one() {
        for cdi in ["read", "unknown", "off", "unwritable"] {
            for driver in ["toolkit", "management", "none", "simulated"] {
                for variable in ["works", "fails", "unknown"] {
                    let facts = facts(cdi, driver, variable);
                    let chosen = decide(None, &facts);
                    let can_work = [Mode::Cdi, Mode::Envvar]
                        .map(|mode| decide(Some(mode), &facts).certainty == Certainty::Proven);
                    assert_eq!(
                        chosen.certainty == Certainty::Proven,
                        can_work.contains(&true),
                        "{facts:?}"
                    );
                    assert!(
                        chosen.mode == Mode::Cdi || facts.variable == VariableSupport::Works,
                        "only CDI fails closed: {facts:?}"
                    );
                }
            }
        }
    }

    #[test]
    fn the_message_names_the_setting_to_change() {
        let message = |cdi, driver, variable| decide(None, &facts(cdi, driver, variable)).message;
        insta::assert_snapshot!(
            [message("off", "toolkit", "fails"), message("read", "none", "unknown"), message("unwritable", "toolkit", "unknown")].join("\n"),
            @r"
        the container runtime ignores CDI devices: set enable_cdi = true in containerd's configuration and restart it; the variable cannot stand in for it: the runtime says no
        no CDI spec of the NVIDIA driver
        cannot write /var/run/cdi
        "
        );
    }

    #[rstest]
    #[case::acted_on(facts("read", "toolkit", "works"), true)]
    #[case::ignored(facts("read", "toolkit", "fails"), false)]
    #[case::simulated(facts("read", "simulated", "works"), false)]
    #[case::hooked(InjectionFacts { has_hook: true, ..facts("read", "toolkit", "works") }, false)]
    fn images_see_all_gpus_where_the_runtime_acts_on_the_variable(
        #[case] facts: InjectionFacts,
        #[case] expected: bool,
    ) {
        assert_eq!(
            decide(None, &facts).exposure == Some(Exposure::EveryPod),
            expected
        );
    }

    fn own(value: &str) -> OwnContainer {
        OwnContainer {
            visible_devices: Some(value.to_owned()),
            ..OwnContainer::default()
        }
    }

    fn seen(own: OwnContainer) -> VariableFacts {
        VariableFacts {
            own,
            ..VariableFacts::default()
        }
    }

    /// A runtime that resolves no UUID may give all GPUs to an image that names none.
    #[rstest]
    #[case::simulated(VariableFacts { is_simulated: true, ..seen(own("all")) }, None)]
    #[case::default_runtime_legacy(seen(own("all")), Some(Exposure::EveryPod))]
    #[case::default_runtime_jit_cdi(seen(own("void")), Some(Exposure::EveryPod))]
    #[case::operator_runtime_as_default(VariableFacts { has_management_spec: true, ..seen(own("void")) }, Some(Exposure::EveryPod))]
    #[case::runtime_class(seen(OwnContainer { runtime_class: Some("nvidia".to_owned()), ..own("all") }), Some(Exposure::RuntimeClass("nvidia".to_owned())))]
    fn exposure_follows_from_the_plugins_own_container(
        #[case] facts: VariableFacts,
        #[case] expected: Option<Exposure>,
    ) {
        assert_eq!(exposure(&facts), expected);
    }

    /// A container that has GPUs in any case, or asks for none, shows nothing about containers of others.
    #[rstest]
    #[case::driver_root(seen(OwnContainer { has_driver_root: true, ..own("all") }), "--driver-root")]
    #[case::privileged(seen(OwnContainer { is_privileged: true, ..own("all") }), "is privileged")]
    #[case::privileged_with_class(seen(OwnContainer { is_privileged: true, runtime_class: Some("nvidia".to_owned()), ..own("all") }), "is privileged")]
    #[case::no_variable(VariableFacts::default(), "does not set NVIDIA_VISIBLE_DEVICES=all")]
    fn exposure_is_unknown_where_nothing_can_be_concluded(#[case] facts: VariableFacts, #[case] words: &str) {
        let Some(Exposure::Unknown(why)) = exposure(&facts) else {
            panic!("{:?}", exposure(&facts));
        };
        assert!(why.contains(words), "{why}");
    }

    /// The configuration of the node's runtime, for a plugin whose own container shows nothing, or has seen something.
    #[rstest]
    #[case::default(ConfiguredRuntime::Default, privileged(), "Some(EveryPod)")]
    #[case::class(
        ConfiguredRuntime::OfRuntimeClass,
        privileged(),
        "Some(RuntimeClass(\"nvidia\"))"
    )]
    #[case::runc(ConfiguredRuntime::Inactive, privileged(), "None")]
    #[case::no_files(ConfiguredRuntime::Unknown, privileged(), "Some(Unknown(\"no configuration")]
    #[case::became_the_default(ConfiguredRuntime::Default, OwnContainer { runtime_class: Some("nvidia".to_owned()), ..own("all") }, "Some(EveryPod)")]
    #[case::seen(ConfiguredRuntime::Inactive, own("all"), "Some(EveryPod)")]
    #[case::seen_without_files(ConfiguredRuntime::Unknown, own("all"), "Some(EveryPod)")]
    fn exposure_follows_from_the_configuration_too(
        #[case] configured: ConfiguredRuntime,
        #[case] own: OwnContainer,
        #[case] expected: &str,
    ) {
        let facts = VariableFacts {
            configured: Some(configured),
            ..seen(own)
        };
        let found = format!("{:?}", exposure(&facts));
        assert!(found.starts_with(expected), "{found}");
    }

    /// As the component `driver-root` makes the plugin's container.
    fn privileged() -> OwnContainer {
        OwnContainer {
            has_driver_root: true,
            is_privileged: true,
            ..own("void")
        }
    }

    /// One row per kind of node in docs/nvidia.md.
    #[rstest]
    #[case::simulated(VariableFacts { is_simulated: true, ..VariableFacts::default() }, "Works")]
    #[case::default_runtime_legacy(seen(own("all")), "Works")]
    #[case::default_runtime_jit_cdi(seen(own("void")), "Works")]
    #[case::default_runtime_cdi_of_the_toolkit(VariableFacts { toolkit_names_uuid: true, ..seen(own("void")) }, "Works")]
    #[case::specs_of_the_toolkit_and_of_the_operator(VariableFacts { toolkit_names_uuid: true, has_management_spec: true, ..seen(own("void")) }, "Unknown")]
    #[case::operator_runtime_as_default(VariableFacts { has_management_spec: true, ..seen(own("void")) }, "Fails")]
    #[case::runtime_class(seen(OwnContainer { runtime_class: Some("nvidia".to_owned()), ..own("all") }), "Fails")]
    #[case::driver_root(seen(OwnContainer { has_driver_root: true, ..own("all") }), "Unknown")]
    #[case::privileged(seen(OwnContainer { is_privileged: true, ..own("all") }), "Unknown")]
    #[case::no_variable(VariableFacts::default(), "Unknown")]
    #[case::some_gpus(seen(own("0,1")), "Unknown")]
    fn the_plugins_own_container_shows_the_variables_effect(
        #[case] facts: VariableFacts,
        #[case] expected: &str,
    ) {
        let found = format!("{:?}", variable(&facts));
        assert!(found.starts_with(expected), "{found}");
    }
}
