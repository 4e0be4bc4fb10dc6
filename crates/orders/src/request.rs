//! The order as a client sends it: read strictly, every mistake named by its field, and bound to a digest.

use std::collections::BTreeMap;
use std::str::FromStr;

use postrider::Timestamp;
use postrider::message::{hex, sha256};
use rust_decimal::Decimal;
use serde::Serialize;

use crate::canonical::Json;

/// Longest text of an order's own fields, in bytes.
const LONGEST: usize = 255;
/// Most bytes of tags.
const MOST_TAGS: usize = 16 * 1024;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Side {
    Buy,
    Sell,
}

impl Side {
    pub fn as_str(self) -> &'static str {
        match self {
            Side::Buy => "BUY",
            Side::Sell => "SELL",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimeInForce {
    Ioc,
    Fok,
    Gtc,
}

impl TimeInForce {
    pub fn as_str(self) -> &'static str {
        match self {
            TimeInForce::Ioc => "IOC",
            TimeInForce::Fok => "FOK",
            TimeInForce::Gtc => "GTC",
        }
    }
}

/// An order that passed all checks.
#[derive(Clone, Debug, PartialEq)]
pub struct Order {
    pub order_id: Option<String>,
    pub instrument: String,
    pub side: Side,
    pub qty: Decimal,
    /// `None`: at the market.
    pub price: Option<Decimal>,
    pub time_in_force: TimeInForce,
    pub tags: Option<Json>,
    pub trace_id: Option<String>,
    pub idempotency_key: Option<String>,
    pub requested_at: Option<Timestamp>,
    /// SHA-256 over the canonical JSON without `trace_id` and `idempotency_key`, in hex.
    pub digest: String,
    canonical: String,
}

/// What is wrong with one field.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FieldError {
    pub field: String,
    pub message: String,
}

/// Why an order was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// It is no JSON at all.
    NotJson(String),
    Fields(Vec<FieldError>),
}

impl std::fmt::Display for Invalid {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Invalid::NotJson(why) => write!(f, "the order is no JSON: {why}"),
            Invalid::Fields(fields) => {
                let each: Vec<String> = fields.iter().map(|e| format!("{} {}", e.field, e.message)).collect();
                f.write_str(&each.join("; "))
            }
        }
    }
}

impl Order {
    pub fn parse(body: &[u8]) -> Result<Order, Invalid> {
        let json = Json::parse(body).map_err(Invalid::NotJson)?;
        let Json::Map(fields) = json else {
            let message = "must be a JSON object".to_owned();
            return Err(Invalid::Fields(vec![FieldError { field: "order".to_owned(), message }]));
        };
        let unknown = unknown(&fields);
        // `"price": null` says no more than no price.
        let fields: BTreeMap<String, Json> = fields.into_iter().filter(|(_, value)| *value != Json::Null).collect();
        let mut reader = Reader { fields: &fields, errors: Vec::new() };
        let order_id = reader.text("order_id", LONGEST);
        let instrument = reader.instrument();
        let side = reader.word("side", &[("BUY", Side::Buy), ("SELL", Side::Sell)]);
        let qty = reader.positive("qty", true);
        let price = reader.positive("price", false);
        let forms = [("IOC", TimeInForce::Ioc), ("FOK", TimeInForce::Fok), ("GTC", TimeInForce::Gtc)];
        let time_in_force = reader.word("time_in_force", &forms);
        let tags = reader.tags();
        let trace_id = reader.text("trace_id", LONGEST);
        let idempotency_key = reader.text("idempotency_key", LONGEST);
        let requested_at = reader.time("requested_at");
        let mut errors = reader.errors;
        errors.extend(unknown);
        let (Some(instrument), Some(side), Some(qty), Some(time_in_force), true) =
            (instrument, side, qty, time_in_force, errors.is_empty())
        else {
            return Err(Invalid::Fields(errors));
        };
        let bound = fields.into_iter().filter(|(name, _)| !["trace_id", "idempotency_key"].contains(&name.as_str()));
        let canonical = Json::Map(bound.collect()).canonical();
        let digest = hex(&sha256(canonical.as_bytes()));
        #[rustfmt::skip]
        let order = Order {
            order_id, instrument, side, qty, price, time_in_force, tags, trace_id, idempotency_key, requested_at, digest, canonical,
        };
        Ok(order)
    }

    /// The canonical JSON without `trace_id` and `idempotency_key`: what the digest is taken of, and what the outbox keeps.
    pub fn canonical(&self) -> &str {
        &self.canonical
    }

