use serde_json::json;

use super::*;

fn at(text: &str) -> Timestamp {
    text.parse().unwrap()
}

fn sound_cluster() -> Observed {
    let role = json!({"kind": "ClusterRole", "metadata": {"name": "r"},
        "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]});
    let policy =
        json!({"kind": "ValidatingAdmissionPolicy", "metadata": {"name": "p"}, "spec": {"validations": []}});
    let operator = json!({"kind": "Deployment", "metadata": {"name": "o"}, "spec": {"replicas": 2},
        "status": {"readyReplicas": 2}});
    let daemons = json!({"kind": "DaemonSet", "metadata": {"name": "d"},
        "status": {"numberReady": 1, "desiredNumberScheduled": 1}});
    let kind = json!({"metadata": {"name": "vms"}, "spec": {"versions": [{"name": "v1",
        "schema": {"openAPIV3Schema": {"properties": {"spec": {}}}}}]}});
    let found = |object: &Value| (object.clone(), Ok(Some(object.clone())));
    Observed {
        now: at("2026-01-10T00:00:00Z"),
        namespace: "s".into(),
        server: Ok((1, 36)),
        definitions: vec![(kind.clone(), Ok(Some(kind["spec"].clone())))],
        objects: [role, policy, operator, daemons].iter().map(found).collect(),
        authority: Ok(Some("PEM".into())),
        authority_end: Some(at("2027-01-01T00:00:00Z")),
        nodes: Ok(vec![node("n1"), node("n2")]),
        networks: vec![
            ("10.100.0.0/24".parse().unwrap(), "n1".into()),
            ("10.100.1.0/24".parse().unwrap(), "n2".into()),
        ],
        webhooks: Ok(vec![webhook()]),
        extension_api: Ok(Some(Ok(()))),
    }
}

fn node(name: &str) -> Node {
    Node {
        name: name.into(),
        renewed: Some(at("2026-01-09T23:59:50Z")),
        lease: SignedDuration::from_secs(40),
        address: Some("192.0.2.1:50052".into()),
        network: None,
        dialed: Ok(at("2026-02-01T00:00:00Z")),
    }
}

fn webhook() -> Webhook {
    Webhook {
        configuration: "coracle-mikromvm".into(),
        target: "Service s/w".into(),
        refuses_without: true,
        bundle_end: Some(at("2027-01-01T00:00:00Z")),
        answers: Ok(()),
    }
}

#[test]
fn sound_installation_has_nothing_to_do() {
    for finding in judge(&sound_cluster()) {
        assert_eq!((finding.state, finding.help.as_str()), (State::Good, ""), "{finding:?}");
    }
}

type Break = Box<dyn Fn(&mut Observed)>;

fn with_node(change: impl Fn(&mut Node) + 'static) -> Break {
    Box::new(move |seen| change(&mut seen.nodes.as_mut().unwrap()[0]))
}

/// Table of problems: the check that shows the problem, its state, and a word of the finding.
#[test]
fn findings_table() {
    use State::{Broken, Limited};
    let cases: Vec<(Break, &str, State, &str)> = vec![
        (Box::new(|s| s.server = Ok((1, 31))), "API server", Broken, "1.31"),
        (Box::new(|s| s.server = Err("refused".into())), "API server", Broken, "refused"),
        (Box::new(|s| s.definitions[0].1 = Ok(None)), "definition vms", Broken, "not found"),
        (
            Box::new(|s| s.definitions[0].1 = Ok(Some(json!({})))),
            "definition vms",
            Broken,
            "lacks version v1",
        ),
        (Box::new(|s| s.definitions[0].1 = Err("forbidden".into())), "definition vms", Broken, "forbidden"),
        (Box::new(|s| s.objects[0].1 = Ok(None)), "ClusterRole r", Broken, "not found"),
        (Box::new(|s| s.objects[0].1 = Ok(Some(json!({})))), "ClusterRole r", Broken, "right to get nodes"),
        (Box::new(|s| s.objects[1].1 = Ok(None)), "ValidatingAdmissionPolicy p", Broken, "not found"),
        (Box::new(|s| s.objects[2].1 = Ok(None)), "Deployment o", Broken, "not found"),
        (
            Box::new(|s| s.objects[2].1 = Ok(Some(json!({"spec": {"replicas": 2}})))),
            "Deployment o",
            Broken,
            "0 of 2",
        ),
        (
            Box::new(|s| {
                let one = json!({"status": {"numberReady": 1, "desiredNumberScheduled": 2}});
                s.objects[3].1 = Ok(Some(one));
            }),
            "DaemonSet d",
            Limited,
            "1 of 2",
        ),
        (Box::new(|s| s.objects[3].1 = Ok(Some(json!({})))), "DaemonSet d", Limited, "no Pod"),
        (Box::new(|s| s.authority = Ok(None)), "authority of nodes", Broken, "not found"),
        (Box::new(|s| s.authority_end = None), "authority of nodes", Broken, "no certificate"),
        (
            Box::new(|s| s.authority_end = Some(at("2026-02-01T00:00:00Z"))),
            "authority of nodes",
            Limited,
            "expires in 22 days",
        ),
        (
            Box::new(|s| s.authority_end = Some(at("2026-01-01T00:00:00Z"))),
            "authority of nodes",
            Broken,
            "expired 2026-01-01",
        ),
        (Box::new(|s| s.nodes = Ok(vec![])), "nodes", Broken, "no Lease"),
        (Box::new(|s| s.nodes = Err("forbidden".into())), "nodes", Broken, "forbidden"),
        (with_node(|n| n.renewed = Some(at("2026-01-09T23:00:00Z"))), "node n1", Broken, "3600 s ago"),
        (with_node(|n| n.renewed = None), "node n1", Broken, "never"),
        (with_node(|n| n.address = None), "node n1", Limited, "no service"),
        (
            with_node(|n| n.dialed = Err(DialError::Unreachable("timed out".into()))),
            "node n1",
            Broken,
            "does not answer: timed out",
        ),
        (
            with_node(|n| n.dialed = Err(DialError::Untrusted("Expired".into()))),
            "node n1",
            Broken,
            "does not take: Expired",
        ),
        (with_node(|n| n.dialed = Ok(at("2026-01-12T00:00:00Z"))), "node n1", Limited, "expires in 2 days"),
        (
            Box::new(|s| s.networks[1].0 = "10.100.0.128/25".parse().unwrap()),
            "networks of guests",
            Broken,
            "10.100.0.0/24 of n1 overlaps with 10.100.0.128/25 of n2",
        ),
        (
            with_node(|n| n.network = Some("10.100.1.0/24".parse().unwrap())),
            "networks of guests",
            Broken,
            "10.100.1.0/24 of n1 overlaps",
        ),
        (
            Box::new(|s| s.webhooks.as_mut().unwrap()[0].answers = Err("no endpoint".into())),
            "webhook coracle-mikromvm",
            Broken,
            "no endpoint",
        ),
        (
            Box::new(|s| {
                let webhook = &mut s.webhooks.as_mut().unwrap()[0];
                (webhook.answers, webhook.refuses_without) = (Err("no endpoint".into()), false);
            }),
            "webhook coracle-mikromvm",
            Limited,
            "left out",
        ),
        (
            Box::new(|s| s.webhooks.as_mut().unwrap()[0].bundle_end = None),
            "webhook coracle-mikromvm",
            Broken,
            "caBundle",
        ),
        (
            Box::new(|s| s.extension_api = Ok(Some(Err("no endpoint".into())))),
            "extension API",
            Broken,
            "no endpoint",
        ),
    ];
    for (change, check, state, word) in cases {
        let mut seen = sound_cluster();
        change(&mut seen);
        let all = judge(&seen);
        let wrong: Vec<_> = all.iter().filter(|finding| finding.state != State::Good).collect();
        let [finding] = wrong[..] else { panic!("{check} {word}: {wrong:#?}") };
        assert_eq!((finding.check.as_str(), finding.state), (check, state), "{finding:?}");
        assert!(finding.detail.contains(word) && !finding.help.is_empty(), "{finding:?}");
    }
}
