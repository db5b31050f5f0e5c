//! Every query of a dashboard and of an alert is valid PromQL, and uses existing metrics and labels.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use promql_parser::label::Labels;
use promql_parser::parser::{Expr, LabelModifier, VectorSelector, parse};
use serde_json::Value;

use crate::deploy;

/// Labels that a scrape adds, and the label of histograms.
const SCRAPE: [&str; 7] = ["job", "instance", "pod", "container", "endpoint", "namespace", "le"];

/// Returns the metrics of the reference, with their type and labels.
fn reference() -> BTreeMap<String, (String, BTreeSet<String>)> {
    let page = std::fs::read_to_string(deploy().join("../docs/reference/metrics.md")).unwrap();
    let rows = page.lines().filter(|line| line.starts_with("| `"));
    rows.map(|row| {
        let cells: Vec<_> = row.split('|').map(str::trim).collect();
        let labels = cells[3].split(',').map(|label| label.trim().trim_matches('`').to_owned());
        (cells[1].trim_matches('`').to_owned(), (cells[2].to_owned(), labels.collect()))
    })
    .collect()
}

/// Metrics and labels that an expression uses.
#[derive(Default)]
struct Asked {
    metrics: BTreeSet<String>,
    labels: BTreeSet<String>,
}

fn walk(expression: &Expr, asked: &mut Asked) {
    match expression {
        Expr::Aggregate(aggregate) => {
            if let Some(LabelModifier::Include(labels) | LabelModifier::Exclude(labels)) = &aggregate.modifier
            {
                record_labels(labels, asked);
            }
            walk(&aggregate.expr, asked);
        }
        Expr::Binary(binary) => {
            walk(&binary.lhs, asked);
            walk(&binary.rhs, asked);
        }
        Expr::Unary(unary) => walk(&unary.expr, asked),
        Expr::Paren(paren) => walk(&paren.expr, asked),
        Expr::Subquery(query) => walk(&query.expr, asked),
        Expr::Call(call) => call.args.args.iter().for_each(|argument| walk(argument, asked)),
        Expr::VectorSelector(selector) => select(selector, asked),
        Expr::MatrixSelector(matrix) => select(&matrix.vs, asked),
        Expr::NumberLiteral(_) | Expr::StringLiteral(_) => {}
        Expr::Extension(_) => panic!("no PromQL: {expression:?}"),
    }
}

fn record_labels(labels: &Labels, asked: &mut Asked) {
    asked.labels.extend(labels.labels.iter().cloned());
}

fn select(selector: &VectorSelector, asked: &mut Asked) {
    asked.metrics.insert(selector.name.clone().unwrap());
    asked.labels.extend(selector.matchers.matchers.iter().map(|matcher| matcher.name.clone()));
}

/// Returns the errors of a query; empty when it is valid.
fn query_errors(query: &str, known: &BTreeMap<String, (String, BTreeSet<String>)>) -> Vec<String> {
    let query = query.replace("$__rate_interval", "5m").replace("$__range", "1h");
    let expression = match parse(&query) {
        Ok(expression) => expression,
        Err(error) => return vec![format!("{query}: {error}")],
    };
    let mut asked = Asked::default();
    walk(&expression, &mut asked);
    let mut wrong = Vec::new();
    let mut labels: BTreeSet<String> = SCRAPE.iter().map(|label| (*label).to_owned()).collect();
    for metric in asked.metrics.iter().filter(|metric| *metric != "up") {
        let histogram = ["_bucket", "_count", "_sum"].into_iter().find_map(|end| metric.strip_suffix(end));
        let of_histogram = histogram.and_then(|name| known.get(name)).filter(|(kind, _)| kind == "histogram");
        match known.get(metric).filter(|(kind, _)| kind != "histogram").or(of_histogram) {
            Some((_, own)) => labels.extend(own.iter().cloned()),
            None => wrong.push(format!("{query}: no metric {metric}")),
        }
    }
    let unknown = asked.labels.difference(&labels);
    wrong.extend(unknown.map(|label| format!("{query}: no label {label}")));
    wrong
}

