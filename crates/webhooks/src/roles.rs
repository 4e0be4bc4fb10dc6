//! Roles for those who run the parts of this under users of their own: each with exactly the rights its part needs. Made on
//! request (`postrider migrate --roles`), on PostgreSQL and MySQL/MariaDB; SQLite has no users.

use postrider::store::Mode;
use postrider::tx::Dialect;
use postrider::{Error, Result};

use crate::Webhooks;

/// A role, and what it may do with which table. `SELECT(a, b)` and `UPDATE(a)` are rights on columns; `LOCK(a)` is what taking
/// rows that nobody else has locked asks for: on PostgreSQL a right to change one of their columns, elsewhere nothing.
pub struct Role {
    pub name: &'static str,
    pub rights: &'static [(&'static str, &'static [&'static str])],
}

const SAGA_KEYS: &str = "SELECT(id, event_id, subscription_id, generation)";
const JOB_KEYS: &str = "SELECT(id, lane, active_key, payload_sha)";
/// What is needed to find jobs that wait, and to wake them.
const WAITING_JOBS: &str =
    "SELECT(id, lane, shard_id, active_key, payload_sha, target, due_at, locked_by, last_error_code, updated_at)";

/// What everybody reads: which database this is, of which version, with which lanes, and whether subscriptions have changed.
const ALL: [(&str, &[&str]); 4] = [
    ("postrider_meta", &["SELECT"]),
    ("postrider_migrations", &["SELECT"]),
    ("outbox_lanes", &["SELECT"]),
    ("webhook_state", &["SELECT"]),
];

