//! Plans the next removal. Pure.

use std::collections::BTreeMap;
use std::fmt;

use kube::api::ApiResource;

/// Decisions of the administrator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Options {
    /// Namespace of the operator.
    pub namespace: String,
    /// Delete the objects that users have declared, which ends their VMs.
    pub delete_objects: bool,
    /// Remove the finalizers of objects whose operator does not run: the resources that they represent are left behind.
    pub abandon: bool,
    /// Stop before the operators and nodes: the tool that installed them removes them and the later stages.
    pub keep_workloads: bool,
}

impl Options {
    /// True when the stage is to be removed.
    pub(super) fn has(&self, stage: Stage) -> bool {
        !self.keep_workloads || stage < Stage::Workloads
    }

    /// Returns the stage of the certificate signing requests: after the nodes, which create them, or else together with the
    /// webhooks.
    pub(super) fn stage_of_requests(&self) -> Stage {
        if self.keep_workloads { Stage::Webhooks } else { Stage::Namespaces }
    }
}

/// Decision that the administrator must make first.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Refusal {
    /// Objects of users exist.
    #[error("the cluster has {objects}; {running} VMs run")]
    HasObjects {
        /// Kinds and counts of the objects.
        objects: String,
        /// Number of running VMs.
        running: usize,
    },
    /// The operator that removes the objects' finalizers does not run.
    #[error("no operator is ready to end {objects}")]
    NoOperator {
        /// Kinds and counts of the objects.
        objects: String,
    },
}

/// Object to be removed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) resource: ApiResource,
    pub(super) namespace: Option<String>,
    pub(super) name: String,
    /// True when the object was deleted, and a finalizer keeps it.
    pub(super) is_deleting: bool,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.namespace {
            Some(namespace) => write!(f, "{} {namespace}/{}", self.resource.kind, self.name),
            None => write!(f, "{} {}", self.resource.kind, self.name),
        }
    }
}

/// Observed objects.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    /// Custom resources that users have declared.
    pub(super) objects: Vec<Target>,
    /// Number of running VMs among them.
    pub(super) running: usize,
    /// True when an operator that removes their finalizers is ready.
    pub(super) has_operator: bool,
    /// Installed objects, by stage.
    pub(super) installed: BTreeMap<Stage, Vec<Target>>,
}

/// Parts of an installation, in the order of their removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Stage {
    /// Webhook configurations and the extension API: without their server, webhooks refuse changes, and the extension API
    /// blocks the deletion of namespaces.
    Webhooks,
    /// Operators and nodes.
    Workloads,
    /// Admission policy and RBAC objects.
    Rights,
    /// Namespaces with all objects in them, and certificate signing requests.
    Namespaces,
    /// Custom resource definitions.
    Definitions,
}

/// Next step of the removal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Plan {
    Delete(Vec<Target>),
    Abandon(Vec<Target>),
    /// Wait for the removal of this object.
    Wait(String),
    Done,
}

/// Plans the next step. A stage begins when the objects of the previous one are gone.
///
/// # Errors
/// [`Refusal`] when the administrator must make a decision first.
pub(super) fn plan(seen: &Seen, options: &Options) -> Result<Plan, Refusal> {
    if !seen.objects.is_empty() {
        return objects(seen, options);
    }
    let mut wanted = seen.installed.iter().filter(|(stage, _)| options.has(**stage));
    let stage = wanted.find(|(_, targets)| !targets.is_empty());
    Ok(stage.map_or(Plan::Done, |(_, targets)| delete_or_wait(targets)))
}

fn objects(seen: &Seen, options: &Options) -> Result<Plan, Refusal> {
    let has_new = seen.objects.iter().any(|object| !object.is_deleting);
    if has_new && !options.delete_objects {
        return Err(Refusal::HasObjects { objects: numbers(&seen.objects), running: seen.running });
    }
    if !seen.has_operator && !options.abandon {
        return Err(Refusal::NoOperator { objects: numbers(&seen.objects) });
    }
    Ok(match delete_or_wait(&seen.objects) {
        Plan::Wait(_) if !seen.has_operator => Plan::Abandon(seen.objects.clone()),
        next => next,
    })
}

fn delete_or_wait(targets: &[Target]) -> Plan {
    let fresh: Vec<_> = targets.iter().filter(|target| !target.is_deleting).cloned().collect();
    match (fresh.is_empty(), targets.first()) {
        (false, _) => Plan::Delete(fresh),
        (true, Some(first)) => Plan::Wait(first.to_string()),
        (true, None) => Plan::Done,
    }
}

