//! Inputs of a MikromVM's guest: environment, user data, volumes and ports. The shapes are those of Pods.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// An environment variable of the guest.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!(has(self.value) && self.value != '' && has(self.valueFrom))").message("give value or valueFrom, not both"))]
pub struct EnvVar {
    /// Name of the variable: printable ASCII without `=`.
    #[schemars(length(min = 1, max = 256), regex(pattern = "^[ -<>-~]+$"))]
    pub name: String,
    /// Value of the variable. `$(NAME)` is replaced by a variable that is defined before it; `$$` stands for `$`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 32768))]
    pub value: String,
    /// Source of the value, read when the VM is created.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value_from: Option<EnvVarSource>,
}

/// Source of a value. Exactly one field must be set.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.secretKeyRef), has(self.configMapKeyRef), has(self.fieldRef)].filter(x, x).size() == 1").message("valueFrom needs exactly one of secretKeyRef, configMapKeyRef, fieldRef"))]
pub struct EnvVarSource {
    /// Key of a Secret.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_key_ref: Option<KeySelector>,
    /// Key of a ConfigMap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_key_ref: Option<KeySelector>,
    /// Field of the MikromVM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub field_ref: Option<FieldSelector>,
}

/// A key of an object of the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct KeySelector {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key of the value.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
    /// Leave the variable out when the object or the key does not exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// A field of the MikromVM.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct FieldSelector {
    /// metadata.name, metadata.namespace, metadata.uid, metadata.labels['KEY'], metadata.annotations['KEY'],
    /// spec.vcpuCount, spec.memoryMB or status.nodeName.
    #[schemars(length(max = 512), regex(pattern = FIELD_PATH))]
    pub field_path: String,
}

const FIELD_PATH: &str = r"^(metadata\.(name|namespace|uid)|metadata\.(labels|annotations)\['[^']+'\]|spec\.(vcpuCount|memoryMB)|status\.nodeName)$";

/// Source of environment variables: all keys of an object. Exactly one source must be set.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.secretRef) != has(self.configMapRef)").message("envFrom needs exactly one of secretRef, configMapRef"))]
pub struct EnvFromSource {
    /// Prefix of each variable name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 128), regex(pattern = "^[ -<>-~]*$"))]
    pub prefix: String,
    /// Secret with the variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<ObjectSelector>,
    /// ConfigMap with the variables.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map_ref: Option<ObjectSelector>,
}

/// Reference to an object of the same namespace.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectSelector {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Leave the variables out when the object does not exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// Reference to an object of the same namespace, by name.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct LocalObjectReference {
    /// Name of the object.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
}

/// User data for cloud-init or another reader of NoCloud seeds. Exactly one source must be set.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("(has(self.inline) && self.inline != '') != has(self.secretRef)").message("userData needs exactly one of inline, secretRef"))]
pub struct UserData {
    /// User data as text.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 65536))]
    pub inline: String,
    /// Secret with the user data.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret_ref: Option<UserDataSecret>,
}

/// Secret with user data.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct UserDataSecret {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Key of the user data.
    #[serde(default = "user_data_key")]
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
}

fn user_data_key() -> String {
    "userData".to_owned()
}

/// A disk or a directory in the guest. Exactly one source must be set.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("[has(self.disk), has(self.persistentVolumeClaim), has(self.configMap), has(self.secret)].filter(x, x).size() == 1").message("a volume needs exactly one of disk, persistentVolumeClaim, configMap, secret"))]
pub struct VmVolume {
    /// Name of the volume, unique in the VM: a-z, 0-9 and -.
    #[schemars(length(max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub name: String,
    /// Absolute path in the guest. Empty: /mnt/NAME, or the device /dev/NAME of a disk without a file system.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 1024))]
    #[x_kube(validation = Rule::new("self == '' || (self.startsWith('/') && !self.contains('..') && self != '/')").message("mountPath must be an absolute path without '..'"))]
    pub mount_path: String,
    /// Attach the volume read-only. ConfigMaps and Secrets are always read-only.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub read_only: bool,
    /// Disk on the node that belongs to the VM: created with the VM, deleted with it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<DiskSource>,
    /// Claim that is bound to a PersistentVolume of kind local or hostPath: a directory, or a disk image (also with volumeMode
    /// Block). Its path must be below a volume directory of the node (--volume-dir).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub persistent_volume_claim: Option<ClaimSource>,
    /// Keys of a ConfigMap as files, with their values at the creation of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub config_map: Option<ConfigMapSource>,
    /// Keys of a Secret as files, with their values at the creation of the VM.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub secret: Option<SecretSource>,
}

