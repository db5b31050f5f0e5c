//! Decides whether a MikromVM may be stored (docs/reference/conditions.md). Pure.

use coracle_api::MikromVM;
use coracle_microvm::{
    Overcommit,
    placement::{Candidate, Request, fits, place},
};

/// Node that the object names for its VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Target {
    /// An agent that no node announces: its size is unknown.
    Outside,
    /// To this node.
    Node(String),
    /// Any node with enough resources.
    Anywhere,
}

/// Admission review of one object.
#[derive(Clone, Debug)]
pub struct Review<'a> {
    /// The object as it would be stored.
    pub new: &'a MikromVM,
    /// Stored object; `None` at creation.
    pub old: Option<&'a MikromVM>,
    /// Node that the object names.
    pub target: Target,
    /// Resources that the object requests.
    pub request: Request,
    /// Live nodes, with the resources promised on them, without this object.
    pub nodes: &'a [Candidate],
    /// Overcommit limit of the nodes.
    pub overcommit: Overcommit,
    /// Quota of the namespace that the object would exceed, as a sentence.
    pub exceeded_quota: Option<String>,
    /// Admit the object when no node is known.
    pub fail_open: bool,
}

/// Decides about the review.
///
/// # Errors
/// A sentence for the user who applied the object.
pub fn judge(q: &Review<'_>) -> Result<(), String> {
    if let Some(old) = q.old {
        if old.is_provisioned() {
            return check_frozen_fields(old, q.new); // a live VM keeps its node
        }
        if old.metadata.deletion_timestamp.is_some() || has_same_request(old, q.new) {
            return Ok(());
        }
    }
    q.exceeded_quota.clone().map_or(Ok(()), Err)?;
    check_room(q)
}

fn check_room(q: &Review<'_>) -> Result<(), String> {
    let named = match &q.target {
        Target::Outside => return Ok(()),
        Target::Node(name) => q.nodes.iter().find(|node| node.node == *name),
        Target::Anywhere => None,
    };
    match named {
        Some(node) => fits(&q.request, node, q.overcommit),
        None if q.nodes.is_empty() && q.fail_open => Ok(()),
        None => place(&q.request, q.nodes, q.overcommit).map(drop).map_err(|refusal| refusal.to_string()),
    }
}

/// Refuses changes of fields that a live VM was created from. The node of its next start may change.
fn check_frozen_fields(old: &MikromVM, new: &MikromVM) -> Result<(), String> {
    let changed = old.spec.changed_inputs(&new.spec);
    if changed.is_empty() {
        return Ok(());
    }
    Err(format!("{} cannot change once the VM exists (status.vmID is set)", changed.join(", ")))
}

fn has_same_request(old: &MikromVM, new: &MikromVM) -> bool {
    let ask = |vm: &MikromVM| {
        let spec = vm.spec.clone();
        (spec.vcpu_count, spec.memory_mib, spec.node_name, spec.agent_address, spec.volumes)
    };
    ask(old) == ask(new)
}

#[cfg(test)]
mod tests {
    use coracle_api::{MikromVMSpec, MikromVMStatus};
    use coracle_microvm::{agent::AgentAddress, discovery::request, placement::Capacity};

    use super::*;

    fn vm(vcpu_count: i32, memory_mib: i32) -> MikromVM {
        MikromVM::new("web", MikromVMSpec { image: "i".into(), vcpu_count, memory_mib, ..Default::default() })
    }

    fn node(name: &str, vcpus: u32, memory_mib: u64, promised_mib: u64) -> Candidate {
        Candidate {
            node: name.into(),
            agent: AgentAddress { address: format!("{name}:1"), ..AgentAddress::default() },
            capacity: Some(Capacity { vcpus, memory_mib }),
            promised: Capacity { vcpus: 0, memory_mib: promised_mib },
            namespace_vms: 0,
            preference: 0,
            barred: None,
        }
    }

