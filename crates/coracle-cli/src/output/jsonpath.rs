//! Templates of `-o jsonpath=` in kubectl's syntax: text, `{.path}`, `{"text"}`, `{range .path}…{end}`.

use std::fmt::Write;
use std::str::FromStr;

use serde_json::Value;

/// A parsed template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template(Vec<Part>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Path(Vec<Step>),
    Range(Vec<Step>, Vec<Part>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    Key(String),
    Index(i64),
    All,
}

impl FromStr for Template {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // kubectl also accepts a bare path.
        let bare = !text.contains('{') && text.starts_with('.');
        let text = if bare { format!("{{{text}}}") } else { text.to_owned() };
        let mut open: Vec<(Vec<Step>, Vec<Part>)> = Vec::new();
        let mut parts = Vec::new();
        let mut rest = text.as_str();
        while !rest.is_empty() {
            let Some((literal, after)) = rest.split_once('{') else {
                parts.push(Part::Text(rest.to_owned()));
                break;
            };
            if !literal.is_empty() {
                parts.push(Part::Text(literal.to_owned()));
            }
            let (inside, after) = split_expression(after)?;
            rest = after;
            match inside.trim() {
                "end" => {
                    let (path, before) = open.pop().ok_or("{end} without {range}")?;
                    let body = std::mem::replace(&mut parts, before);
                    parts.push(Part::Range(path, body));
                }
                inside if inside.starts_with(['"', '\'']) => parts.push(Part::Text(unquote(inside)?)),
                inside => match inside.strip_prefix("range ") {
                    Some(of) => open.push((path(of.trim())?, std::mem::take(&mut parts))),
                    None => parts.push(Part::Path(path(inside)?)),
                },
            }
        }
        if open.is_empty() { Ok(Self(parts)) } else { Err("{range} without {end}".to_owned()) }
    }
}

impl Template {
    /// Renders the template. Missing fields print nothing. Pure.
    pub fn render(&self, value: &Value) -> String {
        let mut out = String::new();
        render(&self.0, value, &mut out);
        out
    }
}

fn render(parts: &[Part], value: &Value, out: &mut String) {
    for part in parts {
        match part {
            Part::Text(text) => out.push_str(text),
            Part::Path(path) => {
                for (n, found) in select(value, path).into_iter().enumerate() {
                    let space = if n > 0 { " " } else { "" };
                    let _strings_take_everything = match found {
                        Value::String(text) => write!(out, "{space}{text}"),
                        Value::Null => Ok(()),
                        other => write!(out, "{space}{other}"),
                    };
                }
            }
            Part::Range(path, body) => {
                for found in select(value, path) {
                    render(body, found, out);
                }
            }
        }
    }
}

fn select<'a>(value: &'a Value, path: &[Step]) -> Vec<&'a Value> {
    path.iter().fold(vec![value], |found, step| found.into_iter().flat_map(|v| apply_step(v, step)).collect())
}

fn apply_step<'a>(value: &'a Value, step: &Step) -> Vec<&'a Value> {
    match (step, value) {
        (Step::Key(key), Value::Object(map)) => map.get(key).into_iter().collect(),
        (Step::Index(at), Value::Array(list)) => {
            let at = if *at < 0 { at + i64::try_from(list.len()).unwrap_or(i64::MAX) } else { *at };
            usize::try_from(at).ok().and_then(|at| list.get(at)).into_iter().collect()
        }
        (Step::All, Value::Array(list)) => list.iter().collect(),
        (Step::All, Value::Object(map)) => map.values().collect(),
        _ => vec![],
    }
}

/// Splits at the `}` that ends an expression, and ignores one in quotes.
fn split_expression(text: &str) -> Result<(&str, &str), String> {
    let mut quote = None;
    for (at, c) in text.char_indices() {
        match (quote, c) {
            (None, '}') => return Ok((&text[..at], &text[at + 1..])),
            (None, '"' | '\'') => quote = Some(c),
            (Some(open), c) if c == open => quote = None,
            _ => {}
        }
    }
    Err(format!("no }} ends {{{text}"))
}

fn unquote(text: &str) -> Result<String, String> {
    let quote = text.chars().next().unwrap_or('"');
    let inner = text
        .strip_prefix(quote)
        .and_then(|t| t.strip_suffix(quote))
        .ok_or_else(|| format!("{text} is not quoted to its end"))?;
    Ok(inner.replace("\\n", "\n").replace("\\t", "\t"))
}

/// Parses `.a.b[0]['c.d'][*]`, with `\.` for a dot in a name.
fn path(text: &str) -> Result<Vec<Step>, String> {
    let mut steps = Vec::new();
    let mut rest = text.strip_prefix(['$', '@']).unwrap_or(text);
    while !rest.is_empty() {
        if let Some(after) = rest.strip_prefix('[') {
            let (inside, after) = after.split_once(']').ok_or_else(|| format!("no ] in {text}"))?;
            steps.push(match inside {
                "*" => Step::All,
                key if key.starts_with(['"', '\'']) => Step::Key(unquote(key)?),
                number => {
                    Step::Index(number.parse().map_err(|_| format!("invalid index [{number}] in {text}"))?)
                }
            });
            rest = after;
            continue;
        }
        rest = rest.strip_prefix('.').ok_or_else(|| format!("a path begins with a dot: {text}"))?;
        if rest.is_empty() || rest.starts_with('[') {
            continue; // {.} is the whole value, {.[0]} its first element
        }
        let (key, after) = key(rest);
        steps.push(if key == "*" { Step::All } else { Step::Key(key) });
        rest = after;
    }
    Ok(steps)
}

fn key(text: &str) -> (String, &str) {
    let mut name = String::new();
    let mut escaped = false;
    for (at, c) in text.char_indices() {
        match (escaped, c) {
            (false, '\\') => escaped = true,
            (false, '.' | '[') => return (name, &text[at..]),
            _ => {
                escaped = false;
                name.push(c);
            }
        }
    }
    (name, "")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn jsonpath_templates_render_as_in_kubectl() {
        let list = json!({"kind": "VMList", "items": [
            {"metadata": {"name": "a", "annotations": {"coracle.dev/uid": "1"}}, "spec": {"cpus": 1}},
            {"metadata": {"name": "b"}, "spec": {"cpus": 2}},
        ]});
        for (template, want) in [
            ("{.kind}", "VMList"),
            (".kind", "VMList"),
            ("{.items[*].metadata.name}", "a b"),
            ("{.items[0].spec.cpus}", "1"),
            ("{.items[-1].metadata.name}", "b"),
            ("{range .items[*]}{.metadata.name}={.spec.cpus}{\"\\n\"}{end}", "a=1\nb=2\n"),
            ("{.items[0].metadata.annotations.coracle\\.dev/uid}", "1"),
            ("{.items[0].metadata.annotations['coracle.dev/uid']}", "1"),
            ("{.nothing}", ""),
            ("{$.items[1].metadata}", r#"{"name":"b"}"#),
            ("names: {'}'}", "names: }"),
        ] {
            assert_eq!(template.parse::<Template>().unwrap().render(&list), want, "{template}");
        }
    }

    #[test]
    fn malformed_template_error_names_the_defect() {
        for (template, want) in [
            ("{.a", "no } ends"),
            ("{range .a}", "without {end}"),
            ("{end}", "without {range}"),
            ("{a}", "begins with a dot"),
            ("{.a[x]}", "invalid index"),
            ("{.a[0}", "no ]"),
        ] {
            let error = template.parse::<Template>().unwrap_err();
            assert!(error.contains(want), "{template}: {error}");
        }
    }
}
