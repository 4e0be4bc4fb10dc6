//! What came of an order, as it is stored and answered.

use postrider::Timestamp;
use rust_decimal::Decimal;
use serde::{Deserialize, Serialize, Serializer};
use serde_json::value::RawValue;

use crate::request::{Order, Side};

/// A decimal as a JSON number with all its digits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Number(pub Decimal);

impl Serialize for Number {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let digits = RawValue::from_string(self.0.normalize().to_string()).map_err(serde::ser::Error::custom)?;
        digits.serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for Number {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = Box::<RawValue>::deserialize(deserializer)?;
        // Brokers write numbers as numbers or as text.
        let digits = raw.get().trim_matches('"');
        let number = Decimal::from_str_exact(digits).or_else(|_| Decimal::from_scientific(digits));
        number.map(Number).map_err(|_| serde::de::Error::custom(format!("`{digits}` is no number that can be kept")))
    }
}

/// One execution at one price.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Fill {
    pub px: Number,
    pub qty: Number,
    pub ts: String,
}

/// What a broker executed.
#[derive(Clone, Debug, PartialEq, Default, Serialize, Deserialize)]
pub struct Execution {
    #[serde(default)]
    pub order_ref: String,
    #[serde(default)]
    pub fills: Vec<Fill>,
}

impl Execution {
    /// Refuses what cannot have happened to an order of this quantity.
    pub fn check(&self, ordered: Decimal) -> Result<(), String> {
        for Fill { px, qty, .. } in &self.fills {
            if px.0 <= Decimal::ZERO || qty.0 <= Decimal::ZERO {
                return Err(format!("a fill of {} at {} makes no sense", qty.0, px.0));
            }
        }
        let sum = self.fills.iter().try_fold(Decimal::ZERO, |sum, fill| sum.checked_add(fill.qty.0));
        match sum {
            None => Err("its fills add up to more than can be kept".to_owned()),
            Some(sum) if sum > ordered => Err(format!("{sum} were executed where {ordered} were ordered")),
            Some(_) => Ok(()),
        }
    }

    pub fn executed_qty(&self) -> Decimal {
        let add = |sum: Decimal, fill: &Fill| sum.checked_add(fill.qty.0).unwrap_or(sum);
        self.fills.iter().fold(Decimal::ZERO, add)
    }

    /// With as many digits as can be kept where it does not come out even.
    pub fn average_price(&self) -> Option<Decimal> {
        let qty = self.executed_qty();
        let paid =
            self.fills.iter().try_fold(Decimal::ZERO, |sum, fill| sum.checked_add(fill.px.0.checked_mul(fill.qty.0)?));
        let average = match paid {
            Some(paid) => paid.checked_div(qty)?,
            // What was paid is more than can be kept; the average is not: it lies between the prices.
            None => {
                let highest = self.fills.iter().map(|fill| fill.px.0).max()?;
                let share = |fill: &Fill| fill.px.0.checked_mul(fill.qty.0.checked_div(qty)?);
                let shares = self.fills.iter().try_fold(Decimal::ZERO, |sum, fill| sum.checked_add(share(fill)?));
                shares.map_or(highest, |average| average.min(highest))
            }
        };
        Some(average.normalize())
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, Serialize)]
pub struct LatencyMs {
    pub queue: u64,
    pub broker_rtt: u64,
    pub total: u64,
}

#[derive(Serialize)]
struct Broker<'a> {
    name: &'a str,
    order_ref: Option<&'a str>,
}

/// The result of an order: stored once, answered byte for byte ever after.
#[derive(Serialize)]
pub struct ExecResult<'a> {
    status: &'static str,
    order_id: &'a str,
    instrument: &'a str,
    side: Side,
    requested_at: String,
    completed_at: String,
    idempotency_key: &'a str,
    fills: &'a [Fill],
    avg_price: Option<Number>,
    executed_qty: Number,
    broker: Broker<'a>,
    latency_ms: LatencyMs,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason_code: Option<&'a str>,
}

