//! Between the engine's words and the wire's, in one place.

use coracle_auction::{
    Alloc, AllocId, AllocState, Bid, BidId, BidState, ChargeReason, EndReason, OwnerKey, Price, Report,
    Stage, Standing,
};
use coracle_proto::market as pb;
use sha2::{Digest, Sha256};

use crate::history::Bar;
use crate::names;
use crate::registry::{Kind, Registry};
use crate::writer::{Slot, ms};

pub(crate) fn charge_reason(reason: ChargeReason) -> &'static str {
    match reason {
        ChargeReason::Usage => "usage",
        ChargeReason::Minimum => "minimum",
        ChargeReason::Refund => "refund",
    }
}

pub(crate) fn end_reason(reason: EndReason) -> &'static str {
    match reason {
        EndReason::Released => "Released",
        EndReason::Preempted => "Preempted",
        EndReason::CapacityLost => "CapacityLost",
        EndReason::ProvisionFailed => "ProvisionFailed",
        EndReason::NodeFailed => "NodeFailed",
        EndReason::BudgetExhausted => "BudgetExhausted",
    }
}

pub(crate) fn report_name(report: &Report) -> &'static str {
    match report {
        Report::Launched => "launched",
        Report::Registered { .. } => "registered",
        Report::Ready => "ready",
        Report::Failed => "failed",
        Report::Drained => "drained",
        Report::Died => "died",
    }
}

pub(crate) fn report_of(name: &str, node: &str) -> Option<Report> {
    Some(match name {
        "launched" => Report::Launched,
        "registered" if !node.is_empty() && node.len() <= 253 => Report::Registered { node: node.into() },
        "ready" => Report::Ready,
        "failed" => Report::Failed,
        "drained" => Report::Drained,
        "died" => Report::Died,
        _ => return None,
    })
}

pub(crate) fn bid_state(state: BidState) -> &'static str {
    match state {
        BidState::Pending => "pending",
        BidState::Matched => "matched",
        BidState::Provisioning => "provisioning",
        BidState::Active => "active",
        BidState::Preempting => "preempting",
        BidState::Ended => "ended",
        BidState::Cancelled => "cancelled",
        BidState::Expired => "expired",
    }
}

pub(crate) fn alloc_state(state: AllocState) -> &'static str {
    match state {
        AllocState::Matched => "matched",
        AllocState::Provisioning => "provisioning",
        AllocState::Active => "active",
        AllocState::Preempting => "preempting",
        AllocState::Ended => "ended",
    }
}

fn stage(stage: Stage) -> &'static str {
    match stage {
        Stage::Ordered => "ordered",
        Stage::Launched => "launched",
        Stage::Registered => "registered",
    }
}

pub(crate) fn standing(standing: Standing) -> &'static str {
    match standing {
        Standing::Over(_) => "OVER",
        Standing::Held => "BUDGET",
        Standing::BelowReserve => "BELOW_RESERVE",
        Standing::SkippedGang => "SKIPPED_GANG",
        Standing::Outbid => "BELOW_CLEARING_PRICE",
        Standing::Winning => "WINNING",
        Standing::Placed => "PLACED",
        Standing::Preempting(_) => "PREEMPTING",
    }
}

fn sixteen(digest: &[u8]) -> [u8; 16] {
    digest.first_chunk().copied().unwrap_or([0; 16])
}

/// The bytes of a UUID in its usual form, in small letters.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let bytes = text.as_bytes();
    if bytes.len() != 36 || [8, 13, 18, 23].iter().any(|at| bytes[*at] != b'-') {
        return None;
    }
    let mut digits = bytes.iter().filter(|b| **b != b'-').map(|b| match b {
        b'0'..=b'9' => Some(b - b'0'),
        b'a'..=b'f' => Some(b - b'a' + 10),
        _ => None,
    });
    let mut key = [0; 16];
    for byte in &mut key {
        *byte = digits.next()?? << 4 | digits.next()??;
    }
    digits.next().is_none().then_some(key)
}

/// A UUID is its own key; any other name is known by its digest. The flag says which.
pub(crate) fn owner_key(uid: &str) -> (OwnerKey, bool) {
    match uuid(uid) {
        Some(key) => (OwnerKey(key), true),
        None => (OwnerKey(sixteen(&Sha256::digest(uid.as_bytes()))), false),
    }
}

