//! `coracle ps`, `inspect`, `rm` and `wait`.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use coracle_proto::host as pb;
use kube::ResourceExt;
use kube::api::DeleteParams;
use pb::host_client::HostClient;
use tokio::time::sleep;
use tonic::transport::Channel;

use crate::api_failure::request_failure;
use crate::cli::{Format, Global, InspectArgs, PsArgs, RmArgs, Until, WaitArgs};
use crate::client::{NameMatch, connect, find, with_timeout};
use crate::cluster::Cluster;
use crate::error::Failure;
use crate::output;
use crate::view::{self, Vm};

/// Poll interval while waiting.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// `coracle ps`.
pub async fn ps(global: &Global, args: PsArgs) -> miette::Result<u8> {
    let all: Vec<Vm> = if global.is_remote() {
        let cluster = Cluster::open(global).await?;
        let (objects, nodes) = (cluster.list().await?, cluster.nodes().await);
        objects.iter().map(|vm| Vm::of_object(vm, &nodes)).collect()
    } else {
        let vms = connect(global).await?.list_vms(pb::ListVmsRequest {}).await.map_err(Failure::from)?;
        vms.into_inner().vms.iter().map(Vm::of_node).collect()
    };
    let hidden = all.iter().filter(|vm| vm.is_off()).count();
    let vms: Vec<_> = all.into_iter().filter(|vm| args.all || !vm.is_off()).collect();
    let format = if args.quiet { Format::Name } else { args.output };
    if format.is_table() && vms.is_empty() {
        eprintln!("{}", empty_list_hint(global, args.all, hidden));
        return Ok(0);
    }
    print(&format, &vms, global.all_namespaces, true)?;
    Ok(0)
}

/// Explains an empty list, and what to do about it.
fn empty_list_hint(global: &Global, all: bool, hidden: usize) -> String {
    let hint = match (hidden, global.is_remote()) {
        (0, true) => "create one: kubectl apply -f examples/mikromvm.yaml".to_owned(),
        (0, false) => "start one with `coracle run IMAGE`".to_owned(),
        (n, _) => format!("{n} that do not: coracle ps -a"),
    };
    format!("no VMs{}; {hint}", if all { "" } else { " run" })
}

fn print(format: &Format, vms: &[Vm], namespaces: bool, list: bool) -> Result<(), Failure> {
    if format.is_table() {
        let now = jiff::Timestamp::from_millisecond(now_ms()).unwrap_or_default();
        return view::table(vms, *format == Format::Wide, namespaces, now).print();
    }
    if *format == Format::Name {
        let name = |vm: &Vm| match namespaces {
            true => format!("{}/{}\n", vm.metadata.namespace, vm.metadata.name),
            false => format!("{}\n", vm.metadata.name),
        };
        return output::write(&vms.iter().map(name).collect::<String>());
    }
    let documents = vms.iter().map(Vm::document).collect::<Result<Vec<_>, _>>()?;
    match documents.as_slice() {
        [one] if !list => output::document(format, one),
        _ => output::list(format, "VM", documents),
    }
}

/// `coracle inspect`.
pub async fn inspect(global: &Global, args: InspectArgs) -> miette::Result<u8> {
    let mut found = Vec::new();
    for name in &args.vms {
        found.push(load_vm(global, name).await?);
    }
    print(&args.output, &found, global.all_namespaces, false)?;
    Ok(0)
}

/// Returns one VM with all known data, from this node or from the cluster.
pub(crate) async fn load_vm(global: &Global, name: &str) -> Result<Vm, Failure> {
    if !global.is_remote() {
        return Ok(Vm::of_node(&find(&mut connect(global).await?, name, NameMatch::Prefix).await?));
    }
    let cluster = Cluster::open(global).await?;
    let object = cluster.get(name, NameMatch::Prefix).await?;
    let vm = Vm::of_object(&object, &cluster.nodes().await);
    // If the node does not answer, the data of the cluster are shown alone.
    Ok(match cluster.instance(&object).await {
        Ok((_, known)) => vm.with_node(&known),
        Err(_) => vm,
    })
}

/// `coracle rm`. Continues after a failure and reports the first.
pub async fn rm(global: &Global, args: RmArgs) -> miette::Result<u8> {
    let mut failure = None;
    for name in &args.vms {
        let removed = async {
            match global.is_remote() {
                true => remove_object(global, name, args.force).await,
                false => remove(global, name, args.force).await,
            }
        };
        match with_timeout(args.timeout, &format!("remove {name}"), removed).await {
            Ok(name) => output::write(&format!("{name}\n"))?,
            Err(new) => {
                let _later_ones_are_like_it = failure.get_or_insert(new);
            }
        }
    }
    match failure {
        None => Ok(0),
        Some(failure) => Err(failure.into()),
    }
}

async fn remove(global: &Global, name: &str, force: bool) -> Result<String, Failure> {
    let mut client = connect(global).await?;
    let vm = find(&mut client, name, NameMatch::Exact).await?;
    client.delete_vm(pb::DeleteVmRequest { vm: vm.id, force, ..Default::default() }).await?;
    Ok(vm.name)
}

