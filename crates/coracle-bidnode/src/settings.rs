//! Parsed and validated specification and annotations of a BidNode. Pure.

use std::collections::{BTreeMap, BTreeSet};

use coracle_api::bidnode::{BidNode, BidStrategy, NodeTaint, micros, names};
use coracle_auction::Price;
use jiff::SignedDuration;
use kube::ResourceExt as _;

use names::annotation;

/// Limit of concurrent voluntary removals.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disruption {
    /// Number of nodes.
    Nodes(u32),
    /// Percentage of the nodes, rounded up.
    Percent(u32),
}

impl Disruption {
    /// Number of nodes that may be removed at once, of `nodes`.
    #[must_use]
    pub fn of(self, nodes: u32) -> u32 {
        match self {
            Self::Nodes(n) => n,
            Self::Percent(p) => (nodes * p).div_ceil(100),
        }
    }
}

/// When idle nodes are released.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Consolidation {
    /// Release nodes that have been idle for long enough.
    #[default]
    WhenEmpty,
    /// Also release nodes whose pods fit elsewhere. Not implemented yet: the same as [`Self::WhenEmpty`].
    Balanced,
    /// Never release nodes.
    Never,
}

/// Taint that can be put on a Node.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Taint {
    /// Key.
    pub key: String,
    /// Value; may be empty.
    pub value: String,
    /// Effect: NoSchedule, PreferNoSchedule or NoExecute.
    pub effect: String,
}

/// Parsed specification of a BidNode.
#[derive(Clone, Debug, PartialEq)]
pub struct Settings {
    /// Instance type of the nodes.
    pub instance_type: String,
    /// Region; `None`: the controller chooses it.
    pub region: Option<String>,
    /// Highest price of a node-hour.
    pub max_bid: Price,
    /// Minimum number of nodes.
    pub min: u32,
    /// Maximum number of nodes.
    pub max: u32,
    /// Bid strategy: share of the market's price that is bid.
    pub strategy: BidStrategy,
    /// Labels of the nodes.
    pub labels: BTreeMap<String, String>,
    /// Taints of the nodes.
    pub taints: Vec<Taint>,
    /// Whether nothing is bought, sold or changed. Notices and drains under way are still handled.
    pub paused: bool,
    /// Upper bound of the sum of the limits of live and open units.
    pub max_hourly_cost: Option<Price>,
    /// Whether the strategy raises limits of running nodes.
    pub defend: bool,
    /// Whether only the whole shortfall may be bought at once.
    pub gang: bool,
    /// Idle time before a node above the minimum is released, in milliseconds.
    pub idle_after_ms: i64,
    /// When idle nodes are released.
    pub consolidation: Consolidation,
    /// Limit of concurrent voluntary removals.
    pub disruption: Disruption,
    /// Longest drain when the object is deleted, in milliseconds.
    pub drain_timeout_ms: i64,
    /// Whether the finalizer is removed without the market.
    pub force_delete: bool,
}

/// Longest value of a label (Kubernetes documentation, "Labels and Selectors").
const NAME_MAX: usize = 63;

/// Whether a label key belongs to Kubernetes or this controller. Kubelets and schedulers act on keys of Kubernetes, and
/// `node-restriction.kubernetes.io` isolates workloads, so a tenant must not choose them.
fn is_reserved(key: &str, allowed: &BTreeSet<String>) -> bool {
    let Some((domain, _)) = key.split_once('/') else { return false };
    let is_of = |owner: &str| domain == owner || domain.strip_suffix(owner).is_some_and(|d| d.ends_with('.'));
    is_of("kubebid.io") || (is_of("kubernetes.io") || is_of("k8s.io")) && !allowed.contains(key)
}

