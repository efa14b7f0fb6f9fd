//! Flags: defaults, what is refused and in which words, and the help text.

use clap::{CommandFactory, Parser};
use placement::{DevicePolicy, NodePolicy};
use proptest::prelude::*;
use rstest::rstest;

use super::{Args, Config};

fn parse(flags: &[&str]) -> Result<Config, String> {
    let flags = ["gpushare-scheduler"].iter().chain(flags);
    let args = Args::try_parse_from(flags).map_err(|error| error.to_string())?;
    Config::try_from(args).map_err(|error| format!("{error:#}"))
}

#[test]
fn the_default_paths_are_those_of_the_old_extender() {
    let config = parse(&[]).unwrap();
    assert_eq!(super::PREFIX, "/gpushare-scheduler");
    assert_eq!(
        config.serving.listen.to_string(),
        "127.0.0.1:12345",
        "only local clients reach it by default"
    );
    assert_eq!(config.scheduling.names.memory, "aliyun.com/gpu-mem");
    assert_eq!(config.scheduling.policies, placement::Policies::default());
    let weights = &config.scheduling.weights;
    assert_eq!(
        (
            weights.memory_ratio,
            weights.memory,
            weights.core,
            weights.others.len()
        ),
        (1, 1, 0, 2)
    );
}

#[test]
fn policies_and_weights_are_read_from_flags() {
    let flags = [
        "--node-policy=most-allocated",
        "--device-policy=in-order",
        "--score-weights=koordinator.sh/gpu-core=3,example.com/npu=2",
    ];
    let scheduling = parse(&flags).unwrap().scheduling;
    assert_eq!(
        (scheduling.policies.node, scheduling.policies.device),
        (NodePolicy::MostAllocated, DevicePolicy::InOrder)
    );
    let weights = scheduling.weights;
    assert_eq!((weights.memory_ratio, weights.memory, weights.core), (0, 0, 3));
    assert_eq!(weights.others, [("example.com/npu".into(), 2)].into());
}

