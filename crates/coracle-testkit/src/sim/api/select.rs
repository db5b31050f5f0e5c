//! Label and field selectors. Pure.

use serde_json::Value;

use super::failure::Failure;

/// Condition on an object.
#[derive(Clone, Debug, PartialEq)]
struct Requirement {
    /// Path of field names, or a label key after `metadata.labels`.
    path: Vec<String>,
    test: Test,
}

#[derive(Clone, Debug, PartialEq)]
enum Test {
    Exists,
    Absent,
    In(Vec<String>),
    NotIn(Vec<String>),
}

/// Conditions of a list or watch, all of which must hold.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Selector(Vec<Requirement>);

impl Selector {
    /// Parses the query parameters `labelSelector` and `fieldSelector`.
    pub(super) fn parse(labels: &str, fields: &str) -> Result<Self, Failure> {
        let label = |key: &str| vec!["metadata".to_owned(), "labels".to_owned(), key.to_owned()];
        let field = |path: &str| path.split('.').map(str::to_owned).collect::<Vec<_>>();
        let mut all = Vec::new();
        for term in terms(labels) {
            let (key, test) = requirement(&term)?;
            all.push(Requirement { path: label(&key), test });
        }
        for term in terms(fields) {
            let (path, test) = requirement(&term)?;
            all.push(Requirement { path: field(&path), test });
        }
        Ok(Self(all))
    }

    pub(super) fn matches(&self, object: &Value) -> bool {
        self.0.iter().all(|requirement| requirement.matches(object))
    }
}

impl Requirement {
    fn matches(&self, object: &Value) -> bool {
        let found = self.path.iter().try_fold(object, |value, name| value.get(name));
        let text = found.map(|value| value.as_str().map_or_else(|| value.to_string(), str::to_owned));
        let is_field = self.path.get(1).is_none_or(|name| name != "labels");
        match &self.test {
            Test::Exists => text.is_some(),
            Test::Absent => text.is_none(),
            // An absent field counts as empty. An absent label equals no value.
            Test::In(values) => {
                text.or_else(|| is_field.then(String::new)).is_some_and(|t| values.contains(&t))
            }
            Test::NotIn(values) => !text.is_some_and(|t| values.contains(&t)),
        }
    }
}

/// Splits a selector at commas outside parentheses.
fn terms(text: &str) -> Vec<String> {
    let (mut all, mut depth) = (vec![String::new()], 0);
    for c in text.chars() {
        depth += i32::from(c == '(') - i32::from(c == ')');
        match (c, all.last_mut()) {
            (',', _) if depth == 0 => all.push(String::new()),
            (c, Some(last)) => last.push(c),
            (_, None) => {}
        }
    }
    all.into_iter().map(|t| t.trim().to_owned()).filter(|t| !t.is_empty()).collect()
}

fn requirement(term: &str) -> Result<(String, Test), Failure> {
    let values = |list: &str| {
        let inner = list.trim().trim_start_matches('(').trim_end_matches(')');
        inner.split(',').map(|v| v.trim().to_owned()).collect::<Vec<_>>()
    };
    let one = |value: &str| vec![value.trim().to_owned()];
    let (key, test) = if let Some((key, list)) = term.split_once(" notin ") {
        (key, Test::NotIn(values(list)))
    } else if let Some((key, list)) = term.split_once(" in ") {
        (key, Test::In(values(list)))
    } else if let Some((key, value)) = term.split_once("!=") {
        (key, Test::NotIn(one(value)))
    } else if let Some((key, value)) = term.split_once("==").or_else(|| term.split_once('=')) {
        (key, Test::In(one(value)))
    } else if let Some(key) = term.strip_prefix('!') {
        (key, Test::Absent)
    } else {
        (term, Test::Exists)
    };
    match key.trim() {
        "" => Err(Failure::bad_request(format!("invalid selector {term:?}"))),
        key => Ok((key.to_owned(), test)),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selector_table() {
        let object = json!({
            "metadata": {"name": "web", "labels": {"app": "web", "coracle.dev/agent": "true"}},
            "spec": {"nodeName": "n1"},
        });
        for (labels, fields, want) in [
            ("", "", true),
            ("app=web", "", true),
            ("app==db", "", false),
            ("app!=db,coracle.dev/agent", "", true),
            ("!app", "", false),
            ("app in (db, web)", "", true),
            ("app notin (db,web)", "", false),
            ("tier notin (db)", "", true),
            ("", "metadata.name=web,spec.nodeName=n1", true),
            ("", "spec.nodeName!=n1", false),
            ("", "status.phase=", true),
        ] {
            let selector = Selector::parse(labels, fields).unwrap();
            assert_eq!(selector.matches(&object), want, "{labels:?} {fields:?}");
        }
        assert!(Selector::parse("=web", "").is_err());
    }
}
