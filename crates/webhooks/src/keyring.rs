//! Secrets at rest: ChaCha20-Poly1305 under a key with an id, bound to the table, column and row they belong to. The first
//! key encrypts, all of them decrypt: a new one is put in front, and `reseal` brings the rows over. Who makes the first
//! key, and who may use which, is agreed upon in the database: see `keys.rs`.

use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postrider::clock::Tick;
use postrider::error::Kind;
use postrider::message::sha256;
use postrider::{Error, Result};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

/// Whoever lacks a key looks for it again, but not more often than this.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Where the text of the keys is kept: one `id:base64` of 32 bytes a line, the first one encrypts.
pub trait Source: Send + Sync {
    /// What is there; `None` if nothing is yet.
    fn read(&self) -> Result<Option<String>>;

    /// Keeps this text where there is none yet; answers what is there then.
    fn keep(&self, fresh: &str) -> Result<String>;

    /// Where it is, for people.
    fn place(&self) -> String;
}

/// A key by its name, and by what it is recognised by: two keys may have one name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Name {
    pub id: String,
    pub fingerprint: String,
}

struct Key {
    name: Name,
    key: LessSafeKey,
}

/// The keys a process holds at one moment.
#[derive(Default)]
pub(crate) struct Keys(Vec<Key>);

pub struct Keyring {
    keys: RwLock<Arc<Keys>>,
    source: Option<Box<dyn Source>>,
    looked_at: Mutex<Option<Tick>>,
}

/// What needs a key that is not held.
pub(crate) fn missing(why: impl std::fmt::Display) -> Error {
    Error::new(Kind::KeyMissing, format!("the key for secrets at rest is not here: {why}"))
}

impl Keyring {
    /// One `id:base64` of 32 bytes a line; the first encrypts.
    pub fn parse(text: &str) -> Result<Keyring> {
        Ok(Keyring::of(parse(text)?, None))
    }

    /// Reads what its source has, and looks there again while something is missing.
    pub fn at(source: Box<dyn Source>) -> Result<Keyring> {
        let keys = source.read()?.map(|text| parse(&text)).transpose()?.unwrap_or_default();
        Ok(Keyring::of(keys, Some(source)))
    }

    /// Without a key: nothing can be sealed or opened.
    pub fn none() -> Keyring {
        Keyring::of(Keys::default(), None)
    }

    fn of(keys: Keys, source: Option<Box<dyn Source>>) -> Keyring {
        Keyring { keys: RwLock::new(Arc::new(keys)), source, looked_at: Mutex::default() }
    }

    pub(crate) fn keys(&self) -> Arc<Keys> {
        self.keys.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Looks again at its source: somebody may have brought the key. Not more than once a second.
    pub(crate) fn look_again(&self) -> Arc<Keys> {
        let Some(source) = &self.source else { return self.keys() };
        let now = Tick::now();
        {
            let mut looked_at = self.looked_at.lock().unwrap_or_else(PoisonError::into_inner);
            if looked_at.is_some_and(|at| now.since(at) < LOOK_EVERY) {
                return self.keys();
            }
            *looked_at = Some(now);
        }
        match source.read().and_then(|text| text.map(|text| parse(&text)).transpose()) {
            Ok(Some(keys)) => self.hold(keys),
            Ok(None) => self.keys(),
            Err(error) => {
                tracing::warn!(%error, "the key for secrets at rest cannot be read");
                self.keys()
            }
        }
    }

    /// Makes a key where its source has none; answers what it holds then.
    pub(crate) fn make(&self) -> Result<Arc<Keys>> {
        let Some(source) = &self.source else {
            return Err(missing("write where it is kept: [secrets] key = \"file:postrider.key\""));
        };
        let keys = parse(&source.keep(&Keyring::generate()?)?)?;
        Ok(self.hold(keys))
    }

    fn hold(&self, keys: Keys) -> Arc<Keys> {
        let keys = Arc::new(keys);
        *self.keys.write().unwrap_or_else(PoisonError::into_inner) = keys.clone();
        keys
    }

    /// Where to bring a key.
    pub(crate) fn place(&self) -> String {
        self.source.as_ref().map_or_else(|| "[secrets] key".to_owned(), |source| source.place())
    }

    /// The text of a new key.
    pub fn generate() -> Result<String> {
        let mut bytes = [0; 36];
        SystemRandom::new().fill(&mut bytes).map_err(|_| Error::invalid("the system gives no random numbers"))?;
        let id: String = bytes[32..].iter().map(|byte| format!("{byte:02x}")).collect();
        Ok(format!("k{id}:{}\n", STANDARD.encode(&bytes[..32])))
    }
}

impl Keys {
    /// Those it has, the one that encrypts first.
    pub fn names(&self) -> Vec<Name> {
        self.0.iter().map(|key| key.name.clone()).collect()
    }

