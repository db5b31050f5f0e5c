//! Store of journal, names and derived rows: SQLite or PostgreSQL. The statements are the same for both; only the column types
//! differ.

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use sha2::{Digest, Sha256};
use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

use crate::error::StoreError;
use crate::history::{Age, Bar};
use crate::names::{self, Named};
use crate::replica::Advertised;

/// Address of a store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreAt {
    /// SQLite file in WAL mode; every commit is synced to disk.
    Sqlite(PathBuf),
    /// PostgreSQL database; one process writes, and others wait for its lease.
    Postgres(String),
}

impl FromStr for StoreAt {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        match text.split_once(':') {
            Some(("sqlite", file)) if !file.is_empty() => Ok(Self::Sqlite(file.into())),
            Some(("postgres" | "postgresql", _)) => Ok(Self::Postgres(text.into())),
            _ => Err(StoreError::Address(text.chars().take(60).collect())),
        }
    }
}

/// Commit group of one market.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    pub(crate) market: u32,
    /// Number of the first command, from 1.
    pub(crate) seq: i64,
    pub(crate) count: i64,
    pub(crate) body: Vec<u8>,
    /// Tenant number of each command, 0 for none. Not part of the chain, because it has no effect.
    pub(crate) who: Vec<u8>,
    pub(crate) chain: [u8; 32],
}

/// Number, count, body, chain, and tenants.
type GroupRow = (i64, i64, Vec<u8>, Vec<u8>, Option<Vec<u8>>);

/// SHA-256 over the previous chain value and the body.
pub(crate) fn chain_hash(before: &[u8; 32], body: &[u8]) -> [u8; 32] {
    Sha256::new_with_prefix(before).chain_update(body).finalize().into()
}

/// Stored charge.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct ChargeRow {
    pub(crate) allocation: String,
    pub(crate) tenant: u32,
    pub(crate) starts: i64,
    pub(crate) ends: i64,
    pub(crate) price: i64,
    pub(crate) reason: &'static str,
}

/// Stored call of the price history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallRow {
    pub(crate) market: u32,
    pub(crate) number: i64,
    pub(crate) at: i64,
    pub(crate) price: i64,
    pub(crate) chain: [u8; 32],
}

/// Rows that are derived from the journal. Writing them is idempotent.
#[derive(Clone, Debug, Default)]
pub(crate) struct Projections {
    pub(crate) calls: Vec<CallRow>,
    pub(crate) charges: Vec<ChargeRow>,
}

impl Projections {
    pub(crate) fn is_empty(&self) -> bool {
        self.calls.is_empty() && self.charges.is_empty()
    }

    pub(crate) fn extend(&mut self, later: Self) {
        self.calls.extend(later.calls);
        self.charges.extend(later.charges);
    }
}

/// Stored name: kind, number, name and body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct NameRow {
    pub(crate) kind: i64,
    pub(crate) no: u32,
    pub(crate) name: String,
    pub(crate) body: Vec<u8>,
}

/// Result of a verification: whether a journal is complete and leads to the published calls.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JournalVerification {
    /// Number of commands replayed.
    pub commands: u64,
    /// Whether no difference was found.
    pub sound: bool,
    /// First difference, or an empty text.
    pub detail: String,
}

