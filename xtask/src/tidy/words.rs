//! Banned phrases in pages, comments, messages and protocols: each has a plain technical word in the glossary, or says nothing.
//! Also words in identifiers that the glossary replaces.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Result;

use crate::root;

/// Banned phrases, in lower case, and what to write instead.
const BANNED: [(&str, &str); 14] = [
    ("nobody", "name the subject"),
    ("somebody", "name the subject"),
    ("whatever", "name what it is"),
    ("goes on", "continues, keeps running"),
    ("go on", "continue, keep running"),
    ("went on", "continued"),
    ("is told", "gets, receives"),
    ("are told", "get, receive"),
    ("lets go", "releases"),
    ("stands by", "is pooled"),
    ("stood by", "was pooled"),
    ("stand still", "pause"),
    ("as if nothing", "say what happens"),
    ("of its own accord", "by itself"),
];

/// Pages that are not checked: they are generated from code, or list these phrases.
const EXEMPT: [&str; 4] = [
    "docs/glossary.md",
    "docs/reference/cli.md",
    "docs/reference/conditions.md",
    "docs/reference/metrics.md",
];

/// Parts of identifiers that the glossary replaces, and the words to use.
const REPLACED: [(&str, &str); 12] = [
    ("standby", "warm pool, pooled"),
    ("standbys", "warm pool"),
    ("rehearse", "warm up"),
    ("rehearsal", "warm-up"),
    ("recipe", "VMM config"),
    ("stranger", "unrecorded"),
    ("door", "frontend"),
    ("doors", "frontends"),
    ("furniture", "base mounts"),
    ("unfolded", "materialized"),
    ("nobody", "name the subject"),
    ("whatever", "name what it is"),
];

/// Maximum length of a test name.
const TEST_NAME_MAX: usize = 60;

/// Adds each banned phrase and each replaced word in the sources below `dir` to `wrong`.
pub(super) fn check_sources(dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        let shown = path.strip_prefix(root()).unwrap_or(&path).display().to_string();
        if path.is_dir() {
            if path.file_name().is_some_and(|name| name != "generated") {
                check_sources(&path, wrong)?;
            }
        } else if path.extension().is_some_and(|e| e == "rs") && !shown.ends_with("tidy/words.rs") {
            let source = fs::read_to_string(&path)?;
            wrong.extend(banned_phrases_in(&source).into_iter().map(|(line, phrase, instead)| {
                format!("{shown}:{line}: the phrase {phrase:?}; write: {instead}")
            }));
            wrong.extend(replaced_words_in(&source).into_iter().map(|(line, word, instead)| {
                format!("{shown}:{line}: a name with {word:?}; the glossary has: {instead}")
            }));
            let long = long_tests(&source).into_iter();
            wrong.extend(
                long.map(|name| {
                    format!("{shown}: the name of the test {name} is longer than {TEST_NAME_MAX}")
                }),
            );
        }
    }
    Ok(())
}

/// Returns the line numbers, from 1, of banned phrases in comments and in string literals with spaces. Pure.
fn banned_phrases_in(source: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (number, line) in source.lines().enumerate() {
        let (code, comment) = line.split_once("//").unwrap_or((line, ""));
        let texts = code.split('"').skip(1).step_by(2).filter(|text| text.contains(' '));
        let prose = texts.chain([comment]).collect::<Vec<_>>().join(" ");
        let prose: String = prose.split('`').step_by(2).collect::<Vec<_>>().join("`").to_lowercase();
        let here = BANNED.iter().filter(|(phrase, _)| has_words(&prose, phrase));
        found.extend(here.map(|(phrase, instead)| (number + 1, *phrase, *instead)));
    }
    found
}

/// Returns the line numbers, from 1, of identifiers that have a replaced word as a part. Pure.
fn replaced_words_in(source: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    for (number, line) in source.lines().enumerate() {
        let code = line.split("//").next().unwrap_or_default();
        let code = code.split('"').step_by(2).collect::<Vec<_>>().join("\"");
        let words = code.split(|c: char| !c.is_alphanumeric()).flat_map(parts);
        for word in words {
            let replaced = REPLACED.iter().find(|(old, _)| *old == word);
            found.extend(replaced.map(|(old, instead)| (number + 1, *old, *instead)));
        }
    }
    found
}

