//! No secret stands in the configuration in plain text: what looks like one is refused, and where to keep it is said instead.
//! What is refused is never repeated.

use url::{Url, form_urlencoded};

use crate::secret;

const KEEP: &str = "write where it is kept instead: \"env:NAME\", \"file:PATH\" or \"exec:COMMAND\"";

/// Words that make a header, or a parameter of a URL, one that carries a secret.
const SECRET: [&str; 19] = [
    "auth",
    "authorization",
    "authentication",
    "authorisation",
    "bearer",
    "cookie",
    "credential",
    "credentials",
    "creds",
    "hmac",
    "passcode",
    "passphrase",
    "passwd",
    "password",
    "pwd",
    "secret",
    "session",
    "sig",
    "token",
];
/// The same at the end of a name.
const LAST: [&str; 8] = ["jwt", "otp", "pass", "pin", "psk", "psw", "sign", "pat"];
/// The same within a longer name, its words run together.
const WITHIN: [&str; 10] = [
    "accesskey",
    "accountkey",
    "apikey",
    "appkey",
    "authkey",
    "clientkey",
    "privatekey",
    "signingkey",
    "signature",
    "pasword",
];
/// Keys that only find or arrange something. Of any other name that has `key` for its last word it is taken for one that
/// opens; of a name that is nothing else, as `X-Key`, nobody can say.
const NO_SECRET_KEYS: [&str; 12] = [
    "cache",
    "dedup",
    "deduplication",
    "event",
    "group",
    "idempotency",
    "lookup",
    "message",
    "ordering",
    "partition",
    "routing",
    "sort",
];
/// Parameters of a URL that carry one at well-known services.
const PARAMETERS: [&str; 2] = ["code", "key"];
/// How a value begins that names its scheme, with a secret as its second word and last.
const SCHEMES: [&str; 9] =
    ["apikey", "aws4-hmac-sha256", "basic", "bearer", "geniekey", "sharedaccesssignature", "splunk", "ssws", "token"];
/// How well-known secrets begin, which are long.
const BEGINNINGS: [&str; 38] = [
    "AIza",
    "AKIA",
    "ASIA",
    "SG.",
    "dckr_pat_",
    "dop_v1_",
    "eyJ",
    "ghp_",
    "gho_",
    "ghr_",
    "ghs_",
    "ghu_",
    "github_pat_",
    "glpat-",
    "glrt-",
    "hf_",
    "hvs.",
    "npm_",
    "pr_",
    "pypi-",
    "rk_live_",
    "rk_test_",
    "shpat_",
    "shpss_",
    "sk-",
    "sk_live_",
    "sk_test_",
    "sq0atp-",
    "whsec_",
    "xapp-",
    "xoxa-",
    "xoxb-",
    "xoxe-",
    "xoxp-",
    "xoxr-",
    "xoxs-",
    "ya29.",
    "-----BEGIN",
];
/// So long at least is what follows.
const LONG: usize = 12;

/// Does it look like one of those, whatever it is called?
fn is_known(value: &str) -> bool {
    let value = value.trim();
    let mut words = value.split([' ', '\t', ':']).filter(|word| !word.is_empty());
    let scheme = words.next().unwrap_or_default().to_ascii_lowercase();
    let named = SCHEMES.contains(&scheme.as_str()) && words.next().is_some_and(|word| word.len() >= 6);
    let begins = |start: &&str| value.strip_prefix(*start).is_some_and(|rest| rest.len() >= LONG);
    (named && words.next().is_none()) || BEGINNINGS.iter().any(begins)
}

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    let words: Vec<&str> = name.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty()).collect();
    let (last, before) = match words.as_slice() {
        [] => return false,
        [before @ .., last] => (*last, before.iter().copied().filter(|word| *word != "x").collect::<Vec<_>>()),
    };
    let joined = words.concat();
    let opens = last == "key" && before.last().is_some_and(|word| !NO_SECRET_KEYS.contains(word));
    words.iter().any(|word| SECRET.contains(word))
        || LAST.contains(&last)
        || opens
        || WITHIN.iter().any(|word| joined.contains(word) && !joined.contains("keyboard"))
        || ["token", "secret", "password"].iter().any(|word| name.contains(word))
}

/// Can it be told as a name? What has other letters in it may be a whole header, or a secret without its name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.len() <= 64 && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b))
}

/// A header's value, read where it is kept.
pub fn header(name: &str, value: &str) -> Result<String, String> {
    if (is_secret(name) || is_known(value)) && !secret::is_reference(value) {
        let which = if is_name(name) { name } else { "a header" };
        return Err(format!("{which} looks like a secret; {KEEP}"));
    }
    secret::resolve(value)
}

