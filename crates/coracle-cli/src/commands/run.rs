//! `coracle run`.

use std::io::Write;
use std::path::Path;

use coracle_host::{COMMIT_ANNOTATION, REMOVE_ANNOTATION, RemoveWhen};
use coracle_proto::host as pb;
use pb::host_client::HostClient;
use tonic::Streaming;
use tonic::transport::Channel;

use crate::cli::{Global, ProgressMode, Pull, ReachChoice, RunArgs};
use crate::client::connect_local;
use crate::commands::{transfer, vm, volume};
use crate::error::{Failure, exit};
use crate::output::{self, write_bytes};
use crate::progress::ProgressDisplay;
use crate::tasks::stop_signal;

/// Runs an image. Attached, shows the output and returns the workload's exit code; ^C stops the VM. Detached, returns once the
/// workload runs.
pub async fn run(global: &Global, args: RunArgs) -> miette::Result<u8> {
    let ours =
        |failure: Failure| if failure.exit == exit::USAGE { failure } else { failure.exit(exit::OURS) };
    let mut client = connect_local(global, "coracle run")
        .await
        .map_err(|f| if f.exit == exit::UNSUPPORTED { f } else { ours(f) })?;
    let image = fetch(&mut client, &args.image, args.pull, args.progress).await.map_err(ours)?;
    let request = request(&args, &image)?;
    let mut progress = ProgressDisplay::new(args.progress);
    progress.step(&format!("starting {}", request.name));
    let created = client.create_vm(request).await.map_err(|s| ours(s.into()))?.into_inner();
    // Delays the removal by the node until output and exit code of a short workload have been read.
    let _held = match is_removed_by_node(&args) {
        true => Some(hold(&mut client, &created.id).await.map_err(ours)?),
        false => None,
    };
    let mut starter = client.clone();
    let started = tokio::select! {
        started = starter.start_vm(pb::StartVmRequest { vm: created.id.clone(), ..Default::default() }) => started,
        () = stop_signal() => Err(tonic::Status::cancelled("interrupted")),
    };
    progress.done();
    let started = match started {
        Ok(vm) => vm.into_inner(),
        Err(status) => {
            // A VM that does not start is removed.
            let request = pb::DeleteVmRequest { vm: created.id, force: true, ..Default::default() };
            let _already_gone = client.delete_vm(request).await;
            return Err(ours(status.into()).into());
        }
    };
    if args.detach || image.is_disk {
        if !args.detach {
            let name = &started.name;
            eprintln!(
                "{name} runs: coracle exec -it {name} bash, coracle console {name}, coracle stop {name}"
            );
        }
        output::write(&format!("{}\n", started.name))?;
        return Ok(0);
    }
    let (end, code) = attach(&mut client, &started.id).await.map_err(ours)?;
    if let Some(reference) = &args.commit {
        print_commit_result(&end, code, reference)?;
    }
    if args.rm {
        let request = pb::DeleteVmRequest { vm: started.id, force: true, ..Default::default() };
        client.delete_vm(request).await.map_err(|s| ours(s.into()))?;
    }
    Ok(code)
}

/// Returns whether the node removes the VM. With `--commit` it does not, because the node would also remove a VM whose image
/// could not be pushed.
fn is_removed_by_node(args: &RunArgs) -> bool {
    args.rm && args.commit.is_none()
}

/// Keeps the node from removing a VM until the returned stream is dropped.
pub(super) async fn hold(
    client: &mut HostClient<Channel>,
    id: &str,
) -> Result<Streaming<pb::HoldVmResponse>, Failure> {
    Ok(client.hold_vm(pb::HoldVmRequest { vm: id.to_owned() }).await?.into_inner())
}

/// Returns the metadata of a VM that the node removes when `when` applies.
pub(super) fn removal(when: RemoveWhen) -> (String, String) {
    (REMOVE_ANNOTATION.to_owned(), when.as_str().to_owned())
}

/// Image that is on the node.
pub(super) struct Fetched {
    /// Name to create a VM from.
    pub(super) name: String,
    /// Whether the image is a disk image, with an operating system of its own.
    pub(super) is_disk: bool,
}

/// Brings the image to the node.
pub(super) async fn fetch(
    client: &mut HostClient<Channel>,
    reference: &str,
    pull: Pull,
    progress: ProgressMode,
) -> Result<Fetched, Failure> {
    if let Some(source) = source(reference) {
        let found = transfer::import(client, &source, None, progress).await?;
        let is_disk = found.disk_bytes > 0;
        let unnamed = || {
            Failure::new("COR-IMG-002", "the source gives the image no name")
                .help("import it under a name first: coracle image import SOURCE NAME")
        };
        let name = found.references.into_iter().next().ok_or_else(unnamed)?;
        return Ok(Fetched { name, is_disk });
    }
    let found = match pull {
        Pull::Never => {
            let request = pb::GetImageRequest { reference: reference.to_owned() };
            client.get_image(request).await?.into_inner()
        }
        when => transfer::pull(client, reference, when, progress).await?,
    };
    Ok(Fetched { name: reference.to_owned(), is_disk: found.disk_bytes > 0 })
}

