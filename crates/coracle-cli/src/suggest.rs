//! Suggestions of the nearest names when a name is not found.

/// Maximum number of suggestions.
const MAX: usize = 3;

/// Returns the names that the user may have meant, nearest first. Pure.
pub(crate) fn nearest<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Vec<&'a str> {
    let far = (wanted.chars().count() / 3).max(1);
    let mut found: Vec<(usize, &str)> = names
        .into_iter()
        .filter(|name| !wanted.is_empty() && !name.is_empty())
        .map(|name| {
            let within = name.contains(wanted) || wanted.contains(name);
            (if within { 1 } else { distance(wanted, name) }, name)
        })
        .filter(|(distance, _)| *distance <= far)
        .collect();
    found.sort_unstable();
    found.dedup();
    found.into_iter().take(MAX).map(|(_, name)| name).collect()
}

/// Returns the Levenshtein distance: how many letters must be added, removed or changed.
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let next = (diagonal + usize::from(x != *y)).min(row[j] + 1).min(row[j + 1] + 1);
            diagonal = std::mem::replace(&mut row[j + 1], next);
        }
    }
    row[b.len()]
}

/// Returns a sentence for the help of an error, or `None` if no name is near.
pub(crate) fn hint<'a>(wanted: &str, names: impl IntoIterator<Item = &'a str>) -> Option<String> {
    let near = nearest(wanted, names);
    (!near.is_empty()).then(|| format!("nearest names: {}", near.join(", ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn near_names_are_found_and_far_ones_are_not() {
        let names = ["web-1", "web-2", "database", "default-demo"];
        for (wanted, want) in [
            ("web-3", vec!["web-1", "web-2"]),
            ("demo", vec!["default-demo"]),
            ("databse", vec!["database"]),
            ("zebra", vec![]),
            ("", vec![]),
        ] {
            assert_eq!(nearest(wanted, names), want, "{wanted}");
        }
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