/// Disk that belongs to a VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct DiskSource {
    /// Size of the disk, like 512Mi or 10Gi. The file is sparse.
    #[schemars(regex(pattern = "^[1-9][0-9]{0,6}(Mi|Gi|Ti)$"))]
    pub size: String,
    /// Disk class of the node (--disk-class). Empty: the directory of the node's VMs.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 63), regex(pattern = "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"))]
    pub class: String,
}

impl DiskSource {
    /// Returns the size in MiB; `None` when the text is not a size.
    #[must_use]
    pub fn size_mib(&self) -> Option<u64> {
        let factor = match self.size.get(self.size.len().checked_sub(2)?..)? {
            "Mi" => 1,
            "Gi" => 1 << 10,
            "Ti" => 1 << 20,
            _ => return None,
        };
        self.size.get(..self.size.len() - 2)?.parse::<u64>().ok()?.checked_mul(factor)
    }
}

/// Reference to a claim of the same namespace.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ClaimSource {
    /// Name of the claim.
    #[schemars(length(min = 1, max = 253))]
    pub claim_name: String,
}

/// Files from a ConfigMap.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct ConfigMapSource {
    /// Name of the ConfigMap.
    #[schemars(length(min = 1, max = 253))]
    pub name: String,
    /// Keys and their paths. Empty: every key, with its own name as path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub items: Vec<KeyToPath>,
    /// Permission bits of the files, in decimal. Absent: 420 (0644).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 511))]
    pub default_mode: Option<i32>,
    /// Leave out an object or a key that does not exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// Files from a Secret.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct SecretSource {
    /// Name of the Secret.
    #[schemars(length(min = 1, max = 253))]
    pub secret_name: String,
    /// Keys and their paths. Empty: every key, with its own name as path.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub items: Vec<KeyToPath>,
    /// Permission bits of the files, in decimal. Absent: 420 (0644).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 511))]
    pub default_mode: Option<i32>,
    /// Leave out an object or a key that does not exist.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub optional: bool,
}

/// File of one key.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
pub struct KeyToPath {
    /// Key in the object.
    #[schemars(length(min = 1, max = 253))]
    pub key: String,
    /// Relative path of the file.
    #[schemars(length(min = 1, max = 512))]
    pub path: String,
    /// Permission bits of the file, in decimal. Absent: defaultMode.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 511))]
    pub mode: Option<i32>,
}

/// A port of the guest, behind the Service of the VM.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct VmPort {
    /// Name of the port; required when there are several ports.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[schemars(length(max = 15), regex(pattern = "^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"))]
    pub name: String,
    /// Port of the Service.
    #[schemars(range(min = 1, max = 65535))]
    pub port: i32,
    /// Port in the guest. Absent: the value of port.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65535))]
    pub target_port: Option<i32>,
    /// Protocol of the port, TCP or UDP.
    #[serde(default)]
    pub protocol: PortProtocol,
}

/// Protocol of a port.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PortProtocol {
    /// TCP.
    #[default]
    #[serde(rename = "TCP")]
    Tcp,
    /// UDP.
    #[serde(rename = "UDP")]
    Udp,
}

impl PortProtocol {
    /// Returns the value in manifests.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Tcp => "TCP",
            Self::Udp => "UDP",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_sizes_are_whole_mebibytes() {
        for (text, want) in [
            ("512Mi", Some(512)),
            ("10Gi", Some(10 << 10)),
            ("2Ti", Some(2 << 20)),
            ("10G", None),
            ("Gi", None),
            ("", None),
            ("ü", None),
        ] {
            assert_eq!(DiskSource { size: text.into(), ..Default::default() }.size_mib(), want, "{text}");
        }
    }
}
