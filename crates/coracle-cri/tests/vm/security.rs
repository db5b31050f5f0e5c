//! Groups of critest: security context, namespaces, groups policy, seccomp, no-new-privileges.

use coracle_proto::cri::security_profile::ProfileType;
use coracle_proto::cri::*;
use tonic::Code;

use crate::pod::{Pod, Row, shell, with_security_context};
use crate::rows;
use crate::support::{GROUPS, SET_UID};

pub(crate) fn rows() -> Vec<Row> {
    rows![
        runtime_should_support_container_pid,
        runtime_should_support_pod_pid,
        runtime_should_support_target_pid,
        runtime_should_support_run_as_user,
        runtime_should_support_run_as_user_name,
        standard_streams_can_be_opened_by_name,
        runtime_should_support_run_as_group,
        runtime_should_refuse_run_as_group_without_user,
        runtime_should_support_supplemental_groups,
        groups_policy_merge_adds_groups_of_the_image,
        groups_policy_strict_leaves_them_out,
        runtime_should_support_read_only_root_filesystem,
        runtime_should_support_privileged,
        runtime_should_support_adding_and_dropping_capabilities,
        runtime_should_support_masked_paths,
        runtime_should_support_readonly_paths,
        seccomp_is_unconfined_when_nil_or_unconfined,
        seccomp_runtime_default_filters,
        seccomp_localhost_profile_blocks_its_calls,
        seccomp_sethostname_needs_sys_admin,
        seccomp_is_ignored_for_privileged_containers,
        privilege_escalation_is_allowed_unless_no_new_privs,
        host_ipc_and_host_network_are_refused,
    ]
}

fn pid(name: &str, mode: NamespaceMode, target: &str) -> ContainerConfig {
    let command = ["sleep", "4321"].map(str::to_owned).to_vec();
    with_security_context(ContainerConfig { command, ..shell(name, "") }, |context| {
        context.namespace_options = Some(NamespaceOption {
            pid: mode.into(),
            target_id: target.into(),
            ..NamespaceOption::default()
        });
    })
}

async fn runtime_should_support_container_pid(pod: Pod) {
    let id = pod.run(pid("own", NamespaceMode::Container, "")).await;
    let (first, _) = pod.exec(&id, &["cat", "/proc/1/cmdline"]).await;
    assert_eq!(first, "sleep\u{0}4321\u{0}");
    pod.remove(&id).await;
}

async fn runtime_should_support_pod_pid(pod: Pod) {
    let one = pod.run(pid("one", NamespaceMode::Pod, "")).await;
    let two = pod.run(pid("two", NamespaceMode::Pod, "")).await;
    let (first, _) = pod.exec(&one, &["cat", "/proc/1/cmdline"]).await;
    assert!(!first.contains("sleep"), "{first}");
    let (seen, _) = pod.exec(&two, &["sh", "-c", "ps -o args | grep -c '[s]leep 4321'"]).await;
    assert_eq!(seen.trim(), "2", "containers see each other");
    pod.remove(&one).await;
    pod.remove(&two).await;
}

async fn runtime_should_support_target_pid(pod: Pod) {
    let one = pod.run(pid("one", NamespaceMode::Container, "")).await;
    let two = pod.run(pid("two", NamespaceMode::Target, &one)).await;
    let (first, _) = pod.exec(&two, &["cat", "/proc/1/cmdline"]).await;
    assert_eq!(first, "sleep\u{0}4321\u{0}");
    pod.remove(&two).await;
    pod.remove(&one).await;
}

fn value(value: i64) -> Option<Int64Value> {
    Some(Int64Value { value })
}

async fn runtime_should_support_run_as_user(pod: Pod) {
    let id =
        pod.run(with_security_context(shell("user", "sleep 1000"), |c| c.run_as_user = value(1001))).await;
    assert_eq!(pod.exec(&id, &["id", "-u"]).await.0, "1001\n");
    let user = pod.status(&id).await.user.unwrap().linux.unwrap();
    assert_eq!((user.uid, user.gid), (1001, 0));
    pod.remove(&id).await;
}

async fn runtime_should_support_run_as_user_name(pod: Pod) {
    let config =
        with_security_context(shell("name", "id -u; id -g"), |c| c.run_as_username = "www-data".into());
    assert_eq!(pod.output(config).await.1, ["33", "33"]);
}

