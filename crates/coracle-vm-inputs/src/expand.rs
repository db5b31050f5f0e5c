//! `$(NAME)` in values, commands and arguments.

/// Replaces `$(NAME)` by a variable that is known; any other one stays, and `$$` is one `$` (API reference of Container,
/// "command").
pub(crate) fn expand<'a>(text: &str, known: impl Fn(&str) -> Option<&'a str>) -> String {
    let mut parts = text.split('$');
    let mut expanded = parts.next().unwrap_or_default().to_owned();
    let mut escaped = false;
    for part in parts {
        if std::mem::take(&mut escaped) {
            expanded.push_str(part);
            continue;
        }
        if part.is_empty() {
            // The first of two: what follows the second one is taken as it is.
            expanded.push('$');
            escaped = true;
            continue;
        }
        let reference = part.strip_prefix('(').and_then(|open| open.split_once(')'));
        match reference.and_then(|(name, rest)| Some((known(name)?, rest))) {
            Some((value, rest)) => expanded.extend([value, rest]),
            None => expanded.extend(["$", part]),
        }
    }
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced_and_dollars_escaped() {
        let known = |name: &str| match name {
            "A" => Some("1"),
            "NESTED" => Some("$(A)"),
            _ => None,
        };
        for (text, want) in [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)z", "x1y1z"),
            ("$(B)", "$(B)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$", "$$"),
            ("$", "$"),
            ("cost: 5$", "cost: 5$"),
            ("$A", "$A"),
            ("$(A", "$(A"),
            ("$(NESTED)", "$(A)"),
        ] {
            assert_eq!(expand(text, known), want, "{text}");
        }
    }
}
