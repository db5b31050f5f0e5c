//! Spans of calls, which continue the trace of a kubelet (W3C Trace Context, "traceparent"). Pure.

use tracing::Span;

/// Returns the span of a call, with its method and the kubelet's trace.
pub(crate) fn span(path: &str, traceparent: Option<&str>) -> Span {
    let method = path.rsplit('/').next().unwrap_or_default();
    match traceparent.and_then(parent) {
        Some((trace_id, parent_id)) => tracing::info_span!("cri", method, trace_id, parent_id),
        None => tracing::info_span!("cri", method),
    }
}

/// Parses `00-<32 hex>-<16 hex>-<2 hex>` into the ids of the trace and of the calling span. Later versions may append further
/// fields.
fn parent(header: &str) -> Option<(&str, &str)> {
    let mut parts = header.split('-');
    let (version, trace, span, flags) = (parts.next()?, parts.next()?, parts.next()?, parts.next()?);
    let is_hex = |text: &str, digits: usize| {
        text.len() == digits && text.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b))
    };
    let has_rest = parts.next().is_some();
    let known = is_hex(version, 2) && version != "ff" && is_hex(flags, 2) && !(version == "00" && has_rest);
    let is_id = |text: &str, digits| is_hex(text, digits) && text.bytes().any(|b| b != b'0');
    (known && is_id(trace, 32) && is_id(span, 16)).then_some((trace, span))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parents_table() {
        const TRACE: &str = "4bf92f3577b34da6a3ce929d0e0e4736";
        const SPAN: &str = "00f067aa0ba902b7";
        let good = Some((TRACE, SPAN));
        for (why, header, want) in [
            ("version 0", format!("00-{TRACE}-{SPAN}-01"), good),
            ("a later version", format!("cc-{TRACE}-{SPAN}-01-more"), good),
            ("version 0 with more", format!("00-{TRACE}-{SPAN}-01-more"), None),
            ("version 255", format!("ff-{TRACE}-{SPAN}-01"), None),
            ("capitals", format!("00-{}-{SPAN}-01", TRACE.to_uppercase()), None),
            ("no trace", format!("00-{}-{SPAN}-01", "0".repeat(32)), None),
            ("no span", format!("00-{TRACE}-{}-01", "0".repeat(16)), None),
            ("cut short", format!("00-{TRACE}-{SPAN}"), None),
            ("nothing", String::new(), None),
        ] {
            assert_eq!(parent(&header), want, "{why}");
        }
    }
}
