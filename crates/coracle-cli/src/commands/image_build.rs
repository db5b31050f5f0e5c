//! `coracle image build`: operates a VM by the steps of a file, and makes an image of its disk.

use std::path::{Path, PathBuf};
use std::time::Duration;

use coracle_host::RemoveWhen;
use coracle_image_build::{BuildFile, Machine, Screen, ScreenError, Serial, run as run_steps};
use coracle_proto::host as pb;
use pb::console_request::Message;
use pb::host_client::HostClient;
use tokio::io::duplex;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::{run, transfer, vnc};
use crate::cli::{ImageBuildArgs, Pull, VolumeFlag};
use crate::commands::volume;
use crate::error::{Failure, exit};
use crate::output;
use crate::progress::ProgressDisplay;
use crate::tasks::stop_signal;

/// Buffer of the display stream, in bytes.
const SCREEN_BUFFER: usize = 64 << 10;
/// Time limit for the screenshot of a failure.
const SCREENSHOT_LIMIT: Duration = Duration::from_secs(5);
/// Time limit for the removal of the VM.
const REMOVE_LIMIT: Duration = Duration::from_secs(60);

/// Builds the image. The VM is removed, also after a failure and ^C, unless `--keep` is given.
pub(super) async fn build(client: &mut HostClient<Channel>, args: &ImageBuildArgs) -> Result<(), Failure> {
    let file = parse(&args.file)?;
    if let Some(dir) = &args.record {
        let failed = |e| Failure::usage(format!("directory {}: {e}", dir.display()));
        std::fs::create_dir_all(dir).map_err(failed)?;
    }
    let from = run::fetch(client, &file.from, Pull::Missing, args.progress).await?;
    if !from.is_disk {
        return Err(Failure::usage(format!(
            "{} is a container image: a build starts from a disk image",
            file.from
        )));
    }
    let mut request = request(&file, &args.file, &from.name)?;
    if !args.keep {
        request.metadata.extend([run::removal(RemoveWhen::Released)]);
    }
    let vm = client.create_vm(request).await?.into_inner();
    let _held = run::hold(client, &vm.id).await?;
    let built = tokio::select! {
        built = operate(client.clone(), &file, &vm, args) => built,
        () = stop_signal() => Err(Failure::new("COR-CLI-008", "interrupted")),
    };
    let keep = args.keep && built.is_err();
    if keep {
        let name = &vm.name;
        eprintln!("kept: coracle vnc {name}, coracle console {name}, coracle rm -f {name}");
    } else {
        let request = pb::DeleteVmRequest { vm: vm.id, force: true, ..Default::default() };
        let removed = tokio::time::timeout(REMOVE_LIMIT, client.delete_vm(request)).await;
        if built.is_ok() {
            removed
                .map_err(|_| tonic::Status::deadline_exceeded(format!("VM {} is not removed", vm.name)))??;
        }
    }
    built?;
    match (&file.image, args.push) {
        (Some(name), true) => transfer::push(client, name.clone(), String::new(), args.progress).await,
        (Some(name), false) => output::write(&format!("{name}\n")),
        (None, _) => Ok(()),
    }
}

fn parse(path: &Path) -> Result<BuildFile, Failure> {
    let wrong = |why: String| Failure::usage(format!("build file {}: {why}", path.display()));
    let text = std::fs::read_to_string(path).map_err(|e| wrong(e.to_string()))?;
    BuildFile::parse(&text, path.parent().unwrap_or(Path::new(""))).map_err(wrong)
}

fn request(file: &BuildFile, path: &Path, image: &str) -> Result<pb::CreateVmRequest, Failure> {
    let volume = |text: &String| {
        text.parse::<VolumeFlag>().map_err(|e| Failure::usage(format!("volume {text:?}: {e}")))
    };
    let volumes = file.volumes.iter().map(volume).collect::<Result<Vec<_>, _>>()?;
    let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    Ok(pb::CreateVmRequest {
        name: run::default_name(&stem),
        image: image.to_owned(),
        vcpus: file.cpus,
        memory_mib: file.memory,
        disk_mib: file.disk.unwrap_or(0),
        firmware: file.firmware.clone(),
        user_data: file.user_data.as_deref().map_or(Ok(String::new()), run::user_data)?,
        display: file.display.clone(),
        without_agent: true,
        volumes: volumes.iter().map(volume::from_flag).collect(),
        pull_policy: pb::PullPolicy::Never.into(),
        ..Default::default()
    })
}

