//! Decides which VMs of a pool are created, replaced and deleted. Pure.

use std::{cmp::Reverse, collections::BTreeSet, fmt::Write as _};

use coracle_api::{MikromVM, MikromVMPool, UpdateStrategy, VmTemplate, condition, keys};
use coracle_reconcile::is_true;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::OwnerReference;
use kube::{Resource as _, ResourceExt as _};
use sha2::{Digest as _, Sha256};

/// Largest number of VMs that one reconcile creates, and that it deletes.
const BATCH: usize = 25;
/// Length in bytes of a template's digest in names and labels.
const BYTES: usize = 4;
/// Finalizer of `kubectl delete --cascade=orphan`.
const ORPHAN: &str = "orphan";

/// One pool and its VMs at one moment.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Observed<'a> {
    pub(crate) pool: &'a MikromVMPool,
    /// VMs of the namespace with the pool's label.
    pub(crate) vms: &'a [MikromVM],
}

/// One effect with everything that it needs. Each step is safe to repeat.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Step {
    AddFinalizer,
    Create(Box<MikromVM>),
    Delete {
        name: String,
        uid: String,
    },
    /// Sets the annotation that tells drains how many VMs of the pool may be down.
    Annotate {
        name: String,
        uid: String,
        max_unavailable: String,
    },
    RemoveFinalizer,
}

/// VMs of a pool that are not being deleted.
pub(crate) struct Counted<'a> {
    pub(crate) live: Vec<&'a MikromVM>,
    pub(crate) updated: Vec<&'a MikromVM>,
    pub(crate) old: Vec<&'a MikromVM>,
    pub(crate) ready: usize,
}

impl<'a> Counted<'a> {
    pub(crate) fn of(o: &Observed<'a>) -> Self {
        let hash = template_hash(&o.pool.spec.template);
        let owned = o.vms.iter().filter(|vm| is_owned(vm, o.pool));
        let live: Vec<_> = owned.filter(|vm| vm.metadata.deletion_timestamp.is_none()).collect();
        let is_updated = |vm: &&MikromVM| vm.labels().get(keys::POOL_TEMPLATE_LABEL) == Some(&hash);
        let (updated, old) = live.iter().copied().partition(is_updated);
        let ready = live.iter().filter(|vm| is_ready(vm)).count();
        Self { live, updated, old, ready }
    }
}

fn is_owned(vm: &MikromVM, pool: &MikromVMPool) -> bool {
    let owners = vm.owner_references();
    owners
        .iter()
        .any(|owner| owner.controller == Some(true) && pool.metadata.uid.as_ref() == Some(&owner.uid))
}

pub(crate) fn is_ready(vm: &MikromVM) -> bool {
    vm.status.as_ref().is_some_and(|status| is_true(&status.conditions, condition::READY))
}

fn size(count: i32) -> usize {
    usize::try_from(count).unwrap_or(0)
}

/// Plans the next steps.
pub(crate) fn plan(o: &Observed<'_>) -> Vec<Step> {
    let has = |finalizer: &str| o.pool.finalizers().iter().any(|f| f == finalizer);
    match (o.pool.metadata.deletion_timestamp.is_some(), has(keys::POOL_FINALIZER)) {
        (true, false) => vec![],
        (true, true) if has(ORPHAN) => vec![Step::RemoveFinalizer],
        (true, true) => remove(o),
        (false, false) => vec![Step::AddFinalizer],
        (false, true) => keep(o),
    }
}

/// Deletes the VMs before the pool is removed: a garbage collector, which would do the same, does not run everywhere.
fn remove(o: &Observed<'_>) -> Vec<Step> {
    let live = Counted::of(o).live;
    match live.is_empty() {
        // VMs that are being deleted already do not need the pool.
        true => vec![Step::RemoveFinalizer],
        false => live.into_iter().take(BATCH).map(delete).collect(),
    }
}