    /// `place` is where it is kept: table, column and row.
    pub fn seal(&self, place: &str, text: &str) -> Result<String> {
        let Some(Key { name, key }) = self.0.first() else { return Err(missing("there is none")) };
        let mut nonce = [0; NONCE_LEN];
        let failed = || Error::invalid("a secret could not be encrypted");
        SystemRandom::new().fill(&mut nonce).map_err(|_| failed())?;
        let mut sealed = text.as_bytes().to_vec();
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(place), &mut sealed)
            .map_err(|_| failed())?;
        Ok(format!("v1:{}:{}", name.id, STANDARD.encode([&nonce[..], &sealed].concat())))
    }

    pub fn open(&self, place: &str, sealed: &str) -> Result<String> {
        let wrong = |why: &str| Error::database(format!("a secret of {place} cannot be read: {why}"));
        let mut parts = sealed.splitn(3, ':');
        let (Some("v1"), Some(id), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(wrong("it is not as we write it"));
        };
        let key = self.0.iter().find(|key| key.name.id == id);
        let key = key.ok_or_else(|| missing(format!("a secret of {place} was sealed with `{id}`")))?;
        let mut bytes = STANDARD.decode(text).map_err(|_| wrong("it is no base64"))?;
        if bytes.len() < NONCE_LEN {
            return Err(wrong("it is too short"));
        }
        let mut sealed = bytes.split_off(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(&bytes).map_err(|_| wrong("it is too short"))?;
        let opened = key.key.open_in_place(nonce, Aad::from(place), &mut sealed);
        let opened = opened.map_err(|_| wrong("it was changed, or belongs elsewhere, or the key is another"))?;
        String::from_utf8(opened.to_vec()).map_err(|_| wrong("it is no text"))
    }

    /// Was this sealed with another key than the first?
    pub fn is_old(&self, sealed: &str) -> bool {
        sealed_by(sealed) != self.0.first().map(|key| key.name.id.as_str())
    }
}

/// The id of the key something was sealed with.
pub(crate) fn sealed_by(sealed: &str) -> Option<&str> {
    sealed.strip_prefix("v1:").and_then(|rest| rest.split_once(':')).map(|(id, _)| id)
}

fn parse(text: &str) -> Result<Keys> {
    let wrong = || {
        Error::invalid(
            "the key for secrets must be lines of ID:BASE64 with 32 random bytes each; the first one encrypts",
        )
    };
    let mut keys = Vec::new();
    for line in text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (id, key) = line.split_once(':').ok_or_else(wrong)?;
        let id_is_plain = (1..=64).contains(&id.len()) && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let bytes = STANDARD.decode(key).map_err(|_| wrong())?;
        let key = UnboundKey::new(&CHACHA20_POLY1305, &bytes).map_err(|_| wrong())?;
        if !id_is_plain {
            return Err(wrong());
        }
        let digest = sha256(&[b"postrider key for secrets\0", &bytes[..]].concat());
        let fingerprint = digest[..16].iter().map(|byte| format!("{byte:02x}")).collect();
        keys.push(Key { name: Name { id: id.to_owned(), fingerprint }, key: LessSafeKey::new(key) });
    }
    if keys.is_empty() { Err(wrong()) } else { Ok(Keys(keys)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_open_only_where_they_belong_and_with_their_key() {
        let (first, second) = (Keyring::generate().unwrap(), Keyring::generate().unwrap());
        let keys = |text: &str| Keyring::parse(text).unwrap().keys();
        let old = keys(&first);
        let sealed = old.seal("subscriptions.secrets.7", "hush").unwrap();
        assert!(!sealed.contains("hush") && !old.is_old(&sealed));
        assert_eq!(old.open("subscriptions.secrets.7", &sealed).unwrap(), "hush");
        assert!(old.open("subscriptions.secrets.8", &sealed).is_err(), "another row");
        assert_ne!(old.seal("x", "hush").unwrap(), old.seal("x", "hush").unwrap(), "a nonce each");
        let both = keys(&format!("{second}{first}"));
        assert_eq!(both.open("subscriptions.secrets.7", &sealed).unwrap(), "hush");
        assert!(both.is_old(&sealed));
        let new = keys(&second);
        assert_eq!(new.open("subscriptions.secrets.7", &sealed).unwrap_err().kind, Kind::KeyMissing);
        let mut changed = sealed.into_bytes();
        let last = changed.len() - 3;
        changed[last] = if changed[last] == b'A' { b'B' } else { b'A' };
        assert!(old.open("subscriptions.secrets.7", &String::from_utf8(changed).unwrap()).is_err());
        for wrong in ["", "nokey", "id:short", "i d:AAAA"] {
            assert!(Keyring::parse(wrong).is_err(), "{wrong}");
        }
    }
}