async fn standard_streams_can_be_opened_by_name(pod: Pod) {
    let line = "echo out >/dev/stdout && echo err >/dev/stderr && cat </dev/stdin";
    for user in [0, 1001] {
        let config = with_security_context(shell("streams", line), |c| c.run_as_user = value(user));
        assert_eq!(pod.output(config).await, (0, vec!["out".to_owned(), "err".to_owned()]), "{user}");
        let name_of_terminal =
            "tty; readlink /proc/self/fd/0; echo out >/dev/stdout && exec stat -Lc %u $(tty)";
        let config = with_security_context(shell("tty", name_of_terminal), |c| c.run_as_user = value(user));
        let (code, lines) = pod.output(ContainerConfig { tty: true, ..config }).await;
        let lines: Vec<_> = lines.iter().map(|line| line.trim().to_owned()).collect();
        let want = ["/dev/pts/0", "/dev/pts/0", "out", &user.to_string()].map(str::to_owned).to_vec();
        assert_eq!((code, lines), (0, want), "{user}");
    }
}

async fn runtime_should_support_run_as_group(pod: Pod) {
    let config = with_security_context(shell("group", "id -u; id -g"), |c| {
        (c.run_as_user, c.run_as_group) = (value(1001), value(1002));
    });
    assert_eq!(pod.output(config).await.1, ["1001", "1002"]);
}

async fn runtime_should_refuse_run_as_group_without_user(pod: Pod) {
    let config = with_security_context(shell("group", "true"), |c| c.run_as_group = value(1002));
    assert_eq!(pod.create(config).await.unwrap_err().code(), Code::InvalidArgument);
}

async fn runtime_should_support_supplemental_groups(pod: Pod) {
    let config =
        with_security_context(shell("groups", "id -G"), |c| c.supplemental_groups = vec![1234, 5678]);
    assert_eq!(pod.output(config).await.1, ["0 1234 5678"]);
}

fn of_groups(policy: SupplementalGroupsPolicy) -> ContainerConfig {
    let image = Some(ImageSpec { image: GROUPS.into(), ..ImageSpec::default() });
    let name = policy.as_str_name().to_lowercase();
    with_security_context(ContainerConfig { image, ..shell(&name, "id -G") }, |c| {
        (c.run_as_user, c.supplemental_groups) = (value(1000), vec![60_000]);
        c.supplemental_groups_policy = policy.into();
    })
}

async fn groups_policy_merge_adds_groups_of_the_image(pod: Pod) {
    let id = pod.run(of_groups(SupplementalGroupsPolicy::Merge)).await;
    let (status, log) = pod.wait_for_exit(&id).await;
    assert_eq!(log, ["1000 50000 60000"]);
    for (policy, want) in [
        (SupplementalGroupsPolicy::Merge, "1000 50000 60000\n"),
        (SupplementalGroupsPolicy::Strict, "1000 60000\n"),
    ] {
        let command = ["sleep", "1000"].map(str::to_owned).to_vec();
        let config = ContainerConfig { command, ..of_groups(policy) };
        let metadata = Some(ContainerMetadata { name: format!("exec-{policy:?}"), attempt: 0 });
        let joined = pod.run(ContainerConfig { metadata, ..config }).await;
        assert_eq!(pod.exec(&joined, &["id", "-G"]).await.0, want, "of a command that joins");
        pod.remove(&joined).await;
    }
    assert_eq!(status.user.unwrap().linux.unwrap().supplemental_groups, [1000, 50_000, 60_000]);
    pod.remove(&id).await;
}

async fn groups_policy_strict_leaves_them_out(pod: Pod) {
    assert_eq!(pod.output(of_groups(SupplementalGroupsPolicy::Strict)).await.1, ["1000 60000"]);
}

async fn runtime_should_support_read_only_root_filesystem(pod: Pod) {
    let config = with_security_context(shell("root", "touch /tmp/x"), |c| c.readonly_rootfs = true);
    assert_ne!(pod.output(config).await.0, 0);
    assert_eq!(pod.output(shell("root", "touch /tmp/x")).await.0, 0);
}

async fn runtime_should_support_privileged(pod: Pod) {
    let line = "mkdir /tmp/m && mount -t tmpfs none /tmp/m";
    let config = with_security_context(shell("privileged", line), |c| c.privileged = true);
    assert_eq!(pod.output(config).await.0, 0);
    assert_ne!(pod.output(shell("plain", line)).await.0, 0);
    manages_its_network(
        &pod,
        with_security_context(shell("bridge", "sleep 1000"), |c| c.privileged = true),
        true,
    )
    .await;
    let all = "grep CapEff /proc/self/status";
    let config = with_security_context(shell("privileged", all), |c| c.privileged = true);
    assert_eq!(pod.output(config).await.1, ["CapEff:\t000001ffffffffff"]);
}

