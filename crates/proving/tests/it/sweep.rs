//! The store sweep: every operation of the kernel, and every message on the wire between it and the database, with every
//! kind of fault. One fault of 23 by default; `make sweep` runs all.

mod kernel;
mod looking;

use proving::kit::{Scratch, Session, scratch};
use proving::sweep::{SIDE_BY_SIDE, Selection, sweep};

use kernel::{Operation, Verb};
use looking::WITNESS;

async fn every_operation(title: &str, url: &str, of_this_database: &[Verb]) {
    let outbox = postrider::Outbox::open(url, postrider::Lanes::new()).await.expect("open");
    outbox.migrate().await.expect("migrate");
    Session::to(url).await.run(WITNESS).await.expect("the witness");
    let warm = Verb::ALL.iter().chain(of_this_database).map(|verb| Operation { verb: *verb, cold: false });
    let cold = Verb::COLD.iter().map(|verb| Operation { verb: *verb, cold: true });
    let urls = vec![url.to_owned(); SIDE_BY_SIDE];
    sweep(title, urls, warm.chain(cold).collect(), &Selection::from_environment()).await;
}

/// Migrations of one database wait for each other.
async fn migrating(title: &str, databases: &[Scratch]) {
    for database in databases {
        let outbox = postrider::Outbox::open(&database.url, postrider::Lanes::new()).await.expect("open");
        outbox.migrate().await.expect("migrate");
        Session::to(&database.url).await.run(WITNESS).await.expect("the witness");
    }
    let urls = databases.iter().map(|database| database.url.clone()).collect();
    let operations = vec![Operation { verb: Verb::Migrate, cold: false }];
    sweep(title, urls, operations, &Selection::from_environment()).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres() {
    let database = scratch::postgres().await;
    every_operation("the store sweep on PostgreSQL", &database.url, &[Verb::Notify, Verb::Vitals]).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql() {
    let database = scratch::mysql().await;
    every_operation("the store sweep on MySQL", &database.url, &[]).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_migrating() {
    let databases = [scratch::postgres().await, scratch::postgres().await, scratch::postgres().await];
    migrating("migrating PostgreSQL", &databases).await;
}

#[ignore = "a busy machine makes some of its deadlines fail; run by make sweep"]
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mysql_migrating() {
    let databases = [scratch::mysql().await, scratch::mysql().await, scratch::mysql().await];
    migrating("migrating MySQL", &databases).await;
}
