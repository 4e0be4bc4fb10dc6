//! `postrider outbox`: the operator's eyes (stats, list, show) and hands (release, purge; [`super::requeue`]).

use postrider::store::{Attempt, Filter, History, Prune, Shown};
use postrider::{Outbox, Timestamp};
use serde::Serialize;
use serde_json::json;

use super::requeue;
use crate::cli;
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::output::{Output, count, print_bytes};
use crate::table::{Table, harmless};

/// Messages looked at or changed at a time.
const PAGE: u32 = 1000;

pub async fn run(config: &Config, args: cli::Outbox, output: Output) -> Result<Ending> {
    let lane = match &args {
        cli::Outbox::List(list) => list.lane.as_deref(),
        cli::Outbox::Requeue(requeue) => requeue.lane.as_deref(),
        cli::Outbox::Release(release) => release.lane.as_deref(),
        cli::Outbox::Purge(purge) => purge.lane.as_deref(),
        cli::Outbox::Stats | cli::Outbox::Show(_) => None,
    };
    let outbox = database::open_existing(config).await?;
    if let Some(lane) = lane {
        known_lane(config, &outbox, lane).await?;
    }
    // Memories are brought back by those who keep their copies.
    if let (cli::Outbox::Requeue(args), Some(_)) = (&args, &config.memory)
        && args.lane.as_deref() == Some(postrider_memories::LANE)
    {
        let memories = crate::parts::memories(config, &outbox)?;
        return super::memory::requeue_dead(&memories, None, args.dry_run, output).await;
    }
    match args {
        cli::Outbox::Stats => stats(&outbox, output).await,
        cli::Outbox::List(args) => list(&outbox, args, output).await,
        cli::Outbox::Show(args) => show(&outbox, args, output).await,
        cli::Outbox::Requeue(args) => requeue::run(&outbox, args, output).await,
        cli::Outbox::Release(args) => release(&outbox, args, output).await,
        cli::Outbox::Purge(args) => purge(&outbox, args, output).await,
    }
}

/// A mistyped lane must not look like an empty one. Lanes that left the configuration may still have messages.
async fn known_lane(config: &Config, outbox: &Outbox, lane: &str) -> Result<()> {
    if config.lanes.contains_key(lane) || outbox.has_lane(lane).await? {
        return Ok(());
    }
    config.lane(lane).map(drop)
}

async fn stats(outbox: &Outbox, output: Output) -> Result<Ending> {
    let lanes = outbox.stats().await?;
    output.show(&json!({ "lanes": lanes }), || {
        let mut table = Table::new(["lane", "pending", "leased", "sent", "dead", "oldest due"]);
        for (lane, s) in &lanes {
            let [pending, leased, sent, dead] = [s.pending, s.leased, s.sent, s.dead].map(|n| n.to_string());
            let age =
                if s.oldest_due_seconds > 0.0 { format!("{:.1} s", s.oldest_due_seconds) } else { "-".to_owned() };
            table.row([lane.clone(), pending, leased, sent, dead, age]);
        }
        table.render()
    })?;
    Ok(Ending::Done)
}

async fn list(outbox: &Outbox, args: cli::List, output: Output) -> Result<Ending> {
    let mut filter = Filter {
        lane: args.lane,
        status: args.status,
        before: args.before,
        key: args.key,
        target: args.target,
        limit: args.limit,
    };
    let mut items = Vec::new();
    // A page looks only so far; whoever waits at a terminal wants all of it.
    let next = loop {
        let page = outbox.list(filter.clone()).await?;
        items.extend(page.items);
        filter.limit = args.limit - items.len() as u32;
        filter.before = page.next;
        if filter.limit == 0 || page.next.is_none() {
            break page.next;
        }
    };
    output.show(&json!({ "items": items, "next_cursor": next.map(|id| id.to_string()) }), || {
        if items.is_empty() {
            return "no messages".to_owned();
        }
        let mut table = Table::new(["id", "lane", "status", "attempts", "due", "target", "error"]);
        for item in &items {
            let due = if item.finished_at.is_some() { "-".to_owned() } else { moment(item.due_at) };
            let error = item.last_error_code.clone().unwrap_or_default();
            let target = item.target.clone().unwrap_or_default();
            table.row([
                item.id.to_string(),
                item.lane.clone(),
                item.status.as_str().to_owned(),
                item.attempts.to_string(),
                due,
                target,
                error,
            ]);
        }
        let more = next.map_or(String::new(), |id| format!("more: --before {id}\n"));
        table.render() + &more
    })?;
    Ok(Ending::Done)
}

#[derive(Serialize)]
struct WithHistory<'a> {
    #[serde(flatten)]
    message: &'a Shown,
    history: &'a [Attempt],
    history_truncated: bool,
}

async fn show(outbox: &Outbox, args: cli::Show, output: Output) -> Result<Ending> {
    let missing = || {
        Failure::failed(format!(
            "there is no message {}; look with `postrider outbox list` (what ended goes when its retention is over)",
            args.id
        ))
    };
    if args.payload {
        print_bytes(&outbox.payload(args.id).await?.ok_or_else(missing)?)?;
        return Ok(Ending::Done);
    }
    let (message, history) = outbox.show(args.id).await?.ok_or_else(missing)?;
    let shown = WithHistory { message: &message, history: &history.attempts, history_truncated: history.truncated };
    output.show(&shown, || describe(&message, &history))?;
    Ok(Ending::Done)
}

