//! The words a text can be found by, the same on every database: words of letters and digits as they are, and what is
//! written without spaces (Chinese, Japanese, Korean) as overlapping pairs of characters. All terms are ASCII.

use std::collections::BTreeSet;

use unicode_normalization::UnicodeNormalization;

/// Longest term, in bytes; a longer word is cut.
pub const MAX_TERM: usize = 64;
/// Most terms of one text; the rest of a very long one is not indexed.
const MAX_TERMS: usize = 5000;

/// Most words of a question that are looked up.
const MAX_PROBES: usize = 32;

/// What to look up for one word of a question.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Probe {
    Exact(String),
    /// A character that stands alone: whatever begins with it.
    Prefix(String),
}

/// The terms a text is indexed under.
pub fn terms(text: &str) -> Vec<String> {
    let mut found = BTreeSet::new();
    for run in runs(text) {
        if found.len() >= MAX_TERMS {
            break;
        }
        match run {
            Run::Word(word) => drop(found.insert(word)),
            Run::Dense(chars) => {
                found.extend(chars.windows(2).map(encode));
                // The last one begins no pair; it is found by its prefix too.
                found.extend(chars.last().map(|last| encode(&[*last])));
            }
        }
    }
    found.into_iter().take(MAX_TERMS).collect()
}

/// What to look up for a question.
pub fn probes(question: &str) -> Vec<Probe> {
    let mut found = BTreeSet::new();
    for run in runs(question) {
        match run {
            Run::Word(word) => drop(found.insert(Probe::Exact(word))),
            Run::Dense(chars) if chars.len() == 1 => drop(found.insert(Probe::Prefix(encode(&chars)))),
            Run::Dense(chars) => found.extend(chars.windows(2).map(|pair| Probe::Exact(encode(pair)))),
        }
    }
    found.into_iter().take(MAX_PROBES).collect()
}

enum Run {
    Word(String),
    Dense(Vec<char>),
}

fn runs(text: &str) -> Vec<Run> {
    let mut runs = Vec::new();
    let (mut word, mut dense) = (String::new(), Vec::new());
    let mut flush = |word: &mut String, dense: &mut Vec<char>| {
        if !word.is_empty() {
            runs.push(Run::Word(cut(std::mem::take(word))));
        }
        if !dense.is_empty() {
            runs.push(Run::Dense(std::mem::take(dense)));
        }
    };
    for c in text.nfkc().flat_map(char::to_lowercase) {
        if is_dense(c) {
            if !word.is_empty() {
                flush(&mut word, &mut dense);
            }
            dense.push(c);
        } else if c.is_alphanumeric() {
            if !dense.is_empty() {
                flush(&mut word, &mut dense);
            }
            match c.is_ascii() {
                true => word.push(c),
                false => word.push_str(&encode(&[c])),
            }
        } else {
            flush(&mut word, &mut dense);
        }
    }
    flush(&mut word, &mut dense);
    runs
}

/// Written without spaces between words: Han, kana, Hangul.
fn is_dense(c: char) -> bool {
    matches!(u32::from(c),
        0x3005..=0x3007 | 0x3040..=0x30FF | 0x31F0..=0x31FF | 0x3400..=0x4DBF | 0x4E00..=0x9FFF
        | 0x1100..=0x11FF | 0xAC00..=0xD7AF | 0xF900..=0xFAFF | 0x20000..=0x3134F)
}

fn encode(chars: &[char]) -> String {
    chars.iter().map(|c| format!("u{:04x}", u32::from(*c))).collect()
}

fn cut(mut word: String) -> String {
    // Terms are ASCII, so any length is a boundary.
    word.truncate(MAX_TERM);
    word
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_and_pairs() {
        assert_eq!(terms("Deploy v2, DEPLOY!"), ["deploy", "v2"]);
        assert_eq!(terms("今天天气"), ["u4ecau5929", "u5929u5929", "u5929u6c14", "u6c14"]);
        assert_eq!(terms("Café"), ["cafu00e9"]);
        assert_eq!(terms("ＡＢＣ１２３"), ["abc123"], "full width is folded");
        assert_eq!(terms("使用PostgreSQL数据库").len(), 1 + 2 + 3);
        assert!(terms("…!? ").is_empty());
    }

    /// A question as a user types it finds the text it is about.
    #[test]
    fn a_part_of_a_text_finds_it() {
        let finds = |question: &str, text: &str| {
            let terms = terms(text);
            probes(question).iter().all(|probe| match probe {
                Probe::Exact(term) => terms.contains(term),
                Probe::Prefix(prefix) => terms.iter().any(|term| term.starts_with(prefix)),
            }) && !probes(question).is_empty()
        };
        for (question, text) in [
            ("天气", "今天天气很好"),
            ("气", "今天天气"),
            ("今", "今天天气"),
            ("会議", "明日の会議は中止です"),
            ("カナ", "ﾊﾝｶｸｶﾅ"),
            ("날씨", "오늘 날씨"),
            ("postgresql 連接", "PostgreSQL的連接池"),
            ("naïve", "A NAÏVE approach"),
        ] {
            assert!(finds(question, text), "{question} in {text}");
        }
        assert!(!finds("天氣", "今天天气"), "other characters are other words");
        assert!(!finds("deploy", "deployment"));
    }

    proptest! {
        #[test]
        fn terms_are_short_and_ascii(text in "\\PC{0,200}") {
            for term in terms(&text) {
                prop_assert!(!term.is_empty() && term.len() <= MAX_TERM && term.is_ascii());
            }
        }
    }
}
