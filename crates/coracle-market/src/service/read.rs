//! Public data: prices, history, advice.

use coracle_auction::{Hypothetical, Price, TenantNo, Time, advise};
use coracle_proto::market as pb;

use super::Service;
use crate::caller::Caller;
use crate::convert;
use crate::error::RequestError;
use crate::history::{KEPT_MS, merge_bars, smallest_step};
use crate::signed::saturating_i64;

/// Most points of one history answer.
const POINTS_MAX: i64 = 10_000;
/// Period that advice is based on, in milliseconds.
const ADVICE_MS: u64 = 30 * 24 * 3600 * 1000;

impl Service {
    pub(crate) fn prices(&self) -> Result<Vec<pb::MarketPrice>, RequestError> {
        self.markets().into_iter().map(|no| self.writer.read(no, convert::price)).collect()
    }

    /// Price of a type in a region. Without a region: the default region, otherwise the market with free units, then the lowest
    /// quote, then the first by name.
    pub(crate) fn price(&self, instance_type: &str, region: &str) -> Result<pb::MarketPrice, RequestError> {
        let region =
            if region.is_empty() { self.default_region.as_deref().unwrap_or_default() } else { region };
        if !region.is_empty() {
            let no = self.market(&format!("{instance_type}/{region}"))?;
            return self.writer.read(no, convert::price);
        }
        let prefix = format!("{instance_type}/");
        let mut found: Vec<_> =
            self.prices()?.into_iter().filter(|p| p.market.starts_with(&prefix)).collect();
        found.sort_by(|a, b| {
            (a.free == 0, a.quote_micros, &a.market).cmp(&(b.free == 0, b.quote_micros, &b.market))
        });
        let unknown = || RequestError::new(404, "UNKNOWN_MARKET", format!("no market for {instance_type}"));
        found.into_iter().next().ok_or_else(unknown)
    }

    pub(crate) fn book(&self, market: &str) -> Result<pb::Book, RequestError> {
        let depth = self.writer.read(self.market(market)?, |state| state.market.depth())?;
        Ok(pb::Book { bands: depth.bands.to_vec(), units: depth.units })
    }

    pub(crate) async fn history(
        &self,
        r: &pb::GetPriceHistoryRequest,
    ) -> Result<pb::PriceHistory, RequestError> {
        let no = self.market(&r.market)?;
        let now = saturating_i64(self.now().0);
        let to = if r.to_ms == 0 { now + 1 } else { r.to_ms };
        // No data is older.
        let from = if r.from_ms == 0 { now - KEPT_MS } else { r.from_ms };
        let (span, step) = (to.saturating_sub(from).max(0), r.step_ms.max(0));
        let too_many = || {
            let fits = smallest_step(span, POINTS_MAX);
            RequestError::invalid_field(
                "step",
                format!("more than {POINTS_MAX} points; a step of {fits} ms fits"),
            )
        };
        if step > 0 && span / step > POINTS_MAX {
            return Err(too_many());
        }
        let bars = merge_bars(self.store.bars(no, (from, to)).await?, step);
        if bars.len() > usize::try_from(POINTS_MAX).unwrap_or(usize::MAX) {
            return Err(too_many());
        }
        Ok(pb::PriceHistory { bars: bars.into_iter().map(convert::bar).collect() })
    }

    pub(crate) async fn advise(&self, r: &pb::AdviseRequest) -> Result<pb::Advice, RequestError> {
        let no = self.market(&r.market)?;
        let now = self.now();
        let from = saturating_i64(now.0.saturating_sub(ADVICE_MS));
        let bars = self.store.bars(no, (from, i64::MAX)).await?;
        let time = |at| Time(u64::try_from(at).unwrap_or(0));
        let history: Vec<_> = bars.iter().map(|bar| (time(bar.at), Price::micros(bar.high))).collect();
        let window =
            u64::try_from(r.window_ms).map_err(|_| RequestError::invalid("window must not be negative"))?;
        let short = || RequestError::new(409, "NO_HISTORY", "the history is shorter than one window");
        let advice = advise(&history, now, window, r.survive_permille).ok_or_else(short)?;
        Ok(pb::Advice { limit_micros: advice.limit.as_micros(), samples: advice.samples as u64 })
    }

    pub(crate) async fn simulate(
        &self,
        caller: Caller,
        r: &pb::SimulateRequest,
    ) -> Result<pb::Simulation, RequestError> {
        let no = self.market(&r.market)?;
        let tenant = TenantNo(self.tenant(caller, &r.tenant).await?);
        let (units, min_fill) = (r.quantity.max(1), r.min_fill);
        let bid = Hypothetical { tenant, limit: Price::micros(r.limit_micros), units, min_fill };
        let s = self.writer.read(no, |state| state.market.simulate(&bid))?;
        Ok(pb::Simulation {
            at_once: s.at_once,
            at_call: s.at_call,
            pays_micros: s.pays.as_micros(),
            clearing_micros: s.clearing.as_micros(),
            displaced: s.preempted,
            wins_at_micros: s.wins_at.map(Price::as_micros),
        })
    }
}
