//! The parts that share the outbox, opened as they are configured.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use postrider::Outbox;
use postrider::alerts::Alerts;
use postrider::store::{Mode, transact};
use postrider_memories::Memories;
use postrider_orders::Orders;
use postrider_orders::adapters::{Adapter, PaperBroker};
use postrider_webhooks::Webhooks;
use postrider_webhooks::keyring::Keyring;

use crate::config::{ALERTS, Broker, Config};
use crate::failure::{Failure, Result};
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
    let (keyring, alerts) = (keyring(config, outbox).await?, alerts(config, outbox));
    Ok(Webhooks::new(outbox.clone(), config.webhooks.clone(), keyring, config.reports.clone(), alerts).await?)
}

/// Orders on this outbox.
pub async fn orders(config: &Config, outbox: &Outbox) -> Result<Orders> {
    let orders = &config.orders;
    let adapter: Arc<dyn Adapter> = match &orders.broker {
        Broker::Paper { settings, .. } => Arc::new(PaperBroker::new(outbox.clone(), *settings)),
        Broker::Http { settings, credentials } => {
            Arc::new(HttpBroker::new(settings.clone())?.with_credentials(credentials.clone()))
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
    Ok(Memories::new(outbox.clone(), memory.settings.clone(), &memory.settling, alerts(config, outbox))?)
}

/// The key for secrets at rest. A file that is not there is made when it is first needed, unless the database has secrets
/// already that another key sealed.
async fn keyring(config: &Config, outbox: &Outbox) -> Result<Keyring> {
    let reference = config.secrets_key.clone();
    let missing = reference.strip_prefix("file:").map(PathBuf::from).filter(|path| !path.exists());
    let Some(path) = missing else {
        let text = secret::resolve(&reference).map_err(|e| Failure::usage(format!("[secrets] key: {e}")))?;
        return Ok(Keyring::parse(&text)?);
    };
    if has_secrets(outbox).await? {
        return Err(Failure::usage(format!(
            "the database has secrets, but their key is not here: bring {} from where it was made, or say in [secrets] key where it is",
            path.display()
        )));
    }
    Ok(Keyring::on_demand(Box::new(move || make(&path))))
}

async fn has_secrets(outbox: &Outbox) -> Result<bool> {
    let found = transact(&**outbox.store(), Mode::Read, |tx| {
        Box::pin(async move { Ok(!tx.query("SELECT 1 FROM subscriptions LIMIT 1", &[]).await?.is_empty()) })
    });
    Ok(found.await?)
}

/// Makes the file, readable by its owner only, and answers what is in it. If another process is making it too, the first
/// one wins.
fn make(path: &Path) -> postrider::Result<String> {
    let wrong = |e: std::io::Error| {
        let file = path.display();
        postrider::Error::invalid(format!(
            "cannot make the key for secrets {file}: {e}; say in [secrets] key where it is"
        ))
    };
    let file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path);
    match file {
        Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => {}
        Err(e) => return Err(wrong(e)),
        Ok(mut file) => {
            file.write_all(Keyring::generate()?.as_bytes()).map_err(wrong)?;
            tracing::warn!(file = %path.display(), "made a key for secrets at rest; keep it safe, and give it to every process on this database");
        }
    }
    std::fs::read_to_string(path).map_err(wrong)
}
