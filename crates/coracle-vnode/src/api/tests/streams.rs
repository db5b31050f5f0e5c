//! Exec, attach and port-forward with the clients of client-go.

use coracle_host::ContainerState;
use coracle_pod::streams::PortDialer;
use coracle_streaming::Dial as _;
use coracle_testkit::cluster::{self, Cluster};
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::clients::{Proxy, finish, streaming_client};
use super::world::{DEADLINE, MASTERS, World};

async fn start_proxy(cluster: &Cluster, node: &str) -> (World, Proxy) {
    let world = World::new(cluster.client(), node, false).await;
    world.run("shop", "web", &["serve"], true).await;
    let proxy = Proxy::new(&world, "admin", MASTERS).await;
    (world, proxy)
}

#[test]
fn commands_and_attachments_serve_each_client() {
    cluster::run(async |cluster| {
        let (world, proxy) = start_proxy(cluster, "streaming-node").await;
        let exec = proxy.url("/exec/shop/web/main?output=1&error=1&command=say&command=two%20words");
        let attach = proxy.url("/attach/shop/web/uid-web/main?input=1&output=1");
        for (via, protocols) in [("spdy", ""), ("websocket", ""), ("websocket", "v4.channel.k8s.io")] {
            let flags = ["exec", "-via", via, "-protocols", protocols];
            let Some(client) = streaming_client(&[&flags[..], &[&exec]].concat()) else { return Ok(()) };
            let (code, stdout, stderr) = finish(client, b"").await;
            assert_eq!((code, stdout.as_str()), (Some(0), "say two words\n"), "{via} {protocols}: {stderr}");
            if protocols.is_empty() {
                let more = ["-stdin", "-stderr=false", &attach];
                let client = streaming_client(&[&flags[..], &more].concat()).unwrap();
                let (code, stdout, stderr) = finish(client, b"hello").await;
                assert_eq!((code, stdout.as_str()), (Some(0), "hello"), "{via}: {stderr}");
            }
        }
        world.end().await;
        anyhow::Ok(())
    });
}

#[test]
fn ports_are_forwarded_for_each_client() {
    cluster::run(async |cluster| {
        let (world, proxy) = start_proxy(cluster, "forwarding-node").await;
        for via in ["spdy", "websocket"] {
            let url = proxy.url("/portForward/shop/web");
            let Some(mut client) = streaming_client(&["forward", "-via", via, &url, ":7"]) else {
                return Ok(());
            };
            let mut lines = BufReader::new(client.stdout.as_mut().unwrap()).lines();
            let line = timeout(DEADLINE, lines.next_line()).await??.unwrap_or_default();
            let port = line.split("127.0.0.1:").nth(1).and_then(|rest| rest.split(' ').next());
            let port: u16 = port.unwrap_or_else(|| panic!("{via}: {line}")).parse()?;
            let mut connection = TcpStream::connect(("127.0.0.1", port)).await?;
            connection.write_all(b"ping").await?;
            let mut answer = [0; 4];
            timeout(DEADLINE, connection.read_exact(&mut answer)).await??;
            connection.shutdown().await?;
            let mut rest = Vec::new();
            timeout(DEADLINE, connection.read_to_end(&mut rest)).await??;
            assert_eq!((&answer, rest.len()), (b"ping", 0), "{via}");
            drop(client.stdin.take());
            timeout(DEADLINE, client.wait()).await??;
        }
        world.end().await;
        anyhow::Ok(())
    });
}

/// The attached client disconnects without closing its streams.
#[test]
fn attached_container_outlives_its_client() {
    cluster::run(async |cluster| {
        let (world, proxy) = start_proxy(cluster, "attaching-node").await;
        let attach = proxy.url("/attach/shop/web/main?input=1&output=1");
        for via in ["spdy", "websocket"] {
            let flags = ["exec", "-via", via, "-stdin", "-stderr=false", &attach];
            let Some(mut client) = streaming_client(&flags) else { return Ok(()) };
            client.stdin.as_mut().unwrap().write_all(b"hello").await?;
            let mut echo = [0; 5];
            timeout(DEADLINE, client.stdout.as_mut().unwrap().read_exact(&mut echo)).await??;
            client.kill().await?;
            let container = world.host.containers("web")?.remove(0);
            assert_eq!((&echo, container.state), (b"hello", ContainerState::Running), "{via}");
        }
        world.end().await;
        anyhow::Ok(())
    });
}

/// The guest of this test does not close connections itself.
#[test]
fn dropped_connection_ends_in_the_guest() {
    cluster::run(async |cluster| {
        let (world, _proxy) = start_proxy(cluster, "dropping-node").await;
        let tasks = TaskTracker::new();
        let dial = PortDialer::new(world.host.clone(), "web", tasks.clone());
        for write in [&b"ping"[..], b""] {
            let mut connection = dial.dial(7).await.map_err(anyhow::Error::msg)?;
            connection.write_all(write).await?;
            let mut echo = vec![0; write.len()];
            timeout(DEADLINE, connection.read_exact(&mut echo)).await??;
            assert_eq!((echo.as_slice(), tasks.len()), (write, 1));
            drop(connection);
            tasks.close();
            timeout(DEADLINE, tasks.wait()).await?;
        }
        world.host.stop("web", DEADLINE, None).await?;
        assert!(dial.dial(7).await.is_err(), "the VM is off");
        world.end().await;
        anyhow::Ok(())
    });
}
