//! Expansion of `$(NAME)` in values, commands and arguments.

/// Replaces `$(NAME)` by the value that `known` returns. An unknown name stays as written, and `$$` stands for one `$` (API
/// reference of Container, `command`).
#[must_use]
pub fn expand<'a>(text: &str, known: impl Fn(&str) -> Option<&'a str>) -> String {
    let mut expanded = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('$') {
        let (before, from_dollar) = rest.split_at(at);
        expanded.push_str(before);
        let after = &from_dollar[1..];
        if let Some(behind) = after.strip_prefix('$') {
            expanded.push('$');
            rest = behind;
        } else if let Some((name, behind)) = after.strip_prefix('(').and_then(|open| open.split_once(')')) {
            match known(name) {
                Some(value) => expanded.push_str(value),
                None => expanded.push_str(&from_dollar[..name.len() + 3]),
            }
            rest = behind;
        } else {
            expanded.push('$');
            rest = after;
        }
    }
    expanded.push_str(rest);
    expanded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_replaced_and_dollars_escaped() {
        let known = |name: &str| match name {
            "A" => Some("1"),
            "EMPTY" => Some(""),
            "NESTED" => Some("$(A)"),
            _ => None,
        };
        for (text, want) in [
            ("", ""),
            ("plain", "plain"),
            ("$(A)", "1"),
            ("x$(A)y$(A)", "x1y1"),
            ("$(EMPTY)", ""),
            ("$(UNKNOWN)", "$(UNKNOWN)"),
            ("$$(A)", "$(A)"),
            ("$$$(A)", "$1"),
            ("$$$$", "$$"),
            ("$", "$"),
            ("$A", "$A"),
            ("$(A", "$(A"),
            ("$(A$(A)", "$(A$(A)"),
            ("cost: 5$", "cost: 5$"),
            ("$()", "$()"),
            ("$(NESTED)", "$(A)"),
            ("ü$(A)ü", "ü1ü"),
        ] {
            assert_eq!(expand(text, known), want, "{text}");
        }
    }
}
