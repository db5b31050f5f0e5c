//! Resources that the VMs of a namespace may use together: the hard limits of its ResourceQuotas (Kubernetes documentation,
//! "Resource Quotas"). Pure.
//!
//! The API server counts objects itself (`count/mikromvms.vm.mikrom.es`). A controller must count CPUs, memory and disk of its
//! custom resource and write them into `status.used`: the quota controller of Kubernetes keeps the amounts there that it does
//! not count itself.

use std::collections::BTreeMap;

use coracle_api::{Amount, MikromVM};
use k8s_openapi::{api::core::v1::ResourceQuota, apimachinery::pkg::api::resource::Quantity};
use kube::ResourceExt as _;

/// vCPUs.
pub(crate) const CPU: &str = "vm.mikrom.es/cpu";
/// Memory of guests, bytes.
pub(crate) const MEMORY: &str = "vm.mikrom.es/memory";
/// Disks of `spec.volumes`, bytes. The node determines the size of the root disk, which does not count.
pub(crate) const DISK: &str = "vm.mikrom.es/disk";

/// Amounts by resource.
type Amounts = BTreeMap<&'static str, Amount>;

/// Limits of one ResourceQuota that apply to VMs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Quota {
    pub(crate) namespace: String,
    name: String,
    hard: Amounts,
    /// Used amounts in the status of the quota.
    reported: Amounts,
}

/// Amounts that the status of a ResourceQuota lacks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StaleUsage {
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Quantities by resource.
    pub(crate) used: BTreeMap<&'static str, String>,
}

impl Quota {
    /// Reads the limits of a quota. `None`: it does not limit VMs. A quota with scopes applies to Pods.
    pub(crate) fn of(quota: &ResourceQuota) -> Option<Self> {
        let spec = quota.spec.as_ref()?;
        let has_scope =
            spec.scopes.as_ref().is_some_and(|all| !all.is_empty()) || spec.scope_selector.is_some();
        let hard = spec.hard.as_ref().filter(|_| !has_scope)?;
        let of_vms = |all: &BTreeMap<String, Quantity>| -> Amounts {
            let names = [CPU, MEMORY, DISK].into_iter();
            names.filter_map(|name| Some((name, Amount::of(all.get(name)?)))).collect()
        };
        let hard = of_vms(hard);
        let reported = quota.status.as_ref().and_then(|status| status.used.as_ref());
        let reported = reported.map(of_vms).unwrap_or_default();
        let namespace = quota.namespace().unwrap_or_default();
        (!hard.is_empty()).then(|| Self { namespace, name: quota.name_any(), hard, reported })
    }

    /// True when both quotas have the same limits; the used amounts may differ.
    pub(crate) fn has_limits_of(&self, other: &Self) -> bool {
        (&self.namespace, &self.name, &self.hard) == (&other.namespace, &other.name, &other.hard)
    }

    /// Returns the amounts that the status lacks, given the VMs of the namespace; `None` when it is up to date.
    pub(crate) fn stale<'a>(&self, vms: impl Iterator<Item = &'a MikromVM>) -> Option<StaleUsage> {
        let used = sum(vms);
        let now = |name: &str| used.get(name).copied().unwrap_or_default();
        let is_stale = |name: &&&str| self.reported.get(**name) != Some(&now(name));
        let stale: BTreeMap<_, _> =
            self.hard.keys().filter(is_stale).map(|name| (*name, format_amount(name, now(name)))).collect();
        let (namespace, name) = (self.namespace.clone(), self.name.clone());
        (!stale.is_empty()).then_some(StaleUsage { namespace, name, used: stale })
    }

    /// Returns which limit would be exceeded, in the words of the API server about Pods; `None` when all fit.
    fn exceeded(&self, used: &Amounts, wanted: &Amounts) -> Option<String> {
        let amount = |of: &Amounts, name: &str| of.get(name).copied().unwrap_or_default();
        let over = self.hard.iter().filter(|(name, hard)| {
            let asked = amount(wanted, name);
            !asked.is_zero() && amount(used, name).plus(asked) > **hard
        });
        let over: Vec<_> = over.collect();
        let list = |of: &dyn Fn(&str, Amount) -> Amount| {
            let texts =
                over.iter().map(|(name, hard)| format!("{name}={}", format_amount(name, of(name, **hard))));
            texts.collect::<Vec<_>>().join(",")
        };
        (!over.is_empty()).then(|| {
            let requested = list(&|name, _| amount(wanted, name));
            let used = list(&|name, _| amount(used, name));
            let limited = list(&|_, hard| hard);
            format!("exceeded quota: {}, requested: {requested}, used: {used}, limited: {limited}", self.name)
        })
    }
}

fn format_amount(name: &str, amount: Amount) -> String {
    match name {
        CPU => amount.units().to_string(),
        _ => format!("{}Mi", amount.units().div_ceil(1 << 20)),
    }
}

/// Returns the amounts that a VM counts for.
fn requested_amounts(vm: &MikromVM) -> Amounts {
    const MIB: u64 = 1 << 20;
    let whole = |count: i32| u64::try_from(count).unwrap_or(0);
    let disks = vm.spec.volumes.iter().filter_map(|volume| volume.disk.as_ref()?.size_mib());
    [
        (CPU, Amount::of_units(whole(vm.spec.vcpu_count))),
        (MEMORY, Amount::of_units(whole(vm.spec.memory_mib).saturating_mul(MIB))),
        (DISK, Amount::of_units(disks.fold(0_u64, u64::saturating_add).saturating_mul(MIB))),
    ]
    .into()
}

