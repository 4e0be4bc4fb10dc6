//! Enqueue in a transaction of mysql_async: the order and its message are written together or not at all.
//!
//! `cargo run --example enqueue_mysql_async -- mysql://user@localhost/app`

use mysql_async::TxOpts;
use mysql_async::prelude::Queryable;
use postrider::{LaneRules, Lanes, NewMessage, Outbox};

pub async fn place_order(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    // Once, when the program starts.
    let outbox = Outbox::open(url, Lanes::new().with("emails", LaneRules::default())).await?;
    outbox.migrate().await?;

    let pool = mysql_async::Pool::new(url);
    let mut conn = pool.get_conn().await?;
    conn.query_drop("CREATE TABLE IF NOT EXISTS orders (id BIGINT PRIMARY KEY, item TEXT NOT NULL)").await?;

    // For every order.
    let mut tx = conn.start_transaction(TxOpts::default()).await?;
    tx.query_drop("INSERT IGNORE INTO orders VALUES (7, 'saddle')").await?;
    let thanks = NewMessage::new("emails", "Thank you for order 7").key("order-7");
    let receipt = outbox.enqueue_in(&mut tx, &[thanks]).await?;
    tx.commit().await?;

    for entry in receipt.committed() {
        println!("message {} {:?}", entry.id, entry.outcome);
    }
    drop(conn);
    pool.disconnect().await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("DATABASE_URL").ok());
    place_order(&url.ok_or("give a database: an argument or DATABASE_URL")?).await
}