#[rstest]
#[case::address(&["--listen", "12345"], "--listen")]
#[case::no_domain(&["--memory-resource", "gpu-mem"], "must be a resource name with a domain")]
#[case::policy(&["--node-policy", "binpak"], "possible values: fill, binpack, spread, least-allocated, most-allocated")]
#[case::weight(&["--score-weights", "koordinator.sh/rdma"], "write a resource, = and a weight")]
#[case::great_weight(&["--score-weights", "koordinator.sh/rdma=1000"], "a whole number up to 100")]
#[case::weight_of_nothing(&["--score-weights", "rdma=1"], "must be a resource name with a domain")]
#[case::bare_number(&["--hint-ttl", "4"], "write a whole number and ms, s, m or h")]
#[case::negative(&["--hint-ttl=-4s"], "write a whole number and ms, s, m or h")]
#[case::endless(&["--hint-ttl", "99999999999999999h"], "at most 24h")]
#[case::level(&["--log-level", "inof"], "\"inof\" is none of off, error, warn, info, debug, trace")]
#[case::webhooks_in_the_clear(&["--webhook-listen", "0.0.0.0:9443"], "--webhook-listen needs --certificate-secret, or --tls-dir")]
#[case::clients_of_no_webhooks(&["--webhook-client-ca-file=x"], "--webhook-listen")]
#[case::rules_without_webhooks(&["--webhook-scheduler-name=x"], "--webhook-listen")]
#[case::lifetime(&["--certificate-lifetime", "365d"], "from 10s to 180d")]
#[case::election_without_a_pod(&["--leader-elect"], "--pod-name")]
#[case::neighbour_without_a_pod(&["--kube-scheduler-lease=k"], "--pod-name")]
#[case::two_leases(&["--leader-elect", "--kube-scheduler-lease=k", "--pod-name=p"], "cannot be used with")]
#[case::neighbour_without_a_lease(&["--kube-scheduler-lease=", "--pod-name=p"], "resourceName in the leaderElection")]
#[case::fence_without_a_lease(&["--fence-bindings"], "--leader-elect|--kube-scheduler-lease")]
#[case::lease_of_part_of_a_second(&["--leader-elect", "--pod-name", "p", "--lease-duration", "15500ms"], "whole seconds")]
#[case::lease_shorter_than_binds(&["--leader-elect", "--pod-name", "p", "--lease-duration", "3s"], "at least 4s")]
#[case::open_to_all(&["--listen=0.0.0.0:12345"], "--listen=0.0.0.0:12345: every client that reaches this address could bind pods. Set --tls-dir")]
#[case::open_to_all_of_ipv6(&["--listen=[::]:12345"], "or listen on 127.0.0.1")]
#[case::open_on_one_address(&["--listen=10.0.0.1:12345"], "--certificate-secret")]
#[case::plain_tokens(&["--read-listen=0.0.0.0:1", "--certificate-secret=s"], "tokens would be sent in plain text. Set --tls-dir")]
#[case::room_twice(&["--make-room=evict", "--misfit-nodes=resolvable"], "--make-room must be off with --misfit-nodes resolvable")]
#[case::room_reported_twice(&["--make-room=report", "--misfit-nodes=resolvable"], "--make-room must be off with --misfit-nodes resolvable")]
#[case::room_by_another_word(&["--make-room=on"], "possible values: off, report, evict")]
#[case::room_per_hour(&["--make-room-per-hour=-1"], "--make-room-per-hour")]
#[case::unknown(&["--memory-unit", "GiB"], "unexpected argument")]
fn invalid_flags_are_refused(#[case] flags: &[&str], #[case] expected: &str) {
    let error = parse(flags).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

/// Without flags the extender served the verb `bind` without TLS to every client that reached the machine.
#[rstest]
#[case::default(&[], false)]
#[case::loopback(&["--listen=127.1.2.3:1"], false)]
#[case::loopback_of_ipv6(&["--listen=[::1]:1"], false)]
#[case::mapped_loopback(&["--listen=[::ffff:127.0.0.1]:1"], false)]
#[case::client_certificates(&["--listen=0.0.0.0:1", "--tls-dir=a"], true)]
#[case::own_authority(&["--listen=0.0.0.0:1", "--certificate-secret=s"], true)]
#[case::secret_for_webhooks_alone(&["--certificate-secret=s"], false)]
#[case::loopback_with_certificates(&["--tls-dir=a"], true)]
fn views_need_authentication_on_addresses_other_than_loopback(
    #[case] flags: &[&str],
    #[case] guards_views: bool,
) {
    assert_eq!(parse(flags).unwrap().serving.demands_certificates(), guards_views);
}

#[test]
fn a_subcommand_needs_no_client_certificates() {
    parse(&["--listen=0.0.0.0:12345", "issue-client-certificate", "--out=x"]).unwrap();
}

#[test]
fn webhooks_use_the_secret_rather_than_the_files_of_the_extender() {
    let files = ["--webhook-listen", "0.0.0.0:9443", "--tls-dir", "a"];
    let admission = parse(&files).unwrap().admission;
    let tls = admission.webhooks.unwrap().tls.unwrap();
    assert_eq!(
        (tls.cert.to_str(), tls.client_ca),
        (Some("a/tls.crt"), None),
        "the API server's authority is not kube-scheduler's"
    );
    assert!(admission.certificates.is_none());
    let clients = [&files[..], &["--webhook-client-ca-file", "d"]].concat();
    let webhooks = parse(&clients).unwrap().admission.webhooks.unwrap();
    let authorities = [webhooks.client_ca, webhooks.tls.unwrap().client_ca];
    assert_eq!(
        authorities.map(|path| path.unwrap().display().to_string()),
        ["d", "d"]
    );
    let both = [&files[..], &["--certificate-secret", "s"]].concat();
    let config = parse(&both).unwrap();
    assert!(config.admission.webhooks.unwrap().tls.is_none());
    let certificates = config.admission.certificates.unwrap();
    assert_eq!(certificates.lifetime.as_secs(), 90 * 86_400);
    assert!(config.serving.tls.is_some());
}

#[test]
fn leader_election_is_off_unless_the_flag_is_set() {
    assert!(parse(&["--pod-name", "p"]).unwrap().leader.is_none());
    let leader = parse(&["--leader-elect", "--pod-name", "p"])
        .unwrap()
        .leader
        .unwrap();
    assert_eq!(leader.pod, "p");
    let times = [leader.times.lease, leader.times.renew, leader.times.retry];
    assert_eq!(times.map(|time| time.as_secs()), [15, 10, 2]);
    let beside = parse(&["--kube-scheduler-lease=k", "--pod-name=p", "--fence-bindings"])
        .unwrap()
        .leader
        .unwrap();
    let settings = (beside.kube_scheduler_lease.as_deref(), beside.fences_bindings);
    assert_eq!(settings, (Some("k"), true));
}

#[test]
fn no_room_is_made_unless_the_flag_says_so() {
    assert!(
        parse(&["--misfit-nodes=resolvable"])
            .unwrap()
            .scheduling
            .make_room
            .is_none()
    );
    let room = parse(&["--make-room=report"])
        .unwrap()
        .scheduling
        .make_room
        .unwrap();
    let times = [room.after, room.hold].map(|time| time.as_secs());
    assert_eq!((room.evicts, times, room.per_hour), (false, [10, 300], 60));
    assert_eq!(room.below, 1_000_000);
    let room = parse(&["--make-room=evict", "--make-room-below=-5"])
        .unwrap()
        .scheduling
        .make_room
        .unwrap();
    assert_eq!((room.evicts, room.below), (true, -5));
}

#[test]
fn the_subcommand_for_client_certificates_reads_its_flags() {
    let config = parse(&["issue-client-certificate", "--out", "d", "--namespace", "n"]).unwrap();
    let Some(super::Command::IssueClientCertificate {
        out,
        namespace,
        name,
        lifetime,
    }) = config.command
    else {
        panic!()
    };
    assert_eq!(
        (out.to_str(), name.as_str(), lifetime.as_secs()),
        (Some("d"), "kube-scheduler", 365 * 86_400)
    );
    assert_eq!(
        (namespace.as_deref(), config.admission.authority.as_str()),
        (Some("n"), "gpushare-scheduler-certificates")
    );
}

#[test]
fn the_help_text_is_current() {
    insta::assert_snapshot!(Args::command().term_width(100).render_long_help());
}

proptest! {
    /// Every value of a flag is accepted within its bounds or refused.
    #[test]
    fn no_value_panics(flag in 0..5_usize, value in "([a-z0-9.=/,_ {}-]{0,20}|\\PC{0,12}|-?[0-9]{1,22}(ms|s|m|h|Mi|Gi)?)") {
        let flags = ["memory-resource", "score-weights", "lease-duration", "hint-ttl", "log-level"];
        if let Ok(config) = parse(&[&format!("--{}={value}", flags[flag])]) {
            prop_assert!(config.scheduling.names.memory.contains('/'));
        }
    }
}
