//! Checks that pages that comments cite are in this repository.

use std::fs;
use std::path::Path;

use anyhow::Result;

use crate::root;

/// Adds each citation below `dir` of a page that does not exist to `wrong`.
pub(super) fn check(dir: &Path, wrong: &mut Vec<String>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let path = entry?.path();
        if path.is_dir() {
            check(&path, wrong)?;
        } else if path.extension().is_some_and(|e| e == "rs") {
            let source = fs::read_to_string(&path)?;
            let shown = path.strip_prefix(root()).unwrap_or(&path).display();
            let missing = cited(&source).filter(|(_, page)| !root().join(page).is_file());
            wrong.extend(
                missing.map(|(line, page)| format!("{shown}:{line}: cites {page}, which is not here")),
            );
        }
    }
    Ok(())
}

/// Returns the Markdown pages in comments, with their line numbers from 1. Pure.
fn cited(source: &str) -> impl Iterator<Item = (usize, &str)> {
    source.lines().enumerate().flat_map(|(number, line)| {
        let comment = if line.trim_start().starts_with("//") { line } else { "" };
        let is_path = |c: char| c.is_ascii_alphanumeric() || "_./-".contains(c);
        let words = comment.split(move |c| !is_path(c)).map(|word| word.trim_end_matches('.'));
        let pages = words.filter(|word| word.strip_suffix(".md").is_some_and(|name| !name.is_empty()));
        // URLs of public pages begin with two slashes after their scheme.
        pages.filter(|page| !page.starts_with("//")).map(move |page| (number + 1, page))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cited_pages_are_found_in_comments() {
        let source =
            "/// As (`docs/limits.md`) says, and ground.md.\nlet x = \"y.md\";\n// https://a.io/b.md";
        assert_eq!(cited(source).collect::<Vec<_>>(), [(1, "docs/limits.md"), (1, "ground.md")]);
    }
}
