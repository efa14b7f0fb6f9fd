//! Compares the version of the kube-scheduler in this replica's pod with the API server's.
//!
//! A kube-scheduler of another version may not start, or may watch kinds that the API server does not serve. Its own log then
//! names neither version. Nothing here depends on the result: it is logged, and written as an event of the pod.

use std::fmt;
use std::time::Duration;

use daemon::events::Recorder;
use http::Method;
use kube::Client;
use serde_json::Value;
use tokio::time::sleep;
use tracing::{error, info, warn};

use super::{PodName, subject};
use crate::api_server;
use crate::config::MisfitNodes;

/// The name of kube-scheduler's container in the shipped manifests of a second kube-scheduler.
const CONTAINER: &str = "kube-scheduler";
/// The first minor version of kube-scheduler that asks extenders about nodes which they refuse, without victims
/// (kubernetes#135486).
const ASKS_ABOUT_MISFITS: (u32, u32) = (1, 38);
/// Pause between two comparisons: the API server may be upgraded while the pod runs.
const INTERVAL: Duration = Duration::from_secs(3600);
const RETRY_PAUSE: Duration = Duration::from_secs(10);

/// A version of Kubernetes, such as `v1.36.2`. Text after the third number (`-gke.100`, `+k3s1`) is left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Version {
    major: u32,
    minor: u32,
    patch: u32,
}

impl Version {
    /// Reads a version such as `v1.36.1`; `None` for a text of another form.
    fn parse(text: &str) -> Option<Self> {
        let mut numbers = text.strip_prefix('v')?.splitn(3, '.');
        let (major, minor) = (numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?);
        let rest = numbers.next()?;
        // Vendors append their own version, such as `-gke.100` or `+k3s1`.
        let patch = rest.split(|character: char| !character.is_ascii_digit()).next()?;
        let patch = patch.parse().ok()?;
        Some(Self { major, minor, patch })
    }

    /// The version in an image's tag; `None` if the tag names none, or there is no tag.
    fn of_image(image: &str) -> Option<Self> {
        // A digest may follow the tag after an `@`, and the registry's name may have a port after a colon too.
        let (name, _) = image.split_once('@').unwrap_or((image, ""));
        let (_, tag) = name.rsplit_once('/').unwrap_or(("", name)).1.split_once(':')?;
        Self::parse(tag)
    }

    /// Returns true if Kubernetes supports a kube-scheduler of this version beside this API server.
    fn is_supported_by(self, api_server: Self) -> bool {
        self.major == api_server.major
            && (self.minor == api_server.minor || self.minor + 1 == api_server.minor)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "v{}.{}.{}", self.major, self.minor, self.patch)
    }
}

fn image(pod: &Value) -> Option<&str> {
    let mut containers = pod.pointer("/spec/containers")?.as_array()?.iter();
    let container =
        containers.find(|container| container.pointer("/name").and_then(Value::as_str) == Some(CONTAINER));
    container?.get("image")?.as_str()
}

/// The advice to the operator if Kubernetes does not support the two versions together; `None` also for a tag without a version.
fn version_advice(image: &str, server: &str) -> Option<String> {
    let (scheduler, server) = (Version::of_image(image)?, Version::parse(server)?);
    if scheduler.is_supported_by(server) {
        return None;
    }
    Some(format!(
        "kube-scheduler {scheduler} beside the API server {server}: Kubernetes supports the same minor version or the one before. \
         deploy/install.sh sets it; by hand, set newTag of registry.k8s.io/kube-scheduler to {server} in your kustomization"
    ))
}

/// The advice to the operator about the version of kube-scheduler and about --misfit-nodes; `None` if both fit.
fn advice(image: &str, server: &str, misfit_nodes: MisfitNodes) -> Option<String> {
    match (version_advice(image, server), flag_advice(image, misfit_nodes)) {
        (Some(version), Some(flag)) => Some(format!("{version}; {flag}")),
        (version, flag) => version.or(flag),
    }
}

/// The advice to the operator if --misfit-nodes does not fit the version of kube-scheduler; `None` also for a tag without a
/// version.
fn flag_advice(image: &str, misfit_nodes: MisfitNodes) -> Option<String> {
    let scheduler = Version::of_image(image)?;
    let asks = (scheduler.major, scheduler.minor) >= ASKS_ABOUT_MISFITS;
    let fitting = match (asks, misfit_nodes) {
        (true, MisfitNodes::Unresolvable) => "resolvable",
        (false, MisfitNodes::Resolvable) => "unresolvable",
        (true, MisfitNodes::Resolvable) | (false, MisfitNodes::Unresolvable) => return None,
    };
    Some(format!(
        "kube-scheduler {scheduler} takes --misfit-nodes={fitting}: only from 1.38 on it asks the extender about nodes whose sums have \
         room. deploy/install.sh sets the flag; with `resolvable`, --make-room must be off"
    ))
}

