//! Stand-in for Cloud Hypervisor where the real program is not available: its arguments, its API with the refusals, its events,
//! its vsock and serial sockets and its snapshot directory, around a guest that only says hello. The tables of
//! `tests/endpoints.rs` list what is faithful; they also run on the real program, if one is named.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "so does the real program")]

mod api;

use std::fs::File;
use std::os::fd::FromRawFd;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use coracle_hypervisor_testing::stand_in::server;
use serde_json::json;

use api::Machine;

/// Maximum length of a request body.
const BODY_BYTES_MAX: usize = 4 << 20;

/// Returns the file of `fd=N`, which this process has inherited.
fn inherited_file(value: &str) -> Option<File> {
    let number = value.strip_prefix("fd=")?.parse().ok()?;
    // SAFETY: the caller has opened it for this process, which takes it once.
    #[allow(unsafe_code, reason = "the number comes as an argument")]
    Some(unsafe { File::from_raw_fd(number) })
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (mut socket, mut events) = (PathBuf::new(), None);
    let path = |value: Option<String>| {
        value.and_then(|v| v.strip_prefix("path=").map(PathBuf::from)).unwrap_or_default()
    };
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--version" => {
                println!("cloud-hypervisor v53.0.0");
                return ExitCode::SUCCESS;
            }
            "--api-socket" => socket = path(args.next()),
            "--event-monitor" => events = args.next().and_then(|value| inherited_file(&value)),
            other => {
                eprintln!("error: unexpected argument '{other}' found");
                return ExitCode::from(2);
            }
        }
    }
    let make = move || {
        let machine = Mutex::new(Machine::new(events));
        let handle = move |method: &str, path: &str, body: &[u8]| -> server::Answer {
            if (method, path) == ("PUT", "/api/v1/vmm.shutdown") {
                std::process::exit(0);
            }
            let answered = machine.lock().unwrap_or_else(PoisonError::into_inner).handle(method, path, body);
            match answered {
                Ok(None) => (204, None),
                Ok(body) => (200, body),
                Err((status, why)) => (status, Some(json!(["Error from API", why]))),
            }
        };
        Arc::new(handle) as server::Handle
    };
    server::run(&socket, BODY_BYTES_MAX, make)
}
