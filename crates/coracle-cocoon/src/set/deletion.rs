//! Deletion of a set: first names, then pods, then tags, then the finalizer. Pure.
//!
//! A node saves a VM while its pod is being deleted, so a tag that is removed before the pod is gone would be pushed again. The
//! names of the VMs are on the pods, so they are stored on the set before the first pod is deleted.

use std::collections::BTreeSet;

use coracle_api::CocoonSet;
use coracle_api::cocoon::{Mode, SetPhase, keys};
use kube::ResourceExt as _;

use super::{
    members::Member,
    plan::Observed,
    pods,
    step::{Plan, Step},
};

/// Returns the names of VMs that are stored on the set.
fn recorded_vms(set: &CocoonSet) -> BTreeSet<String> {
    let text = set.annotations().get(keys::DELETE_VM_NAMES).map(String::as_str).unwrap_or_default();
    text.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Returns the names of VMs that the set owned according to its status: their pods may be gone already.
fn reported_vms(set: &CocoonSet) -> BTreeSet<String> {
    let Some(status) = &set.status else { return BTreeSet::new() };
    let is_static = |name: &str| {
        set.spec.toolboxes.iter().any(|toolbox| toolbox.name == name && toolbox.mode == Mode::Static)
    };
    let agents = status.agents.iter().map(|agent| &agent.vm_name);
    let toolboxes = status.toolboxes.iter().filter(|t| !is_static(&t.name)).map(|t| &t.vm_name);
    agents.chain(toolboxes).filter(|name| !name.is_empty()).cloned().collect()
}

/// Returns the stored names and `more`.
pub(super) fn merge_recorded(set: &CocoonSet, more: impl IntoIterator<Item = String>) -> Vec<String> {
    let mut names = recorded_vms(set);
    names.extend(more);
    names.into_iter().collect()
}

pub(super) fn plan(o: &Observed<'_>) -> Plan {
    let set = o.set;
    let mut plan = Plan::new(SetPhase::Pending, o.settings.times.poll);
    if !set.finalizers().iter().any(|finalizer| finalizer == keys::SET_FINALIZER) {
        return plan;
    }
    let members: Vec<_> = o.pods.iter().map(Member::of).collect();
    // Static VMs do not belong to the set: neither they nor their tags are touched.
    let managed = members.iter().filter(|member| member.spec.managed && !member.spec.vm_name.is_empty());
    let owned = managed.map(|member| member.spec.vm_name.clone()).chain(reported_vms(set));
    let names = merge_recorded(set, owned);
    if names.iter().any(|name| !recorded_vms(set).contains(name)) {
        plan.steps.push(Step::RecordVms(names));
        return plan;
    }
    let live = members.iter().filter(|member| !member.is_ending());
    plan.steps.extend(live.map(|member| Step::DeletePod(member.id())));
    if !members.is_empty() {
        return plan;
    }
    let is_abandoned = o.annotation(coracle_api::keys::ABANDON) == Some("true");
    for vm in names.iter().filter(|vm| !is_abandoned && !o.taken.contains_key(*vm)) {
        plan.steps.push(Step::DeleteTag { vm: vm.clone(), tag: keys::TAG_HIBERNATE });
        if removes_latest(o, vm) {
            plan.steps.push(Step::DeleteTag { vm: vm.clone(), tag: keys::TAG_LATEST });
        }
    }
    plan.steps.push(Step::RemoveFinalizer);
    plan
}

/// True when the tag `latest` of the VM must be removed. Saved states are removed with the set, unless they are to be kept;
/// then only states that the set's policy does not save, which are older than the policy, are removed.
fn removes_latest(o: &Observed<'_>, vm: &str) -> bool {
    let (namespace, name) = (o.set.namespace().unwrap_or_default(), o.set.name_any());
    let is_saved = pods::is_saved(o.set.spec.snapshot_policy, &namespace, &name, vm);
    is_saved != o.settings.keep_snapshots
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use coracle_api::cocoon::{SnapshotPolicy, agent_vm_name};
    use serde_json::json;

    use super::*;
    use crate::config::Settings;
    use crate::set::testing::{pods_of, set_with};
    use crate::set::{plan, release};

    fn verbs(set: &CocoonSet, states: &str, taken: &[&str], settings: &Settings) -> String {
        let pods = pods_of(set, states);
        let taken: BTreeMap<_, _> = taken.iter().map(|vm| ((*vm).to_owned(), "other/x".to_owned())).collect();
        let observed = Observed {
            set,
            pods: &pods,
            held: &BTreeSet::new(),
            saved: &BTreeMap::new(),
            taken: &taken,
            settings,
            now: jiff::Timestamp::UNIX_EPOCH,
        };
        plan::plan(&observed).steps.iter().map(Step::verb).collect::<Vec<_>>().join(" ")
    }

    fn deleted_set(policy: &str, recorded: &str) -> CocoonSet {
        let tool = json!({"name": "win", "mode": "static", "staticIP": "10.0.0.9", "staticVMID": "vm-9"});
        let spec =
            json!({"agent": {"image": "u", "replicas": 1}, "snapshotPolicy": policy, "toolboxes": [tool]});
        let mut set = set_with(spec);
        let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(jiff::Timestamp::UNIX_EPOCH);
        set.metadata.deletion_timestamp = Some(now);
        if !recorded.is_empty() {
            set.annotations_mut().insert(keys::DELETE_VM_NAMES.into(), recorded.into());
        }
        set
    }

    const BOTH: &str = "vk-prod-demo-0,vk-prod-demo-1";

    #[test]
    fn deletion_table() {
        let keep = Settings { keep_snapshots: true, ..Settings::default() };
        let default = Settings::default();
        let hibernate = "untag:vk-prod-demo-0:hibernate";
        let all = "untag:vk-prod-demo-0:hibernate untag:vk-prod-demo-0:latest untag:vk-prod-demo-1:hibernate \
                   untag:vk-prod-demo-1:latest remove-finalizer";
        for (why, policy, names, states, settings, want) in [
            (
                "names before pods",
                "always",
                "",
                "0=ready 1=ready",
                &default,
                "record:vk-prod-demo-0+vk-prod-demo-1",
            ),
            ("pods before tags", "always", BOTH, "0=ready 1=ready", &default, "delete:demo-0 delete:demo-1"),
            ("a tag would come back while a pod ends", "always", BOTH, "0=ending", &default, ""),
            ("a static VM is not recorded", "always", BOTH, "win=ready", &default, "delete:demo-win"),
            ("all pods are gone", "always", BOTH, "", &default, all),
            (
                "what was saved is kept",
                "always",
                "vk-prod-demo-0",
                "",
                &keep,
                &format!("{hibernate} remove-finalizer"),
            ),
            (
                "what the node never saves is not kept",
                "main-only",
                BOTH,
                "",
                &keep,
                "untag:vk-prod-demo-0:hibernate untag:vk-prod-demo-1:hibernate untag:vk-prod-demo-1:latest remove-finalizer",
            ),
            (
                "what was not saved is not ours to remove",
                "never",
                "vk-prod-demo-0",
                "",
                &default,
                &format!("{hibernate} remove-finalizer"),
            ),
            ("nothing was ever made", "always", "", "", &default, "remove-finalizer"),
        ] {
            assert_eq!(verbs(&deleted_set(policy, names), states, &[], settings), want, "{why}");
        }
    }

    /// Namespace `a` with set `b-c` has the same VM names as namespace `a-b` with set `c`.
    #[test]
    fn tags_of_a_vm_of_another_namespace_are_left_alone() {
        let set = deleted_set("always", "vk-prod-demo-0");
        let settings = Settings::default();
        assert_eq!(verbs(&set, "", &["vk-prod-demo-0"], &settings), "remove-finalizer");
    }

    #[test]
    fn abandoned_set_is_deleted_without_the_registry() {
        let mut set = deleted_set("always", BOTH);
        set.annotations_mut().insert(coracle_api::keys::ABANDON.into(), "true".into());
        assert_eq!(verbs(&set, "", &[], &Settings::default()), "remove-finalizer");
    }

    #[test]
    fn vms_whose_pods_are_gone_are_known_by_the_status() {
        let mut set = deleted_set("always", "");
        let agent = |slot: u32| json!({"slot": slot, "vmName": agent_vm_name("prod", "demo", slot)});
        let tool = json!({"name": "win", "vmName": "vk-prod-demo-win"});
        let status = json!({"agents": [agent(0)], "toolboxes": [tool]});
        set.status = Some(serde_json::from_value(status).unwrap());
        assert_eq!(verbs(&set, "", &[], &Settings::default()), "record:vk-prod-demo-0", "not the static one");
    }

    #[test]
    fn snapshot_policy_selects_the_saved_vms() {
        assert!(pods::is_saved(SnapshotPolicy::MainOnly, "prod", "demo", "vk-prod-demo-0"));
        assert!(!pods::is_saved(SnapshotPolicy::MainOnly, "prod", "demo", "vk-prod-demo-db-0"));
        assert_eq!(release::main_vm(&deleted_set("always", "")), "vk-prod-demo-0");
    }
}
