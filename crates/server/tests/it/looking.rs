//! The audit, looked through in the library as the page of memories does: it costs no more when there is more of it.

use std::sync::Arc;

use postrider::store::{Mode, Store, transact};
use postrider::{Lanes, Options, Outbox, stores};
use postrider_memories::{AuditFilter, LANE, MIGRATIONS, Memories, Settings, Settling, lane_rules, upstream};
use proving::watched::{Watched, numbers};

use crate::memory::on_every_database;

const SECOND: std::time::Duration = std::time::Duration::from_secs(1);

#[test]
fn the_audit_is_looked_through_within_bounds() {
    on_every_database(|home| {
        let runtime = tokio::runtime::Runtime::new().unwrap();
        let file = format!("sqlite://{}", home.path("postrider.db").display());
        let url = home.database.url().map_or(file, str::to_owned);
        runtime.block_on(async {
            let settling = Settling::default();
            let lanes = Lanes::new().with(LANE, lane_rules(&settling));
            let options = Options { migrations: MIGRATIONS.to_vec(), ..Options::default() };
            let store = stores::open(&url, lanes, options).await.unwrap();
            store.migrate().await.unwrap();
            // A client that names the same request for everything, long ago; since then others.
            let (now, many) = match home.database.url() {
                None => ("0", "'c' || n"),
                Some(url) if url.starts_with("postgres") => ("clock_timestamp()", "'c' || n"),
                Some(_) => ("UTC_TIMESTAMP(6)", "CONCAT('c', n)"),
            };
            let insert = |correlation: &str| {
                format!(
                    "INSERT INTO write_audit (created_at, updated_at, action, reason, status, correlation_id, outbox_id, evidence_refs_json)
                     SELECT {now}, {now}, 'allow', 'test', 'success', {correlation}, n, '[]' FROM {} WHERE n < 80000",
                    numbers()
                )
            };
            for sql in [insert("'same'"), insert(many)] {
                let work = Arc::new(sql);
                transact(&*store, Mode::Write, move |tx| {
                    let work = work.clone();
                    Box::pin(async move { tx.execute(&work, &[]).await })
                })
                .await
                .unwrap();
            }
            let watched = Watched::over(store, &url);
            let outbox = Outbox::new(watched.clone() as Arc<dyn Store>);
            let upstream = upstream::Settings { url: None, key: Arc::new(|| Ok(None)), timeout: SECOND, resolver: None };
            let settings = Settings {
                upstream,
                default_space: "private:default".to_owned(),
                max_bytes: 1000,
                breaker_failures: 3,
                probe: SECOND,
                under_way: SECOND,
                recognise: true,
            };
            let memories = Memories::new(outbox, settings, &settling, None).unwrap();
            let of = |correlation_id: Option<&str>, outbox_id: Option<i64>, status: Option<&str>| AuditFilter {
                correlation_id: correlation_id.map(str::to_owned),
                outbox_id,
                status: status.map(str::to_owned),
                before: None,
                limit: 30,
            };
            for (filter, wanted) in [
                (of(None, None, None), 30),
                (of(Some("c7"), None, None), 1),
                (of(Some("nobody"), None, None), 0),
                (of(None, Some(7), None), 2),
                (of(None, None, Some("failed")), 0),
                (of(Some("same"), None, None), 0), // deeper than one page looks
            ] {
                let page = memories.audit(filter.clone()).await.unwrap();
                assert_eq!(page.items.len(), wanted, "{filter:?}");
                watched.assert_bounded(&format!("{filter:?}"), 60_000);
            }
            let next = memories.audit(of(Some("same"), None, None)).await.unwrap().next;
            let deeper = memories.audit(AuditFilter { before: next, ..of(Some("same"), None, None) }).await.unwrap();
            assert_eq!(deeper.items.len(), 30, "the next page has them");
        });
    });
}