/// Deletes the object and waits until it is gone together with its VM.
async fn remove_object(global: &Global, name: &str, force: bool) -> Result<String, Failure> {
    let cluster = Cluster::open(global).await?;
    let object = cluster.get(name, NameMatch::Exact).await?;
    if !force && !Vm::of_object(&object, &[]).is_off() {
        let message = format!("MikromVM {} is not off", object.name_any());
        let failure = Failure::new("COR-VM-005", message).exit(crate::error::exit::CONFLICT);
        return Err(failure.help("use --force to remove it anyway"));
    }
    let api = cluster.namespaced_api(&object);
    match api.delete(&object.name_any(), &DeleteParams::default()).await {
        Err(kube::Error::Api(status)) if status.code == 404 => {}
        outcome => outcome.map(drop).map_err(|e| request_failure("delete the MikromVM", &e))?,
    }
    wait_deleted(&cluster, &object).await?;
    Ok(object.name_any())
}

async fn wait_deleted(cluster: &Cluster, object: &coracle_api::MikromVM) -> Result<(), Failure> {
    let api = cluster.namespaced_api(object);
    loop {
        let found = api.get_opt(&object.name_any()).await;
        match found.map_err(|e| request_failure("look at the MikromVM", &e))? {
            Some(found) if found.uid() == object.uid() => sleep(POLL_INTERVAL).await,
            _ => return Ok(()),
        }
    }
}

/// `coracle wait`.
pub async fn wait(global: &Global, args: WaitArgs) -> miette::Result<u8> {
    for name in &args.vms {
        let what = format!("{name} is not {}", word(args.until));
        let said = with_timeout(args.timeout, &what, wait_one(global, name, args.until)).await?;
        output::write(&format!("{said}\n"))?;
    }
    Ok(0)
}

fn word(until: Until) -> &'static str {
    match until {
        Until::Off => "off",
        Until::Running => "running",
        Until::Gone => "gone",
    }
}

/// Waits for one VM and returns what to print: the exit code of a VM that is off, else its name.
async fn wait_one(global: &Global, name: &str, until: Until) -> Result<String, Failure> {
    if !global.is_remote() {
        let mut client = connect(global).await?;
        let vm = match find(&mut client, name, NameMatch::Exact).await {
            Err(failure) if until == Until::Gone && failure.exit == crate::error::exit::NOT_FOUND => {
                return Ok(name.to_owned());
            }
            vm => vm?,
        };
        return wait_on_node(&mut client, vm, until).await;
    }
    let cluster = Cluster::open(global).await?;
    let object = match cluster.get(name, NameMatch::Exact).await {
        Err(failure) if until == Until::Gone && failure.exit == crate::error::exit::NOT_FOUND => {
            return Ok(name.to_owned());
        }
        object => object?,
    };
    match until {
        Until::Gone => wait_deleted(&cluster, &object).await.map(|()| object.name_any()),
        Until::Running => loop {
            let seen = Vm::of_object(&cluster.get(&object.name_any(), NameMatch::Exact).await?, &[]);
            if seen.status.state == "Running" {
                return Ok(seen.metadata.name);
            }
            sleep(POLL_INTERVAL).await;
        },
        Until::Off => {
            let (mut node, vm) = cluster.instance(&object).await?;
            wait_on_node(&mut node, vm, Until::Off).await
        }
    }
}

async fn wait_on_node(client: &mut HostClient<Channel>, vm: pb::Vm, until: Until) -> Result<String, Failure> {
    match until {
        Until::Off => {
            let off = client.wait_vm(pb::WaitVmRequest { vm: vm.id }).await?.into_inner();
            Ok(exit_of(&off).to_string())
        }
        Until::Running => loop {
            let seen = client
                .get_vm(pb::GetVmRequest { vm: vm.id.clone(), exact: true, ..Default::default() })
                .await?
                .into_inner();
            match seen.state() {
                pb::VmState::Running => return Ok(seen.name),
                pb::VmState::Failed => {
                    let why = crate::error::printable(&seen.message);
                    let help = format!("the whole story: coracle explain {}", seen.name);
                    return Err(
                        Failure::new("COR-GST-002", format!("VM {} failed: {why}", seen.name)).help(help)
                    );
                }
                _ => sleep(POLL_INTERVAL).await,
            }
        },
        Until::Gone => loop {
            match client
                .get_vm(pb::GetVmRequest { vm: vm.id.clone(), exact: true, ..Default::default() })
                .await
            {
                Ok(_) => sleep(POLL_INTERVAL).await,
                Err(status) if status.code() == tonic::Code::NotFound => return Ok(vm.name),
                Err(status) => return Err(status.into()),
            }
        },
    }
}

/// Returns the guest's exit code, or the command's own if the guest had none.
pub fn exit_of(vm: &pb::Vm) -> u8 {
    match &vm.exit {
        Some(exit) => u8::try_from(exit.code).unwrap_or(u8::MAX),
        None if vm.state() == pb::VmState::Failed => crate::error::exit::OURS,
        None => 0,
    }
}

/// Returns the wall clock time in milliseconds, for ages that are shown to users.
pub fn now_ms() -> i64 {
    #[expect(clippy::disallowed_methods, reason = "an age is shown to a person at this moment")]
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(now.as_millis()).unwrap_or(i64::MAX)
}

/// Returns the wall clock time minus `span`, for `--since`.
pub fn before_now_ms(span: jiff::SignedDuration) -> i64 {
    now_ms().saturating_sub(i64::try_from(span.as_millis()).unwrap_or(i64::MAX))
}
