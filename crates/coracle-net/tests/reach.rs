//! What guests reach: each is a network namespace behind its tap, and every pair of guests and services is tried.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::io::{Read, Write};
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::time::Duration;

use coracle_hypervisor::{Forward, Protocol};
use coracle_net::{BridgeNetwork, Endpoint, Network, Reach};
use coracle_testkit::wire::{GuestHost, Station};
use coracle_testkit::{netns, tools};
use coracle_types::{InstanceId, MacAddr, VmId};

/// Refused packets are dropped: a connection is not answered within this time. One that is admitted takes a millisecond.
const LIMIT: Duration = Duration::from_millis(700);

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 100, 7, 1);
const NODE_PORT: u16 = 7000;
/// Of guests.
const PORT: u16 = 80;

struct Guest {
    name: &'static str,
    address: Ipv4Addr,
    instance: InstanceId,
    host: GuestHost,
}

impl Guest {
    async fn start(network: &BridgeNetwork, name: &'static str, reach: Reach, ports: &[Forward]) -> Self {
        let vm = VmId::of_name(&name.parse().unwrap());
        let lease = network.lease(&vm, None).unwrap();
        network.claim_ports(&vm, ports).unwrap();
        let (mac, instance) = (MacAddr::of(&vm), InstanceId::from(vm));
        network.attach(&instance, &Endpoint { mac, lease, reach, ports: ports.to_vec() }).await.unwrap();
        let bytes: Vec<u8> =
            mac.to_string().split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
        let address = lease.unwrap().address;
        let host =
            GuestHost::start(&instance.tap_name(), Station { mac: bytes.try_into().unwrap(), address });
        host.run(|| serve(Ipv4Addr::UNSPECIFIED, PORT, name));
        Self { name, address, instance, host }
    }

    fn reaches(&self, to: impl Into<IpAddr> + Send, port: u16) -> Option<String> {
        let at = SocketAddr::new(to.into(), port);
        self.host.run(|| ask(at))
    }
}

/// Answers every connection with `answer`, until the namespace ends.
fn serve(at: Ipv4Addr, port: u16, answer: &'static str) {
    let listener = TcpListener::bind((at, port)).unwrap();
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _client_gone = stream.and_then(|mut stream| stream.write_all(answer.as_bytes()));
        }
    });
}

fn ask(at: SocketAddr) -> Option<String> {
    let mut stream = TcpStream::connect_timeout(&at, LIMIT).ok()?;
    let mut answer = String::new();
    stream.set_read_timeout(Some(LIMIT)).ok()?;
    stream.read_to_string(&mut answer).ok()?;
    Some(answer)
}

fn forward(host_address: Ipv4Addr, host_port: u16, protocol: Protocol) -> Forward {
    Forward { protocol, host_address, host_port, guest_port: PORT }
}

async fn open(dir: &std::path::Path) -> BridgeNetwork {
    let network = BridgeNetwork::open(dir, Some("10.100.7.0/24".parse().unwrap())).await.unwrap();
    network.prepare(&[]).await.unwrap();
    network
}

async fn end(network: BridgeNetwork, guests: Vec<Guest>) {
    for guest in guests {
        guest.host.end();
        network.detach(&guest.instance).await.unwrap();
    }
    network.teardown().await.unwrap();
}

