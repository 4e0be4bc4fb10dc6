//! What is to be remembered, as it came in and checked; and what a project's rules say about it. Pure.

use postrider::message::{MAX_KEY_BYTES, hex, sha256};
use serde_json::{Map, Value};

/// Longest space, in bytes: with a digest behind it it is a key of the outbox.
pub const MAX_SPACE_BYTES: usize = MAX_KEY_BYTES - 65;
/// Longest kind, in bytes.
pub const MAX_KIND_BYTES: usize = 100;
/// Most kinds a project may name.
const MAX_KINDS: usize = 100;
/// Most bytes of `meta_json`, and of `evidence_refs`, as JSON.
pub const MAX_EXTRAS_BYTES: usize = 64 * 1024;

/// A memory as it is handed in.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct NewMemory {
    pub payload_md: String,
    /// `None`: the default space.
    pub target_space: Option<String>,
    pub meta_json: Map<String, Value>,
    pub kind: Option<String>,
    pub evidence_refs: Vec<Value>,
    pub actor_user_id: Option<String>,
    pub correlation_id: String,
    /// The service is not to be called for it now: it goes by the outbox.
    pub skip_openmemory: bool,
}

/// A memory that can be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct Note {
    pub payload_md: String,
    pub space: String,
    pub payload_sha: String,
    pub meta: Map<String, Value>,
    pub kind: Option<String>,
    pub evidence_refs: Vec<Value>,
    pub actor: Option<String>,
    pub correlation_id: String,
}

impl NewMemory {
    /// Checks it; what is wrong is said with what to do.
    pub fn check(self, default_space: &str, most_bytes: usize) -> Result<Note, String> {
        let space = self.target_space.unwrap_or_else(|| default_space.to_owned());
        check_space(&space)?;
        if self.payload_md.trim().is_empty() {
            return Err("payload_md is empty; write what is to be remembered".to_owned());
        }
        if self.payload_md.len() > most_bytes {
            return Err(format!("payload_md is longer than the {most_bytes} bytes a memory may have; shorten it"));
        }
        let short = |name: &str, text: &Option<String>, most: usize| match text {
            Some(text) if !is_short(text, most) => {
                Err(format!("{name} has 1 to {most} bytes and no control characters"))
            }
            _ => Ok(()),
        };
        short("kind", &self.kind, MAX_KIND_BYTES)?;
        short("actor_user_id", &self.actor_user_id, MAX_KEY_BYTES)?;
        let meta = Value::Object(self.meta_json);
        let refs = Value::Array(self.evidence_refs);
        for (name, extra) in [("meta_json", &meta), ("evidence_refs", &refs)] {
            if extra.to_string().len() > MAX_EXTRAS_BYTES {
                return Err(format!("{name} is longer than {MAX_EXTRAS_BYTES} bytes"));
            }
        }
        // PostgreSQL has no such character in its text.
        if self.payload_md.contains('\0') || holds_nul(&meta) || holds_nul(&refs) {
            return Err("a memory cannot hold the character U+0000; take it out".to_owned());
        }
        let (Value::Object(meta), Value::Array(evidence_refs)) = (meta, refs) else {
            return Err("meta_json is an object, evidence_refs a list".to_owned());
        };
        Ok(Note {
            payload_sha: hex(&sha256(self.payload_md.as_bytes())),
            payload_md: self.payload_md,
            space,
            meta,
            kind: self.kind,
            evidence_refs,
            actor: self.actor_user_id,
            correlation_id: self.correlation_id,
        })
    }
}

pub(crate) fn holds_nul(value: &Value) -> bool {
    match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(list) => list.iter().any(holds_nul),
        Value::Object(map) => map.iter().any(|(key, value)| key.contains('\0') || holds_nul(value)),
        _ => false,
    }
}

impl Note {
    /// Is its text the one it was stored with?
    pub fn is_intact(&self) -> bool {
        hex(&sha256(self.payload_md.as_bytes())) == self.payload_sha
    }
}