/// Starts the VM, runs the steps, and makes the image.
async fn operate(
    mut client: HostClient<Channel>,
    file: &BuildFile,
    vm: &pb::Vm,
    args: &ImageBuildArgs,
) -> Result<(), Failure> {
    let mut progress = ProgressDisplay::new(args.progress);
    progress.step(&format!("starting {}", vm.name));
    client.start_vm(pb::StartVmRequest { vm: vm.id.clone(), ..Default::default() }).await?;
    // Aborts the streams when this function returns.
    let mut streams = JoinSet::new();
    let mut machine = connect(&client, &vm.id, &mut streams).await?;
    let count = file.steps.len();
    let done = run_steps(
        file,
        &mut machine,
        |n, step| progress.step(&format!("[{n}/{count}] {step}")),
        args.record.as_deref(),
    )
    .await;
    if let Err(error) = done {
        progress.done();
        let shot = failure_screenshot(&mut machine, args).await;
        let failure = Failure::new("COR-CLI-014", error.to_string());
        return Err(match shot {
            Some(path) => failure.help(format!("the screen at that moment: {}", path.display())),
            None => failure,
        });
    }
    if let Some(name) = &file.image {
        progress.step(&format!("keeping the disk as {name}"));
        client.commit_vm(pb::CommitVmRequest { vm: vm.id.clone(), reference: name.clone() }).await?;
    }
    progress.done();
    Ok(())
}

/// Connects to the display, the serial console and the exit of a running VM.
async fn connect(
    client: &HostClient<Channel>,
    vm: &str,
    streams: &mut JoinSet<()>,
) -> Result<Machine, Failure> {
    let (near, far) = duplex(SCREEN_BUFFER);
    let (own, id) = (client.clone(), vm.to_owned());
    // The other end of the stream shows when the display ends.
    streams.spawn(async move { drop(vnc::carry(far, own, id).await) });
    let screen = Screen::connect(near).await.map_err(|error| screen_failure(&error))?;

    let (requests, outgoing) = mpsc::channel(8);
    let start = Message::Start(pb::ConsoleStart { vm: vm.to_owned(), follow: true });
    let _open = requests.send(pb::ConsoleRequest { message: Some(start) }).await;
    let mut said = client.clone().console(ReceiverStream::new(outgoing)).await?.into_inner();
    let (printed, console) = mpsc::channel(64);
    let (typed, mut keys) = mpsc::channel(8);
    streams.spawn(async move {
        while let Ok(Some(chunk)) = said.message().await {
            if printed.send(chunk.data).await.is_err() {
                return;
            }
        }
    });
    streams.spawn(async move {
        while let Some(text) = keys.recv().await {
            let request = pb::ConsoleRequest { message: Some(Message::Data(text)) };
            if requests.send(request).await.is_err() {
                return;
            }
        }
        // The stream stays open: closing the input would end the console's output, too.
        std::future::pending::<()>().await;
    });

    let (off, is_off) = watch::channel(false);
    let (mut own, id) = (client.clone(), vm.to_owned());
    streams.spawn(async move {
        if own.wait_vm(pb::WaitVmRequest { vm: id }).await.is_ok() {
            off.send_replace(true);
        }
        off.closed().await;
    });
    Ok(Machine { screen, serial: Serial::new(console, typed), off: is_off })
}

fn screen_failure(error: &ScreenError) -> Failure {
    Failure::new("COR-CLI-014", crate::api_failure::chain(error)).exit(exit::FAILED)
}

/// Saves a screenshot of a failure and returns its path; `None` without a display.
async fn failure_screenshot(machine: &mut Machine, args: &ImageBuildArgs) -> Option<PathBuf> {
    let stem = args.file.file_stem()?.to_string_lossy().into_owned();
    let path = args.record.clone().unwrap_or_default().join(format!("{stem}-failed.png"));
    let shot = tokio::time::timeout(SCREENSHOT_LIMIT, machine.screen.refresh()).await;
    shot.ok()?.ok()?.write_png(&path).ok()?;
    Some(path)
}
