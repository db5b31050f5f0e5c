//! Table of pod fields and their support.

/// Status reason of a pod with an unsupported field.
const UNSUPPORTED: &str = "UnsupportedFields";
/// Status reason of a pod for another operating system, as kubelets spell it.
const OS: &str = "PodOSNotSupported";

/// Support of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Support {
    /// The field has the meaning of the Kubernetes API.
    Honoured,
    /// The field has no effect.
    Ignored,
    /// A pod with this field is rejected.
    Rejected,
}

/// Values that a row applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum When {
    /// Any value except null, false and empty ones.
    Set,
    /// This text.
    Is(&'static str),
    /// Any other text.
    IsNot(&'static str),
}

/// Row of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Path from the pod; `[]` stands for each entry of a list.
    pub path: &'static str,
    /// Values that the row applies to.
    pub when: When,
    /// Support of the field.
    pub support: Support,
    /// Explanation; may be empty.
    pub note: &'static str,
    /// Status reason of a pod that is rejected because of this row.
    pub reason: &'static str,
}

const fn honoured(path: &'static str, note: &'static str) -> Field {
    Field { path, when: When::Set, support: Support::Honoured, note, reason: "" }
}

const fn ignored(path: &'static str, note: &'static str) -> Field {
    Field { path, when: When::Set, support: Support::Ignored, note, reason: "" }
}

const fn rejected(path: &'static str, note: &'static str) -> Field {
    Field { path, when: When::Set, support: Support::Rejected, note, reason: UNSUPPORTED }
}

impl Field {
    const fn with_condition(self, when: When) -> Self {
        Self { when, ..self }
    }

    const fn with_reason(self, reason: &'static str) -> Self {
        Self { reason, ..self }
    }
}