pub(crate) fn owner_uid(registry: &Registry, key: OwnerKey) -> String {
    registry.owner(&key.0).unwrap_or_else(|| {
        let hex = format!("{:032x}", u128::from_be_bytes(key.0));
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    })
}

/// Digest of an idempotency key of a tenant; never all zero, which means none.
pub(crate) fn key_digest(tenant: u32, key: &str) -> [u8; 16] {
    if key.is_empty() {
        return [0; 16];
    }
    let digest = Sha256::new_with_prefix(tenant.to_le_bytes()).chain_update(key.as_bytes()).finalize();
    let mut digest = sixteen(&digest);
    digest[15] |= 1;
    digest
}

/// Digest of what was asked, without how often: retries of one request are equal. Nobody is kept from making two
/// requests of one digest (FNV-1a, 64 bits): who does has the first one replayed to him, and harms nobody else.
pub(crate) fn body_digest(request: &pb::PlaceBidRequest) -> u64 {
    let mut digest = 0xcbf2_9ce4_8422_2325u64;
    let mut put = |bytes: &[u8]| {
        for byte in bytes {
            digest = (digest ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3);
        }
    };
    let numbers = [
        request.limit_micros.to_le_bytes(),
        (u64::from(request.quantity) << 32 | u64::from(request.min_fill)).to_le_bytes(),
        request.lease_ms.to_le_bytes(),
        request.expires_at_ms.to_le_bytes(),
    ];
    put(numbers.as_flattened());
    let labels = request.labels.iter().flat_map(|(key, value)| [key, value]);
    for text in [&request.market, &request.owner_uid].into_iter().chain(labels) {
        // With its length, so that no two lists of texts run into one another.
        put(&(text.len() as u64).to_le_bytes());
        put(text.as_bytes());
    }
    digest
}

pub(crate) fn bar(bar: Bar) -> pb::PriceBar {
    pb::PriceBar {
        at_ms: bar.at,
        open_micros: bar.open,
        high_micros: bar.high,
        low_micros: bar.low,
        close_micros: bar.close,
        calls: u64::try_from(bar.calls).unwrap_or(0),
    }
}

pub(crate) fn price(slot: &Slot) -> pb::MarketPrice {
    let (q, params) = (slot.market.quotes(), slot.market.params());
    let [p20_micros, p50_micros, p80_micros] = slot.percentiles.get().map_or([None; 3], |all| all.map(Some));
    let next = slot.market.announced();
    pb::MarketPrice {
        market: slot.name.clone(),
        quote_micros: q.quote.as_micros(),
        clearing_micros: q.clearing.as_micros(),
        indicative_micros: q.indicative.as_micros(),
        reserve_micros: q.reserve.as_micros(),
        cap_micros: q.cap.as_micros(),
        free: q.free as u64,
        as_of_ms: ms(q.as_of),
        seq: u64::try_from(slot.seq).unwrap_or(0),
        halted: q.halted,
        tick_micros: params.tick.as_micros(),
        next_call_ms: ms(slot.market.next_call()),
        p20_micros,
        p50_micros,
        p80_micros,
        next_reserve_micros: next.map_or(0, |(_, params)| params.reserve.as_micros()),
        next_cap_micros: next.map_or(0, |(_, params)| params.cap.as_micros()),
        next_from_ms: next.map_or(0, |(at, _)| ms(at)),
    }
}

pub(crate) fn bid(no: u32, slot: &Slot, registry: &Registry, id: BidId, row: &Bid) -> pb::Bid {
    let (tenant, owner) = slot.market.owner_of(row);
    let u = row.units();
    pb::Bid {
        bid: names::bid(no, row.placed_at(), id),
        market: slot.name.clone(),
        tenant: registry.name(Kind::Tenant, tenant.0),
        owner_uid: owner_uid(registry, owner),
        limit_micros: row.limit().as_micros(),
        quantity: u.total(),
        min_fill: row.min_fill(),
        state: bid_state(row.state()).into(),
        open: u.open.into(),
        matched: u.matched.into(),
        provisioning: u.provisioning.into(),
        active: u.active.into(),
        preempting: u.preempting.into(),
        ended: u.ended.into(),
        cancelled: u.cancelled.into(),
        expired: u.expired.into(),
        placed_at_ms: ms(row.placed_at()),
        hold: if row.is_held() { "BUDGET".into() } else { String::new() },
        labels: row.labels().iter().map(|(k, v)| (k.to_string(), v.to_string())).collect(),
        seq: row.seq(),
    }
}

