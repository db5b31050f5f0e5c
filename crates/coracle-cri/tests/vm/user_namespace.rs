//! Group UserNamespaces of critest, and the view of containers in a pod with `hostUsers: false`.

use std::os::unix::fs::{MetadataExt as _, chown};

use coracle_proto::cri::*;
use tonic::Code;

use crate::pod::{Pod, Row, shell, with_security_context};
use crate::rows;
use crate::support::{Daemon, IMAGE};

/// First id of the guest for the pods of these tests, which is id 0 in the pod. As high as kubelets assign them.
const FIRST: u32 = 3_565_027_328;
const LENGTH: u32 = 65_536;

pub(crate) fn rows() -> Vec<Row> {
    rows![
        runtime_should_support_namespace_mode_pod,
        runtime_should_support_namespace_mode_node,
        runtime_should_fail_if_more_than_one_mapping_provided,
        runtime_should_fail_if_container_id_0_is_not_mapped,
        runtime_should_fail_with_namespace_mode_container,
        runtime_should_fail_with_namespace_mode_target,
        containers_without_the_namespace_of_their_pod_are_refused,
        root_of_a_container_owns_its_image_and_files,
        users_of_a_container_are_those_of_its_image,
        owners_of_volumes_are_those_of_the_container,
        ids_of_a_mount_that_are_not_the_pods_are_refused,
        root_of_a_container_has_no_rights_over_the_guest,
        terminals_belong_to_the_container,
        runtime_should_support_port_80,
    ]
}

fn mapping(container_id: u32, host_id: u32, length: u32) -> Vec<IdMapping> {
    vec![IdMapping { host_id, container_id, length }]
}

fn namespaces(mode: NamespaceMode, ids: Vec<IdMapping>) -> Option<NamespaceOption> {
    let userns_options = Some(UserNamespace { mode: mode.into(), uids: ids.clone(), gids: ids });
    let pid = NamespaceMode::Container.into();
    Some(NamespaceOption { userns_options, pid, ..NamespaceOption::default() })
}

/// Returns the configuration of another pod with these namespaces.
fn with_namespaces(
    config: PodSandboxConfig,
    name: &str,
    namespace_options: Option<NamespaceOption>,
) -> PodSandboxConfig {
    let security = LinuxSandboxSecurityContext { namespace_options, ..Default::default() };
    let linux = LinuxPodSandboxConfig { security_context: Some(security), ..Default::default() };
    let metadata = config.metadata.map(|metadata| PodSandboxMetadata {
        name: name.into(),
        uid: format!("uid-{name}"),
        ..metadata
    });
    PodSandboxConfig { linux: Some(linux), metadata, ..config }
}

/// Starts a pod in a user namespace.
pub(crate) async fn pod(daemon: &Daemon) -> Pod {
    let ids = mapping(0, FIRST, LENGTH);
    daemon
        .pod_of(with_namespaces(daemon.config("userns"), "userns", namespaces(NamespaceMode::Pod, ids)))
        .await
}

