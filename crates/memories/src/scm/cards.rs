//! From a change to the memory of it. Pure: the same change always makes the same card, so that a card made twice is one.

use postrider::message::{hex, sha256};
use serde_json::{Value, json};

/// Longest first line, in characters.
const SUMMARY: usize = 160;
/// Longest rest, in characters.
const DETAILS: usize = 2000;
/// Most files named.
const FILES: usize = 20;

/// A change, as it is remembered.
#[derive(Clone, Debug, PartialEq)]
pub struct Change {
    /// `scm_commit`, `scm_revision` or `scm_merge_request`.
    pub kind: &'static str,
    /// The name of its repository.
    pub repo: String,
    /// How the repository calls it: a sha, a revision, a number.
    pub rev: String,
    pub author: String,
    pub at: Option<String>,
    pub message: String,
    /// How many files it touched, and some of them.
    pub files: Option<(u64, Vec<String>)>,
    /// What else is known, like the state of a merge request.
    pub state: Option<String>,
}

/// The card's text: a summary, who and when, details within limits, names of files; never the change itself.
pub fn card(change: &Change) -> String {
    let mut lines = change.message.trim().lines();
    let first = lines.next().unwrap_or_default().trim();
    let title = if first.is_empty() { "(no message)" } else { first };
    let (kind, short) = match change.kind {
        "scm_commit" => ("Commit", change.rev.chars().take(12).collect::<String>()),
        "scm_revision" => ("Revision", format!("r{}", change.rev)),
        _ => ("Merge request", format!("!{}", change.rev)),
    };
    let mut text = format!("# {}\n\n{kind} `{short}` in {} by {}", cut(title, SUMMARY), change.repo, change.author);
    if let Some(at) = &change.at {
        text.push_str(&format!(", {at}"));
    }
    if let Some(state) = &change.state {
        text.push_str(&format!(", {state}"));
    }
    text.push('\n');
    let details = lines.collect::<Vec<_>>().join("\n");
    if !details.trim().is_empty() {
        text.push_str(&format!("\n{}\n", cut(details.trim(), DETAILS)));
    }
    if let Some((count, names)) = change.files.as_ref().filter(|files| files.0 > 0) {
        let named: Vec<&str> = names.iter().take(FILES).map(String::as_str).collect();
        let more = count.saturating_sub(named.len() as u64);
        let rest = if more > 0 { format!(" and {more} more") } else { String::new() };
        text.push_str(&format!("\nFiles: {}{rest}\n", named.join(", ")));
    }
    text
}

/// Where it can be looked up: what was materialised, with its digest; else its address, with the digest of what was read
/// of it.
pub fn evidence(uri: &str, change: &Change, materialised: Option<(&str, &str, i64)>) -> Value {
    match materialised {
        Some((uri, sha256, size)) => json!({ "uri": uri, "sha256": sha256, "size": size }),
        None => json!({ "uri": uri, "record_sha256": digest(change) }),
    }
}

/// Of the record itself: its name, who, when, and all of its message.
fn digest(change: &Change) -> String {
    let at = change.at.as_deref().unwrap_or_default();
    let parts = [change.kind, &change.repo, &change.rev, &change.author, at, &change.message];
    hex(&sha256(parts.join("\0").as_bytes()))
}

fn cut(text: &str, most: usize) -> String {
    if text.chars().count() <= most {
        return text.to_owned();
    }
    text.chars().take(most - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(message: &str) -> Change {
        Change {
            kind: "scm_commit",
            repo: "shop".to_owned(),
            rev: "0123456789abcdef".to_owned(),
            author: "Ann".to_owned(),
            at: Some("2026-01-02".to_owned()),
            message: message.to_owned(),
            files: Some((2, vec!["a.rs".to_owned(), "b.rs".to_owned()])),
            state: None,
        }
    }

    #[test]
    fn a_card_has_its_parts() {
        let text = card(&change("pay: round up\n\nCents were lost.\n"));
        assert_eq!(
            text,
            "# pay: round up\n\nCommit `0123456789ab` in shop by Ann, 2026-01-02\n\nCents were lost.\n\nFiles: a.rs, b.rs\n"
        );
        assert!(card(&change("")).starts_with("# (no message)\n"));
    }

    #[test]
    fn evidence_has_a_digest_before_and_after_the_change_was_fetched() {
        let (one, other) = (change("pay: round up"), change("pay: round down"));
        let before = evidence("scm://1/commit/0", &one, None);
        assert_eq!(before["record_sha256"].as_str().map(str::len), Some(64));
        assert_ne!(before, evidence("scm://1/commit/0", &other, None));
        let after = evidence("scm://1/commit/0", &one, Some(("git+file:///shop?commit=0", "ab", 7)));
        assert_eq!(after, json!({ "uri": "git+file:///shop?commit=0", "sha256": "ab", "size": 7 }));
    }

    #[test]
    fn a_card_keeps_its_limits() {
        let files = (5000, (0..5000).map(|n| format!("{n}.rs")).collect());
        let long = format!("{}\n\n{}", "天".repeat(1000), "气".repeat(100_000));
        let text = card(&Change { files: Some(files), ..change(&long) });
        assert!(text.chars().count() < SUMMARY + DETAILS + 400, "{}", text.chars().count());
        assert!(text.contains("and 4980 more"));
    }
}
