//! JSON in one form, so that what means the same has the same digest: keys sorted, text in Unicode's NFC, numbers as plain
//! decimals without needless zeros. Numbers are taken by their digits, never through a float.

use std::collections::BTreeMap;
use std::fmt;

use serde::de::{Deserializer, Error as _, MapAccess, Visitor};
use serde_json::value::RawValue;
use unicode_normalization::UnicodeNormalization;

/// How deep lists and objects may nest.
const DEEPEST: usize = 16;
/// How large or small a number's exponent may be.
const LARGEST_EXPONENT: i64 = 100;

/// JSON whose numbers are exact.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Json {
    Null,
    Bool(bool),
    /// A plain decimal: `-12.5`.
    Number(String),
    Text(String),
    List(Vec<Json>),
    Map(BTreeMap<String, Json>),
}

impl Json {
    pub fn has_nul(&self) -> bool {
        match self {
            Json::Text(text) => text.contains('\0'),
            Json::List(items) => items.iter().any(Json::has_nul),
            Json::Map(members) => members.iter().any(|(name, value)| name.contains('\0') || value.has_nul()),
            Json::Null | Json::Bool(_) | Json::Number(_) => false,
        }
    }

    /// Reads JSON; a key that stands twice in one object is refused.
    pub fn parse(bytes: &[u8]) -> Result<Json, String> {
        let raw: &RawValue = serde_json::from_slice(bytes).map_err(|e| e.to_string())?;
        read(raw, DEEPEST)
    }

    pub fn text(&self) -> Option<&str> {
        match self {
            Json::Text(text) => Some(text),
            _ => None,
        }
    }

    /// In the one form.
    pub fn canonical(&self) -> String {
        let mut out = String::new();
        self.write(&mut out, true);
        out
    }

    fn write(&self, out: &mut String, nfc: bool) {
        match self {
            Json::Null => out.push_str("null"),
            Json::Bool(true) => out.push_str("true"),
            Json::Bool(false) => out.push_str("false"),
            Json::Number(digits) => out.push_str(digits),
            Json::Text(text) => write_text(out, text, nfc),
            Json::List(items) => {
                out.push('[');
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    item.write(out, nfc);
                }
                out.push(']');
            }
            Json::Map(entries) => {
                out.push('{');
                for (i, (key, value)) in entries.iter().enumerate() {
                    if i > 0 {
                        out.push(',');
                    }
                    write_text(out, key, nfc);
                    out.push(':');
                    value.write(out, nfc);
                }
                out.push('}');
            }
        }
    }
}

/// As it was written, but for blanks, the order of keys and the form of numbers.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut out = String::new();
        self.write(&mut out, false);
        f.write_str(&out)
    }
}

fn write_text(out: &mut String, text: &str, nfc: bool) {
    if text.bytes().all(|b| b.is_ascii() && !b.is_ascii_control() && b != b'"' && b != b'\\') {
        out.extend(["\"", text, "\""]); // nothing to change
        return;
    }
    let text = if nfc { text.nfc().collect::<String>() } else { text.to_owned() };
    out.push_str(&serde_json::Value::String(text).to_string());
}

fn read(raw: &RawValue, depth: usize) -> Result<Json, String> {
    let text = raw.get();
    let deeper = || depth.checked_sub(1).ok_or_else(|| format!("it nests deeper than {DEEPEST}"));
    Ok(match text.as_bytes().first() {
        Some(b'n') => Json::Null,
        Some(b't') => Json::Bool(true),
        Some(b'f') => Json::Bool(false),
        Some(b'"') => Json::Text(serde_json::from_str(text).map_err(|e| e.to_string())?),
        Some(b'[') => {
            let items: Vec<&RawValue> = serde_json::from_str(text).map_err(|e| e.to_string())?;
            let depth = deeper()?;
            Json::List(items.into_iter().map(|item| read(item, depth)).collect::<Result<_, _>>()?)
        }
        Some(b'{') => {
            let mut reader = serde_json::Deserializer::from_str(text);
            let entries = reader.deserialize_map(Entries).map_err(|e| e.to_string())?;
            let depth = deeper()?;
            let mut map = BTreeMap::new();
            for (key, value) in entries {
                // Keys that are the same in the one form would make two requests one.
                let name = if key.is_ascii() { key } else { key.nfc().collect::<String>() };
                if map.contains_key(&name) {
                    return Err(format!("`{name}` stands there twice"));
                }
                map.insert(name, read(value, depth)?);
            }
            Json::Map(map)
        }
        _ => Json::Number(plain(text)?),
    })
}

