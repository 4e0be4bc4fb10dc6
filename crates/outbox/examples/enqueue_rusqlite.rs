//! Enqueue in a transaction of rusqlite: the order and its message are written together or not at all.
//!
//! `cargo run --example enqueue_rusqlite -- sqlite://app.db`

use postrider::{LaneRules, Lanes, NewMessage, Outbox};
use rusqlite::{Connection, TransactionBehavior};

pub async fn place_order(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    // Once, when the program starts.
    let outbox = Outbox::open(url, Lanes::new().with("emails", LaneRules::default())).await?;
    outbox.migrate().await?;

    let mut connection = Connection::open(url.trim_start_matches("sqlite://"))?;
    connection.execute_batch("CREATE TABLE IF NOT EXISTS orders (id INTEGER PRIMARY KEY, item TEXT NOT NULL)")?;

    // For every order. IMMEDIATE, because a transaction that reads first cannot wait for another writer.
    let tx = connection.transaction_with_behavior(TransactionBehavior::Immediate)?;
    tx.execute("INSERT OR IGNORE INTO orders VALUES (7, 'saddle')", [])?;
    let thanks = NewMessage::new("emails", "Thank you for order 7").key("order-7");
    let receipt = outbox.enqueue_in_sqlite(&tx, &[thanks])?;
    tx.commit()?;

    for entry in receipt.committed() {
        println!("message {} {:?}", entry.id, entry.outcome);
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("DATABASE_URL").ok());
    place_order(&url.ok_or("give a database: an argument or DATABASE_URL")?).await
}
