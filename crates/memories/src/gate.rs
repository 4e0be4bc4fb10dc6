//! The gate: may work go on as it is? Pure. A capability was checked and is well or failed, or somebody said in one of three
//! places that it need not be; there is no fourth way to be skipped, so nothing that went wrong can look as if it were.

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::{Map, Value, json};

/// How much must work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "UPPERCASE")]
pub enum Mode {
    /// Everything.
    #[default]
    Full,
    /// What can; the rest is said.
    Degraded,
}

impl Mode {
    pub fn as_str(self) -> &'static str {
        match self {
            Mode::Full => "FULL",
            Mode::Degraded => "DEGRADED",
        }
    }
}

/// Who said that a capability need not be there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum SkipSource {
    /// `skip_<capability> = true`.
    File,
    /// `GATEWAY_SKIP_<CAPABILITY>=1`.
    Environment,
    /// `"skip": ["capability"]`.
    Request,
}

impl SkipSource {
    pub fn as_str(self) -> &'static str {
        match self {
            SkipSource::File => "config",
            SkipSource::Environment => "environment",
            SkipSource::Request => "request",
        }
    }
}

/// What a check saw: it has no word for "skipped".
pub type Checked = Result<(), String>;

/// Where a capability stands.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Standing {
    Ok,
    Failed(String),
    Skipped(SkipSource),
}

impl Standing {
    pub fn as_str(&self) -> &'static str {
        match self {
            Standing::Ok => "ok",
            Standing::Failed(_) => "failed",
            Standing::Skipped(_) => "skipped",
        }
    }
}

/// The capabilities that were named to be left out, and where.
pub type Skips = BTreeMap<String, SkipSource>;

/// What the gate says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub mode: Mode,
    pub passed: bool,
    pub reason: Option<String>,
    pub capabilities: BTreeMap<String, Standing>,
}

/// Judges the required capabilities by what their checks saw; one that nobody checked is missing, and that is a failure.
pub fn judge(mode: Mode, required: &[&str], checked: &BTreeMap<String, Checked>, skips: &Skips) -> Verdict {
    let mut capabilities = BTreeMap::new();
    for name in required {
        let standing = match (skips.get(*name), checked.get(*name)) {
            (Some(source), _) => Standing::Skipped(*source),
            (None, Some(Ok(()))) => Standing::Ok,
            (None, Some(Err(why))) => Standing::Failed(why.clone()),
            (None, None) => Standing::Failed("nobody checked it".to_owned()),
        };
        capabilities.insert((*name).to_owned(), standing);
    }
    // The first one that is required is named first: what stands on it fails with it.
    let is_failed = |name: &&&str| matches!(capabilities.get(**name), Some(Standing::Failed(_)));
    let failed: Vec<&str> = required.iter().filter(is_failed).copied().collect();
    let (passed, reason) = match (mode, failed.first()) {
        (_, None) => (true, None),
        (Mode::Full, Some(name)) => (false, Some(format!("FULL mode: required capability {name} failed"))),
        (Mode::Degraded, Some(_)) => (true, Some(format!("DEGRADED mode: going on without {}", failed.join(", ")))),
    };
    Verdict { mode, passed, reason, capabilities }
}

impl Verdict {
    /// Works, though not with everything.
    pub fn is_degraded(&self) -> bool {
        self.capabilities.values().any(|standing| *standing != Standing::Ok)
    }

    /// `{"mode","passed","reason","capabilities":{NAME:{"status","source"?,"detail"?}}}`.
    pub fn as_json(&self) -> Value {
        let mut capabilities = Map::new();
        for (name, standing) in &self.capabilities {
            let mut shown = json!({ "status": standing.as_str() });
            match standing {
                Standing::Skipped(source) => shown["source"] = json!(source.as_str()),
                Standing::Failed(why) => shown["detail"] = json!(why),
                Standing::Ok => {}
            }
            capabilities.insert(name.clone(), shown);
        }
        json!({ "mode": self.mode.as_str(), "passed": self.passed, "reason": self.reason, "capabilities": capabilities })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Every combination of what a check may see and who may skip, for two capabilities, in both modes.
    #[test]
    fn every_combination() {
        let seen = [None, Some(Ok(())), Some(Err("broken".to_owned()))];
        let sources = [None, Some(SkipSource::File), Some(SkipSource::Environment), Some(SkipSource::Request)];
        let mut judged = 0;
        for mode in [Mode::Full, Mode::Degraded] {
            for first in &seen {
                for second in &seen {
                    for first_skip in sources {
                        for second_skip in sources {
                            let pairs = [("openmemory", first, first_skip), ("reconcile", second, second_skip)];
                            let (mut checked, mut skips) = (BTreeMap::new(), Skips::new());
                            for (name, seen, skip) in &pairs {
                                if let Some(seen) = seen {
                                    checked.insert((*name).to_owned(), (*seen).clone());
                                }
                                if let Some(skip) = skip {
                                    skips.insert((*name).to_owned(), *skip);
                                }
                            }
                            let verdict = judge(mode, &["openmemory", "reconcile"], &checked, &skips);
                            let bad = |(_, seen, skip): &(&str, &Option<Checked>, Option<SkipSource>)| {
                                skip.is_none() && **seen != Some(Ok(()))
                            };
                            let failed: Vec<&str> = pairs.iter().filter(|p| bad(p)).map(|p| p.0).collect();
                            assert_eq!(verdict.passed, mode == Mode::Degraded || failed.is_empty(), "{verdict:?}");
                            assert_eq!(verdict.reason.is_some(), !failed.is_empty(), "{verdict:?}");
                            for (name, _, skip) in pairs {
                                let standing = &verdict.capabilities[name];
                                assert_eq!(matches!(standing, Standing::Failed(_)), failed.contains(&name));
                                let source = verdict.as_json()["capabilities"][name]["source"].clone();
                                assert_eq!(source, json!(skip.map(SkipSource::as_str)), "the answer names the source");
                            }
                            if let (Mode::Full, Some(name)) = (mode, failed.first()) {
                                let words = format!("FULL mode: required capability {name} failed");
                                assert_eq!(verdict.reason.as_deref(), Some(words.as_str()));
                            }
                            if let Some(reason) = verdict.reason.as_deref().filter(|_| mode == Mode::Degraded) {
                                assert!(
                                    failed.iter().all(|name| reason.contains(name)),
                                    "it names what failed: {reason}"
                                );
                            }
                            judged += 1;
                        }
                    }
                }
            }
        }
        assert_eq!(judged, 2 * 3 * 3 * 4 * 4);
    }

    /// What was not looked at does not count as well.
    #[test]
    fn what_nobody_checked_has_failed_and_says_so() {
        let verdict = judge(Mode::Full, &["reconcile"], &BTreeMap::new(), &Skips::new());
        let said = json!({ "status": "failed", "detail": "nobody checked it" });
        assert_eq!((verdict.passed, &verdict.as_json()["capabilities"]["reconcile"]), (false, &said));
        assert!(verdict.is_degraded());
        assert_eq!(verdict.as_json()["mode"], "FULL");
    }

    #[test]
    fn what_is_not_required_does_not_matter() {
        let checked = BTreeMap::from([("store".to_owned(), Ok(())), ("other".to_owned(), Err("x".to_owned()))]);
        let verdict = judge(Mode::Full, &["store"], &checked, &Skips::new());
        assert!(verdict.passed && !verdict.is_degraded() && verdict.capabilities.len() == 1);
    }
}
