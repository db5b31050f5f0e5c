//! The command line without a system: errors, exit codes, completion. The golden file of its help is `docs/reference/cli.md`,
//! which `cargo xtask lint` compares with the grammar.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::Instant;

use crate::support::{CORACLE, text};

fn coracle(args: &[&str]) -> Output {
    let mut command = Command::new(CORACLE);
    for (name, _) in std::env::vars().filter(|(name, _)| name.starts_with("CORACLE_") || name == "KUBECONFIG")
    {
        command.env_remove(name);
    }
    command.args(args).env("COLUMNS", "100").env("HOME", "/nowhere").output().unwrap()
}

/// Compares the output and exit code of command lines with the golden file.
#[test]
fn golden_errors_and_exit_codes() {
    let dir = tempfile::tempdir().unwrap();
    // The node daemon would narrow a wider mode, and log that with a time.
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o700)).unwrap();
    let state = dir.path().to_str().unwrap();
    let config = dir.path().join("kubeconfig");
    std::fs::write(&config, kubeconfig()).unwrap();
    let config = config.to_str().unwrap();
    let mut golden = String::new();
    for args in [
        &["pss"][..],
        &["ps", "--nope"],
        &["ps", "-o", "xml"],
        &["ps", "-o", "jsonpath={.items"],
        &["ps", "--state", state],
        &["inspect", "--state", state, "web"],
        &["exec", "--state", state, "web", "true"],
        &["wait", "--timeout", "soon", "web"],
        &["cp", "a", "b"],
        &["run"],
        &["run", "--publish", "http", "image", "--state", state],
        &["up", "--state", state, "--kubeconfig", "/nowhere/kubeconfig"],
        &["up", "--state", state, "--kubeconfig", config, "--with", "scheduler"],
        &["up", "--state", state, "--webhook-url-host", "here"],
        &["ps", "--kubeconfig", "/nowhere/kubeconfig"],
        &["ps", "--kubeconfig", config, "--context", "nope"],
        &["image", "ls", "-n", "default"],
        &["run", "-n", "default", "image"],
        &["node", "--state", state, "--host-listen", "127.0.0.1:0"],
        &["down", "--state", state],
    ] {
        let output = coracle(args);
        let said = text(&output.stderr);
        golden += &format!("$ coracle {}\n{said}exit {}\n\n", args.join(" "), output.status.code().unwrap());
        assert!(output.stdout.is_empty(), "{args:?} wrote to stdout");
    }
    let golden = golden.replace(state, "STATE");
    // The socket's directory is a hash of the state directory, so it is replaced.
    let golden: String = golden.lines().map(|line| format!("{}\n", sockets_hidden(line))).collect();
    insta::assert_snapshot!("errors", golden);
}

fn sockets_hidden(line: &str) -> String {
    let Some((before, after)) = line.split_once("/host.sock") else { return line.to_owned() };
    let at = before.rfind(' ').map_or(0, |at| at + 1);
    format!("{}SOCKET{after}", &before[..at])
}

fn kubeconfig() -> String {
    "apiVersion: v1\nkind: Config\nclusters: [{name: c, cluster: {server: 'https://127.0.0.1:1'}}]\n\
     users: [{name: u, user: {token: t}}]\ncontexts: [{name: one, context: {cluster: c, user: u}}]\n\
     current-context: one\n"
        .to_owned()
}

#[test]
fn unreachable_cluster_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let config = dir.path().join("kubeconfig");
    std::fs::write(&config, kubeconfig()).unwrap();
    let output = coracle(&["ps", "--kubeconfig", config.to_str().unwrap()]);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("error[COR-API-001]: list MikromVMs") && said.contains("refused"), "{said}");
}

/// Without a kubeconfig, a Pod means its own cluster, as with kubectl.
#[test]
fn in_cluster_config_is_used_without_a_kubeconfig() {
    let said = |kubeconfig: Option<&str>| {
        let mut command = Command::new(CORACLE);
        command.args(["uninstall", "--cluster"]).env("HOME", "/nowhere").env_remove("KUBECONFIG");
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1").env("KUBERNETES_SERVICE_PORT", "1");
        command.envs(kubeconfig.map(|path| ("KUBECONFIG", path)));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(2));
        text(&output.stderr)
    };
    let own = said(None);
    assert!(own.contains("no account of a Pod"), "{own}");
    let named = said(Some("/nowhere/kubeconfig"));
    assert!(named.contains("/nowhere/kubeconfig") && !named.contains("account of a Pod"), "{named}");
}

