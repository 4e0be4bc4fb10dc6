//! An application that dies in its own transaction: its row and its message are there together, or neither is.

use std::process::{Command, Stdio};

use postrider::failpoint::reach;
use postrider::{LaneRules, Lanes, NewMessage, Outbox};

use crate::callers::{DRIVERS, run};

/// Number of the driver and URL, for the process that is to die.
const APPLICATION: &str = "POSTRIDER_TEST_APPLICATION";

async fn outbox(url: &str) -> Outbox {
    Outbox::open(url, Lanes::new().with("l", LaneRules::default())).await.unwrap()
}

#[tokio::test]
#[ignore = "the application that row_2_killed_between_the_business_write_and_the_message starts and kills"]
async fn application() {
    let told = std::env::var(APPLICATION).expect("started by the test that kills it");
    let (driver, url) = told.split_once(' ').expect("a driver and a URL");
    let driver = DRIVERS[driver.parse::<usize>().expect("a number")];
    let outbox = outbox(url).await;
    let mut tx = driver.begin(url).await;
    run(&mut tx, "INSERT INTO orders_of_ours VALUES (1)").await;
    reach("written");
    let receipt = outbox.enqueue_in(&mut *tx, &[NewMessage::new("l", "x").key("k")]).await.unwrap();
    reach("enqueued");
    run(&mut tx, "COMMIT").await;
    reach("committed");
    receipt.committed();
}

#[tokio::test]
async fn row_2_killed_between_the_business_write_and_the_message() {
    for (n, driver) in DRIVERS.iter().enumerate() {
        let database = driver.scratch().await;
        let outbox = outbox(&database.url).await;
        outbox.migrate().await.unwrap();
        let mut session = driver.connect(&database.url).await;
        run(&mut session, "CREATE TABLE orders_of_ours (id BIGINT PRIMARY KEY)").await;
        for (place, there) in [("written", 0), ("enqueued", 0), ("committed", 1)] {
            let mut application = Command::new(std::env::current_exe().unwrap());
            application.args(["--exact", "crashing::application", "--ignored", "--nocapture"]);
            application.env(APPLICATION, format!("{n} {}", database.url)).env("POSTRIDER_FAILPOINT", place);
            let ended = application.stdout(Stdio::null()).stderr(Stdio::piped()).output().unwrap();
            assert!(ended.status.code().is_none(), "{driver:?} is killed when {place}: {ended:?}");
            let mut counts = vec![];
            for table in ["orders_of_ours", "outbox", "outbox_keys"] {
                let rows = session.query(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap();
                counts.push(rows[0].int(0).unwrap());
            }
            assert_eq!(counts, [there; 3], "{driver:?}, {place}");
        }
    }
}
