//! `postrider memory`: store, query, flush, complete the audit, and say what projects allow.

use std::io::{BufRead, Read};
use std::path::Path;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressDrawTarget};
use postrider::store::Requeued;
use postrider::worker::core::Tally;
use postrider_memories::{
    Action, AuditFilter, AuditRow, Deep, Imported, LANE, Memories, NewCandidate, NewMemory, Question, Scope, Stored,
};
use serde_json::{Value, json};

use super::worker::build;
use crate::cli::{self, Govern, StoreMemory};
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::mcp::new_correlation_id;
use crate::output::{Output, count};
use crate::parts::{self, Parts};
use crate::table::Table;
use crate::tools;

/// Candidates of one transaction.
const BATCH: usize = 500;
/// Given-up memories of one page.
const PAGE: u32 = 500;

pub async fn run(config: &Config, args: cli::Memory, output: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let memories = parts::memories(config, &outbox)?;
    let ending = match args {
        cli::Memory::Store(args) => store(&memories, args, output).await,
        cli::Memory::Query { query, spaces, top_k } => {
            let spaces = (!spaces.is_empty()).then_some(spaces);
            let correlation_id = new_correlation_id();
            let question =
                Question { query, spaces, top_k: Some(top_k as usize), correlation_id, ..Question::default() };
            ask(&memories, question, output).await
        }
        cli::Memory::Flush => flush(config, &outbox, output).await,
        cli::Memory::Requeue { ids, dead: false, dry_run: false } => requeue(&memories, &ids, output).await,
        cli::Memory::Requeue { ids, dead, dry_run } => {
            let ids = (!dead).then_some(ids);
            requeue_dead(&memories, ids, dry_run, output).await
        }
        cli::Memory::Reconcile { report, deep, limit } => {
            let limit = deep.then(|| limit.unwrap_or(u64::MAX));
            reconcile(&memories, report, limit, output).await
        }
        cli::Memory::Resend { missing: _, dry_run } => resend(config, &outbox, &memories, dry_run, output).await,
        cli::Memory::Purge { older_than, dry_run } => purge(&memories, older_than, dry_run, output).await,
        cli::Memory::Audit { correlation_id, outbox_id, limit } => {
            let filter = AuditFilter { correlation_id, outbox_id, status: None, before: None, limit };
            let rows = audit(&memories, filter).await?;
            output.show(&json!({ "items": rows }), || audit_table(&rows))?;
            Ok(Ending::Done)
        }
        cli::Memory::Candidates(cli::Candidates::Import { file }) => import(&memories, &file, output).await,
        cli::Memory::Govern(args) => govern(&memories, args, output).await,
    };
    outbox.flush().await;
    ending
}

async fn reconcile(memories: &Memories, report: bool, deep: Option<u64>, output: Output) -> Result<Ending> {
    let found = memories.reconcile(Scope::All, !report).await?;
    let deep = match deep {
        None => None,
        Some(limit) => Some(look_deep(memories, limit, output).await?),
    };
    let mut shown = json!(found);
    if let Some(deep) = &deep {
        shown["missing"] = json!(deep.missing);
        shown["deep"] = json!(deep);
    }
    output.show(&shown, || {
        let mut text = format!(
            "{} looked at: {} without audit, {} pending without an end, {} repaired",
            found.scanned, found.missing_audit, found.stale_pending, found.repaired
        );
        if let Some(deep) = &deep {
            text.push_str(&format!("\n{}", told_of(deep)));
        }
        text
    })?;
    let incomplete = report && found.missing_audit + found.stale_pending > 0;
    if let Some(why) = deep.as_ref().and_then(|deep| deep.stopped.as_ref()) {
        return Err(Failure::unreachable(format!(
            "OpenMemory could not be asked for all: {why}; the next look goes on"
        )));
    }
    Ok(Ending::failed_if(incomplete || deep.is_some_and(|deep| deep.missing > 0)))
}

fn told_of(deep: &Deep) -> String {
    let hidden = if deep.hidden > 0 { format!(" ({} another key's)", deep.hidden) } else { String::new() };
    let advice = if deep.missing > 0 { "; write them again: postrider memory resend --missing" } else { "" };
    let more = if deep.finished { "" } else { "; not all were asked for yet, the next look goes on" };
    format!(
        "OpenMemory was asked for {}: {} there, {} missing{hidden}{advice}{more}",
        count(deep.asked, "memory"),
        deep.present,
        deep.missing
    )
}