#[test]
fn guests_reach_only_what_their_policy_names() {
    if tools::require(["nft", "busybox"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = open(dir.path()).await;
        let metadata: Ipv4Addr = [169, 254, 169, 254].into();
        let status = std::process::Command::new("busybox")
            .args(["ip", "addr", "add", "169.254.169.254/32", "dev", "lo"])
            .status();
        assert!(status.unwrap().success());
        serve(Ipv4Addr::UNSPECIFIED, NODE_PORT, "node");
        let (none, all) = (Reach::default(), Reach { guests: true, node: true });
        let published = [forward(Ipv4Addr::UNSPECIFIED, 8080, Protocol::Tcp)];
        let mut guests = Vec::new();
        for (name, reach, ports) in [
            ("alone", none, &published[..]),
            ("other", none, &[]),
            ("open", Reach { guests: true, node: false }, &[]),
            ("pod", all, &[]),
        ] {
            guests.push(Guest::start(&network, name, reach, ports).await);
        }
        // Who reaches whom: the node's service, each guest directly, and a port of the node that leads to a guest.
        let mut seen = Vec::new();
        for from in &guests {
            let mut reached: Vec<_> = guests
                .iter()
                .filter(|to| to.name != from.name && from.reaches(to.address, PORT).is_some())
                .map(|to| to.name.to_owned())
                .collect();
            reached.extend(from.reaches(GATEWAY, NODE_PORT));
            reached.extend(from.reaches(GATEWAY, 8080).map(|name| format!("port of {name}")));
            reached.extend(from.reaches(metadata, NODE_PORT).map(|_| "metadata".to_owned()));
            reached.extend(from.reaches([127, 0, 0, 2], NODE_PORT).map(|_| "loopback".to_owned()));
            seen.push(format!("{}: {}", from.name, reached.join(" ")));
        }
        assert_eq!(seen, ["alone: ", "other: ", "open: pod", "pod: open node"]);
        // The node reaches every guest.
        for to in &guests {
            assert_eq!(ask((to.address, PORT).into()).as_deref(), Some(to.name));
        }
        end(network, guests).await;
    });
}

#[test]
fn ports_of_the_node_lead_to_their_guest() {
    if tools::require(["nft", "busybox"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = open(dir.path()).await;
        let ports = [
            forward(Ipv4Addr::UNSPECIFIED, 8080, Protocol::Tcp),
            forward(Ipv4Addr::LOCALHOST, 8081, Protocol::Tcp),
            forward(Ipv4Addr::UNSPECIFIED, 5353, Protocol::Udp),
        ];
        let reach = Reach { guests: true, node: false };
        let web = Guest::start(&network, "web", reach, &ports).await;
        let client = Guest::start(&network, "client", reach, &[]).await;
        let at = |address: Ipv4Addr, port: u16| SocketAddr::from((address, port));
        assert_eq!(ask(at(Ipv4Addr::LOCALHOST, 8080)).as_deref(), Some("web"), "from the node's loopback");
        assert_eq!(ask(at(GATEWAY, 8080)).as_deref(), Some("web"), "by another address of the node");
        assert_eq!(client.reaches(GATEWAY, 8080).as_deref(), Some("web"), "from another guest");
        assert_eq!(web.reaches(GATEWAY, 8080).as_deref(), Some("web"), "from the guest itself");
        assert_eq!(ask(at(Ipv4Addr::LOCALHOST, 8081)).as_deref(), Some("web"));
        assert_eq!(ask(at(GATEWAY, 8081)), None, "a port of one address is one of that address only");
        web.host.run(|| {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, PORT)).unwrap();
            std::thread::spawn(move || {
                let mut datagram = [0; 64];
                while let Ok((length, from)) = socket.recv_from(&mut datagram) {
                    let _client_gone = socket.send_to(&datagram[..length], from);
                }
            });
        });
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        socket.send_to(b"hello", (Ipv4Addr::LOCALHOST, 5353)).unwrap();
        assert_eq!(socket.recv(&mut [0; 64]).unwrap(), 5);
        // A VM that has ended leaves no rule.
        web.host.end();
        network.detach(&web.instance).await.unwrap();
        assert_eq!(ask(at(GATEWAY, 8080)), None);
        let rules = std::process::Command::new("nft").args(["list", "ruleset"]).output().unwrap().stdout;
        assert!(!String::from_utf8_lossy(&rules).contains(&web.address.to_string()));
        end(network, vec![client]).await;
    });
}
