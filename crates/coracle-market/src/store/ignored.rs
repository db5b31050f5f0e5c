//! Rows of ignored reports, limited in number.

use super::{Store, number, sql};
use crate::error::StoreError;

/// Most rows; older ones are deleted.
const KEPT: i64 = 10_000;

/// A report that changed nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct IgnoredRow {
    /// Number of the line, from 1.
    pub(crate) no: i64,
    pub(crate) at: i64,
    /// The tenant whose token it was.
    pub(crate) who: u32,
    /// The market that the name says; 0: none that is there.
    pub(crate) market: u32,
    pub(crate) report: String,
    /// Name that it gave for the allocation.
    pub(crate) subject: String,
    /// Reports of the same tenant since its line before that have none.
    pub(crate) unwritten: i64,
}

type Row = (i64, i64, i64, i64, String, String, i64);

impl Store {
    /// Writes a line, in the place of the one that is too old.
    pub(crate) async fn put_ignored(&self, row: &IgnoredRow) -> Result<(), StoreError> {
        const PUT: &str = "INSERT INTO ignored (place, no, at, who, market, report, subject, unwritten) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT (place) DO UPDATE SET no = excluded.no, at = excluded.at, who = excluded.who, market = excluded.market, report = excluded.report, subject = excluded.subject, unwritten = excluded.unwritten";
        on!(self, pool, write => sqlx::query(PUT)
            .bind(row.no % KEPT).bind(row.no).bind(row.at).bind(i64::from(row.who)).bind(i64::from(row.market))
            .bind(&row.report[..]).bind(&row.subject[..]).bind(row.unwritten).execute(pool).await.map(drop))
        .map_err(sql("write down an ignored report"))
    }

    /// Number of the last line; 0: there is none.
    pub(crate) async fn last_ignored(&self) -> Result<i64, StoreError> {
        let last: Option<i64> = on!(self, pool, read =>
            sqlx::query_scalar("SELECT max(no) FROM ignored").fetch_one(pool).await)
        .map_err(sql("read ignored reports"))?;
        Ok(last.unwrap_or(0))
    }

    /// Lines from a number on, in order.
    pub(crate) async fn ignored(&self, from: i64, most: i64) -> Result<Vec<IgnoredRow>, StoreError> {
        const READ: &str = "SELECT no, at, who, market, report, subject, unwritten FROM ignored WHERE no >= $1 ORDER BY no LIMIT $2";
        let rows: Vec<Row> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(from).bind(most).fetch_all(pool).await)
        .map_err(sql("read ignored reports"))?;
        Ok(rows.into_iter().map(line).collect())
    }

    /// Number of rows of an allocation, and the last one.
    pub(crate) async fn ignored_of(&self, subject: &str) -> Result<Option<(i64, IgnoredRow)>, StoreError> {
        const COUNT: &str = "SELECT count(*) FROM ignored WHERE subject = $1";
        const LAST: &str = "SELECT no, at, who, market, report, subject, unwritten FROM ignored WHERE subject = $1 ORDER BY no DESC LIMIT 1";
        const OP: &str = "read ignored reports";
        let last: Option<Row> = on!(self, pool, read =>
            sqlx::query_as(LAST).bind(subject).fetch_optional(pool).await)
        .map_err(sql(OP))?;
        let Some(last) = last else { return Ok(None) };
        let count: i64 = on!(self, pool, read =>
            sqlx::query_scalar(COUNT).bind(subject).fetch_one(pool).await)
        .map_err(sql(OP))?;
        Ok(Some((count, line(last))))
    }

    /// Number of rows of allocations of a market.
    pub(crate) async fn ignored_in(&self, market: u32) -> Result<i64, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT count(*) FROM ignored WHERE market = $1")
            .bind(i64::from(market)).fetch_one(pool).await)
        .map_err(sql("read ignored reports"))
    }
}

fn line((no, at, who, market, report, subject, unwritten): Row) -> IgnoredRow {
    IgnoredRow { no, at, who: number(who), market: number(market), report, subject, unwritten }
}
