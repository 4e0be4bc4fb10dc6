//! A receiver that handles each message once: "seen before?" and the change itself are one transaction.
//!
//! `cargo run --example inbox -- postgres://user@localhost/app`

use postrider::{Inbox, Lanes, Outbox};
use tokio_postgres::{Client, NoTls};

/// Answers whether the payment took effect; a second delivery of the same one does not.
async fn book_payment(client: &mut Client, message_id: &str, amount: i64) -> Result<bool, Box<dyn std::error::Error>> {
    let mut tx = client.transaction().await?;
    let first = Inbox::first_time(&mut tx, "payments", message_id).await?;
    if first {
        tx.execute("UPDATE accounts SET balance = balance + $1 WHERE id = 1", &[&amount]).await?;
    }
    tx.commit().await?;
    Ok(first)
}

pub async fn receive(url: &str) -> Result<(), Box<dyn std::error::Error>> {
    Outbox::open(url, Lanes::new()).await?.migrate().await?; // creates the inbox, too
    let (mut client, connection) = tokio_postgres::connect(url, NoTls).await?;
    tokio::spawn(connection);
    let accounts = "CREATE TABLE IF NOT EXISTS accounts (id BIGINT PRIMARY KEY, balance BIGINT NOT NULL);
                    INSERT INTO accounts VALUES (1, 0) ON CONFLICT DO NOTHING";
    client.batch_execute(accounts).await?;

    for (message_id, amount) in [("payment-1", 10), ("payment-2", 5), ("payment-1", 10)] {
        println!(
            "{message_id}: {}",
            if book_payment(&mut client, message_id, amount).await? { "booked" } else { "known" }
        );
    }
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("DATABASE_URL").ok());
    receive(&url.ok_or("give a database: an argument or DATABASE_URL")?).await
}
