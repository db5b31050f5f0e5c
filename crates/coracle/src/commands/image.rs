//! `coracle image …`.

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use pb::pull_image_response::Message;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::cli::{Format, Global, ImageCommand, ProgressMode, Pull};
use crate::client::connect;
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::progress::Progress;

pub(crate) async fn run(global: &Global, command: ImageCommand) -> miette::Result<u8> {
    let mut client = connect(global).await?;
    match command {
        ImageCommand::Ls { output } => ls(&mut client, output).await?,
        ImageCommand::Pull { reference, progress } => {
            let image = pull(&mut client, &reference, Pull::Always, progress).await?;
            output::write(&format!("{}\n", image.digest))?;
        }
        ImageCommand::Import { source, reference } => {
            let image = import(&mut client, &source, reference.as_deref(), ProgressMode::Auto).await?;
            output::write(&format!("{}\n", image.digest))?;
        }
        ImageCommand::Inspect { output, reference } => {
            let image = client.get_image(pb::GetImageRequest { reference }).await.map_err(Failure::from)?;
            output::document(output, &document(&image.into_inner()))?;
        }
        ImageCommand::Rm { force, references } => {
            for reference in references {
                let request = pb::RemoveImageRequest { reference: reference.clone(), force };
                client.remove_image(request).await.map_err(Failure::from)?;
                output::write(&format!("{reference}\n"))?;
            }
        }
        ImageCommand::Prune { dry_run } => prune(&mut client, dry_run).await?,
    }
    Ok(0)
}

async fn ls(client: &mut HostClient<Channel>, format: Format) -> Result<(), Failure> {
    let images = client.list_images(pb::ListImagesRequest {}).await?.into_inner().images;
    match format {
        Format::Json | Format::Yaml => output::list(format, "Image", images.iter().map(document).collect()),
        Format::Name => output::write(
            &images.iter().flat_map(|i| &i.references).map(|r| format!("{r}\n")).collect::<String>(),
        ),
        Format::Table if images.is_empty() => {
            eprintln!("no images; fetch one with `coracle image pull REFERENCE`");
            Ok(())
        }
        Format::Table => {
            let mut columns = Columns::new(&["REFERENCE", "DIGEST", "ARCH", "SIZE", "USED BY"]);
            for image in &images {
                let digest = image.digest.get(..19).unwrap_or(&image.digest).to_owned();
                let references = if image.references.is_empty() {
                    vec!["<none>".to_owned()]
                } else {
                    image.references.clone()
                };
                for reference in references {
                    columns.row(&[
                        reference,
                        digest.clone(),
                        image.architecture.clone(),
                        output::bytes(image.size_bytes),
                        image.used_by.len().to_string(),
                    ]);
                }
            }
            columns.print()
        }
    }
}

/// Fetches an image and shows how it goes.
pub(crate) async fn pull(
    client: &mut HostClient<Channel>,
    reference: &str,
    when: Pull,
    progress: ProgressMode,
) -> Result<pb::Image, Failure> {
    let policy = match when {
        Pull::Missing => pb::PullPolicy::IfNotPresent,
        Pull::Always => pb::PullPolicy::Always,
        Pull::Never => pb::PullPolicy::Never,
    };
    let request = pb::PullImageRequest { reference: reference.to_owned(), policy: policy.into() };
    follow(client.pull_image(request).await?.into_inner(), progress).await
}

/// Takes an image from a folder or an archive and shows how it goes.
pub(crate) async fn import(
    client: &mut HostClient<Channel>,
    source: &str,
    reference: Option<&str>,
    progress: ProgressMode,
) -> Result<pb::Image, Failure> {
    let request = pb::ImportImageRequest {
        source: absolute(source),
        reference: reference.unwrap_or_default().to_owned(),
    };
    follow(client.import_image(request).await?.into_inner(), progress).await
}

/// The node has another working folder than the user.
fn absolute(source: &str) -> String {
    let absolute =
        |path: &str| std::path::absolute(path).map_or_else(|_| path.to_owned(), |p| p.display().to_string());
    match source.split_once(':') {
        Some((kind @ ("oci" | "docker-archive"), path)) => format!("{kind}:{}", absolute(path)),
        _ => source.to_owned(),
    }
}

async fn follow(
    mut events: tonic::Streaming<pb::PullImageResponse>,
    mode: ProgressMode,
) -> Result<pb::Image, Failure> {
    let mut progress = Progress::new(mode);
    while let Some(event) = events.message().await? {
        match event.message {
            Some(Message::Progress(step)) => progress.pull(&step),
            Some(Message::Image(image)) => {
                progress.done();
                return Ok(image);
            }
            None => {}
        }
    }
    Err(Failure::new("COR-RPC-015", "the node ended the pull without an image"))
}

async fn prune(client: &mut HostClient<Channel>, dry_run: bool) -> Result<(), Failure> {
    let report = client.prune_images(pb::PruneImagesRequest { dry_run }).await?.into_inner();
    for file in &report.removed {
        output::write(&format!("{file}\n"))?;
    }
    let verb = if dry_run { "would free" } else { "freed" };
    eprintln!("{verb} {} in {} files", output::bytes(report.freed_bytes), report.removed.len());
    Ok(())
}

fn document(image: &pb::Image) -> Value {
    json!({
        "apiVersion": "coracle.dev/v1",
        "kind": "Image",
        "metadata": {"name": image.references.first(), "digest": image.digest, "references": image.references},
        "status": {
            "architecture": image.architecture,
            "os": image.os,
            "sizeBytes": image.size_bytes,
            "layers": image.layers,
            "entrypoint": image.entrypoint,
            "cmd": image.cmd,
            "env": image.env,
            "user": image.user,
            "workdir": image.workdir,
            "usedBy": image.used_by,
        },
    })
}
