//! What of a subscription is secret: the keys it signs with and the headers it sends. Sealed in its row, opened only by who
//! delivers, and kept open as long as the row does not change.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::error::Kind;
use postrider::store::Mode;
use postrider::tx::{Dialect, Row, for_update};
use postrider::{Error, Result, Timestamp};
use serde::{Deserialize, Serialize};

use crate::keyring::Keys;
use crate::sign::Key;
use crate::subscriptions::{Subscription, from_json, to_json};
use crate::{Webhooks, catalog};

/// Secrets of one subscription that sign at the same time.
const MOST_SECRETS: usize = 8;
/// Opened secrets that are remembered.
const MOST_OPEN: usize = 20_000;

/// A key and until when it still signs; the current one has no end.
#[derive(Clone, Debug)]
pub struct SigningKey {
    pub key: Key,
    pub until: Option<Timestamp>,
}

/// A key as it is stored, encrypted.
#[derive(Serialize, Deserialize)]
struct StoredKey {
    key: String,
    until: Option<i64>,
}

/// Secrets, opened.
#[derive(Clone, Debug, Default)]
pub(crate) struct Opened {
    pub headers: Vec<(String, String)>,
    pub keys: Vec<SigningKey>,
}

impl Opened {
    /// The keys that sign now, the current one first.
    pub fn signing(&self, now: Timestamp) -> impl Iterator<Item = &Key> {
        self.keys.iter().filter(move |key| key.until.is_none_or(|until| until > now)).map(|key| &key.key)
    }
}

/// By subscription: the version of the row, and what was in it.
#[derive(Default)]
pub(crate) struct Cabinet(Mutex<HashMap<i64, (i64, Arc<Opened>)>>);

impl Cabinet {
    fn get(&self, id: i64, version: i64) -> Option<Arc<Opened>> {
        let open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        open.get(&id).filter(|known| known.0 == version).map(|known| known.1.clone())
    }

    fn put(&self, id: i64, version: i64, opened: Arc<Opened>) {
        let mut open = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if open.len() >= MOST_OPEN {
            open.clear();
        }
        open.insert(id, (version, opened));
    }