fn keep(o: &Observed<'_>) -> Vec<Step> {
    let counted = Counted::of(o);
    let mut steps = deletions(o, &counted);
    steps.extend(creations(o, &counted));
    let max_unavailable = o.pool.spec.max_unavailable.to_string();
    let stale = counted
        .live
        .iter()
        .filter(|vm| vm.annotations().get(keys::vm::MAX_UNAVAILABLE) != Some(&max_unavailable));
    steps.extend(stale.take(BATCH).map(|vm| Step::Annotate {
        name: vm.name_any(),
        uid: vm.uid().unwrap_or_default(),
        max_unavailable: max_unavailable.clone(),
    }));
    steps
}

/// Returns creations of missing VMs. While VMs are replaced, the pool may have maxSurge VMs more than replicas.
fn creations(o: &Observed<'_>, counted: &Counted<'_>) -> Vec<Step> {
    let spec = &o.pool.spec;
    let replicas = size(spec.replicas);
    let rolls = !counted.old.is_empty() && spec.update_strategy == UpdateStrategy::RollingUpdate;
    let most = if rolls { replicas + size(spec.max_surge) } else { replicas };
    let missing = most.saturating_sub(counted.live.len());
    let missing = missing.min(replicas.saturating_sub(counted.updated.len())).min(BATCH);
    // A VM that is being deleted keeps its name until it is gone.
    let taken: BTreeSet<String> = o.vms.iter().map(kube::ResourceExt::name_any).collect();
    let hash = template_hash(&spec.template);
    let names = (0..).map(|n: usize| format!("{}-{hash}-{n}", o.pool.name_any()));
    let free = names.filter(|name| !taken.contains(name));
    free.take(missing).map(|name| Step::Create(Box::new(member(o.pool, name, &hash)))).collect()
}

/// Returns deletions of surplus VMs, and of VMs of an older template as far as enough others are Ready.
fn deletions(o: &Observed<'_>, counted: &Counted<'_>) -> Vec<Step> {
    let spec = &o.pool.spec;
    let replicas = size(spec.replicas);
    let mut ready = counted.ready;
    let ready_min = replicas.saturating_sub(size(spec.max_unavailable));
    let too_many = |count: usize| count.saturating_sub(replicas);
    let mut surplus_old = too_many(counted.live.len());
    let mut surplus_updated = too_many(counted.updated.len());
    let rolls = spec.update_strategy == UpdateStrategy::RollingUpdate;
    let mut deletions = Vec::new();
    // A VM that is not Ready may be deleted; a Ready VM only when enough others remain.
    let mut mark_for_deletion = |vm: &MikromVM, surplus: &mut usize| {
        if deletions.len() < BATCH && (!is_ready(vm) || ready > ready_min) {
            ready -= usize::from(is_ready(vm));
            *surplus = surplus.saturating_sub(1);
            deletions.push(delete(vm));
        }
    };
    for vm in deletion_order(&counted.old) {
        if rolls || surplus_old > 0 {
            mark_for_deletion(vm, &mut surplus_old);
        }
    }
    for vm in deletion_order(&counted.updated) {
        if surplus_updated > 0 {
            mark_for_deletion(vm, &mut surplus_updated);
        }
    }
    deletions
}

/// Sorts VMs in the order of deletion: first those that are not Ready, then the youngest.
fn deletion_order<'a>(vms: &[&'a MikromVM]) -> Vec<&'a MikromVM> {
    let mut vms = vms.to_vec();
    vms.sort_by_key(|vm| {
        let born = vm.metadata.creation_timestamp.as_ref().map(|time| time.0);
        (is_ready(vm), Reverse(born), Reverse(vm.name_any()))
    });
    vms
}

fn delete(vm: &MikromVM) -> Step {
    Step::Delete { name: vm.name_any(), uid: vm.uid().unwrap_or_default() }
}

