//! Access tokens: 256 random bits, of which the database keeps a digest; scopes, the lanes and spaces it
//! is for, an optional end.
//!
//! A token reads `pr_<id>_<secret>`. The id finds the row, the secret's digest is compared in constant time, and every
//! refusal does the same work.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use postrider::message::sha256;
use postrider::store::{Mode, transact};
use postrider::tx::{BoxFuture, Row, Tx, Value};
use postrider::{Outbox, Timestamp};
use serde::Serialize;
use subtle::ConstantTimeEq;

/// How long an answer of the database is believed: a revoked token is refused within this time.
const REMEMBERED: Duration = Duration::from_secs(1);

/// What a token allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Scope {
    /// Write messages.
    Enqueue,
    /// Look at everything but payloads and secrets.
    Read,
    /// Look at what was sent and what was answered, too.
    Payload,
    /// Requeue, release, pause, resume.
    Operate,
    /// All of it.
    Admin,
}

impl Scope {
    pub const ALL: [Scope; 5] = [Scope::Enqueue, Scope::Read, Scope::Payload, Scope::Operate, Scope::Admin];

    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Enqueue => "enqueue",
            Scope::Read => "read",
            Scope::Payload => "payload",
            Scope::Operate => "operate",
            Scope::Admin => "admin",
        }
    }
}

impl fmt::Display for Scope {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl FromStr for Scope {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        Scope::ALL
            .into_iter()
            .find(|scope| scope.as_str() == text)
            .ok_or_else(|| format!("`{text}` is no scope; there are enqueue, read, payload, operate and admin"))
    }
}

/// A token as it may be shown: everything but the token.
#[derive(Clone, Debug, Serialize)]
pub struct Token {
    pub id: i64,
    pub name: String,
    pub scopes: Vec<Scope>,
    /// The first of `lanes`.
    pub lane: Option<String>,
    /// Empty: all.
    pub lanes: Vec<String>,
    /// Spaces of memories, or kinds of them (`team:*`). Empty: all.
    pub spaces: Vec<String>,
    pub created_at: Timestamp,
    pub expires_at: Option<Timestamp>,
    pub revoked_at: Option<Timestamp>,
}

impl Token {
    pub fn allows(&self, scope: Scope) -> bool {
        self.scopes.iter().any(|own| *own == scope || *own == Scope::Admin)
    }
}

/// What a new token is to allow.
#[derive(Clone, Debug)]
pub struct Wish {
    pub name: String,
    pub scopes: Vec<Scope>,
    pub lanes: Vec<String>,
    pub spaces: Vec<String>,
    pub expires: Option<Duration>,
}

#[derive(Clone)]
struct Kept {
    token: Token,
    sha: [u8; 32],
    /// Valid by the database's clock when it was looked at.
    valid: bool,
}

/// What the database said of an id, and when.
type Seen = HashMap<i64, (Tick, Option<Kept>)>;

/// The tokens of one database.
#[derive(Clone)]
pub struct Tokens {
    outbox: Outbox,
    seen: Arc<Mutex<Seen>>,
}

const COLUMNS: &str = "id, name, scopes, lane, created_at, expires_at, revoked_at, token_sha, lanes, spaces";

impl Tokens {
    pub fn new(outbox: Outbox) -> Self {
        Tokens { outbox, seen: Arc::default() }
    }

