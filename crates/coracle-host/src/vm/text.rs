//! Texts of guests.

/// Guests are hostile: a text of theirs is cut and cleaned before it is kept.
pub(super) fn bounded(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(500).collect()
}