/// Compares the versions now and every hour, until the future is dropped.
pub(crate) async fn watch_version(
    client: Client,
    recorder: Recorder,
    pod: PodName,
    misfit_nodes: MisfitNodes,
) {
    let mut last_advice = None;
    loop {
        let pause = match versions(&client, &pod).await {
            Ok((image, server)) => {
                let advice = advice(&image, &server, misfit_nodes);
                if advice.is_none() {
                    info!(image, server, "the second kube-scheduler");
                }
                // Logged once for each pair of versions, not every hour.
                if advice != last_advice
                    && let Some(text) = &advice
                {
                    error!("{text}");
                    recorder.warn(subject(&pod), "KubeSchedulerVersion", text.clone());
                }
                last_advice = advice;
                INTERVAL
            }
            Err(error) => {
                warn!(
                    error,
                    "the version of kube-scheduler is not compared with the API server's yet"
                );
                RETRY_PAUSE
            }
        };
        sleep(pause).await;
    }
}

/// The image of kube-scheduler in this replica's pod, and the version of the API server; each empty if it is missing.
async fn versions(client: &Client, pod: &PodName) -> Result<(String, String), String> {
    let PodName { namespace, name } = pod;
    let server = get(client, "/version").await?;
    let server = server.get("gitVersion").and_then(Value::as_str);
    let pod = get(client, &format!("/api/v1/namespaces/{namespace}/pods/{name}")).await?;
    let image = image(&pod).unwrap_or_default();
    Ok((image.to_owned(), server.unwrap_or_default().to_owned()))
}

async fn get(client: &Client, path: &str) -> Result<Value, String> {
    let answer = api_server::send(client, Method::GET, path, None).await?;
    if !answer.status.is_success() {
        return Err(format!("cannot read {path}: {}", answer.message()));
    }
    serde_json::from_slice(&answer.body).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use rstest::rstest;
    use serde_json::json;

    use super::*;

    #[rstest]
    #[case::the_same("v1.36.2", "v1.36.2", true)]
    #[case::another_patch("v1.36.9", "v1.36.2", true)]
    #[case::one_before("v1.35.0", "v1.36.2", true)]
    #[case::two_before("v1.34.8", "v1.36.2", false)]
    #[case::as_shipped("v1.33.6", "v1.36.2", false)]
    #[case::newer("v1.37.0", "v1.36.2", false)]
    #[case::another_major("v2.36.2", "v1.36.2", false)]
    #[case::of_a_vendor("v1.36.2", "v1.36.2-eks-1234567", true)]
    #[case::of_k3s("v1.34.1", "v1.36.2+k3s1", false)]
    #[case::unknown("latest", "v1.36.2", true)]
    fn a_kube_scheduler_one_minor_version_behind_the_api_server_is_supported(
        #[case] tag: &str,
        #[case] server: &str,
        #[case] expected: bool,
    ) {
        for image in [
            "registry.k8s.io/kube-scheduler:",
            "localhost:5000/kube-scheduler:",
            "kube-scheduler:",
        ] {
            let advice = version_advice(&format!("{image}{tag}"), server);
            assert_eq!(advice.is_none(), expected, "{advice:?}");
            assert!(advice.is_none_or(|text| text.contains(tag) && text.contains("v1.36.2")));
        }
    }

    #[rstest]
    #[case::before("v1.37.2", MisfitNodes::Unresolvable, None)]
    #[case::too_early("v1.37.2", MisfitNodes::Resolvable, Some("--misfit-nodes=unresolvable"))]
    #[case::from_then_on("v1.38.0-alpha.1", MisfitNodes::Resolvable, None)]
    #[case::forgotten("v1.38.0", MisfitNodes::Unresolvable, Some("--misfit-nodes=resolvable"))]
    #[case::unknown("latest", MisfitNodes::Resolvable, None)]
    fn the_flag_on_misfits_belongs_to_a_version(
        #[case] tag: &str,
        #[case] misfit_nodes: MisfitNodes,
        #[case] expected: Option<&str>,
    ) {
        let advice = flag_advice(&format!("registry.k8s.io/kube-scheduler:{tag}"), misfit_nodes);
        assert_eq!(advice.is_some(), expected.is_some(), "{advice:?}");
        assert!(expected.is_none_or(|flag| advice.unwrap().contains(flag)));
    }

    #[test]
    fn the_advice_names_both_faults() {
        let advice = advice("kube-scheduler:v1.38.0", "v1.36.2", MisfitNodes::Unresolvable).unwrap();
        assert!(
            advice.contains("v1.36.2") && advice.contains("--misfit-nodes=resolvable"),
            "{advice}"
        );
    }

    #[rstest]
    #[case::digest("r/kube-scheduler:v1.36.2@sha256:ab", Some((1, 36, 2)))]
    #[case::digest_alone("r/kube-scheduler@sha256:ab", None)]
    #[case::port_and_no_tag("localhost:5000/kube-scheduler", None)]
    #[case::cut_short("kube-scheduler:v1.36", None)]
    #[case::too_large("kube-scheduler:v1.99999999999.0", None)]
    fn the_version_is_read_from_the_tag_of_an_image(
        #[case] image: &str,
        #[case] expected: Option<(u32, u32, u32)>,
    ) {
        assert_eq!(
            Version::of_image(image),
            expected.map(|(major, minor, patch)| Version { major, minor, patch })
        );
    }

    #[test]
    fn the_image_is_that_of_the_container_kube_scheduler() {
        let containers = json!([{"name": "gpushare-scheduler", "image": "a:1"}, {"name": "kube-scheduler", "image": "b:v1.36.2"}]);
        let pod = json!({"spec": {"containers": containers}});
        assert_eq!(image(&pod), Some("b:v1.36.2"));
        assert_eq!(image(&json!({})), None);
    }
}
