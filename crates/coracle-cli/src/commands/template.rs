//! `coracle template …`.

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use serde_json::{Value, json};
use tonic::transport::Channel;

use crate::cli::{Format, Global, ProgressMode, TemplateCommand};
use crate::client::{connect_local, with_hint};
use crate::commands::vm::now_ms;
use crate::error::Failure;
use crate::output::{self, Columns};
use crate::progress::ProgressDisplay;
use crate::{suggest, view};

pub async fn run(global: &Global, command: TemplateCommand) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle template").await?;
    match command {
        TemplateCommand::Ls { output } => ls(&mut client, &output).await?,
        TemplateCommand::Warm { cpus, memory, disk, kernel } => {
            let mut progress = ProgressDisplay::new(ProgressMode::Auto);
            progress.step(&format!("booting a machine of {cpus} CPU and {memory} MiB to save it"));
            let request = pb::WarmTemplateRequest {
                vcpus: cpus,
                memory_mib: memory,
                kernel_path: kernel,
                disk_mib: disk.unwrap_or(0),
            };
            let taken = client.warm_template(request).await;
            progress.done();
            output::write(&format!("{}\n", taken.map_err(Failure::from)?.into_inner().key))?;
        }
        TemplateCommand::Rm { keys } => {
            for key in keys {
                let request = pb::DeleteTemplateRequest { key: key.clone() };
                if let Err(status) = client.delete_template(request).await {
                    return Err(hint_keys(&mut client, &key, status.into()).await.into());
                }
                output::write(&format!("{key}\n"))?;
            }
        }
    }
    Ok(0)
}

/// Adds similar template keys to the failure.
async fn hint_keys(client: &mut HostClient<Channel>, wanted: &str, failure: Failure) -> Failure {
    let known = client.list_templates(pb::ListTemplatesRequest {}).await;
    let keys: Vec<_> = known.map(|l| l.into_inner().templates).unwrap_or_default();
    with_hint(failure, suggest::hint(wanted, keys.iter().map(|t| t.key.as_str())))
}

async fn ls(client: &mut HostClient<Channel>, format: &Format) -> Result<(), Failure> {
    let all = client.list_templates(pb::ListTemplatesRequest {}).await?.into_inner().templates;
    match format {
        Format::Json | Format::Yaml | Format::JsonPath(_) => {
            output::list(format, "Template", all.iter().map(document).collect())
        }
        Format::Name => output::write(&all.iter().map(|t| format!("{}\n", t.key)).collect::<String>()),
        Format::Table | Format::Wide if all.is_empty() => {
            eprintln!("no templates; the first boot of a shape makes one, or `coracle template warm`");
            Ok(())
        }
        Format::Table | Format::Wide => table(&all, now_ms()).print(),
    }
}

fn table(all: &[pb::Template], now_ms: i64) -> Columns {
    let mut columns = Columns::new(&["KEY", "CPUS", "MEMORY", "RESIDENT", "TOOK", "POOLED", "AGE"]);
    for template in all {
        columns.row(&[
            template.key.clone(),
            template.vcpus.to_string(),
            format!("{} MiB", template.memory_mib),
            output::bytes(template.ram_bytes),
            format!("{:.1} s", f64::from(u32::try_from(template.took_ms).unwrap_or(u32::MAX)) / 1000.0),
            if template.pooled { "yes" } else { "no" }.to_owned(),
            output::age(now_ms - template.taken_at_ms),
        ]);
    }
    columns
}

fn document(template: &pb::Template) -> Value {
    json!({
        "apiVersion": output::API_VERSION,
        "kind": "Template",
        "metadata": {"name": template.key},
        "spec": {
            "cpus": template.vcpus,
            "memoryMiB": template.memory_mib,
            "diskMiB": (template.disk_mib > 0).then_some(template.disk_mib),
        },
        "status": {
            "takenAt": view::time(template.taken_at_ms),
            "tookMs": template.took_ms,
            "saveMs": template.save_ms,
            "residentBytes": template.ram_bytes,
            "pooled": template.pooled,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn golden_table() {
        let template = |key: &str, memory_mib, took_ms| pb::Template {
            key: key.into(),
            vcpus: 2,
            memory_mib,
            taken_at_ms: 1_000_000,
            took_ms,
            ram_bytes: 57 << 20,
            save_ms: 21,
            disk_mib: 256,
            pooled: memory_mib == 256,
        };
        let all = [template("0123456789abcdef", 256, 3210), template("fedcba9876543210", 16384, 12_345)];
        insta::assert_snapshot!(table(&all, 4_600_000).text());
    }
}
