//! Leader election on a real API server: one leader at a time, and the old leader stops before the new one starts.
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    reason = "helpers of tests fail like tests"
)]

use std::{
    sync::{Arc, Mutex},
    time::Duration,
};

use coracle_reconcile::{Clock, Election, ElectionError};
use coracle_testkit::{cluster, eventually};
use k8s_openapi::api::coordination::v1::Lease;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::json;
use tokio::{task::JoinSet, time::Instant};
use tokio_util::sync::CancellationToken;

fn election(ns: &str, who: &str) -> Election {
    let ms = Duration::from_millis;
    Election { lease: ms(1000), renew_deadline: ms(600), retry: ms(100), ..Election::new(ns, "group", who) }
}

#[derive(Clone, Debug, PartialEq)]
enum Change {
    Begins(&'static str),
    Ends(&'static str),
}

type Log = Arc<Mutex<Vec<(Instant, Change)>>>;

/// Logs the end of the work, also when it is dropped.
struct Leads(&'static str, Log);

impl Drop for Leads {
    fn drop(&mut self) {
        self.1.lock().unwrap().push((Instant::now(), Change::Ends(self.0)));
    }
}

fn candidate(
    tasks: &mut JoinSet<()>,
    client: Client,
    ns: &str,
    who: &'static str,
    log: &Log,
    deaf: bool,
) -> CancellationToken {
    let (stop, log, election) = (CancellationToken::new(), log.clone(), election(ns, who));
    let token = stop.clone();
    tasks.spawn(async move {
        let clock = Clock::system();
        let work = |stop: CancellationToken| {
            let log = log.clone();
            async move {
                log.lock().unwrap().push((Instant::now(), Change::Begins(who)));
                let _leads = Leads(who, log);
                if deaf {
                    std::future::pending::<()>().await
                } else {
                    stop.cancelled().await
                }
                Ok::<_, ElectionError>(())
            }
        };
        election.run(&client, &clock, &token, work).await.unwrap();
    });
    stop
}

async fn until(log: &Log, event: Change) -> anyhow::Result<Instant> {
    let found = || log.lock().unwrap().iter().find(|(_, change)| *change == event).map(|(at, _)| *at);
    eventually(&format!("{event:?}"), async || found()).await
}

#[test]
fn second_takes_over_when_the_lease_is_released() {
    cluster::run(|cluster| async move {
        let ns = cluster.namespace().await?;
        let (log, mut tasks) = (Log::default(), JoinSet::new());
        let first = candidate(&mut tasks, cluster.client(), &ns, "first", &log, false);
        until(&log, Change::Begins("first")).await?;
        let second = candidate(&mut tasks, cluster.client(), &ns, "second", &log, false);
        let api: Api<Lease> = Api::namespaced(cluster.client(), &ns);
        let renewed = api.get("group").await?.spec.unwrap().renew_time;
        loop {
            let spec = api.get("group").await?.spec.unwrap();
            assert_eq!(spec.holder_identity.as_deref(), Some("first"));
            if spec.renew_time > renewed {
                break;
            }
        }
        first.cancel();
        let began = until(&log, Change::Begins("second")).await?;
        let ended = until(&log, Change::Ends("first")).await?;
        assert!(ended < began, "the old leader stops before the new one starts");
        assert_eq!(api.get("group").await?.spec.unwrap().lease_transitions, Some(1));
        second.cancel();
        while tasks.join_next().await.transpose()?.is_some() {}
        assert_eq!(api.get("group").await?.spec.unwrap().holder_identity, None);
        anyhow::Ok(())
    });
}

#[test]
fn stolen_lease_stops_the_work_until_it_expires() {
    cluster::run(|cluster| async move {
        let ns = cluster.namespace().await?;
        let (log, mut tasks) = (Log::default(), JoinSet::new());
        let stop = candidate(&mut tasks, cluster.client(), &ns, "first", &log, false);
        until(&log, Change::Begins("first")).await?;
        let api: Api<Lease> = Api::namespaced(cluster.client(), &ns);
        let steal = json!({"spec": {"holderIdentity": "thief", "leaseDurationSeconds": 1}});
        api.patch("group", &PatchParams::default(), &Patch::Merge(steal)).await?;
        until(&log, Change::Ends("first")).await?;
        log.lock().unwrap().clear();
        until(&log, Change::Begins("first")).await?; // the other holder never renews
        stop.cancel();
        while tasks.join_next().await.transpose()?.is_some() {}
        anyhow::Ok(())
    });
}

/// The API server becomes unreachable only for the leader, whose work ignores cancellation: the work is dropped before another
/// process leads.
#[test]
fn isolated_leader_stops_before_it_is_replaced() {
    cluster::run(|cluster| async move {
        let ns = cluster.namespace().await?;
        let (log, mut tasks) = (Log::default(), JoinSet::new());
        let relay = Relay::start(cluster.server()).await?;
        candidate(&mut tasks, relay.client()?, &ns, "cut", &log, true);
        until(&log, Change::Begins("cut")).await?;
        let second = candidate(&mut tasks, cluster.client(), &ns, "second", &log, false);
        let cut = Instant::now();
        relay.cut();
        let began = until(&log, Change::Begins("second")).await?;
        let ended = until(&log, Change::Ends("cut")).await?;
        assert!(ended < began, "stopped {:?} and replaced {:?} after the cut", ended - cut, began - cut);
        second.cancel();
        tasks.shutdown().await;
        anyhow::Ok(())
    });
}

#[test]
fn times_without_a_margin_are_refused() {
    cluster::run(|cluster| async move {
        let bad = Election { renew_deadline: Duration::from_secs(15), ..Election::new("ns", "group", "who") };
        let clock = Clock::system();
        let never = |_| async { Ok::<_, ElectionError>(()) };
        let error = bad.run(&cluster.client(), &clock, &CancellationToken::new(), never).await.unwrap_err();
        assert!(error.to_string().contains("renew deadline"), "{error}");
        anyhow::Ok(())
    });
}

/// Relay between one client and the API server whose connections can be cut.
struct Relay {
    address: std::net::SocketAddr,
    cut: CancellationToken,
    _tasks: JoinSet<()>,
}

impl Relay {
    async fn start(server: &str) -> anyhow::Result<Self> {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
        let (address, cut) = (listener.local_addr()?, CancellationToken::new());
        let (token, to) = (cut.clone(), server.trim_start_matches("https://").to_owned());
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let accepted = tokio::select! { a = listener.accept() => a, () = token.cancelled() => break };
                let (Ok((mut from, _)), to) = (accepted, to.clone()) else { continue };
                connections.spawn(async move {
                    if let Ok(mut to) = tokio::net::TcpStream::connect(to).await {
                        let _ = tokio::io::copy_bidirectional(&mut from, &mut to).await;
                    }
                });
            }
            // Existing connections are closed. New ones are accepted by the kernel, but carry no traffic.
            connections.abort_all();
            std::future::pending::<()>().await;
        });
        Ok(Self { address, cut, _tasks: tasks })
    }

    fn client(&self) -> anyhow::Result<Client> {
        let mut config = kube::Config::new(format!("https://{}", self.address).parse()?);
        config.accept_invalid_certs = true;
        config.auth_info.token = Some("coracle-test-admin".to_owned().into());
        Ok(Client::try_from(config)?)
    }

    fn cut(&self) {
        self.cut.cancel();
    }
}
