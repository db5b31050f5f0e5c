//! Placement: chooses the fitting node with the most free memory, and spreads the VMs of one namespace. Pure.

use std::{cmp::Reverse, fmt};

use crate::agent::AgentAddress;

/// Resources of a node for guests, before overcommit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
}

/// Resources that a VM requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// CPUs.
    pub vcpus: u32,
    /// Memory in MiB.
    pub memory_mib: u64,
    /// Namespace of the VM. VMs of one namespace are spread over nodes.
    pub namespace: String,
}

/// Overcommit factors. One VM is never larger than the node itself.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Overcommit {
    /// Reserved vCPUs per CPU.
    pub cpu: f64,
    /// Reserved MiB per MiB of memory.
    pub memory: f64,
}

impl Default for Overcommit {
    /// CPUs can be shared in time, memory cannot.
    fn default() -> Self {
        Self { cpu: 8.0, memory: 1.0 }
    }
}

/// Live node, with the resources that are reserved on it.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// Name of the node.
    pub node: String,
    /// Address of the node's agent.
    pub agent: AgentAddress,
    /// Capacity of the node; `None` when it is unknown.
    pub capacity: Option<Capacity>,
    /// Resources reserved for declared VMs.
    pub promised: Capacity,
    /// Number of VMs of the request's namespace on the node.
    pub namespace_vms: usize,
    /// Preference of the VM for the node; higher is better.
    pub preference: i64,
    /// Reason why no new VM is placed on the node, as `is cordoned`.
    pub barred: Option<String>,
}

impl Candidate {
    fn free_memory(&self, overcommit: Overcommit) -> u64 {
        let total = self.capacity.map_or(0, |c| scaled(c.memory_mib, overcommit.memory));
        total.saturating_sub(self.promised.memory_mib)
    }
}

/// Reasons why no node was chosen: one line for each node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FitError(pub Vec<String>);

impl fmt::Display for FitError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        /// Largest number of lines in a message.
        const SHOWN_MAX: usize = 8;
        f.write_str(&self.0.iter().take(SHOWN_MAX).map(String::as_str).collect::<Vec<_>>().join("; "))?;
        match self.0.len().saturating_sub(SHOWN_MAX) {
            0 => Ok(()),
            more => write!(f, "; and {more} more"),
        }
    }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "sizes are far below 2^52, and the cast saturates"
)]
fn scaled(amount: u64, by: f64) -> u64 {
    (amount as f64 * by.max(0.0)) as u64
}

/// Checks whether `request` fits onto `node`.
///
/// # Errors
/// The reason why it does not fit, as a sentence.
pub fn fits(request: &Request, node: &Candidate, overcommit: Overcommit) -> Result<(), String> {
    let Some(capacity) = node.capacity else { return Ok(()) };
    let name = &node.node;
    if request.vcpus > capacity.vcpus {
        return Err(format!("node {name} has {} vCPUs, {} requested", capacity.vcpus, request.vcpus));
    }
    if request.memory_mib > capacity.memory_mib {
        return Err(format!("node {name} has {} MiB, {} requested", capacity.memory_mib, request.memory_mib));
    }
    let free = scaled(capacity.vcpus.into(), overcommit.cpu).saturating_sub(node.promised.vcpus.into());
    if u64::from(request.vcpus) > free {
        return Err(format!("node {name} has {free} vCPUs unreserved, {} requested", request.vcpus));
    }
    let free = node.free_memory(overcommit);
    if request.memory_mib > free {
        return Err(format!("node {name} has {free} MiB unreserved, {} requested", request.memory_mib));
    }
    Ok(())
}

fn is_open(node: &Candidate) -> Result<(), String> {
    node.barred.as_ref().map_or(Ok(()), |why| Err(format!("node {} {why}", node.node)))
}

