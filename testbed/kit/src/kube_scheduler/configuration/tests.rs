use std::path::Path;
use std::time::Duration;

use rstest::rstest;

use super::SchedulerConfiguration;

const HEAD: &str = "apiVersion: kubescheduler.config.k8s.io/v1\nkind: KubeSchedulerConfiguration\n";

fn with(extender: &str) -> String {
    format!(
        "{HEAD}extenders:\n- urlPrefix: http://127.0.0.1:1/gpushare-scheduler\n  nodeCacheCapable: true\n{extender}"
    )
}

#[test]
fn all_modelled_fields_are_read() {
    let text = format!(
        "{HEAD}leaderElection: {{leaderElect: false}}
podMaxBackoffSeconds: 3
profiles: [{{schedulerName: gpushare}}, {{pluginConfig: []}}]
extenders:
- urlPrefix: http://a:1/x
  nodeCacheCapable: true
- urlPrefix: http://b:2/y
  filterVerb: filter
  prioritizeVerb: prioritize
  weight: 2
  bindVerb: bind
  httpTimeout: 1m0.5s
  nodeCacheCapable: true
  managedResources: [{{name: aliyun.com/gpu-mem, ignoredByScheduler: false}}]
"
    );
    let configuration: SchedulerConfiguration = text.parse().unwrap();
    let prefixes: Vec<_> = configuration
        .extenders
        .iter()
        .map(|e| e.url_prefix.as_str())
        .collect();
    assert_eq!(prefixes, ["http://a:1/x", "http://b:2/y"]);
    let timeouts: Vec<_> = configuration.extenders.iter().map(|e| e.http_timeout).collect();
    assert_eq!(timeouts, [Duration::from_secs(5), Duration::from_millis(60_500)]);
    assert_eq!(
        configuration.schedulers.iter().collect::<Vec<_>>(),
        ["default-scheduler", "gpushare"]
    );
    assert_eq!(
        (configuration.initial_backoff, configuration.max_backoff),
        (Duration::from_secs(1), Duration::from_secs(3))
    );
}

#[test]
fn a_replaced_address_keeps_the_path() {
    let configuration: SchedulerConfiguration = with("").parse().unwrap();
    let moved = configuration.with_extenders_at("http://127.0.0.1:4242");
    assert_eq!(
        moved.extenders[0].url_prefix,
        "http://127.0.0.1:4242/gpushare-scheduler"
    );
}

#[test]
fn certificates_are_read_from_the_given_folder() {
    let text = format!(
        "{HEAD}extenders:\n- urlPrefix: https://x.svc:12345/gpushare-scheduler\n  nodeCacheCapable: true\n  enableHTTPS: true\n  tlsConfig: {{caFile: /etc/ca.crt}}"
    );
    let configuration: SchedulerConfiguration = text.parse().unwrap();
    let moved = configuration
        .clone()
        .with_tls_extenders_at(([127, 0, 0, 1], 1).into(), Path::new("/nowhere"));
    let error = moved.extenders[0].connector().unwrap_err().to_string();
    assert!(
        error.starts_with("tlsConfig: cannot read /nowhere/ca.crt"),
        "{error}"
    );
    let plain = configuration.with_extenders_at("http://127.0.0.1:1");
    assert_eq!(
        plain.extenders[0].url_prefix,
        "http://127.0.0.1:1/gpushare-scheduler"
    );
    plain.extenders[0].connector().unwrap();
}

#[rstest]
#[case::scheme(
    "  enableHTTPS: true",
    "extenders[0].urlPrefix: \"http://127.0.0.1:1/gpushare-scheduler\" does not begin with https://"
)]
#[case::certificates(
    "  tlsConfig: {insecure: true}",
    "extenders[0].tlsConfig: has no meaning without enableHTTPS"
)]
#[case::no_weight(
    "  prioritizeVerb: p",
    "extenders[0].weight: an extender that prioritizes needs a positive weight"
)]
#[case::core_resource(
    "  managedResources: [{name: cpu}]",
    "extenders[0].managedResources: \"cpu\" is no extended resource"
)]
#[case::managed_twice(
    "  managedResources: [{name: a/b}, {name: a/b}]",
    "extenders[0].managedResources: a/b is managed twice"
)]
#[case::two_binders(
    "  bindVerb: b\n- urlPrefix: http://x\n  nodeCacheCapable: true\n  bindVerb: b",
    "extenders: more than one of them binds"
)]
#[case::ignorable(
    "  ignorable: true",
    "extenders[0].ignorable: the model needs nodeCacheCapable, and neither ignorable nor ignoredByScheduler"
)]
fn rules_of_kube_scheduler(#[case] extender: &str, #[case] message: &str) {
    assert_eq!(
        with(extender)
            .parse::<SchedulerConfiguration>()
            .unwrap_err()
            .to_string(),
        message
    );
}

#[rstest]
#[case::misspelt("  filterverb: filter", "unknown field `filterverb`")]
#[case::bad_timeout("  httpTimeout: 5s5", "missing a unit")]
#[case::negative_timeout("  httpTimeout: -5s", "negative")]
fn malformed_configurations_are_refused(#[case] extender: &str, #[case] cause: &str) {
    let error = with(extender).parse::<SchedulerConfiguration>().unwrap_err();
    let source = error.source().unwrap().to_string();
    assert!(source.contains(cause), "{source}");
}
