//! Requests about pods and their logs, of a user with all permissions.

use axum::body::Body;
use coracle_host::ContainerState;
use coracle_testkit::cluster;
use coracle_testkit::eventually;
use http_body_util::BodyExt as _;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::clients::{begin, request, send};
use super::world::{DEADLINE, MASTERS, World};

#[test]
fn invalid_requests_are_refused_with_their_status() {
    cluster::run(async |cluster| {
        let world = World::new(cluster.client(), "refusing-node", false).await;
        world.run("shop", "web", &["serve"], true).await;
        let admin = || Some(world.ca.leaf("admin", MASTERS));
        for (method, path, want, text) in [
            ("GET", "/no/such/path", 404, ""),
            ("DELETE", "/pods", 405, ""),
            ("GET", "/run/shop/web/main?cmd=ls", 405, ""),
            ("GET", "/healthz/unknown", 404, ""),
            ("GET", "/containerLogs/shop/web", 404, ""),
            ("GET", "/containerLogs/shop/none/main", 404, "pod \"shop/none\" not found"),
            ("GET", "/containerLogs/other/web/main", 404, "not found"),
            ("GET", "/containerLogs/shop/web/none", 404, "container not found (\"none\""),
            ("GET", "/containerLogs/shop/web/later", 400, "is waiting to start"),
            ("GET", "/containerLogs/shop/web/main?previous=true", 400, "previous terminated container"),
            ("GET", "/containerLogs/shop/web/main?tailLines=x", 400, "invalid tailLines"),
            ("GET", "/containerLogs/shop/web/main?tailLines=-1", 422, "invalid tailLines"),
            ("GET", "/containerLogs/shop/web/main?limitBytes=0", 422, "invalid limitBytes"),
            ("GET", "/containerLogs/shop/web/main?sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z", 422, ""),
            ("GET", "/containerLogs/shop/none/main?tailLines=-1", 422, ""),
            ("GET", "/containerLogs/shop/web/main?stream=Stderr", 400, ""),
            ("GET", "/containerLogs/shop/web/main", 200, ""),
            ("POST", "/exec/shop/web/main?command=ls", 400, "at least 1 of stdin"),
            ("POST", "/exec/shop/web/main?output=1", 400, "invalid command"),
            ("POST", "/exec/shop/web/main?output=1&command=ls", 400, ""),
            ("POST", "/exec/shop/none/main?output=1&command=ls", 404, ""),
            ("POST", "/exec/shop/web/none?output=1&command=ls", 404, ""),
            ("POST", "/exec/shop/web/uid-other/main?output=1&command=ls", 404, ""),
            ("POST", "/exec/shop/web/uid-web/main?output=1&command=ls", 400, ""),
            ("POST", "/exec/shop/web/later?output=1&command=ls", 400, "waiting to start"),
            ("POST", "/attach/shop/web/main", 400, "at least 1 of stdin"),
            ("POST", "/attach/shop/web/none?output=1", 404, ""),
            ("POST", "/attach/shop/web/uid-other/main?output=1", 404, ""),
            ("POST", "/portForward/shop/none", 404, ""),
            ("POST", "/portForward/shop/web/uid-other", 404, ""),
            ("POST", "/portForward/shop/web?port=x", 400, "invalid port"),
            ("POST", "/portForward/shop/web", 400, ""),
            ("POST", "/run/shop/web/main", 400, "invalid cmd"),
            ("POST", "/run/shop/web/none?cmd=ls", 404, ""),
            ("POST", "/run/shop/web/main?cmd=echo+a", 200, "echo a\n"),
            ("POST", "/run/shop/web/uid-web/main?cmd=ls", 200, "ls\n"),
        ] {
            let (got, body) = send(&world, admin(), request(method, path)).await;
            assert_eq!(got, want, "{method} {path}: {body}");
            assert!(body.contains(text), "{method} {path}: {body}");
        }
        assert_eq!(send(&world, admin(), request("GET", "/healthz/syncloop")).await.0, 200);
        world.sync_loop.send_replace(false);
        assert_eq!(send(&world, admin(), request("GET", "/healthz/syncloop")).await.0, 500);
        world.end().await;
        anyhow::Ok(())
    });
}