/// Returns a VM of the present template.
pub(crate) fn member(pool: &MikromVMPool, name: String, hash: &str) -> MikromVM {
    let template = &pool.spec.template;
    let mut vm = MikromVM::new(&name, template.spec.clone());
    vm.metadata.namespace = pool.namespace();
    let mut labels = template.metadata.labels.clone();
    labels.insert(keys::POOL_LABEL.to_owned(), pool.name_any());
    labels.insert(keys::POOL_TEMPLATE_LABEL.to_owned(), hash.to_owned());
    vm.metadata.labels = Some(labels);
    let mut annotations = template.metadata.annotations.clone();
    annotations.insert(keys::vm::MAX_UNAVAILABLE.to_owned(), pool.spec.max_unavailable.to_string());
    vm.metadata.annotations = Some(annotations);
    vm.metadata.owner_references = Some(vec![OwnerReference {
        api_version: MikromVMPool::api_version(&()).into_owned(),
        kind: MikromVMPool::kind(&()).into_owned(),
        name: pool.name_any(),
        uid: pool.uid().unwrap_or_default(),
        controller: Some(true),
        block_owner_deletion: Some(true),
    }]);
    vm
}

/// Returns the digest of a template, in hexadecimal.
pub(crate) fn template_hash(template: &VmTemplate) -> String {
    // Serialization of a template does not fail; a template for which it failed would never be replaced.
    let json = serde_json::to_vec(template).unwrap_or_default();
    Sha256::digest(json).iter().take(BYTES).fold(String::new(), |mut text, byte| {
        // Writing to a string does not fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::testing::{pool, vms};

    /// Returns steps as letters: `+` for a creation, and the numbers of deleted VMs.
    fn steps_text(steps: &[Step]) -> String {
        let one = |step: &Step| match step {
            Step::AddFinalizer => "hold".to_owned(),
            Step::Create(_) => "+".to_owned(),
            Step::Delete { uid, .. } => uid.replace("vm", ""),
            Step::Annotate { max_unavailable, .. } => format!("max={max_unavailable}"),
            Step::RemoveFinalizer => "release".to_owned(),
        };
        steps.iter().map(one).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn plan_table() {
        for (why, (replicas, unavailable, surge), all, want) in [
            ("nothing yet", (3, 1, 1), "", "+ + +"),
            ("steady state is silent", (3, 1, 1), "UUU", ""),
            ("some are still being made", (3, 1, 1), "Uuu", ""),
            ("one is gone", (3, 1, 1), "UU", "+"),
            ("one is being deleted", (3, 1, 1), "UUd", "+"),
            ("VMs of others do not count", (2, 1, 1), "Ux", "+"),
            ("scaled down: not Ready first", (1, 1, 1), "UuU", "-1 -2"),
            ("scaled to nothing", (0, 1, 1), "UU", "-1 -0"),
            ("a new template: one more, and one less", (3, 1, 1), "OOO", "-2 +"),
            ("a new template without surge", (3, 1, 0), "OOO", "-2"),
            ("then its place is filled", (3, 1, 0), "OO", "+"),
            ("a new template, none may be down", (3, 0, 1), "OOO", "+"),
            ("the new one is not Ready yet", (3, 0, 1), "OOOu", ""),
            ("the new one is Ready", (3, 0, 1), "OOOU", "-2"),
            ("old ones that are down go at once", (3, 1, 1), "ooO", "-1 -0 +"),
            ("none are replaced while too many are down", (3, 1, 1), "OOuu", ""),
            ("the last old one", (3, 1, 1), "UUUO", "-3"),
            ("replaced and scaled down", (1, 1, 1), "OOO", "-2 -1 -0"),
        ] {
            let pool = pool(replicas, unavailable, surge);
            let vms = vms(&pool, all);
            assert_eq!(steps_text(&plan(&Observed { pool: &pool, vms: &vms })), want, "{why}");
        }
    }

    #[test]
    fn lifecycle_table() {
        let mut fresh = pool(1, 1, 1);
        fresh.metadata.finalizers = None;
        let mut deleted = pool(1, 1, 1);
        deleted.metadata.deletion_timestamp =
            Some(serde_json::from_value(json!("2026-01-02T03:04:05Z")).unwrap());
        let mut orphaning = deleted.clone();
        orphaning.metadata.finalizers.as_mut().unwrap().push(ORPHAN.into());
        let mut on_delete = pool(2, 1, 1);
        on_delete.spec.update_strategy = UpdateStrategy::OnDelete;
        for (why, pool, all, want) in [
            ("finalizer before any VM", &fresh, "", "hold"),
            ("its VMs go first", &deleted, "UO", "-0 -1"),
            ("they are going", &deleted, "dd", "release"),
            ("none is left", &deleted, "x", "release"),
            ("its VMs stay", &orphaning, "UO", "release"),
            ("old ones stay until they are deleted", &on_delete, "OO", ""),
            ("then they are replaced", &on_delete, "O", "+"),
        ] {
            assert_eq!(steps_text(&plan(&Observed { pool, vms: &vms(pool, all) })), want, "{why}");
        }
    }

    #[test]
    fn members_get_the_disruption_budget() {
        let mut pool = pool(1, 1, 1);
        let made = vms(&pool, "U");
        pool.spec.max_unavailable = 2;
        let steps = plan(&Observed { pool: &pool, vms: &made });
        assert_eq!(steps_text(&steps), "max=2", "the template does not have it");
        let [Step::Create(vm)] = &plan(&Observed { pool: &pool, vms: &[] })[..] else { panic!() };
        assert_eq!(vm.annotations()[keys::vm::MAX_UNAVAILABLE], "2");
        assert_eq!(vm.labels()["app"], "web");
    }

    proptest! {
        /// From any state, a reconcile leaves enough VMs Ready, and creates no more than the surge allows.
        #[test]
        fn passes_keep_within_the_budget(
            replicas in 0i32..8, unavailable in 0i32..4, surge in 0i32..4, all in "[uUoOdx]{0,12}",
        ) {
            prop_assume!(unavailable + surge > 0);
            let pool = pool(replicas, unavailable, surge);
            let vms = vms(&pool, &all);
            let o = Observed { pool: &pool, vms: &vms };
            let (counted, steps) = (Counted::of(&o), plan(&o));
            let deletions: Vec<_> = steps.iter().filter_map(|step| match step {
                Step::Delete { uid, .. } => Some(uid.clone()),
                _ => None,
            }).collect();
            let created = steps.iter().filter(|step| matches!(step, Step::Create(_))).count();
            let left = counted.live.iter().filter(|vm| !deletions.contains(&vm.uid().unwrap()));
            let ready = left.filter(|vm| is_ready(vm)).count();
            let least = size(replicas).saturating_sub(size(unavailable)).min(counted.ready);
            prop_assert!(ready >= least, "{ready} of {least} Ready: {steps:?}");
            let most = (size(replicas) + size(surge)).max(counted.live.len());
            prop_assert!(counted.live.len() + created <= most, "{steps:?}");
        }

        /// When VMs become Ready, repeated reconciles converge to exactly the desired VMs.
        #[test]
        fn passes_converge(replicas in 0i32..6, unavailable in 0i32..3, surge in 0i32..3, all in "[uUoOdx]{0,9}") {
            prop_assume!(unavailable + surge > 0);
            let pool = pool(replicas, unavailable, surge);
            let mut world = vms(&pool, &all);
            for round in 0..60 {
                world.retain(|vm| vm.metadata.deletion_timestamp.is_none());
                let steps = plan(&Observed { pool: &pool, vms: &world });
                if steps.is_empty() && world.iter().all(is_ready) {
                    break;
                }
                prop_assert!(round < 59, "no rest: {steps:?}");
                for step in steps {
                    match step {
                        Step::Create(vm) => {
                            let mut vm = *vm;
                            vm.metadata.uid = Some(format!("{}-{round}", vm.name_any()));
                            vm.status = vms(&pool, "U").remove(0).status;
                            world.push(vm);
                        }
                        Step::Delete { uid, .. } => world.retain(|vm| vm.uid().as_ref() != Some(&uid)),
                        _ => {}
                    }
                }
                for vm in &mut world {
                    vm.status = vms(&pool, "U").remove(0).status;
                }
            }
            let counted = Counted::of(&Observed { pool: &pool, vms: &world });
            prop_assert_eq!((counted.updated.len(), counted.old.len()), (size(replicas), 0));
        }
    }
}
