//! Opens the outbox of the configured database and makes sure its tables are there.
//!
//! An embedded SQLite file belongs to whoever runs the command, so it is migrated as needed. A server's schema is
//! changed only by `postrider migrate`, when its owner says so.

use std::path::Path;

use postrider::error::Kind;
use postrider::stores::without_password;
use postrider::{Outbox, stores};

use crate::config::Config;
use crate::failure::{Failure, Result};
use crate::schema;

/// Whatever its schema.
pub async fn open(config: &Config) -> Result<Outbox> {
    let store = stores::open(&config.database, config.store_lanes(), options(config)).await?;
    Ok(Outbox::new(store))
}

fn options(config: &Config) -> stores::Options {
    let defaults = stores::Options::default();
    let lease = config.lanes.values().map(|lane| lane.settings.lease).min().unwrap_or(defaults.lease);
    stores::Options { lease, migrations: schema::migrations(), ..defaults }
}

/// Only to look: a SQLite file that is not there is not created, and looks empty.
pub async fn open_as_is(config: &Config) -> Result<Outbox> {
    if missing_file(config).is_none() {
        return open(config).await;
    }
    Ok(Outbox::new(stores::open("sqlite::memory:", config.store_lanes(), options(config)).await?))
}

/// Migrated, wherever it is: for the server, which several processes may start at once.
pub async fn open_migrated(config: &Config) -> Result<Outbox> {
    let outbox = open(config).await?;
    // Whoever owns nothing may still serve what is there: a migration begins by making a table.
    if is_server(config) && matches!(outbox.pending_migrations().await, Ok(pending) if pending.is_empty()) {
        register_lanes(&outbox).await?;
        return Ok(outbox);
    }
    tell(config, outbox.migrate().await?);
    Ok(outbox)
}

fn is_server(config: &Config) -> bool {
    !config.database.starts_with("sqlite:")
}

fn tell(config: &Config, ran: Vec<String>) {
    for migration in ran {
        tracing::info!(migration, database = shown(config), "migrated");
    }
}

/// Tells the database the lanes as configured. What is the same is not written, so that whoever may only work may start.
pub async fn register_lanes(outbox: &Outbox) -> Result<()> {
    allowed(outbox.register_lanes().await)
}

/// The rules in the database are for those who enqueue by SQL; a worker goes by its own.
fn allowed(registered: postrider::Result<()>) -> Result<()> {
    match registered {
        Err(error) if error.kind == Kind::Denied => {
            tracing::warn!(%error, "the lanes are not registered as configured here, and this user may not do so; run `postrider migrate` as the owner");
            Ok(())
        }
        Err(error) if error.kind == Kind::Locked => {
            tracing::warn!(%error, "the lanes are not registered as configured here, as somebody has their rows locked; the next start does so, or `postrider migrate`");
            Ok(())
        }
        other => Ok(other?),
    }
}

/// With the schema this binary needs. Whoever goes on to serve the lanes also registers them as configured.
pub async fn open_ready(config: &Config) -> Result<Outbox> {
    let outbox = open(config).await?;
    if !is_server(config) {
        tell(config, outbox.store().migrate().await?);
        return Ok(outbox);
    }
    let pending = outbox.pending_migrations().await?;
    if pending.is_empty() {
        allowed(outbox.register_missing_lanes().await)?;
        return Ok(outbox);
    }
    Err(Failure::usage(format!(
        "the database lacks {}; run `postrider migrate` first (with the same --database)",
        pending.join(", ")
    )))
}

/// For commands that only look or mend: they do not create a database where there is none.
pub async fn open_existing(config: &Config) -> Result<Outbox> {
    if let Some(file) = missing_file(config) {
        return Err(Failure::unreachable(format!(
            "there is no database {file}; check --database, or begin with `postrider enqueue` or `postrider migrate`"
        )));
    }
    open_ready(config).await
}

/// The SQLite file that is named but not there.
fn missing_file(config: &Config) -> Option<&str> {
    let rest = config.database.strip_prefix("sqlite:")?;
    let path = rest.strip_prefix("//").unwrap_or(rest).split('?').next()?;
    (!path.is_empty() && path != ":memory:" && !Path::new(path).exists()).then_some(path)
}

/// The database as it may be shown.
pub fn shown(config: &Config) -> String {
    without_password(&config.database)
}

