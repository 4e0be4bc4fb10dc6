//! `postrider migrate`: creates or upgrades the schema, or says whether that is needed.

use serde_json::json;

use crate::cli::Migrate;
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Result};
use crate::output::Output;
use crate::parts;
use crate::roles;

pub async fn run(config: &Config, args: Migrate, output: Output) -> Result<Ending> {
    if args.check {
        return check(config, output).await;
    }
    let outbox = database::open(config).await?;
    let ran = outbox.migrate().await?;
    let roles = match args.roles {
        true => roles::make(&outbox, &parts::webhooks(config, &outbox).await?).await?,
        false => vec![],
    };
    if !roles.is_empty() {
        tracing::info!(roles = roles.join(", "), "roles are made");
    }
    output.show(&json!({ "ran": ran, "roles": roles }), || match ran.as_slice() {
        [] => format!("{} is up to date", database::shown(config)),
        ran => format!("{}: ran {}", database::shown(config), ran.join(", ")),
    })?;
    Ok(Ending::Done)
}

async fn check(config: &Config, output: Output) -> Result<Ending> {
    let outbox = database::open_as_is(config).await?;
    let pending = outbox.pending_migrations().await?;
    output.show(&json!({ "pending": pending }), || match pending.as_slice() {
        [] => format!("{} is up to date", database::shown(config)),
        pending => format!("{} lacks {}; run `postrider migrate`", database::shown(config), pending.join(", ")),
    })?;
    Ok(Ending::failed_if(!pending.is_empty()))
}
