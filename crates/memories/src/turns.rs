//! How many writes may be under way at once. A slow service takes what it is asked into a queue of its own, so a write that
//! nobody answered in time is over only when all before it are: whoever would be one too many waits, or leaves it to the flush.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::clock::Tick;
use tokio::sync::Notify;

use crate::note::Note;

/// However long a write may be under way, and however short.
const MOST: u128 = 12;
const LEAST: u128 = 4;

/// A memory by its space and digest.
type Key = (String, String);

fn key_of(note: &Note) -> Key {
    (note.space.clone(), note.payload_sha.clone())
}

pub(crate) struct Turns {
    state: Mutex<State>,
    freed: Notify,
    most: usize,
    under_way: Duration,
}

#[derive(Default)]
struct State {
    writing: usize,
    /// Writes without an answer, and until when they may be applied.
    doubts: HashMap<Key, Tick>,
}

/// Leave to make one write.
pub(crate) struct Turn {
    turns: Arc<Turns>,
    key: Key,
    /// For how long the write may be applied yet.
    doubt: Option<Duration>,
}

impl Turns {
    /// So many that the last of them is written within `under_way`, if none takes longer than `timeout`.
    pub fn new(timeout: Duration, under_way: Duration) -> Arc<Turns> {
        let most = under_way.as_millis() / timeout.as_millis().max(1);
        Turns::of(most.clamp(LEAST, MOST) as usize, under_way)
    }

    fn of(most: usize, under_way: Duration) -> Arc<Turns> {
        Arc::new(Turns { state: Mutex::default(), freed: Notify::new(), most, under_way })
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A turn, if there is one now.
    pub fn take(self: &Arc<Self>, note: &Note) -> Option<Turn> {
        let (key, now) = (key_of(note), Tick::now());
        let mut state = self.state();
        state.doubts.retain(|of, until| *until > now && *of != key);
        if state.writing + state.doubts.len() >= self.most {
            return None;
        }
        state.writing += 1;
        Some(Turn { turns: self.clone(), key, doubt: None })
    }

    /// A turn, if one comes within `patience`. Where all that are under way are in doubt, none does.
    pub async fn wait(self: &Arc<Self>, note: &Note, patience: Duration) -> Option<Turn> {
        let began = Tick::now();
        loop {
            let freed = self.freed.notified();
            tokio::pin!(freed);
            freed.as_mut().enable();
            if let Some(turn) = self.take(note) {
                return Some(turn);
            }
            if self.state().writing == 0 || Tick::now().since(began) > patience {
                return None;
            }
            freed.await;
        }
    }

    /// An earlier write of this memory may be applied for so much longer.
    pub fn doubt(&self, note: &Note, left: Duration) {
        if !left.is_zero() {
            self.state().doubts.insert(key_of(note), Tick::now().plus(left));
        }
    }

    /// Of this memory nothing is in doubt any more.
    pub fn resolved(&self, note: &Note) {
        self.state().doubts.remove(&key_of(note));
        self.freed.notify_waiters();
    }
}

impl Turn {
    /// From here on the write may be applied, also if nobody hears of its end.
    pub fn begin(&mut self) {
        self.doubt = Some(self.turns.under_way);
    }

    /// It may be applied for so much longer.
    pub fn end(mut self, doubt: Option<Duration>) {
        self.doubt = doubt;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        let mut state = self.turns.state();
        state.writing -= 1;
        if let Some(doubt) = self.doubt.filter(|doubt| !doubt.is_zero()) {
            state.doubts.insert(std::mem::take(&mut self.key), Tick::now().plus(doubt));
        }
        drop(state);
        self.turns.freed.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn note(text: &str) -> Note {
        Note {
            payload_md: text.to_owned(),
            space: "a".to_owned(),
            payload_sha: text.to_owned(),
            meta: serde_json::Map::new(),
            kind: None,
            evidence_refs: vec![],
            actor: None,
            correlation_id: String::new(),
        }
    }

    #[test]
    fn there_are_as_many_as_come_to_an_end_in_time() {
        let secs = Duration::from_secs;
        for (timeout, under_way, most) in [(5, 60, 12), (1, 60, 12), (5, 30, 6), (5, 3, 4)] {
            assert_eq!(Turns::new(secs(timeout), secs(under_way)).most, most);
        }
    }

    #[test]
    fn what_is_in_doubt_has_its_turn_until_that_is_over() {
        let turns = Turns::of(2, Duration::from_secs(60));
        let mut first = turns.take(&note("1")).unwrap();
        let second = turns.take(&note("2")).unwrap();
        assert!(turns.take(&note("3")).is_none(), "two are under way");
        first.begin();
        drop(first); // nobody hears of its end
        assert!(turns.take(&note("3")).is_none(), "it may yet be applied");
        second.end(None);
        let third = turns.take(&note("3")).unwrap();
        assert!(turns.take(&note("4")).is_none());
        third.end(Some(Duration::from_secs(60)));
        assert!(turns.take(&note("4")).is_none(), "both are in doubt");
        turns.resolved(&note("1"));
        assert!(turns.take(&note("4")).is_some());
        drop(turns.take(&note("3")).expect("whoever writes it again is sure"));
    }

    #[tokio::test]
    async fn whoever_waits_gets_the_turn_of_one_that_ends() {
        let turns = Turns::of(1, Duration::from_secs(60));
        let first = turns.take(&note("1")).unwrap();
        let (handle, patience) = (turns.clone(), Duration::from_secs(60));
        let waits = tokio::spawn(async move { handle.wait(&note("2"), patience).await.is_some() });
        tokio::task::yield_now().await;
        first.end(None);
        assert!(waits.await.unwrap());
        turns.take(&note("3")).unwrap().end(Some(patience));
        assert!(turns.wait(&note("4"), patience).await.is_none(), "nothing that is under way comes to an end");
    }
}
