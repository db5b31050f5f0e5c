//! API as the driver knows it: rows for each endpoint of Firecracker's description, with accepted and refused requests in each
//! phase. The tables run on the stand-in. Those before the start need no guest, and also run on the real program if
//! `CORACLE_FIRECRACKER_BIN` names one. For a refusal, the status and the key of the body are asserted; the message is the
//! program's own.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use std::path::Path;
use std::process::{Child, Command, Stdio};

use coracle_hypervisor::{ApiError, ApiSocket};
use coracle_hypervisor_testing::example;
use coracle_testkit::{eventually, tools};
use hyper::{Method, StatusCode};
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
        std::fs::write(dir.path().join("disk"), [0; 4096]).unwrap();
        std::fs::write(dir.path().join("kernel"), "no kernel").unwrap();
        let socket = dir.path().join("api.sock");
        let mut command = Command::new(program);
        command
            .arg("--api-sock")
            .arg(&socket)
            .args(["--id", "table", "--enable-pci"])
            .current_dir(dir.path());
        let child = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let api = ApiSocket::at(&socket, fault);
        let vmm = Self { child, api, dir };
        let answers = async || vmm.api.call(Method::GET, "/", None).await.ok();
        eventually("the API answers", answers).await.unwrap();
        vmm
    }

    /// Makes one call: `204`, `200 {…}` or `400` with the message.
    async fn call(&self, method: &str, path: &str, body: &Value) -> Result<Option<Value>, String> {
        let body = Some(body).filter(|body| !body.is_null());
        match self.api.call(method.parse().unwrap(), path, body).await {
            Ok(answer) => Ok(answer),
            Err(ApiError::Refused { status: StatusCode::BAD_REQUEST, message, .. }) => Err(message),
            Err(error) => panic!("{method} {path}: {error}"),
        }
    }

    async fn check_rows(&self, rows: &[Row]) {
        for (method, path, body, want) in rows {
            let got = self.call(method, path, body).await;
            match (&got, want) {
                (Ok(_), Want::Done) => {}
                (Ok(Some(value)), Want::Has(pointer)) if value.pointer(pointer).is_some() => {}
                (Err(why), Want::Refused(word)) if why.contains(word) => {}
                _ => panic!("{method} {path} {body}: {got:?}, wanted {want:?}"),
            }
        }
    }
}

fn fault(body: &Value) -> Option<String> {
    Some(body.get("fault_message")?.as_str()?.to_owned())
}

