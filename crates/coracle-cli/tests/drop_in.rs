//! Tests of the command lines of replaced tools, under their names.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser as _;
use coracle_cli::cli::{AgentForgeArgs, Cli, Command, drop_in};

fn agent_forge(args: &[&str]) -> AgentForgeArgs {
    let mut all: Vec<OsString> = ["/usr/bin/agent-forge-operator"].map(OsString::from).to_vec();
    all.extend(args.iter().map(OsString::from));
    drop_in(&mut all);
    let cli = Cli::try_parse_from(all).unwrap();
    let Command::AgentForge(args) = cli.command else { panic!("the operator's own name") };
    *args
}

#[test]
fn agent_forge_keeps_the_original_defaults() {
    let args = agent_forge(&[]);
    assert_eq!(args.metrics_bind_address, "0");
    assert_eq!(args.health_probe_bind_address, ":8081");
    assert!(!args.leader_elect && args.metrics_secure && !args.ignored.enable_http2);
    assert_eq!((args.metrics_cert_name.as_str(), args.metrics_cert_key.as_str()), ("tls.crt", "tls.key"));
    assert_eq!((args.metrics_cert_path.as_str(), args.kubeconfig), ("", None));
}

#[test]
fn agent_forge_parses_go_flag_syntax() {
    for (args, address, elect, secure) in [
        (&["--metrics-bind-address=:8443", "--leader-elect"][..], ":8443", true, true),
        (&["-metrics-bind-address", ":8443", "-leader-elect=true"], ":8443", true, true),
        (&["--metrics-bind-address", "0", "--metrics-secure=false"], "0", false, false),
        (&["-metrics-bind-address=0", "-metrics-secure=F", "--leader-elect=1"], "0", true, false),
        (
            &["--zap-devel", "--zap-encoder=json", "-zap-log-level", "debug", "--enable-http2=t"],
            "0",
            false,
            true,
        ),
        (&["--webhook-cert-path=/x", "--zap-time-encoding=epoch"], "0", false, true),
    ] {
        let got = agent_forge(args);
        assert_eq!(
            (got.metrics_bind_address.as_str(), got.leader_elect, got.metrics_secure),
            (address, elect, secure),
            "{args:?}"
        );
    }
}

fn cocoon(args: &[&str]) -> Command {
    let mut all: Vec<_> = args.iter().map(OsString::from).collect();
    drop_in(&mut all);
    Cli::try_parse_from(all).unwrap().command
}

#[test]
fn cocoon_keeps_the_original_defaults() {
    let Command::CocoonOperator(args) = cocoon(&["/usr/bin/cocoon-operator"]) else { panic!("operator") };
    assert_eq!(
        (args.metrics_bind_address.as_str(), args.health_probe_bind_address.as_str()),
        (":8080", ":8081")
    );
    assert!(args.leader_elect);
    assert_eq!(args.epoch_url, "http://epoch.cocoon-system.svc:8080");
    let Command::CocoonWebhook(args) = cocoon(&["cocoon-webhook"]) else { panic!("webhook") };
    assert_eq!((args.listen.as_str(), args.metrics.as_str()), (":8443", ":9090"));
    assert_eq!((args.reaper_interval.as_secs(), args.reaper_grace.as_secs()), (300, 1800));
    assert_eq!(args.tls_cert, PathBuf::from("/etc/cocoon/webhook/certs/tls.crt"));
}

#[test]
fn cocoon_parses_go_flag_syntax() {
    let args = ["cocoon-operator", "-leader-elect=F", "-metrics-bind-address", "0"];
    let Command::CocoonOperator(args) = cocoon(&args) else { panic!("operator") };
    assert_eq!((args.leader_elect, args.metrics_bind_address.as_str()), (false, "0"));
}
