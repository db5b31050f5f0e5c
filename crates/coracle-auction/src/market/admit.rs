//! Placing bids, and leases.

use super::Market;
use crate::bid::{Bid, Extra, Owner, Units};
use crate::book::Entry;
use crate::slab::Link;
use crate::timers::Timer;
use crate::{
    BidRequest, Event, OwnerKey, Price, QUANTITY_MAX, Rejection, Reply, TENANT_UNITS_MAX, TenantNo, Time,
};

impl Market {
    pub(super) fn place(&mut self, p: &BidRequest) -> Result<Reply, Rejection> {
        let known = self.known_owner(p.tenant, p.owner);
        if p.key != [0; 16]
            && let Some(place) = self.keys.find(&p.key, &self.bids)
        {
            return self.replay(place, known, p.body);
        }
        match known {
            Some(owner) => self.check_version(owner, p.if_owner_version)?,
            None if p.if_owner_version.unwrap_or(0) != 0 => {
                return Err(Rejection::OwnerVersion { current: 0 });
            }
            None => {}
        }
        if self.halted {
            return Err(Rejection::Halted);
        }
        let (quantity, min_fill) = self.check_placement(p)?;
        // The bid is accepted; only now an unknown tenant or owner gets a row.
        let (tenant, owner) = self.ensure_owner(p.tenant, p.owner);
        let bid = Bid {
            key: p.key,
            body: p.body,
            limit: p.limit,
            seq: self.take_seq(),
            placed_at: self.now,
            renewed_at: self.now,
            due: Time::NEVER,
            more: extra_of(p),
            tenant,
            owner,
            filed: 0,
            newest: Link::default(),
            lease_ms: p.lease_ms,
            min_fill,
            units: Units { open: quantity, ..Units::default() },
            held: false,
            closed: false,
        };
        let place = self.bids.insert(bid);
        if p.key != [0; 16] {
            self.keys.insert(place, &p.key);
        }
        self.file(owner, place);
        self.tenants.at_mut(tenant).units += u64::from(quantity);
        self.arm_lease(place);
        self.open_or_hold(place);
        self.emit_bid(place);
        let owner_version = self.raise_version(owner);
        let below_reserve = p.limit < self.params.reserve;
        Ok(Reply::Bid { bid: self.bid_id(place), owner_version, replayed: false, below_reserve })
    }

    /// Replies to a request whose key was used before: with the same bid if the request is the same.
    fn replay(&self, place: u32, owner: Option<u32>, body: u64) -> Result<Reply, Rejection> {
        let bid = self.bids.at(place).ok_or(Rejection::NotFound)?;
        if bid.body != body || Some(bid.owner) != owner {
            return Err(Rejection::IdempotencyConflict);
        }
        Ok(Reply::Bid {
            bid: self.bid_id(place),
            owner_version: self.owners[bid.owner as usize].version,
            replayed: true,
            below_reserve: bid.limit < self.params.reserve,
        })
    }

    fn check_placement(&self, p: &BidRequest) -> Result<(u16, u16), Rejection> {
        self.check_limit(p.limit)?;
        if p.quantity == 0 || p.quantity > QUANTITY_MAX {
            return Err(Rejection::Invalid { field: "quantity", range: "from 1 to 10000" });
        }
        if p.min_fill > p.quantity {
            return Err(Rejection::Invalid { field: "min_fill", range: "at most the quantity" });
        }
        if p.lease_ms < 1000 {
            return Err(Rejection::Invalid { field: "lease", range: "at least one second" });
        }
        let units = self.tenants.index(p.tenant).map_or(0, |tenant| self.tenants.at(tenant).units);
        if units + u64::from(p.quantity) > TENANT_UNITS_MAX {
            return Err(Rejection::Quota);
        }
        let small = |n: u32| u16::try_from(n).map_err(|_| Rejection::Quota);
        Ok((small(p.quantity)?, small(p.min_fill)?))
    }

    pub(super) fn check_limit(&self, limit: Price) -> Result<(), Rejection> {
        if limit <= Price::ZERO || limit > Price::MAX {
            return Err(Rejection::Invalid { field: "limit", range: "above 0 and at most 1000000" });
        }
        if !limit.on_tick(self.params.tick) {
            return Err(Rejection::Invalid { field: "limit", range: "a multiple of the tick" });
        }
        Ok(())
    }

    /// Row of an owner.
    fn known_owner(&self, no: TenantNo, key: OwnerKey) -> Option<u32> {
        // Consecutive bids often have the same owner.
        if let Some(row) = self.owners.get(self.last_owner as usize)
            && row.key == key
            && self.tenants.at(row.tenant).no == no
        {
            return Some(self.last_owner);
        }
        self.owner_index.get(&(self.tenants.index(no)?, key)).copied()
    }

    /// Returns the rows of a tenant and of one of its owners, and creates missing ones.
    fn ensure_owner(&mut self, no: TenantNo, key: OwnerKey) -> (u32, u32) {
        if let Some(owner) = self.known_owner(no, key) {
            self.last_owner = owner;
            return (self.owners[owner as usize].tenant, owner);
        }
        let tenant = self.tenants.ensure(no);
        let owner = *self.owner_index.entry((tenant, key)).or_insert_with(|| {
            self.owners.push(Owner { key, tenant, version: 0, renewed_at: Time(0) });
            self.by_owner.push(Vec::new());
            u32::try_from(self.owners.len() - 1).unwrap_or(u32::MAX)
        });
        self.last_owner = owner;
        (tenant, owner)
    }

