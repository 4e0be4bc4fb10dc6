//! Enqueue in a transaction of sqlx: the order and its message are written together or not at all. On PostgreSQL here;
//! with MySqlPool and feature `sqlx-mysql`, or SqlitePool and `sqlx-sqlite`, it reads the same.
//!
//! `cargo run --example enqueue_sqlx --features sqlx-postgres -- postgres://user@localhost/app`

use postrider::{LaneRules, Lanes, NewMessage, Outbox};
use sqlx::PgPool;

pub async fn place_order(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    // Once, when the program starts.
    let outbox = Outbox::open(url, Lanes::new().with("emails", LaneRules::default())).await?;
    outbox.migrate().await?;

    let pool = PgPool::connect(url).await?;
    let table = sqlx::query("CREATE TABLE IF NOT EXISTS orders (id BIGINT PRIMARY KEY, item TEXT NOT NULL)");
    table.execute(&pool).await?;

    // For every order.
    let mut tx = pool.begin().await?;
    sqlx::query("INSERT INTO orders VALUES (7, 'saddle') ON CONFLICT DO NOTHING").execute(&mut *tx).await?;
    let thanks = NewMessage::new("emails", "Thank you for order 7").key("order-7");
    let receipt = outbox.enqueue_in(&mut *tx, &[thanks]).await?;
    tx.commit().await?;

    for entry in receipt.committed() {
        println!("message {} {:?}", entry.id, entry.outcome);
    }
    pool.close().await;
    outbox.flush().await; // only because this program ends here
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("DATABASE_URL").ok());
    place_order(&url.ok_or("give a database: an argument or DATABASE_URL")?).await
}