/// Collects every text under that key, at any depth.
fn texts(value: &Value, key: &str, found: &mut Vec<String>) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                match value {
                    Value::String(text) if name == key => found.push(text.clone()),
                    other => texts(other, key, found),
                }
            }
        }
        Value::Array(items) => items.iter().for_each(|item| texts(item, key, found)),
        _ => {}
    }
}

fn files(dir: &str) -> Vec<(String, Value)> {
    let entries = std::fs::read_dir(deploy().join(dir)).unwrap();
    let read = |path: &Path| serde_saphyr::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    entries.map(|entry| entry.unwrap().path()).map(|path| (path.display().to_string(), read(&path))).collect()
}

#[test]
fn queries_use_existing_metrics_and_labels() {
    let known = reference();
    let (mut all, mut failures) = (0, Vec::new());
    for (file, text) in files("dashboards").into_iter().chain(files("alerts")) {
        let mut queries = Vec::new();
        texts(&text, "expr", &mut queries);
        assert!(!queries.is_empty(), "{file}");
        all += queries.len();
        failures.extend(
            queries
                .iter()
                .flat_map(|query| query_errors(query, &known))
                .map(|what| format!("{file}: {what}")),
        );
    }
    assert!(failures.is_empty(), "{failures:#?}");
    assert!(all > 80, "{all} queries");
}

#[test]
fn wrong_queries_are_found() {
    let known = reference();
    for (query, word) in [
        ("rate(", "unclosed"),
        ("sum(coracle_nothing)", "no metric coracle_nothing"),
        ("sum by (color) (coracle_mikromvms)", "no label color"),
        ("coracle_mikromvms{color=\"red\"}", "no label color"),
        ("coracle_agent_call_duration_seconds", "no metric"),
        ("coracle_mikromvms_bucket", "no metric"),
        ("coracle_controller_reconcile", "no metric"),
    ] {
        let found = query_errors(query, &known);
        assert!(found.iter().any(|what| what.contains(word)), "{query}: {found:?}");
    }
    assert!(query_errors("sum by (phase) (coracle_mikromvms)", &known).is_empty());
}

/// Each alert links to its runbook, and each runbook belongs to an alert.
#[test]
fn alerts_and_runbooks_match_one_to_one() {
    let runbooks = deploy().join("../docs/runbooks");
    let mut alerts = BTreeSet::new();
    for (file, text) in files("alerts") {
        for group in text["groups"].as_array().unwrap() {
            for rule in group["rules"].as_array().unwrap() {
                let name = rule["alert"].as_str().unwrap();
                let url = rule["annotations"]["runbook_url"].as_str().unwrap_or_default();
                assert!(url.ends_with(&format!("/docs/runbooks/{name}.md")), "{file}: {name}: {url}");
                let page = std::fs::read_to_string(runbooks.join(format!("{name}.md"))).unwrap_or_default();
                assert!(
                    page.contains(rule["expr"].as_str().unwrap()),
                    "the page of {name} has another query"
                );
                for part in ["## Meaning", "## Look", "## Do"] {
                    assert!(page.contains(part), "{part} is not in the page of {name}");
                }
                let severity = rule["labels"]["severity"].as_str();
                assert!(matches!(severity, Some("warning" | "critical")), "{name}: {severity:?}");
                alerts.insert(name.to_owned());
            }
        }
    }
    let pages = std::fs::read_dir(runbooks).unwrap().map(|entry| entry.unwrap().file_name());
    let pages = pages.map(|name| name.to_string_lossy().trim_end_matches(".md").to_owned());
    let pages: BTreeSet<_> = pages.filter(|name| name != "README").collect();
    assert_eq!(alerts, pages);
}
