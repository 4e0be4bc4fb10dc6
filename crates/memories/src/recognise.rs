//! Is the service that answers the one we know? Its tenant is the digest of its key, and its database may be another: it
//! then answers as well as ever, and has nothing of what it had. One of our own memories, the sentinel, is asked for; if it
//! is gone, some others are, so that one forgotten memory is not taken for amnesia. The sentinel is the newest that was
//! seen, so that a service put back to an old backup is noticed, too.

use std::time::Duration;

use postrider::Result;
use postrider::clock::Tick;
use postrider::store::Mode;
use postrider::tx::{Row, Tx};
use serde_json::json;

use crate::upstream::{Fault, Held, Sight};
use crate::{Memories, copies, kv};

const NAMESPACE: &str = "gateway.upstream";
const KEY: &str = "sentinel";
/// Others that are asked for, from either end of what we have, and how far they are looked for.
const SAMPLE: usize = 3;
const WINDOW: usize = 1000;
/// For so long what was seen holds, unless something tells otherwise.
pub(crate) const FRESH: Duration = Duration::from_secs(5);

pub(crate) const STRANGER: &str = "OpenMemory answers, but does not have the memories it had: its key or its database is another. `postrider memory reconcile --deep` tells which are missing, `postrider memory resend --missing` writes them again";

/// What was last seen, and with which key.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Recognised {
    pub at: Tick,
    pub key_changes: u64,
    pub stranger: bool,
    /// There was something to ask for.
    pub asked: bool,
}

/// A memory the service should have.
#[derive(Clone, Debug)]
struct Witness {
    copy: i64,
    memory_id: String,
    payload_sha: String,
}

impl Witness {
    fn of(row: &Row) -> Result<Witness> {
        Ok(Witness { copy: row.int(0)?, memory_id: row.text(1)?, payload_sha: row.text(2)? })
    }

    /// What it shows under the id is this memory, and not one that has got the same id since.
    fn is(&self, held: &Held) -> bool {
        held.may_be(&self.payload_sha)
    }
}

/// What there is to ask for.
struct Witnesses {
    /// The one that was seen last, and up to which copy all was there then.
    sentinel: Option<Witness>,
    others: Vec<Witness>,
    newest: Option<Witness>,
}

/// What was seen of some witnesses.
#[derive(Default)]
struct Seen {
    there: Option<Witness>,
    seen: usize,
    gone: Vec<i64>,
    /// The service cannot be asked for one memory.
    unaskable: bool,
}

impl Memories {
    /// Is it another one than it was, as far as this process knows?
    pub(crate) fn is_stranger(&self) -> bool {
        self.health().recognised.is_some_and(|seen| seen.stranger)
    }

    /// What was seen may not hold any more.
    pub(crate) fn doubt_recognition(&self) {
        if let Some(seen) = &mut self.health().recognised {
            // Kept as it was, but asked for again by whoever wants to know.
            seen.key_changes = u64::MAX;
        }
    }

    /// Is it another one than it was? Asked at most every so often.
    pub(crate) async fn recognise(&self, fresh: Duration) -> std::result::Result<bool, Fault> {
        let known = || {
            let health = self.health();
            let failed = health.unrecognised.as_ref().filter(|(at, _)| Tick::now().since(*at) < fresh);
            if let Some((_, fault)) = failed {
                return Some(Err(fault.clone()));
            }
            let seen = health.recognised?;
            let holds = seen.key_changes == self.0.upstream.key_changes() && Tick::now().since(seen.at) < fresh;
            holds.then_some(Ok(seen.stranger))
        };
        if let Some(known) = known() {
            return known;
        }
        let _alone = self.0.recognising.lock().await;
        if let Some(known) = known() {
            return known;
        }
        let at = Tick::now();
        let asked = self.ask_witnesses().await;
        if !matches!(asked, Ok((_, false))) {
            self.note_answer(asked.as_ref().err());
        }
        self.health().unrecognised = asked.as_ref().err().map(|fault| (Tick::now(), fault.clone()));
        let (stranger, asked) = asked?;
        // The key may have been read again meanwhile: what was seen was seen with the last one.
        let recognised = Recognised { at, key_changes: self.0.upstream.key_changes(), stranger, asked };
        let before = self.health().recognised.replace(recognised);
        if stranger && !before.is_some_and(|seen| seen.stranger) {
            tracing::error!("{STRANGER}");
        }
        if stranger != before.is_some_and(|seen| seen.stranger) {
            self.0.breaker.stir();
        }
        Ok(stranger)
    }