fn describe(m: &Shown, history: &History) -> String {
    let mut lines: Vec<(&str, String)> = vec![
        ("message", m.id.to_string()),
        ("lane", if m.shard_id == 0 { m.lane.clone() } else { format!("{}, shard {}", m.lane, m.shard_id) }),
        ("status", m.status.as_str().to_owned()),
        ("attempts", m.attempts.to_string()),
    ];
    let mut add = |name, value: Option<String>| lines.extend(value.map(|value| (name, value)));
    add("crashes", (m.crashes > 0).then(|| m.crashes.to_string()));
    add("maybe sent", m.maybe_sent.then(|| "yes: an attempt may have arrived without our knowing".to_owned()));
    add("due", m.finished_at.is_none().then(|| moment(m.due_at)));
    add(if m.finished_at.is_some() { "claimed by" } else { "held by" }, m.claimed_by.clone());
    add("held until", m.lease_until.map(moment));
    add("target", m.target.clone());
    add("active key", m.active_key.clone());
    let kind = m.content_type.as_deref().unwrap_or("no content type");
    add("payload", Some(format!("{} bytes, {kind} (see it: --payload)", m.payload_bytes)));
    add("sha256", m.payload_sha.clone());
    add("result", m.result_ref.clone());
    add("correlation", m.correlation_id.clone());
    add("created", Some(moment(m.created_at)));
    add("deliver before", m.deliver_before.map(moment));
    add("finished", m.finished_at.map(moment));
    add(
        "last error",
        m.last_error_code.as_ref().map(|code| format!("{code}: {}", m.last_error.as_deref().unwrap_or(""))),
    );
    let mut text: String =
        lines.iter().map(|(name, value)| format!("{name:<15} {}\n", value.replace(char::is_control, "·"))).collect();
    if !history.attempts.is_empty() {
        let mut table = Table::new(["at", "what", "attempt", "code", "error"]);
        for h in &history.attempts {
            let [code, error] = [&h.code, &h.error].map(|text| harmless(text.as_deref().unwrap_or("")));
            table.row([moment(h.at), h.kind.clone(), h.attempt.to_string(), code, error]);
        }
        text.push('\n');
        if history.truncated {
            text.push_str(&format!("the latest {} attempts:\n", history.attempts.len()));
        }
        text.push_str(&table.render());
    }
    text
}

/// To the second: enough for people.
fn moment(at: Timestamp) -> String {
    let text = at.to_string();
    let seconds = text.split(['.', 'Z']).next().unwrap_or(&text);
    format!("{}Z", seconds.replace('T', " "))
}

fn would(output: Output, verb: &str, ids: Vec<i64>) -> Result<Ending> {
    let number = ids.len() as u64;
    output.show(&json!({ "dry_run": true, "count": number, "ids": ids }), || would_text(verb, number, &ids))?;
    Ok(Ending::Done)
}

/// How many would be touched, and which of them first.
pub(super) fn would_text(verb: &str, number: u64, ids: &[i64]) -> String {
    let first: Vec<String> = ids.iter().take(20).map(i64::to_string).collect();
    let which = match ids.len() {
        0 => String::new(),
        listed => format!(": {}{}", first.join(", "), if listed > 20 { ", …" } else { "" }),
    };
    format!("would {verb} {}{which}", count(number, "message"))
}

async fn release(outbox: &Outbox, args: cli::Release, output: Output) -> Result<Ending> {
    if args.dry_run {
        let ids = if args.expired {
            outbox.expired_leases(args.lane.as_deref(), u32::MAX >> 1).await?
        } else {
            live_only(outbox, args.ids).await?
        };
        return would(output, "release", ids);
    }
    let (asked, released) = if args.expired {
        (0, release_expired(outbox, args.lane.as_deref()).await?)
    } else {
        (args.ids.len(), outbox.release(args.ids.clone()).await?)
    };
    outbox.flush().await;
    output.show(&json!({ "released": released.len(), "ids": released }), || {
        let mut text = format!("released {}\n", count(released.len() as u64, "message"));
        for id in args.ids.iter().filter(|id| !released.contains(id)) {
            text.push_str(&format!("message {id} is not live; nothing changed\n"));
        }
        text
    })?;
    Ok(Ending::failed_if(released.len() < asked))
}

async fn release_expired(outbox: &Outbox, lane: Option<&str>) -> Result<Vec<i64>> {
    let mut released = Vec::new();
    loop {
        let given = outbox.release_expired(lane, PAGE).await?;
        if given.is_empty() {
            return Ok(released);
        }
        released.extend(given);
    }
}

async fn live_only(outbox: &Outbox, ids: Vec<i64>) -> Result<Vec<i64>> {
    let mut live = Vec::new();
    for id in ids {
        if outbox.show(id).await?.is_some_and(|(m, _)| m.finished_at.is_none()) {
            live.push(id);
        }
    }
    Ok(live)
}

async fn purge(outbox: &Outbox, args: cli::Purge, output: Output) -> Result<Ending> {
    let prune = Prune { lane: args.lane, older_than: args.older_than, limit: PAGE, dry_run: args.dry_run };
    let (mut messages, mut keys) = (0, 0);
    loop {
        let pruned = outbox.prune(prune.clone()).await?;
        messages += pruned.messages;
        keys += pruned.keys;
        if args.dry_run || (pruned.messages < u64::from(PAGE) && pruned.keys < u64::from(PAGE)) {
            break;
        }
    }
    output.show(&json!({ "messages": messages, "keys": keys, "dry_run": args.dry_run }), || {
        let verb = if args.dry_run { "would delete" } else { "deleted" };
        format!("{verb} {} and {}", count(messages, "message"), count(keys, "expired key"))
    })?;
    Ok(Ending::Done)
}