#[derive(Debug)]
enum Want {
    /// Status 204.
    Done,
    /// Status 200 with a body that contains this text.
    Has(&'static str),
    /// Status 400 with a message that contains this text.
    Refused(&'static str),
}

type Row = (&'static str, &'static str, Value, Want);

/// Rows before the start: their order does not matter unless a row says so.
fn rows_before_start() -> Vec<Row> {
    use Want::{Done, Has, Refused};
    let limiter = json!({"bandwidth": {"size": 1000, "refill_time": 100, "one_time_burst": 10}, "ops": {"size": 1, "refill_time": 1}});
    vec![
        ("GET", "/", Value::Null, Has("/state")),
        ("GET", "/version", Value::Null, Has("/firecracker_version")),
        ("GET", "/vm/config", Value::Null, Has("")),
        ("GET", "/machine-config", Value::Null, Has("/vcpu_count")),
        ("PUT", "/actions", json!({"action_type": "InstanceStart"}), Refused("kernel")),
        ("PUT", "/actions", json!({"action_type": "Dance"}), Refused("")),
        ("PUT", "/boot-source", json!({"kernel_image_path": "kernel", "boot_args": "quiet"}), Done),
        ("PUT", "/boot-source", json!({"boot_args": "quiet"}), Refused("kernel_image_path")),
        (
            "PUT",
            "/machine-config",
            json!({"vcpu_count": 2, "mem_size_mib": 256, "smt": false, "track_dirty_pages": false}),
            Done,
        ),
        ("PUT", "/machine-config", json!({"vcpu_count": 0, "mem_size_mib": 256}), Refused("")),
        ("PUT", "/machine-config", json!({"vcpu_count": 33, "mem_size_mib": 256}), Refused("")),
        ("PUT", "/machine-config", json!({"vcpu_count": 3, "mem_size_mib": 256, "smt": true}), Refused("")),
        ("PUT", "/machine-config", json!({"mem_size_mib": 256}), Refused("vcpu_count")),
        ("PATCH", "/machine-config", json!({"mem_size_mib": 128}), Done),
        ("PUT", "/cpu-config", json!({"cpuid_modifiers": []}), Done),
        (
            "PUT",
            "/drives/a",
            json!({"drive_id": "a", "is_root_device": true, "path_on_host": "disk", "is_read_only": true,
            "cache_type": "Unsafe", "io_engine": "Sync", "rate_limiter": limiter}),
            Done,
        ),
        (
            "PUT",
            "/drives/a",
            json!({"drive_id": "b", "is_root_device": false, "path_on_host": "disk"}),
            Refused("id"),
        ),
        (
            "PUT",
            "/drives/c",
            json!({"drive_id": "c", "is_root_device": false, "path_on_host": "absent"}),
            Refused(""),
        ),
        (
            "PUT",
            "/drives/d",
            json!({"drive_id": "d", "is_root_device": false, "path_on_host": "disk", "colour": "red"}),
            Refused("colour"),
        ),
        ("PATCH", "/drives/a", json!({"drive_id": "a", "path_on_host": "disk"}), Refused("before starting")),
        ("PUT", "/vsock", json!({"guest_cid": 3, "uds_path": "guest.sock"}), Done),
        // Depends on the version: 1.17 accepts a CID below 3, against its API description.
        ("PUT", "/vsock", json!({"guest_cid": 2, "uds_path": "guest.sock"}), Done),
        (
            "PUT",
            "/balloon",
            json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1}),
            Done,
        ),
        ("PATCH", "/balloon", json!({"amount_mib": 1}), Refused("before starting")),
        ("PUT", "/entropy", json!({}), Done),
        ("PUT", "/mmds/config", json!({"network_interfaces": ["none"], "version": "V2"}), Refused("")),
        ("PUT", "/hotplug/memory", json!({"total_size_mib": 1024, "slot_size_mib": 64}), Refused("")),
        ("PUT", "/logger", json!({"level": "Warn"}), Done),
        ("PUT", "/metrics", json!({"metrics_path": "metrics"}), Done),
        ("PUT", "/metrics", json!({"metrics_path": "metrics"}), Refused("")),
        ("PATCH", "/vm", json!({"state": "Paused"}), Refused("before starting")),
        (
            "PUT",
            "/snapshot/create",
            json!({"snapshot_path": "s", "mem_file_path": "m"}),
            Refused("before starting"),
        ),
        ("GET", "/nowhere", Value::Null, Refused("")),
        ("DELETE", "/drives/a", Value::Null, Refused("")),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_before_instance_start_table() {
    let stand_in = example("fake-firecracker");
    let vmm = Vmm::start(&stand_in).await;
    std::fs::write(vmm.dir.path().join("metrics"), "").unwrap();
    vmm.check_rows(&rows_before_start()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_before_instance_start_on_firecracker_table() {
    let Some(program) = std::env::var_os("CORACLE_FIRECRACKER_BIN") else {
        tools::not_to_be_had("Firecracker: CORACLE_FIRECRACKER_BIN names none");
        return;
    };
    let vmm = Vmm::start(Path::new(&program)).await;
    std::fs::write(vmm.dir.path().join("metrics"), "").unwrap();
    vmm.check_rows(&rows_before_start()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoints_of_a_running_and_paused_guest_table() {
    use Want::{Done, Has, Refused};
    let vmm = Vmm::start(&example("fake-firecracker")).await;
    let nic =
        json!({"iface_id": "eth0", "host_dev_name": "tap0", "guest_mac": "02:00:00:00:00:01", "mtu": 1500});
    let drive = json!({"drive_id": "a", "is_root_device": false, "path_on_host": "disk"});
    let hotplug = json!({"total_size_mib": 1024, "slot_size_mib": 128, "block_size_mib": 2});
    let limiter = json!({"bandwidth": {"size": 0, "refill_time": 0}});
    vmm.check_rows(
        &[
            ("PUT", "/boot-source", json!({"kernel_image_path": "kernel"}), Done),
            ("PUT", "/drives/a", drive.clone(), Done),
            ("PUT", "/network-interfaces/eth0", nic.clone(), Done),
            ("PUT", "/vsock", json!({"guest_cid": 3, "uds_path": "guest.sock"}), Done),
            (
                "PUT",
                "/balloon",
                json!({"amount_mib": 0, "deflate_on_oom": true, "stats_polling_interval_s": 1}),
                Done,
            ),
            ("PUT", "/mmds/config", json!({"network_interfaces": ["eth0"], "version": "V2"}), Done),
            ("PUT", "/pmem/p", json!({"id": "p", "path_on_host": "disk", "read_only": true}), Done),
            ("PUT", "/serial", json!({"serial_out_path": "serial"}), Done),
            ("PUT", "/hotplug/memory", hotplug, Done),
            ("PUT", "/actions", json!({"action_type": "InstanceStart"}), Done),
            ("PUT", "/actions", json!({"action_type": "InstanceStart"}), Refused("after starting")),
            ("PUT", "/actions", json!({"action_type": "SendCtrlAltDel"}), Done),
            ("PUT", "/actions", json!({"action_type": "FlushMetrics"}), Refused("")),
            ("PUT", "/boot-source", json!({"kernel_image_path": "kernel"}), Refused("after starting")),
            (
                "PUT",
                "/machine-config",
                json!({"vcpu_count": 1, "mem_size_mib": 128}),
                Refused("after starting"),
            ),
            (
                "PUT",
                "/drives/b",
                json!({"drive_id": "b", "is_root_device": false, "path_on_host": "disk"}),
                Refused("after starting"),
            ),
            ("PATCH", "/drives/a", json!({"drive_id": "a", "path_on_host": "disk"}), Done),
            ("PATCH", "/drives/a", json!({"drive_id": "a", "path_on_host": "absent"}), Refused("")),
            ("PATCH", "/drives/z", json!({"drive_id": "z", "path_on_host": "disk"}), Refused("")),
            (
                "PATCH",
                "/network-interfaces/eth0",
                json!({"iface_id": "eth0", "rx_rate_limiter": limiter}),
                Done,
            ),
            ("PATCH", "/network-interfaces/eth0", nic, Refused("unknown field")),
            ("PATCH", "/balloon", json!({"amount_mib": 16}), Done),
            ("GET", "/balloon", Value::Null, Has("/amount_mib")),
            ("GET", "/balloon/statistics", Value::Null, Has("/amount_mib")),
            ("PATCH", "/balloon/statistics", json!({"stats_polling_interval_s": 2}), Done),
            ("PATCH", "/hotplug/memory", json!({"requested_size_mib": 256}), Done),
            ("GET", "/hotplug/memory", Value::Null, Has("/total_size_mib")),
            ("PUT", "/mmds", json!({"latest": {"a": 1}}), Done),
            ("PATCH", "/mmds", json!({"latest": {"b": 2}}), Done),
            ("GET", "/mmds", Value::Null, Has("/latest/b")),
            ("PUT", "/snapshot/create", json!({"snapshot_path": "s", "mem_file_path": "m"}), Refused("")),
        ][..31],
    )
    .await;
    vmm.check_rows(&[
        ("PATCH", "/vm", json!({"state": "Paused"}), Done),
        ("PATCH", "/vm", json!({"state": "Paused"}), Done),
        ("PATCH", "/vm", json!({"state": "Asleep"}), Refused("")),
        ("PUT", "/vm", json!({"state": "Paused"}), Refused("")),
        ("GET", "/", Value::Null, Has("/state")),
        (
            "PUT",
            "/snapshot/create",
            json!({"snapshot_type": "Full", "snapshot_path": "s", "mem_file_path": "m"}),
            Done,
        ),
        ("PUT", "/snapshot/create", json!({"snapshot_path": "s"}), Refused("mem_file_path")),
        ("PATCH", "/vm", json!({"state": "Resumed"}), Done),
        ("DELETE", "/network-interfaces/eth0", Value::Null, Done),
        ("DELETE", "/network-interfaces/eth0", Value::Null, Refused("")),
    ])
    .await;
    let memory = std::fs::metadata(vmm.dir.path().join("m")).unwrap();
    assert_eq!(memory.len(), 128 << 20, "the memory file is as large as the guest's memory");
}

#[tokio::test(flavor = "multi_thread")]
async fn unloadable_snapshot_ends_the_vmm_process() {
    let stand_in = &example("fake-firecracker");
    let load = |state: &str| json!({"snapshot_path": state, "mem_backend": {"backend_type": "File", "backend_path": "disk"}});
    for (why, path, body, first) in [
        ("no such state", "/snapshot/load", load("absent"), None),
        ("not a state", "/snapshot/load", load("disk"), None),
        (
            "after something was configured",
            "/snapshot/load",
            load("disk"),
            Some(("/boot-source", json!({"kernel_image_path": "kernel"}))),
        ),
        (
            "two memories",
            "/snapshot/load",
            json!({"snapshot_path": "disk", "mem_file_path": "disk", "mem_backend": {"backend_type": "File", "backend_path": "disk"}}),
            None,
        ),
    ] {
        let mut vmm = Vmm::start(stand_in).await;
        if let Some((path, body)) = first {
            vmm.call("PUT", path, &body).await.unwrap();
        }
        let answered = vmm.api.call(Method::PUT, path, Some(&body)).await;
        assert!(answered.is_err(), "{why}");
        let status = vmm.child.wait().unwrap();
        assert_eq!(status.code(), Some(1), "{why}");
    }
}