    /// Makes a token; it is told here and never again.
    pub async fn create(&self, wish: Wish) -> postrider::Result<(Token, String)> {
        let mut secret = [0_u8; 32];
        getrandom::fill(&mut secret).map_err(|e| postrider::Error::database(format!("no randomness: {e}")))?;
        let secret = postrider::message::hex(&secret);
        let sha = sha256(secret.as_bytes());
        let work = Arc::new((wish, sha));
        let token = transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let work = work.clone();
            Box::pin(async move {
                let (wish, sha) = &*work;
                let scopes = wish.scopes.iter().map(|s| s.as_str()).collect::<Vec<_>>().join(",");
                let list = |names: &[String]| (!names.is_empty()).then(|| names.join(" "));
                let mut params: Vec<Value> = vec![
                    wish.name.as_str().into(),
                    sha.as_slice().into(),
                    scopes.into(),
                    wish.lanes.first().cloned().into(),
                    list(&wish.lanes).into(),
                    list(&wish.spaces).into(),
                ];
                let created = tx.now().plus(0, &mut params);
                let expires = match wish.expires {
                    Some(after) => tx.now().plus(after.as_micros() as i64, &mut params),
                    None => "NULL".to_owned(),
                };
                let sql = format!(
                    "INSERT INTO api_tokens (name, token_sha, scopes, lane, lanes, spaces, created_at, expires_at)
                     VALUES (?, ?, ?, ?, ?, ?, {created}, {expires})"
                );
                tx.execute(&sql, &params).await?;
                let sql = format!("SELECT {COLUMNS} FROM api_tokens WHERE token_sha = ?");
                let rows = tx.query(&sql, &[sha.as_slice().into()]).await?;
                rows.first().map(token_of).unwrap_or_else(|| Err(postrider::Error::database("the token is gone")))
            })
        })
        .await?;
        let text = format!("pr_{}_{secret}", token.id);
        Ok((token, text))
    }

    pub async fn list(&self) -> postrider::Result<Vec<Token>> {
        let sql = format!("SELECT {COLUMNS} FROM api_tokens ORDER BY id");
        let sql: Arc<str> = sql.into();
        transact(&**self.outbox.store(), Mode::Read, move |tx| {
            let sql = sql.clone();
            Box::pin(async move { tx.query(&sql, &[]).await?.iter().map(token_of).collect() })
        })
        .await
    }

    /// Is there one that can be used?
    pub async fn any(&self) -> postrider::Result<bool> {
        transact(&**self.outbox.store(), Mode::Read, move |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let now = tx.now().plus(0, &mut params);
                let sql = format!(
                    "SELECT 1 FROM api_tokens WHERE revoked_at IS NULL AND (expires_at IS NULL OR expires_at > {now}) LIMIT 1"
                );
                Ok(!tx.query(&sql, &params).await?.is_empty())
            })
        })
        .await
    }

    /// Its sessions end with it. `false`: there is no such token, or it was revoked before.
    pub async fn revoke(&self, id: i64) -> postrider::Result<bool> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let now = tx.now().plus(0, &mut params);
                params.push(id.into());
                let sql = format!("UPDATE api_tokens SET revoked_at = {now} WHERE id = ? AND revoked_at IS NULL");
                let revoked = tx.execute(&sql, &params).await? > 0;
                crate::sessions::end_all(tx, id).await?;
                Ok(revoked)
            })
        })
        .await
    }

    /// The token that was shown, if it is good. A malformed, unknown, wrong, expired or revoked one costs the same.
    pub async fn verify(&self, shown: &str) -> postrider::Result<Option<Token>> {
        let (id, secret) = parse(shown);
        let sha = sha256(secret.as_bytes());
        let kept = self.look_up(id).await?;
        let stand_in = Kept {
            token: Token {
                id: 0,
                name: String::new(),
                scopes: vec![],
                lane: None,
                lanes: vec![],
                spaces: vec![],
                created_at: Timestamp::default(),
                expires_at: None,
                revoked_at: None,
            },
            sha: [0; 32],
            valid: false,
        };
        let kept = kept.unwrap_or(stand_in);
        let same = bool::from(kept.sha.as_slice().ct_eq(sha.as_slice()));
        Ok((same & kept.valid).then_some(kept.token))
    }

    /// The token of that id, if it is good: for whoever stands for it.
    pub async fn still_good(&self, id: i64) -> postrider::Result<Option<Token>> {
        Ok(self.look_up(id).await?.filter(|kept| kept.valid).map(|kept| kept.token))
    }

    async fn look_up(&self, id: i64) -> postrider::Result<Option<Kept>> {
        let now = Tick::now();
        let remembered = {
            let seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
            seen.get(&id).filter(|(at, _)| now.since(*at) < REMEMBERED).map(|(_, kept)| kept.clone())
        };
        if let Some(kept) = remembered {
            return Ok(kept);
        }
        let kept = read_to_its_end(&self.outbox, move |tx| {
            Box::pin(async move {
                let mut params = Vec::new();
                let now = tx.now().plus(0, &mut params);
                params.push(id.into());
                let sql = format!(
                    "SELECT {COLUMNS}, CASE WHEN revoked_at IS NULL AND (expires_at IS NULL OR expires_at > {now}) THEN 1 ELSE 0 END
                     FROM api_tokens WHERE id = ?"
                );
                let rows = tx.query(&sql, &params).await?;
                let Some(row) = rows.first() else { return Ok(None) };
                let sha: [u8; 32] = row.bytes(7)?.as_ref().try_into().unwrap_or([0; 32]);
                Ok(Some(Kept { token: token_of(row)?, sha, valid: row.bool(10)? }))
            })
        })
        .await?;
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.len() > 1000 {
            seen.clear(); // somebody tries ids
        }
        seen.insert(id, (now, kept.clone()));
        Ok(kept)
    }
}

/// The id and the secret; of a malformed token, ones that fit nothing.
fn parse(shown: &str) -> (i64, &str) {
    let parts = shown.strip_prefix("pr_").and_then(|rest| rest.split_once('_'));
    parts.and_then(|(id, secret)| Some((id.parse().ok()?, secret))).unwrap_or((0, ""))
}

fn token_of(row: &Row) -> postrider::Result<Token> {
    let list = |text: Option<String>| text.map_or(vec![], |text| text.split(' ').map(str::to_owned).collect());
    let lane = row.opt_text(3)?;
    Ok(Token {
        id: row.int(0)?,
        name: row.text(1)?,
        scopes: row.text(2)?.split(',').filter_map(|scope| scope.parse().ok()).collect(),
        // A token from before there could be several.
        lanes: list(row.opt_text(8)?.or_else(|| lane.clone())),
        spaces: list(row.opt_text(9)?),
        lane,
        created_at: row.time(4)?,
        expires_at: row.opt_time(5)?,
        revoked_at: row.opt_time(6)?,
    })
}

/// A read that goes on when whoever asked hangs up: dropped half-way, it would take its connection to the database along, and
/// anybody can ask with an invented token.
pub async fn read_to_its_end<R, F>(outbox: &Outbox, work: F) -> postrider::Result<R>
where
    R: Send + 'static,
    F: for<'a> FnMut(&'a mut (dyn Tx + Send)) -> BoxFuture<'a, postrider::Result<R>> + Send + 'static,
{
    let outbox = outbox.clone();
    let reading = tokio::spawn(async move { transact(&**outbox.store(), Mode::Read, work).await });
    reading.await.map_err(|e| postrider::Error::database(format!("a read ended early: {e}")))?
}
