//! NVIDIA's container runtime, which a pod names by its `RuntimeClass`: the GPUs that a pod without a request sees under it.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use proto::device::DeviceCondition;
use serde_json::json;

use super::GpuScenario;
use super::answers::Answer;
use super::trial::{Finding, Trial, isolated_in_words, no_variable};

pub(super) const SCENARIOS: &[GpuScenario] = scenarios! { on a GPU:
    "gpu-runtime-classes" => runtime_classes,
        "the same pod under each RuntimeClass of NVIDIA's runtime";
};

/// The prefix of the handlers of NVIDIA's runtime: nvidia, nvidia-cdi, nvidia-legacy.
const HANDLERS: &str = "nvidia";

/// The longest wait for a pod under a `RuntimeClass`; its node may not have the handler.
const START: Duration = Duration::from_secs(90);

/// The reason of kubelet's events about a pod whose sandbox the container runtime does not make.
const NO_SANDBOX: &str = "FailedCreatePodSandBox";

/// A container without a request, as it sees a node's GPUs; or the reason that it has not started.
type View = Result<Answer, String>;

/// Starts a pod under each `RuntimeClass`, and compares its view with the condition that the plugin publishes about such pods.
async fn runtime_classes(trial: &mut Trial) -> Result<Finding> {
    let classes: Api<RuntimeClass> = Api::all(trial.world.client());
    let classes = match classes.list(&ListParams::default()).await {
        Ok(classes) => classes.items,
        Err(error) => return Ok(Finding::not_run(format!("cannot list RuntimeClasses: {error}"))),
    };
    let of_nvidia = classes.iter().filter(|class| class.handler.starts_with(HANDLERS));
    let names: Vec<String> = of_nvidia.map(ResourceExt::name_any).collect();
    if names.is_empty() {
        let reason = "the cluster has no RuntimeClass whose handler is NVIDIA's runtime";
        return Ok(Finding::not_run(reason));
    }
    let mut views = Vec::new();
    for (idx, class) in names.into_iter().enumerate() {
        let view = view(trial, &format!("class-{idx}"), &class).await?;
        views.push((class, view));
    }
    let condition = trial.isolated()?;
    let finding = compare(&views, condition.as_ref(), &trial.image)?;
    let view_of = |(class, view): &(String, View)| match view {
        Ok(view) => {
            json!({"runtimeClass": class, "seesGpu": view.sees_gpu(), "deviceFiles": view.device_files})
        }
        Err(reason) => json!({"runtimeClass": class, "notStarted": reason}),
    };
    let figures: Vec<_> = views.iter().map(view_of).collect();
    Ok(finding.figure("runtimeClasses", figures))
}

/// The view of a pod without a request under a `RuntimeClass`.
async fn view(trial: &Trial, name: &str, class: &str) -> Result<View> {
    let mut pod = trial.pod(name, &["see", "hold=3600"], &[]);
    pod.set_spec("runtimeClassName", json!(class));
    trial.create(pod).await?;
    match trial.answers_within(START, name, "main", "see").await {
        Ok(answers) => {
            let view = answers.last("see").cloned();
            Ok(Ok(view.context("nothing is seen")?))
        }
        Err(error) => {
            let event = trial.event(name, NO_SANDBOX).await?;
            let reason = event.map(|(_, message)| message);
            Ok(Err(reason.unwrap_or_else(|| format!("{error:#}"))))
        }
    }
}