struct Entries;

impl<'de> Visitor<'de> for Entries {
    type Value = Vec<(String, &'de RawValue)>;

    fn expecting(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            if entries.len() >= 1000 {
                return Err(A::Error::custom("an object has more than 1000 keys"));
            }
            entries.push(entry);
        }
        Ok(entries)
    }
}

/// A JSON number as a plain decimal: `1.50e2` is `150`, `-0.0` is `0`.
fn plain(number: &str) -> Result<String, String> {
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let out_of_range = || format!("the number {} is out of range", number.chars().take(40).collect::<String>());
    let exponent: i64 = exponent.trim_start_matches('+').parse().map_err(|_| out_of_range())?;
    if exponent.abs() > LARGEST_EXPONENT {
        return Err(out_of_range());
    }
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    // Where the point stands, counted from the first digit.
    let point = whole.len() as i64 + exponent;
    let (mut whole, mut fraction) = (String::new(), String::new());
    for (i, digit) in digits.chars().enumerate() {
        if (i as i64) < point { whole.push(digit) } else { fraction.push(digit) }
    }
    whole.extend(std::iter::repeat_n('0', (point - digits.len() as i64).max(0) as usize));
    let fraction = format!("{}{fraction}", "0".repeat((-point).max(0) as usize));
    let (whole, fraction) = (whole.trim_start_matches('0'), fraction.trim_end_matches('0'));
    let whole = if whole.is_empty() { "0" } else { whole };
    Ok(match fraction {
        "" if whole == "0" => "0".to_owned(),
        "" => format!("{sign}{whole}"),
        _ => format!("{sign}{whole}.{fraction}"),
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn canonical(text: &str) -> String {
        Json::parse(text.as_bytes()).unwrap().canonical()
    }

    #[test]
    fn what_means_the_same_is_written_the_same() {
        assert_eq!(canonical(r#" { "b" : 1.0, "a": [ 1e0 , 0.10, -0.0 ] } "#), r#"{"a":[1,0.1,0],"b":1}"#);
        assert_eq!(canonical("\"e\u{301}\""), canonical("\"\u{e9}\""), "NFC");
        assert_eq!(canonical(r#""\u0041""#), r#""A""#);
        for (number, form) in [
            ("100", "100"),
            ("1E2", "100"),
            ("1.50e2", "150"),
            ("15e-1", "1.5"),
            ("0.00100", "0.001"),
            ("1e-3", "0.001"),
            ("12345678901234567890.10", "12345678901234567890.1"),
            ("-0", "0"),
            ("-7.0", "-7"),
        ] {
            assert_eq!(canonical(number), form, "{number}");
        }
    }

    #[test]
    fn what_differs_stays_different() {
        let beyond_a_float = ["0.1", "0.10000000000000001", "9007199254740993", "9007199254740992"];
        let forms: std::collections::HashSet<String> = beyond_a_float.iter().map(|text| canonical(text)).collect();
        assert_eq!(forms.len(), beyond_a_float.len());
    }

    #[test]
    fn nonsense_is_refused() {
        let deep = format!("{}{}", "[".repeat(20), "]".repeat(20));
        for text in ["", "{", "nul", "[1,]", r#"{"a":1,"a":2}"#, "{\"\u{e9}\":1,\"e\u{301}\":2}", "1e999", "01", &deep]
        {
            assert!(Json::parse(text.as_bytes()).is_err(), "{text}");
        }
        assert!(Json::parse(b"\"\xff\"").is_err());
    }

    fn tree() -> impl Strategy<Value = Json> {
        let leaf = prop_oneof![
            Just(Json::Null),
            any::<bool>().prop_map(Json::Bool),
            any::<i64>().prop_map(|n| Json::Number(n.to_string())),
            "[a-z\u{e9}\"\\\\]{0,6}".prop_map(Json::Text),
        ];
        leaf.prop_recursive(4, 32, 4, |inner| {
            prop_oneof![
                proptest::collection::vec(inner.clone(), 0..4).prop_map(Json::List),
                proptest::collection::btree_map("[a-z]{1,4}", inner, 0..4).prop_map(Json::Map),
            ]
        })
    }

    proptest! {
        #[test]
        fn the_one_form_reads_back_as_itself(json in tree()) {
            let form = json.canonical();
            prop_assert_eq!(Json::parse(form.as_bytes()).unwrap().canonical(), form);
        }
    }
}
