//! Small durable values: watermarks and cursors, by namespace and key.

use postrider::Result;
use postrider::tx::{Dialect, Tx, for_update};
use serde_json::Value as Json;

fn key_column(dialect: Dialect) -> &'static str {
    if dialect == Dialect::Mysql { "`key`" } else { "key" }
}

pub(crate) async fn get(tx: &mut (dyn Tx + Send), namespace: &str, key: &str) -> Result<Option<Json>> {
    let value = if tx.dialect() == Dialect::Postgres { "value_json::text" } else { "value_json" };
    let column = key_column(tx.dialect());
    let sql = format!("SELECT {value} FROM kv WHERE namespace = ? AND {column} = ?");
    let rows = tx.query(&sql, &[namespace.into(), key.into()]).await?;
    let text = rows.first().map(|row| row.text(0)).transpose()?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()))
}

/// The value, locked until the transaction ends: whoever changes it by what it was waits for whoever does so too.
pub(crate) async fn get_locked(tx: &mut (dyn Tx + Send), namespace: &str, key: &str) -> Result<Option<Json>> {
    let dialect = tx.dialect();
    // A row that is not there cannot be locked.
    let (verb, tail) = match dialect {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT (namespace, key) DO NOTHING"),
    };
    let mut params = vec![namespace.into(), key.into()];
    let now = tx.now().plus(0, &mut params);
    let column = key_column(dialect);
    let sql =
        format!("{verb} INTO kv (namespace, {column}, value_json, updated_at) VALUES (?, ?, 'null', {now}){tail}");
    tx.execute(&sql, &params).await?;
    let value = if dialect == Dialect::Postgres { "value_json::text" } else { "value_json" };
    let lock = for_update(dialect);
    let sql = format!("SELECT {value} FROM kv WHERE namespace = ? AND {column} = ?{lock}");
    let rows = tx.query(&sql, &[namespace.into(), key.into()]).await?;
    let text = rows.first().map(|row| row.text(0)).transpose()?;
    Ok(text.and_then(|text| serde_json::from_str(&text).ok()).filter(|value: &Json| !value.is_null()))
}

pub(crate) async fn set(tx: &mut (dyn Tx + Send), namespace: &str, key: &str, value: &Json) -> Result<()> {
    let dialect = tx.dialect();
    let mut params = vec![namespace.into(), key.into(), value.to_string().into()];
    let now = tx.now().plus(0, &mut params);
    let (column, json) = (key_column(dialect), if dialect == Dialect::Postgres { "?::text::jsonb" } else { "?" });
    let tail = match dialect {
        Dialect::Mysql => "ON DUPLICATE KEY UPDATE value_json = VALUES(value_json), updated_at = VALUES(updated_at)",
        _ => {
            "ON CONFLICT (namespace, key) DO UPDATE SET value_json = excluded.value_json, updated_at = excluded.updated_at"
        }
    };
    let sql =
        format!("INSERT INTO kv (namespace, {column}, value_json, updated_at) VALUES (?, ?, {json}, {now}) {tail}");
    tx.execute(&sql, &params).await.map(drop)
}
