//! Reachability of guests: each guest is a network namespace behind its tap, and every pair of guests and services is tried.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::io::{Read, Write};
use std::net::{
    IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6, TcpListener, TcpStream, UdpSocket,
};
use std::time::Duration;

use coracle_hypervisor::{Forward, Protocol};
use coracle_net::{Assignment, BridgeNetwork, CONNECTIONS_MAX, Endpoint, Network, Reach};
use coracle_testkit::eventually;
use coracle_testkit::netns::{self, Netns};
use coracle_testkit::tools;
use coracle_testkit::wire::{GuestHost, Station};
use coracle_types::{InstanceId, MacAddr, VmId};

/// Time after which a connection counts as dropped. An admitted one takes a millisecond.
const LIMIT: Duration = Duration::from_millis(700);

const GATEWAY: Ipv4Addr = Ipv4Addr::new(10, 100, 7, 1);
const NODE_PORT: u16 = 7000;
/// API server, outside of the node.
const API_SERVER: SocketAddrV4 = SocketAddrV4::new(Ipv4Addr::new(192, 0, 2, 9), 6443);
/// Number of connections that a guest tries to open.
const FLOWS: u16 = 20_000;
/// Port on which guests serve.
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
    serve_at(TcpListener::bind((at, port)).unwrap(), answer);
}

fn serve_at(listener: TcpListener, answer: &'static str) {
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let _client_gone = stream.and_then(|mut stream| stream.write_all(answer.as_bytes()));
        }
    });
}

fn ip(line: &str) {
    let status = std::process::Command::new("ip").args(line.split(' ')).status().unwrap();
    assert!(status.success(), "ip {line}");
}

/// Servers outside of the node, reached by the interface `out`.
fn outside() -> Netns {
    let outside = Netns::new().unwrap();
    let pid = outside.sync(|| {
        // Keeps the namespace open by a pid, which `ip` accepts.
        std::process::Command::new("sleep").arg("60").spawn().unwrap()
    });
    let mut holder = pid;
    ip(&format!("link add out type veth peer name in netns {}", holder.id()));
    ip("addr add 192.0.2.1/24 dev out");
    ip("link set out up");
    outside.sync(|| {
        ip("addr add 192.0.2.9/24 dev in");
        ip("link set in up");
        serve(*API_SERVER.ip(), API_SERVER.port(), "api-server");
        serve(*API_SERVER.ip(), PORT, "outside");
    });
    holder.kill().unwrap();
    holder.wait().unwrap();
    outside
}

/// Like [`ask`], for servers that answer even while other tests take the CPUs.
fn answer(at: SocketAddr) -> Option<String> {
    (0..10).find_map(|_| ask(at))
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
        let network = BridgeNetwork::open(dir.path(), Some("10.100.7.0/24".parse().unwrap())).await.unwrap();
        let network = network.with_api_server(vec![API_SERVER]);
        network.prepare(&[]).await.unwrap();
        let metadata: Ipv4Addr = [169, 254, 169, 254].into();
        let metadata_v6: Ipv6Addr = "fd00:ec2::254".parse().unwrap();
        let link_local: Ipv6Addr = "fe80::7".parse().unwrap();
        for line in [
            "addr add 169.254.169.254/32 dev lo".to_owned(),
            "-6 addr add fd00:ec2::254/128 dev lo nodad".to_owned(),
            format!("-6 addr add fd00:7::1/64 dev {} nodad", network.bridge()),
            format!("-6 addr add fe80::7/64 dev {} nodad", network.bridge()),
        ] {
            ip(&line);
        }
        serve(Ipv4Addr::UNSPECIFIED, NODE_PORT, "node");
        serve_at(TcpListener::bind((Ipv6Addr::UNSPECIFIED, NODE_PORT + 1)).unwrap(), "node");
        let outside = outside();
        let (none, all) = (Reach::default(), Reach { guests: true, node: true });
        let published = [forward(Ipv4Addr::UNSPECIFIED, 8080, Protocol::Tcp)];
        let mut guests = Vec::new();
        for (name, reach, ports) in [
            ("alone", none, &published[..]),
            ("other", none, &[]),
            ("open", Reach { guests: true, node: false }, &[]),
            ("pod", all, &[]),
        ] {
            let guest = Guest::start(&network, name, reach, ports).await;
            guest.host.run(|| {
                ip(&format!("-6 addr add fd00:7::{}/64 dev eth0 nodad", guest.address.octets()[3]));
                ip("-6 route add default via fd00:7::1");
            });
            guests.push(guest);
        }
        // Matrix of sources and destinations: the node's service, each guest directly, a port of the node that is forwarded to
        // a guest, addresses that are denied to all, and outside of the node the API server and another server. Tenants have no
        // policy of their own: guests of one and of two reach each other only by `guests`.
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
            reached.extend(from.reaches(metadata_v6, NODE_PORT + 1).map(|_| "metadata by IPv6".to_owned()));
            let scoped = SocketAddr::V6(SocketAddrV6::new(link_local, NODE_PORT + 1, 0, 2));
            reached.extend(from.host.run(|| ask(scoped)).map(|_| "link-local".to_owned()));
            reached.extend(from.reaches(*API_SERVER.ip(), API_SERVER.port()));
            reached.extend(from.reaches(*API_SERVER.ip(), PORT));
            seen.push(format!("{}: {}", from.name, reached.join(" ")));
        }
        assert_eq!(
            seen,
            ["alone: outside", "other: outside", "open: pod outside", "pod: open node api-server outside"]
        );
        // The node reaches every guest.
        for to in &guests {
            assert_eq!(ask((to.address, PORT).into()).as_deref(), Some(to.name));
        }
        ip("link del out");
        drop(outside);
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
        // The rules of a VM are removed when it has ended.
        web.host.end();
        network.detach(&web.instance).await.unwrap();
        assert_eq!(ask(at(GATEWAY, 8080)), None);
        let rules = std::process::Command::new("nft").args(["list", "ruleset"]).output().unwrap().stdout;
        assert!(!String::from_utf8_lossy(&rules).contains(&web.address.to_string()));
        end(network, vec![client]).await;
    });
}

