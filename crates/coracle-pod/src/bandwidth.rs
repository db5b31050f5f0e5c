//! Bandwidth limits of a pod, from its annotations (Kubernetes documentation, "Network Plugins: Support traffic shaping").
//! Pure.

use std::collections::BTreeMap;

use coracle_api::Amount;
use coracle_net::Bandwidth;

/// Annotation for ingress to the pod, in bits per second.
const INGRESS: &str = "kubernetes.io/ingress-bandwidth";
/// Annotation for egress from the pod, in bits per second.
const EGRESS: &str = "kubernetes.io/egress-bandwidth";
/// Bandwidths that Kubernetes accepts: 1 kbit/s to 1 Pbit/s.
const BITS: std::ops::RangeInclusive<u64> = 1_000..=1_000_000_000_000_000;

/// An invalid annotation.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid annotation {key}: {value:?} is not a bandwidth from 1k to 1P, in bits per second")]
pub struct InvalidBandwidth {
    key: &'static str,
    value: String,
}

/// Returns the bandwidth limits that the annotations request; `None` for pods without them.
///
/// # Errors
/// [`InvalidBandwidth`] for a value outside of the range that Kubernetes accepts.
pub fn bandwidth(annotations: &BTreeMap<String, String>) -> Result<Option<Bandwidth>, InvalidBandwidth> {
    let rate = |key: &'static str| match annotations.get(key) {
        Some(value) => match Amount::parse(value).map(Amount::units) {
            Ok(bits) if BITS.contains(&bits) => Ok(Some(bits)),
            _ => Err(InvalidBandwidth { key, value: value.clone() }),
        },
        None => Ok(None),
    };
    let bandwidth = Bandwidth { ingress: rate(INGRESS)?, egress: rate(EGRESS)? };
    Ok(Some(bandwidth).filter(|bandwidth| *bandwidth != Bandwidth::default()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bandwidth_table() {
        let parse = |ingress: Option<&str>, egress: Option<&str>| {
            let pairs = [(INGRESS, ingress), (EGRESS, egress)];
            let set = pairs.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?.to_owned())));
            bandwidth(&set.collect())
        };
        assert_eq!(parse(None, None), Ok(None));
        let both = Bandwidth { ingress: Some(10_000_000), egress: Some(1_000_000_000) };
        assert_eq!(parse(Some("10M"), Some("1G")), Ok(Some(both)));
        let out = Bandwidth { ingress: None, egress: Some(1_048_576) };
        assert_eq!(parse(None, Some("1Mi")), Ok(Some(out)));
        for value in ["", "fast", "-1M", "999", "2P", "1 M"] {
            let refused = parse(Some(value), None).unwrap_err();
            assert!(
                refused.to_string().starts_with("invalid annotation kubernetes.io/ingress-bandwidth"),
                "{value:?}"
            );
        }
    }
}
