//! Database tables: repositories, tags, manifests, locations of blobs, uploads, tokens. SQLite, or PostgreSQL for several
//! replicas. Both use the same statements except for the type of bytes. All tables except uploads and tokens can be rebuilt
//! from the storage.
//!
//! A blob gets a row before its bytes are stored, and loses its bytes before the row is removed:
//!
//! ```text
//! (no row) ─announce─▶ ARRIVING ─bytes stored─▶ LIVE ─swept: unreferenced for the grace─▶ DYING ─▶ (no row)
//! ```
//! A request that needs a blob touches the row of the blob in the same transaction. The sweep checks the age again under the
//! lock of the row. So no push waits for a sweep, and no sweep removes a blob that a push relies on.

mod blobs;
mod changes;
mod gc;
mod manifests;
mod rows;
mod tokens;
mod uploads;

use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgPool, PgPoolOptions};
use sqlx::sqlite::{
    SqliteConnectOptions, SqliteJournalMode, SqlitePool, SqlitePoolOptions, SqliteSynchronous,
};

pub(crate) use blobs::{Arrival, Linked};
pub(crate) use changes::{Change, Lock};
pub(crate) use gc::Doomed;
pub(crate) use manifests::{Entry, NewManifest, Put};
pub(crate) use rows::{
    FIRST_CREATED_BY, FIRST_ID, ManifestRow, RepositoryRow, StatsRow, TagRow, TokenRow, UploadRow,
};

use crate::error::{StoreError, sql};

/// Limit of concurrent changes of manifests, each of which holds a connection to PostgreSQL, and the longest wait for one.
const LOCKS: u32 = 4;
const LOCK_WAIT: Duration = Duration::from_secs(30);

/// Address of the database.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MetaAt {
    /// SQLite file in WAL mode. Every commit is synced.
    Sqlite(PathBuf),
    /// PostgreSQL database, which several replicas may share.
    Postgres(String),
}

impl FromStr for MetaAt {
    type Err = StoreError;

    fn from_str(text: &str) -> Result<Self, StoreError> {
        match text.split_once(':') {
            Some(("sqlite", file)) if !file.is_empty() => Ok(Self::Sqlite(file.into())),
            Some(("postgres" | "postgresql", _)) => Ok(Self::Postgres(text.into())),
            Some(("mysql" | "mariadb", _)) => Err(StoreError::MySql),
            // Address in the form of epoch: user:password@tcp(host:port)/database.
            _ if text.contains("@tcp(") => Err(StoreError::MySql),
            _ => Err(StoreError::Address { text: text.chars().take(20).collect() }),
        }
    }
}

const SCHEMA: [&str; 13] = [
    "CREATE TABLE IF NOT EXISTS repositories (name {NAME} NOT NULL PRIMARY KEY, created INT8 NOT NULL, updated INT8 NOT NULL)",
    "CREATE TABLE IF NOT EXISTS manifests (repo {NAME} NOT NULL, digest {NAME} NOT NULL, media_type TEXT NOT NULL, artifact_type TEXT NOT NULL, kind TEXT NOT NULL, annotations TEXT NOT NULL, size INT8 NOT NULL, total INT8 NOT NULL, layers INT8 NOT NULL, subject {NAME}, pushed INT8 NOT NULL, PRIMARY KEY (repo, digest))",
    "CREATE INDEX IF NOT EXISTS manifests_subject ON manifests (repo, subject)",
    "CREATE TABLE IF NOT EXISTS tags (repo {NAME} NOT NULL, tag {NAME} NOT NULL, digest {NAME} NOT NULL, pushed INT8 NOT NULL, PRIMARY KEY (repo, tag))",
    "CREATE TABLE IF NOT EXISTS refs (repo {NAME} NOT NULL, parent {NAME} NOT NULL, child {NAME} NOT NULL, PRIMARY KEY (repo, parent, child))",
    "CREATE INDEX IF NOT EXISTS refs_child ON refs (repo, child)",
    "CREATE TABLE IF NOT EXISTS blobs (digest {NAME} NOT NULL PRIMARY KEY, size INT8 NOT NULL, state INT8 NOT NULL, touched INT8 NOT NULL)",
    "CREATE TABLE IF NOT EXISTS links (repo {NAME} NOT NULL, digest {NAME} NOT NULL, touched INT8 NOT NULL, PRIMARY KEY (repo, digest))",
    "CREATE INDEX IF NOT EXISTS links_digest ON links (digest)",
    "CREATE TABLE IF NOT EXISTS uploads (id {NAME} NOT NULL PRIMARY KEY, repo {NAME} NOT NULL, started INT8 NOT NULL, updated INT8 NOT NULL)",
    "CREATE TABLE IF NOT EXISTS tokens (id {NAME} NOT NULL PRIMARY KEY, name TEXT NOT NULL, hash {BYTES} NOT NULL UNIQUE, writes INT8 NOT NULL, created_by TEXT NOT NULL, created INT8 NOT NULL, expires INT8, last_used INT8)",
    "CREATE TABLE IF NOT EXISTS file_changes (repo {NAME} NOT NULL, reference {NAME} NOT NULL, PRIMARY KEY (repo, reference))",
    "CREATE TABLE IF NOT EXISTS facts (name {NAME} NOT NULL PRIMARY KEY, value TEXT NOT NULL)",
];

/// Columns that an earlier release did not have: table, column, type.
const ADDED: [(&str, &str, &str); 2] = [("tokens", "role", "TEXT"), ("tokens", "repositories", "TEXT")];

