//! Which key the secrets of a database are sealed with, agreed upon by all its processes: the first one that needs a key
//! makes it, and its name is in the database from then on. Whoever does not hold it makes none of its own.

use std::sync::Arc;

use postrider::store::Mode;
use postrider::tx::{Tx, Value, for_update};
use postrider::{Error, Result};

use crate::keyring::{Keys, Name, missing, sealed_by};
use crate::{Webhooks, catalog};

/// What a process may do that wants to seal something.
#[derive(Debug, PartialEq, Eq)]
enum Ruling {
    /// Its first key is known.
    Seal,
    /// Nobody has sealed anything with its first key so far: its name is written down before it does.
    Register,
    /// There is no key anywhere: it makes one.
    Make,
    /// Secrets were sealed with this key, which it does not hold.
    Missing(Name),
}

/// `held`: the process's own, the first one seals. `known`: those in the database.
fn rule(held: &[Name], known: &[Name]) -> Ruling {
    match (held.first(), known) {
        (None, []) => Ruling::Make,
        (Some(_), []) => Ruling::Register,
        (Some(first), known) if known.contains(first) => Ruling::Seal,
        // A new one in front of one that is known is how keys are changed.
        (_, known) if held.iter().any(|name| known.contains(name)) => Ruling::Register,
        (_, [name, ..]) => Ruling::Missing(name.clone()),
    }
}

async fn known<T: Tx + ?Sized>(tx: &mut T) -> Result<Vec<Name>> {
    let rows = tx.query("SELECT key_id, fingerprint FROM webhook_keys ORDER BY made_at, key_id", &[]).await?;
    rows.iter().map(|row| Ok(Name { id: row.text(0)?, fingerprint: row.text(1)? })).collect()
}

impl Webhooks {
    /// The keys to seal with in this transaction. Makes the first one of a database; whoever asks at the same time waits
    /// for it, and finds it there.
    pub(crate) async fn sealing<T: Tx + ?Sized>(&self, tx: &mut T) -> Result<Arc<Keys>> {
        let held = self.0.keyring.keys();
        if rule(&held.names(), &known(tx).await?) == Ruling::Seal {
            return Ok(held);
        }
        let lock = format!("SELECT value FROM webhook_state WHERE name = 'keys'{}", for_update(tx.dialect()));
        tx.query(&lock, &[]).await?;
        let mut held = self.0.keyring.look_again();
        let mut known = known(tx).await?;
        let listed = !known.is_empty();
        if !listed {
            known = self.sealed_before(tx, &held).await?.into_iter().collect();
        }
        match rule(&held.names(), &known) {
            Ruling::Seal if listed => {}
            Ruling::Seal | Ruling::Register => self.register(tx, &held).await?,
            Ruling::Make => {
                held = self.0.keyring.make()?;
                self.register(tx, &held).await?;
            }
            Ruling::Missing(name) => return Err(self.lacks(&name)),
        }
        Ok(held)
    }

    /// A database older than the list of its keys: by which key was it sealed?
    async fn sealed_before<T: Tx + ?Sized>(&self, tx: &mut T, held: &Keys) -> Result<Option<Name>> {
        let rows = tx.query("SELECT id, secrets FROM subscriptions ORDER BY id LIMIT 1", &[]).await?;
        let Some(row) = rows.first() else { return Ok(None) };
        let (id, sealed) = (row.int(0)?, row.text(1)?);
        let key_id = sealed_by(&sealed).unwrap_or("?");
        if held.open(&crate::secrets::place("secrets", id), &sealed).is_ok() {
            return Ok(held.names().into_iter().find(|name| name.id == key_id));
        }
        Ok(Some(Name { id: key_id.to_owned(), fingerprint: String::new() }))
    }

