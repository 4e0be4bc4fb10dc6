//! `postrider webhooks`: the same as the API's routes, at a terminal.

use std::collections::BTreeMap;

use postrider::Timestamp;
use postrider_webhooks::sign::Scheme;
use postrider_webhooks::{
    Attempt, DeadLetterFilter, NewEvent, NewReplay, NewSubscription, Publishing, Requeued, Saga, Webhooks,
};
use serde_json::{Value, json};

use crate::cli::{self, Publish, ReplayArgs, Subscribe};
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::output::Output;
use crate::parts;
use crate::table::Table;

pub async fn run(config: &Config, args: cli::Webhooks, output: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let webhooks = parts::webhooks(config, &outbox).await?;
    let ending = match args {
        cli::Webhooks::Subscribe(args) => subscribe(&webhooks, args, output).await,
        cli::Webhooks::Subscriptions => subscriptions(&webhooks, output).await,
        cli::Webhooks::Publish(args) => publish(&webhooks, args, output).await,
        cli::Webhooks::Saga { id } => saga(&webhooks, id, output).await,
        cli::Webhooks::DeadLetters { limit, subscription } => {
            dead_letters(&webhooks, limit, subscription, output).await
        }
        cli::Webhooks::Requeue { id } => requeue(&webhooks, id, output).await,
        cli::Webhooks::Replay(args) => replay(&webhooks, args, output).await,
        cli::Webhooks::Purge { older_than } => {
            let (sagas, events) = webhooks.prune_older_than(older_than).await?;
            output.show(&json!({ "sagas": sagas, "events": events }), || {
                format!("{sagas} deliveries and {events} events were deleted")
            })?;
            Ok(Ending::Done)
        }
        cli::Webhooks::Reseal => {
            let count = webhooks.reseal().await?;
            output.show(&json!({ "resealed": count }), || {
                format!("{count} subscriptions were brought over to the current key")
            })?;
            Ok(Ending::Done)
        }
    };
    outbox.flush().await;
    ending
}

fn header(text: &str) -> Result<(String, String)> {
    let (name, value) = text
        .split_once(':')
        .ok_or_else(|| Failure::usage("write --header 'Name: value'; there is one without a colon"))?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

async fn subscribe(webhooks: &Webhooks, args: Subscribe, output: Output) -> Result<Ending> {
    let new = NewSubscription {
        url: args.url,
        event_types: if args.event_types.is_empty() { vec!["*".to_owned()] } else { args.event_types },
        description: args.description,
        headers: args.headers.iter().map(|text| header(text)).collect::<Result<_>>()?,
        signature: if args.v1a { Scheme::V1a } else { Scheme::V1 },
        max_retry_limit: args.max_retry_limit,
        retry_schedule_sec: None,
        timeout_ms: args.timeout_ms,
        rate_per_sec: args.rate_per_sec,
        max_in_flight: args.max_in_flight,
        secret: None,
    };
    let (subscription, secret) = webhooks.subscribe(new).await?;
    let mut shown = serde_json::to_value(&subscription).unwrap_or_default();
    shown["secret"] = json!(secret);
    output.show(&shown, || {
        format!("subscription {} to {}\n\n{secret}\n\nGive this to the receiver: it verifies with it, and it is not shown again.", subscription.id, subscription.url)
    })?;
    Ok(Ending::Done)
}

async fn subscriptions(webhooks: &Webhooks, output: Output) -> Result<Ending> {
    let found = webhooks.subscriptions(0, 10_000).await?;
    output.show(&json!({ "items": found, "next_cursor": null }), || {
        if found.is_empty() {
            return "no subscriptions; make one with `postrider webhooks subscribe https://…`".to_owned();
        }
        let mut table = Table::new(["id", "status", "url", "event types", "since"]);
        for s in &found {
            let status =
                s.disabled_reason.as_ref().map_or(s.status.as_str().to_owned(), |why| format!("disabled ({why})"));
            table.row([s.id.to_string(), status, s.url.clone(), s.event_types.join(","), s.created_at.to_string()]);
        }
        table.render()
    })?;
    Ok(Ending::Done)
}

async fn publish(webhooks: &Webhooks, args: Publish, output: Output) -> Result<Ending> {
    let payload = match (args.payload, args.payload_file) {
        (Some(text), _) => text.into_bytes(),
        (None, Some(path)) => {
            std::fs::read(&path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())))?
        }
        (None, None) => return Err(Failure::usage("give --payload TEXT or --payload-file FILE")),
    };
    let mut event = NewEvent::new(args.event_type, payload);
    event.external_id = args.external_id;
    event.content_type = args.content_type;
    let published = webhooks.publish(vec![event]).await?;
    let published = published.into_iter().next().ok_or_else(|| Failure::failed("an event without an answer"))?;
    if published.outcome == Publishing::Differs {
        return Err(Failure::failed(format!(
            "the external id belongs to another event, {}; nothing was written",
            published.event_id
        )));
    }
    let duplicate = published.outcome == Publishing::Exists;
    let shown = json!({ "event_id": published.event_id, "saga_ids": published.saga_ids, "duplicate": duplicate });
    output.show(&shown, || shown.to_string())?;
    Ok(Ending::Done)
}

