use rstest::rstest;

use super::*;
use crate::load::{Rig, empty_api_server};
use kit::cluster::{default_deploy, user_client};
use kit::kube_scheduler::{KubeScheduler, Options, SchedulerConfiguration};

fn args(schedulers: &[&str]) -> ScheduleArgs {
    ScheduleArgs {
        kubeconfig: PathBuf::new(),
        clean: false,
        nodes: 20,
        pods: 40,
        pod_bytes: 2048,
        schedulers: schedulers.iter().map(|name| (*name).to_owned()).collect(),
        halts: Vec::new(),
        waiting: 20,
        rounds: 2,
        rest: 0,
    }
}

fn configuration(name: &str) -> SchedulerConfiguration {
    let text = format!(
        "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\nprofiles: [{{schedulerName: {name}}}]"
    );
    text.parse().unwrap()
}

/// The real scheduler beside none, with the testbed's model of kube-scheduler in the place of the real one.
#[tokio::test(flavor = "multi_thread")]
async fn pods_per_second_are_measured_with_and_without_the_extender() {
    let (api, dir) = empty_api_server().await.unwrap();
    let client = user_client(&api, dir.path(), "admin", &["system:masters"])
        .await
        .unwrap();
    let (console, objects) = (Console::new(true), Objects::of(&client));
    fill::fill(&console, &objects, &args(&[])).await.unwrap();
    let rig = Rig::with_scheduler(api, dir, &[]).await.unwrap();
    let shipped = SchedulerConfiguration::read(
        &default_deploy().join("attach/kube-scheduler/kube-scheduler-config.yaml"),
    )
    .unwrap();
    let extended = SchedulerConfiguration {
        schedulers: configuration("gpushare").schedulers,
        ..shipped.with_extenders_at(&rig.url)
    };
    let _plain = KubeScheduler::start(&client, &configuration("plain"), Options::default()).unwrap();
    let _gpushare = KubeScheduler::start(&client, &extended, Options::default()).unwrap();
    let turns = schedule(&console, &client, &args(&["plain", "gpushare"]))
        .await
        .unwrap();
    let order: Vec<_> = turns
        .iter()
        .map(|turn| (turn.scheduler.as_str(), turn.round))
        .collect();
    assert_eq!(
        order,
        [
            ("plain", Some(1)),
            ("gpushare", Some(1)),
            ("gpushare", Some(2)),
            ("plain", Some(2))
        ]
    );
    assert!(
        turns
            .iter()
            .all(|turn| turn.pods == 20 && turn.per_second > 0.0 && turn.ratio > 0.0),
        "{turns:?}"
    );
    assert_eq!(objects.names("/api/v1/nodes", LABEL).await.unwrap().len(), 20);
    assert_eq!(
        objects.names("/api/v1/pods", LABEL).await.unwrap().len(),
        40,
        "waiting pods are gone, bound ones stay"
    );
    let other = ScheduleArgs {
        nodes: 10,
        ..args(&[])
    };
    assert!(
        fill::fill(&console, &objects, &other).await.is_err(),
        "it is filled for another size"
    );
    fill::clean(&console, &objects).await.unwrap();
    for path in [
        "/api/v1/nodes",
        "/api/v1/pods",
        "/apis/scheduling.koordinator.sh/v1alpha1/devices",
    ] {
        assert_eq!(objects.names(path, "").await.unwrap().len(), 0, "{path}");
    }
    rig.stop().await;
}

#[tokio::test]
async fn only_schedulers_that_are_measured_may_be_halted() {
    let args = ScheduleArgs {
        halts: vec![HaltedProcess::parse("other=4711").unwrap()],
        ..args(&["plain"])
    };
    let error = run(&Console::new(true), &args).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"--halt names "other", which no --scheduler does"#
    );
}

#[rstest]
#[case::odd(&[30.0, 10.0, 20.0], 20.0)]
#[case::even(&[40.0, 10.0, 20.0, 30.0], 25.0)]
#[case::one(&[7.0], 7.0)]
fn medians(#[case] rates: &[f64], #[case] wanted: f64) {
    let turns: Vec<Turn> = rates
        .iter()
        .map(|rate| turn("a", 1, *rate))
        .chain([turn("b", 1, 1000.0)])
        .collect();
    assert!((median(&turns, "a").unwrap().per_second - wanted).abs() < 1e-9);
    assert!(median(&turns, "c").is_none());
}

#[test]
fn turns_are_compared_within_their_round() {
    let mut turns = [
        turn("plain", 1, 100.0),
        turn("other", 1, 150.0),
        turn("other", 2, 300.0),
        turn("plain", 2, 200.0),
    ];
    compare(&mut turns, "plain");
    assert_eq!(
        turns.map(|turn| format!("{:.2}", turn.ratio)),
        ["1.00", "1.50", "1.50", "1.00"]
    );
}

/// Pods like those of a user: with requests, an owner, and the wanted size.
#[test]
fn pending_pods_look_like_those_of_users() {
    let args = args(&["plain"]);
    let pods: Vec<Value> = (0..5)
        .map(|idx| waiting_pod("plain", 3, idx, &args).unwrap())
        .collect();
    assert_eq!(pods[4]["metadata"]["name"], "plain-3-000004");
    assert_eq!(pods[0]["spec"]["schedulerName"], "plain");
    assert_eq!(pods[0]["spec"]["containers"], pods[4]["spec"]["containers"]);
    assert_ne!(pods[0]["spec"]["containers"], pods[1]["spec"]["containers"]);
    let size = pods[0].to_string().len();
    assert!((2000..2100).contains(&size), "{size}");
}

fn turn(scheduler: &str, round: u32, rate: f64) -> Turn {
    Turn {
        scheduler: scheduler.to_owned(),
        round: Some(round),
        pods: 10,
        created_seconds: 0.0,
        seconds: 1.0,
        per_second: rate,
        ratio: 1.0,
    }
}