/// Chooses a node. Deterministic: the same nodes in any order give the same choice.
///
/// # Errors
/// [`FitError`] with the reason why each node was refused.
pub fn place<'a>(
    request: &Request,
    nodes: &'a [Candidate],
    overcommit: Overcommit,
) -> Result<&'a Candidate, FitError> {
    let mut refused = Vec::new();
    let mut fitting: Vec<_> = nodes
        .iter()
        .filter(|node| {
            let usable = is_open(node).and_then(|()| fits(request, node, overcommit));
            usable.inspect_err(|why| refused.push(why.clone())).is_ok()
        })
        .collect();
    let most = fitting.iter().map(|node| node.free_memory(overcommit)).max().unwrap_or(0);
    // Nodes whose free memory is within a tenth of the freest count as equal; among them the namespace is spread.
    let clearly_less = |node: &Candidate| node.free_memory(overcommit) < most - most / 10;
    fitting.sort_by(|a, b| {
        let key =
            |n: &Candidate| (n.capacity.is_none(), Reverse(n.preference), clearly_less(n), n.namespace_vms);
        key(a)
            .cmp(&key(b))
            .then_with(|| b.free_memory(overcommit).cmp(&a.free_memory(overcommit)))
            .then_with(|| a.node.cmp(&b.node))
    });
    fitting.first().copied().ok_or_else(|| {
        if nodes.is_empty() {
            refused.push("no node with an agent is known".into());
        }
        refused.sort();
        FitError(refused)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn node(name: &str, size: Option<(u32, u64)>, promised: (u32, u64), namespace_vms: usize) -> Candidate {
        let capacity = |(vcpus, memory_mib)| Capacity { vcpus, memory_mib };
        Candidate {
            node: name.into(),
            agent: AgentAddress { address: format!("{name}:1"), ..AgentAddress::default() },
            capacity: size.map(capacity),
            promised: capacity(promised),
            namespace_vms,
            preference: 0,
            barred: None,
        }
    }

    fn ask(vcpus: u32, memory_mib: u64) -> Request {
        Request { vcpus, memory_mib, namespace: "ns".into() }
    }

    #[test]
    fn choice_table() {
        let size = Some((4, 4096));
        for (why, request, nodes, want) in [
            (
                "most free memory",
                ask(1, 512),
                vec![node("a", size, (1, 2048), 0), node("b", size, (1, 1024), 0)],
                "b",
            ),
            (
                "what does not fit is left out",
                ask(1, 3000),
                vec![node("a", size, (0, 2048), 0), node("b", size, (0, 512), 0)],
                "b",
            ),
            (
                "equally free: spread the namespace",
                ask(1, 128),
                vec![node("a", size, (0, 0), 2), node("b", size, (0, 128), 1)],
                "b",
            ),
            (
                "clearly freer wins over spreading",
                ask(1, 128),
                vec![node("a", size, (0, 0), 2), node("b", size, (0, 2048), 0)],
                "a",
            ),
            (
                "a tie goes by name",
                ask(1, 128),
                vec![node("b", size, (0, 0), 0), node("a", size, (0, 0), 0)],
                "a",
            ),
            (
                "unknown size comes last",
                ask(1, 128),
                vec![node("a", None, (0, 0), 0), node("b", size, (0, 3000), 5)],
                "b",
            ),
            (
                "unknown size is better than none",
                ask(64, 99999),
                vec![node("a", None, (0, 0), 0), node("b", size, (0, 0), 0)],
                "a",
            ),
            ("CPUs are shared", ask(4, 128), vec![node("a", size, (28, 0), 0)], "a"),
        ] {
            assert_eq!(
                place(&request, &nodes, Overcommit::default()).map(|c| c.node.as_str()),
                Ok(want),
                "{why}"
            );
        }
    }

    #[test]
    fn barred_node_is_not_chosen() {
        let free = node("a", Some((4, 4096)), (0, 0), 0);
        let cordoned = Candidate { barred: Some("is cordoned".into()), ..free.clone() };
        let full = node("b", Some((4, 4096)), (0, 3000), 0);
        let choose = |nodes: &[Candidate]| {
            place(&ask(1, 512), nodes, Overcommit::default())
                .map(|c| c.node.clone())
                .map_err(|e| e.to_string())
        };
        assert_eq!(choose(&[free, full.clone()]), Ok("a".into()));
        assert_eq!(choose(&[cordoned.clone(), full]), Ok("b".into()));
        assert_eq!(choose(&[cordoned]), Err("node a is cordoned".into()));
    }

    #[test]
    fn preferred_node_is_chosen_while_it_fits() {
        let plain = node("a", Some((4, 4096)), (0, 0), 0);
        let preferred = Candidate { preference: 10, ..node("b", Some((4, 4096)), (0, 3000), 5) };
        let nodes = [plain, preferred];
        let choose = |memory_mib| {
            place(&ask(1, memory_mib), &nodes, Overcommit::default()).map(|c| c.node.clone()).ok()
        };
        assert_eq!(choose(512), Some("b".into()));
        assert_eq!(choose(2048), Some("a".into()));
    }

    #[test]
    fn unschedulable_refusal_names_the_reason_per_node() {
        let nodes = [
            node("a", Some((2, 1024)), (0, 512), 0),
            node("b", Some((64, 256)), (0, 0), 0),
            node("c", Some((1, 4096)), (0, 0), 0),
        ];
        let refusal = place(&ask(2, 1024), &nodes, Overcommit::default()).unwrap_err().to_string();
        for part in ["node a has 512 MiB unreserved", "node b has 256 MiB", "node c has 1 vCPUs"] {
            assert!(refusal.contains(part), "{part} is not in {refusal}");
        }
        let many: Vec<_> = (0..20).map(|n| node(&format!("n{n}"), Some((1, 1)), (0, 0), 0)).collect();
        assert!(
            place(&ask(2, 1024), &many, Overcommit::default())
                .unwrap_err()
                .to_string()
                .ends_with("and 12 more")
        );
        let none = place(&ask(1, 128), &[], Overcommit::default()).unwrap_err();
        assert_eq!(none.to_string(), "no node with an agent is known");
    }

    proptest! {
        #[test]
        fn chosen_node_fits_and_is_independent_of_order(
            sizes in prop::collection::vec((1u32..16, 128u64..9000, 0u32..64, 0u64..9000, 0usize..4), 0..8),
            vcpus in 1u32..16, memory in 128u64..9000,
        ) {
            let nodes: Vec<_> = sizes.iter().enumerate()
                .map(|(i, (c, m, pc, pm, n))| node(&format!("n{i}"), Some((*c, *m)), (*pc, *pm), *n)).collect();
            let request = ask(vcpus, memory);
            let chosen = place(&request, &nodes, Overcommit::default()).cloned();
            let mut reversed = nodes.clone();
            reversed.reverse();
            prop_assert_eq!(place(&request, &reversed, Overcommit::default()).cloned(), chosen.clone());
            match chosen {
                Ok(node) => prop_assert!(fits(&request, &node, Overcommit::default()).is_ok()),
                Err(_) => prop_assert!(nodes.iter().all(|n| fits(&request, n, Overcommit::default()).is_err())),
            }
        }
    }
}