const SCHEMA: [&str; 8] = [
    "CREATE TABLE IF NOT EXISTS names (kind INT8 NOT NULL, no INT8 NOT NULL, name TEXT NOT NULL, body {BYTES} NOT NULL, PRIMARY KEY (kind, no), UNIQUE (kind, name))",
    "CREATE TABLE IF NOT EXISTS journal (market INT8 NOT NULL, seq INT8 NOT NULL, epoch INT8 NOT NULL, count INT8 NOT NULL, body {BYTES} NOT NULL, chain {BYTES} NOT NULL, who {BYTES}, PRIMARY KEY (market, seq))",
    "CREATE TABLE IF NOT EXISTS snapshots (market INT8 NOT NULL, seq INT8 NOT NULL, body {BYTES} NOT NULL, chain {BYTES} NOT NULL, PRIMARY KEY (market, seq))",
    "CREATE TABLE IF NOT EXISTS tokens (hash {BYTES} NOT NULL PRIMARY KEY, tenant INT8 NOT NULL, scopes INT8 NOT NULL)",
    "CREATE TABLE IF NOT EXISTS calls (market INT8 NOT NULL, number INT8 NOT NULL, at INT8 NOT NULL, price INT8 NOT NULL, chain {BYTES} NOT NULL, PRIMARY KEY (market, number))",
    "CREATE TABLE IF NOT EXISTS bars (market INT8 NOT NULL, step INT8 NOT NULL, at INT8 NOT NULL, opening INT8 NOT NULL, high INT8 NOT NULL, low INT8 NOT NULL, closing INT8 NOT NULL, calls INT8 NOT NULL, PRIMARY KEY (market, step, at))",
    "CREATE TABLE IF NOT EXISTS charges (allocation TEXT NOT NULL, reason TEXT NOT NULL, starts INT8 NOT NULL, ends INT8 NOT NULL, tenant INT8 NOT NULL, price INT8 NOT NULL, PRIMARY KEY (allocation, reason, starts))",
    "CREATE TABLE IF NOT EXISTS writer (one INT8 NOT NULL PRIMARY KEY, epoch INT8 NOT NULL, until INT8 NOT NULL, grpc TEXT, http TEXT)",
];

#[derive(Clone, Debug)]
pub(crate) enum Store {
    Sqlite { write: SqlitePool, read: SqlitePool },
    Postgres(PgPool),
}

fn sql(operation: &'static str) -> impl FnOnce(sqlx::Error) -> StoreError {
    move |source| StoreError::Sql { operation, source }
}

/// Runs the same code with the pool of either database.
macro_rules! on {
    ($self:ident, $pool:ident, write => $code:expr) => {
        match $self {
            Store::Sqlite { write: $pool, .. } => $code,
            Store::Postgres($pool) => $code,
        }
    };
    ($self:ident, $pool:ident, read => $code:expr) => {
        match $self {
            Store::Sqlite { read: $pool, .. } => $code,
            Store::Postgres($pool) => $code,
        }
    };
}

fn number(value: i64) -> u32 {
    u32::try_from(value).unwrap_or(u32::MAX)
}

fn digest(bytes: Vec<u8>) -> [u8; 32] {
    bytes.try_into().unwrap_or([0; 32])
}

impl Store {
    /// Opens a store and creates its tables.
    pub(crate) async fn open(at: &StoreAt) -> Result<Self, StoreError> {
        let store = match at {
            StoreAt::Sqlite(file) => {
                let options = SqliteConnectOptions::new()
                    .filename(file)
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .synchronous(SqliteSynchronous::Full)
                    // Pages of the log before a checkpoint: 64 MiB. The duration of the checkpoint, for which a group waits,
                    // hardly depends on this number, so it is set such that fewer than one group in a hundred waits.
                    .pragma("wal_autocheckpoint", "16000")
                    .busy_timeout(Duration::from_secs(5));
                // Connections to a file do not break, so no test before each use is needed.
                let pool = |n| {
                    SqlitePoolOptions::new().max_connections(n).min_connections(1).test_before_acquire(false)
                };
                let write = pool(1).connect_with(options.clone()).await.map_err(sql("open"))?;
                let read = pool(2).connect_with(options).await.map_err(sql("open"))?;
                Self::Sqlite { write, read }
            }
            StoreAt::Postgres(dsn) => {
                let pool = PgPoolOptions::new().max_connections(4).acquire_timeout(Duration::from_secs(5));
                Self::Postgres(pool.connect(dsn).await.map_err(sql("open"))?)
            }
        };
        store.make_tables().await?;
        Ok(store)
    }

