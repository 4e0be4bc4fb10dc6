//! Does the service take what is written? The audit knows how the last write ended, whoever made it; if it failed, and
//! that was not long ago, it is tried: with a text the service has, which leaves nothing new there, or with one that is
//! taken out again.

use std::time::Duration;

use postrider::Result;
use postrider::clock;
use postrider::store::Mode;
use postrider::time::micros_of;
use postrider::tx::Tx;
use serde_json::json;

use crate::note::Note;
use crate::upstream::{Addition, Blame, Dialect, Fault};
use crate::{Memories, copies, recognise};

/// Rows of the audit that are looked through for the last write.
const ROWS: usize = 100;
/// A failure is no news any more after this.
const RECENT: Duration = Duration::from_secs(24 * 3600);
/// Where nothing can be written without leaving something, a failure is believed for so long.
const BELIEVED: Duration = Duration::from_secs(60);

/// A write that failed, and none has succeeded since.
#[derive(Clone, Debug)]
struct Failing {
    audit_id: i64,
    reason: String,
    /// It was a short while ago.
    just_now: bool,
    /// A memory the service has, to try with.
    known: Option<Note>,
}

/// What the reason of an audit says of writing.
fn sign(reason: &str) -> Option<bool> {
    if matches!(reason, "openmemory_write_success" | "openmemory_merged" | "outbox_flush_success") {
        return Some(true);
    }
    if reason == "outbox_flush_retry" {
        return Some(false);
    }
    let class = reason.strip_prefix("openmemory_write_failed:")?;
    // The others say that it was not tried, that it waited, or whose the fault is.
    let tried = class.starts_with("http_5") || matches!(class, "timeout" | "no_id" | "response_invalid");
    tried.then_some(false)
}

impl Memories {
    /// Why writes fail, if they do.
    pub(crate) async fn writes_fail(&self) -> Option<String> {
        let cleared = self.health().cleared;
        let failing = self.transact(Mode::Read, move |tx| Box::pin(last_failure(tx, cleared))).await;
        let failing = match failing {
            Ok(failing) => failing?,
            Err(error) => {
                tracing::warn!(%error, "how the last write ended cannot be read");
                return None;
            }
        };
        let tried = match &failing.known {
            Some(known) => self.try_again(known).await,
            None => self.try_writing().await,
        };
        match tried {
            Ok(true) => {
                self.health().cleared = failing.audit_id;
                None
            }
            Ok(false) => failing.just_now.then(|| format!("the last write failed: {}", failing.reason)),
            Err(fault) if fault.blame == Blame::Limit => None,
            Err(fault) => Some(format!("it answers, but takes nothing: {} {}", fault.code, fault.message)),
        }
    }
}

impl Memories {
    /// Writes what the service has. If it takes that for something new, it is taken out again.
    async fn try_again(&self, known: &Note) -> std::result::Result<bool, Fault> {
        if self.0.upstream.ping().await? == Dialect::Py {
            return Ok(false);
        }
        let Some(turn) = self.0.turns.take(known) else { return Ok(false) };
        let written = self.add(known, None, turn).await?;
        if !written.deduplicated {
            self.0.upstream.forget(&written.memory_id).await?;
        }
        Ok(true)
    }

    /// Writes a trial and takes it out again; `false`: this service cannot take anything out.
    async fn try_writing(&self) -> std::result::Result<bool, Fault> {
        if self.0.upstream.ping().await? == Dialect::Py {
            return Ok(false);
        }
        let word = || format!("{:x}", clock::seed());
        let content = format!("postrider trial {} {} {} {}", word(), word(), word(), word());
        let metadata = json!({ "source": "postrider", "trial": true });
        let added = self.0.upstream.add(&Addition { content: &content, tags: vec![], metadata }).await?;
        if !added.deduplicated {
            self.0.upstream.forget(&added.id).await?;
        }
        Ok(true)
    }
}

async fn last_failure(tx: &mut (dyn Tx + Send), cleared: i64) -> Result<Option<Failing>> {
    let mut params = Vec::new();
    let just_now = tx.now().plus(-micros_of(BELIEVED), &mut params);
    params.push(cleared.into());
    let recent = tx.now().plus(-micros_of(RECENT), &mut params);
    let sql = format!(
        "SELECT audit_id, reason, CASE WHEN updated_at >= {just_now} THEN 1 ELSE 0 END FROM write_audit
         WHERE audit_id > ? AND created_at >= {recent} ORDER BY audit_id DESC LIMIT {ROWS}"
    );
    for row in tx.query(&sql, &params).await? {
        let reason = row.text(1)?;
        match sign(&reason) {
            Some(true) => return Ok(None),
            Some(false) => {
                let known = match recognise::sentinel(tx).await? {
                    Some(copy) => copies::note_of(tx, copy).await?,
                    None => None,
                };
                return Ok(Some(Failing { audit_id: row.int(0)?, reason, just_now: row.bool(2)?, known }));
            }
            None => {}
        }
    }
    Ok(None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_was_tried_tells_of_writing() {
        for (reason, said) in [
            ("openmemory_write_success", Some(true)),
            ("outbox_flush_success", Some(true)),
            ("openmemory_write_failed:http_500", Some(false)),
            ("openmemory_write_failed:timeout", Some(false)),
            ("outbox_flush_retry", Some(false)),
            ("openmemory_write_failed:http_429", None),
            ("openmemory_write_failed:breaker_open", None),
            ("openmemory_write_failed:connect_refused", None),
            ("openmemory_refused:http_400", None),
            ("deduplicated", None),
        ] {
            assert_eq!(sign(reason), said, "{reason}");
        }
    }
}