/// Checks whether a container may create network interfaces, for which the guest's kernel loads its bridge module.
async fn manages_its_network(pod: &Pod, config: ContainerConfig, may: bool) {
    let id = pod.run(config).await;
    for cmd in [&["brctl", "addbr", "foobar"][..], &["ip", "link", "add", "dummy7", "type", "dummy"]] {
        let made = pod.try_exec(&id, cmd, 20).await.unwrap();
        assert_eq!(made.exit_code == 0, may, "{cmd:?}: {made:?}");
    }
    if may {
        pod.exec(&id, &["brctl", "delbr", "foobar"]).await;
        pod.exec(&id, &["ip", "link", "delete", "dummy7"]).await;
    }
    pod.remove(&id).await;
}

async fn runtime_should_support_adding_and_dropping_capabilities(pod: Pod) {
    let with = |add: &[&str], drop: &[&str]| {
        let own = |list: &[&str]| list.iter().map(|name| (*name).to_owned()).collect();
        let capabilities =
            Capability { add_capabilities: own(add), drop_capabilities: own(drop), ..Capability::default() };
        with_security_context(shell("caps", "grep CapEff /proc/self/status"), |c| {
            c.capabilities = Some(capabilities)
        })
    };
    let line = |config: ContainerConfig| ContainerConfig {
        command: ["sleep", "1000"].map(str::to_owned).to_vec(),
        ..config
    };
    manages_its_network(&pod, line(with(&["NET_ADMIN"], &[])), true).await;
    manages_its_network(&pod, line(with(&[], &[])), false).await;
    let id = pod.run(line(with(&[], &["NET_RAW"]))).await;
    let ping = pod.try_exec(&id, &["ping", "127.0.0.1"], 20).await.unwrap();
    assert!(
        ping.exit_code != 0 && String::from_utf8_lossy(&ping.stderr).contains("permission denied"),
        "{ping:?}"
    );
    assert!(!ping.stdout.is_empty());
    pod.remove(&id).await;
    for (why, config, want) in [
        ("add", with(&["NET_ADMIN"], &[]), "00000000a80435fb"),
        ("drop", with(&[], &["CHOWN"]), "00000000a80425fa"),
        ("add ALL", with(&["ALL"], &[]), "000001ffffffffff"),
        ("drop ALL", with(&[], &["ALL"]), "0000000000000000"),
    ] {
        assert_eq!(pod.output(config).await.1, [format!("CapEff:\t{want}")], "{why}");
    }
}

async fn runtime_should_support_masked_paths(pod: Pod) {
    let line = "cat /etc/passwd | wc -c; ls /www | wc -l";
    let config = with_security_context(shell("masked", line), |c| {
        c.masked_paths = ["/etc/passwd", "/www", "/no/such"].map(str::to_owned).to_vec();
    });
    assert_eq!(pod.output(config).await.1, ["0", "0"]);
    let config =
        with_security_context(shell("program", "sleep 1000"), |c| c.masked_paths = vec![SET_UID.into()]);
    let id = pod.run(config).await;
    let masked = pod.try_exec(&id, &["/bin/sh", "-c", SET_UID], 20).await.unwrap();
    let said = String::from_utf8_lossy(&masked.stderr).into_owned();
    assert!(masked.exit_code != 0 && said.ends_with("Permission denied\n"), "{said}");
    pod.remove(&id).await;
}

async fn runtime_should_support_readonly_paths(pod: Pod) {
    let config =
        with_security_context(shell("readonly", "touch /www/x"), |c| c.readonly_paths = vec!["/www".into()]);
    let (code, log) = pod.output(config).await;
    assert!(code != 0 && log[0].contains("Read-only file system"), "{log:?}");
}

fn seccomp_config(name: &str, line: &str, profile: Option<(ProfileType, &str)>) -> ContainerConfig {
    with_security_context(shell(name, line), |c| {
        c.seccomp = profile.map(|(profile_type, localhost_ref)| SecurityProfile {
            profile_type: profile_type.into(),
            localhost_ref: localhost_ref.into(),
        });
    })
}

const MODE: &str = "grep ^Seccomp: /proc/self/status";

