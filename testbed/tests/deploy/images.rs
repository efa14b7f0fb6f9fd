//! The Dockerfiles build the binaries that the manifests run.

use rstest::rstest;

use crate::daemons::{DEVICE_PLUGIN, Daemon, SCHEDULER};
use crate::render::render;
use crate::{find, read, repository};

/// The lines that begin with this instruction, of the last stage.
fn last_stage(text: &str, instruction: &str) -> Vec<String> {
    let last = text.rsplit("\nFROM ").next().unwrap();
    let lines = last.lines().filter_map(|line| line.strip_prefix(instruction));
    lines.map(|line| line.trim().to_owned()).collect()
}

#[rstest]
#[case::scheduler(SCHEDULER, "scheduler", "65532:65532")]
#[case::device_plugin(DEVICE_PLUGIN, "device-plugin", "0:0")]
fn each_image_contains_its_binary(#[case] daemon: Daemon, #[case] recipe: &str, #[case] user: &str) {
    let text = read(&format!("docker/{recipe}.Dockerfile"));
    let build = format!(
        "cargo build --profile dist --locked -p {} --bin {}",
        daemon.package, daemon.name
    );
    assert!(text.contains(&build), "{build}");
    assert_eq!(last_stage(&text, "USER"), [user]);
    assert_eq!(
        last_stage(&text, "ENTRYPOINT"),
        [format!("[\"/usr/local/bin/{}\"]", daemon.name)]
    );
}

#[test]
fn users_of_images_are_those_of_the_manifests() {
    let objects = render("base");
    for (kind, name, recipe) in [
        ("Deployment", SCHEDULER.name, "scheduler"),
        ("DaemonSet", DEVICE_PLUGIN.name, "device-plugin"),
    ] {
        let context = &find(&objects, kind, name)["spec"]["template"]["spec"]["securityContext"];
        let user = format!("{}:{}", context["runAsUser"], context["runAsGroup"]);
        assert_eq!(
            last_stage(&read(&format!("docker/{recipe}.Dockerfile")), "USER"),
            [user]
        );
    }
}

/// The compiler in the images is the one that the repository asks for.
#[rstest]
fn images_are_built_with_the_pinned_compiler(
    #[values("scheduler", "device-plugin", "testbed")] recipe: &str,
) {
    let toolchain = std::fs::read_to_string(repository().join("rust-toolchain.toml")).unwrap();
    let version = toolchain.split('"').nth(1).unwrap().trim_end_matches(".0");
    let text = read(&format!("docker/{recipe}.Dockerfile"));
    assert!(text.contains(&format!("FROM rust:{version}-")), "{version}");
}

/// cargo builds no package of a workspace whose members are not all there.
#[test]
fn every_member_of_the_workspace_reaches_the_build() {
    let text = |file: &str| std::fs::read_to_string(repository().join(file)).unwrap();
    let (manifest, ignored) = (text("Cargo.toml"), text(".dockerignore"));
    let members = manifest
        .lines()
        .find_map(|line| line.strip_prefix("members = ["))
        .unwrap();
    let members = members.split('"').skip(1).step_by(2);
    for member in members {
        let folder = member.split('/').next().unwrap();
        let admitted = format!("!{folder}");
        assert!(ignored.lines().any(|line| line == admitted), "{admitted}");
    }
}
