//! Stand-in for Firecracker where the real program is not available: its arguments, its API with the refusals, its vsock
//! socket, its serial console and its snapshot files, around a guest that only says hello. The tables of `tests/endpoints.rs`
//! list what is faithful; they also run on the real program, if one is named.
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "so does the real program")]

mod api;
mod bodies;

use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};

use serde_json::json;

use api::Machine;

/// Maximum length of a request body (docs, `--http-api-max-payload-size`).
const BODY_BYTES_MAX: usize = 51_200;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    let (mut socket, mut id) = (PathBuf::from("/run/firecracker.socket"), "anonymous-instance".to_owned());
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--version" => {
                println!("Firecracker v1.16.0\n\nSupported snapshot data format versions: v8.0.0");
                return ExitCode::SUCCESS;
            }
            "--api-sock" => socket = args.next().unwrap_or_default().into(),
            "--id" => id = args.next().unwrap_or_default(),
            "--log-path" | "--level" => drop(args.next()),
            "--enable-pci" => {}
            other => {
                eprintln!("Arguments parsing error: Found argument '{other}' which wasn't expected");
                return ExitCode::from(153);
            }
        }
    }
    let make = move || {
        let machine = Mutex::new(Machine::new(id));
        let handle = move |method: &str,
                           path: &str,
                           body: &[u8]|
              -> coracle_hypervisor_testing::stand_in::server::Answer {
            let answered = machine.lock().unwrap_or_else(PoisonError::into_inner).handle(method, path, body);
            match answered {
                Ok(None) => (204, None),
                Ok(body) => (200, body),
                // A snapshot that cannot be loaded ends the process.
                Err(why) if path == "/snapshot/load" => {
                    eprintln!("{why}");
                    std::process::exit(1)
                }
                Err(why) => (400, Some(json!({"fault_message": why}))),
            }
        };
        Arc::new(handle) as coracle_hypervisor_testing::stand_in::server::Handle
    };
    coracle_hypervisor_testing::stand_in::server::run(&socket, BODY_BYTES_MAX, make)
}
