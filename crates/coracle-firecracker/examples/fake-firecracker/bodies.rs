//! Request bodies, which refuse unknown fields like the real ones.
#![allow(dead_code, reason = "most fields are only checked for being there")]

use serde::Deserialize;
use serde_json::Value;

macro_rules! body {
    ($name:ident { $($field:ident: $kind:ty),* $(,)? }) => {
        #[derive(Debug, Deserialize)]
        #[serde(deny_unknown_fields)]
        pub(crate) struct $name { $(pub(crate) $field: $kind),* }
    };
}

body!(BootSource { kernel_image_path: String, boot_args: Option<String>, initrd_path: Option<String> });
body!(MachineConfig {
    vcpu_count: u8, mem_size_mib: u64, smt: Option<bool>, cpu_template: Option<String>,
    track_dirty_pages: Option<bool>, huge_pages: Option<HugePages>,
});
body!(CpuConfig {
    kvm_capabilities: Option<Value>, cpuid_modifiers: Option<Value>, msr_modifiers: Option<Value>,
    reg_modifiers: Option<Value>, vcpu_features: Option<Value>,
});
body!(Drive {
    drive_id: String, is_root_device: bool, path_on_host: Option<String>, is_read_only: Option<bool>,
    partuuid: Option<String>, cache_type: Option<CacheType>, io_engine: Option<IoEngine>,
    rate_limiter: Option<RateLimiter>, socket: Option<String>,
});
body!(DrivePatch { drive_id: String, path_on_host: Option<String>, rate_limiter: Option<RateLimiter> });
body!(Nic {
    iface_id: String, host_dev_name: String, guest_mac: Option<String>, mtu: Option<u16>,
    rx_rate_limiter: Option<RateLimiter>, tx_rate_limiter: Option<RateLimiter>,
});
body!(NicPatch { iface_id: String, rx_rate_limiter: Option<RateLimiter>, tx_rate_limiter: Option<RateLimiter> });
body!(Vsock { guest_cid: u32, uds_path: String, vsock_id: Option<String> });
body!(Balloon {
    amount_mib: u32, deflate_on_oom: bool, stats_polling_interval_s: Option<u16>,
    free_page_reporting: Option<bool>, free_page_hinting: Option<bool>,
});
body!(BalloonPatch { amount_mib: u32 });
body!(BalloonStats { stats_polling_interval_s: u16 });
body!(Entropy { rate_limiter: Option<RateLimiter> });
body!(Serial { serial_out_path: Option<String>, rate_limiter: Option<RateLimiter> });
body!(Pmem {
    id: String, path_on_host: String, root_device: Option<bool>, read_only: Option<bool>,
    rate_limiter: Option<RateLimiter>,
});
body!(HotplugMemory { total_size_mib: u64, slot_size_mib: Option<u64>, block_size_mib: Option<u64> });
body!(HotplugPatch { requested_size_mib: u64 });
body!(MmdsConfig {
    network_interfaces: Vec<String>, version: Option<MmdsVersion>, ipv4_address: Option<String>,
    imds_compat: Option<bool>,
});
body!(Logger {
    log_path: Option<String>, level: Option<String>, show_level: Option<bool>, show_log_origin: Option<bool>,
    module: Option<String>,
});
body!(Metrics { metrics_path: String, emit_id: Option<bool>, properties: Option<Value> });
body!(Action { action_type: ActionType });
body!(VmState { state: State });
body!(SnapshotCreate { snapshot_path: String, mem_file_path: String, snapshot_type: Option<SnapshotType> });
body!(SnapshotLoad {
    snapshot_path: String, mem_file_path: Option<String>, mem_backend: Option<MemBackend>,
    resume_vm: Option<bool>, track_dirty_pages: Option<bool>, enable_diff_snapshots: Option<bool>,
    network_overrides: Option<Vec<NetworkOverride>>, vsock_override: Option<VsockOverride>,
    clock_realtime: Option<bool>, huge_pages: Option<String>,
});
body!(MemBackend { backend_type: BackendType, backend_path: String });
body!(NetworkOverride { iface_id: String, host_dev_name: String });
body!(VsockOverride { uds_path: String });
body!(RateLimiter { bandwidth: Option<Bucket>, ops: Option<Bucket> });
body!(Bucket { size: u64, refill_time: u64, one_time_burst: Option<u64> });

macro_rules! word {
    ($name:ident { $($(#[$meta:meta])* $value:ident),* $(,)? }) => {
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
        pub(crate) enum $name { $($(#[$meta])* $value),* }
    };
}

word!(HugePages {
    None,
    #[serde(rename = "2M")]
    TwoMib,
    Transparent
});
word!(CacheType { Unsafe, Writeback });
word!(IoEngine { Sync, Async });
word!(MmdsVersion { V1, V2 });
word!(ActionType { InstanceStart, FlushMetrics, SendCtrlAltDel });
word!(State { Paused, Resumed });
word!(SnapshotType { Full, Diff });
word!(BackendType { File, Uffd });
