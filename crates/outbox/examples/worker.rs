//! A worker with a courier of one's own, on any of the databases. It delivers all that is due and ends; without `.once()`
//! it goes on until its shutdown future resolves.
//!
//! `cargo run --example worker -- sqlite://app.db`

use postrider::{LaneRules, Lanes, Outbox, Outcome, Worker, courier};

pub async fn deliver_emails(url: &str) -> postrider::Result<()> {
    let outbox = Outbox::open(url, Lanes::new().with("emails", LaneRules::default())).await?;
    outbox.migrate().await?;
    let mailer = courier(|message| async move {
        match std::str::from_utf8(&message.payload) {
            Ok(text) => println!("to the mail server: {text}"),
            Err(_) => return Outcome::dead("NOT_TEXT", "the payload is no UTF-8"),
        }
        Outcome::sent()
    });
    Worker::new(outbox).lane("emails", mailer).once().run(std::future::pending()).await?;
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let url = std::env::args().nth(1).or_else(|| std::env::var("DATABASE_URL").ok());
    Ok(deliver_emails(&url.ok_or("give a database: an argument or DATABASE_URL")?).await?)
}
