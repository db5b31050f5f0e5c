//! Conditions: a map by type; transition times change only with the status.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};

/// Desired content of a condition.
#[derive(Clone, Debug, PartialEq)]
pub struct Desired {
    /// Type of the condition, which names a state.
    pub kind: &'static str,
    /// Status: True, False, or Unknown (`None`).
    pub status: Option<bool>,
    /// Reason, a constant in CamelCase.
    pub reason: &'static str,
    /// Details, or a remedy.
    pub message: String,
}

/// Merges `desired` into the stored conditions: other types stay, `lastTransitionTime` changes only with
/// `status`.
#[must_use]
pub fn merge(
    stored: &[Condition],
    desired: &[Desired],
    generation: Option<i64>,
    now: Timestamp,
) -> Vec<Condition> {
    let mut merged: Vec<_> =
        stored.iter().filter(|c| desired.iter().all(|d| d.kind != c.type_)).cloned().collect();
    for want in desired {
        let status = match want.status {
            Some(true) => "True",
            Some(false) => "False",
            None => "Unknown",
        };
        let since =
            find(stored, want.kind).filter(|c| c.status == status).map(|c| c.last_transition_time.clone());
        merged.push(Condition {
            type_: want.kind.to_owned(),
            status: status.to_owned(),
            reason: want.reason.to_owned(),
            message: want.message.clone(),
            observed_generation: generation,
            // Kubernetes stores whole seconds: a finer time would differ from the stored time after a round trip.
            last_transition_time: since.unwrap_or_else(|| whole_seconds(now)),
        });
    }
    merged.sort_by(|a, b| a.type_.cmp(&b.type_));
    merged
}

fn whole_seconds(now: Timestamp) -> Time {
    Time(Timestamp::from_second(now.as_second()).unwrap_or(now))
}

/// Returns the condition of that type.
#[must_use]
pub fn find<'a>(conditions: &'a [Condition], kind: &str) -> Option<&'a Condition> {
    conditions.iter().find(|c| c.type_ == kind)
}

/// True when the condition of that type has the status True.
#[must_use]
pub fn is_true(conditions: &[Condition], kind: &str) -> bool {
    find(conditions, kind).is_some_and(|c| c.status == "True")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).unwrap()
    }

    fn ready(status: bool, reason: &'static str) -> Desired {
        Desired { kind: "Ready", status: Some(status), reason, message: String::new() }
    }

    #[test]
    fn transition_time_changes_only_with_the_status() {
        let one = merge(&[], &[ready(false, "Creating")], Some(1), at(10));
        let two = merge(&one, &[ready(false, "Failed")], Some(2), at(20));
        let three = merge(&two, &[ready(true, "Running")], Some(2), at(30));
        let times: Vec<_> = [&one, &two, &three].map(|c| c[0].last_transition_time.0.as_second()).into();
        assert_eq!(times, [10, 10, 30]);
        assert_eq!((two[0].reason.as_str(), two[0].observed_generation), ("Failed", Some(2)));
    }

    #[test]
    fn merge_of_equal_conditions_changes_nothing() {
        let mut stored = merge(&[], &[ready(true, "Running")], Some(1), at(10));
        stored.push(Condition { type_: "Other".into(), ..stored[0].clone() });
        let again = merge(&stored, &[ready(true, "Running")], Some(1), at(99));
        assert_eq!(again.len(), 2);
        assert!(again.iter().all(|c| stored.contains(c)));
    }
}