    async fn make_tables(&self) -> Result<(), StoreError> {
        let bytes = if matches!(self, Self::Sqlite { .. }) { "BLOB" } else { "BYTEA" };
        for statement in SCHEMA {
            let statement = sqlx::AssertSqlSafe(statement.replace("{BYTES}", bytes));
            on!(self, pool, write => sqlx::query(statement).execute(pool).await.map(drop))
                .map_err(sql("make tables"))?;
        }
        // Adds the columns that older stores lack: tenants of commands, and addresses of the writer.
        for (table, column, kind) in
            [("journal", "who", bytes), ("writer", "grpc", "TEXT"), ("writer", "http", "TEXT")]
        {
            let read = sqlx::AssertSqlSafe(format!("SELECT {column} FROM {table} LIMIT 1"));
            let there = on!(self, pool, write => sqlx::query(read).execute(pool).await.map(drop));
            if there.is_err() {
                let add = sqlx::AssertSqlSafe(format!("ALTER TABLE {table} ADD COLUMN {column} {kind}"));
                on!(self, pool, write => sqlx::query(add).execute(pool).await.map(drop))
                    .map_err(sql("add a column"))?;
            }
        }
        Ok(())
    }

    /// Addresses of the present writer of a shared store. `None`: the writer does not publish any.
    pub(crate) async fn holder(&self) -> Result<Option<Advertised>, StoreError> {
        let row: Option<(Option<String>, Option<String>)> = on!(self, pool, write =>
            sqlx::query_as("SELECT grpc, http FROM writer").fetch_optional(pool).await)
        .map_err(sql("look for the writer"))?;
        let (grpc, http) = row.unwrap_or_default();
        let at = |text: Option<String>| text.and_then(|text| text.parse().ok());
        Ok(at(grpc).zip(at(http)).map(|(grpc, http)| Advertised { grpc, http }))
    }

    /// Becomes the writer with a new epoch, unless another writer's lease is valid. A file belongs to a single process.
    pub(crate) async fn take_over(
        &self,
        now_ms: i64,
        lease_ms: i64,
        at: Option<Advertised>,
    ) -> Result<i64, StoreError> {
        const OP: &str = "take over";
        const TAKE: &str = "INSERT INTO writer (one, epoch, until, grpc, http) VALUES (1, 1, $1, $3, $4) ON CONFLICT (one) DO UPDATE SET epoch = writer.epoch + 1, until = $1, grpc = $3, http = $4 WHERE writer.until < $2 RETURNING epoch";
        let shared = matches!(self, Self::Postgres(_));
        let alive_before = if shared { now_ms } else { i64::MAX };
        let epoch: Option<i64> = on!(self, pool, write => sqlx::query_scalar(TAKE)
            .bind(now_ms + lease_ms).bind(alive_before)
            .bind(at.map(|at| at.grpc.to_string())).bind(at.map(|at| at.http.to_string()))
            .fetch_optional(pool).await)
        .map_err(sql(OP))?;
        match epoch {
            Some(epoch) => Ok(epoch),
            None => {
                let until: i64 = on!(self, pool, write => sqlx::query_scalar("SELECT until FROM writer").fetch_one(pool).await)
                    .map_err(sql(OP))?;
                Err(StoreError::Held { until_ms: until })
            }
        }
    }

    /// Renews the lease of the writer. Returns false for a stale writer.
    pub(crate) async fn renew(&self, epoch: i64, now_ms: i64, lease_ms: i64) -> Result<bool, StoreError> {
        const RENEW: &str = "UPDATE writer SET until = $1 WHERE one = 1 AND epoch = $2 RETURNING epoch";
        let kept: Option<i64> = on!(self, pool, write => sqlx::query_scalar(RENEW)
            .bind(now_ms + lease_ms).bind(epoch).fetch_optional(pool).await)
        .map_err(sql("renew the lease"))?;
        Ok(kept.is_some())
    }

