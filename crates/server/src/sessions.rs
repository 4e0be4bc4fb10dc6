//! Sessions of browsers that signed in: 256 random bits, of which the database keeps a digest. A session stands for its
//! token, has an end of its own, and is good for as long as both are.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::message::{hex, sha256};
use postrider::store::{Mode, transact};
use postrider::tx::{Row, Tx, Value};
use postrider::{Outbox, Timestamp};
use serde::Serialize;

use crate::tokens::{Token, Tokens, read_to_its_end};

/// How long an answer of the database is believed: a session that was ended elsewhere is refused within this time.
const REMEMBERED: Duration = Duration::from_secs(1);
/// Sessions that are over and removed at a sign-in, at most.
const SWEPT: u32 = 1000;
/// Sessions read at once.
const PAGE: usize = 1000;

/// A session as it may be shown.
#[derive(Clone, Debug, Serialize)]
pub struct Session {
    pub id: i64,
    #[serde(skip)]
    pub token_id: i64,
    pub created_at: Timestamp,
    pub expires_at: Timestamp,
}

/// What the database said of a digest, and when.
type Seen = HashMap<[u8; 32], (Tick, Option<Session>)>;

/// The sessions of one database.
#[derive(Clone)]
pub struct Sessions {
    outbox: Outbox,
    tokens: Tokens,
    ttl: Duration,
    seen: Arc<Mutex<Seen>>,
}

const COLUMNS: &str = "id, token_id, created_at, expires_at";

impl Sessions {
    pub fn new(outbox: Outbox, tokens: Tokens, ttl: Duration) -> Self {
        Sessions { outbox, tokens, ttl, seen: Arc::default() }
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Begins a session for a token that was shown; what the browser shows from now on is told here and never again.
    pub async fn begin(&self, token: &Token) -> postrider::Result<(Session, String)> {
        let mut secret = [0_u8; 32];
        getrandom::fill(&mut secret).map_err(|e| postrider::Error::database(format!("no randomness: {e}")))?;
        let secret = hex(&secret);
        let (sha, token, ttl) = (sha256(secret.as_bytes()), token.id, self.ttl);
        let begun = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            Box::pin(async move {
                sweep(tx).await?;
                let mut params: Vec<Value> = vec![sha.as_slice().into(), token.into()];
                let created = tx.now().plus(0, &mut params);
                let expires = tx.now().plus(ttl.as_micros() as i64, &mut params);
                let sql = format!(
                    "INSERT INTO postrider_sessions (session_sha, token_id, created_at, expires_at) VALUES (?, ?, {created}, {expires})"
                );
                tx.execute(&sql, &params).await?;
                let sql = format!("SELECT {COLUMNS} FROM postrider_sessions WHERE session_sha = ?");
                let rows = tx.query(&sql, &[sha.as_slice().into()]).await?;
                rows.first().map(session_of).unwrap_or_else(|| Err(postrider::Error::database("the session is gone")))
            })
        })
        .await?;
        Ok((begun, secret))
    }

    /// The session that was shown and the token it stands for, if both are good.
    pub async fn verify(&self, shown: &str) -> postrider::Result<Option<(Session, Token)>> {
        // Found by its digest, of which nobody outside knows how near a guess came.
        let sha = sha256(shown.as_bytes());
        let Some(session) = self.look_up(sha).await? else { return Ok(None) };
        Ok(self.tokens.still_good(session.token_id).await?.map(|token| (session, token)))
    }

    async fn look_up(&self, sha: [u8; 32]) -> postrider::Result<Option<Session>> {
        let now = Tick::now();
        if let Some((at, session)) = self.seen().get(&sha)
            && now.since(*at) < REMEMBERED
        {
            return Ok(session.clone());
        }
        let session = read_to_its_end(&self.outbox, move |tx| {
            Box::pin(async move {
                let mut params: Vec<Value> = vec![sha.as_slice().into()];
                let now = tx.now().plus(0, &mut params);
                let sql =
                    format!("SELECT {COLUMNS} FROM postrider_sessions WHERE session_sha = ? AND expires_at > {now}");
                tx.query(&sql, &params).await?.first().map(session_of).transpose()
            })
        })
        .await?;
        let mut seen = self.seen();
        if seen.len() > 1000 {
            seen.clear(); // somebody guesses
        }
        seen.insert(sha, (now, session.clone()));
        Ok(session)
    }

    /// Ends the session that was shown, if there is one. Anybody may show anything: what is no session is not written about.
    pub async fn end(&self, shown: &str) -> postrider::Result<()> {
        let sha = sha256(shown.as_bytes());
        if self.look_up(sha).await?.is_none() {
            return Ok(());
        }
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            Box::pin(async move {
                let sql = "DELETE FROM postrider_sessions WHERE session_sha = ?";
                tx.execute(sql, &[sha.as_slice().into()]).await.map(drop)
            })
        })
        .await?;
        self.seen().insert(sha, (Tick::now(), None));
        Ok(())
    }

    /// Those that are not over, the newest first; of one that its token has taken along nothing is left.
    pub async fn list(outbox: &Outbox) -> postrider::Result<Vec<Session>> {
        let mut sessions: Vec<Session> = Vec::new();
        loop {
            let before = sessions.last().map_or(i64::MAX, |session| session.id);
            let page = transact(&**outbox.store(), Mode::Read, move |tx| {
                Box::pin(async move {
                    let mut params = vec![before.into()];
                    let now = tx.now().plus(0, &mut params);
                    let sql = format!(
                        "SELECT {COLUMNS} FROM postrider_sessions WHERE id < ? AND expires_at > {now} ORDER BY id DESC LIMIT {PAGE}"
                    );
                    tx.query(&sql, &params).await?.iter().map(session_of).collect::<postrider::Result<Vec<_>>>()
                })
            })
            .await?;
            let more = page.len() == PAGE;
            sessions.extend(page);
            if !more {
                return Ok(sessions);
            }
        }
    }
}

/// Ends all sessions of a token, with whatever else `tx` does to it.
pub async fn end_all(tx: &mut (dyn Tx + Send), token: i64) -> postrider::Result<()> {
    tx.execute("DELETE FROM postrider_sessions WHERE token_id = ?", &[token.into()]).await.map(drop)
}

/// Removes some of what is over: who signs in cleans up.
async fn sweep(tx: &mut (dyn Tx + Send)) -> postrider::Result<()> {
    let mut params = Vec::new();
    let now = tx.now().plus(0, &mut params);
    let sql = format!("SELECT id FROM postrider_sessions WHERE expires_at <= {now} ORDER BY expires_at LIMIT {SWEPT}");
    let over = tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect::<postrider::Result<Vec<_>>>()?;
    if over.is_empty() {
        return Ok(());
    }
    let marks = vec!["?"; over.len()].join(", ");
    let over: Vec<Value> = over.into_iter().map(Value::from).collect();
    tx.execute(&format!("DELETE FROM postrider_sessions WHERE id IN ({marks})"), &over).await.map(drop)
}

fn session_of(row: &Row) -> postrider::Result<Session> {
    Ok(Session { id: row.int(0)?, token_id: row.int(1)?, created_at: row.time(2)?, expires_at: row.time(3)? })
}
