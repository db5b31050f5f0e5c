//! The resource definition in the API server: its refusals, their messages, and the columns of kubectl.

use coracle_api::{MikromVM, MikromVMSpec};
use coracle_testkit::{cluster, tools};
use kube::{
    Api,
    core::{ApiResource, DynamicObject},
};
use serde_json::json;

use crate::world::World;

#[test]
fn valid_manifest_is_accepted_and_bad_input_refused() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let mut seed: MikromVM =
            serde_saphyr::from_str(include_str!("../../../coracle-api/tests/seed_mikromvm.yaml"))?;
        seed.metadata.namespace = Some(w.ns.clone());
        w.vms().create(&Default::default(), &seed).await?;
        let spec = || w.spec();
        for (n, (what, bad, want)) in [
            (
                "memory 64",
                MikromVMSpec { memory_mib: 64, ..spec() },
                "spec.memoryMB in body should be greater than or equal to 128",
            ),
            (
                "64 vCPUs",
                MikromVMSpec { vcpu_count: 64, ..spec() },
                "spec.vcpuCount in body should be less than or equal to 32",
            ),
            (
                "no vCPU",
                MikromVMSpec { vcpu_count: 0, ..spec() },
                "spec.vcpuCount in body should be greater than or equal to 1",
            ),
            ("nothing to run", MikromVMSpec { image: String::new(), ..spec() }, "give an image"),
            (
                "relative kernel",
                MikromVMSpec { kernel_path: "vmlinux".into(), ..spec() },
                "kernelPath must be absolute",
            ),
            (
                "no port",
                MikromVMSpec { agent_address: "10.0.0.5".into(), ..spec() },
                "agentAddress must be host:port",
            ),
        ]
        .into_iter()
        .enumerate()
        {
            let error = w.create(&format!("bad-{n}"), bad).await.expect_err(what).to_string();
            assert!(error.contains(want), "{what}: {error}");
        }
        for address in ["10.0.0.5:50051", "node-1.example:1", "[fd00::1]:50051", ""] {
            let good = MikromVMSpec { agent_address: address.into(), ..spec() };
            let name = format!("good-{}", address.len());
            w.create(&name, good).await.unwrap_or_else(|e| panic!("{address}: {e}"));
        }
        Ok::<_, anyhow::Error>(())
    });
}

/// Returns a spec with these fields in addition to image and size.
fn with(fields: &serde_json::Value) -> serde_json::Value {
    let mut spec = json!({"image": "i:1", "vcpuCount": 1, "memoryMB": 128});
    for (key, value) in fields.as_object().unwrap() {
        spec[key] = value.clone();
    }
    spec
}