/// Parses a BidNode. `allowed`: label keys of Kubernetes that an administrator permits tenants to set.
///
/// # Errors
/// Message with field, value and rule, for users.
pub fn parse(object: &BidNode, allowed: &BTreeSet<String>) -> Result<Settings, String> {
    let spec = &object.spec;
    // The name becomes the value of a label of each Node.
    let name = object.name_any();
    if name.len() > NAME_MAX {
        return Err(format!("metadata.name: {name} must have at most {NAME_MAX} characters"));
    }
    let max_bid = micros(spec.max_bid)
        .map(Price::micros)
        .map_err(|text| format!("spec.maxBid: {text} must have at most 6 decimals and be at most 1000000"))?;
    let count =
        |field: &str, n: i32| u32::try_from(n).map_err(|_| format!("spec.{field}: {n} must not be negative"));
    let (min, max) = (count("minNodes", spec.min_nodes)?, count("maxNodes", spec.max_nodes)?);
    if min > max {
        return Err("spec.minNodes: minNodes must not exceed maxNodes".to_owned());
    }
    for (key, value) in &spec.node_selector {
        check_label("spec.nodeSelector", key, value)?;
        if is_reserved(key, allowed) {
            return Err(format!("spec.nodeSelector: key {key} is reserved; take one of your own domain"));
        }
    }
    let given = Annotations(object);
    Ok(Settings {
        instance_type: spec.instance_type.clone(),
        region: spec.region.clone().filter(|region| !region.is_empty()),
        max_bid,
        min,
        max,
        strategy: spec.bid_strategy,
        labels: spec.node_selector.clone(),
        taints: taints(&spec.taints, allowed)?,
        paused: given.flag(annotation::PAUSED, false)?,
        max_hourly_cost: given.price(annotation::MAX_HOURLY_COST)?,
        defend: given.flag(annotation::DEFEND, true)?,
        gang: given.flag(annotation::GANG, false)?,
        idle_after_ms: given.duration(annotation::IDLE_AFTER, 300_000)?,
        consolidation: given.consolidation()?,
        disruption: given.disruption()?,
        drain_timeout_ms: given.duration(annotation::DRAIN_TIMEOUT, 300_000)?,
        force_delete: given.flag(annotation::FORCE_DELETE, false)?,
    })
    .and_then(|settings| given.join_mode().map(|()| settings))
}

fn taints(wanted: &[NodeTaint], allowed: &BTreeSet<String>) -> Result<Vec<Taint>, String> {
    let mut seen = BTreeSet::new();
    let mut all = Vec::new();
    for (n, taint) in wanted.iter().enumerate() {
        let key = taint.key.clone().unwrap_or_default();
        let (value, effect) = (taint.value.clone().unwrap_or_default(), taint.effect.clone());
        let effect = effect.ok_or_else(|| format!("spec.taints[{n}].effect: must be given"))?;
        if key.is_empty() {
            return Err(format!("spec.taints[{n}].key: must be given"));
        }
        check_label(&format!("spec.taints[{n}]"), &key, &value)?;
        if is_reserved(&key, allowed) {
            return Err(format!("spec.taints[{n}].key: {key} is reserved; take one of your own domain"));
        }
        if !seen.insert((key.clone(), effect.clone())) {
            return Err(format!("spec.taints[{n}]: {key} with effect {effect} is there twice"));
        }
        all.push(Taint { key, value, effect });
    }
    Ok(all)
}

/// Checks the syntax of a label (Kubernetes documentation, "Labels and Selectors").
fn check_label(field: &str, key: &str, value: &str) -> Result<(), String> {
    let (prefix, name) = key.split_once('/').unwrap_or(("", key));
    let is_edge = |c: Option<char>| c.is_some_and(|c| c.is_ascii_alphanumeric());
    let is_word = |s: &str| {
        let inner = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
        s.len() <= 63 && is_edge(s.chars().next()) && is_edge(s.chars().last()) && s.chars().all(inner)
    };
    let is_part = |s: &str| {
        let inner = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        !s.is_empty() && s.chars().all(inner) && !s.starts_with('-') && !s.ends_with('-')
    };
    let has_prefix = key.contains('/');
    let good_prefix = !has_prefix || prefix.len() <= 253 && prefix.split('.').all(is_part);
    if !good_prefix || !is_word(name) {
        return Err(format!("{field}: invalid label key {key:?}"));
    }
    if !value.is_empty() && !is_word(value) {
        return Err(format!("{field}: invalid label value {value:?} of {key}"));
    }
    Ok(())
}

/// Annotations of one object.
struct Annotations<'a>(&'a BidNode);

