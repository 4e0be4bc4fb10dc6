//! Was the answer honest? What was told of an operation, beside what a direct look found before and after it. Pure.

use std::collections::BTreeMap;

use postrider::error::{Effect, Kind};

/// What an operation told of one of its parts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Told {
    Applied,
    NotApplied,
    Unknown,
}

/// What it told as a whole.
#[derive(Clone, Debug)]
pub enum Answer {
    /// Of each part, in order; one word may stand for all.
    Told(Vec<Told>),
    Failed {
        kind: Kind,
        effect: Effect,
        words: String,
    },
    Hung,
}

/// The database, as far as it concerns one case.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Look {
    /// What happens whole or not at all, each by itself: the messages of a settle, or everything there is.
    pub parts: Vec<Part>,
    /// Per message; they only rise.
    pub tokens: BTreeMap<i64, i64>,
    /// What must never be there, in words.
    pub broken: Vec<String>,
}

/// Rows as they are, and without what differs from case to case (ids, times).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Part {
    pub rows: Vec<String>,
    pub shape: Vec<String>,
}

impl Look {
    pub fn shapes(&self) -> Vec<Vec<String>> {
        self.parts.iter().map(|part| part.shape.clone()).collect()
    }
}

impl Answer {
    fn of_part(&self, part: usize) -> Told {
        match self {
            Answer::Told(told) => told.get(part).or(told.first()).copied().unwrap_or(Told::Unknown),
            Answer::Failed { effect: Effect::NotApplied, .. } => Told::NotApplied,
            Answer::Failed { effect: Effect::Unknown, .. } | Answer::Hung => Told::Unknown,
        }
    }

    /// In one word, for the report.
    pub fn class(&self) -> &'static str {
        match self {
            Answer::Told(told) if told.iter().all(|told| *told == Told::Applied) => "applied",
            Answer::Told(_) => "told one by one",
            Answer::Failed { effect: Effect::NotApplied, .. } => "not applied",
            Answer::Failed { effect: Effect::Unknown, .. } => "unknown",
            Answer::Hung => "no answer",
        }
    }
}

/// What is wrong with an answer; `wanted` is what the operation leads to when nothing goes wrong.
pub fn judge(answer: &Answer, before: &Look, after: &Look, wanted: &[Vec<String>]) -> Vec<String> {
    let mut wrong = Vec::new();
    if matches!(answer, Answer::Hung) {
        wrong.push("it never answered".to_owned());
    }
    if after.parts.len() != wanted.len() || before.parts.len() != wanted.len() {
        wrong.push(format!(
            "{} parts before, {} after, {} wanted",
            before.parts.len(),
            after.parts.len(),
            wanted.len()
        ));
        return wrong;
    }
    for (n, wanted) in wanted.iter().enumerate() {
        let (was, is) = (&before.parts[n], &after.parts[n]);
        let (unchanged, applied) = (was.rows == is.rows, is.shape == *wanted);
        let lie = match answer.of_part(n) {
            Told::Applied if !applied => "it told that part {n} was applied, and it is not",
            Told::NotApplied if !unchanged => "it told that part {n} was not applied, and something changed",
            Told::Unknown if !applied && !unchanged => "part {n} is neither as it was nor as it should be",
            _ => continue,
        };
        let lie = lie.replace("{n}", &n.to_string());
        wrong.push(format!("{lie}\n      was  {:?}\n      is   {:?}\n      want {wanted:?}", was.rows, is.rows));
    }
    wrong.extend(never(before, after));
    wrong
}

/// What no operation may lead to.
pub fn never(before: &Look, after: &Look) -> Vec<String> {
    let mut wrong = after.broken.clone();
    for (id, token) in &before.tokens {
        if let Some(fell) = after.tokens.get(id).filter(|after| *after < token) {
            wrong.push(format!("the token of message {id} fell from {token} to {fell}"));
        }
    }
    wrong
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look(rows: &[&str]) -> Look {
        let part = |row: &&str| Part { rows: vec![(*row).to_owned()], shape: vec![row[..1].to_owned()] };
        Look { parts: rows.iter().map(part).collect(), ..Look::default() }
    }

    fn failed(effect: Effect) -> Answer {
        Answer::Failed { kind: Kind::Unreachable, effect, words: String::new() }
    }

    #[test]
    fn only_lies_are_found() {
        let (before, done, half) = (look(&["a1", "b1"]), look(&["x1", "y1"]), look(&["x1", "b1"]));
        let wanted = done.shapes();
        let whole = |look: &Look| Look {
            parts: vec![Part {
                rows: look.parts.iter().flat_map(|p| p.rows.clone()).collect(),
                shape: look.parts.iter().flat_map(|p| p.shape.clone()).collect(),
            }],
            ..Look::default()
        };
        let told = |words: &[Told]| Answer::Told(words.to_vec());
        for (answer, after, lies) in [
            (told(&[Told::Applied]), &done, 0),
            (told(&[Told::Applied]), &before, 2),
            (told(&[Told::Applied, Told::NotApplied]), &half, 0),
            (told(&[Told::NotApplied, Told::Applied]), &half, 2),
            (failed(Effect::NotApplied), &before, 0),
            (failed(Effect::NotApplied), &half, 1),
            (failed(Effect::Unknown), &half, 0),
            (failed(Effect::Unknown), &look(&["a2", "y1"]), 1),
            (Answer::Hung, &before, 1),
        ] {
            assert_eq!(judge(&answer, &before, after, &wanted).len(), lies, "{answer:?} {after:?}");
        }
        let torn = judge(&failed(Effect::Unknown), &whole(&before), &whole(&half), &whole(&done).shapes());
        assert_eq!(torn.len(), 1, "what is one part is never half");
    }

    #[test]
    fn tokens_never_fall() {
        let at = |token| Look { tokens: [(7, token)].into(), ..Look::default() };
        assert!(never(&at(3), &at(3)).is_empty());
        assert_eq!(never(&at(3), &at(2)).len(), 1);
        assert!(never(&at(3), &Look::default()).is_empty(), "pruned");
    }
}