    /// Releases the lease, so that the next writer does not wait.
    pub(crate) async fn give_back(&self, epoch: i64) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query("UPDATE writer SET until = 0 WHERE epoch = $1")
            .bind(epoch).execute(pool).await.map(drop))
        .map_err(sql("give back the lease"))
    }

    /// Commits groups and projections, all or nothing. They are on disk when this returns. A group fails if its position is
    /// taken or its epoch is not the writer's, so that a stale writer cannot write.
    pub(crate) async fn append(
        &self,
        epoch: i64,
        groups: &[Group],
        made: &Projections,
    ) -> Result<(), StoreError> {
        const OP: &str = "append";
        const LITE: &str = "INSERT INTO journal (market, seq, epoch, count, body, chain, who) SELECT $1, $2, $3, $4, $5, $6, $7 WHERE (SELECT epoch FROM writer WHERE one = 1) = $3";
        // A take-over waits for the row that this statement reads, so the new writer's recovery includes this group.
        const SHARED: &str = "INSERT INTO journal (market, seq, epoch, count, body, chain, who) SELECT $1, $2, $3, $4, $5, $6, $7 FROM (SELECT epoch FROM writer WHERE one = 1 AND epoch = $3 FOR SHARE) AS held";
        let insert = if matches!(self, Self::Sqlite { .. }) { LITE } else { SHARED };
        const CALL: &str = "INSERT INTO calls (market, number, at, price, chain) VALUES ($1, $2, $3, $4, $5) ON CONFLICT DO NOTHING";
        const CHARGE: &str = "INSERT INTO charges (allocation, reason, starts, ends, tenant, price) VALUES ($1, $2, $3, $4, $5, $6) ON CONFLICT DO NOTHING";
        macro_rules! journal {
            ($group:expr, $on:expr) => {{
                let g: &Group = $group;
                let done = sqlx::query(insert)
                    .bind(i64::from(g.market))
                    .bind(g.seq)
                    .bind(epoch)
                    .bind(g.count)
                    .bind(&g.body[..])
                    .bind(&g.chain[..])
                    .bind(&g.who[..])
                    .execute($on)
                    .await
                    .map_err(sql(OP))?;
                if done.rows_affected() == 1 { Ok(()) } else { Err(StoreError::Held { until_ms: 0 }) }
            }};
        }
        on!(self, pool, write => {
            if let ([group], true) = (groups, made.is_empty()) {
                // Usual case: a single statement is a transaction, and needs one round trip to the database instead of three.
                return journal!(group, pool);
            }
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            for group in groups {
                journal!(group, &mut *tx)?;
            }
            for c in &made.calls {
                sqlx::query(CALL)
                    .bind(i64::from(c.market)).bind(c.number).bind(c.at).bind(c.price).bind(&c.chain[..])
                    .execute(&mut *tx).await.map_err(sql(OP))?;
            }
            for c in &made.charges {
                sqlx::query(CHARGE)
                    .bind(&c.allocation[..]).bind(c.reason).bind(c.starts).bind(c.ends).bind(i64::from(c.tenant)).bind(c.price)
                    .execute(&mut *tx).await.map_err(sql(OP))?;
            }
            tx.commit().await.map_err(sql(OP))
        })
    }

    /// Chain value of the group at this position, if one exists. Shows whether a failed append was written.
    pub(crate) async fn chain_at(&self, market: u32, seq: i64) -> Result<Option<[u8; 32]>, StoreError> {
        let chain: Option<Vec<u8>> = on!(self, pool, write =>
            sqlx::query_scalar("SELECT chain FROM journal WHERE market = $1 AND seq = $2")
                .bind(i64::from(market)).bind(seq).fetch_optional(pool).await)
        .map_err(sql("look for a group"))?;
        Ok(chain.map(digest))
    }

    /// Reads at most `most` groups of a market from a command on, in order.
    pub(crate) async fn groups(&self, market: u32, from: i64, most: i64) -> Result<Vec<Group>, StoreError> {
        const READ: &str = "SELECT seq, count, body, chain, who FROM journal WHERE market = $1 AND seq >= $2 ORDER BY seq LIMIT $3";
        let rows: Vec<GroupRow> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(i64::from(market)).bind(from).bind(most).fetch_all(pool).await)
        .map_err(sql("read the journal"))?;
        Ok(rows
            .into_iter()
            .map(|(seq, count, body, chain, who)| {
                let who = who.unwrap_or_default();
                Group { market, seq, count, body, who, chain: digest(chain) }
            })
            .collect())
    }

    /// Stores a snapshot, and deletes all older ones.
    pub(crate) async fn put_snapshot(
        &self,
        market: u32,
        seq: i64,
        body: &[u8],
        chain: &[u8; 32],
    ) -> Result<(), StoreError> {
        const PUT: &str =
            "INSERT INTO snapshots (market, seq, body, chain) VALUES ($1, $2, $3, $4) ON CONFLICT DO NOTHING";
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql("store a snapshot"))?;
            sqlx::query(PUT).bind(i64::from(market)).bind(seq).bind(body).bind(&chain[..])
                .execute(&mut *tx).await.map_err(sql("store a snapshot"))?;
            sqlx::query("DELETE FROM snapshots WHERE market = $1 AND seq < $2").bind(i64::from(market)).bind(seq)
                .execute(&mut *tx).await.map_err(sql("store a snapshot"))?;
            tx.commit().await.map_err(sql("store a snapshot"))
        })
    }

    /// Newest snapshot: its last command, its bytes, and the chain value.
    pub(crate) async fn snapshot(&self, market: u32) -> Result<Option<(i64, Vec<u8>, [u8; 32])>, StoreError> {
        const READ: &str =
            "SELECT seq, body, chain FROM snapshots WHERE market = $1 ORDER BY seq DESC LIMIT 1";
        let row: Option<(i64, Vec<u8>, Vec<u8>)> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(i64::from(market)).fetch_optional(pool).await)
        .map_err(sql("read a snapshot"))?;
        Ok(row.map(|(seq, body, chain)| (seq, body, digest(chain))))
    }

    pub(crate) async fn put_name(&self, row: &NameRow) -> Result<(), StoreError> {
        const PUT: &str = "INSERT INTO names (kind, no, name, body) VALUES ($1, $2, $3, $4) ON CONFLICT (kind, no) DO UPDATE SET body = excluded.body";
        on!(self, pool, write => sqlx::query(PUT)
            .bind(row.kind).bind(i64::from(row.no)).bind(&row.name[..]).bind(&row.body[..]).execute(pool).await.map(drop))
        .map_err(sql("store a name"))
    }

    pub(crate) async fn names(&self) -> Result<Vec<NameRow>, StoreError> {
        let rows: Vec<(i64, i64, String, Vec<u8>)> = on!(self, pool, read =>
            sqlx::query_as("SELECT kind, no, name, body FROM names ORDER BY kind, no").fetch_all(pool).await)
        .map_err(sql("read names"))?;
        Ok(rows
            .into_iter()
            .map(|(kind, no, name, body)| NameRow { kind, no: number(no), name, body })
            .collect())
    }

    pub(crate) async fn put_token(&self, hash: &[u8; 32], tenant: u32, scopes: u8) -> Result<(), StoreError> {
        const PUT: &str =
            "INSERT INTO tokens (hash, tenant, scopes) VALUES ($1, $2, $3) ON CONFLICT DO NOTHING";
        on!(self, pool, write => sqlx::query(PUT)
            .bind(&hash[..]).bind(i64::from(tenant)).bind(i64::from(scopes)).execute(pool).await.map(drop))
        .map_err(sql("store a token"))
    }

    /// Deletes a token. Returns `Ok` if it does not exist.
    pub(crate) async fn delete_token(&self, hash: &[u8; 32]) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query("DELETE FROM tokens WHERE hash = $1")
            .bind(&hash[..]).execute(pool).await.map(drop))
        .map_err(sql("delete a token"))
    }

    pub(crate) async fn tokens(&self) -> Result<Vec<([u8; 32], u32, u8)>, StoreError> {
        let rows: Vec<(Vec<u8>, i64, i64)> = on!(self, pool, read =>
            sqlx::query_as("SELECT hash, tenant, scopes FROM tokens").fetch_all(pool).await)
        .map_err(sql("read tokens"))?;
        Ok(rows
            .into_iter()
            .map(|(hash, tenant, s)| (digest(hash), number(tenant), u8::try_from(s).unwrap_or(0)))
            .collect())
    }

    /// Calls of a market in a span that have not been rolled up, in order.
    pub(crate) async fn calls(
        &self,
        market: u32,
        (from, to): (i64, i64),
    ) -> Result<Vec<CallRow>, StoreError> {
        const READ: &str = "SELECT number, at, price, chain FROM calls WHERE market = $1 AND at >= $2 AND at < $3 ORDER BY number";
        let rows: Vec<(i64, i64, i64, Vec<u8>)> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(i64::from(market)).bind(from).bind(to).fetch_all(pool).await)
        .map_err(sql("read the price history"))?;
        let row = |(number, at, price, chain)| CallRow { market, number, at, price, chain: digest(chain) };
        Ok(rows.into_iter().map(row).collect())
    }

    /// Time of the oldest bar of a length; for length 0, of the oldest call.
    pub(crate) async fn oldest(&self, market: u32, step: i64) -> Result<Option<i64>, StoreError> {
        // Both statements use the second parameter, because they are bound alike.
        const CALL: &str = "SELECT min(at) FROM calls WHERE market = $1 AND $2 = 0";
        const BAR: &str = "SELECT min(at) FROM bars WHERE market = $1 AND step = $2";
        let read = if step == 0 { CALL } else { BAR };
        on!(self, pool, read =>
            sqlx::query_scalar(read).bind(i64::from(market)).bind(step).fetch_one(pool).await)
        .map_err(sql("look for old history"))
    }

    /// End of the newest bar into which calls were rolled up. Older calls are already in bars.
    pub(crate) async fn rolled_to(&self, market: u32) -> Result<i64, StoreError> {
        const READ: &str = "SELECT max(at + step) FROM bars WHERE market = $1";
        let end: Option<i64> = on!(self, pool, read =>
            sqlx::query_scalar(READ).bind(i64::from(market)).fetch_one(pool).await)
        .map_err(sql("look for old history"))?;
        Ok(end.unwrap_or(0))
    }

    /// Bars of one length in a span, in order; for length 0, the calls.
    pub(crate) async fn bars_of(
        &self,
        market: u32,
        step: i64,
        (from, to): (i64, i64),
    ) -> Result<Vec<Bar>, StoreError> {
        const BARS: &str = "SELECT at, opening, high, low, closing, calls FROM bars WHERE market = $1 AND step = $2 AND at >= $3 AND at < $4 ORDER BY at";
        const CALLS: &str =
            "SELECT at, price FROM calls WHERE market = $1 AND at >= $2 AND at < $3 ORDER BY number";
        const OP: &str = "read the price history";
        if step == 0 {
            let rows: Vec<(i64, i64)> = on!(self, pool, read =>
                sqlx::query_as(CALLS).bind(i64::from(market)).bind(from).bind(to).fetch_all(pool).await)
            .map_err(sql(OP))?;
            return Ok(rows.into_iter().map(|(at, price)| Bar::of_call(at, price)).collect());
        }
        let rows: Vec<(i64, i64, i64, i64, i64, i64)> = on!(self, pool, read =>
            sqlx::query_as(BARS).bind(i64::from(market)).bind(step).bind(from).bind(to).fetch_all(pool).await)
        .map_err(sql(OP))?;
        let bar = |(at, open, high, low, close, calls)| Bar { at, open, high, low, close, calls };
        Ok(rows.into_iter().map(bar).collect())
    }

    /// Whole history of a market in a span, in order. Read by a single statement, so that a concurrent roll-up neither hides
    /// nor repeats data.
    pub(crate) async fn bars(&self, market: u32, (from, to): (i64, i64)) -> Result<Vec<Bar>, StoreError> {
        const READ: &str = "SELECT at, opening, high, low, closing, calls FROM bars WHERE market = $1 AND at >= $2 AND at < $3 UNION ALL SELECT at, price, price, price, price, 1 FROM calls WHERE market = $1 AND at >= $2 AND at < $3 ORDER BY 1";
        let rows: Vec<(i64, i64, i64, i64, i64, i64)> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(i64::from(market)).bind(from).bind(to).fetch_all(pool).await)
        .map_err(sql("read the price history"))?;
        let bar = |(at, open, high, low, close, calls)| Bar { at, open, high, low, close, calls };
        Ok(rows.into_iter().map(bar).collect())
    }

    /// Replaces rows that are too old in a span by coarser bars. All or nothing, and idempotent.
    pub(crate) async fn replace_bars(
        &self,
        market: u32,
        age: Age,
        (from, to): (i64, i64),
        coarse: &[Bar],
    ) -> Result<(), StoreError> {
        const PUT: &str = "INSERT INTO bars (market, step, at, opening, high, low, closing, calls) VALUES ($1, $2, $3, $4, $5, $6, $7, $8) ON CONFLICT DO NOTHING";
        const CALLS: &str = "DELETE FROM calls WHERE market = $1 AND $2 = 0 AND at >= $3 AND at < $4";
        const BARS: &str = "DELETE FROM bars WHERE market = $1 AND step = $2 AND at >= $3 AND at < $4";
        const OP: &str = "roll up the price history";
        let market = i64::from(market);
        let forget = if age.fine == 0 { CALLS } else { BARS };
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            for bar in coarse {
                sqlx::query(PUT)
                    .bind(market).bind(age.coarse.unwrap_or(0)).bind(bar.at).bind(bar.open).bind(bar.high)
                    .bind(bar.low).bind(bar.close).bind(bar.calls)
                    .execute(&mut *tx).await.map_err(sql(OP))?;
            }
            sqlx::query(forget).bind(market).bind(age.fine).bind(from).bind(to)
                .execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))
        })
    }

    /// Call that has not been rolled up.
    pub(crate) async fn call(&self, market: u32, number: i64) -> Result<Option<CallRow>, StoreError> {
        const READ: &str = "SELECT at, price, chain FROM calls WHERE market = $1 AND number = $2";
        let row: Option<(i64, i64, Vec<u8>)> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(i64::from(market)).bind(number).fetch_optional(pool).await)
        .map_err(sql("read a call"))?;
        Ok(row.map(|(at, price, chain)| CallRow { market, number, at, price, chain: digest(chain) }))
    }

    /// Number of the last published call; 0 if there is none.
    pub(crate) async fn last_call(&self, market: u32) -> Result<i64, StoreError> {
        let last: Option<i64> = on!(self, pool, read =>
            sqlx::query_scalar("SELECT max(number) FROM calls WHERE market = $1")
                .bind(i64::from(market)).fetch_one(pool).await)
        .map_err(sql("read the last call"))?;
        Ok(last.unwrap_or(0))
    }

    /// End, tenant and price of the charge with the key of `row`.
    pub(crate) async fn charge(&self, row: &ChargeRow) -> Result<Option<(i64, u32, i64)>, StoreError> {
        const READ: &str =
            "SELECT ends, tenant, price FROM charges WHERE allocation = $1 AND reason = $2 AND starts = $3";
        let found: Option<(i64, i64, i64)> = on!(self, pool, read =>
            sqlx::query_as(READ).bind(&row.allocation[..]).bind(row.reason).bind(row.starts).fetch_optional(pool).await)
        .map_err(sql("read a charge"))?;
        Ok(found.map(|(ends, tenant, price)| (ends, number(tenant), price)))
    }

    /// Number of charges of a market. Reads all charges, page by page.
    pub(crate) async fn charges_of(&self, market: u32) -> Result<i64, StoreError> {
        const READ: &str = "SELECT allocation, count(*) FROM charges WHERE allocation > $1 GROUP BY allocation ORDER BY allocation LIMIT 4096";
        let (mut after, mut count) = (String::new(), 0);
        loop {
            let rows: Vec<(String, i64)> = on!(self, pool, read =>
                sqlx::query_as(READ).bind(&after[..]).fetch_all(pool).await)
            .map_err(sql("count charges"))?;
            let Some((last, _)) = rows.last() else { return Ok(count) };
            after.clone_from(last);
            let own = |name: &str| matches!(names::parse(name), Some((Named::Allocation(no, _), _)) if no == market);
            count += rows.iter().filter(|(name, _)| own(name)).map(|(_, rows)| rows).sum::<i64>();
        }
    }

    pub(crate) async fn charges(
        &self,
        tenant: u32,
        from: i64,
        to: i64,
        most: i64,
    ) -> Result<Vec<(String, i64, i64, i64, String)>, StoreError> {
        const READ: &str = "SELECT allocation, starts, ends, price, reason FROM charges WHERE tenant = $1 AND ends > $2 AND starts < $3 ORDER BY starts, allocation LIMIT $4";
        on!(self, pool, read => sqlx::query_as(READ).bind(i64::from(tenant)).bind(from).bind(to).bind(most).fetch_all(pool).await)
            .map_err(sql("read charges"))
    }
}

#[cfg(test)]
mod tests;
