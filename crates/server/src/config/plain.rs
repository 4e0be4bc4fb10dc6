//! No secret stands in the configuration in plain text: what looks like one is refused, and where to keep it is said instead.
//! What is refused is never repeated.

use url::{Url, form_urlencoded};

use crate::secret;

const KEEP: &str = "write where it is kept instead: \"env:NAME\", \"file:PATH\" or \"exec:COMMAND\"";

/// Words that make a header, or a parameter of a URL, one that carries a secret.
const SECRET: [&str; 15] = [
    "auth",
    "authorization",
    "authentication",
    "bearer",
    "cookie",
    "credential",
    "credentials",
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
/// The same within a longer word.
const WITHIN: [&str; 23] = [
    "account-key",
    "app-key",
    "app_key",
    "appkey",
    "client-key",
    "client_key",
    "license-key",
    "licence-key",
    "auth-key",
    "user-key",
    "pasword",
    "signing-key",
    "apikey",
    "api-key",
    "api_key",
    "accesskey",
    "access-key",
    "access_key",
    "functions-key",
    "private-key",
    "private_key",
    "signature",
    "subscription-key",
];
/// Parameters of a URL that carry one at well-known services.
const PARAMETERS: [&str; 2] = ["code", "key"];
/// How values of well-known secrets begin.
const VALUES: [&str; 18] = [
    "bearer ",
    "basic ",
    "token ",
    "pr_",
    "whsec_",
    "ghp_",
    "gho_",
    "ghs_",
    "github_pat_",
    "glpat-",
    "AKIA",
    "AIza",
    "npm_",
    "sk-",
    "sk_live_",
    "xoxb-",
    "xoxp-",
    "eyJ",
];

fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.split(|c: char| !c.is_ascii_alphanumeric()).any(|word| SECRET.contains(&word))
        || name.rsplit(|c: char| !c.is_ascii_alphanumeric()).next().is_some_and(|word| LAST.contains(&word))
        || WITHIN.iter().any(|word| name.contains(word))
        || ["token", "secret", "password"].iter().any(|word| name.contains(word))
}

/// A header's value, read where it is kept.
pub fn header(name: &str, value: &str) -> Result<String, String> {
    let known = VALUES.iter().any(|start| value.get(..start.len()).is_some_and(|v| v.eq_ignore_ascii_case(start)));
    if (is_secret(name) || known) && !secret::is_reference(value) {
        // What is no name may be a whole header, with its value.
        let is_name = name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b));
        let which = if is_name { name } else { "a header" };
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
    let parameters = [url.query(), url.fragment()].into_iter().flatten().flat_map(|part| part.split(['&', ';']));
    let mut names = parameters.flat_map(|parameter| form_urlencoded::parse(parameter.as_bytes()).map(|(name, _)| name));
    match names.find(|name| is_secret(name) || PARAMETERS.contains(&&*name.to_ascii_lowercase())) {
        Some(name) if !secret::is_reference(text) => {
            Err(format!("the parameter `{name}` of {key} looks like a secret; for the whole URL, {KEEP}"))
        }
        _ => Ok(()),
    }
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
            ("X-Anything", "whsec_canary"),
            ("X-Anything", "github_pat_canary"),
            ("X-Anything", "eyJcanary"),
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
            ("X-Anything", "AKIAcanary"),
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
