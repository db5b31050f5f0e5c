//! Fields of pods that this node supports. One table drives the validation of pods and a page of the reference.

mod table;

use k8s_openapi::api::core::v1::Pod;
use serde_json::Value;

pub use table::{FIELDS, Field, Support, When};

/// Unsupported fields that a pod sets.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Review {
    /// Fields without effect: the pod runs, and one event names them.
    pub ignored: Vec<&'static Field>,
    /// Fields because of which this node cannot run the pod.
    pub rejected: Vec<&'static Field>,
}

/// Returns the unsupported fields that a pod sets.
#[must_use]
pub fn review(pod: &Pod) -> Review {
    let value = serde_json::to_value(pod).unwrap_or_default();
    let mut review = Review::default();
    for field in FIELDS.iter().filter(|field| field.support != Support::Honoured && field.is_set(&value)) {
        match field.support {
            Support::Ignored => review.ignored.push(field),
            Support::Rejected => review.rejected.push(field),
            Support::Honoured => {}
        }
    }
    review
}

impl Field {
    /// Returns whether a pod, as JSON, sets the field to a value of this row.
    #[must_use]
    pub fn is_set(&self, pod: &Value) -> bool {
        let parts: Vec<&str> = self.path.split('.').collect();
        matches_at(pod, &parts, self.when)
    }
}

fn matches_at(value: &Value, parts: &[&str], when: When) -> bool {
    let Some((part, rest)) = parts.split_first() else { return when.holds(value) };
    let Some(name) = part.strip_suffix("[]") else {
        return value.get(part).is_some_and(|value| matches_at(value, rest, when));
    };
    // Rows about containers apply to all kinds of containers.
    let names: &[&str] = match name {
        "containers" => &["containers", "initContainers", "ephemeralContainers"],
        _ => std::slice::from_ref(&name),
    };
    names
        .iter()
        .filter_map(|name| value.get(name)?.as_array())
        .flatten()
        .any(|one| matches_at(one, rest, when))
}

impl When {
    fn holds(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Is(text), Value::String(value)) => text == value,
            (Self::IsNot(text), Value::String(value)) => text != value,
            (Self::Is(_) | Self::IsNot(_), _) => false,
            (Self::Set, Value::Null | Value::Bool(false)) => false,
            (Self::Set, Value::String(text)) => !text.is_empty(),
            (Self::Set, Value::Array(list)) => !list.is_empty(),
            (Self::Set, Value::Object(map)) => !map.is_empty(),
            (Self::Set, Value::Bool(true) | Value::Number(_)) => true,
        }
    }
}

/// Returns the table as a page of the reference, in Markdown.
#[must_use]
pub fn markdown() -> String {
    let mut page = String::from(
        "# Fields of pods\n\nWhat the virtual node does with each field of a pod. *Honoured* fields have the meaning of the \
         Kubernetes API.\n*Ignored* fields have no effect: the pod runs, and an event `IgnoredFields` names them. With a \
         *rejected* field\na pod fails at once, and its status says why. Rows about containers are about init and ephemeral \
         containers, too.\n\n| field | value | support | note |\n|---|---|---|---|\n",
    );
    for field in FIELDS {
        let value = match field.when {
            When::Set => String::new(),
            When::Is(text) => format!("`{text}`"),
            When::IsNot(text) => format!("other than `{text}`"),
        };
        let support = match field.support {
            Support::Honoured => "honoured",
            Support::Ignored => "ignored",
            Support::Rejected => "rejected",
        };
        page.push_str(&format!("| `{}` | {value} | {support} | {} |\n", field.path, field.note));
    }
    page
}
