//! API messages as JSON: prices are decimal strings, never numbers.

use coracle_auction::Price;
use coracle_proto::market as pb;
use serde_json::{Value, json};

fn dollars(micros: i64) -> String {
    Price::micros(micros).to_string()
}

pub(crate) fn price(p: &pb::MarketPrice) -> Value {
    json!({
        "market": p.market, "quote": dollars(p.quote_micros), "clearing": dollars(p.clearing_micros),
        "indicative": dollars(p.indicative_micros), "reserve": dollars(p.reserve_micros),
        "cap": dollars(p.cap_micros), "tick": dollars(p.tick_micros), "free": p.free, "asOfMs": p.as_of_ms,
        "seq": p.seq, "halted": p.halted, "nextCallMs": p.next_call_ms,
        "p20": p.p20_micros.map(dollars), "p50": p.p50_micros.map(dollars), "p80": p.p80_micros.map(dollars),
        "next": (p.next_from_ms > 0).then(|| json!({
            "reserve": dollars(p.next_reserve_micros), "cap": dollars(p.next_cap_micros), "fromMs": p.next_from_ms,
        })),
    })
}

pub(crate) fn price_frame(frame: &pb::PriceFrame) -> Value {
    json!({
        "seq": frame.seq, "market": frame.market, "type": frame.r#type,
        "price": frame.price.as_ref().map(price),
    })
}

pub(crate) fn bar(b: &pb::PriceBar) -> Value {
    json!({
        "atMs": b.at_ms, "open": dollars(b.open_micros), "high": dollars(b.high_micros),
        "low": dollars(b.low_micros), "close": dollars(b.close_micros), "calls": b.calls,
    })
}

pub(crate) fn reply(r: &pb::BidReply) -> Value {
    json!({
        "bid": r.bid, "ownerVersion": r.owner_version, "replayed": r.replayed,
        "belowReserve": r.below_reserve, "atMs": r.at_ms,
    })
}

pub(crate) fn bid(b: &pb::Bid) -> Value {
    json!({
        "bid": b.bid, "market": b.market, "tenant": b.tenant, "ownerUid": b.owner_uid,
        "limit": dollars(b.limit_micros), "quantity": b.quantity, "minFill": b.min_fill, "state": pb::BidState::word(b.state),
        "units": {
            "open": b.open, "matched": b.matched, "provisioning": b.provisioning, "active": b.active,
            "preempting": b.preempting, "ended": b.ended, "cancelled": b.cancelled, "expired": b.expired,
        },
        "placedAtMs": b.placed_at_ms, "hold": b.hold, "labels": b.labels,
    })
}

pub(crate) fn allocation(a: &pb::Allocation) -> Value {
    json!({
        "allocation": a.allocation, "bid": a.bid, "market": a.market, "tenant": a.tenant,
        "ownerUid": a.owner_uid, "lot": a.lot, "unit": a.unit, "state": pb::AllocationState::word(a.state),
        "limit": dollars(a.limit_micros), "price": dollars(a.price_micros), "matchedAtMs": a.matched_at_ms,
        "activeAtMs": a.active_at_ms, "protectedUntilMs": a.protected_until_ms, "preemptAtMs": a.preempt_at_ms,
        "endedAtMs": a.ended_at_ms, "node": a.node, "reason": a.reason,
        "priceToKeep": dollars(a.price_to_keep_micros),
    })
}

pub(crate) fn explanation(e: &pb::Explanation) -> Value {
    json!({
        "text": e.text, "standing": e.standing, "rank": e.rank, "of": e.of, "sold": e.sold,
        "clearing": dollars(e.clearing_micros), "limit": dollars(e.limit_micros),
        "winsAt": e.wins_at_micros.map(dollars), "call": e.call,
    })
}

pub(crate) fn charge(c: &pb::Charge) -> Value {
    json!({
        "allocation": c.allocation, "fromMs": c.from_ms, "toMs": c.to_ms, "price": dollars(c.price_micros),
        "reason": c.reason,
    })
}
