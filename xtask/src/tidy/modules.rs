//! Checks imports inside a crate: no import cycle of more than two files.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use anyhow::Result;

/// Maximum number of files in an import cycle.
const CIRCLE_MAX: usize = 2;

/// Path of a module in its crate; empty for the root.
type Module = Vec<String>;

/// Path of a name that a file imports from its crate.
type Import = Vec<String>;

/// Adds each import cycle of more than two files of the crate `name` to `wrong`. `src` is its source directory.
pub(super) fn check(name: &str, src: &Path, wrong: &mut Vec<String>) -> Result<()> {
    let mut sources = BTreeMap::new();
    collect(src, &mut Vec::new(), &mut sources)?;
    let graph = graph(&sources);
    for circle in circles(&graph).into_iter().filter(|circle| circle.len() > CIRCLE_MAX) {
        let mut text = format!("{name}: {} modules import each other:", circle.len());
        for module in &circle {
            let inside =
                graph.get(module).into_iter().flatten().filter(|(target, _)| circle.contains(target));
            for (target, import) in inside {
                let import = import.last().map(String::as_str).unwrap_or_default();
                text += &format!("\n    {} takes {import} from {}", shown(module), shown(target));
            }
        }
        wrong.push(text);
    }
    Ok(())
}

fn shown(module: &Module) -> String {
    if module.is_empty() { "crate".to_owned() } else { module.join("::") }
}

fn collect(dir: &Path, at: &mut Module, sources: &mut BTreeMap<Module, String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
        if path.is_dir() {
            if !matches!(stem.as_str(), "generated" | "tests" | "snapshots") {
                at.push(stem);
                collect(&path, at, sources)?;
                at.pop();
            }
        } else if path.extension().is_some_and(|e| e == "rs") && stem != "tests" && !stem.ends_with("_tests")
        {
            let mut module = at.clone();
            if !matches!(stem.as_str(), "lib" | "main" | "mod") {
                module.push(stem);
            }
            let source = fs::read_to_string(&path)?;
            // Unit tests may import anything.
            let product = source.split("#[cfg(test)]\nmod ").next().unwrap_or_default();
            sources.insert(module, product.to_owned());
        }
    }
    Ok(())
}

/// For each module, the modules that it imports from, with one such import for each.
type Graph = BTreeMap<Module, BTreeMap<Module, Import>>;

/// Names in a module, and what the module imports.
#[derive(Debug, Default)]
struct Scope {
    /// Names that `use` brings into the module, with their path in the crate; `None`: a name of another crate.
    names: BTreeMap<String, Option<Import>>,
    /// Paths in the crate that the module uses itself, without those that it only re-exports.
    needs: Vec<Import>,
}

/// Returns the import graph. A re-export is followed to the module that defines the name.
fn graph(sources: &BTreeMap<Module, String>) -> Graph {
    let scopes: BTreeMap<_, _> =
        sources.iter().map(|(module, source)| (module.clone(), scope(module, source))).collect();
    let edges = |module: &Module, scope: &Scope| {
        let targets = scope.needs.iter().filter_map(|path| Some((target(path, &scopes, 0)?, path.clone())));
        targets.filter(|(target, _)| target != module).collect()
    };
    scopes.iter().map(|(module, scope)| (module.clone(), edges(module, scope))).collect()
}

/// Returns the module that defines what `path` names: the longest prefix that is a module, or the module that a re-export there
/// leads to. `None`: the name belongs to another crate.
fn target(path: &[String], scopes: &BTreeMap<Module, Scope>, depth: usize) -> Option<Module> {
    let length = (0..=path.len()).rev().find(|n| scopes.contains_key(&path[..*n]))?;
    let (module, rest) = (path[..length].to_vec(), &path[length..]);
    match rest.first().and_then(|name| scopes.get(&module)?.names.get(name)) {
        Some(None) => None,
        Some(Some(import)) if depth < 8 && import != path => {
            target(&[import, &rest[1..]].concat(), scopes, depth + 1)
        }
        _ => Some(module),
    }
}

fn scope(module: &Module, source: &str) -> Scope {
    let code: String =
        source.lines().map(|line| line.split("//").next().unwrap_or_default()).collect::<Vec<_>>().join("\n");
    let child =
        |line: &str| line.trim().strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name.to_owned());
    let children: Vec<_> = code.lines().filter_map(child).collect();
    let mut scope = Scope::default();
    let mut rest = code.as_str();
    while let Some((before, after)) = rest.split_once("use ") {
        let begin = before.rsplit(['\n', ';', '}']).next().unwrap_or_default().trim();
        let (tree, next) = after.split_once(';').unwrap_or((after, ""));
        rest = if begin.is_empty() || begin.starts_with("pub") { next } else { after };
        if !begin.is_empty() && !begin.starts_with("pub") {
            continue; // the end of another word
        }
        let mut paths = Vec::new();
        expand("", tree, &mut paths);
        for (path, name) in paths {
            let path = absolute(module, &children, &path);
            if begin.is_empty() {
                scope.needs.extend(path.clone());
            }
            scope.names.insert(name, path);
        }
    }
    for root in ["crate::", "super::"] {
        // Reads `use` statements again here, except re-exports.
        for line in code.lines().filter(|line| !line.trim_start().starts_with("pub")) {
            for (at, _) in line.match_indices(root) {
                let path = line[at..].split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':')).next();
                let path = path.unwrap_or_default();
                if !path.ends_with("::") {
                    scope.needs.extend(absolute(module, &children, path));
                }
            }
        }
    }
    scope
}

