//! One write to the service: what goes along with a memory, what its answer means, and what to think of a write that got
//! none. A write in doubt is not made again before it cannot be applied any more, and is looked for first.

use std::collections::HashMap;
use std::time::Duration;

use postrider::Result;
use postrider::clock::Tick;
use postrider::tx::Tx;
use serde_json::{Value, json};

use crate::Memories;
use crate::breaker::Sign;
use crate::copies;
use crate::note::Note;
use crate::turns::Turn;
use crate::upstream::{Addition, Doubt, Fault, Sight};

/// A write that nobody answered in time may be applied for at least so long.
const UNDER_WAY: Duration = Duration::from_secs(60);
/// One page of what the service has, and how many are looked through for a write in doubt.
const PAGE: usize = 200;
const PAGES: usize = 10;
/// A list so old serves others who look for theirs.
const LIST_FRESH: Duration = Duration::from_secs(1);

/// A write that was answered.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Written {
    pub memory_id: String,
    /// The service said that it had it.
    pub deduplicated: bool,
    pub like: Likeness,
}

/// What the service has under the id it answered with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Likeness {
    /// This very text.
    Itself,
    /// Something it takes for the same.
    Another,
    /// It could not be asked.
    Unknown,
}

/// What the service said, or why it was not asked.
pub(crate) type Called = std::result::Result<Written, Fault>;

/// Whether the service keeps something else under the id, by what it shows and by what we know.
pub(crate) async fn is_merged(tx: &mut (dyn Tx + Send), note: &Note, written: &Written) -> Result<bool> {
    match written.like {
        Likeness::Another => Ok(true),
        // A service that says nothing may have merged it all the same: then another text of ours is there.
        Likeness::Itself => copies::is_anothers(tx, &written.memory_id, &note.payload_sha).await,
        Likeness::Unknown => Ok(!copies::is_known(tx, &written.memory_id, &note.payload_sha).await?),
    }
}

/// Where a write in doubt is, as far as the service can be asked.
pub(crate) enum Found {
    There(String),
    NotThere,
    Unaskable,
}

/// What the service has of late, by digest and space.
#[derive(Default)]
pub(crate) struct Listed {
    at: Option<Tick>,
    ids: HashMap<(String, String), String>,
}

impl Memories {
    /// One write to the service, with what tells whose it is.
    pub(crate) async fn add(&self, note: &Note, outbox_id: Option<i64>, mut turn: Turn) -> Called {
        let mut metadata = note.meta.clone();
        metadata.extend([
            ("target_space".to_owned(), json!(note.space)),
            ("payload_sha".to_owned(), json!(note.payload_sha)),
            ("outbox_id".to_owned(), json!(outbox_id)),
        ]);
        metadata.extend(note.kind.as_ref().map(|kind| ("kind".to_owned(), json!(kind))));
        metadata.extend(note.actor.as_ref().map(|actor| ("actor_user_id".to_owned(), json!(actor))));
        if !note.evidence_refs.is_empty() {
            metadata.insert("evidence_refs".to_owned(), json!(note.evidence_refs));
        }
        let tags = [note.space.as_str()].into_iter().chain(note.kind.as_deref()).collect();
        let addition = Addition { content: &note.payload_md, tags, metadata: Value::Object(metadata) };
        turn.begin();
        let called = self.0.upstream.add(&addition).await;
        turn.end(called.as_ref().err().and_then(|fault| self.doubt_of(fault.doubt)));
        self.note_answer(called.as_ref().err());
        let added = called?;
        let like = match added.deduplicated {
            false => Likeness::Itself,
            true => self.likeness(note, &added.id).await,
        };
        Ok(Written { memory_id: added.id, deduplicated: added.deduplicated, like })
    }

    /// It says it had it: this text, or one that it merely takes for it?
    async fn likeness(&self, note: &Note, memory_id: &str) -> Likeness {
        match self.sight(memory_id).await {
            Sight::Seen(held) => {
                let same = match &held.payload_sha {
                    Some(sha) => *sha == note.payload_sha,
                    None => held.content == note.payload_md,
                };
                if same { Likeness::Itself } else { Likeness::Another }
            }
            Sight::Hidden => Likeness::Another,
            Sight::Missing | Sight::Unaskable => Likeness::Unknown,
        }
    }

    /// What the service shows under an id; where it cannot be asked now, it is as if it never could.
    pub(crate) async fn sight(&self, memory_id: &str) -> Sight {
        let Some(permit) = self.0.breaker.permit() else { return Sight::Unaskable };
        let seen = self.0.upstream.see(memory_id).await;
        permit.tell(self.sign_of(seen.as_ref().err()));
        self.note_answer(seen.as_ref().err());
        seen.unwrap_or(Sight::Unaskable)
    }

    /// What an answer says of the service.
    pub(crate) fn sign_of(&self, fault: Option<&Fault>) -> Sign {
        match fault {
            None => Sign::Well,
            Some(fault) if fault.counts() => Sign::Unwell,
            Some(_) => Sign::Neither,
        }
    }

    /// For how long a write that ended so may still be applied; `None`: it was not.
    pub(crate) fn doubt_of(&self, doubt: Doubt) -> Option<Duration> {
        let timeout = self.0.settings.upstream.timeout;
        match doubt {
            Doubt::Nothing => None,
            Doubt::Answered => Some(Duration::ZERO),
            Doubt::CutOff => Some((2 * timeout).max(Duration::from_secs(1))),
            Doubt::UnderWay => Some(self.0.settings.under_way),
        }
    }

    /// How often a write in doubt is looked for.
    pub(crate) fn look_every(&self) -> Duration {
        self.0.settings.upstream.timeout.clamp(Duration::from_secs(1), Duration::from_secs(5))
    }

    /// Looks for a memory among what was written last. One list serves all who look within a moment, unless it must be new.
    pub(crate) async fn look_up(&self, note: &Note, anew: bool) -> std::result::Result<Found, Fault> {
        let wanted = (note.payload_sha.clone(), note.space.clone());
        let mut listed = self.0.listed.lock().await;
        let fresh = !anew && listed.at.is_some_and(|at| Tick::now().since(at) < LIST_FRESH);
        if !fresh {
            *listed = Listed::default();
            for page in 0..PAGES {
                let Some(held) = self.0.upstream.newest(PAGE, page * PAGE).await? else { return Ok(Found::Unaskable) };
                let last = held.len() < PAGE;
                for held in held {
                    if let (Some(sha), Some(space)) = (held.payload_sha, held.space) {
                        listed.ids.insert((sha, space), held.id);
                    }
                }
                if last || listed.ids.contains_key(&wanted) {
                    break;
                }
            }
            listed.at = Some(Tick::now());
        }
        Ok(listed.ids.get(&wanted).map_or(Found::NotThere, |id| Found::There(id.clone())))
    }
}

/// For how long a write may be under way, where nothing else is said: a service that answers each in time, and was given a
/// dozen at once, may come to the last one as late as that.
pub fn usual_under_way(timeout: Duration) -> Duration {
    (12 * timeout).max(UNDER_WAY)
}
