//! Administration: markets, tenants, halts, verification and audit of journals.

use std::collections::BTreeMap;

use coracle_auction::codec::Codec;
use coracle_auction::{Command, Market, Params, Price, Reply, Time};
use coracle_proto::market as pb;

use super::{Service, check_name, tenant_body, tenant_facts};
use crate::announce::{Known, changes};
use crate::audit;
use crate::caller::{self, Caller, Scope};
use crate::convert;
use crate::error::RequestError;
use crate::history::Percentiles;
use crate::registry::Kind;
use crate::signed::ms;
use crate::state::MarketState;
use crate::store::{JournalVerification, NameRow};
use crate::verify::verify;
use crate::writer::MARKET_ITSELF;

/// Most commands of one audit, and the default number.
const AUDIT_MAX: u32 = 1000;
const AUDIT: u32 = 100;

/// Decodes the first parameters and the start time of a market.
pub(crate) fn start_of(body: &[u8]) -> Option<(Params, Time)> {
    let mut from = body;
    Some((Params::get(&mut from).ok()?, Time::get(&mut from).ok()?))
}

impl Service {
    pub(crate) async fn put_market(
        &self,
        caller: Caller,
        r: &pb::PutMarketRequest,
    ) -> Result<pb::MarketPrice, RequestError> {
        check_name("market", &r.market)?;
        if r.market.split('/').count() < 2 || r.market.split('/').any(str::is_empty) {
            return Err(RequestError::invalid("market must be <instance type>/<region>"));
        }
        let cap = match r.cap_micros {
            0 => self.list_price(&r.market).ok_or_else(|| {
                RequestError::invalid("cap must be above 0: the type has no list price to take instead")
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
                u64::try_from(ms).map_err(|_| RequestError::invalid("min_runtime must not be negative"))?;
        }
        params.check().map_err(|e| RequestError::invalid(e.to_string()))?;
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

    /// Reconfigures a market; its prices change only after their notice.
    async fn configure(
        &self,
        no: u32,
        caller: Caller,
        params: Params,
        asked: Option<Time>,
    ) -> Result<(), RequestError> {
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

    /// Creates a market.
    pub(crate) async fn new_market(&self, name: &str, params: Params) -> Result<u32, RequestError> {
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
            percentiles: Percentiles::default(),
        };
        self.writer.add(no, state).await?;
        Ok(no)
    }

    /// Creates or changes a tenant with its cap and rate. With scopes, also creates a token, which is returned only here.
    pub(crate) async fn put_tenant(&self, r: &pb::PutTenantRequest) -> Result<String, RequestError> {
        check_name("tenant", &r.tenant)?;
        if r.hourly_cap_micros.is_some_and(|cap| cap < 0) {
            return Err(RequestError::invalid("hourly_cap must not be negative"));
        }
        let mut scopes = 0u8;
        for scope in &r.scopes {
            let scope =
                Scope::parse(scope).ok_or_else(|| RequestError::invalid(format!("no scope {scope}")))?;
            scopes |= scope as u8;
        }
        let no = self.registry.ensure(Kind::Tenant, &r.tenant, &[]).await?;
        let (cap, rate) = tenant_facts(&self.registry.body(Kind::Tenant, no));
        let cap = if r.no_cap { None } else { r.hourly_cap_micros.or(cap) };
        let rate = match r.rate {
            _ if r.default_rate => 0,
            0 => rate,
            other => other,
        };
        let body = tenant_body(cap, rate);
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

    /// All tokens, or those of one tenant, without their secrets.
    pub(crate) fn tokens(&self, tenant: &str) -> Result<Vec<pb::Token>, RequestError> {
        let only = match tenant {
            "" => None,
            name => Some(self.registry.number(Kind::Tenant, name).ok_or_else(RequestError::not_found)?),
        };
        let all = self.gate.tokens().into_iter();
        Ok(all
            .filter(|(_, caller)| only.is_none_or(|only| only == caller.tenant))
            .map(|(hash, caller)| pb::Token {
                id: token_id(&hash),
                tenant: self.registry.name(Kind::Tenant, caller.tenant),
                scopes: Scope::ALL
                    .into_iter()
                    .filter(|s| caller.may(*s))
                    .map(|s| s.as_str().into())
                    .collect(),
            })
            .collect())
    }

    /// Revokes a token. The token of the command line is not stored and cannot be revoked.
    pub(crate) async fn revoke(&self, id: &str) -> Result<(), RequestError> {
        let found = self.gate.tokens().into_iter().find(|(hash, _)| token_id(hash) == id);
        let (hash, _) = found.ok_or_else(RequestError::not_found)?;
        self.store.delete_token(&hash).await?;
        self.gate.refuse(&hash);
        Ok(())
    }

    /// Applies the stored cap and rate of a tenant.
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

    pub(crate) async fn halt(&self, caller: Caller, market: &str, halted: bool) -> Result<(), RequestError> {
        let no = self.market(market)?;
        let command = if halted { Command::Halt } else { Command::Resume };
        self.writer.apply_one(no, caller.tenant, command).await.map(drop)
    }

    pub(crate) async fn snapshot(&self, market: &str) -> Result<(usize, i64), RequestError> {
        self.writer.snapshot(self.market(market)?).await
    }

    /// Replays the whole journal of a market beside the running market, and verifies it.
    pub(crate) async fn verify(&self, market: &str) -> Result<JournalVerification, RequestError> {
        let no = self.market(market)?;
        let (start, applied) = self.writer.read(no, |state| (state.start, state.seq))?;
        let verdict = verify(&self.store, no, start, applied).await?;
        if !verdict.sound {
            self.metrics.replay_mismatch.inc();
        }
        Ok(verdict)
    }

    /// Lists commands of a market, with the tenants that sent them and their effects. Reads the journal from the beginning.
    pub(crate) async fn audit(&self, r: &pb::AuditRequest) -> Result<Vec<pb::AuditEntry>, RequestError> {
        if r.limit > AUDIT_MAX {
            return Err(RequestError::invalid(format!("limit must be at most {AUDIT_MAX}")));
        }
        let count = i64::from(if r.limit == 0 { AUDIT } else { r.limit });
        let from =
            i64::try_from(r.from_seq.max(1)).map_err(|_| RequestError::invalid("from_seq is too large"))?;
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
}

/// Public id of a token: the beginning of its hash.
fn token_id(hash: &[u8; 32]) -> String {
    hex::encode(&hash[..8])
}