async fn saga(webhooks: &Webhooks, id: i64, output: Output) -> Result<Ending> {
    let Some((saga, jobs, attempts)) = webhooks.saga(id).await? else {
        return Err(Failure::failed(format!("there is no saga {id}")));
    };
    let mut shown = serde_json::to_value(&saga).unwrap_or_default();
    shown["jobs"] = json!(jobs);
    shown["attempts"] = json!(attempts);
    output.show(&shown, || as_text(&saga, &attempts))?;
    Ok(Ending::Done)
}

fn as_text(saga: &Saga, attempts: &[Attempt]) -> String {
    let Saga { id, event_id, subscription_id, status, attempt_count, .. } = saga;
    let mut text = format!(
        "saga {id}: event {event_id} to subscription {subscription_id}, {status} after {attempt_count} attempts\n"
    );
    if let Some(next) = &saga.next_attempt_at {
        text.push_str(&format!("next attempt {next}\n"));
    }
    if saga.held {
        text.push_str("held: its subscription is paused, limited or cooling down\n");
    }
    let mut table = Table::new(["attempt", "at", "ms", "status", "error", "class"]);
    for a in attempts {
        let dash = |text: &Option<String>| text.clone().unwrap_or_else(|| "-".to_owned());
        let status = a.response_status.map_or("-".to_owned(), |status| status.to_string());
        let numbers = [a.attempt.to_string(), a.started_at.to_string(), a.duration_ms.to_string()];
        let [attempt, at, ms] = numbers;
        table.row([attempt, at, ms, status, dash(&a.error_code), dash(&a.error_class)]);
    }
    text.push_str(&table.render());
    text
}

async fn dead_letters(webhooks: &Webhooks, limit: u32, subscription_id: Option<i64>, output: Output) -> Result<Ending> {
    let filter = DeadLetterFilter { subscription_id, ..DeadLetterFilter::default() };
    // A page looks only so far; whoever waits at a terminal wants all of it.
    let (mut items, mut before) = (Vec::new(), None);
    loop {
        let page = webhooks.dead_letters(filter.clone(), before, limit - items.len() as u32).await?;
        items.extend(page.items);
        before = page.next;
        if before.is_none() || items.len() >= limit as usize {
            break;
        }
    }
    let next = before.map(|id| id.to_string());
    output.show(&json!({ "items": items, "next_cursor": next }), || {
        if items.is_empty() {
            return "no dead letters".to_owned();
        }
        let mut table = Table::new(["id", "saga", "event", "subscription", "error", "failed", "requeued as"]);
        for d in &items {
            let numbers = [d.id, d.saga_id, d.event_id, d.subscription_id].map(|n| n.to_string());
            let [id, saga, event, subscription] = numbers;
            let error = d.final_error_code.clone().unwrap_or_else(|| "-".to_owned());
            let requeued = d.requeued_saga_id.map_or("-".to_owned(), |id| id.to_string());
            table.row([id, saga, event, subscription, error, d.failed_at.to_string(), requeued]);
        }
        table.render()
    })?;
    Ok(Ending::Done)
}

async fn requeue(webhooks: &Webhooks, id: i64, output: Output) -> Result<Ending> {
    match webhooks.requeue(id).await? {
        Requeued::Created(saga_id) | Requeued::Exists(saga_id) => {
            output
                .show(&json!({ "saga_id": saga_id }), || format!("dead letter {id} begins anew as saga {saga_id}"))?;
            Ok(Ending::Done)
        }
        Requeued::NotFound => Err(Failure::failed(format!("there is no dead letter {id}"))),
        Requeued::NoSubscription => Err(Failure::failed(
            "its subscription is disabled or gone; resume it first (POST /v1/subscriptions/ID/resume)",
        )),
    }
}

async fn replay(webhooks: &Webhooks, args: ReplayArgs, output: Output) -> Result<Ending> {
    let some = |list: Vec<String>| if list.is_empty() { None } else { Some(list) };
    let wanted = NewReplay {
        subscription_id: args.subscription,
        from: args.from,
        to: args.to.unwrap_or(Timestamp::FAR_FUTURE),
        event_types: some(args.event_types),
        statuses: some(args.statuses),
    };
    let missing = || Failure::failed(format!("there is no subscription {}", args.subscription));
    let count = webhooks.count_replay(wanted.clone()).await?.ok_or_else(missing)?;
    let mut shown: BTreeMap<&str, Value> = BTreeMap::from([("count", json!(count.count))]);
    if count.at_least {
        shown.insert("count_at_least", json!(true));
    }
    let count = if count.at_least { format!("at least {}", count.count) } else { count.count.to_string() };
    if !args.dry_run {
        let replay = webhooks.replay(wanted).await?.ok_or_else(missing)?;
        shown.insert("replay_id", json!(replay.id));
    }
    output.show(&json!(shown), || match args.dry_run {
        true => format!("{count} events would be sent again"),
        false => format!("{count} events are being sent again, by whoever serves or works"),
    })?;
    Ok(Ending::Done)
}
