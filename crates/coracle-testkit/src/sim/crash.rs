//! Crash test for all controllers: stop after call k, for every k.

use std::{
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, ensure};
use futures_util::future::BoxFuture;
use kube::Client;
use tokio::{task::JoinSet, time::timeout};

use super::{Sim, fuse::Fuse};

/// Longest run of a scenario, on the clock of the simulation.
const LIMIT: Duration = Duration::from_secs(3600);
/// Limit of calls per run: a controller that does not come to rest would never end.
const CALLS_MAX: usize = 10_000;

/// Controller with its peers in a simulation.
pub trait Scenario {
    /// Controller under test. It runs until its future is dropped. Its calls to the API server go through `client`, and its
    /// other peers call [`Sim::after_call`].
    fn controller(&self, client: Client) -> BoxFuture<'static, ()>;

    /// Actions of users. Each step waits until the controller has converged, and fails when it does not.
    fn script(&self) -> impl Future<Output = anyhow::Result<()>>;

    /// Facts about the peers at the end that no crash may change: what was created how often, and what is left.
    fn facts(&self) -> Vec<String>;
}

/// Runs the scenario once without a crash, and then once for each call that the controller made. After that call, the
/// controller is dropped at that point, the answer is lost, and the controller is started again. The runs are spread over the
/// processors. Returns the number of calls.
///
/// # Errors
/// When a run does not converge, or ends with other facts or another inventory of the API server than the run without a crash:
/// something was created twice, or leaked. Of several such runs, the one with the earliest crash is reported.
pub fn crash_after_each_call<S, Fut>(seed: u64, start: impl Fn(Sim) -> Fut + Sync) -> anyhow::Result<usize>
where
    S: Scenario,
    Fut: Future<Output = anyhow::Result<S>>,
{
    let calm = run(seed, &Fuse::default(), &start).context("without a crash")?;
    ensure!(calm.calls.len() < CALLS_MAX, "the controller does not come to rest");
    let (next, failure) = (AtomicUsize::new(0), Mutex::new(None::<(usize, anyhow::Error)>));
    let work = || {
        loop {
            let k = next.fetch_add(1, Ordering::Relaxed);
            if k >= calm.calls.len() {
                return;
            }
            let fuse = Fuse::new(Some(k));
            let compared =
                run(seed, &fuse, &start).and_then(|crashed| crashed.ends_as(&calm)).with_context(|| {
                    // The order of concurrent calls may differ from the run without a crash.
                    let call =
                        fuse.calls().into_iter().nth(k).unwrap_or_else(|| "which was not made".to_owned());
                    format!("crash after call {k}, {call}")
                });
            if let Err(error) = compared {
                next.store(calm.calls.len(), Ordering::Relaxed); // starts no further runs; those with earlier crashes have begun
                let mut failure = failure.lock().unwrap_or_else(PoisonError::into_inner);
                if failure.as_ref().is_none_or(|(first, _)| k < *first) {
                    *failure = Some((k, error));
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, usize::from) {
            scope.spawn(work);
        }
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(calm.calls.len()),
    }
}

struct Run {
    calls: Vec<String>,
    /// Facts, followed by the inventory of the API server.
    end: Vec<String>,
}

impl Run {
    fn ends_as(&self, calm: &Self) -> anyhow::Result<()> {
        let (end, want) = (&self.end, &calm.end);
        ensure!(end == want, "the end is\n{end:#?}\nand without a crash\n{want:#?}");
        Ok(())
    }
}

fn run<S, Fut>(seed: u64, fuse: &Fuse, start: &impl Fn(Sim) -> Fut) -> anyhow::Result<Run>
where
    S: Scenario,
    Fut: Future<Output = anyhow::Result<S>>,
{
    let body = async |sim: Sim| {
        let scenario = start(sim.clone()).await?;
        sim.set_fuse(fuse.clone());
        let mut controller = JoinSet::new();
        controller.spawn(scenario.controller(sim.api().client_with(fuse.clone())));
        let crash = async {
            fuse.blown().await;
            controller.shutdown().await;
            fuse.disarm();
            controller.spawn(scenario.controller(sim.api().client()));
            std::future::pending::<()>().await;
        };
        let done = tokio::select! {
            done = timeout(LIMIT, scenario.script()) => done,
            () = crash => anyhow::bail!("a pending future ended"),
        };
        done.context("the script did not end")??;
        let calls = fuse.calls();
        sim.set_fuse(Fuse::default());
        Ok(Run { calls, end: [scenario.facts(), sim.api().inventory()].concat() })
    };
    super::block_on(seed, body)
}