/// Splits a name into parts in lower case: `PooledVmm` has two. Pure.
fn parts(name: &str) -> Vec<String> {
    if !name.chars().any(char::is_lowercase) {
        return vec![name.to_lowercase()]; // a constant
    }
    let mut parts: Vec<String> = Vec::new();
    for c in name.chars() {
        match parts.last_mut() {
            Some(part) if !c.is_uppercase() => part.push(c),
            _ => parts.push(c.to_lowercase().collect()),
        }
    }
    parts
}

/// Returns the names of tests that are too long. Pure.
fn long_tests(source: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut is_test = false;
    for line in source.lines().map(str::trim) {
        if line.starts_with("#[") && (line.contains("test]") || line.contains("test(")) {
            is_test = true;
        } else if let Some((_, rest)) = line.split_once("fn ") {
            let name = rest.split('(').next().unwrap_or_default();
            if is_test && name.len() > TEST_NAME_MAX {
                found.push(name.to_owned());
            }
            is_test = false;
        }
    }
    found
}

/// Adds each banned phrase in the pages of this repository to `wrong`.
pub(super) fn check(wrong: &mut Vec<String>) -> Result<()> {
    let mut pages: Vec<PathBuf> = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SPECIFICATION.md"]
        .iter()
        .map(|name| root().join(name))
        .collect();
    collect(&root().join("docs"), &mut pages)?;
    for page in pages {
        let shown = page.strip_prefix(root()).unwrap_or(&page).display().to_string();
        if EXEMPT.contains(&shown.as_str()) {
            continue;
        }
        let found = banned(&fs::read_to_string(&page)?);
        wrong.extend(found.into_iter().map(|(line, phrase, instead)| {
            format!("{shown}:{line}: the phrase {phrase:?}; write: {instead}")
        }));
    }
    Ok(())
}

fn collect(dir: &Path, pages: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            collect(&path, pages)?;
        } else if path.extension().is_some_and(|e| e == "md") {
            pages.push(path);
        }
    }
    Ok(())
}

/// Returns the line numbers, from 1, of banned phrases outside of code. Pure.
fn banned(page: &str) -> Vec<(usize, &'static str, &'static str)> {
    let mut found = Vec::new();
    let mut is_fenced = false;
    for (number, line) in page.lines().enumerate() {
        if line.trim_start().starts_with("```") {
            is_fenced = !is_fenced;
        } else if !is_fenced {
            // Every second part is code between backticks.
            let prose: String = line.split('`').step_by(2).collect::<Vec<_>>().join("`").to_lowercase();
            let here = BANNED.iter().filter(|(phrase, _)| has_words(&prose, phrase));
            found.extend(here.map(|(phrase, instead)| (number + 1, *phrase, *instead)));
        }
    }
    found
}

/// Returns whether `phrase` is in the text, without beginning or ending within a word. Pure.
fn has_words(text: &str, phrase: &str) -> bool {
    text.match_indices(phrase).any(|(at, _)| {
        let is_edge = |c: Option<char>| !c.is_some_and(char::is_alphanumeric);
        is_edge(text[..at].chars().next_back()) && is_edge(text[at + phrase.len()..].chars().next())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_are_checked_in_comments_texts_and_names() {
        let source =
            "let goes_on = 1; // it goes on\nsay(\"goes on\"); let key = \"nobody\";\n/// `whatever` is code";
        let found: Vec<_> =
            banned_phrases_in(source).into_iter().map(|(line, phrase, _)| (line, phrase)).collect();
        assert_eq!(found, [(1, "goes on"), (2, "goes on")]);
        let source = "struct StandbyPool; // Standby\nlet \"standby\" = open_door(indoors, OLD_DOORS);";
        let found: Vec<_> =
            replaced_words_in(source).into_iter().map(|(line, word, _)| (line, word)).collect();
        assert_eq!(found, [(1, "standby"), (2, "door"), (2, "doors")]);
        let name = "a".repeat(61);
        assert_eq!(long_tests(&format!("#[test]\nfn {name}() {{}}\nfn {name}() {{}}")), [name]);
    }

    #[test]
    fn banned_phrases_are_found_outside_code() {
        let page = "The VM goes on.\nuid `nobody`\n```\nwhatever\n```\nCargo once, going on\nNobody's VM";
        let found: Vec<_> = banned(page).into_iter().map(|(line, phrase, _)| (line, phrase)).collect();
        assert_eq!(found, [(1, "goes on"), (7, "nobody")]);
    }
}