    /// Whether it is a stranger, and whether there was anything to ask for.
    async fn ask_witnesses(&self) -> std::result::Result<(bool, bool), Fault> {
        let read = match self.0.settings.recognise {
            true => self.transact(Mode::Read, |tx| Box::pin(witnesses(tx))).await,
            false => Ok(Witnesses { sentinel: None, others: vec![], newest: None }),
        };
        let Witnesses { sentinel, others, newest } = read.map_err(|error| Fault::our_database(&error))?;
        let mut seen = Seen::default();
        if let Some(sentinel) = &sentinel {
            self.see_one(sentinel, &mut seen).await?;
        }
        // It is the one we know: from now on by the newest that it has.
        if let (Some(sentinel), Some(newest)) = (&seen.there, &newest)
            && newest.copy > sentinel.copy
            && matches!(self.0.upstream.see(&newest.memory_id).await?, Sight::Seen(held) if newest.is(&held))
        {
            seen.there = Some(newest.clone());
        }
        if seen.there.is_none() {
            for witness in &others {
                self.see_one(witness, &mut seen).await?;
            }
        }
        if seen.unaskable || seen.seen + seen.gone.len() == 0 {
            return Ok((false, false));
        }
        // One that was forgotten is no amnesia, and one that was written since is no proof against it.
        let stranger = seen.gone.len() > seen.seen;
        if let (Some(there), false) = (seen.there, stranger) {
            let newest = newest.map_or(there.copy, |newest| newest.copy);
            self.keep(there, newest, seen.gone).await.map_err(|error| Fault::our_database(&error))?;
        }
        Ok((stranger, true))
    }

    async fn see_one(&self, witness: &Witness, seen: &mut Seen) -> std::result::Result<(), Fault> {
        match self.0.upstream.see(&witness.memory_id).await? {
            Sight::Seen(held) if witness.is(&held) => {
                seen.seen += 1;
                seen.there.get_or_insert_with(|| witness.clone());
            }
            Sight::Seen(_) | Sight::Missing | Sight::Hidden => seen.gone.push(witness.copy),
            Sight::Unaskable => seen.unaskable = true,
        }
        Ok(())
    }

    /// The sentinel from now on; what was looked for in vain is marked.
    async fn keep(&self, sentinel: Witness, newest: i64, gone: Vec<i64>) -> Result<()> {
        self.transact(Mode::Write, move |tx| {
            let (sentinel, gone) = (sentinel.clone(), gone.clone());
            Box::pin(async move {
                copies::set_lost(tx, &gone, true).await?;
                let known = kv::get(tx, NAMESPACE, KEY).await?.unwrap_or_default();
                let value = json!({ "copy": sentinel.copy, "up_to": newest });
                if known == value {
                    return Ok(());
                }
                kv::set(tx, NAMESPACE, KEY, &value).await
            })
        })
        .await
    }
}

/// What the service should have: stored, its own, and not known to be gone.
const THERE: &str = "state = 'stored' AND merged = 0 AND lost_at IS NULL";

async fn witnesses(tx: &mut (dyn Tx + Send)) -> Result<Witnesses> {
    let known = kv::get(tx, NAMESPACE, KEY).await?.unwrap_or_default();
    let up_to = known["up_to"].as_i64().unwrap_or(i64::MAX);
    let mut sentinel = None;
    if let Some(copy) = known["copy"].as_i64() {
        let sql = format!("SELECT id, memory_id, payload_sha FROM memory_writes WHERE id = ? AND {THERE}");
        sentinel = tx.query(&sql, &[copy.into()]).await?.first().map(Witness::of).transpose()?;
    }
    // Without a sentinel nobody knows which were written since: the oldest are asked for.
    let (up_to, ends): (i64, &[&str]) =
        if sentinel.is_some() { (up_to, &["ASC", "DESC"]) } else { (i64::MAX, &["ASC"]) };
    let mut others: Vec<Witness> = Vec::new();
    for order in ends {
        // One more, since the sentinel may be among them.
        let mut witnesses = stored(tx, up_to, order, SAMPLE + 1).await?;
        witnesses.retain(|witness| !others.iter().chain(&sentinel).any(|other| other.copy == witness.copy));
        witnesses.truncate(SAMPLE);
        others.extend(witnesses);
    }
    let newest = stored(tx, i64::MAX, "DESC", 1).await?.pop();
    Ok(Witnesses { sentinel, others, newest })
}

/// Some of what should be there, from one end; not looked for beyond a window, whatever waits there.
async fn stored(tx: &mut (dyn Tx + Send), up_to: i64, order: &str, limit: usize) -> Result<Vec<Witness>> {
    let sql = format!(
        "SELECT id, memory_id, payload_sha FROM (SELECT id, memory_id, payload_sha, state, merged, lost_at FROM memory_writes WHERE id <= ? ORDER BY id {order} LIMIT {WINDOW}) w
         WHERE {THERE} ORDER BY id {order} LIMIT {limit}"
    );
    tx.query(&sql, &[up_to.into()]).await?.iter().map(Witness::of).collect()
}

/// The copy of the memory that was seen last.
pub(crate) async fn sentinel(tx: &mut (dyn Tx + Send)) -> Result<Option<i64>> {
    let known = kv::get(tx, NAMESPACE, KEY).await?.unwrap_or_default();
    Ok(known["copy"].as_i64())
}
