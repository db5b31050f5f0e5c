//! Texts from guests.

/// Limits and sanitises a text: guests are hostile.
pub(super) fn sanitise_text(text: String) -> String {
    text.chars().filter(|c| !c.is_control()).take(500).collect()
}
