//! A real guest sends forged frames while its node daemon is killed with SIGKILL and restarted.

use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

use coracle_proto::host as pb;
use coracle_testkit::wire::{Frame, Sniffer, Station};
use coracle_testkit::{netns, tools};
use pb::host_client::HostClient;
use tokio::process::Command;
use tonic::transport::Channel;

use super::{connect, number, start_node, vmms};
use crate::support::{CORACLE, coracle_ok, node_tools};

/// Perl script that sends the frames of its arguments, in hexadecimal, repeatedly (packet(7)).
const FLOOD: &str = r#"
open my $f, '<', '/sys/class/net/eth0/ifindex' or die; my $index = <$f>;
my @frames = map { pack 'H*', $_ } @ARGV;
socket my $s, 17, 3, 0 or die $!;
my $to = pack 'S n i S C C a8', 17, 0x0800, $index, 0, 0, 6, "\xff" x 6;
while (1) { send $s, $_, 0, $to for @frames; select undef, undef, undef, 0.005 }
"#;

#[test]
fn forged_frames_never_pass_while_the_daemon_is_killed() {
    netns::run_within(Duration::from_secs(1800), || async {
        if node_tools().is_none() {
            return;
        }
        let layout = tools::tools_dir().join("web/current");
        if !layout.join("index.json").is_file() {
            return tools::skip("no Debian image; `cargo xtask setup` makes it");
        }
        let dir = tempfile::tempdir().unwrap();
        let state = dir.path().join("state");
        std::fs::create_dir(&state).unwrap();
        let mut node = start_node(&state);
        let mut client = connect(&state).await;
        let run = std::fs::read_link(state.join("host.sock")).unwrap().parent().unwrap().to_owned();
        coracle_ok(&state, &["image", "import", &format!("oci:{}:1", layout.display()), "localhost/web:1"])
            .await;
        for name in ["attacker", "neighbour"] {
            coracle_ok(&state, &["run", "--detach", "--name", name, "localhost/web:1"]).await;
        }
        let (attacker, own_tap) = station(&state, &mut client, "attacker").await;
        let (neighbour, tap) = station(&state, &mut client, "neighbour").await;
        let sent = Sniffer::of_interface(&own_tap);
        let at_neighbour = Sniffer::of_interface(&tap);
        let at_host = Sniffer::of_interface(&bridge_of(&tap));
        let mut frames = Frame::forged(attacker, neighbour);
        frames.push(Frame::honest(attacker));
        flood(&state, &frames).await;
        at_neighbour.wait_for("honest");
        at_host.wait_for("honest");
        let before = vmms(&state, &run);
        for _ in 0..number("CORACLE_CRASHES", 5) {
            node.kill().await.unwrap(); // SIGKILL, and waits
            node = start_node(&state);
            client = connect(&state).await;
            fails_to_start(&state).await;
        }
        assert_eq!(vmms(&state, &run), before, "the guests run on");
        // The guest still sends, and the network still passes permitted frames.
        let still = Sniffer::of_interface(&tap);
        still.wait_for("honest");
        assert!(still.end().contains("honest"));
        assert_eq!(sent.end().len(), frames.len(), "the guest sends every kind");
        for (place, seen) in [("neighbour", at_neighbour.end()), ("host", at_host.end())] {
            assert_eq!(seen.into_iter().collect::<Vec<_>>(), ["honest"], "{place}");
        }
        for vm in ["attacker", "neighbour"] {
            client
                .delete_vm(pb::DeleteVmRequest { vm: vm.into(), force: true, ..Default::default() })
                .await
                .unwrap();
        }
        super::leaves_nothing(node, &state, &run).await;
    });
}

/// Returns the addresses of a VM, and the name of its tap.
async fn station(state: &Path, client: &mut HostClient<Channel>, name: &str) -> (Station, String) {
    let request = pb::GetVmRequest { vm: name.into(), exact: true, ..Default::default() };
    let vm = client.get_vm(request).await.unwrap().into_inner();
    let mac: Vec<u8> = vm.mac.split(':').map(|byte| u8::from_str_radix(byte, 16).unwrap()).collect();
    let station = Station { mac: mac.try_into().unwrap(), address: vm.ip_address.parse().unwrap() };
    let record = std::fs::read(state.join("vms").join(&vm.id).join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let instance: coracle_types::InstanceId = record["instance"].as_str().unwrap().parse().unwrap();
    (station, instance.tap_name())
}

/// Returns the bridge of a tap.
fn bridge_of(tap: &str) -> String {
    let link = std::fs::read_link(format!("/sys/class/net/{tap}/master")).unwrap();
    link.file_name().unwrap().to_string_lossy().into_owned()
}

/// Starts a process in the attacker's guest that sends the frames until it ends.
async fn flood(state: &Path, frames: &[Frame]) {
    let mut script = format!("cat > /tmp/flood.pl <<'EOF'\n{FLOOD}EOF\nsetsid perl /tmp/flood.pl");
    for frame in frames {
        script.push(' ');
        frame.bytes().iter().for_each(|byte| write!(script, "{byte:02x}").unwrap());
    }
    script.push_str(" </dev/null >/dev/null 2>&1 &");
    coracle_ok(state, &["exec", "attacker", "sh", "-c", &script]).await;
}

/// Checks that a second daemon on the same state ends with an error, and changes nothing.
async fn fails_to_start(state: &Path) {
    let mut second = Command::new(CORACLE);
    second.args(["node", "--accelerator", "tcg", "--state"]).arg(state).kill_on_drop(true);
    let output = second.output().await.unwrap();
    assert!(!output.status.success(), "two daemons have one state");
}