/// Expands the tree of a `use` statement to its paths, each with its local name.
fn expand(prefix: &str, tree: &str, found: &mut Vec<(String, String)>) {
    let tree = tree.trim();
    let Some((head, rest)) = tree.split_once('{') else {
        let (path, alias) = tree.split_once(" as ").unwrap_or((tree, ""));
        let name = if alias.is_empty() { path.rsplit("::").next().unwrap_or_default() } else { alias };
        found.push((format!("{prefix}{}", path.trim()), name.trim().to_owned()));
        return;
    };
    let (mut depth, mut part) = (0_usize, String::new());
    let prefix = format!("{prefix}{}", head.trim());
    for c in rest.chars() {
        match c {
            '{' => depth += 1,
            '}' if depth == 0 => break,
            '}' => depth -= 1,
            ',' if depth == 0 => {
                expand(&prefix, &std::mem::take(&mut part), found);
                continue;
            }
            _ => {}
        }
        part.push(c);
    }
    if !part.trim().is_empty() {
        expand(&prefix, &part, found);
    }
}

/// Returns the path from the crate's root; `None` for names of other crates.
fn absolute(module: &Module, children: &[String], path: &str) -> Option<Import> {
    let mut parts =
        path.split("::").map(str::trim).filter(|part| !part.is_empty() && *part != "*").peekable();
    let mut at: Module = match *parts.peek()? {
        "crate" => Vec::new(),
        "self" | "super" => module.clone(),
        child if children.iter().any(|known| known == child) => module.clone(),
        _ => return None,
    };
    for part in parts {
        match part {
            "crate" | "self" => {}
            "super" => drop(at.pop()),
            name => at.push(name.to_owned()),
        }
    }
    Some(at)
}

/// Returns the strongly connected components of a graph, by Kosaraju's algorithm.
fn circles(graph: &Graph) -> Vec<Vec<Module>> {
    let mut reversed = Graph::new();
    for (from, targets) in graph {
        for (target, import) in targets {
            reversed.entry(target.clone()).or_default().insert(from.clone(), import.clone());
        }
    }
    let (mut order, mut seen) = (Vec::new(), BTreeSet::new());
    for module in graph.keys() {
        visit(module, graph, &mut seen, &mut order);
    }
    let (mut parts, mut assigned) = (Vec::new(), BTreeSet::new());
    while let Some(module) = order.pop() {
        let mut part = Vec::new();
        visit(&module, &reversed, &mut assigned, &mut part);
        part.sort();
        parts.push(part);
    }
    parts
}

fn visit(module: &Module, graph: &Graph, seen: &mut BTreeSet<Module>, order: &mut Vec<Module>) {
    if !seen.insert(module.clone()) {
        return;
    }
    for next in graph.get(module).into_iter().flat_map(BTreeMap::keys) {
        visit(next, graph, seen, order);
    }
    order.push(module.clone());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn largest(sources: &[(&str, &str)]) -> Vec<String> {
        let sources = sources.iter().map(|(module, source)| {
            let module = module.split("::").filter(|part| !part.is_empty()).map(str::to_owned).collect();
            (module, (*source).to_owned())
        });
        let parts = circles(&graph(&sources.collect()));
        parts.into_iter().max_by_key(Vec::len).unwrap_or_default().iter().map(shown).collect()
    }

    #[test]
    fn circles_are_found_through_re_exports_and_braces() {
        for (why, sources, want) in [
            ("a chain", vec![("a", "use crate::b::B;"), ("b", "use crate::c::C;"), ("c", "struct C;")], 1),
            (
                "three in a circle",
                vec![("a", "use crate::{b::{B, X}, c};"), ("b", "use super::c::C;"), ("c", "crate::a::f()")],
                3,
            ),
            (
                "the root only re-exports",
                vec![
                    ("", "mod a;\nmod b;\npub use a::A;\npub use b::B;"),
                    ("a", "use crate::B;"),
                    ("b", "struct B;"),
                ],
                1,
            ),
            (
                "a parent and its child",
                vec![("a", "mod b;\nuse self::b::f;\nstruct A;"), ("a::b", "use super::A;")],
                2,
            ),
        ] {
            assert_eq!(largest(&sources).len(), want, "{why}: {:?}", largest(&sources));
        }
    }
}