/// A URL as it was written: without credentials, which nobody would send, and without a secret in its query, however its
/// parameters are kept apart, or behind its `#`, unless it is kept elsewhere.
pub fn url(key: &str, text: &str) -> Result<(), String> {
    let resolved = secret::resolve(text)?;
    without_credentials(key, &resolved)?;
    // What is no URL is refused by whoever reads it.
    let Ok(url) = Url::parse(&resolved) else { return Ok(()) };
    if secret::is_reference(text) {
        return Ok(());
    }
    for part in [url.query(), url.fragment()].into_iter().flatten().flat_map(|part| part.split(['&', ';', ','])) {
        for (name, value) in form_urlencoded::parse(part.as_bytes()) {
            if is_secret(&name) || PARAMETERS.contains(&&*name.to_ascii_lowercase()) || is_known(&value) {
                let told = is_name(&name) && part.contains('=');
                let which = if told { format!("the parameter `{name}`") } else { "a parameter".to_owned() };
                return Err(format!("{which} of {key} looks like a secret; for the whole URL, {KEEP}"));
            }
        }
    }
    Ok(())
}

/// Nobody would send those of a URL.
pub fn without_credentials(key: &str, url: &str) -> Result<(), String> {
    match Url::parse(url) {
        Ok(url) if !url.username().is_empty() || url.password().is_some() => Err(format!(
            "{key} has credentials in it, which are not sent; send them as a header: headers = {{ Authorization = \"env:NAME\" }}"
        )),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_like_a_secret_is_refused_and_not_repeated() {
        for (name, value) in [
            ("Authorization", "canary"),
            ("X-Api-Key", "canary"),
            ("x-auth", "canary"),
            ("X-Auth-Email", "canary"),
            ("X-GitHub-Token", "canary"),
            ("X-Hub-Signature-256", "canary"),
            ("Cookie", "canary"),
            ("X-Anything", "Bearer canary"),
            ("X-Anything", "basic canary"),
            ("X-Anything", "whsec_canary-canary-canary"),
            ("X-Anything", "github_pat_canary-canary-canary"),
            ("X-Anything", "eyJcanary-canary-canary"),
            ("X-Anything", "sk_test_canary-canary-canary"),
            ("X-Anything", "-----BEGIN PRIVATE KEY----- canary"),
            ("X-Anything", " Bearer\tcanary"),
            ("X-Anything", "ApiKey canary"),
            ("X-ClientKey", "canary"),
            ("X-Master-Key", "canary"),
            ("aeg-sas-key", "canary"),
            ("X-Passcode", "canary"),
            ("Ocp-Apim-Subscription-Key", "canary"),
            ("X-Functions-Key", "canary"),
            ("X-Private-Key", "canary"),
            ("X-Passphrase", "canary"),
            ("X-Pass", "canary"),
            ("X-PIN", "canary"),
            ("X-JWT", "canary"),
            ("X-App-Key", "canary"),
            ("X-Client-Key", "canary"),
            ("X-License-Key", "canary"),
            ("X-Webhook-Signing-Key", "canary"),
            ("X-PSK", "canary"),
            ("X-User-Key", "canary"),
            ("Licence-Key", "canary"),
            ("X-Anything", "AKIAcanary-canary"),
            ("Authorization: canary", "canary"),
        ] {
            let refused = header(name, value).unwrap_err();
            assert!(refused.contains("env:NAME") && !refused.contains("canary"), "{name}: {refused}");
        }
        for (name, value) in [
            ("X-Author", "ann"),
            ("X-Source", "erp"),
            ("X-Key", "a"),
            ("X-Pass-Through", "1"),
            ("Accept", "text/plain"),
            ("Accept-Language", "sk-SK"),
            ("X-Tenant", "sk-north"),
            ("X-Project", "pr_website"),
            ("X-Environment", "npm_test"),
            ("X-Source", "eyjafjallajokull"),
            ("X-Plan", "basic plan"),
            ("X-Kind", "token sale"),
            ("X-Title", "Bearer of news"),
            ("X-Client-Keyboard", "de"),
            ("X-Routing-Key", "orders"),
            ("X-Partition-Key", "7"),
        ] {
            assert_eq!(header(name, value).as_deref(), Ok(value), "{name}");
        }
        assert_eq!(header("Authorization", "exec:echo hush").as_deref(), Ok("hush"));
        for bad in [
            "https://u:canary@h.example/",
            "https://canary@h.example/",
            "https://h/?token=canary",
            "https://h/?api_key=canary",
            "https://h/?key=canary",
            "https://h/?code=canary",
            "https://h/?pwd=canary",
            "https://h/?pass=canary",
            "https://:canary@h.example/",
            "https://h/?a=1;token=canary",
            "https://h/#token=canary",
            "https://h/?token:canary",
            "https://h/?token%3Dcanary",
            "https://h/?Bearer%20canary",
            "https://h/?zx=Bearer%20canary",
            "https://h/?zx=ghp_canary-canary-canary",
            "https://h/?master_key=canary",
            "https://h/?a=1,token=canary",
        ] {
            let refused = url("url", bad).unwrap_err();
            assert!(!refused.contains("canary"), "{refused}");
        }
        assert!(url("url", "exec:echo https://u:canary@h.example/").is_err(), "they would not be sent");
        for good in ["https://h.example/a?q=1", "exec:echo https://h.example/?token=x", "no url"] {
            assert_eq!(url("url", good), Ok(()), "{good}");
        }
    }
}
