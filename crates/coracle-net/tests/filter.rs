//! Packet filter in its own network namespace: a guest sends forged frames while the network is opened again and again.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::net::Ipv4Addr;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use coracle_net::{BridgeNetwork, Endpoint, GuestNic, NetError, Network, Reach};
use coracle_testkit::wire::{self, Frame, Sniffer, Station, Tap};
use coracle_testkit::{netns, tools};
use coracle_types::{MacAddr, VmId};

/// Number of daemon starts while the guest sends.
const RESTARTS: usize = 20;

fn guest(name: &str, address: [u8; 4]) -> GuestNic {
    let vm = VmId::of_name(&name.parse().unwrap());
    GuestNic {
        mac: MacAddr::of(&vm),
        instance: vm.into(),
        address: Ipv4Addr::from(address),
        reach: Reach { guests: true, node: false },
        ports: vec![],
    }
}

fn attacker() -> GuestNic {
    guest("attacker", [10, 100, 7, 2])
}

fn neighbour() -> GuestNic {
    guest("neighbour", [10, 100, 7, 3])
}

fn station(guest: &GuestNic) -> Station {
    let text = guest.mac.to_string();
    let bytes: Vec<u8> = text.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    Station { mac: bytes.try_into().unwrap(), address: guest.address }
}

async fn open(state: &Path) -> BridgeNetwork {
    BridgeNetwork::open(state, Some("10.100.7.0/24".parse().unwrap())).await.unwrap()
}

async fn attach(network: &BridgeNetwork, guest: &GuestNic) -> Result<(), NetError> {
    let vm: VmId = guest.instance.as_str().parse().unwrap();
    let lease = network.lease(&vm, Some(guest.address))?;
    let endpoint = Endpoint { mac: guest.mac, lease, reach: guest.reach, ports: guest.ports.clone() };
    network.attach(&guest.instance, &endpoint).await.map(drop)
}

/// Guest that sends all its frames repeatedly.
struct Flood {
    stop: Arc<AtomicBool>,
    rounds: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Flood {
    fn start(tap: Tap, frames: Vec<Frame>) -> Self {
        let (stop, rounds) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (stop.clone(), rounds.clone());
        let thread = std::thread::spawn(move || {
            while !stopped.load(Ordering::Relaxed) {
                for frame in &frames {
                    tap.send(frame);
                }
                counted.fetch_add(1, Ordering::Relaxed);
            }
        });
        Self { stop, rounds, thread }
    }

    /// Waits until at least one whole round was sent from now on.
    fn next_round(&self) {
        let (before, end) = (self.rounds.load(Ordering::Relaxed), Instant::now() + Duration::from_secs(10));
        while self.rounds.load(Ordering::Relaxed) < before + 2 {
            assert!(Instant::now() < end, "the guest sends");
            std::thread::yield_now();
        }
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
    }
}

#[test]
fn forged_frames_do_not_pass_while_the_node_restarts() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let (attacker, neighbour) = (attacker(), neighbour());
        let guests = [attacker.clone(), neighbour.clone()];
        let network = open(dir.path()).await;
        network.prepare(&[]).await.unwrap();
        for guest in &guests {
            attach(&network, guest).await.unwrap();
        }
        let seen_by_neighbour = Sniffer::of_tap(Tap::open(&neighbour.instance.tap_name()));
        let seen_by_host = Sniffer::of_interface(network.bridge());
        let mut frames = Frame::forged(station(&attacker), station(&neighbour));
        frames.push(Frame::honest(station(&attacker)));
        let flood = Flood::start(Tap::open(&attacker.instance.tap_name()), frames);
        seen_by_neighbour.wait_for("honest");
        seen_by_host.wait_for("honest");
        let mut last = network;
        for _ in 0..RESTARTS {
            drop(last);
            // A second daemon that finds the state locked opens the network and stops there.
            drop(open(dir.path()).await);
            last = open(dir.path()).await;
            last.prepare(&guests).await.unwrap();
            flood.next_round();
            for guest in &guests {
                attach(&last, guest).await.unwrap();
            }
            flood.next_round();
        }
        flood.end();
        for (who, seen) in [("neighbour", seen_by_neighbour.end()), ("host", seen_by_host.end())] {
            assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["honest"], "{who}");
        }
        last.teardown().await.unwrap();
    });
}

#[test]
fn tap_in_no_chain_passes_nothing() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let (attacker, neighbour) = (attacker(), neighbour());
        let network = open(dir.path()).await;
        network.prepare(&[]).await.unwrap();
        for guest in [&attacker, &neighbour] {
            attach(&network, guest).await.unwrap();
        }
        let flood =
            Flood::start(Tap::open(&attacker.instance.tap_name()), vec![Frame::honest(station(&attacker))]);
        let before = Sniffer::of_interface(network.bridge());
        before.wait_for("honest");
        // The tap of the attacker stays up, but no record refers to it.
        network.prepare(std::slice::from_ref(&neighbour)).await.unwrap();
        flood.next_round();
        let after = Sniffer::of_interface(network.bridge());
        flood.next_round();
        flood.end();
        let _seen = before.end();
        assert!(after.end().is_empty());
        network.teardown().await.unwrap();
    });
}

#[test]
fn failed_attachment_takes_the_tap_down() {
    if tools::require(["nft"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let attacker = attacker();
        let network = open(dir.path()).await;
        network.prepare(&[]).await.unwrap();
        attach(&network, &attacker).await.unwrap();
        let tap = attacker.instance.tap_name();
        assert!(wire::is_up(&tap));
        // Without its tables the filter of a guest cannot be made.
        let flushed = std::process::Command::new("nft").args(["flush", "ruleset"]).status().unwrap();
        assert!(flushed.success());
        attach(&network, &attacker).await.unwrap_err();
        assert!(!wire::is_up(&tap));
        network.teardown().await.unwrap();
    });
}

#[test]
fn opening_a_network_changes_nothing() {
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = open(dir.path()).await;
        assert!(!Path::new("/sys/class/net").join(network.bridge()).exists());
        assert!(std::fs::read_dir(dir.path()).unwrap().next().is_none(), "no file is written");
    });
}
