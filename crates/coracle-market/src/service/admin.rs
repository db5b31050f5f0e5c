//! Markets, tenants, halts, proofs.

use std::collections::BTreeMap;

use coracle_auction::codec::Codec;
use coracle_auction::{Command, Market, Params, Price, Reply, TenantNo, Time};
use coracle_proto::market as pb;

use super::{Service, check_name, tenant_body, tenant_facts};
use crate::announce::{Known, changes};
use crate::audit;
use crate::caller::{self, Caller, Scope};
use crate::convert;
use crate::error::Problem;
use crate::history::Percentiles;
use crate::recover;
use crate::registry::Kind;
use crate::signed::ms;
use crate::state::MarketState;
use crate::store::{IgnoredRow, JournalVerification, NameRow};
use crate::writer::MARKET_ITSELF;

/// Most commands of one audit, and the default.
const AUDIT_MAX: u32 = 1000;
const AUDIT: u32 = 100;

/// First parameters and first time of a market.
pub(crate) fn start_of(body: &[u8]) -> Option<(Params, Time)> {
    let mut from = body;
    Some((Params::get(&mut from).ok()?, Time::get(&mut from).ok()?))
}

impl Service {
    pub(crate) async fn put_market(
        &self,
        caller: Caller,
        r: &pb::PutMarketRequest,
    ) -> Result<pb::MarketPrice, Problem> {
        check_name("market", &r.market)?;
        if r.market.split('/').count() < 2 || r.market.split('/').any(str::is_empty) {
            return Err(Problem::invalid("market must be <instance type>/<region>"));
        }
        let cap = match r.cap_micros {
            0 => self.list_price(&r.market).ok_or_else(|| {
                Problem::invalid("cap must be above 0: the type has no list price to take instead")
            })?,
            cap => cap,
        };
        let mut params = Params::new(Price::micros(r.reserve_micros), Price::micros(cap));
        let or = |value: i64, default: u64| u64::try_from(value).ok().filter(|v| *v > 0).unwrap_or(default);
        if r.tick_micros > 0 {
            params.tick = Price::micros(r.tick_micros);
        }
        params.call_interval_ms = or(r.call_interval_ms, params.call_interval_ms);
        params.notice_ms = or(r.notice_ms, params.notice_ms);
        if let Some(ms) = r.min_runtime_ms {
            params.min_runtime_ms =
                u64::try_from(ms).map_err(|_| Problem::invalid("min_runtime must not be negative"))?;
        }
        params.check().map_err(|e| Problem::invalid(e.to_string()))?;
        let no = match self.registry.number(Kind::Market, &r.market) {
            None => self.new_market(&r.market, params).await?,
            Some(no) => {
                let asked = u64::try_from(r.effective_at_ms).ok().filter(|at| *at > 0).map(Time);
                self.configure(no, caller, params, asked).await?;
                no
            }
        };
        self.writer.read(no, convert::price)
    }

    /// Changes a market, its prices not before their notice.
    async fn configure(
        &self,
        no: u32,
        caller: Caller,
        params: Params,
        asked: Option<Time>,
    ) -> Result<(), Problem> {
        let (now, known) = self.writer.read(no, |state| {
            let announced = state.market.announced().map(|(at, params)| (at, *params));
            (self.now().max(state.market.now()), Known { params: *state.market.params(), announced })
        })?;
        let commands = changes(&known, params, asked, now)?;
        let applied = self.writer.apply(no, caller.tenant, commands).await?;
        let refused = applied.replies.into_iter().find_map(|reply| match reply {
            Reply::Refused(refusal) => Some(refusal),
            _ => None,
        });
        refused.map_or(Ok(()), |refusal| Err(refusal.into()))
    }

    /// A market that was not there before.
    pub(crate) async fn new_market(&self, name: &str, params: Params) -> Result<u32, Problem> {
        let at = self.now();
        let mut body = Vec::new();
        params.put(&mut body);
        at.put(&mut body);
        let no = self.registry.ensure(Kind::Market, name, &body).await?;
        let state = MarketState {
            name: name.to_owned(),
            market: Market::new(params, at),
            seq: 0,
            chain: [0; 32],
            at_risk: BTreeMap::new(),
            start: (params, at),
            since_snapshot: 0,
            indicated: at,
            percentiles: Percentiles::default(),
        };
        self.writer.add(no, state).await?;
        Ok(no)
    }

    /// A tenant with its cap and rate; with scopes also a token, told this once.
    pub(crate) async fn put_tenant(&self, r: &pb::PutTenantRequest) -> Result<String, Problem> {
        check_name("tenant", &r.tenant)?;
        if r.hourly_cap_micros.is_some_and(|cap| cap < 0) {
            return Err(Problem::invalid("hourly_cap must not be negative"));
        }
        let mut scopes = 0u8;
        for scope in &r.scopes {
            let scope = Scope::parse(scope).ok_or_else(|| Problem::invalid(format!("no scope {scope}")))?;
            scopes |= scope as u8;
        }
        let no = self.registry.ensure(Kind::Tenant, &r.tenant, &[]).await?;
        let body = tenant_body(r.hourly_cap_micros, r.rate);
        self.store
            .put_name(&NameRow { kind: Kind::Tenant as i64, no, name: r.tenant.clone(), body: body.clone() })
            .await?;
        self.registry.set_body(Kind::Tenant, no, body);
        self.take_facts(no).await;
        self.spread_cap(no).await?;
        if scopes == 0 {
            return Ok(String::new());
        }
        let token = caller::new_token();
        let hash = caller::hash(&token);
        self.store.put_token(&hash, no, scopes).await?;
        self.gate.admit(hash, no, scopes);
        Ok(token)
    }