#[test]
fn inputs_and_placement_are_validated_by_the_api_server() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let api: Api<DynamicObject> =
            Api::namespaced_with(w.client.clone(), &w.ns, &ApiResource::erase::<MikromVM>(&()));
        let create = async |name: String, spec: serde_json::Value| {
            let mut object = DynamicObject::new(&name, &ApiResource::erase::<MikromVM>(&()));
            object.data = json!({"spec": spec});
            api.create(&Default::default(), &object).await
        };
        let key = |name: &str| json!({"name": name, "key": "k"});
        let volume = |source: serde_json::Value| json!({"volumes": [source]});
        let affinity = |operator: &str, values: serde_json::Value| {
            let one = json!({"key": "zone", "operator": operator, "values": values});
            json!({"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {
                "nodeSelectorTerms": [{"matchExpressions": [one]}]}}}})
        };
        for (n, (fields, want)) in [
            (json!({"env": [{"name": "A=B"}]}), "spec.env[0].name"),
            (json!({"env": [{"name": "A", "value": "x", "valueFrom": {"secretKeyRef": key("s")}}]}), "not both"),
            (json!({"env": [{"name": "A", "valueFrom": {}}]}), "valueFrom needs exactly one"),
            (
                json!({"env": [{"name": "A", "valueFrom": {"secretKeyRef": key("s"), "configMapKeyRef": key("c")}}]}),
                "valueFrom needs exactly one",
            ),
            (json!({"env": [{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "spec.image"}}}]}), "fieldPath"),
            (json!({"env": [{"name": "A"}, {"name": "A"}]}), "Duplicate value"),
            (json!({"envFrom": [{}]}), "envFrom needs exactly one"),
            (json!({"userData": {}}), "userData needs exactly one"),
            (json!({"userData": {"inline": "x", "secretRef": {"name": "s"}}}), "userData needs exactly one"),
            (json!({"hostname": "Not_A_Label"}), "spec.hostname"),
            (json!({"sshAuthorizedKeys": ["ssh-ed25519 A\nssh-ed25519 B"]}), "spec.sshAuthorizedKeys[0]"),
            (volume(json!({"name": "v"})), "a volume needs exactly one of"),
            (
                volume(json!({"name": "v", "disk": {"size": "1Gi"}, "secret": {"secretName": "s"}})),
                "a volume needs exactly one of",
            ),
            (volume(json!({"name": "v", "disk": {"size": "10G"}})), "spec.volumes[0].disk.size"),
            (volume(json!({"name": "v", "mountPath": "data", "disk": {"size": "1Gi"}})), "absolute path"),
            (volume(json!({"name": "v", "mountPath": "/a/../b", "disk": {"size": "1Gi"}})), "absolute path"),
            (volume(json!({"name": "V", "disk": {"size": "1Gi"}})), "spec.volumes[0].name"),
            (json!({"ports": [{"port": 70000}]}), "spec.ports[0].port"),
            (json!({"ports": [{"port": 80}, {"port": 81}]}), "several ports need names"),
            (json!({"ports": [{"name": "a", "port": 80}, {"name": "a", "port": 81}]}), "several ports need names"),
            (json!({"tolerations": [{"value": "x"}]}), "needs operator Exists"),
            (json!({"tolerations": [{"key": "a", "operator": "Exists", "value": "x"}]}), "has no value"),
            (affinity("In", json!([])), "need values"),
            (affinity("Exists", json!(["a"])), "need values"),
            (json!({"terminationGracePeriodSeconds": -1}), "terminationGracePeriodSeconds"),
            (json!({"cloneFrom": "s", "env": [{"name": "A"}]}), "a clone continues the guest"),
        ]
        .into_iter()
        .enumerate()
        {
            let name = format!("bad-{n}");
            let error = create(name, with(&fields)).await.expect_err(&fields.to_string()).to_string();
            assert!(error.contains(want), "{fields}: {error}");
        }
        let long = create("has.dots".into(), with(&json!({"ports": [{"port": 80}]}))).await.unwrap_err();
        assert!(long.to_string().contains("the name must start with a letter"), "{long}");
        create("no.ports".into(), with(&json!({}))).await?;
        let full = json!({
            "command": ["sh"], "args": ["-c", "x"],
            "env": [{"name": "A", "value": "1"}, {"name": "B", "valueFrom": {"secretKeyRef": key("s")}}],
            "envFrom": [{"prefix": "P_", "configMapRef": {"name": "c"}}],
            "userData": {"secretRef": {"name": "s"}}, "hostname": "web", "sshAuthorizedKeys": ["ssh-ed25519 AAAA me"],
            "volumes": [
                {"name": "d", "disk": {"size": "1Gi", "class": "fast"}},
                {"name": "p", "mountPath": "/p", "persistentVolumeClaim": {"claimName": "c"}},
                {"name": "c", "configMap": {"name": "c", "items": [{"key": "k", "path": "a/b", "mode": 256}]}},
                {"name": "s", "secret": {"secretName": "s", "defaultMode": 256}},
            ],
            "ports": [{"name": "web", "port": 80, "targetPort": 8080}, {"name": "dns", "port": 80, "protocol": "UDP"}],
            "driver": "qemu", "nodeSelector": {"zone": "a"},
            "affinity": {"vmAntiAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": [
                {"labelSelector": {"matchLabels": {"app": "web"}}, "topologyKey": "kubernetes.io/hostname"}]}},
            "tolerations": [{"operator": "Exists"}], "terminationGracePeriodSeconds": 20,
            "imagePullSecrets": [{"name": "r"}],
        });
        create("full".into(), with(&full)).await?;
        let stored = w.vms().get("full").await?;
        assert_eq!(stored.spec, serde_json::from_value::<MikromVMSpec>(with(&full))?, "nothing is pruned");
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn build_inputs_of_a_live_vm_are_immutable() {
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let operator = w.operator();
        w.create("web", w.spec()).await?;
        w.until_running("web").await?;
        operator.stop().await?;
        for spec in [
            json!({"image": "docker.io/other:1"}),
            json!({"vcpuCount": 4}),
            json!({"memoryMB": 2048}),
            json!({"kernelPath": "/boot/other"}),
            json!({"command": ["sh"]}),
            json!({"args": ["x"]}),
            json!({"env": [{"name": "A", "value": "1"}]}),
            json!({"envFrom": [{"secretRef": {"name": "s"}}]}),
            json!({"userData": {"inline": "x"}}),
            json!({"hostname": "other"}),
            json!({"sshAuthorizedKeys": ["ssh-ed25519 AAAA me"]}),
            json!({"volumes": [{"name": "d", "disk": {"size": "1Gi"}}]}),
            json!({"driver": "firecracker"}),
        ] {
            let error = w.patch("web", json!({"spec": spec.clone()})).await.unwrap_err().to_string();
            assert!(error.contains("cannot change once the VM exists"), "{spec}: {error}");
        }
        for spec in [
            json!({"nodeName": "elsewhere"}),
            json!({"agentAddress": "10.0.0.9:1"}),
            json!({"restartPolicy": "Never"}),
            json!({"ports": [{"port": 80}]}),
            json!({"nodeSelector": {"zone": "a"}}),
            json!({"tolerations": [{"operator": "Exists"}]}),
            json!({"terminationGracePeriodSeconds": 5}),
        ] {
            w.patch("web", json!({"spec": spec})).await?;
        }
        Ok::<_, anyhow::Error>(())
    });
}

