//! The operator is killed after each of its calls in turn; the next one finishes the job, with one VM and no left-over.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use coracle_testkit::cluster;
use futures_util::future::BoxFuture;
use http::{Method, Request, Response};
use kube::{
    Client, Config,
    client::{Body, ClientBuilder},
};
use tower::{BoxError, Layer, Service};

use crate::{
    fake_agent::Fuse,
    world::{LIMIT, Operator, World, eventually},
};

/// Counts what the operator asks of the API server about its objects, and cuts it off when its turn has come. Watches
/// and Events are left out: the one cannot be interrupted half-way, the other changes nothing.
#[derive(Clone)]
struct FuseLayer(Arc<Fuse>);

#[derive(Clone)]
struct FuseService<S>(S, Arc<Fuse>);

impl<S> Layer<S> for FuseLayer {
    type Service = FuseService<S>;
    fn layer(&self, inner: S) -> Self::Service {
        FuseService(inner, self.0.clone())
    }
}

impl<S, B> Service<Request<Body>> for FuseService<S>
where
    S: Service<Request<Body>, Response = Response<B>, Error = BoxError> + Send + 'static,
    S::Future: Send + 'static,
    B: Send + 'static,
{
    type Response = Response<B>;
    type Error = BoxError;
    type Future = BoxFuture<'static, Result<Response<B>, BoxError>>;

    fn poll_ready(&mut self, cx: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), BoxError>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let path = request.uri().path().to_owned();
        let one_object = path.contains("/mikromvms/");
        let counted = one_object && (request.method() == Method::GET || request.method() == Method::PATCH);
        let (reply, fuse) = (self.0.call(request), self.1.clone());
        Box::pin(async move {
            let reply = reply.await;
            if counted {
                fuse.after_call().await;
            }
            reply
        })
    }
}

fn client(w: &World, fuse: &Arc<Fuse>) -> anyhow::Result<Client> {
    let mut config = Config::new(w.cluster.server().parse()?);
    config.accept_invalid_certs = true;
    config.auth_info.token = Some("coracle-test-admin".to_owned().into());
    Ok(ClientBuilder::try_from(config)?.with_layer(&FuseLayer(fuse.clone())).build())
}

/// One life, with the operator killed after call `at` (never, when `None`): calls made until the end of that operator,
/// and the creates that made a VM.
async fn life(w: &World, name: &str, at: Option<usize>) -> anyhow::Result<(usize, usize)> {
    let fuse = Fuse::new(at);
    *w.agent.shared.fuse.lock().unwrap() = Some(fuse.clone());
    w.agent.shared.created.store(0, Ordering::SeqCst);
    let mut operator = Some(Operator::start(client(w, &fuse)?, w.config()));
    let script = async {
        w.create(name, w.spec()).await?;
        w.until_running(name).await?;
        // A clean end of creation: from here on the same for deletion.
        w.delete(name).await?;
        w.until_gone(name).await
    };
    let killer = async {
        fuse.blown.notified().await;
        if let Some(first) = operator.take() {
            first.kill().await;
        }
        *w.agent.shared.fuse.lock().unwrap() = None;
        let second = Operator::start(w.client.clone(), w.config());
        tokio::time::sleep(Duration::MAX).await;
        drop(second);
    };
    let result = tokio::select! {
        result = script => result,
        () = killer => unreachable!("it holds the second operator for ever"),
    };
    *w.agent.shared.fuse.lock().unwrap() = None;
    result?;
    Ok((fuse.calls(), w.agent.shared.created.load(Ordering::SeqCst)))
}

#[test]
fn converges_after_a_crash_anywhere() {
    cluster::run_within(LIMIT * 12, |cluster| async move {
        let w = World::new(cluster).await?;
        let (calls, creates) = life(&w, "calm", None).await?;
        assert_eq!(creates, 1);
        assert!(
            calls >= 10,
            "hold, bind, create, start, report, stop, delete, release and the looks between: {calls}"
        );
        println!("crash points: {calls}");
        for k in 0..calls {
            let (_, creates) = life(&w, &format!("crash-{k}"), Some(k))
                .await
                .map_err(|e| e.context(format!("crash after call {k}")))?;
            assert_eq!(creates, 1, "crash after call {k}");
            assert_eq!(w.agent.machines(), [] as [&str; 0], "crash after call {k}");
        }
        Ok::<_, anyhow::Error>(())
    });
}

/// Kept mutation: with the look before the create blinded, a crash after the create must show as a second VM. If this
/// passes nothing, the test above shows nothing.
#[test]
fn the_crash_test_can_fail() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.agent.shared.blind.store(true, Ordering::SeqCst);
        let fuse = Fuse::new(None);
        *w.agent.shared.fuse.lock().unwrap() = Some(fuse.clone());
        let first = Operator::start(client(&w, &fuse)?, w.config());
        w.create("web", w.spec()).await?;
        let created = || w.agent.shared.created.load(Ordering::SeqCst);
        eventually("the first create", async || (created() >= 1).then_some(())).await?;
        first.kill().await;
        *w.agent.shared.fuse.lock().unwrap() = None;
        let _second = w.operator();
        eventually("the second VM", async || (created() >= 2).then_some(())).await?;
        assert!(w.agent.machines().len() >= 2, "one id, two VMs: {:?}", w.agent.machines());
        Ok::<_, anyhow::Error>(())
    });
}
