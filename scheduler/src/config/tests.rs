//! Flags: defaults, what is refused and in which words, and the help text.

use clap::{CommandFactory, Parser};
use rstest::rstest;

use super::{Args, Config, PolicyName};

fn parse(flags: &[&str]) -> Result<Config, String> {
    let flags = ["gpushare-scheduler"].iter().chain(flags);
    let args = Args::try_parse_from(flags).map_err(|error| error.to_string())?;
    Config::try_from(args).map_err(|error| format!("{error:#}"))
}

#[test]
fn defaults_are_the_old_extenders_paths() {
    let config = parse(&[]).unwrap();
    assert_eq!(config.serving.prefix, "/gpushare-scheduler");
    assert_eq!(config.serving.listen.port(), 12345);
    assert_eq!(config.serving.max_body, 32 << 20);
    assert_eq!(config.scheduling.names.memory, "aliyun.com/gpu-mem");
    assert_eq!(config.scheduling.node_policy, PolicyName::Binpack);
    assert!(config.scheduling.bind_timeout.as_secs() < 5, "below kube-scheduler's own timeout");
}

#[rstest]
#[case::address(&["--listen", "12345"], "--listen")]
#[case::no_slash(&["--prefix", "gpushare"], "must be / or a path")]
#[case::pattern(&["--prefix", "/{node}"], "must be / or a path")]
#[case::double_slash(&["--prefix", "/a//b"], "must be / or a path")]
#[case::no_domain(&["--memory-resource", "gpu-mem"], "must be a resource name with a domain")]
#[case::policy(&["--node-policy", "binpak"], "possible values: binpack, spread")]
#[case::bare_number(&["--bind-timeout", "4"], "write a whole number and ms, s, m or h")]
#[case::negative(&["--bind-timeout=-4s"], "write a whole number and ms, s, m or h")]
#[case::zero(&["--bind-timeout", "0s"], "must be longer than 0s")]
#[case::endless(&["--hint-ttl", "99999999999999999h"], "at most 24h")]
#[case::tiny_body(&["--max-body", "10"], "must be from 1Ki to 1Gi")]
#[case::body_text(&["--max-body", "32MB"], "is not a quantity")]
#[case::no_concurrency(&["--concurrency", "0"], "must be from 1 to 65536")]
#[case::cert_without_key(&["--tls-cert-file", "a"], "--tls-key-file")]
#[case::client_ca_without_cert(&["--client-ca-file", "a"], "--tls-cert-file")]
#[case::level(&["--log-level", "inof"], "\"inof\" is none of off, error, warn, info, debug, trace")]
#[case::unknown(&["--memory-unit", "GiB"], "unexpected argument")]
fn refused(#[case] flags: &[&str], #[case] expected: &str) {
    let error = parse(flags).unwrap_err();
    assert!(error.contains(expected), "{error}");
}

#[rstest]
#[case::root("/", "")]
#[case::slash_at_end("/a/b/", "/a/b")]
fn prefixes(#[case] text: &str, #[case] expected: &str) {
    assert_eq!(parse(&["--prefix", text]).unwrap().serving.prefix, expected);
}

#[test]
fn help() {
    insta::assert_snapshot!(Args::command().term_width(100).render_long_help());
}
