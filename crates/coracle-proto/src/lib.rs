//! Messages and stubs of coracle's wires, generated from `proto/` by `cargo xtask codegen` and committed.
//!
//! One feature a wire, so that the guest agent carries its own alone.

#[cfg(feature = "guest")]
pub mod codec;

/// `firecracker.v1`: frozen, for existing clients.
#[cfg(feature = "firecracker")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod firecracker {
    include!("generated/firecracker.v1.rs");

    /// The encoded `FileDescriptorSet`, for gRPC reflection.
    pub const DESCRIPTORS: &[u8] = include_bytes!("generated/firecracker.v1.bin");
}

/// `coracle.host.v1`: everything that a node does with VMs.
#[cfg(feature = "host")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod host {
    include!("generated/coracle.host.v1.rs");
}

/// `coracle.guest.v1`: what the agent inside a VM serves.
#[cfg(feature = "guest")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod guest {
    include!("generated/coracle.guest.v1.rs");

    /// First bytes of a session in which the host sends a [`StartRequest`] before HTTP/2; its [`frame`] follows.
    pub const START_MAGIC: [u8; 8] = *b"CORSTART";

    /// Request of a host after a [`StartRequest`], before HTTP/2: whether the agent is alive.
    pub const ALIVE_MAGIC: [u8; 8] = *b"CORALIVE";

    /// Last request of a host before HTTP/2, which begins after [`Upgraded`].
    pub const UPGRADE_MAGIC: [u8; 8] = *b"CORHTTP2";

    /// Last request of a host before HTTP/2, instead of [`UPGRADE_MAGIC`]: once the workload has ended, the guest is reset. The
    /// session begins anew after [`ResetResponse`].
    pub const RESET_MAGIC: [u8; 8] = *b"CORRESET";

    /// Message with its length before it, 4 bytes, big-endian.
    pub fn frame(message: &impl prost::Message) -> Vec<u8> {
        // Longer messages are refused by who receives them.
        let length = u32::try_from(message.encoded_len()).unwrap_or(u32::MAX);
        let mut bytes = length.to_be_bytes().to_vec();
        bytes.extend(message.encode_to_vec());
        bytes
    }

    /// Message in the bytes of a [`frame`], behind its length.
    ///
    /// # Errors
    /// When the bytes are not such a message.
    pub fn unframe<M: prost::Message + Default>(bytes: &[u8]) -> Result<M, prost::DecodeError> {
        M::decode(bytes)
    }

    /// With this argument the agent's program ends at once: it is the program of the image that warm-ups run.
    pub const WARM_UP: &str = "warm-up";
}

/// `coracle.market.v1`: prices, bids, capacity.
#[cfg(feature = "market")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod market {
    include!("generated/coracle.market.v1.rs");

    /// A state in one word for people, as the name of its constant without the prefix; `unknown` with the number when it is
    /// one of a newer market.
    macro_rules! words {
        ($($state:ident $prefix:literal),*) => { $(
            impl $state {
                /// The state of a message in one word.
                pub fn word(value: i32) -> String {
                    match Self::try_from(value) {
                        Ok(state) => state.as_str_name()[$prefix.len()..].to_ascii_lowercase(),
                        Err(_) => format!("unknown ({value})"),
                    }
                }
            }
        )* };
    }
    words!(BidState "BID_STATE_", AllocationState "ALLOCATION_STATE_", LotState "LOT_STATE_");
}

/// `runtime.v1`: what a kubelet asks of a container runtime.
#[cfg(feature = "cri")]
#[allow(missing_docs, unreachable_pub, clippy::all, clippy::pedantic, reason = "generated")]
pub mod cri {
    include!("generated/runtime.v1.rs");

    impl ListContainersResponse {
        /// The containers.
        ///
        /// # Errors
        /// When one of them cannot be decoded.
        pub fn decode_containers(&self) -> Result<Vec<Container>, prost::DecodeError> {
            self.containers.iter().map(|bytes| prost::Message::decode(bytes.clone())).collect()
        }
    }

    impl StreamContainersResponse {
        /// The containers.
        ///
        /// # Errors
        /// When one of them cannot be decoded.
        pub fn decode_containers(&self) -> Result<Vec<Container>, prost::DecodeError> {
            self.containers.iter().map(|bytes| prost::Message::decode(bytes.clone())).collect()
        }
    }

    impl ListPodSandboxResponse {
        /// The sandboxes.
        ///
        /// # Errors
        /// When one of them cannot be decoded.
        pub fn decode_items(&self) -> Result<Vec<PodSandbox>, prost::DecodeError> {
            self.items.iter().map(|bytes| prost::Message::decode(bytes.clone())).collect()
        }
    }
}
