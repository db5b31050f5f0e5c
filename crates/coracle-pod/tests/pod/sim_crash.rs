//! Kills the task of a pod after each of its calls; the next task must finish the work without leaks.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use coracle_pod::objects::Objects;
use coracle_testkit::sim::{Scenario, Sim, crash_after_each_call};
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::PodStatus;
use kube::Client;
use serde_json::json;

use crate::fake::Behaviour::{Exits, Runs};
use crate::world::World;

struct Life {
    world: World,
    /// Mutation: the frontend does not read the stored status when it starts.
    forgets: bool,
}

impl Scenario for Life {
    fn controller(&self, _client: Client) -> BoxFuture<'static, ()> {
        let (world, forgets) = (self.world.clone(), self.forgets);
        async move {
            if forgets {
                world.fake.with(|state| state.status = PodStatus::default());
            }
            world.task().await;
            // A task that has ended is not started again, because its frontend knows that the object is gone.
            std::future::pending::<()>().await;
        }
        .boxed()
    }

    async fn script(&self) -> Result<()> {
        let world = &self.world;
        world
            .until("it is ready", |w| {
                w.condition("Ready").0 == "True" && w.container("web").restart_count == 1
            })
            .await?;
        world.delete(10);
        world.until("it is removed", |w| w.fake.read(|state| state.object_removed)).await
    }

    fn facts(&self) -> Vec<String> {
        let world = &self.world;
        let mut facts: Vec<_> =
            world.fake.effects().into_iter().filter(|effect| !effect.starts_with("exec ")).collect();
        let left = world.fake.read(|state| format!("{:?} {:?}", state.sandbox, state.volumes));
        let end = world.container("web");
        facts.push(format!("left: {left}"));
        facts.push(format!("{} {} {}", world.phase(), world.state("web"), end.restart_count));
        facts.push(format!(
            "hooks: {}",
            world.fake.effects().iter().any(|effect| effect == "exec web: drain")
        ));
        facts
    }
}

fn pod_world(sim: &Sim) -> World {
    let hooks =
        json!({"postStart": {"exec": {"command": ["warm"]}}, "preStop": {"exec": {"command": ["drain"]}}});
    let spec = json!({
        "initContainers": [
            {"name": "init", "image": "i:1"},
            {"name": "log", "image": "s:1", "restartPolicy": "Always", "startupProbe": {"exec": {"command": ["up"]}}},
        ],
        "containers": [{"name": "web", "image": "web:1", "lifecycle": hooks,
            "readinessProbe": {"tcpSocket": {"port": 80}, "periodSeconds": 1},
            "volumeMounts": [{"name": "v", "mountPath": "/v"}]}],
        "volumes": [
            {"name": "v", "projected": {"sources": [{"secret": {"name": "s"}}, {"serviceAccountToken": {"path": "t"}}]}},
            {"name": "tmp", "emptyDir": {}},
        ],
    });
    let second = Duration::from_secs(1);
    let world = World::new(sim, spec)
        .with_behaviours("init", &[Exits { after: second, code: 0 }])
        .with_behaviours("web", &[Exits { after: 3 * second, code: 2 }, Runs]);
    let secret = serde_json::from_value(json!({"data": {"k": "dg=="}})).unwrap();
    let secrets = [("s".to_owned(), Arc::new(secret))].into();
    world.change(|input| input.objects = Arc::new(Objects { secrets, ..Objects::default() }));
    world
}

#[test]
fn crash_after_any_call_leads_to_the_same_end() {
    let calls =
        crash_after_each_call(3, async |sim: Sim| Ok(Life { world: pod_world(&sim), forgets: false }))
            .unwrap();
    assert!(calls > 30, "{calls} calls");
    println!("crashed after each of {calls} calls");
}

#[test]
fn lost_status_is_seen_by_the_crash_test() {
    let crashed =
        crash_after_each_call(3, async |sim: Sim| Ok(Life { world: pod_world(&sim), forgets: true }));
    assert!(crashed.is_err(), "a pod that forgets what it reported ends like one that does not");
}