    /// Cap and rate of a tenant from what is stored of it.
    pub(crate) async fn take_facts(&self, tenant: u32) {
        let (cap, rate) = tenant_facts(&self.registry.body(Kind::Tenant, tenant));
        if rate > 0 {
            self.gate.set_rate(tenant, rate);
        }
        let mut caps = self.caps.lock().await;
        let mut capped = self.capped.write();
        match cap {
            Some(cap) => {
                caps.insert(tenant, cap);
                capped.insert(tenant);
            }
            None => {
                caps.remove(&tenant);
                capped.remove(&tenant);
            }
        }
    }

    /// Assigns every market the part of the cap that it uses, in order, cut where the cap ends.
    async fn spread_cap(&self, tenant: u32) -> Result<(), Problem> {
        let caps = self.caps.lock().await;
        let mut left = caps.get(&tenant).copied();
        let no = TenantNo(tenant);
        for market in self.markets() {
            let Some(account) = self.writer.read(market, |state| state.market.account(no))? else { continue };
            let used = i64::try_from(account.committed).unwrap_or(i64::MAX);
            let slice = left.map(|left| used.min(left).max(0));
            left = left.zip(slice).map(|(left, slice)| left - slice);
            let cap = slice.map(Price::micros);
            if account.cap != cap {
                self.writer.apply_one(market, MARKET_ITSELF, Command::Budget { tenant: no, cap }).await?;
            }
        }
        Ok(())
    }

    pub(crate) async fn halt(&self, caller: Caller, market: &str, halted: bool) -> Result<(), Problem> {
        let no = self.market(market)?;
        let command = if halted { Command::Halt } else { Command::Resume };
        self.writer.apply_one(no, caller.tenant, command).await.map(drop)
    }

    pub(crate) async fn snapshot(&self, market: &str) -> Result<(usize, i64), Problem> {
        self.writer.snapshot(self.market(market)?).await
    }

    /// Replays the whole journal of a market beside the running one.
    pub(crate) async fn verify(&self, market: &str) -> Result<JournalVerification, Problem> {
        let no = self.market(market)?;
        let start = self.writer.read(no, |state| state.start)?;
        let verdict = recover::verify(&self.store, no, start).await?;
        if !verdict.sound {
            self.metrics.replay_mismatch.inc();
        }
        Ok(verdict)
    }

    /// Reports of units of a market that were ignored, as far as there are lines of them.
    pub(crate) async fn ignored_in(&self, market: &str) -> Result<u64, Problem> {
        let count = self.store.ignored_in(self.market(market)?).await?;
        Ok(u64::try_from(count).unwrap_or(0))
    }

    /// Commands of a market with who asked for them and what they changed; without a market, what was ignored before it
    /// came to one. Reads a market's journal from the beginning.
    pub(crate) async fn audit(&self, r: &pb::AuditRequest) -> Result<Vec<pb::AuditEntry>, Problem> {
        if r.limit > AUDIT_MAX {
            return Err(Problem::invalid(format!("limit must be at most {AUDIT_MAX}")));
        }
        let count = i64::from(if r.limit == 0 { AUDIT } else { r.limit });
        let from = i64::try_from(r.from_seq.max(1)).map_err(|_| Problem::invalid("from_seq is too large"))?;
        if r.market.is_empty() {
            let rows = self.store.ignored(from, count).await?;
            return Ok(rows.into_iter().map(|row| self.ignored_entry(row)).collect());
        }
        let no = self.market(&r.market)?;
        let start = self.writer.read(no, |state| state.start)?;
        let told = audit::audit(&self.store, no, start, from..from.saturating_add(count)).await?;
        let entry = |t: audit::Told| pb::AuditEntry {
            seq: u64::try_from(t.seq).unwrap_or(0),
            at_ms: ms(t.at),
            who: if t.who == MARKET_ITSELF { String::new() } else { self.registry.name(Kind::Tenant, t.who) },
            what: t.what.into(),
            subject: t.subject,
            before: t.before,
            after: t.after,
            refused: t.refused.map_or_else(String::new, |refusal| refusal.to_string()),
        };
        Ok(told.into_iter().map(entry).collect())
    }

    fn ignored_entry(&self, row: IgnoredRow) -> pb::AuditEntry {
        let more = match row.unwritten {
            0 => String::new(),
            more => format!(", and {more} before it that have no line"),
        };
        pb::AuditEntry {
            seq: u64::try_from(row.no).unwrap_or(0),
            at_ms: row.at,
            who: self.registry.name(Kind::Tenant, row.who),
            what: "report".into(),
            subject: row.subject,
            refused: format!("{} of an allocation that is unknown or another supplier's{more}", row.report),
            ..pb::AuditEntry::default()
        }
    }
}