/// Like `team:payments` or `private:ann`.
pub fn check_space(space: &str) -> Result<(), String> {
    let wrong = space.is_empty()
        || space.len() > MAX_SPACE_BYTES
        || space == "*"
        || space.chars().any(|c| c.is_control() || c.is_whitespace());
    match wrong {
        true => Err(format!("a space is like team:payments: 1 to {MAX_SPACE_BYTES} bytes without blanks")),
        false => Ok(()),
    }
}

/// The project a space belongs to: `payments` of `team:payments`.
pub fn project_of(space: &str) -> &str {
    space.split_once(':').map_or(space, |(_, project)| project)
}

/// The key of the outbox that makes twins meet.
pub fn active_key(space: &str, payload_sha: &str) -> String {
    format!("{space}/{payload_sha}")
}

/// A project by its name: what stands behind the colon of its spaces.
pub(crate) fn check_project(project: &str) -> Result<(), String> {
    if project.is_empty() || ["team:", "private:"].iter().any(|space| project.starts_with(space)) {
        return Err("name the project alone: `payments`, not its space `team:payments`".to_owned());
    }
    check_space(&format!("team:{project}"))
}

fn is_short(text: &str, most: usize) -> bool {
    !text.is_empty() && text.len() <= most && !text.chars().any(char::is_control)
}

/// What a project allows.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Governance {
    pub project_key: String,
    pub team_write_enabled: bool,
    /// `None`: any.
    pub allowed_kinds: Option<Vec<String>>,
    /// Of `payload_md`, in characters.
    pub max_length: Option<u64>,
}

impl Governance {
    /// Everything.
    pub fn open(project_key: &str) -> Self {
        Governance {
            project_key: project_key.to_owned(),
            team_write_enabled: true,
            allowed_kinds: None,
            max_length: None,
        }
    }

