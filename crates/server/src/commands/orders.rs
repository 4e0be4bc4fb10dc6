//! `postrider orders`: place orders, see where they stand, bring back what failed, settle what nobody else can.

use postrider_orders::{By, ByHand, Invalid, NewOrder, Order, Orders, Placed, Reopened, Status, check_key};
use serde::Serialize;
use serde_json::json;
use serde_json::value::RawValue;

use crate::cli::{self, EndedAs, PlaceOrder};
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::http::ledger_view;
use crate::output::Output;
use crate::parts;

pub async fn run(config: &Config, args: cli::Orders, output: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let orders = parts::orders(config, &outbox).await?;
    let ending = match args {
        cli::Orders::Place(args) => place(&orders, args, output).await,
        cli::Orders::Show { key } => show(&orders, &outbox, &key, output).await,
        cli::Orders::Ledger { key } => ledger(&orders, &key, output).await,
        cli::Orders::Requeue { key } => requeue(&orders, &key, output).await,
        cli::Orders::Settle { key, ended, broker_ref, reason } => {
            settle(&orders, &key, ended, broker_ref, reason, output).await
        }
    };
    outbox.flush().await;
    ending
}

fn by(reason: Option<String>) -> By {
    let user = ["USER", "LOGNAME"].iter().find_map(|name| std::env::var(name).ok()).filter(|name| !name.is_empty());
    By { actor: format!("operator:{}", user.as_deref().unwrap_or("unknown")), reason }
}

fn not_found(key: &str) -> Failure {
    Failure::failed(format!("there is no order under the key `{key}`, or its time is over"))
}

/// The order as JSON, from a file or from flags.
fn body(args: &PlaceOrder) -> Result<Vec<u8>> {
    if let Some(text) = &args.payload {
        return Ok(text.clone().into_bytes());
    }
    if let Some(path) = &args.payload_file {
        return std::fs::read(path).map_err(|e| Failure::usage(format!("cannot read {}: {e}", path.display())));
    }
    let (Some(instrument), Some(side), Some(qty)) = (&args.instrument, &args.side, &args.qty) else {
        return Err(Failure::usage(
            "give --instrument, --side and --qty, or the whole order with --payload or --payload-file",
        ));
    };
    let mut order = json!({ "instrument": instrument, "side": side, "time_in_force": args.time_in_force });
    if let Some(id) = &args.order_id {
        order["order_id"] = json!(id);
    }
    // Numbers as they were typed: a float would round them.
    let mut text = order.to_string();
    text.pop();
    for (name, number) in [("qty", Some(qty)), ("price", args.price.as_ref())] {
        if let Some(number) = number {
            text.push_str(&format!(",\"{name}\":{number}"));
        }
    }
    text.push('}');
    Ok(text.into_bytes())
}

async fn place(orders: &Orders, args: PlaceOrder, output: Output) -> Result<Ending> {
    check_key(&args.key)?;
    let order = Order::parse(&body(&args)?).map_err(|wrong| match wrong {
        Invalid::NotJson(why) => Failure::usage(format!("the order is no JSON: {why}")),
        fields => Failure::usage(format!("the order cannot be taken: {fields}")),
    })?;
    if order.idempotency_key.as_deref().is_some_and(|own| own != args.key) {
        return Err(Failure::usage("--key and the order's idempotency_key differ"));
    }
    let placed = orders.place(vec![NewOrder::new(&args.key, order.clone())]).await?;
    let (shown, failed) = match placed.into_iter().next() {
        Some(Placed::Accepted { outbox_id }) => (raw(accepted(orders, &order, &args.key, outbox_id))?, false),
        Some(Placed::Replayed(entry)) => match entry.response_payload_json {
            Some(stored) => (raw(stored)?, entry.status == Status::Failed),
            None => (raw(accepted(orders, &order, &args.key, entry.outbox_id.unwrap_or_default()))?, false),
        },
        Some(Placed::Conflict) => {
            return Err(Failure::failed(
                "IDEMPOTENCY_CONFLICT: this key belongs to another order; nothing was taken in",
            ));
        }
        None => return Err(Failure::failed("an order without an answer")),
    };
    output.show(&shown, || pretty(&shown))?;
    Ok(Ending::failed_if(failed))
}

fn accepted(orders: &Orders, order: &Order, key: &str, outbox_id: i64) -> String {
    json!({
        "status": "accepted", "idempotency_key": key, "order_id": orders.order_id(order, outbox_id),
        "outbox_id": outbox_id, "request_digest": order.digest,
    })
    .to_string()
}

/// With its digits and the order of its keys.
fn raw(text: String) -> Result<Box<RawValue>> {
    RawValue::from_string(text).map_err(|e| Failure::failed(format!("the stored result is no JSON: {e}")))
}

fn pretty(value: &impl Serialize) -> String {
    serde_json::to_string_pretty(value).unwrap_or_default()
}

async fn show(orders: &Orders, outbox: &postrider::Outbox, key: &str, output: Output) -> Result<Ending> {
    let entry = orders.entry(key).await?.ok_or_else(|| not_found(key))?;
    let shown = match entry.response_payload_json {
        Some(stored) => raw(stored)?,
        None => {
            let id = entry.outbox_id.unwrap_or_default();
            let payload = outbox.payload(id).await?.ok_or_else(|| not_found(key))?;
            let order = Order::parse(&payload).map_err(|e| Failure::failed(e.to_string()))?;
            raw(accepted(orders, &order, key, id))?
        }
    };
    output.show(&shown, || pretty(&shown))?;
    Ok(Ending::Done)
}

async fn ledger(orders: &Orders, key: &str, output: Output) -> Result<Ending> {
    let entry = orders.entry(key).await?.ok_or_else(|| not_found(key))?;
    let shown = ledger_view(entry, orders.events(key).await?);
    output.show(&shown, || pretty(&shown))?;
    Ok(Ending::Done)
}

async fn requeue(orders: &Orders, key: &str, output: Output) -> Result<Ending> {
    match orders.requeue(key, by(Some("requeue".to_owned()))).await? {
        Reopened::NotFound => Err(not_found(key)),
        Reopened::Refused(why) => Err(Failure::failed(format!("the order cannot be brought back: {why}"))),
        Reopened::Reopened { outbox_id } => {
            let shown = json!({ "idempotency_key": key, "outbox_id": outbox_id, "outcome": "requeued" });
            output.show(&shown, || format!("the order is open again, as message {outbox_id}"))?;
            Ok(Ending::Done)
        }
    }
}

async fn settle(
    orders: &Orders,
    key: &str,
    ended: EndedAs,
    broker_ref: Option<String>,
    reason: Option<String>,
    output: Output,
) -> Result<Ending> {
    let executed = ended == EndedAs::Succeeded;
    if broker_ref.is_some() && !executed {
        return Err(Failure::usage("--broker-ref is for --as succeeded"));
    }
    let reason = reason.unwrap_or_else(|| "settled by hand".to_owned());
    match orders.settle(key, executed, broker_ref, by(Some(reason))).await? {
        ByHand::NotFound => Err(not_found(key)),
        ByHand::Refused(why) => Err(Failure::failed(format!("the order cannot be settled: {why}"))),
        ByHand::Done(entry) => {
            let status = entry.status.as_str();
            let shown = ledger_view(*entry, orders.events(key).await?);
            output.show(&shown, || format!("the order is settled: {status}"))?;
            Ok(Ending::Done)
        }
    }
}
