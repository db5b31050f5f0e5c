//! Executes one step. All decisions were made in the plan.

use std::time::Duration;

use coracle_types::Clock;
use jiff::Timestamp;
use tokio::time::{sleep, timeout};

use crate::outcome::Effect;
use crate::probe::ProbeOutcome;
use crate::probe::prober::{self, Network};
use crate::runtime::{Exec, PodObject, PodRuntime, RuntimeError};
use crate::step::{HookAction, Step};
use crate::time::until;
use coracle_record::ContainerId;

/// Time that a step may take in addition to its own grace or limit.
const MARGIN: Duration = Duration::from_secs(60);
/// Limit for booting, stopping or removing a VM.
const SANDBOX_LIMIT: Duration = Duration::from_secs(240);
/// Limit of an image pull. The end of the pod cancels a pull earlier.
const PULL_LIMIT: Duration = Duration::from_secs(3600);
/// Limit of guest calls without a limit of their own.
const CALL_LIMIT: Duration = Duration::from_secs(120);

/// Peers that execute steps.
pub(crate) struct Peers<'a> {
    pub(crate) runtime: &'a dyn PodRuntime,
    pub(crate) object: &'a dyn PodObject,
    pub(crate) network: &'a dyn Network,
    pub(crate) clock: &'a Clock,
}

/// Returns the wall-clock time as a timestamp.
pub(crate) fn now(clock: &Clock) -> Timestamp {
    Timestamp::from_millisecond(clock.now().0).unwrap_or_default()
}

/// Returns the time limit of a step.
fn limit(step: &Step, now: Timestamp) -> Duration {
    match step {
        Step::StartSandbox(_) | Step::RemoveSandbox => SANDBOX_LIMIT,
        Step::StopSandbox { grace } | Step::StopContainer { grace, .. } => grace.saturating_add(MARGIN),
        Step::PullImage { .. } => PULL_LIMIT,
        Step::RunHook { deadline, .. } => until(now, *deadline),
        Step::Probe { limit, .. } => limit.saturating_mul(3).saturating_add(MARGIN),
        Step::WriteVolume(_)
        | Step::RequestToken(_)
        | Step::CreateContainer { .. }
        | Step::StartContainer { .. }
        | Step::RemoveContainer { .. }
        | Step::MeasureVolumes { .. }
        | Step::Cancel(_) => CALL_LIMIT,
    }
}

/// Executes a step within its limit. Cancel-safe: every step may be repeated.
pub(crate) async fn execute(peers: &Peers<'_>, step: &Step) -> Result<Effect, RuntimeError> {
    let limit = limit(step, now(peers.clock));
    match timeout(limit, execute_step(peers, step)).await {
        Ok(result) => result,
        Err(_) => Err(RuntimeError::other(format!("no answer within {} s", limit.as_secs()))),
    }
}

async fn execute_step(peers: &Peers<'_>, step: &Step) -> Result<Effect, RuntimeError> {
    let runtime = peers.runtime;
    match step {
        Step::StartSandbox(spec) => runtime.start_sandbox(spec).await?,
        Step::StopSandbox { grace } => runtime.stop_sandbox(*grace).await?,
        Step::RemoveSandbox => runtime.remove_sandbox().await?,
        Step::WriteVolume(content) => runtime.write_volume(content).await?,
        Step::RequestToken(request) => {
            return peers.object.request_token(request, now(peers.clock)).await.map(Effect::Token);
        }
        Step::PullImage { image, policy, credentials, .. } => {
            runtime.pull_image(image, *policy, credentials).await?;
        }
        Step::CreateContainer { id, container, .. } => runtime.create_container(id, container).await?,
        Step::StartContainer { id, .. } => runtime.start_container(id).await?,
        Step::RunHook { id, action, deadline, .. } => {
            hook(peers, id, action, until(now(peers.clock), *deadline)).await?;
        }
        Step::StopContainer { id, grace, .. } => runtime.stop_container(id, *grace).await?,
        Step::RemoveContainer { id, .. } => runtime.remove_container(id).await?,
        Step::Probe { id, check, limit, .. } => {
            return Ok(Effect::Checked(prober::check(runtime, peers.network, id, check, *limit).await));
        }
        Step::MeasureVolumes { volumes } => {
            return runtime.measure_volumes(volumes).await.map(Effect::Measured);
        }
        // The task of the pod cancels steps itself.
        Step::Cancel(_) => {}
    }
    Ok(Effect::Done)
}

async fn hook(
    peers: &Peers<'_>,
    id: &ContainerId,
    action: &HookAction,
    limit: Duration,
) -> Result<(), RuntimeError> {
    match action {
        HookAction::Exec(argv) => match peers.runtime.exec(id, argv, limit).await? {
            Exec::Exited { code: 0, .. } => Ok(()),
            Exec::Exited { code, output } => {
                let said = output.trim();
                Err(RuntimeError::other(format!("command exited with code {code}: {said}")))
            }
            Exec::TimedOut => Err(RuntimeError::other("command did not end in time")),
        },
        HookAction::Http(request) => match peers.network.http(request, limit).await {
            ProbeOutcome::Success | ProbeOutcome::Warning(_) => Ok(()),
            ProbeOutcome::Failure(why) | ProbeOutcome::Unknown(why) => Err(RuntimeError::other(why)),
        },
        HookAction::Sleep(time) => {
            sleep((*time).min(limit)).await;
            Ok(())
        }
        HookAction::Invalid(why) => Err(RuntimeError::other(why.clone())),
    }
}