/// Returns the source of an image that is imported instead of pulled: a source with a prefix, or a path, which is a disk image.
fn source(image: &str) -> Option<String> {
    let prefixed = ["oci:", "docker-archive:", "disk:"].iter().any(|prefix| image.starts_with(prefix));
    let path = ["/", "./", "../"].iter().any(|start| image.starts_with(start));
    match (prefixed, path) {
        (true, _) => Some(image.to_owned()),
        (false, true) => Some(format!("disk:{image}")),
        (false, false) => None,
    }
}

/// Default memory of a VM, MiB.
const MEMORY: u64 = 256;
/// Default memory of a disk image VM, MiB.
const SYSTEM_MEMORY: u64 = 1024;

pub(super) fn user_data(file: &Path) -> Result<String, Failure> {
    let read = if file == Path::new("-") {
        std::io::read_to_string(std::io::stdin())
    } else {
        std::fs::read_to_string(file)
    };
    read.map_err(|e| Failure::usage(format!("user data {}: {e}", file.display())))
}

fn request(args: &RunArgs, image: &Fetched) -> Result<pb::CreateVmRequest, Failure> {
    let user_data = match &args.user_data {
        Some(file) => user_data(file)?,
        None => String::new(),
    };
    Ok(pb::CreateVmRequest {
        name: args.name.clone().unwrap_or_else(|| default_name(&image.name)),
        image: image.name.clone(),
        firmware: args.firmware.clone(),
        user_data,
        vcpus: args.cpus,
        memory_mib: args.memory.unwrap_or(if image.is_disk { SYSTEM_MEMORY } else { MEMORY }),
        kernel_path: args.kernel.clone(),
        network: args.network.clone(),
        ip_address: args.ip.clone(),
        hostname: args.hostname.clone(),
        command: args.entrypoint.iter().cloned().collect(),
        args: args.args.clone(),
        env: args.env.iter().map(|e| variable(e)).collect(),
        user: args.user.clone(),
        workdir: args.workdir.clone(),
        ports: args.publish.iter().map(|p| parse_port_mapping(p)).collect::<Result<_, _>>()?,
        reach: Some(reach(&args.reach)),
        disk_mib: args.disk.unwrap_or(0),
        cold: args.cold,
        driver: args.driver.clone(),
        display: args.display.clone(),
        without_agent: args.no_agent,
        volumes: args.volume.iter().map(volume::from_flag).collect(),
        metadata: {
            let commit = args.commit.iter().map(|to| (COMMIT_ANNOTATION.to_owned(), to.clone()));
            commit.chain(is_removed_by_node(args).then(|| removal(RemoveWhen::Off))).collect()
        },
        pull_policy: pb::PullPolicy::IfNotPresent.into(),
        ..Default::default()
    })
}

/// Makes a default name, `registry/team/web:1` → `web-3f2a`: short, and different from the previous one.
pub(super) fn default_name(image: &str) -> String {
    let path = image.split('@').next().unwrap_or_default();
    let last = path.rsplit('/').next().unwrap_or_default();
    let stem = last.split(':').next().unwrap_or_default();
    let stem: String = stem.chars().filter(|c| c.is_ascii_alphanumeric() || *c == '-').take(20).collect();
    let stem = if stem.is_empty() { "vm".to_owned() } else { stem };
    format!("{stem}-{:04x}", rand::random::<u16>())
}

/// Completes `NAME` with its value from the environment of this process.
fn variable(text: &str) -> String {
    match text.contains('=') {
        true => text.to_owned(),
        false => format!("{text}={}", std::env::var(text).unwrap_or_default()),
    }
}

/// Parses `8080:80`, `127.0.0.1:8080:80` or `53:53/udp`.
fn parse_port_mapping(text: &str) -> Result<pb::PortMapping, Failure> {
    let bad = || Failure::usage(format!("invalid port {text:?}: want [ADDRESS:]HOSTPORT:GUESTPORT[/udp]"));
    let (numbers, protocol) = text.split_once('/').unwrap_or((text, "tcp"));
    if !matches!(protocol, "tcp" | "udp") {
        return Err(bad());
    }
    let parts: Vec<_> = numbers.split(':').collect();
    let (address, host, guest) = match parts.as_slice() {
        [host, guest] => ("", host, guest),
        [address, host, guest] => (*address, host, guest),
        _ => return Err(bad()),
    };
    let port = |text: &str| text.parse::<u16>().map(u32::from).map_err(|_| bad());
    let (host_address, protocol) = (address.to_owned(), protocol.to_owned());
    Ok(pb::PortMapping { host_address, host_port: port(host)?, guest_port: port(guest)?, protocol })
}

