//! What OpenMemory takes for the same memory: a 32-bit simhash of the stemmed words. Words of one letter do not count, and
//! a word that differs among many is outvoted, so texts that tell different things are one memory to it.

use std::collections::BTreeSet;

/// The likeness of a text; equal ones are one memory.
pub fn simhash(text: &str) -> u64 {
    let words = words(text);
    if words.is_empty() {
        // Nothing it could read: the text itself, told apart from any likeness of words.
        let hashed = text.chars().fold(0u32, |hash, c| step(hash, u32::from(c)));
        return u64::from(hashed) | 1 << 32;
    }
    let mut votes = [0i32; 32];
    for word in &words {
        let hash = word.encode_utf16().fold(0u32, |hash, unit| step(hash, u32::from(unit)));
        for (bit, vote) in votes.iter_mut().enumerate() {
            *vote += if hash & (1 << bit) != 0 { 1 } else { -1 };
        }
    }
    votes.iter().enumerate().filter(|(_, vote)| **vote > 0).fold(0, |hash, (bit, _)| hash | 1 << bit)
}

fn step(hash: u32, unit: u32) -> u32 {
    hash.wrapping_mul(31).wrapping_add(unit)
}

fn words(text: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for run in text.split(|c: char| !(c.is_ascii_alphanumeric() || is_cjk(c))).filter(|run| !run.is_empty()) {
        let mut rest = run;
        while let Some(first) = rest.chars().next() {
            let end = rest.find(|c| is_cjk(c) != is_cjk(first)).unwrap_or(rest.len());
            let (part, after) = rest.split_at(end);
            match is_cjk(first) {
                true => found.extend(pairs(part)),
                false => drop(found.insert(stem(&part.to_ascii_lowercase()))),
            }
            rest = after;
        }
    }
    found.retain(|word| word.chars().count() > 1);
    found
}

fn is_cjk(c: char) -> bool {
    matches!(u32::from(c), 0x3400..=0x4DBF | 0x4E00..=0x9FFF | 0xF900..=0xFAFF | 0x3040..=0x30FF | 0xAC00..=0xD7AF)
}

fn pairs(run: &str) -> Vec<String> {
    let chars: Vec<char> = run.chars().collect();
    chars.windows(2).map(|pair| pair.iter().collect()).collect()
}

fn stem(word: &str) -> String {
    for (ending, instead) in [("ies", "y"), ("ing", ""), ("ers", "er"), ("ed", ""), ("s", "")] {
        if let Some(root) = word.strip_suffix(ending).filter(|root| word.len() > 3 && root.len() + instead.len() >= 3) {
            return format!("{root}{instead}");
        }
    }
    word.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_that_tell_different_things_are_alike() {
        assert_eq!(simhash("We chose plan A for the rollout"), simhash("We chose plan B for the rollout"));
        assert_eq!(simhash("deploying services"), simhash("deployed service"));
        assert_ne!(simhash("We deploy on Tuesdays"), simhash("The database is SQLite"));
        assert_ne!(simhash("!!"), simhash("??"));
        let texts =
            (0..200).map(|n| format!("Support closed the ticket number {} after the customer confirmed it", n + 1000));
        let kinds: BTreeSet<u64> = texts.map(|text| simhash(&text)).collect();
        assert!(kinds.len() < 50, "{} of 200 are told apart", kinds.len());
    }
}