#[test]
fn kubectl_prints_the_published_columns() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        w.announce("worker-1", &w.agent.address, 8, 8192, 600).await?;
        let _operator = w.operator();
        w.create("my-app", MikromVMSpec { agent_address: String::new(), ..w.spec() }).await?;
        w.until_running("my-app").await?;
        let get = |what: &'static str| {
            let mut command = tokio::process::Command::new(kubectl.clone());
            command.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["-n", &w.ns, "get", what]);
            async move { anyhow::Ok(String::from_utf8(command.output().await?.stdout)?) }
        };
        let words = |line: &str| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>();
        for what in ["mvm", "coracle"] {
            let table = get(what).await?;
            println!("{table}");
            let mut lines = table.lines();
            let head = words(lines.next().unwrap_or_default());
            assert_eq!(head, ["NAME", "PHASE", "IMAGE", "VCPU", "RAM(MB)", "IP", "NODE", "AGE"]);
            let row = words(lines.next().unwrap_or_default());
            let want = [
                "my-app",
                "Running",
                "docker.io/myorg/my-app:v1.2.3",
                "2",
                "1024",
                "10.100.0.42",
                "worker-1",
            ];
            assert_eq!(
                row[..7].iter().map(|w| w.trim_start_matches("mikromvm.vm.mikrom.es/")).collect::<Vec<_>>(),
                want
            );
        }
        let mut wide = tokio::process::Command::new(kubectl.clone());
        wide.arg("--kubeconfig").arg(cluster.kubeconfig()).args(["-n", &w.ns, "get", "mvm", "-o", "wide"]);
        let wide = String::from_utf8(wide.output().await?.stdout)?;
        println!("{wide}");
        let head = words(wide.lines().next().unwrap_or_default());
        assert_eq!(head[8..], ["READY", "RESTARTS", "POWER", "REASON"]);
        let row = words(wide.lines().nth(1).unwrap_or_default());
        assert!(row.contains(&"True".to_owned()) && row.contains(&"VMRunning".to_owned()), "{row:?}");
        Ok::<_, anyhow::Error>(())
    });
}
