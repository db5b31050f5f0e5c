//! Checks that tests wait for conditions by `coracle_testkit::eventually` and its variants, and let time pass by `elapse`.
//! Tests do not sleep, and define no `eventually` of their own.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::root;

/// Adds each wait of the tests of the crate in the directory `dir` to `wrong`.
pub(super) fn check(dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
    let tests = dir.join("tests");
    if tests.is_dir() {
        collect(&tests, wrong)?;
    }
    Ok(())
}

fn collect(dir: &Path, found: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, found)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
            let source = fs::read_to_string(&path)?;
            found.extend(waits(&source).into_iter().map(|(line, why)| format!("{shown}:{line}: {why}")));
        }
    }
    Ok(())
}

/// Returns the line numbers, from 1, where a test sleeps or defines an `eventually`. Pure.
fn waits(source: &str) -> Vec<(usize, &'static str)> {
    let mut found = Vec::new();
    for (number, line) in source.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let code: String = code.split('"').step_by(2).collect();
        let calls = |name: &str| {
            let is_whole = |at: usize| !code[..at].ends_with(|c: char| c.is_alphanumeric() || c == '_');
            code.match_indices(name).any(|(at, _)| is_whole(at))
        };
        if calls("sleep(") || calls("sleep_until(") {
            found.push((number + 1, "sleeps; wait by coracle_testkit::eventually, or by its elapse"));
        }
        if calls("fn eventually") {
            found.push((number + 1, "an `eventually` of its own; use coracle_testkit::eventually"));
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_of_tests_table() {
        for (why, source, want) in [
            ("tokio", "tokio::time::sleep(PAUSE).await;", vec![1]),
            ("a thread", "\nthread::sleep(PAUSE);", vec![2]),
            ("imported", "use tokio::time::sleep;\nsleep(PAUSE).await;", vec![2]),
            ("until a moment", "sleep_until(end).await", vec![1]),
            ("a definition", "async fn eventually<T>(what: &str) -> T {", vec![1]),
            ("another form", "fn eventually_soon() {", vec![1]),
            ("the one function", "elapse(PAUSE).await; eventually(\"ready\", ask).await", vec![]),
            ("a guest's command", "exec(\"sleep(1)\", \"sleep 60\")", vec![]),
            ("a comment", "// not by sleep(1)", vec![]),
            ("another name", "is_asleep(); deep_sleep();", vec![]),
        ] {
            let lines: Vec<_> = waits(source).into_iter().map(|(line, _)| line).collect();
            assert_eq!(lines, want, "{why}");
        }
    }
}
