//! Exec through the kubelet API of the node; exec, logs and port-forward through the API server.

use std::time::Instant;

use coracle_testkit::figures::{figure, percentile};
use futures_util::{AsyncReadExt as _, StreamExt as _};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Status;
use kube::api::{AttachParams, LogParams};
use kube::{Api, Client};
use serde_json::json;
use tokio::io::AsyncReadExt as _;

use super::ms_since;
use super::node::IMAGE;
use super::pods::{pod, remove, until_ready};

const EXECS: usize = 50;
/// Below the 10 MiB at which a log file is rotated.
const LOG_MIB: u32 = 8;
const LOGS: usize = 5;
const FORWARD_MIB: u32 = 64;
const PORT: u16 = 9000;
/// Script that writes lines of 1 KiB, then serves zeros at the port.
const SCRIPT: &str = "line=$(busybox head -c 1023 /dev/zero | busybox tr '\\0' x); n=0
while [ $n -lt 8192 ]; do echo $line; n=$((n+1)); done; echo end
exec busybox nc -ll -p 9000 -e /bin/busybox cat /dev/zero";

pub(super) async fn measure(pods: &Api<Pod>, kubelet: &Client, cold: f64) {
    let readiness = json!({"tcpSocket": {"port": PORT}, "periodSeconds": 1});
    let mut streams = pod("streams", IMAGE, &["/bin/busybox", "sh", "-c", SCRIPT], json!({}));
    let container = &mut streams.spec.as_mut().expect("a spec").containers[0];
    container.readiness_probe = Some(serde_json::from_value(readiness).expect("a probe"));
    until_ready(pods.clone(), &streams).await;
    execs_at_node(kubelet, cold).await;
    execs(pods).await;
    logs(pods).await;
    forward(pods).await;
    remove(pods.clone(), "streams").await;
}

/// Measures execs, each on a connection of its own, as the API server opens them.
async fn execs_at_node(kubelet: &Client, cold: f64) {
    const URI: &str = "/exec/default/streams/main?command=/bin/busybox&command=true&output=1";
    /// Channel of the WebSocket protocol for the status of the command.
    const ERROR: u8 = 3;
    let mut times = Vec::new();
    for _ in 0..EXECS {
        let began = Instant::now();
        let request = http::Request::get(URI).body(Vec::new()).expect("a request");
        let mut messages = kubelet.connect(request).await.expect("exec").into_stream();
        let status = loop {
            let message = messages.next().await.expect("a status").expect("a message").into_data();
            if let Some((&ERROR, status)) = message.split_first() {
                break serde_json::from_slice::<Status>(status).expect("a status");
            }
        };
        times.push(ms_since(began));
        assert_eq!(status.status.as_deref(), Some("Success"), "{status:?}");
    }
    let p50 = percentile(&times, 50);
    eprintln!("samples: {EXECS}; exec ms at the node: {times:.1?}");
    figure("pod.exec_p50_ms", p50, "ms");
    figure("pod.exec_ratio", p50 / cold, "ratio");
}

async fn execs(pods: &Api<Pod>) {
    let mut times = Vec::new();
    for _ in 0..EXECS {
        let began = Instant::now();
        let params = AttachParams::default().stdout(true).stderr(false);
        let mut process = pods.exec("streams", ["/bin/busybox", "true"], &params).await.expect("exec");
        let status = process.take_status().expect("a status").await.expect("an end");
        times.push(ms_since(began));
        assert_eq!(status.status.as_deref(), Some("Success"), "{status:?}");
    }
    let p50 = percentile(&times, 50);
    eprintln!("samples: {EXECS}; exec ms through the API server: {times:.1?}");
    figure("pod.exec_api_p50_ms", p50, "ms");
}

async fn logs(pods: &Api<Pod>) {
    let mut rates = Vec::new();
    for _ in 0..LOGS {
        let began = Instant::now();
        let mut text = Vec::new();
        let mut stream = pods.log_stream("streams", &LogParams::default()).await.expect("logs");
        stream.read_to_end(&mut text).await.expect("the log");
        assert!(text.len() > (LOG_MIB as usize) << 20, "{} bytes", text.len());
        rates.push(f64::from(LOG_MIB) / began.elapsed().as_secs_f64());
    }
    eprintln!("logs MiB/s: {rates:.1?}");
    figure("logs.mib_per_s", percentile(&rates, 50), "MiB/s");
}

async fn forward(pods: &Api<Pod>) {
    let mut forwarder = pods.portforward("streams", &[PORT]).await.expect("port-forward");
    let stream = forwarder.take_stream(PORT).expect("a stream");
    let began = Instant::now();
    let mut taken = stream.take(u64::from(FORWARD_MIB) << 20);
    let count = tokio::io::copy(&mut taken, &mut tokio::io::sink()).await.expect("its bytes");
    assert_eq!(count, u64::from(FORWARD_MIB) << 20);
    figure("forward.mib_per_s", f64::from(FORWARD_MIB) / began.elapsed().as_secs_f64(), "MiB/s");
    forwarder.abort();
}