/// Returns why `vm` does not fit into the quotas of its namespace beside the VMs that count; `None` when it fits.
pub(crate) fn exceeded<'a>(
    quotas: &[Quota],
    others: impl Iterator<Item = &'a MikromVM>,
    vm: &MikromVM,
) -> Option<String> {
    let (used, wanted) = (sum(others), requested_amounts(vm));
    quotas.iter().find_map(|quota| quota.exceeded(&used, &wanted))
}

fn sum<'a>(vms: impl Iterator<Item = &'a MikromVM>) -> Amounts {
    let mut used = Amounts::new();
    for (name, amount) in vms.flat_map(requested_amounts) {
        let sum = used.entry(name).or_default();
        *sum = sum.plus(amount);
    }
    used
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn quota(spec: serde_json::Value) -> Option<Quota> {
        let quota = json!({"metadata": {"name": "vms", "namespace": "team"}, "spec": spec});
        Quota::of(&serde_json::from_value(quota).unwrap())
    }

    fn vm(vcpus: i32, memory_mib: i32, disk: &str) -> MikromVM {
        let mut spec = json!({"image": "i", "vcpuCount": vcpus, "memoryMB": memory_mib});
        if !disk.is_empty() {
            spec["volumes"] = json!([{"name": "d", "mountPath": "/d", "disk": {"size": disk}}]);
        }
        serde_json::from_value(json!({"metadata": {"name": "web", "namespace": "team"}, "spec": spec}))
            .unwrap()
    }

    #[test]
    fn quota_without_vm_limits_or_with_scopes_is_ignored() {
        assert_eq!(quota(json!({"hard": {"cpu": "1", "pods": "2"}})), None);
        assert_eq!(quota(json!({"hard": {CPU: "1"}, "scopes": ["BestEffort"]})), None);
        assert!(quota(json!({"hard": {CPU: "1", "pods": "2"}})).is_some());
    }

    #[test]
    fn used_amounts_are_reported_where_they_differ() {
        let of = |used: serde_json::Value| {
            let spec = json!({"hard": {CPU: "4", MEMORY: "1Gi"}});
            let status = json!({"used": used});
            let quota =
                json!({"metadata": {"name": "vms", "namespace": "team"}, "spec": spec, "status": status});
            Quota::of(&serde_json::from_value(quota).unwrap()).unwrap()
        };
        let vms = [vm(2, 512, "5Gi"), vm(1, 256, "")];
        for (why, used, want) in [
            ("nothing is reported", json!({}), vec![(CPU, "3"), (MEMORY, "768Mi")]),
            ("one has changed", json!({CPU: "3", MEMORY: "1Gi"}), vec![(MEMORY, "768Mi")]),
            (
                "other amounts are those of others",
                json!({CPU: "3", MEMORY: "0.75Gi", DISK: "1", "pods": "1"}),
                vec![],
            ),
        ] {
            let found = of(used).stale(vms.iter());
            let used: Vec<_> = found.iter().flat_map(|s| &s.used).map(|(n, v)| (*n, v.as_str())).collect();
            assert_eq!(used, want, "{why}");
        }
        let none = of(json!({})).stale([].iter()).unwrap();
        assert_eq!(none.used, [(CPU, "0".to_owned()), (MEMORY, "0Mi".to_owned())].into(), "no VM");
        assert!(of(json!({})).has_limits_of(&of(json!({CPU: "3"}))));
    }

    #[test]
    fn sum_of_a_namespace_stays_below_its_limits() {
        let hard = quota(json!({"hard": {CPU: "4", MEMORY: "1Gi", DISK: "10Gi"}})).unwrap();
        for (why, others, wanted, want) in [
            ("nothing else", vec![], vm(4, 1024, "10Gi"), None),
            ("exactly", vec![vm(2, 512, "5Gi")], vm(2, 512, "5Gi"), None),
            (
                "more CPUs",
                vec![vm(2, 128, ""), vm(1, 128, "")],
                vm(2, 128, ""),
                Some(
                    "exceeded quota: vms, requested: vm.mikrom.es/cpu=2, used: vm.mikrom.es/cpu=3, limited: vm.mikrom.es/cpu=4",
                ),
            ),
            (
                "more of two",
                vec![vm(1, 768, "8Gi")],
                vm(1, 512, "4Gi"),
                Some(
                    "exceeded quota: vms, requested: vm.mikrom.es/disk=4096Mi,vm.mikrom.es/memory=512Mi, used: \
                     vm.mikrom.es/disk=8192Mi,vm.mikrom.es/memory=768Mi, limited: \
                     vm.mikrom.es/disk=10240Mi,vm.mikrom.es/memory=1024Mi",
                ),
            ),
            (
                "a limit that was lowered is not for VMs without disks",
                vec![vm(1, 1, "90Gi")],
                vm(1, 1, ""),
                None,
            ),
        ] {
            let found = exceeded(std::slice::from_ref(&hard), others.iter(), &wanted);
            assert_eq!(found.as_deref(), want, "{why}");
        }
    }
}
