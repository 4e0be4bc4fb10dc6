//! Secrets at rest: ChaCha20-Poly1305 under a key with an id, bound to the table, column and row they belong to. The first
//! key encrypts, all of them decrypt: a new one is put in front, and `rotate` brings the rows over.

use std::sync::OnceLock;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use postrider::{Error, Result};
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};

type Keys = Vec<(String, LessSafeKey)>;
type Maker = Box<dyn Fn() -> Result<String> + Send + Sync>;

pub struct Keyring {
    keys: OnceLock<Keys>,
    /// Brings the keys when they are first needed.
    maker: Option<Maker>,
}

impl Keyring {
    /// One `id:base64` of 32 bytes a line; the first encrypts.
    pub fn parse(text: &str) -> Result<Keyring> {
        Ok(Keyring { keys: OnceLock::from(parse(text)?), maker: None })
    }

    /// Asks for the text of the keys when they are first needed.
    pub fn on_demand(maker: Maker) -> Keyring {
        Keyring { keys: OnceLock::new(), maker: Some(maker) }
    }

    /// Without a key: nothing can be sealed or opened.
    pub fn none() -> Keyring {
        Keyring { keys: OnceLock::from(vec![]), maker: None }
    }

    fn keys(&self) -> Result<&Keys> {
        if let Some(keys) = self.keys.get() {
            return Ok(keys);
        }
        let text = self.maker.as_ref().map_or(Ok(String::new()), |maker| maker())?;
        let keys = parse(&text)?;
        Ok(self.keys.get_or_init(|| keys))
    }

    /// The text of a new key.
    pub fn generate() -> Result<String> {
        let mut bytes = [0; 34];
        SystemRandom::new().fill(&mut bytes).map_err(|_| Error::invalid("the system gives no random numbers"))?;
        Ok(format!("k{:02x}{:02x}:{}\n", bytes[32], bytes[33], STANDARD.encode(&bytes[..32])))
    }

    /// `place` is where it is kept: table, column and row.
    pub fn seal(&self, place: &str, text: &str) -> Result<String> {
        let missing =
            "there is no key for secrets at rest; write where it is kept: [secrets] key = \"file:postrider.key\"";
        let (id, key) = self.keys()?.first().ok_or_else(|| Error::invalid(missing))?;
        let mut nonce = [0; NONCE_LEN];
        let failed = || Error::invalid("a secret could not be encrypted");
        SystemRandom::new().fill(&mut nonce).map_err(|_| failed())?;
        let mut sealed = text.as_bytes().to_vec();
        key.seal_in_place_append_tag(Nonce::assume_unique_for_key(nonce), Aad::from(place), &mut sealed)
            .map_err(|_| failed())?;
        Ok(format!("v1:{id}:{}", STANDARD.encode([&nonce[..], &sealed].concat())))
    }

    pub fn open(&self, place: &str, sealed: &str) -> Result<String> {
        let wrong = |why: &str| Error::invalid(format!("a secret of {place} cannot be read: {why}"));
        let mut parts = sealed.splitn(3, ':');
        let (Some("v1"), Some(id), Some(text)) = (parts.next(), parts.next(), parts.next()) else {
            return Err(wrong("it is not as we write it"));
        };
        let key = self.keys()?.iter().find(|key| key.0 == id);
        let (_, key) = key.ok_or_else(|| wrong(&format!("its key `{id}` is not among those of [secrets] key")))?;
        let mut bytes = STANDARD.decode(text).map_err(|_| wrong("it is no base64"))?;
        if bytes.len() < NONCE_LEN {
            return Err(wrong("it is too short"));
        }
        let mut sealed = bytes.split_off(NONCE_LEN);
        let nonce = Nonce::try_assume_unique_for_key(&bytes).map_err(|_| wrong("it is too short"))?;
        let opened = key.open_in_place(nonce, Aad::from(place), &mut sealed);
        let opened = opened.map_err(|_| wrong("it was changed, or belongs elsewhere, or the key is another"))?;
        String::from_utf8(opened.to_vec()).map_err(|_| wrong("it is no text"))
    }

    /// Was this sealed with another key than the first?
    pub fn is_old(&self, sealed: &str) -> bool {
        let first = self.keys().ok().and_then(|keys| keys.first());
        sealed.split(':').nth(1) != first.map(|key| key.0.as_str())
    }
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
        let id_is_plain = !id.is_empty() && id.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
        let bytes = STANDARD.decode(key).map_err(|_| wrong())?;
        let key = UnboundKey::new(&CHACHA20_POLY1305, &bytes).map_err(|_| wrong())?;
        if !id_is_plain {
            return Err(wrong());
        }
        keys.push((id.to_owned(), LessSafeKey::new(key)));
    }
    if keys.is_empty() { Err(wrong()) } else { Ok(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_open_only_where_they_belong_and_with_their_key() {
        let (first, second) = (Keyring::generate().unwrap(), Keyring::generate().unwrap());
        let old = Keyring::parse(&first).unwrap();
        let sealed = old.seal("subscriptions.secrets.7", "hush").unwrap();
        assert!(!sealed.contains("hush") && !old.is_old(&sealed));
        assert_eq!(old.open("subscriptions.secrets.7", &sealed).unwrap(), "hush");
        assert!(old.open("subscriptions.secrets.8", &sealed).is_err(), "another row");
        assert_ne!(old.seal("x", "hush").unwrap(), old.seal("x", "hush").unwrap(), "a nonce each");
        let both = Keyring::parse(&format!("{second}{first}")).unwrap();
        assert_eq!(both.open("subscriptions.secrets.7", &sealed).unwrap(), "hush");
        assert!(both.is_old(&sealed));
        let new = Keyring::parse(&second).unwrap();
        assert!(new.open("subscriptions.secrets.7", &sealed).is_err());
        let mut changed = sealed.into_bytes();
        let last = changed.len() - 3;
        changed[last] = if changed[last] == b'A' { b'B' } else { b'A' };
        assert!(old.open("subscriptions.secrets.7", &String::from_utf8(changed).unwrap()).is_err());
        for wrong in ["", "nokey", "id:short", "i d:AAAA"] {
            assert!(Keyring::parse(wrong).is_err(), "{wrong}");
        }
    }
}
