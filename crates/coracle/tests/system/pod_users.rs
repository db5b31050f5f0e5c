//! A Pod with `hostUsers: false` under a real kubelet.

use crate::pod_system::{READY, System};

const POD: &str = r#"
apiVersion: v1
kind: ConfigMap
metadata: {name: page}
data: {page: hello}
---
apiVersion: v1
kind: Secret
metadata: {name: key}
stringData: {key: swordfish}
---
apiVersion: v1
kind: Pod
metadata: {name: mapped}
spec:
  hostUsers: false
  terminationGracePeriodSeconds: 1
  securityContext: {fsGroup: 2000}
  initContainers:
  - name: user
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "id -u; echo mine > /scratch/user && echo mine > /memory/user; echo out > /dev/stdout; echo said > /dev/termination-log"]
    securityContext: {runAsUser: 1000, runAsGroup: 1000}
    volumeMounts: [{name: work, mountPath: /scratch}, {name: memory, mountPath: /memory}]
  containers:
  - name: main
    image: localhost/coracle/demo:1
    imagePullPolicy: Never
    command: [sh, -c, "exec busybox httpd -f -p 80 -h /page"]
    readinessProbe: {httpGet: {path: /page, port: 80}, periodSeconds: 1}
    volumeMounts:
    - {name: page, mountPath: /page}
    - {name: key, mountPath: /key}
    - {name: work, mountPath: /scratch}
    - {name: memory, mountPath: /memory}
  volumes:
  - {name: page, configMap: {name: page}}
  - {name: key, secret: {secretName: key, defaultMode: 0400}}
  - {name: work, emptyDir: {}}
  - {name: memory, emptyDir: {medium: Memory, sizeLimit: 4Mi}}
"#;

/// Checks that the pod's users are mapped in the guest, and that its volumes show the same owners as without the mapping.
pub(crate) async fn pod_has_users_of_its_own(system: &System) {
    system.apply("mapped.yaml", POD).await;
    system.wait(&["pod", "mapped"], READY, "True").await;
    assert_eq!(system.kubectl(&["logs", "mapped", "-c", "user"]).await.unwrap(), "1000\nout\n");
    let message = "{.status.initContainerStatuses[0].state.terminated.message}";
    system.wait(&["pod", "mapped"], message, "said\n").await;
    let exec = async |line: &str| {
        system.kubectl(&["exec", "mapped", "-c", "main", "--", "sh", "-c", line]).await.unwrap()
    };
    let map = exec("cat /proc/self/uid_map").await;
    let map: Vec<u32> = map.split_whitespace().map(|number| number.parse().unwrap()).collect();
    assert_eq!((map[0], map[2]), (0, 65_536), "the range of a kubelet");
    assert!(map[1] >= 65_536, "no id of the node's users: {map:?}");
    assert_eq!(
        exec("cat /page/page /key/key /scratch/user /memory/user").await,
        "helloswordfishmine\nmine\n"
    );
    let owners = "busybox stat -Lc %u:%g /bin/busybox /page/page /key/key /scratch /scratch/user /memory/user /etc/hosts";
    assert_eq!(exec(owners).await.lines().collect::<Vec<_>>(), OWNERS);
    assert_eq!(exec("echo 127.0.0.1 here >> /etc/hosts && echo written").await, "written\n");
    system.kubectl(&["delete", "pod", "mapped"]).await.unwrap();
}

const OWNERS: [&str; 7] = ["0:0", "0:2000", "0:2000", "0:2000", "1000:2000", "1000:2000", "0:0"];