/// All that goes into a result but the broker's part.
pub struct Frame<'a> {
    pub order: &'a Order,
    pub order_id: &'a str,
    pub key: &'a str,
    pub received_at: Timestamp,
    pub completed_at: Timestamp,
    pub broker: &'a str,
    pub latency: LatencyMs,
}

impl Frame<'_> {
    pub fn result(&self, execution: Option<&Execution>, reason: Option<&str>) -> String {
        let none = Execution::default();
        let done = execution.unwrap_or(&none);
        let result = ExecResult {
            status: if execution.is_some() { "ok" } else { "error" },
            order_id: self.order_id,
            instrument: &self.order.instrument,
            side: self.order.side,
            requested_at: self.order.requested_at.unwrap_or(self.received_at).to_string(),
            completed_at: self.completed_at.to_string(),
            idempotency_key: self.key,
            fills: &done.fills,
            avg_price: done.average_price().map(Number),
            executed_qty: Number(done.executed_qty()),
            broker: Broker { name: self.broker, order_ref: Some(done.order_ref.as_str()).filter(|r| !r.is_empty()) },
            latency_ms: self.latency,
            reason_code: reason,
        };
        serde_json::to_string(&result).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_keep_their_digits() {
        let fill: Fill = serde_json::from_str(r#"{"px":0.10000000000000000001,"qty":"3","ts":"t"}"#).unwrap();
        assert_eq!(serde_json::to_string(&fill).unwrap(), r#"{"px":0.10000000000000000001,"qty":3,"ts":"t"}"#);
        assert!(serde_json::from_str::<Number>("\"many\"").is_err());
        let scientific: Number = serde_json::from_str("1e2").unwrap();
        assert_eq!(scientific.0, Decimal::ONE_HUNDRED);
    }

    #[test]
    fn the_average_price_is_weighed() {
        let fill = |px: i64, qty: i64| Fill { px: Number(px.into()), qty: Number(qty.into()), ts: String::new() };
        let execution = Execution { order_ref: "r".to_owned(), fills: vec![fill(10, 1), fill(16, 2)] };
        assert_eq!((execution.executed_qty(), execution.average_price()), (3.into(), Some(14.into())));
        assert_eq!(Execution::default().average_price(), None);
        let huge: Decimal = "60000000000000000000000000000".parse().unwrap();
        let fill = |px: Decimal, qty: i64| Fill { px: Number(px), qty: Number(qty.into()), ts: String::new() };
        let average = |fills| Execution { order_ref: String::new(), fills }.average_price().unwrap();
        assert_eq!(average(vec![fill(huge, 4)]), huge, "what was paid is more than can be kept");
        assert_eq!(
            average(vec![fill(huge, 3), fill(huge / Decimal::TWO, 1)]),
            huge * "0.875".parse::<Decimal>().unwrap()
        );
        assert_eq!(average(vec![fill(Decimal::MAX, 3), fill(Decimal::MAX, 4)]), Decimal::MAX);
    }

    #[test]
    fn nonsense_is_told_from_an_execution() {
        let check = |fills: &[(i64, i64)]| {
            let fill = |(px, qty): &(i64, i64)| Fill {
                px: Number((*px).into()),
                qty: Number((*qty).into()),
                ts: String::new(),
            };
            Execution { order_ref: "r".to_owned(), fills: fills.iter().map(fill).collect() }.check(10.into())
        };
        for fine in [&[][..], &[(1, 10)], &[(1, 4), (2, 6)], &[(1, 3)]] {
            assert_eq!(check(fine), Ok(()), "{fine:?}");
        }
        for nonsense in [&[(-1, 10)][..], &[(0, 10)], &[(1, -1), (1, 3)], &[(1, 0)], &[(1, 11)], &[(1, 6), (1, 5)]] {
            assert!(check(nonsense).is_err(), "{nonsense:?}");
        }
    }
}
