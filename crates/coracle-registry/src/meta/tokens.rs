//! Rows of tokens: hashes, never secrets.

use super::{Meta, TokenRow, on};
use crate::error::{StoreError, sql};

const COLUMNS: &str =
    "SELECT id, name, writes, role, repositories, created_by, created, expires, last_used FROM tokens";
const PUT: &str = "INSERT INTO tokens (id, name, hash, writes, role, repositories, created_by, created, expires) VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9) ON CONFLICT DO NOTHING";

impl Meta {
    pub(crate) async fn put_token(&self, hash: &[u8; 32], row: &TokenRow) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query(PUT)
            .bind(&row.id[..]).bind(&row.name[..]).bind(&hash[..]).bind(row.writes).bind(row.role.as_deref())
            .bind(row.repositories.as_deref()).bind(&row.created_by[..]).bind(row.created).bind(row.expires)
            .execute(pool).await.map(drop))
        .map_err(sql("store a token"))
    }

    /// Enters a token unless it was entered before: a removed token stays removed. Returns false when it was entered before.
    pub(crate) async fn put_token_once(&self, hash: &[u8; 32], row: &TokenRow) -> Result<bool, StoreError> {
        const OP: &str = "store the first token";
        const NOTE: &str = "INSERT INTO facts (name, value) VALUES ($1, $2) ON CONFLICT DO NOTHING";
        let fact = format!("token-entered-{}", hex::encode(hash));
        on!(self, pool, write => {
            let mut tx = pool.begin().await.map_err(sql(OP))?;
            let noted = sqlx::query(NOTE).bind(&fact[..]).bind(&row.id[..]).execute(&mut *tx).await.map_err(sql(OP))?;
            if noted.rows_affected() == 0 {
                return Ok(false);
            }
            sqlx::query(PUT)
                .bind(&row.id[..]).bind(&row.name[..]).bind(&hash[..]).bind(row.writes).bind(row.role.as_deref())
                .bind(row.repositories.as_deref()).bind(&row.created_by[..]).bind(row.created).bind(row.expires)
                .execute(&mut *tx).await.map_err(sql(OP))?;
            tx.commit().await.map_err(sql(OP))?;
            Ok(true)
        })
    }

    pub(crate) async fn token(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>, StoreError> {
        let read = || sqlx::AssertSqlSafe(format!("{COLUMNS} WHERE hash = $1"));
        on!(self, pool, read => sqlx::query_as(read()).bind(&hash[..]).fetch_optional(pool).await)
            .map_err(sql("look for a token"))
    }

    pub(crate) async fn tokens(&self) -> Result<Vec<TokenRow>, StoreError> {
        let read = || sqlx::AssertSqlSafe(format!("{COLUMNS} ORDER BY created, id"));
        on!(self, pool, read => sqlx::query_as(read()).fetch_all(pool).await).map_err(sql("list tokens"))
    }

    pub(crate) async fn use_token(&self, id: &str, now: i64) -> Result<(), StoreError> {
        on!(self, pool, write => sqlx::query("UPDATE tokens SET last_used = $1 WHERE id = $2")
            .bind(now).bind(id).execute(pool).await.map(drop))
        .map_err(sql("touch a token"))
    }

    /// Removes a token. Returns false when it did not exist.
    pub(crate) async fn remove_token(&self, id: &str) -> Result<bool, StoreError> {
        let done = on!(self, pool, write => sqlx::query("DELETE FROM tokens WHERE id = $1")
            .bind(id).execute(pool).await.map(|d| d.rows_affected()))
        .map_err(sql("remove a token"))?;
        Ok(done == 1)
    }
}