    /// A word for the paper broker: `"tags": ["paper:reject"]` or `"tags": {"paper": "reject"}`.
    pub fn tag(&self, name: &str) -> Option<&str> {
        match self.tags.as_ref()? {
            Json::Map(tags) => tags.get(name)?.text(),
            Json::List(tags) => tags.iter().find_map(|tag| tag.text()?.strip_prefix(name)?.strip_prefix(':')),
            _ => None,
        }
    }
}

/// Takes fields one by one and notes what is wrong with them.
struct Reader<'a> {
    fields: &'a BTreeMap<String, Json>,
    errors: Vec<FieldError>,
}

const FIELDS: [&str; 10] = [
    "order_id",
    "instrument",
    "side",
    "qty",
    "price",
    "time_in_force",
    "tags",
    "trace_id",
    "idempotency_key",
    "requested_at",
];

impl Reader<'_> {
    fn wrong<T>(&mut self, field: &str, message: impl Into<String>) -> Option<T> {
        self.errors.push(FieldError { field: field.to_owned(), message: message.into() });
        None
    }

    fn text(&mut self, field: &str, longest: usize) -> Option<String> {
        match self.fields.get(field)? {
            Json::Text(text) if text.is_empty() => self.wrong(field, "is empty; leave it out instead"),
            Json::Text(text) if text.len() > longest => self.wrong(field, format!("has more than {longest} bytes")),
            Json::Text(text) if text.chars().any(char::is_control) => self.wrong(field, "has control characters"),
            Json::Text(text) => Some(text.clone()),
            _ => self.wrong(field, "must be text"),
        }
    }

    fn instrument(&mut self) -> Option<String> {
        let fits = |text: &str| {
            let of_ours = |b: u8| b.is_ascii_uppercase() || b.is_ascii_digit() || matches!(b, b'.' | b'_' | b'-');
            (3..=20).contains(&text.len()) && text.bytes().all(of_ours)
        };
        match self.fields.get("instrument") {
            None => self.wrong("instrument", "is missing"),
            Some(Json::Text(text)) if fits(text) => Some(text.clone()),
            Some(_) => self.wrong("instrument", "must be 3 to 20 of A-Z, 0-9, `.`, `_`, `-`"),
        }
    }

    fn word<T: Copy>(&mut self, field: &str, words: &[(&str, T)]) -> Option<T> {
        let given = self.fields.get(field);
        let known = given.and_then(Json::text).and_then(|text| words.iter().find(|(word, _)| *word == text));
        match (known, given) {
            (Some((_, value)), _) => Some(*value),
            (None, None) => self.wrong(field, "is missing"),
            (None, Some(_)) => {
                let names: Vec<&str> = words.iter().map(|word| word.0).collect();
                self.wrong(field, format!("must be one of {}", names.join(", ")))
            }
        }
    }

    fn positive(&mut self, field: &str, required: bool) -> Option<Decimal> {
        match self.fields.get(field) {
            None if required => self.wrong(field, "is missing"),
            None => None,
            Some(Json::Number(digits)) => match Decimal::from_str_exact(digits) {
                Ok(number) if number > Decimal::ZERO => Some(number),
                Ok(_) => self.wrong(field, "must be greater than 0"),
                Err(_) => self.wrong(field, "has more digits than can be kept exactly (28)"),
            },
            Some(_) => self.wrong(field, "must be a number"),
        }
    }

    fn tags(&mut self) -> Option<Json> {
        match self.fields.get("tags")? {
            tags if tags.has_nul() => self.wrong("tags", "has a NUL character, which not every database can keep"),
            tags @ (Json::List(_) | Json::Map(_)) if tags.to_string().len() <= MOST_TAGS => Some(tags.clone()),
            Json::List(_) | Json::Map(_) => self.wrong("tags", format!("has more than {MOST_TAGS} bytes")),
            _ => self.wrong("tags", "must be a list or an object"),
        }
    }

    fn time(&mut self, field: &str) -> Option<Timestamp> {
        let text = self.text(field, LONGEST)?;
        match Timestamp::from_str(&text) {
            Ok(time) => Some(time),
            Err(_) => self.wrong(field, "must be a time like 2026-01-31T09:30:00Z"),
        }
    }
}

