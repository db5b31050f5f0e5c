//! `coracle volume …`.

use coracle_proto::host as pb;

use crate::cli::{Format, Global, VolumeCommand, VolumeFlag};
use crate::client::{NameMatch, connect_local, find, with_hint};
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::suggest;
use crate::view::Volume;

pub async fn run(global: &Global, command: VolumeCommand) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle volume").await?;
    match command {
        VolumeCommand::Attach { vm, source, target, name, read_only, size } => {
            let before = find(&mut client, &vm, NameMatch::Exact).await?;
            let size_mib = size.unwrap_or(0);
            let volume =
                pb::Volume { name, source: source.0, target, read_only, size_mib, ..Default::default() };
            let request = pb::AttachVolumeRequest { vm: before.id.clone(), volume: Some(volume) };
            let after = client.attach_volume(request).await.map_err(Failure::from)?.into_inner();
            let is_new = |v: &&pb::Volume| before.volumes.iter().all(|old| old.name != v.name);
            for volume in after.volumes.iter().filter(is_new) {
                output::write(&format!("{}\n", volume.name))?;
                eprintln!("{} of {} is {}", volume.name, after.name, volume.target);
            }
        }
        VolumeCommand::Detach { vm, volume } => {
            let found = find(&mut client, &vm, NameMatch::Exact).await?;
            let request = pb::DetachVolumeRequest { vm: found.id, volume: volume.clone() };
            if let Err(status) = client.detach_volume(request).await {
                let names = found.volumes.iter().map(|v| v.name.as_str());
                let near = (status.code() == tonic::Code::NotFound).then(|| suggest::hint(&volume, names));
                return Err(with_hint(status.into(), near.flatten()).into());
            }
            output::write(&format!("{volume}\n"))?;
        }
        VolumeCommand::Ls { vm, output } => {
            let found = find(&mut client, &vm, NameMatch::Prefix).await?;
            let volumes: Vec<_> = found.volumes.iter().map(Volume::of_node).collect();
            list(&output, &found.name, &volumes)?;
        }
    }
    Ok(0)
}

/// Converts a flag of `coracle run` to a request to the node.
pub fn from_flag(flag: &VolumeFlag) -> pb::Volume {
    pb::Volume {
        source: flag.source.clone(),
        target: flag.target.clone(),
        read_only: flag.read_only,
        size_mib: flag.size_mib,
        ..pb::Volume::default()
    }
}

fn list(format: &Format, vm: &str, volumes: &[Volume]) -> Result<(), Failure> {
    match format {
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            let documents = volumes.iter().map(|volume| volume.document(vm)).collect();
            output::list(format, "Volume", documents)
        }
        Format::Name => output::write(&volumes.iter().map(|v| format!("{}\n", v.name)).collect::<String>()),
        Format::Table | Format::Wide if volumes.is_empty() => {
            eprintln!("{vm} has no volumes; give it one: coracle volume attach {vm} SOURCE");
            Ok(())
        }
        Format::Table | Format::Wide => table(volumes).print(),
    }
}

fn table(volumes: &[Volume]) -> Columns {
    let mut columns = Columns::new(&["NAME", "KIND", "ACCESS", "TARGET", "SOURCE"]);
    for volume in volumes {
        let access = if volume.read_only { "ro" } else { "rw" };
        columns.row(&[
            volume.name.clone(),
            volume.kind.to_owned(),
            access.to_owned(),
            volume.target.clone(),
            volume.source.clone(),
        ]);
    }
    columns
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_table() {
        let volume = |name: &str, source: &str, kind: pb::volume::Kind, read_only| pb::Volume {
            name: name.into(),
            source: source.into(),
            target: format!("/mnt/{name}"),
            read_only,
            kind: kind.into(),
            ..pb::Volume::default()
        };
        let all = [
            volume("data", "/var/lib/coracle/volumes/data.ext4", pb::volume::Kind::Disk, false),
            volume("scratch-space", "/srv/scratch.img", pb::volume::Kind::Block, false),
            volume("www", "/srv/www", pb::volume::Kind::SharedDir, true),
        ];
        let all: Vec<_> = all.iter().map(Volume::of_node).collect();
        insta::assert_snapshot!(table(&all).text());
    }
}