/// What somebody between us and the database could do, as a warning.
pub fn exposure_of(config: &Config) -> Option<String> {
    let why = exposure(&config.database)?;
    Some(format!(
        "the database {} is reached {why}; see \"The way to the database\" in docs/operating.md",
        shown(config)
    ))
}

/// Said at the start of what runs for long.
pub fn warn(config: &Config) {
    for warning in config.warnings.iter().cloned().chain(exposure_of(config)) {
        tracing::warn!("{warning}");
    }
}

/// How a database beyond this machine is reached, if that is in the clear or without a look at its certificate.
fn exposure(url: &str) -> Option<&'static str> {
    let (scheme, rest) = url.split_once("://")?;
    let (before, query) = rest.split_once('?').unwrap_or((rest, ""));
    let parameters: Vec<(String, String)> = url::form_urlencoded::parse(query.as_bytes()).into_owned().collect();
    let given = |name: &str| parameters.iter().rev().find(|(n, _)| n == name).map(|(_, value)| value.as_str());
    let authority = before.rsplit_once('@').map_or(before, |(_, host)| host).split('/').next().unwrap_or_default();
    let hosts = given("hostaddr").or_else(|| given("host")).unwrap_or(authority);
    if hosts.split(',').all(is_this_machine) {
        return None;
    }
    const CLEAR: &str = "in the clear";
    const UNVERIFIED: &str = "without a look at its certificate";
    match scheme {
        "postgres" | "postgresql" => match (given("sslmode").unwrap_or("prefer"), given("sslrootcert")) {
            ("verify-ca" | "verify-full", _) | ("require", Some(_)) => None,
            ("require", None) => Some(UNVERIFIED),
            ("disable", _) => Some(CLEAR),
            _ => Some("in the clear where it has no TLS, and otherwise without a look at its certificate"),
        },
        "mysql" | "mariadb" if given("require_ssl") != Some("true") => Some(CLEAR),
        "mysql" | "mariadb" => {
            [given("verify_ca"), given("verify_identity")].contains(&Some("false")).then_some(UNVERIFIED)
        }
        _ => None,
    }
}

/// A socket, or a name of this machine; with a port or without.
fn is_this_machine(host: &str) -> bool {
    let name = match host.strip_prefix('[') {
        Some(rest) => rest.split(']').next().unwrap_or_default(),
        None if host.matches(':').count() == 1 => host.split(':').next().unwrap_or_default(),
        None => host,
    };
    let is_loopback = name.parse::<std::net::IpAddr>().is_ok_and(|address| address.is_loopback());
    is_loopback || name.is_empty() || name == "localhost" || name.starts_with('/') || name.starts_with("%2F")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_could_listen_on_the_way_to_the_database() {
        let prefers = "in the clear where it has no TLS, and otherwise without a look at its certificate";
        for (url, told) in [
            ("sqlite://a.db", None),
            ("postgres://u:p@localhost/a", None),
            ("postgres://u:p@127.0.0.1:5432/a?sslmode=disable", None),
            ("postgres://u:p@[::1]:5432/a", None),
            ("postgres:///a?host=/var/run/postgresql", None),
            ("postgres://u:p@%2Fvar%2Frun/a", None),
            ("postgres://u:p@db/a", Some(prefers)),
            ("postgres://u:p@localhost/a?hostaddr=10.1.2.3", Some(prefers)),
            ("postgres://u:p@db/a?hostaddr=127.0.0.1", None),
            ("postgres://u:p@localhost,db/a", Some(prefers)),
            ("postgres://u@db/a?sslmode=prefer&sslrootcert=ca.pem", Some(prefers)),
            ("postgres://u:p@db/a?sslmode=disable", Some("in the clear")),
            ("postgres://u:p@db/a?sslmode=require", Some("without a look at its certificate")),
            ("postgres://u:p@db/a?sslmode=require&sslrootcert=ca.pem", None),
            ("postgres://u:p@db/a?sslmode=verify-full", None),
            ("mysql://u:p@127.0.0.1/a", None),
            ("mysql://u:p@db:3306/a", Some("in the clear")),
            ("mariadb://u:p@db/a?require_ssl=true", None),
            ("mysql://u:p@db/a?require_ssl=true&verify_ca=false", Some("without a look at its certificate")),
        ] {
            assert_eq!(exposure(url), told, "{url}");
        }
    }
}
