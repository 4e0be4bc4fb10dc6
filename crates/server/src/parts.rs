//! The parts that share the outbox, opened as they are configured.

use std::sync::Arc;

use postrider::Outbox;
use postrider::alerts::Alerts;
use postrider::couriers::exchange::Resolve;
use postrider_memories::Memories;
use postrider_orders::Orders;
use postrider_orders::adapters::{Adapter, HttpBroker, PaperBroker};
use postrider_webhooks::Webhooks;
use postrider_webhooks::guard::Guarded;
use postrider_webhooks::keyring::Keyring;

use crate::config::{ALERTS, Broker, Config};
use crate::failure::{Failure, Result};
use crate::keyfile::KeyFile;
use crate::secret;

/// All of them.
#[derive(Clone)]
pub struct Parts {
    pub webhooks: Webhooks,
    pub orders: Orders,
    /// Where `[memory]` is.
    pub memories: Option<Memories>,
}

impl Parts {
    pub async fn open(config: &Config, outbox: &Outbox) -> Result<Parts> {
        Ok(Parts {
            webhooks: webhooks(config, outbox).await?,
            orders: orders(config, outbox).await?,
            memories: config.memory.as_ref().map(|_| memories(config, outbox)).transpose()?,
        })
    }
}

fn alerts(config: &Config, outbox: &Outbox) -> Option<Alerts> {
    config.alerts.map(|rules| Alerts::new(outbox.clone(), ALERTS, rules.every))
}

/// Webhooks on this outbox.
pub async fn webhooks(config: &Config, outbox: &Outbox) -> Result<Webhooks> {
    let (keyring, alerts) = (keyring(config)?, alerts(config, outbox));
    Ok(Webhooks::new(outbox.clone(), config.webhooks.clone(), keyring, config.reports.clone(), alerts).await?)
}

/// Orders on this outbox.
pub async fn orders(config: &Config, outbox: &Outbox) -> Result<Orders> {
    let orders = &config.orders;
    let adapter: Arc<dyn Adapter> = match &orders.broker {
        Broker::Paper { settings, .. } => Arc::new(PaperBroker::new(outbox.clone(), *settings)),
        Broker::Http { settings, credentials, guard } => {
            let broker = HttpBroker::new(settings.clone())?.with_credentials(credentials.clone());
            Arc::new(if *guard { broker.resolving_by(guarded(config)?)? } else { broker })
        }
    };
    let alerts = alerts(config, outbox);
    Ok(Orders::new(outbox.clone(), orders.settings.clone(), orders.book.clone(), adapter, alerts).await?)
}

/// The memory gateway on this outbox.
pub fn memories(config: &Config, outbox: &Outbox) -> Result<Memories> {
    let Some(memory) = &config.memory else {
        return Err(Failure::usage(
            "there is no memory gateway: say where OpenMemory is, with [memory] url in postrider.toml",
        ));
    };
    let mut settings = memory.settings.clone();
    settings.upstream.resolver = memory.guard.then(|| guarded(config)).transpose()?;
    Ok(Memories::new(outbox.clone(), settings, &memory.settling, alerts(config, outbox))?)
}

/// The address guard of webhooks, for URLs of the configuration whose section asks for it.
pub fn guarded(config: &Config) -> Result<Arc<dyn Resolve>> {
    let (policy, dns) = (config.webhooks.policy.clone(), &config.webhooks.dns);
    Ok(Arc::new(Guarded::new(policy, dns).map_err(Failure::usage)?))
}

/// The key for secrets at rest. A file that is not there is made by the first process on the database that needs one.
fn keyring(config: &Config) -> Result<Keyring> {
    let reference = &config.secrets_key;
    if let Some(path) = reference.strip_prefix("file:") {
        return Ok(Keyring::at(Box::new(KeyFile::new(path)))?);
    }
    let text = secret::resolve(reference).map_err(|e| Failure::usage(format!("[secrets] key: {e}")))?;
    Ok(Keyring::parse(&text)?)
}
