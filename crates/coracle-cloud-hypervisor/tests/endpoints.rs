//! API as the driver knows it: rows for each call of Cloud Hypervisor's description, with accepted requests and the status of
//! refused ones (those of version 53). The tables run on the stand-in. Those before a VM is created need no guest, and also run
//! on the real program if `CORACLE_CLOUD_HYPERVISOR_BIN` names one.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::path::Path;
use std::process::{Child, Command, Stdio};

use coracle_hypervisor::{ApiError, ApiSocket};
use coracle_hypervisor_testing::example;
use coracle_testkit::{eventually, tools};
use hyper::Method;
use serde_json::{Value, json};

struct Vmm {
    child: Child,
    api: ApiSocket,
    dir: tempfile::TempDir,
}

impl Drop for Vmm {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Vmm {
    async fn start(program: &Path) -> Self {
        let dir = tempfile::tempdir().unwrap();
        for name in ["disk", "kernel"] {
            std::fs::write(dir.path().join(name), [0; 4096]).unwrap();
        }
        std::fs::create_dir(dir.path().join("saved")).unwrap();
        let socket = dir.path().join("api.sock");
        let mut command = Command::new(program);
        command.arg("--api-socket").arg(format!("path={}", socket.display())).current_dir(dir.path());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let said = |body: &Value| Some(body.as_array()?.iter().filter_map(Value::as_str).collect());
        let api = ApiSocket::at(&socket, said);
        let vmm = Self { child, api, dir };
        let answers = async || vmm.api.call(Method::GET, "/api/v1/vmm.ping", None).await.ok();
        eventually("the API answers", answers).await.unwrap();
        vmm
    }

    fn url(&self, name: &str) -> String {
        format!("file://{}", self.dir.path().join(name).display())
    }

