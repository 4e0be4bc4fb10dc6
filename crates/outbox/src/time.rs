//! A moment on the database's clock, in microseconds, the resolution all three databases share.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use ::time::OffsetDateTime;
use ::time::format_description::well_known::Rfc3339;

/// Microseconds since 1970-01-01 UTC, read from the database, never from a host.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Timestamp(i64);

impl Timestamp {
    /// 9999-12-31, the last day every database can store: "parked until somebody says otherwise".
    pub const FAR_FUTURE: Timestamp = Timestamp(253_402_214_400_000_000);

    /// The last moment of 9999: what lies behind it, like PostgreSQL's `infinity`, is shown as this.
    pub const LAST: Timestamp = Timestamp(253_402_300_799_999_999);

    pub const fn from_micros(micros: i64) -> Self {
        Timestamp(micros)
    }

    pub const fn micros(self) -> i64 {
        self.0
    }

    /// The later moment, never beyond [`Timestamp::FAR_FUTURE`].
    pub fn plus(self, duration: Duration) -> Self {
        Timestamp(self.0.saturating_add(micros_of(duration)).min(Self::FAR_FUTURE.0))
    }

    pub fn minus(self, duration: Duration) -> Self {
        Timestamp(self.0.saturating_sub(micros_of(duration)))
    }

    /// How long from `earlier` until this moment; zero when it lies before.
    pub fn since(self, earlier: Timestamp) -> Duration {
        Duration::from_micros(self.0.saturating_sub(earlier.0).max(0) as u64)
    }

    pub fn to_datetime(self) -> OffsetDateTime {
        let micros = self.0.min(Self::LAST.0);
        OffsetDateTime::from_unix_timestamp_nanos(i128::from(micros) * 1000).unwrap_or(OffsetDateTime::UNIX_EPOCH)
    }
}

/// As long as a time may be put off: whoever adds this to today stays before the year 10000, where databases end.
const FOR_EVER: Duration = Duration::from_secs(7900 * 365 * 24 * 3600);

/// A duration as whole microseconds; what is longer than databases can tell is for ever.
pub fn micros_of(duration: Duration) -> i64 {
    duration.min(FOR_EVER).as_micros() as i64
}

impl fmt::Display for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.to_datetime().format(&Rfc3339) {
            Ok(text) => f.write_str(&text),
            Err(_) => write!(f, "{}us", self.0),
        }
    }
}

impl<'de> serde::Deserialize<'de> for Timestamp {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = <std::borrow::Cow<'de, str>>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

impl fmt::Debug for Timestamp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Timestamp {
    type Err = String;

    /// RFC 3339, e.g. `2026-03-01T12:00:00Z`.
    fn from_str(text: &str) -> Result<Self, String> {
        let moment = OffsetDateTime::parse(text, &Rfc3339)
            .map_err(|e| format!("`{text}` is not a time: {e}; write it as 2026-03-01T12:00:00Z"))?;
        i64::try_from(moment.unix_timestamp_nanos() / 1000)
            .map(Timestamp)
            .map_err(|_| format!("`{text}` is out of range"))
    }
}

impl serde::Serialize for Timestamp {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        let t: Timestamp = "2026-03-01T12:00:00.25Z".parse().unwrap();
        assert_eq!(t.micros() % 1_000_000, 250_000);
        assert_eq!(t.to_string().parse::<Timestamp>().unwrap(), t);
        assert!("yesterday".parse::<Timestamp>().unwrap_err().contains("2026-03-01T12:00:00Z"));
        assert_eq!(Timestamp::FAR_FUTURE.to_string(), "9999-12-31T00:00:00Z");
        assert_eq!(Timestamp::FAR_FUTURE.plus(Duration::MAX), Timestamp::FAR_FUTURE);
        assert_eq!(Timestamp::from_micros(i64::MAX).to_string(), "9999-12-31T23:59:59.999999Z", "as good as never");
        assert_eq!("9999-12-31T23:59:59.999999Z".parse(), Ok(Timestamp::LAST));
    }
}