    async fn register<T: Tx + ?Sized>(&self, tx: &mut T, held: &Keys) -> Result<()> {
        let Some(Name { id, fingerprint }) = held.names().into_iter().next() else { return Ok(()) };
        let mut params: Vec<Value> = vec![id.as_str().into()];
        // One of the same name and another content would not be told apart by what it sealed.
        let taken = tx.query("SELECT 1 FROM webhook_keys WHERE key_id = ?", &params).await?;
        if !taken.is_empty() {
            return Err(Error::invalid(format!(
                "a key of the name `{id}` was used before, with other bytes: give the new one another name in {}",
                self.0.keyring.place()
            )));
        }
        params.push(fingerprint.into());
        let now = tx.now().plus(0, &mut params);
        let sql = format!("INSERT INTO webhook_keys (key_id, fingerprint, made_at) VALUES (?, ?, {now})");
        tx.execute(&sql, &params).await?;
        tracing::warn!(
            key_id = id,
            place = self.0.keyring.place(),
            "secrets at rest are sealed with this key from now on: keep it safe, and give it to every process on this database"
        );
        Ok(())
    }

    fn lacks(&self, name: &Name) -> Error {
        missing(format!(
            "the secrets of this database were sealed with `{}`. Bring it from where it was made to {}",
            name.id,
            self.0.keyring.place()
        ))
    }

    /// Does this process hold every key that is in use? If not, it can neither sign nor subscribe.
    pub async fn check_key(&self) -> Result<()> {
        let webhooks = self.clone();
        self.transact(Mode::Read, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let mut known = known(tx).await?;
                if known.is_empty() {
                    let held = webhooks.0.keyring.keys();
                    known = webhooks.sealed_before(tx, &held).await?.into_iter().collect();
                }
                let lacked = |names: &[Name]| known.iter().find(|name| !names.contains(name)).cloned();
                if lacked(&webhooks.0.keyring.keys().names()).is_none() {
                    return Ok(());
                }
                match lacked(&webhooks.0.keyring.look_again().names()) {
                    None => Ok(()),
                    Some(name) => Err(webhooks.lacks(&name)),
                }
            })
        })
        .await
    }

    /// Does this process hold one of the keys in use? `None`: none is in use yet. Without one it can open nothing at all.
    pub(crate) async fn holds_a_key(&self) -> Result<Option<bool>> {
        let known = self.transact(Mode::Read, |tx| Box::pin(known(tx))).await?;
        let holds = |keys: &Keys| keys.names().iter().any(|name| known.contains(name));
        let either = || holds(&self.0.keyring.keys()) || holds(&self.0.keyring.look_again());
        Ok((!known.is_empty()).then(either))
    }

    /// After a reseal: keys that seal nothing any more are forgotten.
    pub(crate) async fn forget_old_keys(&self) -> Result<()> {
        let first = self.0.keyring.keys().names().into_iter().next();
        let Some(first) = first else { return Ok(()) };
        self.transact(Mode::Write, move |tx| {
            let first = first.clone();
            Box::pin(async move {
                // Nobody changes a subscription meanwhile.
                catalog::lock(tx).await?;
                for name in known(tx).await?.into_iter().filter(|name| *name != first) {
                    let by = format!("v1:{}:%", name.id);
                    let sql = "SELECT 1 FROM subscriptions WHERE secrets LIKE ? OR headers LIKE ? LIMIT 1";
                    if tx.query(sql, &[by.as_str().into(), by.as_str().into()]).await?.is_empty() {
                        tx.execute("DELETE FROM webhook_keys WHERE key_id = ?", &[name.id.into()]).await?;
                    }
                }
                Ok(())
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_makes_a_key_and_the_others_ask_for_it() {
        let name = |id: &str| Name { id: id.to_owned(), fingerprint: format!("of {id}") };
        let (a, b) = ([name("a")], [name("b")]);
        let missing = || Ruling::Missing(name("a"));
        assert_eq!(rule(&[], &[]), Ruling::Make);
        assert_eq!(rule(&a, &[]), Ruling::Register);
        assert_eq!(rule(&a, &a), Ruling::Seal);
        assert_eq!(rule(&[name("b"), name("a")], &a), Ruling::Register, "a new one in front");
        assert_eq!(rule(&b, &a), missing());
        assert_eq!(rule(&[], &a), missing());
        let other = [Name { fingerprint: "another".to_owned(), ..name("a") }];
        assert_eq!(rule(&other, &a), missing(), "the same name is not the same key");
    }
}