    /// Adds a bid to the list of its owner.
    pub(super) fn file(&mut self, owner: u32, place: u32) {
        let own = &mut self.by_owner[owner as usize];
        let filed = u32::try_from(own.len()).unwrap_or(u32::MAX);
        own.push(place);
        let bid = self.row(place);
        bid.filed = filed;
        let (tenant, over) = (bid.tenant, bid.is_terminal());
        let tenant = self.tenants.at_mut(tenant);
        if tenant.cap.is_some() && !over {
            tenant.unfinished.insert(place);
        }
    }

    /// Removes a bid from the list of its owner. The last bid of the list takes its index.
    pub(super) fn unfile(&mut self, place: u32) {
        let bid = self.row(place);
        let (owner, filed) = (bid.owner, bid.filed);
        let own = &mut self.by_owner[owner as usize];
        own.swap_remove(filed as usize);
        if let Some(moved) = own.get(filed as usize).copied() {
            self.row(moved).filed = filed;
        }
    }

    pub(super) fn check_version(&self, owner: u32, wanted: Option<u64>) -> Result<(), Rejection> {
        let current = self.owners[owner as usize].version;
        match wanted {
            Some(version) if version != current => Err(Rejection::OwnerVersion { current }),
            _ => Ok(()),
        }
    }

    pub(super) fn raise_version(&mut self, owner: u32) -> u64 {
        let row = &mut self.owners[owner as usize];
        row.version += 1;
        let (version, key, tenant) = (row.version, row.key, row.tenant);
        let tenant = self.tenants.at(tenant).no;
        self.out.push(Event::Owner { tenant, owner: key, version });
        version
    }

    pub(super) fn take_seq(&mut self) -> u64 {
        let seq = self.next_seq;
        self.next_seq += 1;
        seq
    }

    /// Puts all open units of a bid into the book, or holds the bid if the cap does not cover it.
    pub(super) fn open_or_hold(&mut self, place: u32) {
        let bid = self.row(place);
        let (tenant, seq) = (bid.tenant, bid.seq);
        let cost = i128::from(bid.limit.as_micros()) * i128::from(bid.units.open);
        if bid.units.open == 0 {
            bid.held = false;
            return;
        }
        if self.covers(tenant, cost, Some(place)) {
            self.row(place).held = false;
            self.list(place);
        } else {
            self.row(place).held = true;
            self.tenants.at_mut(tenant).held.insert((seq, place));
        }
    }

    /// Puts the open units of a bid into the book.
    pub(super) fn list(&mut self, place: u32) {
        let bid = self.row(place);
        let (tenant, limit, is_block) = (bid.tenant, bid.limit, bid.min_fill > 1);
        let entry = |units| Entry { bid: place, units, is_block };
        if bid.more.is_none() {
            let (seq, units) = (bid.seq, bid.units.open);
            if units > 0 {
                self.book.insert(tenant, self.rank(limit, seq), entry(units), self.params.cap);
            }
            return;
        }
        let segments: Vec<_> = bid.segments().collect();
        for (seq, units) in segments {
            self.book.insert(tenant, self.rank(limit, seq), entry(units), self.params.cap);
        }
    }

    /// Takes the open units of a bid out of the book.
    pub(super) fn unlist(&mut self, place: u32) {
        let bid = self.row(place);
        let (tenant, limit) = (bid.tenant, bid.limit);
        let segments: Vec<_> = bid.segments().collect();
        for (seq, _) in segments {
            self.book.remove(tenant, self.rank(limit, seq), self.params.cap);
        }
    }

    /// Processes the heartbeat of an owner: the leases of all its bids start again.
    pub(super) fn renew(&mut self, tenant: TenantNo, owner: OwnerKey) -> Result<(), Rejection> {
        let now = self.now;
        let tenant = self.tenants.index(tenant).ok_or(Rejection::NotFound)?;
        let owner = *self.owner_index.get(&(tenant, owner)).ok_or(Rejection::NotFound)?;
        self.owners[owner as usize].renewed_at = now;
        Ok(())
    }

    pub(super) fn arm_lease(&mut self, place: u32) {
        let bid = self.row(place);
        let (owner, old) = (bid.owner, bid.due);
        let renewed = self.owners[owner as usize].renewed_at.max(self.restarted_at);
        let bid = self.row(place);
        let due = bid.lapses_at(renewed);
        bid.due = due;
        if old != Time::NEVER {
            self.timers.unset(old, Timer::Lease(place));
        }
        self.timers.set(due, Timer::Lease(place));
    }

    /// Handles an expired lease timer: sets it again if the lease was renewed, otherwise ends the open units.
    pub(super) fn lapse(&mut self, place: u32) {
        let now = self.now;
        let owner = self.row(place).owner;
        let renewed = self.owners[owner as usize].renewed_at.max(self.restarted_at);
        let bid = self.row(place);
        bid.due = Time::NEVER;
        let due = bid.lapses_at(renewed);
        if due > now {
            bid.due = due;
            return self.timers.set(due, Timer::Lease(place));
        }
        let open = bid.units.open;
        if open > 0 {
            self.close_open(place);
            self.row(place).units.expired += open;
            self.emit_bid(place);
        }
        let lease = u64::from(self.row(place).lease_ms);
        if !self.finish_bid(place) {
            // Units that still run may return to the book.
            let due = now.plus_ms(lease);
            self.row(place).due = due;
            self.timers.set(due, Timer::Lease(place));
        }
    }
}

fn extra_of(p: &BidRequest) -> Option<Box<Extra>> {
    if p.labels.is_empty() && p.expires_at.is_none() {
        return None;
    }
    Some(Box::new(Extra { expires_at: p.expires_at, labels: p.labels.clone(), ..Extra::default() }))
}
