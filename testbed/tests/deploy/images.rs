//! The Dockerfile builds the binaries that the manifests run.

use rstest::rstest;

use super::daemons::{DEVICE_PLUGIN, Daemon, SCHEDULER};
use super::render::render;
use super::{find, read, repository};

/// The arguments of this instruction in the Dockerfile's stage of this name.
fn instructions(stage: &str, instruction: &str) -> Vec<String> {
    let text = read("docker/Dockerfile");
    let stages = text.split("\nFROM ").skip(1);
    let is_named = |text: &&str| text.lines().next().unwrap().ends_with(&format!(" AS {stage}"));
    let stage = stages.into_iter().find(is_named).unwrap();
    let lines = stage.lines().filter_map(|line| line.strip_prefix(instruction));
    lines.map(|line| line.trim().to_owned()).collect()
}

#[rstest]
#[case::scheduler(SCHEDULER, "scheduler", "dist", "65532:65532")]
#[case::device_plugin(DEVICE_PLUGIN, "device-plugin", "dist-small", "0:0")]
fn each_image_contains_its_binary(
    #[case] daemon: Daemon,
    #[case] stage: &str,
    #[case] profile: &str,
    #[case] user: &str,
) {
    let build = format!(
        "cargo build --profile {profile} --locked -p {} --bin {}",
        daemon.package, daemon.name
    );
    assert!(read("docker/Dockerfile").contains(&build), "{build}");
    let binary = format!("/usr/local/bin/{}", daemon.name);
    assert_eq!(
        instructions(stage, "COPY"),
        [format!("--from=daemons /out/{} {binary}", daemon.name)]
    );
    assert_eq!(instructions(stage, "USER"), [user]);
    assert_eq!(instructions(stage, "ENTRYPOINT"), [format!("[\"{binary}\"]")]);
}

#[test]
fn users_of_images_are_those_of_the_manifests() {
    let objects = render("base");
    for (kind, name, stage) in [
        ("Deployment", SCHEDULER.name, "scheduler"),
        ("DaemonSet", DEVICE_PLUGIN.name, "device-plugin"),
    ] {
        let context = &find(&objects, kind, name)["spec"]["template"]["spec"]["securityContext"];
        let user = format!("{}:{}", context["runAsUser"], context["runAsGroup"]);
        assert_eq!(instructions(stage, "USER"), [user]);
    }
}

/// The testbed starts a cluster from the manifests of its image; `testbed/tests/demo.rs` runs it with those that the build gets.
#[test]
fn the_testbed_finds_the_manifests_of_its_image() {
    let copied = instructions("testbed", "COPY");
    let manifests = "--from=simulation /src/deploy/ /gpushare/deploy/";
    assert!(
        copied.iter().any(|arguments| arguments == manifests),
        "{copied:?}"
    );
    let variables = instructions("testbed", "ENV");
    assert!(
        variables.contains(&"TESTBED_DEPLOY=/gpushare/deploy".to_owned()),
        "{variables:?}"
    );
}

/// The compiler in the images is the one that the repository asks for.
#[test]
fn images_are_built_with_the_pinned_compiler() {
    let toolchain = std::fs::read_to_string(repository().join("rust-toolchain.toml")).unwrap();
    let version = toolchain.split('"').nth(1).unwrap();
    let image = format!("ARG BUILD_IMAGE=rust:{version}-");
    assert!(read("docker/Dockerfile").contains(&image), "{image}");
}

/// A test that only compares two builds of one Dockerfile misses a base image that its registry has changed in between.
#[test]
fn base_images_are_named_by_digest() {
    let text = read("docker/Dockerfile");
    let named = text.lines().filter_map(|line| line.strip_prefix("ARG "));
    let images: Vec<&str> = named
        .filter(|line| line.split('=').next().unwrap().ends_with("_IMAGE"))
        .collect();
    assert_eq!(images.len(), 2, "{images:?}");
    for image in images {
        let (_, digest) = image.split_once("@sha256:").unwrap();
        assert!(
            digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "{image}"
        );
    }
    let bases = text.lines().filter_map(|line| line.strip_prefix("FROM "));
    let ours = ["daemons", "${BUILD_IMAGE}", "${RUNTIME_IMAGE}"];
    for base in bases.map(|line| line.split(' ').next().unwrap()) {
        assert!(ours.contains(&base), "{base}");
    }
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
