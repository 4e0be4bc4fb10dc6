//! One list of two: what the service found by meaning, and what our index found by words. Pure. The service's order stays
//! among what it has; what only we have stands before what its own words fit less well, or beside what it was taken for.

use std::collections::{HashMap, HashSet};

use crate::copies::{Found, State};
use crate::index::Source;
use crate::query::Recalled;
use crate::spaces::Spaces;
use crate::upstream::Match;

/// What has so much of a question's words is meant by it; what has less merely has some of them.
const MEANT: f64 = 0.5;

/// The list, and how much of it the service did not find.
#[derive(Debug, Default)]
pub(crate) struct Merged {
    pub results: Vec<Recalled>,
    /// What it does not have, or not yet.
    pub added: usize,
    /// What it has, and others' memories took the places of.
    pub crowded_out: usize,
}

/// One thing that may be shown.
struct Candidate {
    recalled: Recalled,
    /// Its place, or that of what it was taken for, in the service's list.
    place: Option<usize>,
    /// How much of the question's words it has.
    words: f64,
    new: bool,
}

/// Our copy as it is shown; `None`: it was never taken.
pub(crate) fn own(copy: Found) -> Option<Recalled> {
    // What the service refused when it was stored was never taken.
    if copy.state == State::Dead && copy.outbox_id.is_none() {
        return None;
    }
    let delivered = matches!(copy.state, State::Stored | State::Writing);
    let merged = copy.state == State::Stored && copy.merged;
    Some(Recalled {
        merged_with: copy.memory_id.clone().filter(|_| merged),
        memory_id: copy.memory_id.filter(|_| !merged),
        content: copy.payload_md,
        score: None,
        space: Some(copy.space),
        source: if delivered { "memory_writes" } else { "outbox_memory" },
        kind: copy.kind,
        outbox_id: copy.outbox_id,
        created_at: Some(copy.created_at),
        evidence_refs: copy.evidence_refs,
    })
}

/// `copies` are ours of what the service found, `local` those our index found, best first as in `hits`.
pub(crate) fn merge(
    matches: &[Match],
    copies: Vec<Found>,
    local: Vec<Found>,
    hits: &[(Source, i64, f64)],
    spaces: &Spaces,
    top_k: usize,
) -> Merged {
    let allowed = |copy: &Found| spaces.cover(&copy.space);
    let places: HashMap<&str, usize> = matches.iter().enumerate().map(|(n, found)| (found.id.as_str(), n)).collect();
    let place_of = |copy: &Found| copy.memory_id.as_deref().and_then(|id| places.get(id)).copied();
    let words: HashMap<i64, f64> =
        hits.iter().filter(|hit| hit.0 == Source::Memory).map(|hit| (hit.1, hit.2)).collect();
    let words_of = |id: Option<i64>| id.and_then(|id| words.get(&id)).copied().unwrap_or(0.0);

    let mut of_match: HashMap<&str, Vec<Found>> = HashMap::new();
    let mut rest: Vec<Found> = local;
    for copy in copies {
        let itself = copy.state == State::Stored && !copy.merged;
        match copy.memory_id.as_deref().and_then(|id| places.get_key_value(id)) {
            Some((id, _)) if itself => of_match.entry(id).or_default().push(copy),
            _ => rest.push(copy),
        }
    }
    let (mut theirs, mut ours_alone): (Vec<Candidate>, Vec<Candidate>) = Default::default();
    let mut shown: HashSet<i64> = HashSet::new();
    for (place, found) in matches.iter().enumerate() {
        let ours = of_match.remove(found.id.as_str()).unwrap_or_default();
        let known = !ours.is_empty();
        let copy = ours.into_iter().find(allowed);
        // A memory that is not ours is in no space of ours.
        if copy.is_none() && (known || !spaces.are_all()) {
            continue;
        }
        let id = copy.as_ref().map(|copy| copy.id);
        shown.extend(id);
        let recalled = match copy.and_then(own) {
            Some(recalled) => Recalled { source: "openmemory", score: found.score, ..recalled },
            None => foreign(found),
        };
        theirs.push(Candidate { recalled, place: Some(place), words: words_of(id), new: false });
    }
    let mut crowded_out: Vec<(f64, Recalled)> = Vec::new();
    for copy in rest {
        if !allowed(&copy) || !shown.insert(copy.id) {
            continue;
        }
        let (id, place) = (copy.id, place_of(&copy));
        let there = copy.state == State::Stored && !copy.merged;
        let Some(recalled) = own(copy) else { continue };
        match words.get(&id) {
            // The service has it, and did not find it: it knows better, unless other spaces were in the way.
            Some(words) if there => crowded_out.push((*words, recalled)),
            _ if there => {}
            words => ours_alone.push(Candidate { recalled, place, words: words.copied().unwrap_or(0.0), new: true }),
        }
    }
    let mut merged = Merged::default();
    let mut texts: HashSet<(Option<String>, String)> = HashSet::new();
    for Candidate { recalled, place, words, new } in interleave(theirs, ours_alone) {
        if merged.results.len() == top_k || !texts.insert((recalled.space.clone(), recalled.content.clone())) {
            continue;
        }
        merged.added += usize::from(new);
        let by_words = Some(words).filter(|words| *words > 0.0);
        let score = recalled.score.or(by_words).or_else(|| place.and_then(|place| matches[place].score));
        merged.results.push(Recalled { score, ..recalled });
    }
    if !spaces.are_all() {
        crowded_out.sort_by(|a, b| b.0.total_cmp(&a.0));
        for (words, recalled) in crowded_out {
            if merged.results.len() < top_k && texts.insert((recalled.space.clone(), recalled.content.clone())) {
                merged.results.push(Recalled { score: Some(words), ..recalled });
                merged.crowded_out += 1;
            }
        }
    }
    merged
}

