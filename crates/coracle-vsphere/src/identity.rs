//! Formats of a VM's identity: as vSphere, the firmware and the guest write it.

use uuid::Uuid;

/// Normalises a MAC address for comparison and storage: lower case, hyphens. An empty text stays empty.
#[must_use]
pub fn mac(text: &str) -> String {
    text.trim().to_ascii_lowercase().replace(':', "-")
}

/// Reads the BIOS UUID from a serial number (`VMware-42 1f …`) or a UUID: 8-4-4-4-12 lower-case hex in the printed order.
/// Returns `None` unless the text has 32 hex digits.
#[must_use]
pub fn bios_uuid(text: &str) -> Option<String> {
    let text = text.trim();
    let text = text.strip_prefix("VMware-").unwrap_or(text);
    let hex: String =
        text.chars().filter(|c| !matches!(c, ' ' | '-')).collect::<String>().to_ascii_lowercase();
    let uuid = Uuid::try_parse(&hex).ok().filter(|_| hex.len() == 32)?;
    Some(uuid.to_string())
}

/// UUID version 5 of `name` in the URL namespace (RFC 9562, section 5.5).
#[must_use]
pub fn uuid_v5(name: &str) -> String {
    Uuid::new_v5(&Uuid::NAMESPACE_URL, name.as_bytes()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bios_uuid_parses_serial_number_and_uuid() {
        let want = Some("421f0a0b-1c2d-3e4f-5061-728394a5b6c7".to_owned());
        for text in [
            "VMware-42 1f 0a 0b 1c 2d 3e 4f-50 61 72 83 94 a5 b6 c7",
            "421F0A0B-1C2D-3E4F-5061-728394A5B6C7",
            " 421f0a0b1c2d3e4f5061728394a5b6c7\n",
        ] {
            assert_eq!(bios_uuid(text), want, "{text}");
        }
        for text in ["", "VMware-", "421f0a0b-1c2d-3e4f-5061-728394a5b6", "Parallels-42 1f", "é"] {
            assert_eq!(bios_uuid(text), None, "{text}");
        }
        assert_eq!(mac(" 00:50:56:AB:cd:01 "), "00-50-56-ab-cd-01");
    }

    #[test]
    fn uuid_v5_matches_the_rfc() {
        // RFC 9562, appendix A.4 uses the DNS namespace; this value is from Python's uuid.uuid5(NAMESPACE_URL, …).
        assert_eq!(uuid_v5("http://python.org/"), "4c565f0d-3f5a-5890-b41b-20cf47701c5e");
    }
}