/// Database with the tables.
#[derive(Clone, Debug)]
pub(crate) enum Meta {
    /// SQLite. `loose` writes rows that may be lost in a power failure, such as those of unfinished uploads. Its commits do not
    /// wait for the disk; the next commit of `write` syncs them.
    Sqlite { write: SqlitePool, loose: SqlitePool, read: SqlitePool },
    /// PostgreSQL. The second pool is for locks only: a change that waits for a lock takes no connection from other work.
    Postgres(PgPool, PgPool),
}

/// Runs the same code on the connection pool of either database.
macro_rules! on {
    ($self:ident, $pool:ident, write => $code:expr) => {
        match $self {
            $crate::meta::Meta::Sqlite { write: $pool, .. } => $code,
            $crate::meta::Meta::Postgres($pool, _) => $code,
        }
    };
    ($self:ident, $pool:ident, loose => $code:expr) => {
        match $self {
            $crate::meta::Meta::Sqlite { loose: $pool, .. } => $code,
            $crate::meta::Meta::Postgres($pool, _) => $code,
        }
    };
    ($self:ident, $pool:ident, read => $code:expr) => {
        match $self {
            $crate::meta::Meta::Sqlite { read: $pool, .. } => $code,
            $crate::meta::Meta::Postgres($pool, _) => $code,
        }
    };
}
use on;

impl Meta {
    /// Opens the database and creates its tables.
    pub(crate) async fn open(at: &MetaAt) -> Result<Self, StoreError> {
        let meta = match at {
            MetaAt::Sqlite(file) => {
                let options = SqliteConnectOptions::new()
                    .filename(file)
                    .create_if_missing(true)
                    .journal_mode(SqliteJournalMode::Wal)
                    .synchronous(SqliteSynchronous::Full)
                    .busy_timeout(Duration::from_secs(5));
                let pool = |n| SqlitePoolOptions::new().max_connections(n).min_connections(1);
                let write = pool(1).connect_with(options.clone()).await.map_err(sql("open"))?;
                let waits_for_none = options.clone().synchronous(SqliteSynchronous::Normal);
                let loose = pool(1).connect_with(waits_for_none).await.map_err(sql("open"))?;
                let read = pool(4).connect_with(options).await.map_err(sql("open"))?;
                Self::Sqlite { write, loose, read }
            }
            MetaAt::Postgres(dsn) => {
                let pool = PgPoolOptions::new().max_connections(8).acquire_timeout(Duration::from_secs(5));
                let locks = PgPoolOptions::new().max_connections(LOCKS).acquire_timeout(LOCK_WAIT);
                let locks = locks.connect_lazy(dsn).map_err(sql("open"))?;
                Self::Postgres(pool.connect(dsn).await.map_err(sql("open"))?, locks)
            }
        };
        meta.make_tables().await?;
        Ok(meta)
    }

    /// Creates missing tables and columns. One transaction under a lock of the database, because replicas may start
    /// concurrently.
    async fn make_tables(&self) -> Result<(), StoreError> {
        const OP: &str = "make tables";
        // Names are sorted by their bytes, in any locale of the database.
        let (bytes, name, lock) = match self {
            Self::Sqlite { .. } => ("BLOB", "TEXT", "SELECT 1"),
            Self::Postgres(..) => ("BYTEA", "TEXT COLLATE \"C\"", "SELECT pg_advisory_xact_lock(2019)"),
        };
        let has_column = match self {
            Self::Sqlite { .. } => "SELECT COUNT(*) FROM pragma_table_info($1) WHERE name = $2",
            Self::Postgres(..) => {
                "SELECT COUNT(*) FROM information_schema.columns WHERE table_schema = current_schema() AND table_name = $1 AND column_name = $2"
            }
        };
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            sqlx::query(lock).execute(&mut *tx).await.map_err(sql(OP))?;
            for statement in SCHEMA {
                let statement = sqlx::AssertSqlSafe(statement.replace("{BYTES}", bytes).replace("{NAME}", name));
                sqlx::query(statement).execute(&mut *tx).await.map_err(sql(OP))?;
            }
            for (table, column, kind) in ADDED {
                let known: i64 = sqlx::query_scalar(has_column).bind(table).bind(column).fetch_one(&mut *tx).await.map_err(sql(OP))?;
                if known == 0 {
                    let add = sqlx::AssertSqlSafe(format!("ALTER TABLE {table} ADD COLUMN {column} {kind}"));
                    sqlx::query(add).execute(&mut *tx).await.map_err(sql(OP))?;
                }
            }
            tx.commit().await.map_err(sql(OP))
        })
    }

    /// Value of a property of the whole registry.
    pub(crate) async fn fact(&self, name: &str) -> Result<Option<String>, StoreError> {
        on!(self, pool, read => sqlx::query_scalar("SELECT value FROM facts WHERE name = $1").bind(name).fetch_optional(pool).await)
            .map_err(sql("read a fact"))
    }

    pub(crate) async fn set_fact(&self, name: &str, value: &str) -> Result<(), StoreError> {
        const PUT: &str =
            "INSERT INTO facts (name, value) VALUES ($1, $2) ON CONFLICT (name) DO UPDATE SET value = $2";
        on!(self, pool, write => sqlx::query(PUT).bind(name).bind(value).execute(pool).await.map(drop))
            .map_err(sql("store a fact"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn address_table() {
        for (text, want) in [
            ("sqlite:/x/y.db", "ok"),
            ("postgres://u:p@h/db", "ok"),
            ("epoch:epoch@tcp(127.0.0.1:3306)/epoch?parseTime=true", "MySQL"),
            ("mysql://h/db", "MySQL"),
            ("what", "invalid database address"),
        ] {
            let got = text.parse::<MetaAt>().map_or_else(|e| e.to_string(), |_| "ok".to_owned());
            assert!(got.contains(want), "{text}: {got}");
        }
    }
}