#[test]
fn lists_and_statistics_name_what_runs() {
    cluster::run(async |cluster| {
        let world = World::new(cluster.client(), "listing-node", false).await;
        world.run("shop", "web", &["serve"], false).await;
        world.run("shop", "job", &["echo", "done"], false).await;
        world.host.wait_container("job", &"main-0".parse()?).await?;
        let get = async |path: &str| {
            let admin = Some(world.ca.leaf("admin", MASTERS));
            let (status, body) = send(&world, admin, request("GET", path)).await;
            assert_eq!(status, 200, "{path}: {body}");
            body
        };
        let json = async |path: &str| serde_json::from_str::<Value>(&get(path).await).unwrap();
        let names = |list: &Value| {
            let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap().to_owned();
            list["items"].as_array().unwrap().iter().map(name).collect::<Vec<_>>()
        };
        let pods = json("/pods").await;
        assert_eq!((&pods["kind"], &pods["apiVersion"]), (&"PodList".into(), &"v1".into()));
        assert_eq!(names(&pods), ["job", "web"]);
        let running = json("/runningpods/").await;
        assert_eq!(names(&running), ["web"]);
        assert_eq!(running["items"][0]["metadata"]["uid"], "uid-web");
        assert_eq!(running["items"][0]["spec"]["containers"][0]["image"], "localhost/test/empty:1");
        let summary = json("/stats/summary").await;
        assert_eq!(summary["node"]["nodeName"], "listing-node");
        let of_web = &summary["pods"][1];
        assert_eq!(
            (&of_web["podRef"]["name"], &of_web["containers"][0]["name"]),
            (&"web".into(), &"main".into())
        );
        assert!(json("/stats/summary?only_cpu_and_memory=true").await["node"].get("fs").is_none());
        assert!(
            get("/metrics/resource")
                .await
                .contains("\npod_cpu_usage_seconds_total{namespace=\"shop\",pod=\"web\"} ")
        );
        assert!(
            get("/metrics/cadvisor")
                .await
                .contains("container_network_receive_bytes_total{container=\"\",pod=\"web\"")
        );
        assert!(get("/metrics").await.contains("kubelet_running_pods 2\n"));
        assert!(get("/metrics/probes").await.contains("# TYPE prober_probe_total counter\n"));
        world.end().await;
        anyhow::Ok(())
    });
}

#[test]
fn logs_are_followed_to_the_end_of_their_container() {
    cluster::run(async |cluster| {
        let world = World::new(cluster.client(), "logging-node", false).await;
        let admin = || Some(world.ca.leaf("admin", MASTERS));
        world.run("shop", "job", &["echo", "hello world"], false).await;
        world.host.wait_container("job", &"main-0".parse()?).await?;
        let path = "/containerLogs/shop/job/main";
        for query in ["", "?follow=true", "?tailLines=1", "?tail=all"] {
            let got = send(&world, admin(), request("GET", &format!("{path}{query}"))).await;
            assert_eq!(got, (200, "hello world\n".into()), "{query}");
        }
        let (_, body) =
            send(&world, admin(), request("GET", &format!("{path}?timestamps=true&limitBytes=35"))).await;
        assert_eq!(body, "1970-01-01T00:00:00.000000001Z hell");

        let id = world.run("shop", "web", &["serve"], false).await;
        let mut tasks = JoinSet::new();
        let follow = request("GET", "/containerLogs/shop/web/main?follow=true");
        let response = begin(&world, admin(), follow, &mut tasks).await;
        assert_eq!(response.status(), 200, "headers come before there is any output");
        let log = world.pods.find("shop", "web", None).unwrap().containers[0].log.clone();
        let mut file = std::fs::File::options().append(true).open(&log)?;
        let mut body = Body::new(response.into_body());
        for line in ["one", "two"] {
            use std::io::Write as _;
            writeln!(file, "2026-08-01T10:00:00.000000000Z stdout F {line}")?;
            let frame = timeout(DEADLINE, body.frame()).await?.unwrap()?;
            assert_eq!(frame.into_data().unwrap(), format!("{line}\n"));
        }
        world.host.stop_container("web", &id, DEADLINE).await?;
        assert!(timeout(DEADLINE, body.frame()).await?.is_none(), "it ends with the container");
        world.end().await;
        anyhow::Ok(())
    });
}

/// An exec in an ended container is refused by the host core, even before the table shows the end.
#[test]
fn exec_in_ended_container_is_refused() {
    cluster::run(async |cluster| {
        let world = World::new(cluster.client(), "ending-node", false).await;
        let id = world.run("shop", "web", &["serve"], false).await;
        world.host.stop_container("web", &id, DEADLINE).await?;
        eventually("it has ended", async || {
            let view = world.host.get("web").ok()?;
            (view.containers[&id].state == ContainerState::Exited).then_some(())
        })
        .await?;
        for path in ["/exec/shop/web/main?output=1&command=ls", "/run/shop/web/main?cmd=ls"] {
            let admin = Some(world.ca.leaf("admin", MASTERS));
            let (status, body) = send(&world, admin, request("POST", path)).await;
            assert!(status == 400 && body.contains("not running"), "{path}: {status} {body}");
        }
        world.end().await;
        anyhow::Ok(())
    });
}