pub(crate) fn alloc(no: u32, slot: &Slot, registry: &Registry, id: AllocId, row: &Alloc) -> pb::Allocation {
    let bid = slot.market.bid_of(row);
    let placed = slot.market.bid(bid);
    let (tenant, owner) = placed.map_or_else(Default::default, |placed| slot.market.owner_of(placed));
    let at = |time: Option<coracle_auction::Time>| time.map_or(0, ms);
    pb::Allocation {
        allocation: names::alloc(no, row.matched_at(), id),
        bid: placed.map_or_else(String::new, |placed| names::bid(no, placed.placed_at(), bid)),
        market: slot.name.clone(),
        tenant: registry.name(Kind::Tenant, tenant.0),
        owner_uid: owner_uid(registry, owner),
        lot: lot_name(registry, row.seat().0.0),
        unit: row.seat().1,
        state: alloc_state(row.state()).into(),
        limit_micros: row.limit().as_micros(),
        price_micros: slot.market.price(id).unwrap_or(Price::ZERO).as_micros(),
        matched_at_ms: ms(row.matched_at()),
        active_at_ms: at(row.active_at()),
        protected_until_ms: at(row.protected_until()),
        preempt_at_ms: at(row.preempt_at()),
        ended_at_ms: at(row.ended_at()),
        node: row.node().unwrap_or_default().into(),
        reason: row.reason().map_or("", end_reason).into(),
        price_to_keep_micros: slot.at_risk.get(&id).map_or(0, |price| price.as_micros()),
        stage: if row.state() == AllocState::Provisioning {
            stage(row.stage()).into()
        } else {
            String::new()
        },
    }
}

/// Lots are stored as `<market no> <supplier no> <name>`, so that equal names of two suppliers differ.
pub(crate) fn lot_key(market: u32, supplier: u32, name: &str) -> String {
    format!("{market} {supplier} {name}")
}

pub(crate) fn lot_name(registry: &Registry, no: u32) -> String {
    registry.name(Kind::Lot, no).splitn(3, ' ').nth(2).unwrap_or_default().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uuid_is_its_own_key_and_nothing_else_is() {
        let key = owner_key("6f9619ff-8b86-d011-b42d-00c04fc964ff");
        assert_eq!(key.0.0[..4], [0x6f, 0x96, 0x19, 0xff]);
        assert!(key.1);
        for other in [
            "",
            "bench",
            "6F9619FF-8b86-d011-b42d-00c04fc964ff",
            "6f9619ff-8b86-d011-b42d-00c04fc964f",
            "6f9619ff-8b86-d011-b42d-00c04fc964fg",
            "6f9619ff08b86-d011-b42d-00c04fc964ff",
            "6f9619ff-8b86-d011-b42d-00c04fc964-f",
            "6f9619ff-8b86-d011-b42d-00c04fc96\u{e9}4",
        ] {
            assert!(!owner_key(other).1, "{other}");
        }
    }

    #[test]
    fn each_field_of_a_request_is_in_its_digest() {
        let one = pb::PlaceBidRequest {
            market: "a/b".into(),
            owner_uid: "c".into(),
            limit_micros: 1,
            quantity: 2,
            min_fill: 3,
            lease_ms: 4,
            expires_at_ms: 5,
            labels: [("k".to_owned(), "v".to_owned())].into(),
            ..pb::PlaceBidRequest::default()
        };
        let again = pb::PlaceBidRequest { idempotency_key: "x".into(), ..one.clone() };
        assert_eq!(body_digest(&one), body_digest(&again), "the key is no part of what is asked");
        let others: [fn(&mut pb::PlaceBidRequest); 9] = [
            |r| r.market.push('c'),
            |r| r.owner_uid.push('d'),
            |r| (r.market, r.owner_uid) = ("a/".into(), "bc".into()),
            |r| r.limit_micros = 9,
            |r| r.quantity = 9,
            |r| r.min_fill = 9,
            |r| r.lease_ms = 9,
            |r| r.expires_at_ms = 9,
            |r| r.labels = [("kv".to_owned(), String::new())].into(),
        ];
        for (n, change) in others.iter().enumerate() {
            let mut other = one.clone();
            change(&mut other);
            assert_ne!(body_digest(&one), body_digest(&other), "change {n}");
        }
    }
}