    pub fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

pub(crate) fn place(column: &str, id: i64) -> String {
    format!("subscriptions.{column}.{id}")
}

/// The current key first; of the old ones those that still sign.
pub(crate) fn sealed_keys(keyring: &Keys, id: i64, keys: &[SigningKey]) -> Result<String> {
    let stored: Vec<StoredKey> =
        keys.iter().map(|key| StoredKey { key: key.key.text(), until: key.until.map(Timestamp::micros) }).collect();
    keyring.seal(&place("secrets", id), &to_json(&stored)?)
}

pub(crate) fn sealed_headers(keyring: &Keys, id: i64, headers: &[(String, String)]) -> Result<Option<String>> {
    if headers.is_empty() {
        return Ok(None);
    }
    keyring.seal(&place("headers", id), &to_json(&headers)?).map(Some)
}

pub(crate) fn open_headers(keyring: &Keys, id: i64, sealed: &str) -> Result<Vec<(String, String)>> {
    from_json(&keyring.open(&place("headers", id), sealed)?)
}

fn open_keys(keyring: &Keys, id: i64, sealed: &str) -> Result<Vec<SigningKey>> {
    let stored: Vec<StoredKey> = from_json(&keyring.open(&place("secrets", id), sealed)?)?;
    let key = |one: StoredKey| {
        let key = Key::parse(&one.key).map_err(Error::database)?;
        Ok(SigningKey { key, until: one.until.map(Timestamp::from_micros) })
    };
    stored.into_iter().map(key).collect()
}

/// id, version, secrets, headers.
const SEALED: &str = "SELECT id, version, secrets, headers FROM subscriptions WHERE id = ?";

fn open(row: &Row, keyring: &Keys) -> Result<Opened> {
    let id = row.int(0)?;
    let headers = row.opt_text(3)?.map(|sealed| open_headers(keyring, id, &sealed)).transpose()?.unwrap_or_default();
    Ok(Opened { headers, keys: open_keys(keyring, id, &row.text(2)?)? })
}

/// The keys of a subscription after a rotation: the new one signs from now on, the old one beside it for `overlap`. What
/// was promised to older ones stays as it was; only an overlap of nothing ends them all.
fn rotated(old: Vec<SigningKey>, new: Key, now: Timestamp, overlap: Duration) -> Result<Vec<SigningKey>> {
    let mut keys = vec![SigningKey { key: new, until: None }];
    if !overlap.is_zero() {
        let end = now.plus(overlap);
        let old = old.into_iter().map(|old| SigningKey { until: Some(old.until.unwrap_or(end)), ..old });
        keys.extend(old.filter(|old| old.until.is_some_and(|until| until > now)));
    }
    if keys.len() > MOST_SECRETS {
        return Err(Error::invalid(format!(
            "{} older secrets of this subscription still sign, as was promised when they were replaced; wait until one has ended, or end them all with an overlap of 0",
            keys.len() - 1
        )));
    }
    Ok(keys)
}

impl Webhooks {
    /// The secrets of a subscription as it is in the catalogue.
    pub(crate) async fn opened(&self, subscription: &Subscription) -> Result<Arc<Opened>> {
        let (id, version) = (subscription.id, subscription.version);
        if let Some(known) = self.0.cabinet.get(id, version) {
            return Ok(known);
        }
        let sealed = async |mode| {
            self.transact(mode, move |tx| Box::pin(async move { tx.query(SEALED, &[id.into()]).await })).await
        };
        let mut rows = sealed(Mode::Read).await?;
        if rows.first().map(|row| row.int(1)).transpose()?.is_none_or(|seen| seen < version) {
            rows = sealed(Mode::Write).await?;
        }
        let row = rows.first().ok_or_else(|| Error::database(format!("subscription {id} is gone")))?;
        let opened = match open(row, &self.0.keyring.keys()) {
            // Somebody may have brought the key since.
            Err(error) if error.kind == Kind::KeyMissing => open(row, &self.0.keyring.look_again()),
            opened => opened,
        };
        let opened = Arc::new(opened?);
        self.0.cabinet.put(id, row.int(1)?, opened.clone());
        Ok(opened)
    }

    /// A new key signs from now on; the old one goes on signing beside it for `overlap`. Answers what to verify with.
    pub async fn rotate_secret(
        &self,
        id: i64,
        secret: Option<String>,
        overlap: Duration,
    ) -> Result<Option<(Subscription, String)>> {
        let given = secret.as_deref().map(Key::parse).transpose().map_err(Error::invalid)?;
        let webhooks = self.clone();
        let rotated = self
            .transact(Mode::Write, move |tx| {
                let (webhooks, given) = (webhooks.clone(), given.clone());
                Box::pin(async move {
                    // From here on nobody else changes a subscription until this is committed.
                    let version = catalog::bump_for(tx, id).await?;
                    let Some(old) = webhooks.read(tx, id).await? else { return Ok(None) };
                    let new = given.unwrap_or_else(|| Key::generate(old.signature));
                    if new.scheme() != old.signature {
                        return Err(Error::invalid("the secret is of another kind than the subscription's signature"));
                    }
                    let keyring = webhooks.sealing(tx).await?;
                    let now = catalog::now(tx).await?;
                    let rows = tx.query(SEALED, &[id.into()]).await?;
                    let row = rows.first().ok_or_else(|| Error::database("the subscription is gone"))?;
                    let old = match open_keys(&keyring, id, &row.text(2)?) {
                        Err(error) if error.kind == Kind::KeyMissing => return Err(error),
                        // What nobody can read any more is replaced.
                        Err(error) => {
                            tracing::warn!(%error, subscription_id = id, "a secret that cannot be read is replaced");
                            vec![]
                        }
                        Ok(keys) => keys,
                    };
                    let keys = rotated(old, new.clone(), now, overlap)?;
                    let sealed = sealed_keys(&keyring, id, &keys)?;
                    let sql = "UPDATE subscriptions SET secrets = ?, updated_at = ?, version = ? WHERE id = ?";
                    tx.execute(sql, &[sealed.into(), now.into(), version.into(), id.into()]).await?;
                    let subscription = webhooks.read(tx, id).await?;
                    Ok(subscription.map(|subscription| (subscription, new.verifier())))
                })
            })
            .await?;
        self.doubt();
        Ok(rotated)
    }

