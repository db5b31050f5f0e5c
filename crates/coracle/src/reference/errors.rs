//! Table of the stable error codes: meaning, cause, and what to do.

use std::fmt::Write;

use super::GENERATED;

/// Explanation of one code.
struct Entry {
    code: &'static str,
    /// What failed.
    meaning: &'static str,
    /// Usual causes.
    cause: &'static str,
    /// What the user can do.
    fix: &'static str,
}

const fn entry(code: &'static str, meaning: &'static str, cause: &'static str, fix: &'static str) -> Entry {
    Entry { code, meaning, cause, fix }
}

/// Titles of the groups, by the middle of a code.
const GROUPS: [(&str, &str); 16] = [
    ("CLI", "Command line"),
    ("API", "Kubernetes API server"),
    ("CLU", "Installation in a cluster"),
    ("UP", "`coracle up`"),
    ("CFG", "Configuration of a daemon"),
    ("VM", "VMs"),
    ("GST", "Guests"),
    ("VOL", "Volumes"),
    ("CTR", "Containers"),
    ("DRV", "Hypervisors"),
    ("NET", "Network"),
    ("TPL", "Templates"),
    ("SNP", "Snapshots"),
    ("IMG", "Images and registries"),
    ("MKT", "Market"),
    ("RPC", "Replies of a node"),
];

