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

#[test]
fn answers_about_a_domain() {
    let place = |node: &str, gpus: &[u32]| FitPlacement {
        node: node.to_owned(),
        pods: 4,
        gpus: gpus.iter().map(|minor| (*minor, 1)).collect(),
    };
    let fitting = FitAnswer {
        asked: "80 GiB".to_owned(),
        replicas: 4,
        fitting: 4,
        domain: GroupDomain::Link,
        nodes_with_room: 2,
        placements: vec![place("n2", &[0, 1, 2, 3])],
        ..FitAnswer::default()
    };
    let on_one_node = FitAnswer {
        domain: GroupDomain::Node,
        nodes_with_room: 1,
        ..fitting.clone()
    };
    let refused = FitAnswer {
        fitting: 3,
        nodes_with_room: 0,
        placements: Vec::new(),
        blocked: [("no link group of the node has room for all pods".to_owned(), 2)].into(),
        ..fitting.clone()
    };
    let texts = [fitting, on_one_node, refused];
    let texts = texts.map(|answer| render("Job/train", &answer, &Screen::plain(80)));
    insta::assert_snapshot!(texts.join("---\n"));
}