impl Annotations<'_> {
    fn text(&self, key: &str) -> Option<&str> {
        self.0.annotations().get(key).map(String::as_str)
    }

    fn flag(&self, key: &str, default: bool) -> Result<bool, String> {
        match self.text(key) {
            None => Ok(default),
            Some("true") => Ok(true),
            Some("false") => Ok(false),
            Some(other) => Err(format!("annotation {key}: {other:?} must be true or false")),
        }
    }

    fn price(&self, key: &str) -> Result<Option<Price>, String> {
        let parsed = self.text(key).map(Price::parse).transpose();
        parsed.map_err(|e| format!("annotation {key}: {e}"))
    }

    fn duration(&self, key: &str, default_ms: i64) -> Result<i64, String> {
        let Some(text) = self.text(key) else { return Ok(default_ms) };
        let parsed = text.parse::<SignedDuration>().ok().filter(|d| !d.is_negative());
        let ms = parsed.and_then(|d| i64::try_from(d.as_millis()).ok());
        ms.ok_or_else(|| format!("annotation {key}: {text:?} must be a duration such as 5m or 90s"))
    }

    fn consolidation(&self) -> Result<Consolidation, String> {
        match self.text(annotation::CONSOLIDATION) {
            None | Some("when-empty") => Ok(Consolidation::WhenEmpty),
            Some("balanced") => Ok(Consolidation::Balanced),
            Some("never") => Ok(Consolidation::Never),
            Some(other) => {
                let key = annotation::CONSOLIDATION;
                Err(format!("annotation {key}: {other:?} must be when-empty, balanced or never"))
            }
        }
    }

    fn disruption(&self) -> Result<Disruption, String> {
        let key = annotation::DISRUPTION_BUDGET;
        let Some(text) = self.text(key) else { return Ok(Disruption::Percent(10)) };
        let parsed = match text.strip_suffix('%') {
            Some(percent) => percent.parse().ok().filter(|p| *p <= 100).map(Disruption::Percent),
            None => text.parse().ok().map(Disruption::Nodes),
        };
        parsed.ok_or_else(|| format!("annotation {key}: {text:?} must be a number of nodes or a percentage"))
    }

    fn join_mode(&self) -> Result<(), String> {
        match self.text(annotation::JOIN_MODE) {
            None | Some("kubelet" | "virtual") => Ok(()),
            Some(other) => {
                Err(format!("annotation {}: {other:?} must be kubelet or virtual", annotation::JOIN_MODE))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use coracle_api::bidnode::BidNodeSpec;

    use super::*;

    fn object(change: impl FnOnce(&mut BidNode)) -> BidNode {
        let spec = BidNodeSpec {
            instance_type: "a100-4x".into(),
            max_bid: 4.5,
            min_nodes: 1,
            max_nodes: 10,
            ..BidNodeSpec::default()
        };
        let mut object = BidNode::new("ml", spec);
        change(&mut object);
        object
    }

    fn label(key: &str, value: &str) -> BidNode {
        object(|o| drop(o.spec.node_selector.insert(key.into(), value.into())))
    }

    fn annotated(key: &str, value: &str) -> BidNode {
        object(|o| drop(o.annotations_mut().insert(key.into(), value.into())))
    }

    fn taint(taints: &[(&str, &str, &str)]) -> BidNode {
        let one = |(key, value, effect): &(&str, &str, &str)| NodeTaint {
            key: (!key.is_empty()).then(|| (*key).to_owned()),
            value: Some((*value).to_owned()),
            effect: (!effect.is_empty()).then(|| (*effect).to_owned()),
        };
        object(|o| o.spec.taints = taints.iter().map(one).collect())
    }

    /// Invalid input that the API server accepts and the controller refuses.
    #[test]
    fn bad_input_names_the_field() {
        for (object, want) in [
            (object(|o| o.spec.max_bid = 1.000_000_1), "spec.maxBid"),
            (object(|o| o.spec.max_bid = 1_000_001.0), "spec.maxBid"),
            (object(|o| (o.spec.min_nodes, o.spec.max_nodes) = (5, 2)), "minNodes must not exceed maxNodes"),
            (taint(&[("", "v", "NoSchedule")]), "spec.taints[0].key"),
            (taint(&[("k", "v", "")]), "spec.taints[0].effect"),
            (taint(&[("k", "a", "NoSchedule"), ("k", "b", "NoSchedule")]), "spec.taints[1]"),
            (taint(&[("k", "not a value", "NoSchedule")]), "spec.taints[0]"),
            (taint(&[("kubebid.io/preempting", "", "NoSchedule")]), "reserved"),
            (label("bad key", "v"), "spec.nodeSelector"),
            (label("a/b/c", "v"), "spec.nodeSelector"),
            (label("UPPER.case/x", "v"), "spec.nodeSelector"),
            (label("x", "no value"), "spec.nodeSelector"),
            (label("kubebid.io/bidnode", "v"), "reserved"),
            (label("node.kubernetes.io/instance-type", "v"), "reserved"),
            (label("topology.kubernetes.io/zone", "v"), "reserved"),
            (label("kubernetes.io/hostname", "v"), "reserved"),
            (label("node-restriction.kubernetes.io/team", "v"), "reserved"),
            (label("feature.node.k8s.io/gpu", "v"), "reserved"),
            (label("node-role.kubernetes.io/worker", ""), "reserved"),
            (annotated(annotation::PAUSED, "yes"), "kubebid.io/paused"),
            (annotated(annotation::DEFEND, ""), "kubebid.io/defend"),
            (annotated(annotation::GANG, "1"), "kubebid.io/gang"),
            (annotated(annotation::FORCE_DELETE, "TRUE"), "kubebid.io/force-delete"),
            (annotated(annotation::MAX_HOURLY_COST, "-1"), "kubebid.io/max-hourly-cost"),
            (annotated(annotation::MAX_HOURLY_COST, "1.1234567"), "kubebid.io/max-hourly-cost"),
            (annotated(annotation::IDLE_AFTER, "soon"), "kubebid.io/idle-after"),
            (annotated(annotation::IDLE_AFTER, "-5m"), "kubebid.io/idle-after"),
            (annotated(annotation::DRAIN_TIMEOUT, "5"), "kubebid.io/drain-timeout"),
            (annotated(annotation::CONSOLIDATION, "maybe"), "kubebid.io/consolidation"),
            (annotated(annotation::DISRUPTION_BUDGET, "110%"), "kubebid.io/disruption-budget"),
            (annotated(annotation::DISRUPTION_BUDGET, "-1"), "kubebid.io/disruption-budget"),
            (annotated(annotation::JOIN_MODE, "manual"), "kubebid.io/join-mode"),
        ] {
            let said = parse(&object, &BTreeSet::new()).expect_err(want);
            assert!(said.contains(want), "{said} does not name {want}");
        }
    }

    #[test]
    fn allowed_key_of_kubernetes_is_accepted() {
        let mut object =
            BidNode::new("b", BidNodeSpec { max_nodes: 1, max_bid: 1.0, ..BidNodeSpec::default() });
        let keys = ["kubernetes.io/arch", "my.k8s.io.example.com/x"];
        object.spec.node_selector = keys.map(|key| (key.to_owned(), "v".to_owned())).into();
        assert!(parse(&object, &BTreeSet::new()).is_err_and(|why| why.contains("kubernetes.io/arch")));
        let settings = parse(&object, &[keys[0].to_owned()].into()).unwrap();
        assert_eq!(settings.labels.len(), 2, "the domain decides, not its begin");
    }

    #[test]
    fn valid_annotations_are_parsed_into_settings() {
        let all = object(|o| {
            for (key, value) in [
                (annotation::PAUSED, "true"),
                (annotation::MAX_HOURLY_COST, "12.5"),
                (annotation::DEFEND, "false"),
                (annotation::GANG, "true"),
                (annotation::IDLE_AFTER, "90s"),
                (annotation::DISRUPTION_BUDGET, "25%"),
                (annotation::DRAIN_TIMEOUT, "10m"),
                (annotation::CONSOLIDATION, "never"),
                (annotation::JOIN_MODE, "virtual"),
            ] {
                o.annotations_mut().insert(key.into(), value.into());
            }
            o.spec.region = Some(String::new());
        });
        let got = parse(&all, &BTreeSet::new()).unwrap();
        assert_eq!((got.max_bid, got.region.as_deref()), (Price::micros(4_500_000), None));
        assert!(got.paused && !got.defend && got.gang);
        assert_eq!(got.max_hourly_cost, Some(Price::micros(12_500_000)));
        assert_eq!((got.idle_after_ms, got.drain_timeout_ms), (90_000, 600_000));
        assert_eq!((got.disruption.of(10), got.disruption.of(1)), (3, 1));
        assert_eq!(got.consolidation, Consolidation::Never);
    }
}
