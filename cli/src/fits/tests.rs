//! Manifests, and answers as a terminal shows them.

use proto::read_api::FitPlacement;

use super::*;

const MANIFEST: &str = r"
kind: ConfigMap
metadata: {name: settings}
---
kind: Pod
metadata: {name: one}
spec:
  containers:
    - name: c
      resources: {limits: {aliyun.com/gpu-mem: 8}}
---
kind: Deployment
metadata: {name: web}
spec:
  replicas: 3
  template:
    spec:
      containers:
        - name: c
          resources: {limits: {aliyun.com/gpu-mem: '8'}}
---
---
kind: CronJob
metadata: {name: nightly}
spec:
  jobTemplate:
    spec:
      parallelism: 2
      template:
        spec:
          containers: []
---
apiVersion: v1
kind: List
items:
  - kind: Service
    metadata: {name: web}
";

#[test]
fn documents_with_and_without_pods() {
    let manifest = Manifest::parse(MANIFEST).unwrap();
    let pods: Vec<(&str, u32)> = manifest
        .pods
        .iter()
        .map(|pods| (pods.of.as_str(), pods.replicas))
        .collect();
    assert_eq!(
        pods,
        [("Pod/one", 1), ("Deployment/web", 3), ("CronJob/nightly", 2)]
    );
    assert_eq!(
        manifest.others,
        ["document 1 (ConfigMap/settings)", "document 6 (Service/web)"]
    );
}

#[test]
fn documents_that_cannot_be_read() {
    let error = |text: &str| Manifest::parse(text).unwrap_err().to_string();
    insta::assert_snapshot!([error("a: ["), error("kind: Pod\nspec: {containers: 7}")].join("\n"));
}

#[test]
fn answers() {
    let screen = Screen::plain(80);
    let answer = FitAnswer {
        asked: "8 GiB".to_owned(),
        replicas: 5,
        fitting: 3,
        placements: vec![
            FitPlacement {
                node: "n1".to_owned(),
                pods: 2,
                gpus: [(0, 2)].into(),
            },
            FitPlacement {
                node: "n2+1".to_owned(),
                pods: 1,
                gpus: [(3, 1)].into(),
            },
        ],
        blocked: [(
            "not enough free GPU memory on any one GPU of the node".to_owned(),
            2,
        )]
        .into(),
        ..FitAnswer::default()
    };
    let invalid = FitAnswer {
        invalid: Some("the pod asks for no device that gpushare schedules".to_owned()),
        ..FitAnswer::default()
    };
    let texts = [
        render("Deployment/web", &answer, &screen),
        render("Pod/p", &invalid, &screen),
    ];
    insta::assert_snapshot!(texts.join("---\n"));
}
