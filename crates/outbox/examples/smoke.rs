//! smoke
use postrider::*;
use postrider::worker::core::LaneSettings;
use std::sync::Arc;
#[tokio::main]
async fn main() {
    let url = std::env::args().nth(1).unwrap();
    let n: usize = std::env::args().nth(2).unwrap_or("10000".into()).parse().unwrap();
    let outbox = Outbox::open(&url, Lanes::new().with("a", LaneRules::default()).with("d", LaneRules{dedup:true,audit:true,..Default::default()})).await.unwrap();
    println!("{:?}", outbox.migrate().await);
    println!("{:?}", outbox.migrate().await);
    println!("{:?}", outbox.pending_migrations().await);
    println!("{:?}", outbox.enqueue(vec![NewMessage::new("a","x").key("k"), NewMessage::new("a","x").key("k"), NewMessage::new("a","y").key("k"), NewMessage::new("a","y").key("K"), NewMessage::new("a","y").key("k ")]).await);
    println!("{:?}", outbox.enqueue(vec![NewMessage::new("a","x").active_key("k"), NewMessage::new("a","x").active_key("k"), NewMessage::new("a","y").active_key("k").key("zz")]).await);
    println!("{:?}", outbox.enqueue(vec![NewMessage::new("d","x").target("t"), NewMessage::new("d","x").target("t"), NewMessage::new("d","y").target("t")]).await);
    let t = std::time::Instant::now();
    for _ in 0..n/1000 { outbox.enqueue((0..1000).map(|i| NewMessage::new("a", format!("{i:0256}"))).collect()).await.unwrap(); }
    println!("enqueue {:.0}/s", n as f64/t.elapsed().as_secs_f64());
    println!("{:?}", outbox.stats().await);
    let t = std::time::Instant::now();
    let mut s = LaneSettings::new("a"); s.concurrency=512; s.batch=512;
    let r = Worker::new(outbox.clone()).lane_with(s, Arc::new(couriers::Noop)).lane("d", courier(|m| async move { tokio::task::yield_now().await; if m.payload=="y" {Outcome::dead("BAD","no")} else {Outcome::Sent{result_ref:Some("r1".into())}} })).once().run(std::future::pending()).await;
    println!("drain {:.0}/s {:?}", n as f64/t.elapsed().as_secs_f64(), r);
    println!("{:?}", outbox.stats().await);
    println!("{:?}", outbox.list(store::Filter{lane:Some("d".into()),limit:10,..Default::default()}).await);
}