/// Converts the values of `--reach`.
pub(super) fn reach(named: &[ReachChoice]) -> pb::Reach {
    pb::Reach { guests: named.contains(&ReachChoice::Guests), node: named.contains(&ReachChoice::Node) }
}

/// Prints the result of `--commit`. A command that failed produces no image, and its exit code is enough.
fn print_commit_result(end: &pb::Vm, code: u8, reference: &str) -> Result<(), Failure> {
    if code != 0 {
        eprintln!("no image: the command did not exit with 0");
    } else if end.committed.is_empty() {
        let why = crate::error::printable(&end.message);
        let failure = Failure::new("COR-GST-005", why).exit(exit::OURS);
        return Err(failure.help(format!("the VM {} is kept: start it again, or commit it", end.name)));
    } else {
        eprintln!("pushed {reference}@{}", end.committed);
    }
    Ok(())
}

/// Shows the output until the VM is off, and returns the VM and its exit code.
async fn attach(client: &mut HostClient<Channel>, id: &str) -> Result<(pb::Vm, u8), Failure> {
    let request = pb::LogsRequest { vm: id.to_owned(), follow: true, ..Default::default() };
    let mut output = client.logs(request).await?.into_inner();
    let mut interrupted = false;
    loop {
        tokio::select! {
            chunk = output.message() => match chunk? {
                Some(chunk) if chunk.stream() == pb::logs_response::Stream::Stderr => {
                    let _stderr_gone = std::io::stderr().write_all(&chunk.data);
                }
                Some(chunk) => write_bytes(&chunk.data)?,
                None => break,
            },
            () = stop_signal() => {
                // The second ^C stops the VM without a grace period for the guest.
                let grace_ms = Some(if interrupted { 0 } else { 10_000 });
                interrupted = true;
                eprintln!("stopping the VM; ^C again kills it");
                let mut client = client.clone();
                let request = pb::StopVmRequest { vm: id.to_owned(), grace_ms, ..Default::default() };
                tokio::select! {
                    stopped = client.stop_vm(request) => { stopped?; }
                    () = stop_signal() => {
                        client.stop_vm(pb::StopVmRequest { vm: id.to_owned(), grace_ms: Some(0), ..Default::default() }).await?;
                    }
                }
            }
        }
    }
    let vm = client.wait_vm(pb::WaitVmRequest { vm: id.to_owned() }).await?.into_inner();
    if vm.state() == pb::VmState::Failed {
        return Err(Failure::new("COR-GST-002", crate::error::printable(&vm.message)).exit(exit::OURS));
    }
    if let Some(status) = vm.exit.as_ref().filter(|s| !s.error.is_empty()) {
        eprintln!("error: {}", crate::error::printable(&status.error));
    }
    let code = if interrupted { 130 } else { vm::exit_of(&vm) };
    Ok((vm, code))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_vm_name_is_derived_from_the_image() {
        for (image, stem) in [
            ("nginx", "nginx-"),
            ("localhost:5000/team/web-app:1.2", "web-app-"),
            ("a/b@sha256:00", "b-"),
            ("???", "vm-"),
        ] {
            assert!(default_name(image).starts_with(stem), "{image} → {}", default_name(image));
        }
    }

    #[test]
    fn local_image_source_is_recognised_by_path_or_scheme() {
        for (image, want) in [
            ("nginx", None),
            ("localhost:5000/a/b:1", None),
            ("./debian.qcow2", Some("disk:./debian.qcow2")),
            ("/a/b.raw", Some("disk:/a/b.raw")),
            ("disk:b.raw", Some("disk:b.raw")),
            ("oci:dir:1", Some("oci:dir:1")),
        ] {
            assert_eq!(source(image).as_deref(), want, "{image}");
        }
    }

    #[test]
    fn published_ports_are_parsed_or_refused() {
        let port = parse_port_mapping("127.0.0.1:8080:80").unwrap();
        assert_eq!((port.host_address.as_str(), port.host_port, port.guest_port), ("127.0.0.1", 8080, 80));
        assert_eq!(parse_port_mapping("53:53/udp").unwrap().protocol, "udp");
        for bad in ["80", "a:b", "1:2:3:4", "70000:80", "1:2/sctp"] {
            assert!(parse_port_mapping(bad).is_err(), "{bad}");
        }
    }
}