    /// Brings secrets that an older key of the keyring sealed over to the current one; answers how many. Each row is read
    /// and written under its lock, so nothing that changes meanwhile is undone.
    pub async fn reseal(&self) -> Result<usize> {
        let (mut resealed, mut after) = (0, 0);
        loop {
            let page = self
                .transact(Mode::Read, move |tx| {
                    Box::pin(async move {
                        let sql = "SELECT id FROM subscriptions WHERE id > ? ORDER BY id LIMIT 500";
                        tx.query(sql, &[after.into()]).await?.iter().map(|row| row.int(0)).collect::<Result<Vec<i64>>>()
                    })
                })
                .await?;
            let Some(last) = page.last().copied() else { break };
            after = last;
            for id in page {
                resealed += usize::from(self.reseal_one(id).await?);
            }
        }
        self.forget_old_keys().await?;
        Ok(resealed)
    }

    async fn reseal_one(&self, id: i64) -> Result<bool> {
        let webhooks = self.clone();
        self.transact(Mode::Write, move |tx| {
            let webhooks = webhooks.clone();
            Box::pin(async move {
                let keyring = webhooks.sealing(tx).await?;
                let sql = format!("{SEALED}{}", for_update(tx.dialect()));
                let rows = tx.query(&sql, &[id.into()]).await?;
                let Some(row) = rows.first() else { return Ok(false) };
                let (secrets, headers) = (row.text(2)?, row.opt_text(3)?);
                if !keyring.is_old(&secrets) && !headers.as_ref().is_some_and(|sealed| keyring.is_old(sealed)) {
                    return Ok(false);
                }
                let again = |column: &str, sealed: &str| {
                    keyring.seal(&place(column, id), &keyring.open(&place(column, id), sealed)?)
                };
                let secrets = again("secrets", &secrets)?;
                let headers = headers.map(|headers| again("headers", &headers)).transpose()?;
                let text = if tx.dialect() == Dialect::Postgres { "?::text" } else { "?" };
                let sql = format!("UPDATE subscriptions SET secrets = ?, headers = {text} WHERE id = ?");
                tx.execute(&sql, &[secrets.into(), headers.into(), id.into()]).await?;
                Ok(true)
            })
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sign::Scheme;

    #[test]
    fn a_rotation_keeps_what_was_promised() {
        let at = |secs: i64| Timestamp::from_micros(secs * 1_000_000);
        let hour = Duration::from_secs(3600);
        let mut keys = vec![SigningKey { key: Key::generate(Scheme::V1), until: None }];
        keys = rotated(keys, Key::generate(Scheme::V1), at(0), 24 * hour).unwrap();
        keys = rotated(keys, Key::generate(Scheme::V1), at(60), hour).unwrap();
        let ends: Vec<_> = keys.iter().map(|key| key.until).collect();
        assert_eq!(ends, [None, Some(at(3660)), Some(at(86_400))], "a short overlap shortens no earlier one");
        keys = rotated(keys, Key::generate(Scheme::V1), at(7200), hour).unwrap();
        assert_eq!(keys.len(), 3, "what has ended is dropped");
        for n in 0..MOST_SECRETS - 3 {
            keys = rotated(keys, Key::generate(Scheme::V1), at(7201 + n as i64), hour).unwrap();
        }
        let refused = rotated(keys.clone(), Key::generate(Scheme::V1), at(7300), hour);
        assert!(refused.is_err_and(|e| e.kind == Kind::Invalid), "none is dropped in silence");
        assert_eq!(rotated(keys, Key::generate(Scheme::V1), at(7300), Duration::ZERO).unwrap().len(), 1);
    }
}
