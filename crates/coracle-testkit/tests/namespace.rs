//! The namespace is private, has a loopback, and a leak in it fails the test.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]
#![cfg(feature = "netns")]

use std::{collections::BTreeSet, panic, process::Command};

use coracle_testkit::{leaks, netns};

#[test]
fn namespace_has_loopback_and_children() {
    netns::run(|| async {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let address = listener.local_addr()?;
        tokio::try_join!(listener.accept(), tokio::net::TcpStream::connect(address))?;
        let seen = tokio::process::Command::new("ls").arg("/sys/class/net").output().await?;
        assert_eq!(String::from_utf8_lossy(&seen.stdout).trim(), "lo", "sysfs shows this namespace");
        assert_eq!(leaks::interfaces(), BTreeSet::from(["lo".to_owned()]));
        netns::ensure_inside()?;
        assert!(
            std::path::Path::new("/sys/fs/cgroup").read_dir()?.next().is_some(),
            "cgroups are still there"
        );
        anyhow::Ok(())
    });
}

#[test]
fn leaked_process_fails_the_test() {
    let leak = || netns::run(|| async { Command::new("sleep").arg("600").spawn().map(drop) });
    let text = *panic::catch_unwind(leak).unwrap_err().downcast::<String>().unwrap();
    assert!(text.contains("sleep 600"), "{text}");
}