    /// Can it be stored, and can a memory keep to it?
    pub fn check(&self) -> Result<(), String> {
        check_project(&self.project_key)?;
        let kinds = self.allowed_kinds.as_deref().unwrap_or_default();
        if self.allowed_kinds.is_some() && kinds.is_empty() {
            return Err("no kind is named: nothing could be stored any more; name some, or `any`".to_owned());
        }
        if kinds.iter().any(|kind| kind.eq_ignore_ascii_case("any")) {
            return Err("`any` stands alone, and lifts the rule".to_owned());
        }
        if kinds.len() > MAX_KINDS {
            return Err(format!("{} kinds are too many: a project names at most {MAX_KINDS}", kinds.len()));
        }
        if kinds.iter().any(|kind| !is_short(kind, MAX_KIND_BYTES)) {
            return Err(format!("a kind has 1 to {MAX_KIND_BYTES} bytes and no control characters"));
        }
        match self.max_length {
            Some(most) if i64::try_from(most).is_err() => {
                Err("no memory is ever that long; lower the length".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// The rule a memory breaks, and what to tell the caller.
    pub fn refuses(&self, note: &Note) -> Option<(&'static str, String)> {
        let project = &self.project_key;
        if !self.team_write_enabled && note.space.starts_with("team:") {
            let what = format!("project `{project}` takes no memories into its team space (team_write_enabled is off)");
            return Some(("team_write_disabled", what));
        }
        if let Some(allowed) = &self.allowed_kinds
            && !note.kind.as_ref().is_some_and(|kind| allowed.contains(kind))
        {
            let given = note.kind.as_deref().unwrap_or("none");
            let what = format!("project `{project}` takes memories of kind {}, not {given}", allowed.join(", "));
            return Some(("kind_not_allowed", what));
        }
        let length = note.payload_md.chars().count() as u64;
        let most = self.max_length.filter(|most| length > *most)?;
        let what = format!("project `{project}` takes memories of at most {most} characters, this one has {length}");
        Some(("too_long", what))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn memory(text: &str) -> NewMemory {
        NewMemory { payload_md: text.to_owned(), correlation_id: "c".to_owned(), ..NewMemory::default() }
    }

    #[test]
    fn what_cannot_be_stored_is_said() {
        let wrong = |memory: NewMemory| memory.check("team:default", 100).unwrap_err();
        assert!(wrong(memory("  \n")).contains("empty"));
        assert!(wrong(memory(&"x".repeat(101))).contains("100 bytes"));
        assert!(wrong(memory("a\0b")).contains("U+0000"));
        let meta_json = Map::from_iter([("a".to_owned(), serde_json::json!(["\0"]))]);
        assert!(wrong(NewMemory { meta_json, ..memory("x") }).contains("U+0000"));
        assert!(memory(r"say \u0000").check("team:default", 100).is_ok());
        for space in ["", "a b", "*", &"s".repeat(MAX_SPACE_BYTES + 1)] {
            let memory = NewMemory { target_space: Some(space.to_owned()), ..memory("x") };
            assert!(wrong(memory).contains("team:payments"), "{space}");
        }
        let long = "k".repeat(MAX_KIND_BYTES + 1);
        assert!(wrong(NewMemory { kind: Some(long), ..memory("x") }).contains("kind"));
        let big = vec![Value::String("e".repeat(MAX_EXTRAS_BYTES))];
        assert!(wrong(NewMemory { evidence_refs: big, ..memory("x") }).contains("evidence_refs"));
        let note = memory("天气").check("team:default", 100).unwrap();
        assert_eq!((note.space.as_str(), note.payload_sha.len()), ("team:default", 64));
        let longest = active_key(&"s".repeat(MAX_SPACE_BYTES), &note.payload_sha);
        assert!(longest.len() <= MAX_KEY_BYTES);
    }

    #[test]
    fn projects_say_what_they_take() {
        let note = |kind: Option<&str>, space: &str, text: &str| {
            let memory =
                NewMemory { kind: kind.map(str::to_owned), target_space: Some(space.to_owned()), ..memory(text) };
            memory.check("team:default", 100).unwrap()
        };
        let open = Governance::open("pay");
        assert_eq!(open.check(), Ok(()));
        let kinds = |kinds: Vec<String>| Governance { allowed_kinds: Some(kinds), ..open.clone() }.check();
        assert_eq!(kinds((0..100).map(|n| format!("k{n}")).collect()), Ok(()));
        assert!(kinds((0..101).map(|n| format!("k{n}")).collect()).unwrap_err().contains("101 kinds"));
        assert!(kinds(vec!["k".repeat(MAX_KIND_BYTES + 1)]).unwrap_err().contains("bytes"));
        assert!(kinds(vec![String::new()]).is_err());
        assert!(Governance { max_length: Some(u64::MAX), ..open.clone() }.check().is_err());
        for project in ["a b", "", "team:pay", "private:ann"] {
            assert!(Governance::open(project).check().is_err(), "{project}");
        }
        assert!(kinds(vec![]).unwrap_err().contains("no kind"));
        assert!(kinds(vec!["Any".into(), "fact".into()]).unwrap_err().contains("stands alone"));
        assert_eq!(open.refuses(&note(None, "team:pay", "x")), None);
        let closed = Governance { team_write_enabled: false, ..open.clone() };
        assert_eq!(closed.refuses(&note(None, "team:pay", "x")).unwrap().0, "team_write_disabled");
        assert_eq!(closed.refuses(&note(None, "private:pay", "x")), None);
        let picky = Governance { allowed_kinds: Some(vec!["fact".to_owned()]), ..open.clone() };
        assert_eq!(picky.refuses(&note(Some("fact"), "team:pay", "x")), None);
        assert_eq!(picky.refuses(&note(Some("mood"), "team:pay", "x")).unwrap().0, "kind_not_allowed");
        assert_eq!(picky.refuses(&note(None, "team:pay", "x")).unwrap().0, "kind_not_allowed");
        let short = Governance { max_length: Some(2), ..open };
        assert_eq!(short.refuses(&note(None, "team:pay", "天气")), None, "characters, not bytes");
        assert_eq!(short.refuses(&note(None, "team:pay", "天气好")).unwrap().0, "too_long");
        assert_eq!(project_of("team:pay"), "pay");
        assert_eq!(project_of("lonely"), "lonely");
    }
}