/// Formats kinds and counts: `2 MikromVMs, 1 BidNodes`.
fn numbers(objects: &[Target]) -> String {
    let mut kinds: BTreeMap<&str, usize> = BTreeMap::new();
    for object in objects {
        *kinds.entry(&object.resource.kind).or_default() += 1;
    }
    kinds.iter().map(|(kind, number)| format!("{number} {kind}s")).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use kube::api::GroupVersionKind;

    use super::*;

    fn target(kind: &str, is_deleting: bool) -> Target {
        let resource = ApiResource::from_gvk(&GroupVersionKind::gvk("g", "v1", kind));
        Target { resource, namespace: None, name: "a".into(), is_deleting }
    }

    fn word(plan: &Result<Plan, Refusal>) -> String {
        match plan {
            Ok(Plan::Delete(targets)) => format!("delete {}", targets[0]),
            Ok(Plan::Abandon(targets)) => format!("abandon {}", targets[0]),
            Ok(Plan::Wait(what)) => format!("wait {what}"),
            Ok(Plan::Done) => "done".into(),
            Err(refusal) => refusal.to_string(),
        }
    }

    fn options() -> Options {
        Options { namespace: "s".into(), delete_objects: false, abandon: false, keep_workloads: false }
    }

    #[test]
    fn keep_workloads_option_leaves_workloads_installed() {
        let options = Options { keep_workloads: true, ..options() };
        let seen = |stages: &[Stage]| {
            let installed = stages.iter().map(|stage| (*stage, vec![target(&format!("{stage:?}"), false)]));
            Seen { installed: installed.collect(), has_operator: true, ..Seen::default() }
        };
        let first = seen(&[Stage::Webhooks, Stage::Workloads]);
        assert_eq!(word(&plan(&first, &options)), "delete Webhooks a");
        let rest = seen(&[Stage::Workloads, Stage::Rights, Stage::Namespaces, Stage::Definitions]);
        assert_eq!(word(&plan(&rest, &options)), "done");
        let used = Seen { objects: vec![target("MikromVM", false)], running: 0, ..first };
        assert_eq!(word(&plan(&used, &options)), "the cluster has 1 MikromVMs; 0 VMs run");
    }

    #[test]
    fn plan_table() {
        use Stage::{Definitions, Namespaces, Webhooks, Workloads};
        let (new, going) = (vec![target("MikromVM", false)], vec![target("MikromVM", true)]);
        let stages = |stages: &[(Stage, bool)]| -> BTreeMap<Stage, Vec<Target>> {
            stages
                .iter()
                .map(|(stage, going)| (*stage, vec![target(&format!("{stage:?}"), *going)]))
                .collect()
        };
        let all = stages(&[(Webhooks, false), (Workloads, false), (Namespaces, false), (Definitions, false)]);
        let rows = [
            (
                "VMs run: refused",
                new.clone(),
                true,
                (false, false),
                all.clone(),
                "the cluster has 1 MikromVMs; 1 VMs run",
            ),
            ("users' objects go first", new.clone(), true, (true, false), all.clone(), "delete MikromVM a"),
            ("the operator ends them", going.clone(), true, (true, false), all.clone(), "wait MikromVM a"),
            ("deleted by their users", going.clone(), true, (false, false), all.clone(), "wait MikromVM a"),
            (
                "no operator: refused",
                new.clone(),
                false,
                (true, false),
                all.clone(),
                "no operator is ready to end 1 MikromVMs",
            ),
            ("no operator: deleted, then", new, false, (true, true), all.clone(), "delete MikromVM a"),
            ("abandoned", going, false, (true, true), all.clone(), "abandon MikromVM a"),
            ("webhooks first", vec![], true, (false, false), all, "delete Webhooks a"),
            (
                "one stage after the other",
                vec![],
                false,
                (false, false),
                stages(&[(Workloads, true), (Definitions, false)]),
                "wait Workloads a",
            ),
            (
                "definitions last",
                vec![],
                false,
                (false, false),
                stages(&[(Definitions, false)]),
                "delete Definitions a",
            ),
            ("nothing left", vec![], false, (false, false), BTreeMap::new(), "done"),
        ];
        for (why, objects, has_operator, (delete_objects, abandon), installed, want) in rows {
            let seen = Seen { objects, running: 1, has_operator, installed };
            let options = Options { delete_objects, abandon, ..options() };
            assert_eq!(word(&plan(&seen, &options)), want, "{why}");
        }
    }
}
