use coracle_proto::guest::{ContainerStatistics, MetricsResponse};
use serde_json::{Value, json};

use super::sample::{ContainerSample, DiskSpace, Interface, PodSample};
use super::*;

const TIME: i64 = 1_800_000_000_500;

fn node() -> NodeSample {
    NodeSample {
        time_ms: TIME,
        boot_ms: Some(1_700_000_000_000),
        cpu_ns: Some(12_500_000_000),
        memory_total_bytes: Some(100),
        memory_available_bytes: Some(60),
        interfaces: vec![Interface { name: "eth1".into(), receive_bytes: 5, ..Interface::default() }],
        disk: Some(DiskSpace {
            capacity_bytes: 10,
            available_bytes: 4,
            used_bytes: 6,
            inodes: 9,
            inodes_free: 2,
        }),
        ..NodeSample::default()
    }
}

fn pods() -> Vec<PodSample> {
    let container = |name: &str, statistics| ContainerSample {
        name: name.into(),
        id: format!("{name}-0"),
        image: "image:1".into(),
        started_ms: Some(1_799_999_999_250),
        memory_limit_bytes: Some(1000),
        log_bytes: Some(77),
        statistics,
    };
    let statistics = ContainerStatistics {
        cpu_usage_ns: 1_500_000_000,
        memory_usage_bytes: 500,
        memory_working_set_bytes: 400,
        filesystem_used_bytes: 30,
        ..ContainerStatistics::default()
    };
    let guest = MetricsResponse {
        memory_total_bytes: 2000,
        memory_available_bytes: 500,
        cpu_user_ns: 2_000_000_000,
        cpu_system_ns: 250_000_000,
        net_receive_bytes: 11,
        processes: 7,
        ..MetricsResponse::default()
    };
    let reported = PodSample {
        namespace: "shop".into(),
        name: "web".into(),
        uid: "u1".into(),
        started_ms: Some(1_799_999_990_000),
        time_ms: TIME,
        probes: vec![(("foo".into(), "Liveness", "failed"), 3)],
        guest: Some(guest),
        containers: vec![container("foo", Some(statistics)), container("new", None)],
    };
    let silent = PodSample {
        name: "silent".into(),
        uid: "u2".into(),
        guest: None,
        probes: vec![],
        containers: vec![],
        ..reported.clone()
    };
    vec![reported, silent]
}

fn render_summary(only_cpu_and_memory: bool, rates: &Rates, pods: &[PodSample]) -> Value {
    summary(&Summary { node_name: "n1", node: &node(), pods, rates, only_cpu_and_memory })
}

#[test]
fn summary_has_what_is_known_and_nothing_else() {
    let value = render_summary(false, &Rates::default(), &pods());
    let time = "2027-01-15T08:00:00Z";
    assert_eq!(value["node"]["nodeName"], "n1");
    assert_eq!(value["node"]["cpu"], json!({"time": time, "usageCoreNanoSeconds": 12_500_000_000_u64}));
    let memory = json!({"time": time, "availableBytes": 60, "usageBytes": 40, "workingSetBytes": 40});
    assert_eq!(value["node"]["memory"], memory);
    assert_eq!(value["node"].get("swap"), None, "it is not known");
    assert_eq!(value["node"]["runtime"]["imageFs"]["inodesUsed"], 7);
    assert_eq!(value["node"]["network"]["interfaces"][0]["rxBytes"], 5);
    let pod = &value["pods"][0];
    assert_eq!(pod["podRef"], json!({"name": "web", "namespace": "shop", "uid": "u1"}));
    assert_eq!(pod["cpu"]["usageCoreNanoSeconds"], 2_250_000_000_u64);
    assert_eq!(
        (&pod["memory"]["workingSetBytes"], &pod["memory"]["availableBytes"]),
        (&json!(1500), &json!(500))
    );
    assert_eq!((&pod["network"]["name"], &pod["network"]["rxBytes"]), (&json!("eth0"), &json!(11)));
    assert_eq!(pod["process_stats"], json!({"process_count": 7}));
    assert_eq!(pod["ephemeral-storage"]["usedBytes"], 77 + 77 + 30);
    let (foo, new) = (&pod["containers"][0], &pod["containers"][1]);
    assert_eq!((&foo["name"], &foo["startTime"]), (&json!("foo"), &json!("2027-01-15T07:59:59Z")));
    assert_eq!(foo["memory"]["availableBytes"], 600);
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(new), "logs name startTime", "the guest has not reported it");
    assert_eq!(keys(&value["pods"][1]), "containers podRef startTime");
    assert!(!value.to_string().contains("null"));
}

