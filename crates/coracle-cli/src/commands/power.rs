//! `coracle start`, `stop`, `pause`, `resume` and `hibernate`.

use std::time::Duration;

use coracle_proto::host as pb;
use pb::host_client::HostClient;
use tonic::transport::Channel;

use crate::cli::{Global, StartArgs, StopArgs};
use crate::client::{NameMatch, connect_local, find, with_timeout};
use crate::error::Failure;
use crate::output;

/// Change of a VM's power state.
#[derive(Clone, Copy, Debug)]
pub enum Verb {
    Start,
    Pause,
    Resume,
    Hibernate,
}

impl Verb {
    fn word(self) -> &'static str {
        match self {
            Self::Start => "start",
            Self::Pause => "pause",
            Self::Resume => "resume",
            Self::Hibernate => "hibernate",
        }
    }

    async fn send_request(self, client: &mut HostClient<Channel>, vm: String) -> Result<pb::Vm, Failure> {
        let answer = match self {
            Self::Start => client.start_vm(pb::StartVmRequest { vm, ..Default::default() }).await,
            Self::Pause => client.pause_vm(pb::PauseVmRequest { vm, ..Default::default() }).await,
            Self::Resume => client.resume_vm(pb::ResumeVmRequest { vm, ..Default::default() }).await,
            Self::Hibernate => client.hibernate_vm(pb::HibernateVmRequest { vm, ..Default::default() }).await,
        };
        Ok(answer?.into_inner())
    }
}

/// Applies the change to one VM after the other and prints their names.
pub async fn run(global: &Global, verb: Verb, args: StartArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, &format!("coracle {}", verb.word())).await?;
    for name in args.vms {
        let id = find(&mut client, &name, NameMatch::Exact).await?.id;
        let what = format!("{} {name}", verb.word());
        let vm = with_timeout(args.timeout, &what, verb.send_request(&mut client, id)).await?;
        output::write(&format!("{}\n", vm.name))?;
    }
    Ok(0)
}

/// `coracle stop`.
pub async fn stop(global: &Global, args: StopArgs) -> miette::Result<u8> {
    let mut client = connect_local(global, "coracle stop").await?;
    let grace = Duration::try_from(args.timeout).map_err(|_| Failure::usage("a timeout is not negative"))?;
    let grace_ms = u32::try_from(grace.as_millis()).unwrap_or(u32::MAX);
    for name in args.vms {
        let vm = find(&mut client, &name, NameMatch::Exact).await?;
        let request = pb::StopVmRequest { vm: vm.id, grace_ms: Some(grace_ms), ..Default::default() };
        let vm = client.stop_vm(request).await.map_err(Failure::from)?.into_inner();
        output::write(&format!("{}\n", vm.name))?;
    }
    Ok(0)
}
