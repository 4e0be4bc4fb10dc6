//! `postrider config`: is it right, and how is it understood?

use std::time::Duration;

use serde_json::{Value, json};

use crate::cli::ConfigCommand;
use crate::config::{AuthMode, Config, reference};
use crate::database;
use crate::failure::{Ending, Result};
use crate::output::{Output, print_bytes};

pub fn run(config: &Config, args: &ConfigCommand, output: Output) -> Result<Ending> {
    match args {
        ConfigCommand::Check => {
            let warnings: Vec<String> = config.warnings.iter().cloned().chain(database::exposure_of(config)).collect();
            let told = || {
                let warnings = warnings.iter().map(|warning| format!("warning: {warning}\n"));
                format!("{}the configuration is fine", warnings.collect::<String>())
            };
            output.show(&json!({ "ok": true, "warnings": warnings }), told)?;
        }
        ConfigCommand::Reference => print_bytes(reference::page().as_bytes())?,
        ConfigCommand::Print => {
            let shown = shown(config);
            output.show(&shown, || serde_json::to_string_pretty(&shown).unwrap_or_default())?;
        }
    }
    Ok(Ending::Done)
}

/// All that is in force; headers and the password of the database are masked.
fn shown(config: &Config) -> Value {
    let seconds = |time: Duration| time.as_secs_f64();
    let lanes: serde_json::Map<String, Value> = config
        .lanes
        .iter()
        .map(|(name, lane)| {
            let (s, r) = (&lane.settings, &lane.rules);
            let lane = json!({
                "courier": lane.destination.shown(),
                "concurrency": s.concurrency, "batch": s.batch, "lock_lease_sec": seconds(s.lease),
                "poll_interval_sec": seconds(s.poll), "max_attempts": s.budgets.max_attempts,
                "max_crashes": s.budgets.max_crashes, "backoff": format!("{:?}", s.budgets.backoff),
                "shards": r.shards, "dedup": r.dedup, "audit": r.audit, "retention_sec": seconds(r.retention),
                "key_ttl_sec": seconds(r.key_ttl), "max_payload_bytes": r.max_payload_bytes,
            });
            (name.clone(), lane)
        })
        .collect();
    json!({
        "database": database::shown(config),
        "listen": config.listen.to_string(),
        "auth": { "mode": if config.auth == AuthMode::Always { "always" } else { "auto" } },
        "tls": config.tls.as_ref().map(|files| json!({ "cert": files.cert, "key": files.key })),
        "telemetry": { "otlp_endpoint": config.otlp_endpoint.as_ref().map(|_| "***") },
        "alerts": config.alerts.map(|rules| json!({ "every_sec": seconds(rules.every), "max_age_sec": seconds(rules.max_age) })),
        "outbox": { "enabled": config.enabled, "drain_timeout_sec": seconds(config.drain) },
        "lane": lanes,
    })
}