fn unknown(fields: &BTreeMap<String, Json>) -> Vec<FieldError> {
    let message = || format!("is no field of an order; there are {}", FIELDS.join(", "));
    let unknown = fields.keys().filter(|name| !FIELDS.contains(&name.as_str()));
    let field = |name: &String| name.chars().take(LONGEST).collect();
    unknown.map(|name| FieldError { field: field(name), message: message() }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORDER: &str = r#"{"instrument":"AAPL","side":"BUY","qty":1.5,"price":10,"time_in_force":"IOC"}"#;

    fn digest(body: &str) -> String {
        Order::parse(body.as_bytes()).unwrap().digest
    }

    #[test]
    fn the_digest_binds_what_the_order_says_and_no_more() {
        let same = [
            r#"{ "qty": 1.50, "time_in_force": "IOC", "side": "BUY", "price": 10.0, "instrument": "AAPL" }"#,
            r#"{"instrument":"AAPL","side":"BUY","qty":15e-1,"price":1E1,"time_in_force":"IOC","trace_id":"t","idempotency_key":"k"}"#,
            r#"{"instrument":"AAPL","side":"BUY","qty":1.5,"price":10,"time_in_force":"IOC","order_id":null}"#,
        ];
        for body in same {
            assert_eq!(digest(body), digest(ORDER), "{body}");
        }
        let others = [
            ORDER.replace("1.5", "1.6"),
            ORDER.replace("1.5", "1.5000000000000000001"),
            ORDER.replace("BUY", "SELL"),
            ORDER.replace(r#","price":10"#, ""),
            ORDER.replace("}", r#","tags":["a"]}"#),
            ORDER.replace("}", r#","order_id":"o1"}"#),
        ];
        for body in others {
            assert_ne!(digest(&body), digest(ORDER), "{body}");
        }
    }

    #[test]
    fn mistakes_are_named_by_field() {
        let fields = |body: &str| match Order::parse(body.as_bytes()).unwrap_err() {
            Invalid::Fields(fields) => fields.into_iter().map(|e| e.field).collect::<Vec<_>>(),
            Invalid::NotJson(why) => panic!("{why}"),
        };
        assert_eq!(fields("{}"), ["instrument", "side", "qty", "time_in_force"]);
        assert_eq!(fields("[]"), ["order"]);
        for (what, field) in [
            (ORDER.replace("AAPL", "aapl"), "instrument"),
            (ORDER.replace("AAPL", "AA"), "instrument"),
            (ORDER.replace("BUY", "buy"), "side"),
            (ORDER.replace("1.5", "0"), "qty"),
            (ORDER.replace("1.5", "-1"), "qty"),
            (ORDER.replace("1.5", "\"1.5\""), "qty"),
            (ORDER.replace("1.5", "0.00000000000000000000000000000001"), "qty"),
            (ORDER.replace(":10", ":-10"), "price"),
            (ORDER.replace("IOC", "DAY"), "time_in_force"),
            (ORDER.replace("}", r#","tags":["a\u0000"]}"#), "tags"),
            (ORDER.replace("}", r#","tags":{"a":{"\u0000":1}}}"#), "tags"),
            (ORDER.replace("}", r#","quantity":1}"#), "quantity"),
            (ORDER.replace("}", r#","limit_price":null}"#), "limit_price"),
            (ORDER.replace("}", r#","tags":"a"}"#), "tags"),
            (ORDER.replace("}", r#","requested_at":"yesterday"}"#), "requested_at"),
            (ORDER.replace("}", r#","idempotency_key":""}"#), "idempotency_key"),
        ] {
            assert_eq!(fields(&what), [field], "{what}");
        }
        assert!(matches!(Order::parse(b"{"), Err(Invalid::NotJson(_))));
    }

    #[test]
    fn what_is_kept_is_the_same_order() {
        let given = ORDER.replace("}", ",\"trace_id\":\"t\",\"order_id\":\"e\u{301}\"}");
        let order = Order::parse(given.as_bytes()).unwrap();
        let kept = Order::parse(order.canonical().as_bytes()).unwrap();
        assert_eq!((&kept.digest, kept.canonical()), (&order.digest, order.canonical()));
        assert_eq!((kept.qty, kept.order_id.as_deref(), kept.trace_id), (order.qty, Some("\u{e9}"), None));
    }

    #[test]
    fn tags_speak_to_the_paper_broker() {
        let tag = |tags: &str| {
            let body = ORDER.replace('}', &format!(r#","tags":{tags}}}"#));
            Order::parse(body.as_bytes()).unwrap().tag("paper").map(str::to_owned)
        };
        assert_eq!(tag(r#"["x","paper:reject"]"#).as_deref(), Some("reject"));
        assert_eq!(tag(r#"{"paper":"timeout"}"#).as_deref(), Some("timeout"));
        assert_eq!(tag(r#"["papers"]"#), None);
    }
}