/// Whoever inserts may also see ids and keys of what it inserts: RETURNING and ON CONFLICT need that.
///
/// A publisher is `ingest` and `router`; a worker is `worker`; an orchestrator is `saga`, `admin` (it disables what only
/// fails) and `janitor`; who brings dead letters back is `dead_letter`.
pub const ROLES: [Role; 7] = [
    Role {
        name: "postrider_ingest",
        rights: &[("events", &["INSERT", "SELECT(id, external_id, event_type, payload_sha)"])],
    },
    Role {
        name: "postrider_router",
        rights: &[
            ("events", &["SELECT"]),
            ("subscriptions", &["SELECT"]),
            ("subscription_gates", &["SELECT"]),
            ("webhook_delivery_sagas", &["INSERT", SAGA_KEYS]),
            ("outbox", &["INSERT", JOB_KEYS]),
        ],
    },
    Role {
        name: "postrider_saga",
        rights: &[
            ("events", &["SELECT"]),
            ("subscriptions", &["SELECT"]),
            ("webhook_delivery_sagas", &["SELECT", "INSERT", "UPDATE"]),
            ("subscription_gates", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
            ("webhook_results", &["SELECT", "DELETE", "LOCK(at)"]),
            ("outbox", &["INSERT", WAITING_JOBS, "UPDATE(due_at)"]),
            ("dead_letters", &["INSERT", "SELECT(id, saga_id)"]),
            ("replays", &["SELECT", "UPDATE"]),
            ("outbox_alerts", &["SELECT", "INSERT", "UPDATE"]),
        ],
    },
    Role {
        name: "postrider_worker",
        rights: &[
            ("events", &["SELECT"]),
            ("subscriptions", &["SELECT"]),
            ("subscription_gates", &["SELECT"]),
            ("webhook_keys", &["SELECT"]),
            ("webhook_delivery_sagas", &["SELECT(id, event_id, subscription_id, attempt_count)"]),
            ("outbox", &["SELECT", "UPDATE", "DELETE"]),
            ("outbox_done", &["SELECT", "INSERT"]),
            ("outbox_attempts", &["SELECT", "INSERT", "DELETE"]),
            ("outbox_pauses", &["SELECT"]),
            ("write_audit", &["INSERT"]),
            ("webhook_attempts", &["INSERT"]),
            ("webhook_results", &["INSERT"]),
        ],
    },
    Role {
        name: "postrider_dead_letter",
        rights: &[
            ("dead_letters", &["SELECT", "UPDATE(requeued_saga_id)"]),
            ("webhook_delivery_sagas", &["SELECT", "INSERT"]),
            ("subscriptions", &["SELECT(id, status)"]),
        ],
    },
    Role {
        name: "postrider_admin",
        rights: &[
            ("subscriptions", &["SELECT", "INSERT", "UPDATE", "DELETE"]),
            ("subscription_gates", &["SELECT", "INSERT", "UPDATE"]),
            ("webhook_state", &["UPDATE"]),
            ("webhook_keys", &["SELECT", "INSERT", "DELETE"]),
            ("replays", &["SELECT", "INSERT", "UPDATE"]),
            ("events", &["SELECT"]),
            ("webhook_delivery_sagas", &["SELECT"]),
            ("outbox", &["INSERT", WAITING_JOBS, "UPDATE(due_at)"]),
            ("outbox_alerts", &["SELECT", "INSERT", "UPDATE"]),
        ],
    },
    Role {
        name: "postrider_janitor",
        rights: &[
            ("events", &["SELECT", "DELETE"]),
            ("webhook_delivery_sagas", &["SELECT", "DELETE"]),
            ("webhook_attempts", &["SELECT", "DELETE"]),
            ("dead_letters", &["SELECT(saga_id)", "DELETE"]),
            ("outbox", &["SELECT(id)"]),
            ("outbox_done", &["SELECT(id, lane, status, finished_at)", "DELETE", "LOCK(finished_at)"]),
            ("outbox_attempts", &["SELECT(outbox_id)", "DELETE"]),
            ("outbox_dedup", &["SELECT(outbox_id)", "DELETE"]),
            ("postrider_former_keys", &["SELECT(outbox_id)", "DELETE"]),
            ("outbox_keys", &["SELECT(lane, key, outbox_id, expires_at)", "DELETE", "LOCK(expires_at)"]),
            ("write_audit", &["SELECT(audit_id, created_at, status)", "DELETE"]),
        ],
    },
];

impl Role {
    /// What it may do with which table, also what all may.
    pub fn all_rights(&self) -> impl Iterator<Item = (&'static str, &'static [&'static str])> {
        self.rights.iter().copied().chain(ALL)
    }

    /// On MySQL active keys are a table beside the messages: whoever makes jobs takes keys, whoever ends them frees them.
    fn active_key_rights(&self) -> Option<&'static [&'static str]> {
        let (_, jobs) = self.rights.iter().find(|(table, _)| *table == "outbox")?;
        match (jobs.contains(&"INSERT"), jobs.contains(&"DELETE")) {
            (true, _) => Some(&["SELECT", "INSERT", "UPDATE", "DELETE"]),
            (false, true) => Some(&["SELECT", "DELETE"]),
            (false, false) => None,
        }
    }
}

/// Tables whose ids come from a sequence of their own (PostgreSQL).
const SEQUENCES: [(&str, &str); 9] = [
    ("events", "events_id_seq"),
    ("subscriptions", "subscriptions_id_seq"),
    ("webhook_delivery_sagas", "webhook_delivery_sagas_id_seq"),
    ("dead_letters", "dead_letters_id_seq"),
    ("webhook_attempts", "webhook_attempts_id_seq"),
    ("replays", "replays_id_seq"),
    ("outbox", "outbox_id_seq"),
    ("outbox_attempts", "outbox_attempts_id_seq"),
    ("write_audit", "write_audit_audit_id_seq"),
];

/// The statement that makes a role, if there is none of that name.
pub fn creation(dialect: Dialect, role: &str) -> String {
    match dialect {
        // Another process may be making it at the same time.
        Dialect::Postgres => format!(
            "DO $$ BEGIN IF NOT EXISTS (SELECT 1 FROM pg_roles WHERE rolname = '{role}') THEN CREATE ROLE {role} NOLOGIN; END IF;
             EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$"
        ),
        _ => format!("CREATE ROLE IF NOT EXISTS {role}"),
    }
}

/// The statement that gives a role rights on a table. `SELECT(a, b)` is written `SELECT (a, b)` there.
pub fn grant(role: &str, table: &str, rights: &[impl AsRef<str>]) -> String {
    let rights: Vec<String> = rights.iter().map(|text| text.as_ref().replacen('(', " (", 1)).collect();
    format!("GRANT {} ON {table} TO {role}", rights.join(", "))
}

/// A right as the database calls it.
fn of_dialect(dialect: Dialect, right: &str) -> Option<String> {
    match (right.strip_prefix("LOCK"), dialect) {
        (None, Dialect::Mysql) => Some(right.replace("(lane, key,", "(lane, `key`,")),
        (None, _) => Some(right.to_owned()),
        (Some(column), Dialect::Postgres) => Some(format!("UPDATE{column}")),
        (Some(_), _) => None,
    }
}

/// What a role is given: rights on a table, or `USAGE` on `SEQUENCE name`.
pub type Grant = (&'static str, String, Vec<String>);

/// All that the roles are given, but for the use of the schema (PostgreSQL).
pub fn grants(dialect: Dialect) -> Vec<Grant> {
    let mut all = Vec::new();
    for role in &ROLES {
        let name = role.name;
        for (table, rights) in role.all_rights() {
            all.push((name, table.to_owned(), rights.iter().filter_map(|right| of_dialect(dialect, right)).collect()));
            let sequence = SEQUENCES.iter().find(|(of, _)| *of == table).filter(|_| rights.contains(&"INSERT"));
            if let (Dialect::Postgres, Some((_, sequence))) = (dialect, sequence) {
                all.push((name, format!("SEQUENCE {sequence}"), vec!["USAGE".to_owned()]));
            }
        }
        if dialect == Dialect::Mysql {
            let owned = |rights: &[&str]| rights.iter().map(|right| (*right).to_owned()).collect();
            all.extend(role.active_key_rights().map(|rights| (name, "outbox_active_keys".to_owned(), owned(rights))));
        }
    }
    all
}

fn statements(dialect: Dialect) -> Vec<String> {
    let creations = ROLES.iter().map(|role| creation(dialect, role.name));
    creations.chain(grants(dialect).iter().map(|(role, on, rights)| grant(role, on, rights))).collect()
}

impl Webhooks {
    /// Makes the roles and gives them their rights on this database; answers their names. Running it again changes nothing.
    pub async fn make_roles(&self) -> Result<Vec<&'static str>> {
        let dialect = self.0.outbox.store().dialect();
        if dialect == Dialect::Sqlite {
            return Err(Error::invalid(
                "SQLite has no users, so there are no roles to make; the file's own mode protects it",
            ));
        }
        self.transact(Mode::Write, move |tx| {
            Box::pin(async move {
                if dialect == Dialect::Postgres {
                    let schema = tx.query("SELECT quote_ident(current_schema())", &[]).await?;
                    let schema =
                        schema.first().map(|row| row.text(0)).transpose()?.unwrap_or_else(|| "public".to_owned());
                    for sql in statements(dialect) {
                        tx.execute(&sql, &[]).await?;
                    }
                    for role in &ROLES {
                        tx.execute(&format!("GRANT USAGE ON SCHEMA {schema} TO {}", role.name), &[]).await?;
                    }
                } else {
                    for sql in statements(dialect) {
                        tx.execute(&sql, &[]).await?;
                    }
                }
                Ok(())
            })
        })
        .await?;
        Ok(ROLES.iter().map(|role| role.name).collect())
    }
}
