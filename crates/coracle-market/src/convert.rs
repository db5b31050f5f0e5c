//! Conversion between types of the engine and messages of the API.

use coracle_auction::{
    Allocation, AllocationId, AllocationState, Bid, BidId, BidState, EndReason, LotState, OwnerKey, Price,
    Stage, Standing,
};
use coracle_proto::market as pb;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::history::Bar;
use crate::names;
use crate::registry::{Kind, Registry};
use crate::signed::ms;
use crate::state::MarketState;

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

fn bid_state(state: BidState) -> pb::BidState {
    match state {
        BidState::Pending => pb::BidState::Pending,
        BidState::Matched => pb::BidState::Matched,
        BidState::Provisioning => pb::BidState::Provisioning,
        BidState::Active => pb::BidState::Active,
        BidState::Preempting => pb::BidState::Preempting,
        BidState::Ended => pb::BidState::Ended,
        BidState::Cancelled => pb::BidState::Cancelled,
        BidState::Expired => pb::BidState::Expired,
    }
}

fn allocation_state(state: AllocationState) -> pb::AllocationState {
    match state {
        AllocationState::Matched => pb::AllocationState::Matched,
        AllocationState::Provisioning => pb::AllocationState::Provisioning,
        AllocationState::Active => pb::AllocationState::Active,
        AllocationState::Preempting => pb::AllocationState::Preempting,
        AllocationState::Ended => pb::AllocationState::Ended,
    }
}

fn stage(stage: Stage) -> pb::AllocationStage {
    match stage {
        Stage::Ordered => pb::AllocationStage::Ordered,
        Stage::Launched => pb::AllocationStage::Launched,
        Stage::Registered => pb::AllocationStage::Registered,
    }
}

pub(crate) fn lot_state(state: LotState) -> pb::LotState {
    match state {
        LotState::Open => pb::LotState::Open,
        LotState::Silent => pb::LotState::Silent,
        LotState::Draining => pb::LotState::Draining,
        LotState::Lost => pb::LotState::Lost,
    }
}

fn truncate_digest(digest: &[u8]) -> [u8; 16] {
    digest.first_chunk().copied().unwrap_or([0; 16])
}

/// Bytes of a UUID in its usual form in lower case. Only this form can be restored from the bytes.
fn uuid(text: &str) -> Option<[u8; 16]> {
    let uuid = Uuid::try_parse(text).ok()?;
    (uuid.hyphenated().encode_lower(&mut Uuid::encode_buffer()) == text).then(|| uuid.into_bytes())
}

/// Key of an owner: the bytes of a UUID, or the digest of any other name. The flag says whether it is a UUID.
pub(crate) fn owner_key(uid: &str) -> (OwnerKey, bool) {
    match uuid(uid) {
        Some(key) => (OwnerKey(key), true),
        None => (OwnerKey(truncate_digest(&Sha256::digest(uid.as_bytes()))), false),
    }
}

pub(crate) fn owner_uid(registry: &Registry, key: OwnerKey) -> String {
    registry.owner(&key.0).unwrap_or_else(|| {
        let hex = format!("{:032x}", u128::from_be_bytes(key.0));
        [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]].join("-")
    })
}

/// Digest of a tenant's idempotency key; never all zero, which means that there is none.
pub(crate) fn key_digest(tenant: u32, key: &str) -> [u8; 16] {
    if key.is_empty() {
        return [0; 16];
    }
    let digest = Sha256::new_with_prefix(tenant.to_le_bytes()).chain_update(key.as_bytes()).finalize();
    let mut digest = truncate_digest(&digest);
    digest[15] |= 1;
    digest
}

/// Digest of a request without its key, so that retries of one request are equal. A tenant can construct two requests with the
/// same digest (FNV-1a, 64 bits). Then the reply to the first is replayed, which affects no other tenant.
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
        // The length is included, so that different lists of texts never have the same bytes.
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

pub(crate) fn price(state: &MarketState) -> pb::MarketPrice {
    let (q, params) = (state.market.quotes(), state.market.params());
    let [p20_micros, p50_micros, p80_micros] = state.percentiles.get().map_or([None; 3], |all| all.map(Some));
    let next = state.market.announced();
    pb::MarketPrice {
        market: state.name.clone(),
        quote_micros: q.quote.as_micros(),
        clearing_micros: q.clearing.as_micros(),
        indicative_micros: q.indicative.as_micros(),
        reserve_micros: q.reserve.as_micros(),
        cap_micros: q.cap.as_micros(),
        free: q.free as u64,
        as_of_ms: ms(q.as_of),
        seq: u64::try_from(state.seq).unwrap_or(0),
        halted: q.halted,
        tick_micros: params.tick.as_micros(),
        next_call_ms: ms(state.market.next_call()),
        p20_micros,
        p50_micros,
        p80_micros,
        next_reserve_micros: next.map_or(0, |(_, params)| params.reserve.as_micros()),
        next_cap_micros: next.map_or(0, |(_, params)| params.cap.as_micros()),
        next_from_ms: next.map_or(0, |(at, _)| ms(at)),
    }
}

pub(crate) fn bid(no: u32, state: &MarketState, registry: &Registry, id: BidId, row: &Bid) -> pb::Bid {
    let (tenant, owner) = state.market.owner_of(row);
    let u = row.units();
    pb::Bid {
        bid: names::bid(no, row.placed_at(), id),
        market: state.name.clone(),
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

pub(crate) fn allocation(
    no: u32,
    state: &MarketState,
    registry: &Registry,
    id: AllocationId,
    row: &Allocation,
) -> pb::Allocation {
    let bid = state.market.bid_of(row);
    let placed = state.market.bid(bid);
    let (tenant, owner) = placed.map_or_else(Default::default, |placed| state.market.owner_of(placed));
    let at = |time: Option<coracle_auction::Time>| time.map_or(0, ms);
    pb::Allocation {
        allocation: names::allocation(no, row.matched_at(), id),
        bid: placed.map_or_else(String::new, |placed| names::bid(no, placed.placed_at(), bid)),
        market: state.name.clone(),
        tenant: registry.name(Kind::Tenant, tenant.0),
        owner_uid: owner_uid(registry, owner),
        lot: lot_name(registry, row.slot().0.0),
        unit: row.slot().1,
        state: allocation_state(row.state()).into(),
        limit_micros: row.limit().as_micros(),
        price_micros: state.market.price(id).unwrap_or(Price::ZERO).as_micros(),
        matched_at_ms: ms(row.matched_at()),
        active_at_ms: at(row.active_at()),
        protected_until_ms: at(row.protected_until()),
        preempt_at_ms: at(row.preempt_at()),
        ended_at_ms: at(row.ended_at()),
        node: row.node().unwrap_or_default().into(),
        reason: row.reason().map_or("", EndReason::as_str).into(),
        price_to_keep_micros: state.at_risk.get(&id).map_or(0, |price| price.as_micros()),
        stage: match row.state() {
            AllocationState::Provisioning => stage(row.stage()).into(),
            _ => 0,
        },
    }
}

/// Stored name of a lot: `<market no> <supplier no> <name>`, so that equal names of two suppliers differ.
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
    fn owner_key_is_verbatim_only_for_a_canonical_uuid() {
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
    fn request_digest_covers_all_fields_but_idempotency_key() {
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
        assert_eq!(body_digest(&one), body_digest(&again), "the key is not part of the digest");
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
