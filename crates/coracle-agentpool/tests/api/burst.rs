//! Fifty VMs at once, as in the benchmark: all of them are recorded.

use std::time::Duration;

use coracle_testkit::{cluster, eventually_within};
use kube::{ResourceExt as _, api::ListParams};

use crate::{
    sims::Style,
    world::{World, ready},
};

/// Number of VMs created at once.
const BURST: usize = 50;
/// Time limit of a round; a round takes some seconds.
const ROUND: Duration = Duration::from_secs(100);

/// Number of rounds, each with a fresh vCenter: one in tests, `CORACLE_ROUNDS` in soak.
fn rounds() -> u32 {
    std::env::var("CORACLE_ROUNDS").ok().and_then(|n| n.parse().ok()).unwrap_or(1)
}

#[test]
fn burst_of_fifty_vms_is_recorded_whole() {
    cluster::run_within((ROUND + Duration::from_secs(20)) * rounds(), |cluster| async move {
        for round in 0..rounds() {
            let Some(mut w) = World::real(cluster, &[]).await? else { return anyhow::Ok(()) };
            w.simulate_provider(Style::Old);
            w.pool(|_| {}).await?;
            let operator = w.operator();
            w.scale(1).await?;
            until_recorded(&w, 1, round).await?;
            let began = std::time::Instant::now();
            w.scale(1 + BURST).await?;
            until_recorded(&w, 1 + BURST, round).await?;
            eprintln!("round {round}: {:?}", began.elapsed());
            operator.stop().await?;
        }
        Ok(())
    });
}

/// Waits until `n` VMs run and their identity is recorded. The error names the missing ones, with everything that is known
/// about them.
async fn until_recorded(w: &World, n: usize, round: u32) -> anyhow::Result<()> {
    let recorded = async || {
        let all = w.requests().list(&ListParams::default()).await.unwrap().items;
        let whole =
            |vm: &coracle_api::agentpool::OwnedVm| !vm.bios_uuid.is_empty() && !vm.mac_address.is_empty();
        let missing: Vec<_> = all.iter().filter(|r| !r.vm().is_some_and(whole)).cloned().collect();
        (all.len() - missing.len(), missing)
    };
    let done = eventually_within(ROUND, "", async || (recorded().await.0 == n).then_some(())).await;
    if done.is_ok() {
        return Ok(());
    }
    let (count, missing) = recorded().await;
    let known: Vec<_> = missing.iter().map(|r| (r.name_any(), ready(r), r.annotations(), r.vm())).collect();
    let calls = w.vcenter.vcsim().calls()?;
    let vms: Vec<_> = w.vcenter.vms().await.into_iter().map(|vm| (vm.name, vm.powered_on, vm.mac)).collect();
    anyhow::bail!("round {round}: {count} of {n} VMs are recorded; missing {known:#?}\n{calls:?}\n{vms:?}")
}
