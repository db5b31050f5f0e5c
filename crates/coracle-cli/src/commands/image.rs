//! `coracle image …`.

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use serde_json::{Value, json};
use tokio_stream::StreamExt;
use tonic::transport::Channel;

use crate::cli::{CommitArgs, Format, Global, ImageCommand, ProgressMode, Pull};
use crate::client::{NameMatch, connect_local, find, with_hint};
use crate::commands::{archive, disk, image_build, transfer};
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::progress::ProgressDisplay;
use crate::suggest;

pub async fn run(global: &Global, command: ImageCommand) -> miette::Result<u8> {
    let connect = || connect_local(global, "coracle image");
    match command {
        ImageCommand::Ls { output } => ls(&mut connect().await?, &output).await?,
        ImageCommand::Build(args) => image_build::build(&mut connect().await?, &args).await?,
        ImageCommand::Push(args) => match args.disk.clone() {
            Some(file) => disk::push(args, &file).await?,
            None => {
                let target = args.target.unwrap_or_default();
                transfer::push(&mut connect().await?, args.reference, target, args.progress).await?;
            }
        },
        ImageCommand::Tag { reference, name } => {
            let mut client = connect().await?;
            let request = pb::TagImageRequest { reference: reference.clone(), name: name.clone() };
            match client.tag_image(request).await {
                Ok(_) => output::write(&format!("{name}\n"))?,
                Err(status) => return Err(hint_names(&mut client, &reference, status.into()).await.into()),
            }
        }
        ImageCommand::Export { reference, file } => {
            let mut client = connect().await?;
            match client.export_image(pb::ExportImageRequest { reference: reference.clone() }).await {
                Ok(pieces) => archive::save(pieces.into_inner().map(|p| p.map(|p| p.data)), &file).await?,
                Err(status) => return Err(hint_names(&mut client, &reference, status.into()).await.into()),
            }
        }
        ImageCommand::Pull { reference, disk: Some(file), registries, progress } => {
            disk::pull(&reference, &file, &registries, progress).await?;
        }
        ImageCommand::Pull { reference, disk: None, progress, .. } => {
            let image = transfer::pull(&mut connect().await?, &reference, Pull::Always, progress).await?;
            output::write(&format!("{}\n", image.digest))?;
        }
        ImageCommand::Import { source, reference } => {
            let mut client = connect().await?;
            let image =
                transfer::import(&mut client, &source, reference.as_deref(), ProgressMode::Auto).await?;
            output::write(&format!("{}\n", image.digest))?;
        }
        ImageCommand::Inspect { output, reference } => {
            let mut client = connect().await?;
            let image = match client.get_image(pb::GetImageRequest { reference: reference.clone() }).await {
                Ok(image) => image.into_inner(),
                Err(status) => return Err(hint_names(&mut client, &reference, status.into()).await.into()),
            };
            print(&output, &image)?;
        }
        ImageCommand::Rm { force, references } => {
            let mut client = connect().await?;
            for reference in references {
                let request = pb::RemoveImageRequest { reference: reference.clone(), force };
                if let Err(status) = client.remove_image(request).await {
                    return Err(hint_names(&mut client, &reference, status.into()).await.into());
                }
                output::write(&format!("{reference}\n"))?;
            }
        }
        ImageCommand::Prune { dry_run } => prune(&mut connect().await?, dry_run).await?,
    }
    Ok(0)
}

/// `coracle commit`.
pub async fn commit(global: &Global, args: CommitArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle commit").await?;
    let vm = find(&mut client, &args.vm, NameMatch::Exact).await?.id;
    let mut progress = ProgressDisplay::new(args.progress);
    progress.step(&format!("reading the root of {}", args.vm));
    let request = pb::CommitVmRequest { vm, reference: args.reference.clone() };
    let made = client.commit_vm(request).await;
    progress.done();
    let image = made.map_err(Failure::from)?.into_inner();
    match args.push {
        true => transfer::push(&mut client, args.reference, String::new(), args.progress).await?,
        false => output::write(&format!("{}\n", image.digest))?,
    }
    Ok(0)
}

