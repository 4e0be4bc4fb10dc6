//! Standard Webhooks signatures: `v1` (HMAC-SHA256) and `v1a` (ed25519), over exactly the bytes that are sent.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use ring::rand::SecureRandom;
use ring::signature::{Ed25519KeyPair, KeyPair};
use ring::{hmac, rand};

/// Bytes of a new secret.
const SECRET_BYTES: usize = 32;
/// The standard wants at least this many.
const FEWEST_BYTES: usize = 24;
const MOST_BYTES: usize = 64;

/// Which signature a subscription gets.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Scheme {
    /// HMAC-SHA256 with a shared secret.
    #[default]
    V1,
    /// ed25519: the receiver holds only the public key.
    V1a,
}

impl Scheme {
    pub fn as_str(self) -> &'static str {
        if self == Scheme::V1 { "v1" } else { "v1a" }
    }

    pub fn parse(text: &str) -> Option<Scheme> {
        [Scheme::V1, Scheme::V1a].into_iter().find(|scheme| scheme.as_str() == text)
    }
}

/// A signing key. Its text (`whsec_…`, `whsk_…`) is what receivers and backups hold.
#[derive(Clone)]
pub enum Key {
    V1(Vec<u8>),
    /// The seed of an ed25519 key.
    V1a(Vec<u8>),
}

impl std::fmt::Debug for Key {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Key")
    }
}

impl Key {
    pub fn generate(scheme: Scheme) -> Key {
        let mut bytes = vec![0; SECRET_BYTES];
        // The operating system's randomness does not fail on any system we run on.
        rand::SystemRandom::new().fill(&mut bytes).unwrap_or_else(|_| unreachable!("no randomness"));
        match scheme {
            Scheme::V1 => Key::V1(bytes),
            Scheme::V1a => Key::V1a(bytes),
        }
    }

    /// From `whsec_…`, or the same without its prefix.
    pub fn parse(text: &str) -> Result<Key, String> {
        if let Some(seed) = text.strip_prefix("whsk_") {
            let seed = STANDARD.decode(seed).map_err(|_| "the secret is no base64".to_owned())?;
            // Some keep the public key behind the seed.
            let seed = seed.get(..32).ok_or("an ed25519 key has 32 bytes")?.to_vec();
            Ed25519KeyPair::from_seed_unchecked(&seed).map_err(|_| "the secret is no ed25519 key".to_owned())?;
            return Ok(Key::V1a(seed));
        }
        let secret = STANDARD.decode(text.strip_prefix("whsec_").unwrap_or(text));
        match secret {
            Ok(bytes) if (FEWEST_BYTES..=MOST_BYTES).contains(&bytes.len()) => Ok(Key::V1(bytes)),
            _ => Err(format!(
                "a secret is `whsec_` and {FEWEST_BYTES} to {MOST_BYTES} random bytes in base64; leave it out to get one"
            )),
        }
    }

    pub fn scheme(&self) -> Scheme {
        match self {
            Key::V1(_) => Scheme::V1,
            Key::V1a(_) => Scheme::V1a,
        }
    }

    /// The secret itself.
    pub fn text(&self) -> String {
        match self {
            Key::V1(bytes) => format!("whsec_{}", STANDARD.encode(bytes)),
            Key::V1a(seed) => format!("whsk_{}", STANDARD.encode(seed)),
        }
    }

    /// What a receiver verifies with: the secret itself, or the public key.
    pub fn verifier(&self) -> String {
        match self {
            Key::V1(_) => self.text(),
            Key::V1a(seed) => match Ed25519KeyPair::from_seed_unchecked(seed) {
                Ok(pair) => format!("whpk_{}", STANDARD.encode(pair.public_key().as_ref())),
                Err(_) => String::new(),
            },
        }
    }

    /// `v1,…` or `v1a,…` over `id.timestamp.payload`.
    pub fn sign(&self, id: &str, timestamp: i64, payload: &[u8]) -> String {
        let head = format!("{id}.{timestamp}.");
        match self {
            Key::V1(secret) => {
                let mut context = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
                context.update(head.as_bytes());
                context.update(payload);
                format!("v1,{}", STANDARD.encode(context.sign().as_ref()))
            }
            Key::V1a(seed) => match Ed25519KeyPair::from_seed_unchecked(seed) {
                Ok(pair) => {
                    format!("v1a,{}", STANDARD.encode(pair.sign(&[head.as_bytes(), payload].concat()).as_ref()))
                }
                Err(_) => String::new(), // it was checked when it was made
            },
        }
    }
}

/// Verifies a `webhook-signature` header against a `whsec_…` or `whpk_…`: for receivers. The timestamp is the caller's to
/// judge (five minutes are usual).
pub fn verify(verifier: &str, id: &str, timestamp: i64, payload: &[u8], signatures: &str) -> bool {
    let signed = [format!("{id}.{timestamp}.").as_bytes(), payload].concat();
    signatures.split(' ').filter_map(|one| one.split_once(',')).any(|(version, signature)| {
        let Ok(signature) = STANDARD.decode(signature) else { return false };
        match (version, verifier.strip_prefix("whpk_")) {
            ("v1", None) => {
                let secret = STANDARD.decode(verifier.strip_prefix("whsec_").unwrap_or(verifier)).unwrap_or_default();
                hmac::verify(&hmac::Key::new(hmac::HMAC_SHA256, &secret), &signed, &signature).is_ok()
            }
            ("v1a", Some(public)) => {
                let public = STANDARD.decode(public).unwrap_or_default();
                let public = ring::signature::UnparsedPublicKey::new(&ring::signature::ED25519, public);
                public.verify(&signed, &signature).is_ok()
            }
            _ => false,
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_example_of_the_standard_comes_out() {
        let key = Key::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signature = key.sign("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, br#"{"test": 2432232314}"#);
        assert_eq!(signature, "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=");
    }

    #[test]
    fn what_is_signed_verifies_and_nothing_else_does() {
        for scheme in [Scheme::V1, Scheme::V1a] {
            let (key, other) = (Key::generate(scheme), Key::generate(scheme));
            let both = format!("{} {}", other.sign("m", 5, b"\xff\0"), key.sign("m", 5, b"\xff\0"));
            assert!(verify(&key.verifier(), "m", 5, b"\xff\0", &both), "{scheme:?}: one of two is enough");
            for (id, at, body) in [("n", 5, &b"\xff\0"[..]), ("m", 6, b"\xff\0"), ("m", 5, b"\xff")] {
                assert!(!verify(&key.verifier(), id, at, body, &both), "{scheme:?}");
            }
            assert!(!verify(&Key::generate(scheme).verifier(), "m", 5, b"\xff\0", &both));
            let again = Key::parse(&key.text()).unwrap();
            assert_eq!((again.text(), again.verifier()), (key.text(), key.verifier()));
        }
        assert!(Key::parse("whsec_c2hvcnQ=").is_err() && Key::parse("whsec_???").is_err());
        assert!(!format!("{:?}", Key::generate(Scheme::V1)).contains("whsec"));
    }
}
