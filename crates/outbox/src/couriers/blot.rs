//! What a destination may repeat of what it was sent, and nobody should read in an error or in an answer that is kept:
//! credentials in headers, and in the path and query of a URL.

use url::Url;

/// Shorter values are words, flags and numbers; blotting those out would only garble the text.
const SHORTEST: usize = 6;
/// The same of a part of a path, which is more often a word, unless there are digits in it.
const SHORTEST_PART: usize = 12;
/// So much of the beginning of a secret, where the text was cut off in the middle of it.
const SHORTEST_BEGINNING: usize = 4;
/// What the names of headers have in them that carry secrets.
const CREDENTIALS: [&str; 9] = ["auth", "cookie", "key", "pass", "pin", "secret", "session", "sign", "token"];
const BLOT: &str = "***";

/// Texts that are blotted out, the longest first.
#[derive(Clone, Debug, Default)]
pub struct Blot(Vec<String>);

impl Blot {
    /// Of a URL, and of the values of headers.
    pub fn new<'a>(url: Option<&Url>, values: impl IntoIterator<Item = &'a str>) -> Self {
        let mut secrets: Vec<String> = Vec::new();
        for value in values {
            // `Bearer` and the like are no secret.
            secrets.extend([Some(value), value.split_whitespace().last()].into_iter().flatten().map(str::to_owned));
        }
        if let Some(url) = url {
            secrets.extend(url.query().map(str::to_owned));
            let pairs = url.query().into_iter().flat_map(|query| query.split('&'));
            secrets.extend(pairs.filter_map(|pair| pair.split_once('=')).map(|(_, value)| value.to_owned()));
            secrets.extend(url.query_pairs().map(|(_, value)| value.into_owned()));
            let is_word = |part: &str| part.len() < SHORTEST_PART && !part.bytes().any(|b| b.is_ascii_digit());
            let parts = url.path_segments().into_iter().flatten().filter(|part| !is_word(part));
            for part in parts {
                secrets.extend([part.to_owned(), decoded(part)]);
            }
        }
        // As PHP writes a slash in JSON.
        let escaped: Vec<String> =
            secrets.iter().filter(|secret| secret.contains('/')).map(|secret| secret.replace('/', "\\/")).collect();
        secrets.extend(escaped);
        secrets.retain(|secret| secret.len() >= SHORTEST);
        secrets.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        secrets.dedup();
        Blot(secrets)
    }

    /// These, and what the headers of a message carry. Most of that are words, which blotted out would only garble the text:
    /// what is short counts only where the header's name says that it is a secret.
    pub fn and(&self, headers: &[(String, String)]) -> Self {
        let mut both = Blot(self.0.clone());
        for (name, value) in headers {
            let name = name.to_ascii_lowercase();
            let least = if CREDENTIALS.iter().any(|word| name.contains(word)) { SHORTEST } else { SHORTEST_PART };
            let parts = value.split([';', ',', '=', '"', ' ']).chain([value.as_str()]);
            both.0.extend(parts.filter(|part| part.len() >= least).flat_map(|part| {
                let in_json = part.replace('\\', "\\\\").replace('"', "\\\"");
                [part.to_owned(), part.replace('/', "\\/"), in_json]
            }));
        }
        both.0.sort_by(|a, b| b.len().cmp(&a.len()).then(a.cmp(b)));
        both.0.dedup();
        both
    }

    pub fn text(&self, text: String) -> String {
        let mut text = self
            .0
            .iter()
            .fold(text, |text, secret| if text.contains(secret) { text.replace(secret, BLOT) } else { text });
        if let Some(at) = self.begins_at(text.as_bytes()).filter(|at| text.is_char_boundary(*at)) {
            text.replace_range(at.., BLOT);
        }
        text
    }

    /// Where the text ends in the middle of a secret: it was cut off.
    fn begins_at(&self, text: &[u8]) -> Option<usize> {
        if text.ends_with(BLOT.as_bytes()) {
            return None;
        }
        let longest = |secret: &String| {
            let most = text.len().min(secret.len() - 1);
            (SHORTEST_BEGINNING..=most).rev().find(|length| text.ends_with(&secret.as_bytes()[..*length]))
        };
        self.0.iter().filter_map(longest).max().map(|length| text.len() - length)
    }

    pub fn bytes(&self, mut bytes: Vec<u8>) -> Vec<u8> {
        for secret in self.0.iter().map(String::as_bytes) {
            let mut from = 0;
            while let Some(at) = bytes[from..].windows(secret.len()).position(|window| window == secret) {
                bytes.splice(from + at..from + at + secret.len(), BLOT.bytes());
                from += at + BLOT.len();
            }
        }
        if let Some(at) = self.begins_at(&bytes) {
            bytes.splice(at.., BLOT.bytes());
        }
        bytes
    }
}

/// A part of a path as a destination may show it.
fn decoded(part: &str) -> String {
    let pair = format!("x={}", part.replace('+', "%2B"));
    url::form_urlencoded::parse(pair.as_bytes()).map(|(_, value)| value.into_owned()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_destination_repeats_of_our_secrets_is_blotted_out() {
        let url = Url::parse("https://chat.example/services/B0-secret%2Dpart%20of+it?token=sw%6Frdfish&v=1").unwrap();
        let blot = Blot::new(Some(&url), ["Bearer hunter22", "json", "Basic Q0F/xyz="]);
        for (said, kept) in [
            ("POST /services/B0-secret%2Dpart%20of+it?token=sw%6Frdfish&v=1", "POST /services/***?***"),
            ("no such hook: B0-secret-part of+it", "no such hook: ***"),
            ("token swordfish, or sw%6Frdfish", "token ***, or ***"),
            ("authorization: Bearer hunter22; hunter22", "authorization: ***; ***"),
            ("json services", "json services"),
            ("your key was hunte", "your key was ***"),
            ("your key was hun", "your key was hun"),
            ("cut off: B0-secret%2Dpa", "cut off: ***"),
            (r#"{"authorization":"Basic Q0F\/xyz="}"#, r#"{"authorization":"***"}"#),
        ] {
            assert_eq!(blot.text(said.to_owned()), kept);
            assert_eq!(blot.bytes(said.as_bytes().to_vec()), kept.as_bytes());
        }
        let headers = [
            ("Cookie", "session=abcdef123456789; lang=de"),
            ("X-Api-Key", "quo\"ted"),
            ("X-Trace", "a-long-one-of-a-message"),
            ("X-Kind", "invoice"),
            ("Accept", "text/json"),
        ];
        let both = blot.and(&headers.map(|(name, value)| (name.to_owned(), value.to_owned())));
        for (said, kept) in [
            ("hunter22, a-long-one-of-a-message", "***, ***"),
            ("session abcdef123456789 is over", "*** *** is over"),
            (r#"{"key":"quo\"ted"}"#, r#"{"key":"***"}"#),
            ("no invoice is text/json", "no invoice is text/json"),
        ] {
            assert_eq!(both.text(said.to_owned()), kept);
        }
        assert_eq!(Blot::new(None, ["******"]).bytes(b"************".to_vec()), b"******", "and comes to an end");
    }
}