/// All rows. A field has one row for each group of values that is treated differently.
pub const FIELDS: &[Field] = &[
    honoured("spec.activeDeadlineSeconds", ""),
    honoured("spec.affinity", "by the scheduler"),
    honoured("spec.automountServiceAccountToken", "by the API server, which adds the volume"),
    honoured("spec.dnsConfig", ""),
    honoured("spec.dnsPolicy", ""),
    honoured("spec.enableServiceLinks", ""),
    rejected("spec.hostIPC", "a VM has no part in the node's IPC"),
    rejected("spec.hostNetwork", "a VM has a network interface of its own"),
    rejected("spec.hostPID", "a VM has no part in the node's processes"),
    honoured("spec.hostUsers", "the users of a guest are never the node's"),
    honoured("spec.hostAliases", ""),
    honoured("spec.hostname", ""),
    honoured("spec.hostnameOverride", ""),
    honoured("spec.imagePullSecrets", "without them the node pulls with its own credentials"),
    honoured("spec.nodeName", "set by the scheduler"),
    honoured("spec.nodeSelector", "by the scheduler"),
    honoured("spec.os.name", "").with_condition(When::Is("linux")),
    rejected("spec.os.name", "guests run Linux").with_condition(When::IsNot("linux")).with_reason(OS),
    honoured("spec.overhead", "added to the VM's CPUs and memory"),
    honoured("spec.preemptionPolicy", "by the scheduler"),
    honoured("spec.priority", "a critical pod is protected from the guest's out-of-memory killer"),
    honoured("spec.priorityClassName", "by the API server"),
    honoured("spec.readinessGates", ""),
    rejected("spec.resourceClaims", "devices are not allocated to VMs"),
    honoured("spec.resources", "size of the VM"),
    honoured("spec.restartPolicy", ""),
    honoured("spec.runtimeClassName", "its overhead; the handler is the virtual node"),
    honoured("spec.schedulerName", "by the scheduler"),
    honoured("spec.schedulingGates", "by the scheduler"),
    honoured("spec.schedulingGroup", "by the scheduler"),
    honoured("spec.serviceAccount", "older name of serviceAccountName"),
    honoured("spec.serviceAccountName", ""),
    honoured("spec.setHostnameAsFQDN", ""),
    honoured("spec.shareProcessNamespace", ""),
    honoured("spec.subdomain", ""),
    honoured("spec.terminationGracePeriodSeconds", "at least 2 s"),
    honoured("spec.tolerations", "by the scheduler"),
    honoured("spec.topologySpreadConstraints", "by the scheduler"),
    honoured("spec.securityContext.fsGroup", "a group of each process; owners of files stay"),
    ignored("spec.securityContext.fsGroupChangePolicy", "owners of files stay"),
    honoured("spec.securityContext.runAsGroup", ""),
    honoured("spec.securityContext.runAsNonRoot", ""),
    honoured("spec.securityContext.runAsUser", ""),
    honoured("spec.securityContext.supplementalGroups", ""),
    honoured("spec.securityContext.supplementalGroupsPolicy", ""),
    honoured("spec.securityContext.sysctls", "in the guest, whose kernel is the pod's own: all of them"),
    ignored("spec.securityContext.appArmorProfile", "guests have no AppArmor"),
    rejected("spec.securityContext.appArmorProfile.type", "guests have no AppArmor")
        .with_condition(When::Is("Localhost")),
    ignored("spec.securityContext.seLinuxOptions", "guests have no SELinux"),
    ignored("spec.securityContext.seLinuxChangePolicy", "guests have no SELinux"),
    ignored("spec.securityContext.seccompProfile", "no filter is set: the kernel is the pod's own"),
    rejected("spec.securityContext.seccompProfile.type", "profiles of the node are not read")
        .with_condition(When::Is("Localhost")),
    rejected("spec.securityContext.windowsOptions", "guests run Linux"),
    honoured("spec.initContainers", "restartPolicy Always makes a sidecar"),
    honoured("spec.containers", ""),
    honoured("spec.ephemeralContainers", ""),
    honoured("spec.containers[].args", ""),
    honoured("spec.containers[].command", ""),
    honoured("spec.containers[].env", ""),
    rejected("spec.containers[].env[].valueFrom.fileKeyRef", "variables are not read from files"),
    honoured("spec.containers[].envFrom", ""),
    honoured("spec.containers[].image", ""),
    honoured("spec.containers[].imagePullPolicy", ""),
    honoured("spec.containers[].lifecycle", "exec, httpGet, sleep, stopSignal"),
    honoured("spec.containers[].livenessProbe", ""),
    honoured("spec.containers[].name", ""),
    honoured("spec.containers[].ports", "hostPort by the network of the node"),
    rejected("spec.containers[].ports[].protocol", "TCP and UDP are forwarded")
        .with_condition(When::Is("SCTP")),
    honoured("spec.containers[].readinessProbe", ""),
    ignored("spec.containers[].resizePolicy", "a changed size takes effect with the next start"),
    honoured("spec.containers[].resources", "limits by cgroups in the guest"),
    rejected("spec.containers[].resources.claims", "devices are not allocated to VMs"),
    honoured("spec.containers[].restartPolicy", ""),
    honoured("spec.containers[].restartPolicyRules", ""),
    honoured("spec.containers[].startupProbe", ""),
    honoured("spec.containers[].stdin", ""),
    honoured("spec.containers[].stdinOnce", ""),
    honoured("spec.containers[].targetContainerName", "of ephemeral containers"),
    honoured("spec.containers[].terminationMessagePath", ""),
    honoured("spec.containers[].terminationMessagePolicy", ""),
    honoured("spec.containers[].tty", ""),
    rejected("spec.containers[].volumeDevices", "block devices are not passed to containers"),
    honoured("spec.containers[].volumeMounts", "subPath, subPathExpr"),
    rejected("spec.containers[].volumeMounts[].mountPropagation", "mounts of a guest do not reach the node")
        .with_condition(When::Is("Bidirectional")),
    ignored(
        "spec.containers[].volumeMounts[].recursiveReadOnly",
        "a read-only mount is read-only with all that is mounted below it",
    ),
    honoured("spec.containers[].workingDir", ""),
    honoured("spec.containers[].securityContext.allowPrivilegeEscalation", ""),
    honoured("spec.containers[].securityContext.capabilities", ""),
    honoured("spec.containers[].securityContext.privileged", "in the guest"),
    honoured("spec.containers[].securityContext.procMount", ""),
    honoured("spec.containers[].securityContext.readOnlyRootFilesystem", ""),
    honoured("spec.containers[].securityContext.runAsGroup", ""),
    honoured("spec.containers[].securityContext.runAsNonRoot", ""),
    honoured("spec.containers[].securityContext.runAsUser", ""),
    ignored("spec.containers[].securityContext.appArmorProfile", "guests have no AppArmor"),
    rejected("spec.containers[].securityContext.appArmorProfile.type", "guests have no AppArmor")
        .with_condition(When::Is("Localhost")),
    ignored("spec.containers[].securityContext.seLinuxOptions", "guests have no SELinux"),
    ignored(
        "spec.containers[].securityContext.seccompProfile",
        "no filter is set: the kernel is the pod's own",
    ),
    rejected("spec.containers[].securityContext.seccompProfile.type", "profiles of the node are not read")
        .with_condition(When::Is("Localhost")),
    rejected("spec.containers[].securityContext.windowsOptions", "guests run Linux"),
    honoured("spec.volumes", ""),
    honoured("spec.volumes[].name", ""),
    honoured("spec.volumes[].configMap", "changes are seen within seconds"),
    honoured("spec.volumes[].downwardAPI", ""),
    honoured("spec.volumes[].emptyDir", "on the node's disk, or in the guest's memory"),
    honoured(
        "spec.volumes[].emptyDir.sizeLimit",
        "measured every 10 s; a pod that exceeds it is evicted; in memory the size of the file system",
    ),
    honoured("spec.volumes[].hostPath", "directories that the node allows"),
    rejected("spec.volumes[].hostPath.type", "directories alone").with_condition(When::Is("File")),
    rejected("spec.volumes[].hostPath.type", "directories alone").with_condition(When::Is("FileOrCreate")),
    rejected("spec.volumes[].hostPath.type", "directories alone").with_condition(When::Is("Socket")),
    rejected("spec.volumes[].hostPath.type", "directories alone").with_condition(When::Is("CharDevice")),
    rejected("spec.volumes[].hostPath.type", "directories alone").with_condition(When::Is("BlockDevice")),
    honoured("spec.volumes[].image", "read-only"),
    honoured("spec.volumes[].persistentVolumeClaim", "claims that are bound to storage of the node"),
    honoured("spec.volumes[].projected", ""),
    rejected("spec.volumes[].projected.sources[].podCertificate", "certificates are not requested"),
    honoured("spec.volumes[].secret", "in the node's memory"),
    rejected("spec.volumes[].awsElasticBlockStore", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].azureDisk", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].azureFile", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].cephfs", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].cinder", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].csi", "drivers for inline volumes do not run here"),
    rejected("spec.volumes[].ephemeral", "claims are not made for single pods"),
    rejected("spec.volumes[].fc", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].flexVolume", "removed from Kubernetes"),
    rejected("spec.volumes[].flocker", "removed from Kubernetes"),
    rejected("spec.volumes[].gcePersistentDisk", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].gitRepo", "removed from Kubernetes"),
    rejected("spec.volumes[].glusterfs", "removed from Kubernetes"),
    rejected("spec.volumes[].iscsi", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].nfs", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].photonPersistentDisk", "removed from Kubernetes"),
    rejected("spec.volumes[].portworxVolume", "use a persistentVolumeClaim"),
    rejected("spec.volumes[].quobyte", "removed from Kubernetes"),
    rejected("spec.volumes[].rbd", "removed from Kubernetes"),
    rejected("spec.volumes[].scaleIO", "removed from Kubernetes"),
    rejected("spec.volumes[].storageos", "removed from Kubernetes"),
    rejected("spec.volumes[].vsphereVolume", "use a persistentVolumeClaim"),
];
