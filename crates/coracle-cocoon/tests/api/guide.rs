//! Runs the commands of the guide, in order, with kubectl.

use coracle_testkit::{cluster, tools};

use crate::world::World;

/// Returns the lines of `sh` blocks of the guide.
fn commands() -> Vec<String> {
    let page =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/guides/cocoonset.md"))
            .unwrap();
    let blocks = page.split("```sh\n").skip(1).map(|rest| rest.split("```").next().unwrap());
    blocks.flat_map(str::lines).map(str::to_owned).collect()
}

#[test]
fn commands_of_the_guide_work() {
    let Some([kubectl]) = tools::require(["kubectl"]) else { return };
    cluster::run(|cluster| async move {
        let w = World::new(cluster).await?;
        let _operator = w.operator();
        let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let example = std::fs::read_to_string(format!("{root}/examples/cocoonset.yaml"))?;
        let dir = tempfile::tempdir()?;
        std::fs::create_dir(dir.path().join("examples"))?;
        let here = example.replace("namespace: default", &format!("namespace: {}", w.ns));
        std::fs::write(dir.path().join("examples/cocoonset.yaml"), here)?;
        let all = commands();
        assert!(all.len() >= 10, "{all:?}");
        for line in all {
            // Quoted words of the page have no spaces.
            let mut words = line.split_whitespace().map(|word| word.trim_matches('\''));
            assert_eq!(words.next(), Some("kubectl"), "{line}");
            let mut command = tokio::process::Command::new(&kubectl);
            command.current_dir(dir.path()).arg("--kubeconfig").arg(cluster.kubeconfig());
            let output = command.args(["-n", &w.ns]).args(words).output().await?;
            let said = String::from_utf8_lossy(&[output.stdout, output.stderr].concat()).into_owned();
            anyhow::ensure!(output.status.success(), "{line}: {said}");
            if line.ends_with("get cocoonset demo") {
                assert!(
                    said.contains("PHASE") && said.contains("READY") && said.contains("Running"),
                    "{said}"
                );
            }
        }
        anyhow::ensure!(w.pod_names().await?.is_empty(), "pods are left");
        anyhow::Ok(())
    });
}