async fn look_deep(memories: &Memories, limit: u64, output: Output) -> Result<Deep> {
    let target = if output.json { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
    let bar = ProgressBar::with_draw_target(None, target);
    bar.set_message("asking OpenMemory");
    let progress = |deep: &Deep| {
        bar.set_position(deep.asked);
        bar.set_message(format!("asked OpenMemory for {}, {} missing", deep.asked, deep.missing));
    };
    let deep = memories.deep(limit, &progress).await;
    bar.finish_and_clear();
    Ok(deep?)
}

/// Asks for what should be there, queues what is not, and brings it there.
async fn resend(
    config: &Config,
    outbox: &postrider::Outbox,
    memories: &Memories,
    dry_run: bool,
    output: Output,
) -> Result<Ending> {
    let deep = look_deep(memories, u64::MAX, output).await?;
    if let Some(why) = deep.stopped {
        return Err(Failure::unreachable(format!(
            "OpenMemory could not be asked for all: {why}; nothing was written, and the next look goes on"
        )));
    }
    let resent = memories.resend(dry_run).await?;
    let mut shown = json!(resent);
    shown["dry_run"] = json!(dry_run);
    if dry_run || resent.queued == 0 || !config.enabled {
        output.show(&shown, || match dry_run {
            true => format!("would write {} again", count(resent.missing, "memory")),
            false => format!("{} missing, {} queued, {} damaged", resent.missing, resent.queued, resent.damaged),
        })?;
        return Ok(Ending::failed_if(resent.damaged > 0));
    }
    let (tally, left) = work_off(config, outbox, output).await?;
    shown["sent"] = json!(tally.sent);
    shown["left"] = json!(left);
    output.show(&shown, || {
        let (missing, queued) = (resent.missing, resent.queued);
        format!("{missing} missing, {queued} queued, {} written; {left} left for a worker to bring", tally.sent)
    })?;
    // What is queued is safe, and a server's worker may have it in hand.
    Ok(Ending::failed_if(tally.dead > 0 || resent.damaged > 0))
}

async fn purge(memories: &Memories, older_than: Duration, dry_run: bool, output: Output) -> Result<Ending> {
    let mut messages = 0;
    loop {
        let gone = memories.purge(older_than, dry_run).await?;
        messages += gone;
        if dry_run || gone == 0 {
            break;
        }
    }
    output.show(&json!({ "messages": messages, "dry_run": dry_run }), || {
        let verb = if dry_run { "would delete" } else { "deleted" };
        format!("{verb} {}", count(messages, "message"))
    })?;
    Ok(Ending::Done)
}

/// Brings back all that were given up, or those named, page by page; what was done is told at any end.
pub async fn requeue_dead(memories: &Memories, ids: Option<Vec<i64>>, dry_run: bool, output: Output) -> Result<Ending> {
    let (mut requeued, mut left, mut conflicts) = (0u64, 0u64, Vec::new());
    let mut failed = None;
    let mut after = None;
    let mut named = ids.clone();
    loop {
        let page: Vec<i64> = match &mut named {
            Some(ids) => std::mem::take(ids),
            None => match memories.dead(after, PAGE).await {
                Ok(page) => {
                    after = page.last().copied().or(after);
                    page.into_iter().map(|(_, id)| id).collect()
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            },
        };
        if page.is_empty() {
            break;
        }
        if dry_run {
            requeued += page.len() as u64;
            continue;
        }
        match memories.requeue(&page).await {
            Ok(answers) => {
                for (id, answer) in page.iter().zip(answers) {
                    match answer {
                        Requeued::Requeued => requeued += 1,
                        Requeued::NotDead => left += 1,
                        Requeued::Conflict | Requeued::Held => conflicts.push(*id),
                    }
                }
            }
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    let shown = json!({ "requeued": requeued, "not_dead": left, "conflicts": conflicts, "dry_run": dry_run });
    output.show(&shown, || {
        let verb = if dry_run { "would bring back" } else { "brought back" };
        let mut text = format!("{verb} {}", count(requeued, "memory"));
        if !conflicts.is_empty() {
            let taken = conflicts.len();
            text.push_str(&format!("; {taken} stay: another message has taken their place"));
        }
        text
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    Ok(Ending::failed_if(!conflicts.is_empty()))
}

/// As many as are wanted, however deep they lie.
async fn audit(memories: &Memories, mut filter: AuditFilter) -> Result<Vec<AuditRow>> {
    let wanted = filter.limit as usize;
    let mut rows = Vec::new();
    loop {
        filter.limit = (wanted - rows.len()) as u32;
        let page = memories.audit(filter.clone()).await?;
        rows.extend(page.items);
        filter.before = page.next;
        if page.next.is_none() || rows.len() >= wanted {
            return Ok(rows);
        }
    }
}

async fn store(memories: &Memories, args: StoreMemory, output: Output) -> Result<Ending> {
    let mut payload_md = args.text;
    if payload_md == "-" {
        payload_md.clear();
        let read = std::io::stdin().read_to_string(&mut payload_md);
        read.map_err(|e| Failure::usage(format!("cannot read standard input: {e}")))?;
    }
    let stored = memories
        .store(NewMemory {
            payload_md,
            target_space: args.space,
            kind: args.kind,
            evidence_refs: args.evidence.into_iter().map(Value::String).collect(),
            actor_user_id: args.actor,
            meta_json: meta(args.meta.as_deref())?,
            correlation_id: new_correlation_id(),
            skip_openmemory: false,
        })
        .await;
    if stored.error == Some(postrider_memories::code::INVALID_MEMORY) {
        return Err(Failure::usage(stored.message));
    }
    let (action, unreachable) = (stored.action, stored.action == Action::Error);
    let told = told(&stored);
    output.show(&tools::stored(stored).body, || told.clone())?;
    if unreachable {
        return Err(Failure::unreachable(told));
    }
    Ok(Ending::failed_if(action == Action::Reject))
}

fn meta(text: Option<&str>) -> Result<serde_json::Map<String, Value>> {
    let wrong = |e| Failure::usage(format!("--meta is a JSON object, like '{{\"ticket\":7}}': {e}"));
    text.map_or(Ok(serde_json::Map::new()), |text| serde_json::from_str(text).map_err(wrong))
}

fn told(stored: &Stored) -> String {
    match (&stored.memory_id, stored.outbox_id) {
        (Some(id), _) => format!("{} as {id}", stored.message),
        (None, Some(id)) => format!("{} (as message {id})", stored.message),
        (None, None) => stored.message.clone(),
    }
}

async fn ask(memories: &Memories, question: Question, output: Output) -> Result<Ending> {
    let answer = memories.query(question).await?;
    output.show(&answer, || {
        let mut text = String::new();
        if answer.degraded {
            text.push_str(&format!("{}\n\n", answer.message));
        }
        for found in &answer.results {
            let space = found.space.as_deref().unwrap_or("-");
            text.push_str(&format!("[{} {space}]\n{}\n\n", found.source, found.content.trim_end()));
        }
        text.push_str(&count(answer.total as u64, "result"));
        text
    })?;
    Ok(Ending::Done)
}

async fn flush(config: &Config, outbox: &postrider::Outbox, output: Output) -> Result<Ending> {
    let (tally, left) = work_off(config, outbox, output).await?;
    let shown = json!({
        "sent": tally.sent, "dedup_hits": tally.dedup_hits, "retried": tally.retried, "dead": tally.dead,
        "deferred": tally.deferred, "conflicts": tally.conflicts, "left": left,
    });
    output.show(&shown, || {
        format!("{} written, {} retried, {} given up; {left} left", tally.sent, tally.retried, tally.dead)
    })?;
    Ok(Ending::failed_if(left > 0 || tally.dead > 0))
}

/// Works through all that is queued, once; what came of it, and how many are left.
async fn work_off(config: &Config, outbox: &postrider::Outbox, output: Output) -> Result<(Tally, u64)> {
    if !config.enabled {
        return Err(Failure::usage(
            "the outbox is switched off (OUTBOX_ENABLED or [outbox] enabled): nothing is claimed",
        ));
    }
    let parts = Parts::open(config, outbox).await?;
    if let Some(memories) = &parts.memories {
        memories.rescue(Duration::ZERO).await?;
        memories.wake_all().await?;
    }
    let report = build(config, outbox, &parts, &[(LANE, config.lane(LANE)?)], output, None).await?;
    let report = report.once().run(std::future::pending()).await?;
    let tally = report.into_iter().next().map(|(_, tally)| tally).unwrap_or_default();
    let left = outbox.depths().await?.get(LANE).map_or(0, |lane| lane.pending + lane.leased);
    Ok((tally, left))
}

async fn requeue(memories: &Memories, ids: &[i64], output: Output) -> Result<Ending> {
    let requeued = memories.requeue(ids).await?;
    let results: Vec<Value> =
        ids.iter().zip(&requeued).map(|(id, outcome)| json!({ "id": id, "outcome": outcome })).collect();
    output.show(&json!({ "results": results }), || {
        let mut table = Table::new(["id", "outcome"]);
        for (id, outcome) in ids.iter().zip(&requeued) {
            let told = match outcome {
                Requeued::Requeued => "requeued",
                Requeued::NotDead => "not dead",
                Requeued::Conflict => "another message has taken its place",
                Requeued::Held => "somebody else holds it at the moment; try again",
            };
            table.row([id.to_string(), told.to_owned()]);
        }
        table.render()
    })?;
    Ok(Ending::failed_if(requeued.iter().any(|outcome| *outcome != Requeued::Requeued)))
}

fn audit_table(rows: &[AuditRow]) -> String {
    let mut table = Table::new(["id", "at", "space", "action", "status", "reason", "outbox", "correlation"]);
    for row in rows {
        table.row([
            row.audit_id.to_string(),
            row.created_at.to_string(),
            row.target_space.clone().unwrap_or_default(),
            row.action.clone(),
            row.status.clone(),
            row.reason.clone(),
            row.outbox_id.map(|id| id.to_string()).unwrap_or_default(),
            row.correlation_id.clone().unwrap_or_default(),
        ]);
    }
    table.render()
}

/// A bad line stops the import; all batches before it are committed, and doing it again does no harm.
async fn import(memories: &Memories, file: &Path, output: Output) -> Result<Ending> {
    let unreadable = |e: std::io::Error| Failure::usage(format!("cannot read {}: {e}", file.display()));
    let reader: Box<dyn BufRead> = match file.as_os_str() == "-" {
        true => Box::new(std::io::stdin().lock()),
        false => Box::new(std::io::BufReader::new(std::fs::File::open(file).map_err(unreadable)?)),
    };
    let (mut sum, mut batch) = (Imported::default(), Vec::new());
    for (n, line) in reader.lines().enumerate() {
        let line = line.map_err(unreadable)?;
        if !line.trim().is_empty() {
            let wrong =
                |e: String| Failure::usage(format!("line {}: {e}; {} were imported before it", n + 1, sum.imported));
            let candidate: NewCandidate = serde_json::from_str(&line).map_err(|e| wrong(e.to_string()))?;
            candidate.check().map_err(wrong)?;
            batch.push(candidate);
        }
        if batch.len() == BATCH {
            sum += memories.import(std::mem::take(&mut batch)).await?;
        }
    }
    sum += memories.import(batch).await?;
    output.show(&sum, || format!("{} imported, {} known before", count(sum.imported, "candidate"), sum.known))?;
    Ok(Ending::Done)
}

async fn govern(memories: &Memories, args: Govern, output: Output) -> Result<Ending> {
    let mut rules = memories.governance(&args.project).await?;
    let changes = args.team_write.is_some() || args.kinds.is_some() || args.max_length.is_some();
    if let Some(enabled) = args.team_write {
        rules.team_write_enabled = enabled;
    }
    if let Some(kinds) = args.kinds {
        let list = || kinds.split(',').map(|kind| kind.trim().to_owned()).filter(|kind| !kind.is_empty()).collect();
        rules.allowed_kinds = (!kinds.trim().eq_ignore_ascii_case("any")).then(list);
    }
    if let Some(most) = args.max_length {
        rules.max_length = Some(most).filter(|most| *most > 0);
    }
    if changes {
        let user = std::env::var("USER").unwrap_or_else(|_| "unknown".to_owned());
        memories.govern(rules.clone(), &user).await?;
    }
    output.show(&rules, || {
        format!(
            "project {}: team space {}, kinds {}, length {}",
            rules.project_key,
            if rules.team_write_enabled { "open" } else { "closed" },
            rules.allowed_kinds.as_ref().map_or("any".to_owned(), |kinds| kinds.join(", ")),
            rules.max_length.map_or("any".to_owned(), |most| format!("at most {most} characters")),
        )
    })?;
    Ok(Ending::Done)
}