/// Compares the views with the condition `Isolated` of the Device object: if that is true or absent, no container without a
/// request may see a GPU.
///
/// # Errors
/// A container sees a GPU although the condition is true or absent.
fn compare(views: &[(String, View)], condition: Option<&DeviceCondition>, image: &str) -> Result<Finding> {
    let (mut texts, mut seeing, mut has_variable) = (Vec::new(), Vec::new(), true);
    for (class, view) in views {
        texts.push(match view {
            Ok(view) if view.sees_gpu() => {
                seeing.push(class.as_str());
                format!("{class}: sees the GPU ({})", view.device_files.join(", "))
            }
            Ok(view) => {
                has_variable &= view.variable.is_some();
                format!("{class}: sees no GPU")
            }
            Err(reason) => format!("{class}: not started: {reason}"),
        });
    }
    if seeing.is_empty() && !has_variable {
        return Ok(no_variable(image));
    }
    let text = format!("{}; {}", texts.join("; "), isolated_in_words(condition));
    if views.iter().all(|(_, view)| view.is_err()) {
        return Ok(Finding::not_run(text));
    }
    let is_isolated = condition.is_none_or(|condition| condition.status == "True");
    if is_isolated && !seeing.is_empty() {
        bail!("{text}: the plugin should report that such pods see GPUs");
    }
    Ok(Finding::new(text))
}

#[cfg(test)]
mod tests {
    use proto::device::CONDITION_ISOLATED;
    use rstest::rstest;

    use super::*;

    fn view(files: &[&str]) -> Answer {
        Answer {
            variable: Some("all".to_owned()),
            device_files: files.iter().map(|file| (*file).to_owned()).collect(),
            ..Answer::default()
        }
    }

    #[rstest]
    #[case::open_and_reported(view(&["nvidia0"]), Some(("False", "ImageVariable")), Ok("nvidia: sees the GPU (nvidia0); nvidia-cdi: not started: no runtime; Isolated=False ImageVariable"))]
    #[case::open_and_unknown(view(&["nvidia0"]), Some(("Unknown", "NotObservable")), Ok("Isolated=Unknown NotObservable"))]
    #[case::open_and_denied(view(&["nvidia0"]), Some(("True", "Closed")), Err("should report"))]
    #[case::open_and_not_reported(view(&["nvidia0"]), None, Err("Isolated is not published"))]
    #[case::closed(view(&["nvidiactl"]), Some(("True", "Closed")), Ok("nvidia: sees no GPU; "))]
    #[case::never_open(view(&[]), None, Ok("nvidia: sees no GPU; "))]
    fn a_view_agrees_with_the_condition(
        #[case] view: Answer,
        #[case] published: Option<(&str, &str)>,
        #[case] expected: Result<&str, &str>,
    ) {
        let condition = published.map(|(status, reason)| DeviceCondition {
            condition_type: CONDITION_ISOLATED.to_owned(),
            status: status.to_owned(),
            reason: reason.to_owned(),
            ..DeviceCondition::default()
        });
        let views = [
            ("nvidia".to_owned(), Ok(view)),
            ("nvidia-cdi".to_owned(), Err("no runtime".to_owned())),
        ];
        match (compare(&views, condition.as_ref(), "image"), expected) {
            (Ok(finding), Ok(words)) => assert!(finding.text.contains(words), "{}", finding.text),
            (Err(error), Err(words)) => assert!(error.to_string().contains(words), "{error}"),
            (found, _) => panic!("{found:?}"),
        }
    }

    #[rstest]
    #[case::none_started(&[("nvidia".to_owned(), Err("no runtime".to_owned()))], "nvidia: not started: no runtime")]
    #[case::without_variable(&[("nvidia".to_owned(), Ok(Answer::default()))], "does not set NVIDIA_VISIBLE_DEVICES")]
    fn a_view_that_shows_nothing_is_no_result(#[case] views: &[(String, View)], #[case] words: &str) {
        let reason = compare(views, None, "image").unwrap().not_run.unwrap();
        assert!(reason.contains(words), "{reason}");
    }

    /// The image says nothing about one class, and another shows the GPU.
    #[test]
    fn one_view_of_a_gpu_is_a_result() {
        let views = [
            ("nvidia".to_owned(), Ok(view(&["nvidia0"]))),
            ("nvidia-cdi".to_owned(), Ok(Answer::default())),
        ];
        let error = compare(&views, None, "image").unwrap_err();
        assert!(error.to_string().contains("should report"), "{error}");
    }
}
