//! The resource definition in the API server: its refusals, their messages, and the columns of kubectl.

use coracle_api::{MikromVM, MikromVMSpec};
use coracle_testkit::{cluster, tools};
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
        ] {
            let error = w.patch("web", json!({"spec": spec.clone()})).await.unwrap_err().to_string();
            assert!(error.contains("cannot change once the VM exists"), "{spec}: {error}");
        }
        for spec in [
            json!({"nodeName": "elsewhere"}),
            json!({"agentAddress": "10.0.0.9:1"}),
            json!({"restartPolicy": "Never"}),
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
        Ok::<_, anyhow::Error>(())
    });
}