    /// Checks each row: method, call, body, and expected status: 204 without and 200 with a response body.
    async fn check_rows(&self, rows: &[(&str, &str, Value, u16)]) {
        for (method, call, body, want) in rows {
            let path = format!("/api/v1/{call}");
            let body = Some(body).filter(|body| !body.is_null());
            let got = match self.api.call(method.parse().unwrap(), &path, body).await {
                Ok(None) => 204,
                Ok(Some(_)) => 200,
                Err(ApiError::Refused { status, message, .. }) => {
                    assert!(!message.is_empty(), "{call} says why");
                    status.as_u16()
                }
                Err(error) => panic!("{method} {call}: {error}"),
            };
            assert_eq!(got, *want, "{method} {call} {body:?}");
        }
    }
}

fn rows_before_start() -> Vec<(&'static str, &'static str, Value, u16)> {
    let none = || Value::Null;
    vec![
        ("GET", "vmm.ping", none(), 200),
        ("GET", "vm.info", none(), 404),
        // Depends on the version: 500 since a build of August 2026.
        ("GET", "vm.counters", none(), 500),
        ("PUT", "vm.boot", none(), 404),
        ("PUT", "vm.boot", json!({}), 400),
        ("PUT", "vm.pause", none(), 404),
        ("PUT", "vm.resume", none(), 404),
        ("PUT", "vm.shutdown", none(), 404),
        ("PUT", "vm.delete", none(), 404),
        ("PUT", "vm.create", json!({"cpus": {"boot_vcpus": 1, "max_vcpus": 1}}), 400),
        ("PUT", "vm.create", json!({"payload": {"kernel": "kernel"}, "colour": "red"}), 400),
        ("GET", "vm.nowhere", none(), 404),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_before_vm_create_table() {
    Vmm::start(&example("fake-cloud-hypervisor")).await.check_rows(&rows_before_start()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_before_vm_create_table_on_cloud_hypervisor() {
    match std::env::var_os("CORACLE_CLOUD_HYPERVISOR_BIN") {
        Some(program) => Vmm::start(Path::new(&program)).await.check_rows(&rows_before_start()).await,
        None => tools::not_to_be_had("Cloud Hypervisor: CORACLE_CLOUD_HYPERVISOR_BIN names none"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_in_each_vm_state_table() {
    let vmm = Vmm::start(&example("fake-cloud-hypervisor")).await;
    let none = || Value::Null;
    let disk = |id: &str, path: &str| json!({"id": id, "path": path, "readonly": true, "image_type": "Raw", "serial": id});
    let config = json!({
        "payload": {"kernel": "kernel"}, "memory": {"size": 128 << 20}, "disks": [disk("slot0", "disk")],
        "vsock": {"id": "vsock", "cid": 3, "socket": "guest.sock"},
    });
    let (saved, absent) = (vmm.url("saved"), vmm.url("absent"));
    vmm.check_rows(&[
        ("PUT", "vm.create", config.clone(), 204),
        ("PUT", "vm.create", config.clone(), 500),
        ("GET", "vm.info", none(), 200),
        ("GET", "vm.counters", none(), 200),
        // Before the start a device is only added to the configuration.
        ("PUT", "vm.add-disk", disk("slot1", "disk"), 204),
        ("PUT", "vm.shutdown", none(), 500),
        ("PUT", "vm.pause", none(), 500),
        ("PUT", "vm.boot", none(), 204),
        ("PUT", "vm.boot", none(), 500),
        ("PUT", "vm.resume", none(), 500),
        ("PUT", "vm.power-button", none(), 204),
        ("PUT", "vm.nmi", none(), 204),
        ("PUT", "vm.reboot", none(), 204),
        ("PUT", "vm.resize", json!({"desired_vcpus": 2, "desired_ram": 256 << 20}), 204),
        ("PUT", "vm.resize", json!({"vcpus": 2}), 400),
        ("PUT", "vm.resize-disk", json!({"id": "slot0", "desired_size": 1 << 20}), 204),
        ("PUT", "vm.resize-zone", json!({"id": "zone0", "desired_ram": 1 << 20}), 204),
        ("PUT", "vm.add-disk", disk("slot2", "disk"), 200),
        ("PUT", "vm.add-disk", disk("slot2", "disk"), 409),
        ("PUT", "vm.add-disk", disk("slot3", "absent"), 500),
        ("PUT", "vm.add-net", json!({"id": "eth0", "tap": "tap0"}), 200),
        ("PUT", "vm.add-fs", json!({"id": "fs0", "tag": "x", "socket": "x.sock"}), 200),
        ("PUT", "vm.add-pmem", json!({"id": "pmem0", "file": "disk"}), 200),
        ("PUT", "vm.add-device", json!({"id": "vfio0", "path": "/sys/x"}), 200),
        ("PUT", "vm.add-user-device", json!({"id": "user0", "socket": "u.sock"}), 200),
        ("PUT", "vm.add-vdpa", json!({"id": "vdpa0", "path": "/dev/vhost-vdpa-0"}), 200),
        ("PUT", "vm.add-vsock", json!({"id": "vsock", "cid": 3, "socket": "v.sock"}), 200),
        ("PUT", "vm.remove-device", json!({"id": "slot2"}), 204),
        ("PUT", "vm.remove-device", json!({"id": "slot2"}), 404),
        ("PUT", "vm.remove-device", json!({}), 400),
        ("PUT", "vm.coredump", json!({"destination_url": saved}), 204),
        ("PUT", "vm.send-migration", json!({"destination_url": "unix:/x", "local": true}), 204),
        ("PUT", "vm.receive-migration", json!({"receiver_url": "unix:/x"}), 500),
        ("PUT", "vm.snapshot", json!({"destination_url": saved}), 500),
        ("PUT", "vm.pause", none(), 204),
        ("PUT", "vm.pause", none(), 500),
        ("PUT", "vm.snapshot", json!({"destination_url": absent}), 500),
        ("PUT", "vm.snapshot", json!({"destination_url": saved}), 204),
        ("PUT", "vm.restore", json!({"source_url": saved}), 500),
        ("PUT", "vm.resume", none(), 204),
        ("PUT", "vm.shutdown", none(), 204),
        ("PUT", "vm.shutdown", none(), 500),
        ("PUT", "vm.delete", none(), 204),
        ("GET", "vm.info", none(), 404),
        ("PUT", "vm.restore", json!({"source_url": absent}), 500),
        ("PUT", "vm.restore", json!({"source_url": saved, "colour": "red"}), 400),
    ])
    .await;
    for name in ["config.json", "state.json", "memory-ranges"] {
        assert!(vmm.dir.path().join("saved").join(name).is_file(), "{name}");
    }
}