    #[test]
    fn capacity_table() {
        let nodes = [node("small", 2, 1024, 512), node("large", 8, 8192, 0)];
        let to = |name: &str| Target::Node(name.into());
        for (why, vm, target, nodes, fail_open, want) in [
            ("fits where it is to go", vm(2, 512), to("small"), &nodes[..], false, None),
            (
                "more CPUs than the node",
                vm(4, 512),
                to("small"),
                &nodes[..],
                false,
                Some("has 2 vCPUs, 4 requested"),
            ),
            (
                "less memory than is promised already",
                vm(1, 1024),
                to("small"),
                &nodes[..],
                false,
                Some("512 MiB unreserved"),
            ),
            ("fits somewhere", vm(4, 4096), Target::Anywhere, &nodes[..], false, None),
            (
                "fits nowhere",
                vm(16, 512),
                Target::Anywhere,
                &nodes[..],
                false,
                Some("node large has 8 vCPUs, 16 requested"),
            ),
            ("an unknown node: some node must fit", vm(4, 4096), to("new"), &nodes[..], false, None),
            (
                "an unknown node, too large for any",
                vm(16, 512),
                to("new"),
                &nodes[..],
                false,
                Some("node small has 2"),
            ),
            ("an agent outside: not ours to know", vm(32, 999_999), Target::Outside, &nodes[..], false, None),
            (
                "no node is known",
                vm(1, 128),
                Target::Anywhere,
                &[],
                false,
                Some("no node with an agent is known"),
            ),
            ("no node is known, and that may pass", vm(1, 128), Target::Anywhere, &[], true, None),
        ] {
            let question = Review {
                new: &vm,
                old: None,
                target,
                request: request(&vm),
                nodes,
                overcommit: Overcommit::default(),
                exceeded_quota: None,
                fail_open,
            };
            match (judge(&question), want) {
                (Ok(()), None) => {}
                (Err(text), Some(part)) => assert!(text.contains(part), "{why}: {text}"),
                (got, _) => panic!("{why}: {got:?}"),
            }
        }
    }

    #[test]
    fn update_table() {
        let nodes = [node("full", 2, 1024, 1024)];
        let mut live = vm(1, 128);
        live.status = Some(MikromVMStatus { vm_id: "default-web".into(), ..Default::default() });
        let change = |old: &MikromVM, f: fn(&mut MikromVMSpec)| {
            let mut new = old.clone();
            f(&mut new.spec);
            let (target, overcommit) = (Target::Anywhere, Overcommit::default());
            judge(&Review {
                new: &new,
                old: Some(old),
                target,
                request: request(&new),
                nodes: &nodes,
                overcommit,
                exceeded_quota: None,
                fail_open: false,
            })
        };
        assert!(change(&live, |s| s.memory_mib = 256).unwrap_err().contains("memoryMB cannot change"));
        let given = change(&live, |s| {
            s.args = vec!["x".into()];
            s.hostname = "x".into();
        });
        assert!(given.unwrap_err().contains("args, hostname cannot change"));
        assert_eq!(change(&live, |s| drop(s.node_selector.insert("zone".into(), "a".into()))), Ok(()));
        assert!(change(&live, |s| s.vcpu_count = 2).unwrap_err().contains("vcpuCount"));
        assert!(change(&live, |s| s.image = "j".into()).unwrap_err().contains("image"));
        assert!(change(&live, |s| s.kernel_path = "/k".into()).unwrap_err().contains("kernelPath"));
        assert_eq!(change(&live, |s| s.node_name = "n".into()), Ok(()));
        assert_eq!(change(&live, |s| s.agent_address = "a:1".into()), Ok(()));
        assert!(
            change(&vm(1, 128), |s| s.memory_mib = 256).is_err(),
            "not yet created: room is looked for again"
        );
        assert_eq!(change(&vm(1, 128), |s| s.image = "j".into()), Ok(()), "nothing more is asked for");
    }
}
