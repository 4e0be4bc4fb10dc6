//! The examples, compiled as they stand and run; what counts is what they leave in the database.

#![allow(dead_code)] // their `main`

use postrider::store::Status;
use postrider::{LaneRules, Lanes, Outbox};

use proving::kit::scratch::{self, Scratch};

#[path = "../../examples/enqueue_mysql_async.rs"]
mod enqueue_mysql_async;
#[path = "../../examples/enqueue_rusqlite.rs"]
mod enqueue_rusqlite;
#[cfg(feature = "sqlx-postgres")]
#[path = "../../examples/enqueue_sqlx.rs"]
mod enqueue_sqlx;
#[path = "../../examples/enqueue_tokio_postgres.rs"]
mod enqueue_tokio_postgres;
#[path = "../../examples/inbox.rs"]
mod inbox;
#[path = "../../examples/worker.rs"]
mod worker;

/// The only message there is, as (payload, status).
async fn the_message(database: &Scratch) -> (String, Status) {
    let outbox = Outbox::open(&database.url, Lanes::new().with("emails", LaneRules::default())).await.unwrap();
    let all = outbox.list(postrider::store::Filter { limit: 10, ..Default::default() }).await.unwrap().items;
    assert_eq!(all.len(), 1, "one message, however often the example runs: {all:?}");
    let payload = outbox.payload(all[0].id).await.unwrap().unwrap();
    (String::from_utf8(payload.to_vec()).unwrap(), all[0].status)
}

fn thanks(status: Status) -> (String, Status) {
    ("Thank you for order 7".to_owned(), status)
}

#[tokio::test]
async fn enqueue_with_tokio_postgres_then_work() {
    let database = scratch::postgres().await;
    enqueue_tokio_postgres::place_order(&database.url).await.unwrap();
    enqueue_tokio_postgres::place_order(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Pending));
    worker::deliver_emails(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Sent));
}

#[tokio::test]
async fn enqueue_with_mysql_async_then_work() {
    let database = scratch::mysql().await;
    enqueue_mysql_async::place_order(&database.url).await.unwrap();
    enqueue_mysql_async::place_order(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Pending));
    worker::deliver_emails(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Sent));
}

#[tokio::test]
async fn enqueue_with_rusqlite_then_work() {
    let database = scratch::sqlite();
    enqueue_rusqlite::place_order(&database.url).await.unwrap();
    enqueue_rusqlite::place_order(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Pending));
    worker::deliver_emails(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Sent));
}

#[cfg(feature = "sqlx-postgres")]
#[tokio::test]
async fn enqueue_with_sqlx() {
    let database = scratch::postgres().await;
    enqueue_sqlx::place_order(&database.url).await.unwrap();
    enqueue_sqlx::place_order(&database.url).await.unwrap();
    assert_eq!(the_message(&database).await, thanks(Status::Pending));
}

#[tokio::test]
async fn a_receiver_with_an_inbox_books_once() {
    let database = scratch::postgres().await;
    inbox::receive(&database.url).await.unwrap();
    inbox::receive(&database.url).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&database.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let balance: i64 = client.query_one("SELECT balance FROM accounts", &[]).await.unwrap().get(0);
    assert_eq!(balance, 15, "two payments, one of them delivered twice, all of it run twice");
}
