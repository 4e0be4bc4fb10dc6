//! The tools of the gateway, as models and programs call them: by name, with a JSON object, answered with one. MCP, the
//! plain `{"tool","arguments"}` body and the routes of `/memory` are all this.

use axum::http::StatusCode;
use postrider::Outbox;
use postrider::error::Kind;
use postrider::store::{Requeued, Retried, Shown, Status};
use postrider_memories::{Action, LANE, MOST_SPACES, Memories, NewMemory, Question, Scope as Reach, Stored};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::gate::GateRules;
use crate::http::{Caller, Refusal, bounded};
use crate::metrics;
use crate::tokens::Scope;

/// Messages of one kind counted in a lane; where there are more, the answer says so.
const MOST_COUNTED: u64 = 50_000;
/// Without these no memory is taken.
const NEEDED: [&str; 3] = ["store", "audit", "outbox"];

/// What a caller is answered.
pub struct Answered {
    pub status: StatusCode,
    pub body: Value,
}

impl Answered {
    fn ok(body: Value) -> Self {
        Answered { status: StatusCode::OK, body }
    }

    pub fn refused(refusal: Refusal, correlation_id: &str) -> Self {
        let error = json!({ "code": refusal.code, "message": refusal.message, "details": refusal.details });
        let body = json!({ "ok": false, "error": error, "correlation_id": correlation_id });
        Answered { status: refusal.status, body }
    }

    /// A model should see that it did not work; what is deferred did.
    pub fn is_error(&self) -> bool {
        !self.status.is_success()
    }
}

/// One tool, as it is described to models.
pub struct Tool {
    pub name: &'static str,
    pub title: &'static str,
    pub about: &'static str,
    pub input: fn() -> Value,
    pub scope: Scope,
    /// The lane whose tool it is; one without looks at what its caller sees.
    pub lane: Option<&'static str>,
    pub read_only: bool,
    /// Calling it twice is calling it once.
    pub idempotent: bool,
}

pub const TOOLS: [Tool; 6] = [
    Tool {
        name: "memory_store",
        title: "Store a memory",
        about: "Remember something for later sessions: a decision and its reason, a fact about the project, a lesson learnt. Write it so that it is understood without this conversation, one matter per call. `action` tells what became of it: `allow` is stored; `deferred` is safely queued and will be written by itself, so do NOT store it again; `reject` and `error` are not stored, `message` says why. Storing the same text again is harmless (`deduplicated`). With `merged_with` the memory service took the text for a similar one; it is kept here all the same, and found.",
        input: || {
            json!({
                "type": "object",
                "properties": {
                    "payload_md": { "type": "string", "minLength": 1, "description": "What to remember, in Markdown, complete in itself" },
                    "target_space": { "type": "string", "description": "Who shares it, like team:payments or private:ann; left out: the default space" },
                    "kind": { "type": "string", "description": "What it is, in one word: fact, decision, lesson, preference, …" },
                    "evidence_refs": { "type": "array", "items": { "type": "string" }, "description": "Where it comes from: URIs like mr://project/123 or git://repo/SHA" },
                    "meta_json": { "type": "object", "description": "Anything else to keep with it" },
                    "actor_user_id": { "type": "string", "description": "On whose behalf it is stored" },
                    "skip": { "type": "array", "items": { "type": "string" }, "description": "Capabilities to do without: with openmemory the memory is queued at once" }
                },
                "required": ["payload_md"],
                "additionalProperties": false
            })
        },
        scope: Scope::Enqueue,
        lane: Some(LANE),
        read_only: false,
        idempotent: true,
    },
    Tool {
        name: "memory_query",
        title: "Look into memory",
        about: "Find what was remembered before. Ask before you decide something that may have been decided already. With `degraded: true` the memory service is away and the results are keyword matches from local copies: treat them as hints, and verify.",
        input: || {
            json!({
                "type": "object",
                "properties": {
                    "query": { "type": "string", "minLength": 1, "description": "What you want to know, in words that may stand in the memory; any language" },
                    "spaces": { "type": "array", "items": { "type": "string" }, "description": "Only these spaces, like [\"team:payments\"]; left out: all" },
                    "top_k": { "type": "integer", "minimum": 1, "maximum": 100, "description": "At most so many results; 10 if left out" }
                },
                "required": ["query"],
                "additionalProperties": false
            })
        },
        scope: Scope::Read,
        lane: Some(LANE),
        read_only: true,
        idempotent: true,
    },
    Tool {
        name: "outbox_status",
        title: "See what is queued",
        about: "Count queued, delivered and dead messages per lane, each up to 50,000 (`more`: there are more). Memories that were deferred are in the lane `memory`.",
        input: || {
            json!({
                "type": "object",
                "properties": { "lane": { "type": "string", "description": "Only this lane" } },
                "additionalProperties": false
            })
        },
        scope: Scope::Read,
        lane: None,
        read_only: true,
        idempotent: true,
    },
    Tool {
        name: "outbox_requeue",
        title: "Try messages again",
        about: "Give messages another try, by their ids. What was given up (`dead`) comes back: only after what made it fail has been corrected. What still waits, like a deferred memory, is tried now instead of later (`retried: true`).",
        input: || {
            json!({
                "type": "object",
                "properties": {
                    "ids": { "type": "array", "items": { "type": "integer" }, "minItems": 1, "maxItems": 1000, "description": "Ids of messages, like the outbox_id of a deferred memory" }
                },
                "required": ["ids"],
                "additionalProperties": false
            })
        },
        scope: Scope::Operate,
        lane: None,
        read_only: false,
        idempotent: true,
    },
    Tool {
        name: "reliability_report",
        title: "How reliable memory was",
        about: "Numbers on queued, delivered and dead memories, on what the audit recorded, and on whether the memory service can be used now.",
        input: || json!({ "type": "object", "properties": {}, "additionalProperties": false }),
        scope: Scope::Read,
        lane: Some(LANE),
        read_only: true,
        idempotent: true,
    },
    Tool {
        name: "reconcile",
        title: "Complete the audit",
        about: "Find writes without their audit and audits without their end, and complete them. Never changes a message. With `report` it only counts.",
        input: || {
            json!({
                "type": "object",
                "properties": { "report": { "type": "boolean", "description": "Only count, repair nothing" } },
                "additionalProperties": false
            })
        },
        scope: Scope::Operate,
        lane: Some(LANE),
        read_only: false,
        idempotent: true,
    },
];