#[test]
fn short_summary_has_cpu_and_memory() {
    let value = render_summary(true, &Rates::default(), &pods());
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>().join(" ");
    assert_eq!(keys(&value["node"]), "cpu memory nodeName startTime systemContainers");
    assert_eq!(keys(&value["pods"][0]), "containers cpu memory podRef startTime swap");
    assert_eq!(keys(&value["pods"][0]["containers"][0]), "cpu memory name startTime swap");
}

#[test]
fn use_of_cpu_needs_a_second_sample() {
    let (rates, mut pods) = (Rates::default(), pods());
    render_summary(false, &rates, &pods);
    pods[0].time_ms += 10_000;
    pods[0].guest.as_mut().unwrap().cpu_user_ns += 5_000_000_000;
    let value = render_summary(false, &rates, &pods);
    assert_eq!(value["pods"][0]["cpu"]["usageNanoCores"], 500_000_000);
    assert_eq!(value["pods"][0]["containers"][0]["cpu"]["usageNanoCores"], 0);
}

#[test]
fn resource_metrics_have_ordered_labels_and_times() {
    let text = resource_metrics(&node(), &pods());
    let samples: Vec<_> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let web = r#"{container="foo",pod="web",namespace="shop"}"#;
    let new = r#"{container="new",pod="web",namespace="shop"}"#;
    let pod = r#"{namespace="shop",pod="web"}"#;
    let want = [
        format!("node_cpu_usage_seconds_total 12.5 {TIME}"),
        format!("node_memory_working_set_bytes 40 {TIME}"),
        format!("container_cpu_usage_seconds_total{web} 1.5 {TIME}"),
        format!("container_memory_working_set_bytes{web} 400 {TIME}"),
        format!("container_swap_usage_bytes{web} 0 {TIME}"),
        format!("container_swap_limit_bytes{web} 0 {TIME}"),
        format!("container_start_time_seconds{web} 1799999999.25"),
        format!("container_start_time_seconds{new} 1799999999.25"),
        format!("pod_cpu_usage_seconds_total{pod} 2.25 {TIME}"),
        format!("pod_memory_working_set_bytes{pod} 1500 {TIME}"),
        format!("pod_swap_usage_bytes{pod} 0 {TIME}"),
        "resource_scrape_error 0".to_owned(),
    ];
    assert_eq!(samples, want);
}

#[test]
fn texts_are_well_formed() {
    let texts = [
        container_metrics(&pods()),
        resource_metrics(&node(), &pods()),
        node_metrics("n", &pods()),
        probe_metrics(&pods()),
    ];
    for text in texts {
        let mut family = "";
        for line in text.lines() {
            if let Some(rest) = line.strip_prefix("# TYPE ") {
                family = rest.split(' ').next().unwrap();
                assert!(rest.ends_with("counter") || rest.ends_with("gauge"), "{line}");
                assert_eq!(text.matches(&format!("# TYPE {family} ")).count(), 1, "{family} occurs twice");
            } else if !line.starts_with('#') {
                let name = line.split(['{', ' ']).next().unwrap();
                assert_eq!(name, family, "{line}");
                let is_of_container = family.starts_with("container_");
                let second = line.split(',').nth(1).unwrap_or_default();
                assert!(!is_of_container || second.starts_with("pod=\"web\""), "{line}");
            }
        }
    }
    assert!(
        node_metrics("n", &pods()).contains("kubelet_running_containers{container_state=\"running\"} 2\n")
    );
}

#[test]
fn probes_have_the_labels_of_a_kubelet() {
    let want = "prober_probe_total{probe_type=\"Liveness\",result=\"failed\",container=\"foo\",pod=\"web\",\
                namespace=\"shop\",pod_uid=\"u1\"} 3\n";
    let text = probe_metrics(&pods());
    assert!(text.ends_with(want), "{text}");
}
