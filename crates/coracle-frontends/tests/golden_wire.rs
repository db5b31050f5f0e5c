//! Encoded bytes of every message of the frozen protocol, in both directions.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test reports by panicking")]

use coracle_proto::firecracker as pb;
use prost::Message;

/// Encodes and decodes the message, and decodes it again with an appended unknown field 100.
fn wire<M: Message + Default + PartialEq + std::fmt::Debug>(name: &str, message: &M) -> String {
    let bytes = message.encode_to_vec();
    assert_eq!(&M::decode(&bytes[..]).unwrap(), message, "{name} round trip");
    let mut newer = bytes.clone();
    newer.extend([0xa2, 0x06, 0x03, b'n', b'e', b'w']); // field 100, length-delimited
    assert_eq!(&M::decode(&newer[..]).unwrap(), message, "{name} ignores what it does not know");
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("{name} {hex}\n")
}

fn info() -> pb::VmInfo {
    pb::VmInfo {
        vm_id: "v".into(),
        state: pb::VmState::Running.into(),
        vcpu_count: 2,
        memory_mb: 512,
        ip_address: "10.100.0.2".into(),
        socket_path: "/s".into(),
        created_at: 1_775_815_200,
        metadata: [("k".to_owned(), "v".to_owned())].into(),
    }
}

#[test]
fn messages_encode_to_golden_bytes() {
    let id = || "v".to_owned();
    let error_message = || "e".to_owned();
    let stopped = || pb::VmState::Stopped.into();
    let all = [
        wire(
            "CreateVMRequest",
            &pb::CreateVmRequest {
                vm_id: id(),
                vcpu_count: 2,
                memory_mb: 512,
                ip_address: "10.100.0.2".into(),
                kernel_path: "/k".into(),
                rootfs_path: "/r".into(),
                metadata: [("k".to_owned(), "v".to_owned())].into(),
                image_ref: "i:1".into(),
            },
        ),
        wire(
            "CreateVMResponse",
            &pb::CreateVmResponse {
                vm_id: id(),
                state: stopped(),
                socket_path: "/s".into(),
                created_at: 1_775_815_200,
                error_message: error_message(),
            },
        ),
        wire("StartVMRequest", &pb::StartVmRequest { vm_id: id() }),
        wire(
            "StartVMResponse",
            &pb::StartVmResponse { vm_id: id(), state: stopped(), error_message: error_message() },
        ),
        wire("StopVMRequest", &pb::StopVmRequest { vm_id: id(), force: true }),
        wire(
            "StopVMResponse",
            &pb::StopVmResponse { vm_id: id(), state: stopped(), error_message: error_message() },
        ),
        wire("DeleteVMRequest", &pb::DeleteVmRequest { vm_id: id() }),
        wire(
            "DeleteVMResponse",
            &pb::DeleteVmResponse { vm_id: id(), success: true, error_message: error_message() },
        ),
        wire("GetVMRequest", &pb::GetVmRequest { vm_id: id() }),
        wire("GetVMResponse", &pb::GetVmResponse { vm: Some(info()) }),
        wire("ListVMsRequest", &pb::ListVMsRequest { page_size: 5, page_token: "t".into() }),
        wire(
            "ListVMsResponse",
            &pb::ListVMsResponse { vms: vec![info()], next_page_token: "t".into(), total_count: 1 },
        ),
        wire("WatchVMEventsRequest", &pb::WatchVmEventsRequest { vm_id: id() }),
        wire(
            "VMEvent",
            &pb::VmEvent {
                vm_id: id(),
                state: pb::VmState::Deleting.into(),
                message: "m".into(),
                timestamp: 1_775_815_200,
                r#type: pb::EventType::Deleted.into(),
            },
        ),
        wire("GetHostInfoRequest", &pb::GetHostInfoRequest {}),
        wire(
            "GetHostInfoResponse",
            &pb::GetHostInfoResponse {
                hostname: "h".into(),
                total_cpus: 2,
                total_memory_mb: 1024,
                available_memory_mb: 512,
                running_vms: 1,
                cpu_usage: 12.5,
                version: "0.1.0".into(),
            },
        ),
        wire("HealthCheckRequest", &pb::HealthCheckRequest {}),
        wire(
            "HealthCheckResponse",
            &pb::HealthCheckResponse { healthy: true, version: "0.1.0".into(), uptime_seconds: 3 },
        ),
        wire("VMInfo", &info()),
    ];
    insta::assert_snapshot!(all.concat());
}

#[test]
fn enum_names_match_the_wire_contract() {
    let states: Vec<_> = (0..7).map(|n| pb::VmState::try_from(n).unwrap().as_str_name()).collect();
    assert_eq!(
        states,
        [
            "VM_STATE_UNSPECIFIED",
            "VM_STATE_CREATING",
            "VM_STATE_RUNNING",
            "VM_STATE_STOPPING",
            "VM_STATE_STOPPED",
            "VM_STATE_DELETING",
            "VM_STATE_ERROR",
        ]
    );
    let events: Vec<_> = (0..6).map(|n| pb::EventType::try_from(n).unwrap().as_str_name()).collect();
    assert_eq!(
        events,
        [
            "EVENT_TYPE_UNSPECIFIED",
            "EVENT_TYPE_CREATED",
            "EVENT_TYPE_STARTED",
            "EVENT_TYPE_STOPPED",
            "EVENT_TYPE_DELETED",
            "EVENT_TYPE_ERROR",
        ]
    );
}