impl Tool {
    /// May this caller call it? It asks for more than that when it is called.
    pub fn permit(&self, caller: &Caller) -> Result<(), Refusal> {
        caller.may(self.scope)?;
        self.lane.map_or(Ok(()), |lane| caller.may_use(lane))
    }
}

/// The tool of that name.
pub fn tool(name: &str) -> Option<&'static Tool> {
    TOOLS.iter().find(|tool| tool.name == name)
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StoreArguments {
    payload_md: String,
    target_space: Option<String>,
    meta_json: Option<Map<String, Value>>,
    kind: Option<String>,
    evidence_refs: Option<Vec<Value>>,
    actor_user_id: Option<String>,
    #[serde(default)]
    skip: Option<Vec<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueryArguments {
    query: String,
    spaces: Option<Vec<String>>,
    top_k: Option<usize>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StatusArguments {
    lane: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequeueArguments {
    ids: Vec<i64>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ReconcileArguments {
    #[serde(default)]
    report: bool,
}

/// What the tools work with.
#[derive(Clone)]
pub struct Tools {
    pub outbox: Outbox,
    pub memories: Option<Memories>,
    /// Counts, where somebody may ask for them.
    pub meters: Option<metrics::Shared>,
}

impl Tools {
    /// Calls a tool for somebody. Whatever comes of it is answered, with the id of the request.
    pub async fn call(
        &self,
        caller: &Caller,
        name: &str,
        arguments: Map<String, Value>,
        correlation_id: &str,
    ) -> Answered {
        let answered = self.try_call(caller, name, arguments, correlation_id).await;
        let mut answered = answered.unwrap_or_else(|refusal| Answered::refused(refusal, correlation_id));
        if let Some(body) = answered.body.as_object_mut() {
            body.entry("correlation_id").or_insert_with(|| json!(correlation_id));
        }
        answered
    }

    async fn try_call(
        &self,
        caller: &Caller,
        name: &str,
        arguments: Map<String, Value>,
        correlation_id: &str,
    ) -> Result<Answered, Refusal> {
        let tool = tool(name).ok_or_else(|| {
            let known: Vec<&str> = TOOLS.iter().map(|tool| tool.name).collect();
            let what = format!("there is no tool `{name}`; known: {}", known.join(", "));
            Refusal::new(StatusCode::NOT_FOUND, "UNKNOWN_TOOL", what)
        })?;
        tool.permit(caller)?;
        let arguments = Value::Object(arguments);
        match tool.name {
            "memory_store" => self.store(caller, read(arguments)?, correlation_id).await,
            "memory_query" => self.query(caller, read(arguments)?, correlation_id).await,
            "outbox_status" => self.status(caller, read(arguments)?).await,
            "outbox_requeue" => self.requeue(caller, read(arguments)?).await,
            "reliability_report" => {
                read::<NoArguments>(arguments)?;
                Ok(Answered::ok(json!(self.memories()?.report(caller.spaces(), caller.is_unlimited()).await?)))
            }
            "reconcile" => {
                if !caller.spaces().are_all() {
                    return Err(Refusal::forbidden(
                        "the audit is completed for all spaces; this token is for some only",
                    ));
                }
                let wanted: ReconcileArguments = read(arguments)?;
                Ok(Answered::ok(json!(self.memories()?.reconcile(Reach::All, !wanted.report).await?)))
            }
            // A tool that is described and does nothing is a mistake of ours.
            other => {
                let what = format!("the tool `{other}` is not there yet");
                Err(Refusal::new(StatusCode::NOT_IMPLEMENTED, "UNKNOWN_TOOL", what))
            }
        }
    }

    fn memories(&self) -> Result<&Memories, Refusal> {
        self.memories.as_ref().ok_or_else(|| {
            let what =
                "this server has no memory gateway; say where OpenMemory is, with [memory] url in postrider.toml";
            Refusal::new(StatusCode::NOT_FOUND, "MEMORY_NOT_CONFIGURED", what)
        })
    }

    async fn store(
        &self,
        caller: &Caller,
        arguments: StoreArguments,
        correlation_id: &str,
    ) -> Result<Answered, Refusal> {
        let memories = self.memories()?;
        caller.may_enter(arguments.target_space.as_deref().unwrap_or(memories.default_space()))?;
        let skip = arguments.skip.unwrap_or_default();
        let wrong = |why: String| Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "INVALID_ARGUMENTS", why);
        GateRules::default().with(&skip).map_err(wrong)?;
        if let Some(needed) = skip.iter().find(|name| NEEDED.contains(&name.as_str())) {
            return Err(wrong(format!("a store cannot do without `{needed}`: nothing is written unaudited or lost")));
        }
        let memory = NewMemory {
            payload_md: arguments.payload_md,
            target_space: arguments.target_space,
            meta_json: arguments.meta_json.unwrap_or_default(),
            kind: arguments.kind,
            evidence_refs: arguments.evidence_refs.unwrap_or_default(),
            actor_user_id: arguments.actor_user_id,
            correlation_id: correlation_id.to_owned(),
            skip_openmemory: skip.iter().any(|name| name == "openmemory"),
        };
        let answer = memories.store(memory).await;
        if let Some(meters) = &self.meters {
            meters.memory_store(answer.action.as_str());
        }
        Ok(stored(answer))
    }

    async fn query(
        &self,
        caller: &Caller,
        arguments: QueryArguments,
        correlation_id: &str,
    ) -> Result<Answered, Refusal> {
        let named = arguments.spaces.iter().flatten().take(MOST_SPACES).filter(|space| *space != "*");
        named.clone().try_for_each(|space| caller.may_enter(space))?;
        let question = Question {
            query: arguments.query,
            spaces: arguments.spaces,
            within: caller.spaces(),
            top_k: arguments.top_k,
            correlation_id: correlation_id.to_owned(),
        };
        Ok(Answered::ok(json!(self.memories()?.query(question).await?)))
    }

    async fn status(&self, caller: &Caller, arguments: StatusArguments) -> Result<Answered, Refusal> {
        let mut ages = self.outbox.ages().await?;
        if let Some(lane) = &arguments.lane {
            caller.may_use(lane)?;
            if !ages.contains_key(lane) {
                let what = format!("there is no lane `{lane}`");
                return Err(Refusal::new(StatusCode::NOT_FOUND, "UNKNOWN_LANE", what));
            }
        }
        ages.retain(|name, _| arguments.lane.as_ref().is_none_or(|lane| lane == name) && caller.sees(name));
        let mut lanes = Map::new();
        for (lane, age) in ages {
            let (mut stats, more) = self.outbox.stats_up_to(&lane, MOST_COUNTED).await?;
            stats.oldest_due_seconds = age.oldest_due_seconds;
            let mut stats = json!(stats);
            if more {
                stats["more"] = true.into();
            }
            lanes.insert(lane, stats);
        }
        Ok(Answered::ok(json!({ "ok": true, "lanes": lanes })))
    }

    async fn requeue(&self, caller: &Caller, arguments: RequeueArguments) -> Result<Answered, Refusal> {
        if !(1..=1000).contains(&arguments.ids.len()) {
            return Err(Refusal::invalid("ids names 1 to 1000 messages"));
        }
        let mut results = Vec::with_capacity(arguments.ids.len());
        for id in arguments.ids {
            // What belongs to others is answered like what is not there.
            let seen = |shown: &Shown| caller.sees_message(&shown.lane, shown.target.as_deref());
            let Some((shown, _)) = self.outbox.show(id).await?.filter(|(shown, _)| seen(shown)) else {
                results.push(json!({ "id": id, "outcome": "not_found" }));
                continue;
            };
            let memories = self.memories.as_ref().filter(|_| shown.lane == LANE);
            if shown.status != Status::Dead {
                let retried = match memories {
                    Some(memories) => memories.retry(id).await,
                    None => self.outbox.retry(id).await,
                };
                let retried = match retried {
                    Err(error) if error.kind == Kind::LaneOwned => false,
                    retried => retried? == Retried::Retried,
                };
                results.push(json!({ "id": id, "outcome": Requeued::NotDead, "retried": retried }));
                continue;
            }
            let requeued = match memories {
                Some(memories) => memories.requeue(&[id]).await?,
                None => self.outbox.requeue(vec![id]).await?,
            };
            results.push(json!({ "id": id, "outcome": requeued.first() }));
        }
        Ok(Answered::ok(json!({ "ok": true, "results": results })))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NoArguments {}

fn read<T: serde::de::DeserializeOwned>(arguments: Value) -> Result<T, Refusal> {
    serde_json::from_value(arguments).map_err(|e| {
        let what = format!("the arguments are not right: {}", bounded(&e.to_string()));
        Refusal::new(StatusCode::UNPROCESSABLE_ENTITY, "INVALID_ARGUMENTS", what)
    })
}

/// The answer to a store, and the status that goes with it.
pub fn stored(stored: Stored) -> Answered {
    let status = match (stored.action, stored.error) {
        (Action::Allow, _) => StatusCode::OK,
        (Action::Deferred, _) => StatusCode::ACCEPTED,
        (Action::Reject, _) => StatusCode::FORBIDDEN,
        (Action::Error, Some(postrider_memories::code::INVALID_MEMORY)) => StatusCode::UNPROCESSABLE_ENTITY,
        (Action::Error, _) => StatusCode::SERVICE_UNAVAILABLE,
    };
    let mut body = json!(stored);
    if let Some(code) = stored.error {
        body["error"] = json!({ "code": code, "message": stored.message, "details": {} });
    }
    Answered { status, body }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is described to models is what is read.
    #[test]
    fn schemas_name_the_arguments_that_are_taken() {
        for tool in &TOOLS {
            let schema = (tool.input)();
            assert_eq!(schema["additionalProperties"], false, "{}", tool.name);
            let known: Vec<&str> = schema["properties"].as_object().unwrap().keys().map(String::as_str).collect();
            let wrong = json!({ "zzz": 1 });
            let refused = match tool.name {
                "memory_store" => read::<StoreArguments>(wrong).err(),
                "memory_query" => read::<QueryArguments>(wrong).err(),
                "outbox_status" => read::<StatusArguments>(wrong).err(),
                "outbox_requeue" => read::<RequeueArguments>(wrong).err(),
                "reconcile" => read::<ReconcileArguments>(wrong).err(),
                _ => read::<NoArguments>(wrong).err(),
            };
            let told = refused.expect("an unknown argument").message;
            for name in &known {
                assert!(told.contains(&format!("`{name}`")), "{} {name}: {told}", tool.name);
            }
            assert_eq!(told.matches('`').count() / 2, known.len() + 1, "{}: {told}", tool.name);
        }
    }
}