/// What is meant by its words stands before what has less of them, the rest behind what it was taken for, or at the end.
fn interleave(theirs: Vec<Candidate>, mut ours: Vec<Candidate>) -> Vec<Candidate> {
    ours.sort_by(|a, b| b.words.total_cmp(&a.words));
    let (meant, mut rest): (Vec<Candidate>, Vec<Candidate>) = ours.into_iter().partition(|own| own.words >= MEANT);
    let mut meant = meant.into_iter().peekable();
    let mut all = Vec::new();
    for their in theirs {
        while let Some(own) = meant.next_if(|own| own.words > their.words) {
            all.push(own);
        }
        let place = their.place;
        all.push(their);
        let (beside, others): (Vec<Candidate>, Vec<Candidate>) = rest.into_iter().partition(|own| own.place == place);
        all.extend(beside);
        rest = others;
    }
    all.extend(meant);
    all.extend(rest);
    all
}

/// Something the service has and we have not.
fn foreign(found: &Match) -> Recalled {
    Recalled {
        memory_id: Some(found.id.clone()),
        content: found.content.clone(),
        score: found.score,
        space: None,
        source: "openmemory",
        kind: None,
        outbox_id: None,
        created_at: None,
        merged_with: None,
        evidence_refs: vec![],
    }
}

#[cfg(test)]
mod tests {
    use postrider::Timestamp;

    use super::*;

    fn copy(id: i64, memory_id: &str, text: &str, merged: bool) -> Found {
        Found {
            id,
            space: "team:a".to_owned(),
            state: State::Stored,
            memory_id: Some(memory_id.to_owned()),
            outbox_id: None,
            payload_md: text.to_owned(),
            kind: None,
            created_at: Timestamp::default(),
            merged,
            evidence_refs: vec![],
        }
    }

    fn found(id: &str, text: &str) -> Match {
        Match { id: id.to_owned(), content: text.to_owned(), score: Some(0.5) }
    }

    fn contents(merged: &Merged) -> Vec<&str> {
        merged.results.iter().map(|found| found.content.as_str()).collect()
    }

    /// The service takes plan B for plan A and knows only A; who asks for B gets B.
    #[test]
    fn what_was_merged_away_is_found_by_its_own_words() {
        let matches = [found("m1", "We chose plan A"), found("m2", "another thing")];
        let both = || vec![copy(1, "m1", "We chose plan A", false), copy(2, "m1", "We chose plan B", true)];
        let hits = [(Source::Memory, 2, 1.0), (Source::Memory, 1, 0.5)];
        let merged = merge(&matches, both(), both(), &hits, &Spaces::all(), 10);
        assert_eq!(contents(&merged), ["We chose plan B", "We chose plan A", "another thing"]);
        assert_eq!(merged.results[0].merged_with.as_deref(), Some("m1"));
        assert_eq!((merged.results[0].memory_id.as_deref(), merged.added), (None, 1));
        let first = merge(&matches, both(), both(), &hits, &Spaces::all(), 1);
        assert_eq!(contents(&first), ["We chose plan B"], "also where there is room for one only");
        // What has hardly any of the words does not push away what the service means.
        let few = [(Source::Memory, 2, 0.2)];
        let merged = merge(&matches, both(), both(), &few, &Spaces::all(), 1);
        assert_eq!(contents(&merged), ["We chose plan A"]);
        // Asked without any of its words it comes with what it was taken for.
        let merged = merge(&matches, both(), vec![], &[], &Spaces::all(), 10);
        assert_eq!(contents(&merged)[..2], ["We chose plan A", "We chose plan B"]);
    }

    #[test]
    fn what_is_there_and_was_not_found_is_added_only_where_spaces_were_in_the_way() {
        let matches = [found("m9", "somebody else's")];
        let local = || vec![copy(1, "m1", "ours", false)];
        let hits = [(Source::Memory, 1, 1.0)];
        let merged = merge(&matches, vec![], local(), &hits, &Spaces::all(), 10);
        assert_eq!(contents(&merged), ["somebody else's"]);
        let merged = merge(&matches, vec![], local(), &hits, &Spaces::these(vec!["team:a".to_owned()]), 10);
        assert_eq!((contents(&merged), merged.crowded_out), (vec!["ours"], 1));
        let merged = merge(&matches, vec![], local(), &hits, &Spaces::these(vec!["team:b".to_owned()]), 10);
        assert!(contents(&merged).is_empty());
    }
}
