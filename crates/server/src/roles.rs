//! Roles for whoever runs `serve` and `worker` as a user that owns nothing: those of webhooks, with what these processes
//! need beside them, and one more for everything that is not webhooks.

use postrider::store::{Mode, transact};
use postrider::tx::Dialect;
use postrider::{Outbox, Result};
use postrider_webhooks::Webhooks;
use postrider_webhooks::roles::{creation, grant};

use crate::schema;

/// Works every lane, keeps tokens, orders and memories: all but webhooks.
const SERVER: &str = "postrider_server";

/// What the roles of webhooks need of the server's own tables: a worker is on the roll, and whoever keeps subscriptions
/// over HTTP knows its callers.
const OF_WEBHOOKS: [(&str, &str, &[&str]); 2] = [
    ("postrider_worker", "workers", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
    ("postrider_admin", "api_tokens", &["SELECT"]),
];

/// The sequences a table's ids come from, on PostgreSQL.
const SEQUENCES: &str = "SELECT s.oid::regclass::text FROM pg_class s JOIN pg_depend d ON d.objid = s.oid
     WHERE s.relkind = 'S' AND d.refobjid = to_regclass(?::text)";

/// Makes the roles and gives them their rights; answers their names. Running it again changes nothing.
pub async fn make(outbox: &Outbox, webhooks: &Webhooks) -> Result<Vec<&'static str>> {
    let mut names = webhooks.make_roles().await?;
    transact(&**outbox.store(), Mode::Write, |tx| {
        Box::pin(async move {
            for sql in statements(tx.dialect()) {
                tx.execute(&sql, &[]).await?;
            }
            if tx.dialect() == Dialect::Postgres {
                let schema = tx.query("SELECT quote_ident(current_schema())", &[]).await?;
                let schema = schema.first().map(|row| row.text(0)).transpose()?.unwrap_or_else(|| "public".to_owned());
                tx.execute(&format!("GRANT USAGE ON SCHEMA {schema} TO {SERVER}"), &[]).await?;
                for table in tables(Dialect::Postgres) {
                    for row in tx.query(SEQUENCES, &[table.into()]).await? {
                        tx.execute(&format!("GRANT USAGE ON SEQUENCE {} TO {SERVER}", row.text(0)?), &[]).await?;
                    }
                }
            }
            Ok(())
        })
    })
    .await?;
    names.push(SERVER);
    Ok(names)
}

fn statements(dialect: Dialect) -> Vec<String> {
    let mut all = vec![creation(dialect, SERVER), grant(SERVER, "postrider_migrations", &["SELECT"])];
    for (role, table, rights) in OF_WEBHOOKS {
        all.push(grant(role, table, rights));
    }
    for table in tables(dialect) {
        all.push(grant(SERVER, table, &["SELECT", "INSERT", "UPDATE", "DELETE"]));
    }
    all
}

/// The tables of every part but webhooks, as the migrations make them.
fn tables(dialect: Dialect) -> Vec<&'static str> {
    let of_others = postrider::kernel_migrations().into_iter().chain(schema::migrations());
    let of_others = of_others.filter(|migration| migration.version / 100 != 2);
    let made = of_others.flat_map(|migration| migration.sql(dialect).lines());
    let mut tables: Vec<&str> = made.filter_map(|line| line.strip_prefix("CREATE TABLE ")).filter_map(name).collect();
    tables.dedup();
    tables
}

fn name(line: &str) -> Option<&str> {
    line.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_')).next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_rest_is_everything_but_webhooks() {
        for dialect in [Dialect::Postgres, Dialect::Mysql] {
            let tables = tables(dialect);
            for table in
                ["outbox", "outbox_done", "outbox_keys", "inbox", "api_tokens", "workers", "idempo_ledger", "kv"]
            {
                assert!(tables.contains(&table), "{table}: {tables:?}");
            }
            for table in ["events", "subscriptions", "webhook_results", "webhook_delivery_sagas"] {
                assert!(!tables.contains(&table), "{table}: {tables:?}");
            }
        }
    }
}