#[test]
fn assigned_subnet_is_taken_when_the_last_vm_is_gone() {
    if tools::require(["nft", "busybox"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = BridgeNetwork::open(dir.path(), None).await.unwrap();
        network.prepare(&[]).await.unwrap();
        let assigned = "10.244.3.0/24".parse().unwrap();
        let old = Guest::start(&network, "old", Reach::default(), &[]).await;
        assert_eq!(network.assign(assigned).await.unwrap(), Assignment::Pending);
        assert_eq!(network.settle().await.unwrap(), None);
        assert_eq!(answer((old.address, PORT).into()).as_deref(), Some("old"), "it keeps its address");
        old.host.end();
        network.release(&VmId::of_name(&"old".parse().unwrap()));
        network.detach(&old.instance).await.unwrap();
        assert_eq!(network.settle().await.unwrap(), Some(assigned));
        let new = Guest::start(&network, "new", Reach::default(), &[]).await;
        assert_eq!(new.address, Ipv4Addr::new(10, 244, 3, 2));
        assert_eq!(answer((new.address, PORT).into()).as_deref(), Some("new"));
        let mut show = std::process::Command::new("busybox");
        let addresses = show.args(["ip", "-4", "addr", "show", network.bridge()]).output().unwrap().stdout;
        let addresses = String::from_utf8_lossy(&addresses).into_owned();
        assert_eq!(addresses.matches("inet ").count(), 1, "{addresses}");
        end(network, vec![new]).await;
    });
}

#[test]
fn guest_cannot_fill_the_table_of_connections() {
    if tools::require(["nft", "busybox"]).is_none() {
        return;
    }
    netns::run(|| async {
        let dir = tempfile::tempdir().unwrap();
        let network = open(dir.path()).await;
        serve(Ipv4Addr::UNSPECIFIED, NODE_PORT, "node");
        // Packets to the outside leave by an interface that leads nowhere; the kernel tracks their connections.
        for line in [
            "link add out type veth peer name nowhere",
            "link set nowhere up",
            "link set out up arp off",
            "addr add 192.0.2.1/24 dev out",
            "route add 198.51.100.0/24 dev out",
        ] {
            ip(line);
        }
        let reach = Reach { guests: false, node: true };
        let flood = Guest::start(&network, "flood", reach, &[]).await;
        let other = Guest::start(&network, "other", reach, &[]).await;
        let count = || {
            let text = std::fs::read_to_string("/proc/sys/net/netfilter/nf_conntrack_count").unwrap();
            text.trim().parse::<u32>().unwrap()
        };
        let flows = || {
            let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0)).unwrap();
            for flow in 0..FLOWS {
                let to =
                    SocketAddr::from(([198, 51, 100, u8::try_from(flow % 250).unwrap() + 1], 1 + flow / 2));
                while socket.send_to(b"flow", to).is_err() {
                    std::thread::yield_now();
                }
            }
        };
        // A busy host loses some packets.
        let full = async || {
            flood.host.run(flows);
            (count() >= CONNECTIONS_MAX - 200).then_some(())
        };
        eventually("it has all that it may have", full).await.unwrap();
        assert!(count() <= CONNECTIONS_MAX + 100, "{} connections", count());
        for (guest, why) in [(&flood, "ways are counted apart"), (&other, "guests are counted apart")] {
            eventually(why, async || guest.reaches(GATEWAY, NODE_PORT).filter(|answer| answer == "node"))
                .await
                .unwrap();
        }
        ip("link del out");
        end(network, vec![flood, other]).await;
    });
}
