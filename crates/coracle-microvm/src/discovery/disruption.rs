//! Counts the VMs of one controller that are down, so that a drain leaves the others running. Pure.

use std::collections::HashSet;
use std::sync::Arc;

use coracle_api::{MikromVM, keys};
use kube::ResourceExt as _;

use crate::status;

/// True when `vm` may go down now. `disrupted` contains the VMs that were allowed to go down and may still appear up. `vm` is
/// added to it.
pub(super) fn may_disrupt(vm: &MikromVM, vms: &[Arc<MikromVM>], disrupted: &mut HashSet<String>) -> bool {
    let uid = vm.uid().unwrap_or_default();
    let (Some(controller), Some(max)) = (controller(vm), max_unavailable(vm)) else { return true };
    if !is_ready(vm) || disrupted.contains(&uid) {
        return true; // the drain makes no further VM unavailable
    }
    let others =
        vms.iter().filter(|other| other.uid() != vm.uid() && self::controller(other) == Some(controller));
    let down =
        |other: &&Arc<MikromVM>| !is_ready(other) || other.uid().is_some_and(|uid| disrupted.contains(&uid));
    let may = others.filter(down).count() < max;
    if may {
        disrupted.insert(uid);
    }
    may
}

/// Keeps the VMs in `disrupted` that still appear up and whose node is still cordoned.
pub(super) fn forget_settled(
    vms: &[Arc<MikromVM>],
    disrupted: &mut HashSet<String>,
    is_cordoned: impl Fn(&str) -> bool,
) {
    let pending = |uid: &String| {
        let vm = vms.iter().find(|vm| vm.uid().as_ref() == Some(uid));
        vm.is_some_and(|vm| is_ready(vm) && vm.status.as_ref().is_some_and(|s| is_cordoned(&s.node_name)))
    };
    disrupted.retain(pending);
}

fn is_ready(vm: &MikromVM) -> bool {
    status::ready_since(vm).is_some()
}

/// Returns the UID of the controller that created this VM.
fn controller(vm: &MikromVM) -> Option<&str> {
    vm.owner_references().iter().find(|owner| owner.controller == Some(true)).map(|owner| owner.uid.as_str())
}

/// Returns the maximum of VMs that may be down. An annotation that is not a number counts as 0.
fn max_unavailable(vm: &MikromVM) -> Option<usize> {
    vm.annotations().get(keys::vm::MAX_UNAVAILABLE).map(|value| value.parse().unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use coracle_api::{MikromVMSpec, MikromVMStatus, condition};
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, OwnerReference, Time};

    use super::*;

    fn vm(name: &str, owner: Option<&str>, max: Option<&str>, ready: bool) -> Arc<MikromVM> {
        let mut vm = MikromVM::new(name, MikromVMSpec::default());
        vm.metadata.uid = Some(name.into());
        vm.metadata.owner_references = owner.map(|uid| {
            let owner =
                OwnerReference { uid: uid.into(), controller: Some(true), ..OwnerReference::default() };
            vec![owner]
        });
        if let Some(max) = max {
            vm.annotations_mut().insert(keys::vm::MAX_UNAVAILABLE.into(), max.into());
        }
        let ready = Condition {
            type_: condition::READY.into(),
            status: if ready { "True" } else { "False" }.into(),
            last_transition_time: Time(jiff::Timestamp::UNIX_EPOCH),
            reason: String::new(),
            message: String::new(),
            observed_generation: None,
        };
        let node_name = "n1".into();
        vm.status = Some(MikromVMStatus { conditions: vec![ready], node_name, ..MikromVMStatus::default() });
        Arc::new(vm)
    }

    #[test]
    fn budget_table() {
        let pool = |name, ready| vm(name, Some("pool"), Some("1"), ready);
        for (why, asked, others, want) in [
            ("no controller", vm("a", None, Some("0"), true), vec![], true),
            ("no budget", vm("a", Some("pool"), None, true), vec![pool("b", false)], true),
            ("all others run", pool("a", true), vec![pool("b", true)], true),
            ("one is down", pool("a", true), vec![pool("b", false)], false),
            ("it is itself the one that is down", pool("a", false), vec![pool("b", false)], true),
            ("of another pool", pool("a", true), vec![vm("b", Some("else"), Some("1"), false)], true),
            ("none may be down", vm("a", Some("pool"), Some("0"), true), vec![pool("b", true)], false),
            ("not a number", vm("a", Some("pool"), Some("half"), true), vec![], false),
        ] {
            let all = [vec![asked.clone()], others].concat();
            assert_eq!(may_disrupt(&asked, &all, &mut HashSet::new()), want, "{why}");
        }
    }

    #[test]
    fn concurrent_disruptions_are_limited_before_store_update() {
        let (a, b) = (vm("a", Some("pool"), Some("1"), true), vm("b", Some("pool"), Some("1"), true));
        let (all, mut disrupted) = ([a.clone(), b.clone()], HashSet::new());
        assert!(may_disrupt(&a, &all, &mut disrupted) && !may_disrupt(&b, &all, &mut disrupted));
        assert!(may_disrupt(&a, &all, &mut disrupted), "again for the same");
        forget_settled(&all, &mut disrupted, |_| true);
        assert!(!may_disrupt(&b, &all, &mut disrupted), "a is about to go down");
        forget_settled(&all, &mut disrupted, |_| false);
        assert!(may_disrupt(&b, &all, &mut disrupted), "the node was uncordoned, or a has moved");
    }
}
