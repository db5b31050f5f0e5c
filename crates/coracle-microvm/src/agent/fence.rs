//! gRPC metadata that names the object of a call.

use coracle_api::keys::fence;
use coracle_telemetry::{TRACEPARENT, traceparent};
use tonic::{
    Request,
    metadata::{AsciiMetadataValue, MetadataMap},
};

use super::vm_info::Fence;

/// Returns a request on behalf of an object.
pub(super) fn fenced_request<T>(message: T, fence: &Fence) -> Request<T> {
    let mut request = traced_request(message);
    insert(request.metadata_mut(), fence::UID, &fence.uid);
    insert(request.metadata_mut(), fence::OBJECT, &fence.object);
    insert(request.metadata_mut(), fence::GENERATION, &fence.generation.to_string());
    request
}

/// Returns a request in the trace of the caller.
pub(super) fn traced_request<T>(message: T) -> Request<T> {
    let mut request = Request::new(message);
    if let Some(parent) = traceparent() {
        insert(request.metadata_mut(), TRACEPARENT, &parent);
    }
    request
}

fn insert(metadata: &mut MetadataMap, key: &'static str, value: &str) {
    // UIDs and numbers are ASCII; other characters cannot come from the API server.
    if let Ok(value) = AsciiMetadataValue::try_from(value) {
        metadata.insert(key, value);
    }
}