#[test]
fn completion_scripts_are_valid_and_know_formats() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = coracle(&["completion", shell]);
        assert!(script.status.success());
        let script = text(&script.stdout);
        // These two shells complete subcommands and flags, but no values.
        let values = !matches!(shell, "elvish" | "powershell");
        let words = ["jsonpath=", "controller-manager"].iter().filter(|_| values);
        for word in ["port-forward", "explain"].iter().chain(words) {
            assert!(script.contains(word), "{shell}: {word}");
        }
        if shell == "bash" {
            let dir = tempfile::tempdir().unwrap();
            let file = dir.path().join("completion.bash");
            std::fs::write(&file, &script).unwrap();
            assert!(Command::new("bash").arg("-n").arg(&file).status().unwrap().success());
        }
    }
}

#[test]
fn control_plane_that_dies_at_once_is_reported_with_its_log() {
    let dir = tempfile::tempdir().unwrap();
    let (state, tools) = (dir.path().join("state"), dir.path().join("tools"));
    program(&tools, "etcd", "echo 'panic: the database is broken' >&2; exit 2");
    program(&tools, "kube-apiserver", "exec sleep 1000");
    let began = Instant::now();
    let args = ["up", "--detach", "--state", state.to_str().unwrap(), "--tools", tools.to_str().unwrap()];
    let output = coracle(&args);
    let said = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(began.elapsed().as_secs() < 20, "it was not given up early");
    for words in [
        "error[COR-UP-008]: etcd ended 3 times right after its start (exit status: 2)",
        "| panic: the database is broken",
        "logs/etcd.log",
        "error[COR-UP-004]",
    ] {
        assert!(said.contains(words), "{words:?} is not in {said}");
    }
    let left = coracle_hypervisor_testing::instances::processes_of(&state);
    assert!(left.is_empty(), "processes are left: {left:?}");
    assert!(!state.join("up.ready").exists());
}

fn program(tools: &Path, name: &str, script: &str) {
    use std::os::unix::fs::PermissionsExt;
    std::fs::create_dir_all(tools.join("bin")).unwrap();
    let file = tools.join("bin").join(name);
    std::fs::write(&file, format!("#!/bin/sh\n{script}\n")).unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
}

#[test]
fn registry_configuration_is_read_before_any_transfer() {
    let dir = tempfile::tempdir().unwrap();
    let registry = dir.path().join("registry.test");
    std::fs::create_dir(&registry).unwrap();
    let pull = |config: &Path| {
        let (file, config) = (dir.path().join("disk.raw"), config.to_str().unwrap());
        let pulled = coracle(&[
            "image",
            "pull",
            "registry.test/disk:1",
            "--disk",
            file.to_str().unwrap(),
            "--registry-config",
            config,
        ]);
        assert!(!pulled.status.success());
        text(&pulled.stderr)
    };
    std::fs::write(registry.join("hosts.toml"), "\nskip_verify = 'yes'\n").unwrap();
    let said = pull(dir.path());
    for word in ["COR-IMG-018", "hosts.toml line 2", "skip_verify is true or false"] {
        assert!(said.replace('\n', " ").contains(word), "{word}: {said}");
    }
    let said = pull(&dir.path().join("absent"));
    assert!(said.contains("COR-IMG-018"), "{said}");

    // An unknown key causes a warning, and the server of the file is used.
    std::fs::write(registry.join("hosts.toml"), "server = 'http://127.0.0.1:1'\nspeed = 1\n").unwrap();
    let said = pull(dir.path());
    assert!(said.contains("line 2: unknown key \"speed\""), "{said}");
    assert!(said.contains("COR-IMG-011") && said.contains("127.0.0.1:1"), "{said}");
}