/// Adds the names of similar images to the failure.
async fn hint_names(client: &mut HostClient<Channel>, wanted: &str, failure: Failure) -> Failure {
    let known = client.list_images(pb::ListImagesRequest {}).await.map(|l| l.into_inner().images);
    let names: Vec<_> = known.unwrap_or_default().into_iter().flat_map(|i| i.references).collect();
    if names.iter().any(|name| name == wanted) {
        return failure; // the image exists; the failure has another reason
    }
    with_hint(failure, suggest::hint(wanted, names.iter().map(String::as_str)))
}

async fn ls(client: &mut HostClient<Channel>, format: &Format) -> Result<(), Failure> {
    let images = client.list_images(pb::ListImagesRequest {}).await?.into_inner().images;
    match format {
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            output::list(format, "Image", images.iter().map(document).collect())
        }
        Format::Name => output::write(
            &images.iter().flat_map(|i| &i.references).map(|r| format!("{r}\n")).collect::<String>(),
        ),
        Format::Table | Format::Wide if images.is_empty() => {
            eprintln!("no images; fetch one with `coracle image pull REFERENCE`");
            Ok(())
        }
        Format::Table | Format::Wide => table(&images, *format == Format::Wide).print(),
    }
}

fn print(format: &Format, image: &pb::Image) -> Result<(), Failure> {
    match format {
        Format::Table | Format::Wide => table(std::slice::from_ref(image), *format == Format::Wide).print(),
        Format::Name => output::write(&image.references.iter().map(|r| format!("{r}\n")).collect::<String>()),
        Format::Json | Format::Yaml | Format::JsonPath(_) => output::document(format, &document(image)),
    }
}

/// Returns a table with a row per name; an image without a name has a row, too.
fn table(images: &[pb::Image], wide: bool) -> Columns {
    let mut header = vec!["REFERENCE", "DIGEST", "ARCH", "SIZE", "USED BY"];
    if wide {
        header.extend(["LAYERS", "ROOTFS", "COMMAND"]);
    }
    let mut columns = Columns::new(&header);
    for image in images {
        let short = image.digest.get(..19).unwrap_or(&image.digest).to_owned();
        let digest = if wide { image.digest.clone() } else { short };
        let none = vec!["<none>".to_owned()];
        let references = if image.references.is_empty() { &none } else { &image.references };
        for reference in references {
            let mut row = vec![
                reference.clone(),
                digest.clone(),
                if image.disk_bytes > 0 { "disk".to_owned() } else { image.architecture.clone() },
                output::bytes(image.size_bytes),
                image.used_by.len().to_string(),
            ];
            if wide {
                let command: Vec<_> = image.entrypoint.iter().chain(&image.cmd).cloned().collect();
                let root = image.rootfs_bytes.max(image.disk_bytes);
                row.extend([image.layers.to_string(), output::bytes(root), command.join(" ")]);
            }
            columns.row(&row);
        }
    }
    columns
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
        "apiVersion": output::API_VERSION,
        "kind": "Image",
        "metadata": {"name": image.references.first(), "digest": image.digest, "references": image.references},
        "status": {
            "architecture": image.architecture,
            "os": image.os,
            "sizeBytes": image.size_bytes,
            "diskBytes": image.disk_bytes,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_table_and_document() {
        let image = pb::Image {
            digest: "sha256:00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff".into(),
            references: vec!["localhost/coracle/demo:1".into(), "localhost/coracle/demo:latest".into()],
            architecture: "amd64".into(),
            os: "linux".into(),
            size_bytes: 3 << 20,
            rootfs_bytes: 2 << 20,
            cmd: vec!["/bin/sh".into(), "-c".into(), "httpd".into()],
            env: vec!["PATH=/bin".into()],
            layers: 1,
            used_by: vec!["web".into()],
            ..pb::Image::default()
        };
        let bare = pb::Image { references: vec![], used_by: vec![], ..image.clone() };
        let images = [image, bare];
        insta::assert_snapshot!("image_table", table(&images, false).text());
        insta::assert_snapshot!("image_wide", table(&images, true).text());
        insta::assert_json_snapshot!("image_document", document(&images[0]));
    }
}
