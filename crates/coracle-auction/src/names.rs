//! Names of states and reasons as text: the single table that writers and readers of the market's API share.

use crate::{AllocationState, BidState, ChargeReason, EndReason, Fault, Stage, SupplierReport};

/// Longest name of a Node (RFC 1123 subdomain), in bytes.
const NODE_NAME_MAX: usize = 253;

macro_rules! names {
    ($type:ident { $($variant:ident = $name:literal),* $(,)? }) => {
        impl $type {
            /// Name in the market's API.
            #[must_use]
            pub fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $name),* }
            }

            /// Parses a name of the market's API; `None` if it is unknown.
            #[must_use]
            pub fn from_name(name: &str) -> Option<Self> {
                match name { $($name => Some(Self::$variant),)* _ => None }
            }

            /// All values.
            #[cfg(test)]
            const ALL: &[Self] = &[$(Self::$variant),*];
        }
    };
}

names!(AllocationState {
    Matched = "matched",
    Provisioning = "provisioning",
    Active = "active",
    Preempting = "preempting",
    Ended = "ended",
});
names!(Stage { Ordered = "ordered", Launched = "launched", Registered = "registered" });
names!(BidState {
    Pending = "pending",
    Matched = "matched",
    Provisioning = "provisioning",
    Active = "active",
    Preempting = "preempting",
    Ended = "ended",
    Cancelled = "cancelled",
    Expired = "expired",
});
names!(ChargeReason { Usage = "usage", Minimum = "minimum", Refund = "refund" });
names!(EndReason {
    Released = "Released",
    Preempted = "Preempted",
    CapacityLost = "CapacityLost",
    ProvisionFailed = "ProvisionFailed",
    NodeFailed = "NodeFailed",
    BudgetExhausted = "BudgetExhausted",
});

impl SupplierReport {
    /// Name in the market's API.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Launched => "launched",
            Self::Registered { .. } => "registered",
            Self::Ready => "ready",
            Self::Failed => "failed",
            Self::Died { .. } => "died",
        }
    }

    /// Parses a report from its name and the name of the Node, which only `registered` needs. `None` if either is invalid.
    #[must_use]
    pub fn from_name(name: &str, node: &str) -> Option<Self> {
        Some(match name {
            "launched" => Self::Launched,
            "registered" if !node.is_empty() && node.len() <= NODE_NAME_MAX => {
                Self::Registered { node: node.into() }
            }
            "ready" => Self::Ready,
            "failed" => Self::Failed,
            "died" => Self::Died { by: Fault::Host },
            _ => return None,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn enum_names_round_trip() {
        macro_rules! check {
            ($($type:ident),*) => { $(
                for value in $type::ALL {
                    assert_eq!($type::from_name(value.as_str()), Some(*value));
                }
                assert_eq!($type::from_name("unknown"), None);
            )* };
        }
        check!(AllocationState, Stage, BidState, ChargeReason, EndReason);
    }

    #[test]
    fn report_name_table() {
        let node = || Some(SupplierReport::Registered { node: "n".into() });
        for (why, name, node_name, want) in [
            ("the node is ignored", "ready", "n", Some(SupplierReport::Ready)),
            ("registered has its node", "registered", "n", node()),
            ("registered needs a node", "registered", "", None),
            ("unknown names are refused", "gone", "n", None),
        ] {
            let got = SupplierReport::from_name(name, node_name);
            assert_eq!(got, want, "{why}");
            assert!(got.is_none_or(|report| report.as_str() == name), "{why}");
        }
        assert_eq!(SupplierReport::from_name("registered", &"n".repeat(254)), None, "longer than a name");
    }
}