async fn seccomp_is_unconfined_when_nil_or_unconfined(pod: Pod) {
    for profile in [None, Some((ProfileType::Unconfined, ""))] {
        assert_eq!(pod.output(seccomp_config("seccomp", MODE, profile)).await.1, ["Seccomp:\t0"]);
    }
}

async fn seccomp_runtime_default_filters(pod: Pod) {
    let profile = Some((ProfileType::RuntimeDefault, ""));
    assert_eq!(pod.output(seccomp_config("seccomp", MODE, profile)).await.1, ["Seccomp:\t2"]);
    let with_nnp = with_security_context(seccomp_config("seccomp", MODE, profile), |c| c.no_new_privs = true);
    assert_eq!(pod.output(with_nnp).await.1, ["Seccomp:\t2"]);
}

async fn seccomp_localhost_profile_blocks_its_calls(pod: Pod) {
    let file = pod.dir.join("profile.json");
    let calls = r#"[{"names": ["chmod", "fchmodat", "fchmodat2"], "action": "SCMP_ACT_ERRNO"}]"#;
    std::fs::write(&file, format!(r#"{{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": {calls}}}"#)).unwrap();
    let profile = Some((ProfileType::Localhost, file.to_str().unwrap()));
    let (code, log) = pod.output(seccomp_config("seccomp", "chmod 400 /tmp", profile)).await;
    assert!(code != 0 && log[0].contains("Operation not permitted"), "{log:?}");
    let missing = seccomp_config("seccomp", "true", Some((ProfileType::Localhost, "/no/such.json")));
    assert_eq!(pod.create(missing).await.unwrap_err().code(), Code::InvalidArgument);
}

async fn seccomp_sethostname_needs_sys_admin(pod: Pod) {
    let line = "hostname other && hostname";
    let admin = |profile| {
        with_security_context(seccomp_config("hostname", line, profile), |c| {
            let add_capabilities = vec!["SYS_ADMIN".into()];
            c.capabilities = Some(Capability { add_capabilities, ..Capability::default() });
        })
    };
    assert_eq!(pod.output(admin(Some((ProfileType::RuntimeDefault, "")))).await.1, ["other"]);
    let file = pod.dir.join("hostname.json");
    let calls = r#"[{"names": ["sethostname"], "action": "SCMP_ACT_ERRNO"}]"#;
    std::fs::write(&file, format!(r#"{{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": {calls}}}"#)).unwrap();
    let blocked = admin(Some((ProfileType::Localhost, file.to_str().unwrap())));
    assert_ne!(pod.output(blocked).await.0, 0);
    pod.output(with_security_context(shell("undo", "hostname security"), |c| c.privileged = true)).await;
}

async fn seccomp_is_ignored_for_privileged_containers(pod: Pod) {
    let config = seccomp_config("seccomp", MODE, Some((ProfileType::RuntimeDefault, "")));
    let config = with_security_context(config, |c| c.privileged = true);
    assert_eq!(pod.output(config).await.1, ["Seccomp:\t0"]);
}

/// A set-user-ID program needs the privileges of its owner.
async fn privilege_escalation_is_allowed_unless_no_new_privs(pod: Pod) {
    for (no_new_privs, shown) in [(true, "1"), (false, "0")] {
        let line = format!("grep NoNewPrivs /proc/self/status; {SET_UID} -c 1 127.0.0.1 >/dev/null 2>&1");
        let config = with_security_context(shell("nnp", &line), |c| {
            (c.no_new_privs, c.run_as_user) = (no_new_privs, value(1000));
        });
        let (code, log) = pod.output(config).await;
        assert_eq!((code != 0, log), (no_new_privs, vec![format!("NoNewPrivs:\t{shown}")]));
    }
}

async fn host_ipc_and_host_network_are_refused(pod: Pod) {
    let with = |options: NamespaceOption| {
        with_security_context(shell("host", "true"), |c| c.namespace_options = Some(options))
    };
    let node = i32::from(NamespaceMode::Node);
    for options in [
        NamespaceOption { ipc: node, ..NamespaceOption::default() },
        NamespaceOption { network: node, ..NamespaceOption::default() },
    ] {
        assert_eq!(pod.create(with(options)).await.unwrap_err().code(), Code::InvalidArgument);
    }
    let config = with(NamespaceOption { pid: node, ..NamespaceOption::default() });
    assert_eq!(pod.output(config).await.0, 0, "the host's processes are the guest's");
}