const ENTRIES: &[Entry] = &[
    entry(
        "COR-CLI-001",
        "The arguments cannot be used.",
        "An unknown flag or value, or flags that exclude each other.",
        "Read the message, then `coracle COMMAND --help`.",
    ),
    entry(
        "COR-CLI-002",
        "No node answers at the socket.",
        "No `coracle up` or `coracle node` runs with this state directory, or another user started it.",
        "Start one with `coracle up --detach`, or select its state directory with `--state DIR`.",
    ),
    entry(
        "COR-CLI-003",
        "Standard output cannot be written.",
        "The disk is full, or the reader of the pipe ended with an error.",
        "Write to another file, or repair the reader.",
    ),
    entry(
        "COR-CLI-004",
        "A result cannot be printed in the requested format.",
        "A defect of Coracle: every result can be printed as JSON and YAML.",
        "Use another `-o`, and report the defect.",
    ),
    entry(
        "COR-CLI-005",
        "A local file of `coracle cp` cannot be read or written.",
        "It does not exist, or this user may not use it.",
        "Check the path and its permissions.",
    ),
    entry(
        "COR-CLI-006",
        "`coracle cp` ended before the copy was complete.",
        "The local archive task was interrupted.",
        "Run the command again; it copies everything.",
    ),
    entry(
        "COR-CLI-007",
        "A local port cannot be opened.",
        "Another process listens on it, or ports below 1024 need root.",
        "Select another one: `coracle port-forward VM LOCAL:GUEST`, `coracle vnc --port PORT`.",
    ),
    entry(
        "COR-CLI-008",
        "The command was interrupted.",
        "^C while `coracle up` was starting, or during `coracle image build`.",
        "What had been started was stopped again, but for a machine that `--keep` keeps. Run the command again.",
    ),
    entry(
        "COR-CLI-009",
        "The command works on the local node only.",
        "It was used with `-n`, `-A`, `--context` or `--kubeconfig`.",
        "In a cluster, VMs are MikromVM objects: apply or delete them with kubectl.",
    ),
    entry(
        "COR-CLI-010",
        "The kubeconfig cannot be used.",
        "The file or the context does not exist, or a credential plugin failed.",
        "Select another with `--kubeconfig FILE`, `$KUBECONFIG` or `--context`.",
    ),
    entry(
        "COR-CLI-011",
        "The extension API, or the node behind it, does not answer.",
        "The API server does not know `subresources.coracle.dev`, does not reach the operator, or the operator does not reach the node.",
        "`kubectl get apiservices v1alpha1.subresources.coracle.dev` says what the API server sees; the operator serves it with `--webhook-listen`, and nodes need `--host-listen`.",
    ),
    entry(
        "COR-CLI-012",
        "The MikromVM has no node that can be asked.",
        "It is not scheduled yet, or its node announces no host service.",
        "See why: `coracle explain NAME`.",
    ),
    entry(
        "COR-CLI-013",
        "The expected state was not reached in time.",
        "The limit of `coracle wait` is too short, or the VM cannot reach the state.",
        "See why: `coracle explain NAME`; then wait again with a larger `--timeout`.",
    ),
    entry(
        "COR-CLI-014",
        "A step of `coracle image build` failed, or its screen does not answer.",
        "The machine did not show or print what the step waits for, or went off.",
        "Look at the screenshot of the failure; `--keep` keeps the machine, `--record DIR` writes one after each step.",
    ),
    entry(
        "COR-CLU-001",
        "The installation is in use and is not removed.",
        "Users have declared VMs, pools or sets.",
        "Delete them, or run `coracle uninstall --cluster --delete-objects`, which ends their VMs.",
    ),
    entry(
        "COR-CLU-002",
        "Objects cannot be ended, because their operator does not run.",
        "The operator was removed first, or its Pods do not start.",
        "See why with `coracle doctor --cluster`; `coracle uninstall --cluster --delete-objects --abandon` removes the \
         objects, and their VMs stay on their nodes.",
    ),
    entry(
        "COR-CLU-003",
        "Something that is being removed did not go in time.",
        "A finalizer of another controller, a node that does not answer, or a cluster without kube-controller-manager.",
        "See what holds it with `kubectl get -o yaml`, and run the command again: it continues.",
    ),
    entry(
        "COR-API-001",
        "A call to the API server failed.",
        "The API server is not reachable, or answered with an unexpected status.",
        "Check with `kubectl get --raw /readyz`.",
    ),
    entry(
        "COR-API-002",
        "The object or its kind does not exist.",
        "The name or namespace is wrong, or the custom resources are not installed.",
        "Check with `kubectl get`; install the kinds with `kubectl apply --server-side -k deploy/kustomize/crds`.",
    ),
    entry(
        "COR-API-003",
        "The API server refused the user.",
        "Missing or expired credentials, or missing RBAC rules.",
        "Check with `kubectl auth can-i`.",
    ),
    entry(
        "COR-API-004",
        "The object was changed meanwhile.",
        "Another client updated it between the read and the write.",
        "Run the command again.",
    ),
    entry(
        "COR-UP-001",
        "A program that `coracle up` needs was not found.",
        "etcd, kube-apiserver or kubectl is neither in `--tools`, the tool cache, nor in `PATH`.",
        "In a checkout: `cargo xtask setup`. Elsewhere: `--tools DIR`, or `--kubeconfig FILE` for an existing cluster.",
    ),
    entry(
        "COR-UP-002",
        "The API server did not become ready.",
        "etcd or the API server ended or hangs; the message has the end of its log.",
        "Read the log below the state directory.",
    ),
    entry(
        "COR-UP-003",
        "A system is running in this state directory.",
        "`coracle up` was started twice.",
        "Stop it with `coracle down`, or use another `--state`.",
    ),
    entry(
        "COR-UP-004",
        "The detached system ended while it was starting.",
        "One of its parts failed; the lines before this error say which.",
        "Read the log that the message names.",
    ),
    entry(
        "COR-UP-005",
        "No guest kernel was found.",
        "The tool cache is empty.",
        "In a checkout: `cargo xtask setup`. Elsewhere: `--tools DIR` with `guest/current/{vmlinuz,initrd,agent}`.",
    ),
    entry(
        "COR-UP-006",
        "The node did not become ready.",
        "Its probe or its network failed; the message has the reason.",
        "Run `coracle doctor`.",
    ),
    entry(
        "COR-UP-007",
        "Node and operator did not become ready.",
        "One of them cannot reach the API server.",
        "Read their logs below the state directory.",
    ),
    entry(
        "COR-UP-008",
        "A process ended several times right after its start.",
        "A port or file is in use, or its arguments are wrong; the message has the end of its log.",
        "Read the whole log that the message names.",
    ),
    entry(
        "COR-UP-009",
        "A kubelet cannot be started here.",
        "It mounts volumes, makes cgroups and needs a network of the node, all of which need root.",
        "Start as root, or run without `kubelet` in `--with`; MikromVMs need none.",
    ),
    entry(
        "COR-UP-010",
        "The admission webhook or the extension API does not answer.",
        "The cluster cannot reach this machine under `--webhook-url-host`.",
        "Name an address of this machine that the API server reaches.",
    ),
    entry(
        "COR-UP-011",
        "The controller manager did not become ready.",
        "It ended, or cannot reach the API server.",
        "Read its log below the state directory.",
    ),
    entry(
        "COR-UP-012",
        "The scheduler or controller manager did not become ready.",
        "It ended, or cannot reach the API server.",
        "Read its log below the state directory.",
    ),
    entry(
        "COR-UP-013",
        "The Node of the kubelet or the virtual node did not become ready.",
        "Cgroups or volumes of the kubelet cannot be made, or the node's CRI server or kubelet API cannot be served.",
        "Read `logs/kubelet.log` and `logs/node.log` in the state directory.",
    ),
    entry(
        "COR-CFG-001",
        "A boot file of the node does not exist.",
        "`--boot` names a directory without kernel or initramfs.",
        "Name its directory with `--boot DIR`; in a checkout `cargo xtask setup` makes it.",
    ),
    entry(
        "COR-CFG-002",
        "A state or run directory cannot be used.",
        "It belongs to another user, or is a symbolic link.",
        "Check the owner with `ls -ld`; change it with chown, remove the directory, or select another with `--state`.",
    ),
    entry(
        "COR-VM-001",
        "VM not found.",
        "The name or id does not exist. Commands that change a VM take exact names and whole ids.",
        "List VMs with `coracle ps -a`.",
    ),
    entry(
        "COR-VM-002",
        "The name matches several VMs.",
        "A prefix of more than one name was given, or the same name exists in several namespaces.",
        "Use the whole name, and `-n NAMESPACE` in a cluster.",
    ),
    entry(
        "COR-VM-003",
        "The name is in use.",
        "Another VM of this node has it.",
        "Select another `--name`, or remove the VM: `coracle rm NAME`.",
    ),
    entry(
        "COR-VM-004",
        "A value of the request is invalid.",
        "The message names the field and the reason.",
        "Correct the value.",
    ),
    entry(
        "COR-VM-005",
        "The state of the VM does not allow the operation.",
        "For example `exec` in a paused VM.",
        "The help line names the command that comes first.",
    ),
    entry(
        "COR-VM-006",
        "The VM belongs to another object, or to a newer generation of it.",
        "An outdated operator, or an object that was deleted and created again with the same name.",
        "Delete the other object, or wait until the operator has read the new one.",
    ),
    entry(
        "COR-VM-007",
        "The node has not enough memory.",
        "The memory of all VMs, hibernated ones included, would exceed what the node may assign.",
        "Remove VMs, request less memory, or raise `--memory-overcommit`.",
    ),
    entry(
        "COR-VM-008",
        "The VM has more CPUs than the node.",
        "`--cpus` or `spec.vcpuCount` exceeds the number of processors.",
        "Request fewer, or use another node.",
    ),
    entry(
        "COR-VM-009",
        "The kernel of the VM cannot be used.",
        "`kernelPath` does not exist, or is outside the directories of `--kernel-dir`.",
        "Leave `kernelPath` empty for the node's kernel, or start the node with `--kernel-dir`.",
    ),
    entry("COR-VM-010", "The node is stopping.", "The daemon was asked to end.", "Try again when it runs."),
    entry(
        "COR-VM-011",
        "A file of the VM cannot be read or written.",
        "A full or failing disk.",
        "Check the free space of the state directory, and the kernel's log.",
    ),
    entry(
        "COR-VM-012",
        "The state directory cannot be read or written.",
        "A full or failing disk, or missing permissions.",
        "Check the path in the message.",
    ),
    entry(
        "COR-VM-013",
        "Saved memory cannot be loaded on this node.",
        "VMM version, CPU or devices differ from those with which it was saved.",
        "Start the node with the VMM that saved it, or discard the memory with `coracle rm NAME`.",
    ),
    entry(
        "COR-VM-020",
        "Several VMs have this id.",
        "Objects of two namespaces have the same `<namespace>-<name>`, and the caller sent no UID.",
        "Send the UID of the object: as the owner in the message, or to the agent service as gRPC metadata `coracle-uid`.",
    ),
    entry(
        "COR-GST-001",
        "The guest did not carry out a request.",
        "The message has the guest agent's reason, for example a volume in use.",
        "Resolve the reason inside the guest and try again.",
    ),
    entry(
        "COR-GST-002",
        "The guest did not boot, or its VM failed.",
        "A kernel panic, a wrong image, too little memory; the message has the last lines of the console.",
        "Read the console: `coracle console NAME --no-follow`.",
    ),
    entry(
        "COR-GST-003",
        "The guest does not have its address after its configuration.",
        "The guest's network setup failed or was changed by the image.",
        "Read the console, and compare the network configuration of the image.",
    ),
    entry(
        "COR-GST-004",
        "A session ended without an exit code.",
        "The VM stopped or the guest agent restarted during `exec`.",
        "See what happened: `coracle events NAME`.",
    ),
    entry(
        "COR-GST-005",
        "A hook of the image failed, or what the command left could not be pushed.",
        "The message has the end of the hook's output, or the registry's answer.",
        "Correct the hook; a VM whose push failed is kept and can be committed again.",
    ),
    entry(
        "COR-VOL-001",
        "The VM has no volume of that name.",
        "The name differs from that of `coracle volume ls`.",
        "List volumes: `coracle volume ls NAME`.",
    ),
    entry(
        "COR-CTR-001",
        "The VM has no container of that id.",
        "It was removed, or it belongs to another VM.",
        "List the containers of the VM.",
    ),
    entry(
        "COR-CTR-002",
        "The VM has another container of that id.",
        "An id belongs to one container until that is removed.",
        "Choose another id, or remove the other container.",
    ),
    entry(
        "COR-CTR-003",
        "The container is not in a state for this.",
        "It runs already, has ended, or was never started; the message says which.",
        "A container runs once: make a new one to run its image again.",
    ),
    entry(
        "COR-DRV-001",
        "The VMM failed.",
        "It did not start, ended, or refused a command; the message has its words.",
        "Run `coracle doctor`, and read `vmm.log` in the directory of the VM.",
    ),
    entry(
        "COR-DRV-002",
        "The hypervisor of the VM does not have this feature.",
        "See the table of hypervisors in the guide.",
        "Create the VM with another `--driver`.",
    ),
    entry(
        "COR-NET-001",
        "The network of the VM cannot be made.",
        "No free address, an address in use, or a failed change of bridge, tap or packet filter.",
        "The message names the cause; `coracle doctor` checks the tools.",
    ),
    entry(
        "COR-NET-002",
        "The network of the node cannot be made.",
        "Missing privilege, a kernel without nf_tables, or a subnet that is in use.",
        "Run as root (`modprobe nf_tables`), or start the node with `--network user`.",
    ),
    entry(
        "COR-TPL-001",
        "The template cannot be taken.",
        "The guest did not become ready, or the hypervisor has no templates.",
        "Read the node's log; VMs of the shape cold boot meanwhile.",
    ),
    entry(
        "COR-TPL-002",
        "Template not found.",
        "The key is wrong.",
        "List templates: `coracle template ls`.",
    ),
    entry(
        "COR-SNP-001",
        "Snapshot not found.",
        "The name is wrong.",
        "List snapshots: `coracle snapshot ls`.",
    ),
    entry(
        "COR-SNP-002",
        "The name is in use by another snapshot.",
        "Snapshots are immutable and never replaced.",
        "Select another `--name`, or remove it: `coracle snapshot rm NAME`.",
    ),
    entry(
        "COR-SNP-003",
        "The image of the snapshot is not on this node.",
        "It was removed, or the snapshot comes from another node.",
        "Pull exactly that image: `coracle image pull REFERENCE@DIGEST`.",
    ),
    entry(
        "COR-SNP-004",
        "The snapshot archive is refused.",
        "It is incomplete, damaged, or no snapshot.",
        "Export it again. Nothing of it was kept.",
    ),
    entry(
        "COR-SNP-005",
        "The snapshot is not shared with this namespace.",
        "It belongs to a VM of another namespace, or to a local VM.",
        "Its owner shares it on the node: `coracle snapshot share NAME --namespace NAMESPACE`.",
    ),
    entry(
        "COR-IMG-001",
        "Invalid image reference.",
        "The message names the rule that it breaks.",
        "Write it like `nginx:1.27`, `ghcr.io/org/app@sha256:…`, `oci:DIR[:TAG]` or `docker-archive:FILE`.",
    ),
    entry(
        "COR-IMG-002",
        "The local image source cannot be imported.",
        "The file or directory does not exist or has another format.",
        "Check the path. A source without a name needs `coracle image import SOURCE NAME`.",
    ),
    entry(
        "COR-IMG-003",
        "The image is not on the node.",
        "The pull policy forbids asking a registry.",
        "Pull it first, or use the pull policy IfNotPresent.",
    ),
    entry(
        "COR-IMG-004",
        "The registry has no such image.",
        "The repository, tag or digest does not exist. Some registries answer so for private images, too.",
        "Check the reference, and log in with `docker login`.",
    ),
    entry(
        "COR-IMG-005",
        "The registry refused access.",
        "Missing or wrong credentials. Some registries answer so for images that do not exist.",
        "Log in with `docker login REGISTRY`, or use a token with the right role.",
    ),
    entry(
        "COR-IMG-006",
        "The image has no variant for this processor.",
        "The message has the platforms of the image.",
        "Use a tag that is built for this platform.",
    ),
    entry(
        "COR-IMG-007",
        "Bytes do not match their digest.",
        "The registry, a mirror or a proxy delivers wrong bytes. Nothing was kept.",
        "Try another mirror, and report it to the operator of the registry.",
    ),
    entry(
        "COR-IMG-008",
        "The image breaks a rule that protects the node.",
        "A path that leaves the image, a bomb, or an answer without end.",
        "Do not run this image; ask its maker for a rebuild.",
    ),
    entry(
        "COR-IMG-009",
        "A format or media type is not supported.",
        "The message names it.",
        "Convert the image, for example with `skopeo copy --format oci`.",
    ),
    entry(
        "COR-IMG-010",
        "No space for the image.",
        "The file system of the state directory is full or reaches its reserve.",
        "Remove unused images with `coracle image prune`, or move the state directory.",
    ),
    entry(
        "COR-IMG-011",
        "The registry cannot be reached.",
        "Name resolution, network, TLS, or a connection that broke. Transfers are tried again before this error.",
        "Check that this node reaches the registry, then try again: transfers continue where they ended.",
    ),
    entry(
        "COR-IMG-012",
        "The registry answered with an error.",
        "The message has the HTTP status; 429 is a rate limit.",
        "Wait, log in, or use a mirror.",
    ),
    entry(
        "COR-IMG-013",
        "A local file of the image store cannot be read or written.",
        "A failing disk or missing permissions.",
        "Check the path in the message.",
    ),
    entry(
        "COR-IMG-014",
        "Another process uses the image store.",
        "Two daemons have one state directory.",
        "Stop the other process, or use another state directory.",
    ),
    entry(
        "COR-IMG-015",
        "A file of the image store is damaged.",
        "A failing disk, or a change by hand.",
        "Remove the file that the message names, and pull the images again; blobs are reused.",
    ),
    entry(
        "COR-IMG-016",
        "Credentials cannot be read.",
        "The docker configuration or a credential helper failed.",
        "Correct what the message names.",
    ),
    entry(
        "COR-IMG-017",
        "An image of the cluster leads to an address that is not allowed.",
        "The registry, its token server or a redirect has a loopback, link-local or metadata address.",
        "To allow the registry, make a directory for it in the node's `--registry-config` directory.",
    ),
    entry(
        "COR-IMG-018",
        "The registry configuration cannot be read.",
        "A `hosts.toml` is invalid, or a file that it names does not exist.",
        "Correct the file and line that the message names; the form is that of containerd.",
    ),
    entry(
        "COR-IMG-019",
        "The image came here with the credentials of another.",
        "It was pulled with pull secrets of other users, and `imagePullPolicy: Never` does not let the node ask the registry about these.",
        "Use `IfNotPresent` with `imagePullSecrets` that the registry accepts.",
    ),
    entry(
        "COR-IMG-020",
        "The image is not signed as its namespace requires.",
        "The ConfigMap `coracle-image-policy` names keys for the namespace, and none of them has signed the image; or it is a disk image, or one that was made on the node.",
        "Sign it: `cosign sign --key KEY --new-bundle-format=false IMAGE@DIGEST`.",
    ),
    entry(
        "COR-MKT-001",
        "The market does not answer.",
        "It does not run, or the address is wrong.",
        "Name it with `--url` or `$CORACLE_MARKET_URL`; `coracle market serve` starts one.",
    ),
    entry(
        "COR-MKT-002",
        "The store of a market is damaged.",
        "Verification found a row that does not match the journal.",
        "Keep this store, and restore a copy.",
    ),
    entry(
        "COR-RPC-015",
        "The node ended a stream without its result.",
        "The daemon stopped during the operation.",
        "Run the command again: transfers continue where they ended.",
    ),
];

/// Returns the whole page.
pub(super) fn page() -> String {
    let mut text = format!(
        "{GENERATED}\n# Errors\n\nErrors begin with a stable code: `error[COR-IMG-004]: …`. Over gRPC it is the metadata \
         `coracle-code`. Exit codes: 1 failure, 2 usage, 3 not found, 4 conflict, 5 not supported, 6 timeout, 7 forbidden, \
         125 a failure of coracle where the exit code of the guest's command is expected.\n"
    );
    for (group, title) in GROUPS {
        let _strings_take_everything = write!(text, "\n## {title}\n");
        let prefix = format!("COR-{group}-");
        for Entry { code, meaning, cause, fix } in ENTRIES.iter().filter(|e| e.code.starts_with(&prefix)) {
            let _strings_take_everything =
                write!(text, "\n### {code}\n\n{meaning}\n\n- Cause: {cause}\n- What to do: {fix}\n");
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_codes_are_unique_and_have_a_group() {
        let page = page();
        for entry in ENTRIES {
            assert_eq!(page.matches(&format!("### {}\n", entry.code)).count(), 1, "{}", entry.code);
        }
    }
}