/// Checks that a sandbox is refused and no VM is created for it.
async fn is_refused(pod: &Pod, mode: NamespaceMode, ids: Vec<IdMapping>) {
    let config = Some(with_namespaces(pod.config.clone(), "refused", namespaces(mode, ids)));
    let request = RunPodSandboxRequest { config, ..RunPodSandboxRequest::default() };
    let refused = pod.kubelet.clone().runtime.run_pod_sandbox(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
}

async fn runtime_should_fail_if_more_than_one_mapping_provided(pod: Pod) {
    let two = [mapping(0, FIRST, 100), mapping(100, FIRST + 100, 100)].concat();
    is_refused(&pod, NamespaceMode::Pod, two).await;
}

async fn runtime_should_fail_if_container_id_0_is_not_mapped(pod: Pod) {
    is_refused(&pod, NamespaceMode::Pod, mapping(1, FIRST, 100)).await;
}

async fn runtime_should_fail_with_namespace_mode_container(pod: Pod) {
    is_refused(&pod, NamespaceMode::Container, mapping(0, FIRST, 100)).await;
}

async fn runtime_should_fail_with_namespace_mode_target(pod: Pod) {
    is_refused(&pod, NamespaceMode::Target, mapping(0, FIRST, 100)).await;
}

/// In a sandbox of its own. Users of the host namespace are those of the guest, never those of the node.
async fn runtime_should_support_namespace_mode_node(pod: Pod) {
    let of_node = || namespaces(NamespaceMode::Node, vec![]);
    let config = with_namespaces(pod.config.clone(), "node", of_node());
    let request = RunPodSandboxRequest { config: Some(config.clone()), ..RunPodSandboxRequest::default() };
    let made = pod.kubelet.clone().runtime.run_pod_sandbox(request).await.unwrap().into_inner();
    let pod = Pod { id: made.pod_sandbox_id, config, ..pod };
    let line = shell("node", "cat /proc/self/uid_map | tr -s ' ' | sed 's/^ //'");
    let container = with_security_context(line, |context| context.namespace_options = of_node());
    assert_eq!(pod.output(container).await, (0, vec!["0 0 4294967295".to_owned()]));
}

/// Returns a container in the user namespace of its pod.
fn user_namespace_config(name: &str, line: &str) -> ContainerConfig {
    let ids = mapping(0, FIRST, LENGTH);
    with_security_context(shell(name, line), |context| {
        context.namespace_options = namespaces(NamespaceMode::Pod, ids)
    })
}

async fn runtime_should_support_namespace_mode_pod(pod: Pod) {
    let line = "cat /proc/self/uid_map /proc/self/gid_map | tr -s ' ' | sed 's/^ //'";
    let map = format!("0 {FIRST} {LENGTH}");
    assert_eq!(pod.output(user_namespace_config("map", line)).await, (0, vec![map.clone(), map]));
}

async fn containers_without_the_namespace_of_their_pod_are_refused(pod: Pod) {
    let refused = pod.create(shell("plain", "true")).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
}

async fn root_of_a_container_owns_its_image_and_files(pod: Pod) {
    let line = "stat -c %u:%g / /bin/sh /etc /etc/hosts /dev /dev/null /dev/shm /model/words; \
                echo text >/new && chown 7:8 /new && chmod 600 /new && stat -c %u:%g /new && cat /new; \
                echo more >>/etc/hostname && stat -c %u:%g /etc/hostname; echo gone >/dev/null; id -u";
    let image = Some(ImageSpec { image: IMAGE.into(), ..ImageSpec::default() });
    let (container_path, image_sub_path) = ("/model".to_owned(), "model/en".to_owned());
    let model = Mount { container_path, image_sub_path, image, readonly: true, ..Mount::default() };
    let (code, lines) =
        pod.output(ContainerConfig { mounts: vec![model], ..user_namespace_config("owner", line) }).await;
    let root = "0:0".to_owned();
    let want = [vec![root.clone(); 8], vec!["7:8".into(), "text".into(), root, "0".into()]].concat();
    assert_eq!((code, lines), (0, want));
}

async fn users_of_a_container_are_those_of_its_image(pod: Pod) {
    let user = with_security_context(
        user_namespace_config(
            "user",
            "id -u; id -g; touch /tmp/own && stat -c %u /tmp/own; cat /proc/self/status",
        ),
        {
            |context| {
                context.run_as_user = Some(Int64Value { value: 1000 });
                context.run_as_group = Some(Int64Value { value: 2000 });
            }
        },
    );
    let mut user = user;
    user.mounts = vec![volume(&pod, "tmp", "/tmp", 0o777, true)];
    let (code, lines) = pod.output(user).await;
    assert_eq!((code, &lines[..3]), (0, ["1000", "2000", "1000"].map(str::to_owned).as_slice()), "{lines:?}");
    assert!(lines.iter().any(|line| line == "CapEff:\t0000000000000000"), "{lines:?}");
    assert_eq!(pod.dir.join("tmp/own").metadata().unwrap().uid(), 1000, "the node has the container's ids");
}

/// Returns a mount of a new directory of the node.
fn volume(pod: &Pod, name: &str, container_path: &str, mode: u32, has_ids: bool) -> Mount {
    use std::os::unix::fs::PermissionsExt as _;
    let dir = pod.dir.join(name);
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::set_permissions(&dir, std::fs::Permissions::from_mode(mode)).unwrap();
    let ids = if has_ids { mapping(0, FIRST, LENGTH) } else { vec![] };
    Mount {
        container_path: container_path.into(),
        host_path: dir.to_str().unwrap().into(),
        uid_mappings: ids.clone(),
        gid_mappings: ids,
        ..Mount::default()
    }
}

async fn owners_of_volumes_are_those_of_the_container(pod: Pod) {
    let line = "stat -c %u:%g /data /data/file /data/foreign; touch /data/new; mkdir -p /data/deep/er; \
                chown 5:6 /data/new; stat -c %u:%g /data/new; cd /raw && stat -c %u:%g . ; touch /raw/new || echo no";
    let mut config = user_namespace_config("volumes", line);
    config.mounts =
        vec![volume(&pod, "data", "/data", 0o755, true), volume(&pod, "raw", "/raw", 0o755, false)];
    let data = pod.dir.join("data");
    for (name, id) in [("file", 33), ("foreign", LENGTH)] {
        std::fs::write(data.join(name), "").unwrap();
        chown(data.join(name), Some(id), Some(id)).unwrap();
    }
    let (code, lines) = pod.output(config).await;
    let want = ["0:0", "33:33", "65534:65534", "5:6", "65534:65534", "no"].map(str::to_owned).to_vec();
    let lines: Vec<_> = lines.into_iter().filter(|line| !line.starts_with("touch:")).collect();
    assert_eq!((code, lines), (0, want));
    let owner = |name: &str| data.join(name).metadata().map(|of| (of.uid(), of.gid())).unwrap();
    assert_eq!((owner("new"), owner("deep/er")), ((5, 6), (0, 0)), "as on a mount with mapped ids");
}

async fn ids_of_a_mount_that_are_not_the_pods_are_refused(pod: Pod) {
    let mut config = user_namespace_config("others", "true");
    let others = mapping(0, FIRST + LENGTH, LENGTH);
    let mount = volume(&pod, "others", "/data", 0o755, true);
    config.mounts = vec![Mount { uid_mappings: others.clone(), gid_mappings: others, ..mount }];
    let refused = pod.create(config).await.unwrap_err();
    assert_eq!(refused.code(), Code::InvalidArgument, "{refused}");
}

async fn root_of_a_container_has_no_rights_over_the_guest(pod: Pod) {
    let line = "cat /proc/self/uid_map >/dev/null; hostname changed 2>/dev/null && echo renamed; \
                mknod /dev/disk b 254 0 2>/dev/null && echo device; \
                ip link set lo down 2>/dev/null && echo network; \
                mount -t tmpfs none /mnt 2>/dev/null && echo mounted; echo done";
    let config = with_security_context(user_namespace_config("rights", line), |context| {
        let add_capabilities = vec!["SYS_ADMIN".to_owned(), "NET_ADMIN".to_owned()];
        context.capabilities = Some(Capability { add_capabilities, ..Capability::default() });
    });
    assert_eq!(pod.output(config).await, (0, vec!["done".to_owned()]));
}

async fn terminals_belong_to_the_container(pod: Pod) {
    let config = ContainerConfig {
        tty: true,
        ..user_namespace_config("tty", "stat -c %u:%g $(tty); echo out >/dev/stdout")
    };
    let (code, lines) = pod.output(config).await;
    let lines: Vec<_> = lines.iter().map(|line| line.trim()).collect();
    assert_eq!((code, lines.as_slice()), (0, ["0:5", "out"].as_slice()));
    let line = "echo out >/dev/stdout && echo err >/dev/stderr";
    assert_eq!(
        pod.output(user_namespace_config("pipes", line)).await,
        (0, vec!["out".to_owned(), "err".to_owned()])
    );
}

async fn runtime_should_support_port_80(pod: Pod) {
    let id = pod.run(user_namespace_config("web", "exec httpd -f -p 80 -h /www")).await;
    let page =
        coracle_testkit::eventually_within(std::time::Duration::from_secs(20), "the page", async || {
            let fetched = pod.try_exec(&id, &["wget", "-qO-", "http://127.0.0.1/"], 10).await.ok()?;
            (fetched.stdout == b"hello\n").then_some(())
        });
    page.await.unwrap();
    let (groups, _) = pod.exec(&id, &["sh", "-c", "id -u; stat -c %u /proc/1"]).await;
    assert_eq!(groups, "0\n0\n", "exec is in the namespace, too");
    pod.remove(&id).await;
}
