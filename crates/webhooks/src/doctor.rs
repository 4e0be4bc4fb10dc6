//! What can be wrong with deliveries, for the doctor. The sweeps mend all of it by themselves while an orchestrator runs;
//! what stands here for long is what they cannot, or what nobody runs them for.

use std::collections::HashSet;
use std::time::Duration;

use async_trait::async_trait;
use postrider::doctor::{Ailment, Case, Check, Examine, MOST_CASES};
use postrider::store::Mode;
use postrider::tx::{BoxFuture, Tx, Value, in_ids};
use postrider::{Result, Timestamp};

use crate::secrets::place;
use crate::sweep::{make_due, parked_in_vain, reopen_gates, under_way_in_vain, without_time};
use crate::{LANE, Webhooks, catalog};

/// Ids are those of deliveries, jobs or subscriptions, as the message says.
static PARKED: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "webhooks",
    message: "deliveries to these subscriptions are held back, and their gate says that there are none",
    advice: "an orchestrator (any `serve`, or a `worker` of the lane webhooks) finds them again; is one running?",
};
static UNSCHEDULED: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "webhooks",
    message: "these deliveries wait without a time at which they are tried",
    advice: "an orchestrator (any `serve`, or a `worker` of the lane webhooks) makes them due; is one running?",
};
static DEFERRED: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "webhooks",
    message: "these deliveries were put off for a pause or a rest of their subscription that is over",
    advice: "an orchestrator (any `serve`, or a `worker` of the lane webhooks) wakes them; is one running?",
};
static UNAPPLIED: Ailment = Ailment {
    check: Check::WaitsInVain,
    part: "webhooks",
    message: "these deliveries were tried, and nobody has taken notice of the result",
    advice: "only an orchestrator does: run `postrider serve`, or a `worker` of the lane webhooks",
};
static JOBLESS: Ailment = Ailment {
    check: Check::SagaAgainstJob,
    part: "webhooks",
    message: "these deliveries are under way, but have neither a job nor a result",
    advice: "an orchestrator (any `serve`, or a `worker` of the lane webhooks) gives them a job; is one running?",
};
static ORPHANED: Ailment = Ailment {
    check: Check::SagaAgainstJob,
    part: "webhooks",
    message: "these deliveries have a live job, but have ended, wait, or are not there",
    advice: "the job's result will change nothing; `outbox list --lane webhooks` shows the jobs",
};
static SEALED: Ailment = Ailment {
    check: Check::UnreadableRow,
    part: "webhooks",
    message: "the secrets of these subscriptions cannot be opened with the key of [secrets] key",
    advice: "bring the key they were sealed with, or give them new ones: POST /v1/subscriptions/ID/rotate-secret",
};

#[async_trait]
impl Examine for Webhooks {
    async fn look(&self, stood: Duration) -> Result<Vec<Case>> {
        let mut cases = Vec::new();
        let mut add = |ailment: &'static Ailment, ids: Vec<i64>| {
            cases.extend(ids.into_iter().take(MOST_CASES as usize).map(|id| Case { ailment, id }));
        };
        let (before, unscheduled, unapplied, orphaned) = self
            .transact(Mode::Read, move |tx| {
                Box::pin(async move {
                    let before = catalog::now(tx).await?.minus(stood);
                    let unscheduled = without_time(tx).await?;
                    let unscheduled = long(tx, unscheduled, before).await?;
                    let unapplied = unapplied(tx, before).await?;
                    Ok((before, unscheduled, unapplied, orphaned(tx, before).await?))
                })
            })
            .await?;
        add(&UNSCHEDULED, unscheduled);
        add(&UNAPPLIED, unapplied);
        add(&ORPHANED, orphaned);
        add(&PARKED, self.all_pages(move |tx, after| Box::pin(parked_in_vain(tx, after, Some(before)))).await?);
        let jobless = self.all_pages(move |tx, after| {
            Box::pin(async move {
                let (found, next) = under_way_in_vain(tx, after).await?;
                Ok((long(tx, found, before).await?, next))
            })
        });
        add(&JOBLESS, jobless.await?);
        add(&DEFERRED, self.all_deferred_in_vain(stood).await?);
        add(&SEALED, self.unreadable().await?);
        Ok(cases)
    }

    async fn repair(&self, cases: &[Case]) -> Result<Vec<Case>> {
        let ids = |ailment: &'static Ailment| -> Vec<i64> {
            cases.iter().filter(|case| std::ptr::eq(case.ailment, ailment)).map(|case| case.id).collect()
        };
        let mut repaired = Vec::new();
        let mut done = |ailment: &'static Ailment, ids: Vec<i64>| {
            repaired.extend(ids.into_iter().map(|id| Case { ailment, id }));
        };
        let work = (ids(&PARKED), ids(&UNSCHEDULED));
        let (parked, unscheduled) = self
            .transact(Mode::Write, move |tx| {
                let (parked, unscheduled) = work.clone();
                Box::pin(async move { Ok((reopen_gates(tx, &parked).await?, make_due(tx, &unscheduled).await?)) })
            })
            .await?;
        done(&PARKED, parked);
        done(&UNSCHEDULED, unscheduled);
        // One by one: what somebody has locked is not woken.
        for id in ids(&DEFERRED) {
            if self.0.outbox.wake(LANE, vec![format!("saga:{id}")]).await? == 1 {
                done(&DEFERRED, vec![id]);
            }
        }
        let jobless = ids(&JOBLESS);
        if !jobless.is_empty() {
            done(&JOBLESS, self.give_jobs(jobless).await?);
        }
        // What was not applied is applied by one look, as an orchestrator would.
        let unapplied: HashSet<i64> = ids(&UNAPPLIED).into_iter().collect();
        if !unapplied.is_empty() {
            while self.apply_results().await? > 0 {}
            let left: HashSet<i64> = self.unapplied_now().await?.into_iter().collect();
            done(&UNAPPLIED, unapplied.difference(&left).copied().collect());
        }
        self.ring();
        Ok(repaired)
    }
}

/// Those of these deliveries that have not changed since.
async fn long(tx: &mut (dyn Tx + Send), ids: Vec<i64>, before: Timestamp) -> Result<Vec<i64>> {
    if ids.is_empty() {
        return Ok(ids);
    }
    let mut params: Vec<Value> = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    params.push(before.into());
    let sql = format!("SELECT id FROM webhook_delivery_sagas WHERE id {list} AND updated_at < ? ORDER BY id");
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

/// Results that wait, the oldest first, by their sagas.
async fn unapplied(tx: &mut (dyn Tx + Send), before: Timestamp) -> Result<Vec<i64>> {
    let sql = format!("SELECT saga_id, at FROM webhook_results ORDER BY job_id LIMIT {MOST_CASES}");
    let mut found = Vec::new();
    for row in tx.query(&sql, &[]).await? {
        if row.time(1)? < before {
            found.push(row.int(0)?);
        }
    }
    Ok(found)
}

/// Sagas that have a live job and are not under way; of the jobs that are due first.
async fn orphaned(tx: &mut (dyn Tx + Send), before: Timestamp) -> Result<Vec<i64>> {
    let sql = format!(
        "SELECT active_key FROM outbox WHERE lane = ? AND shard_id = 0 AND due_at < ? ORDER BY due_at, id LIMIT {MOST_CASES}"
    );
    let rows = tx.query(&sql, &[LANE.into(), before.into()]).await?;
    let mut ids = Vec::new();
    for row in &rows {
        ids.extend(row.opt_text(0)?.and_then(|key| key.strip_prefix("saga:")?.parse::<i64>().ok()));
    }
    let mut params = Vec::new();
    let list = in_ids(tx.dialect(), &ids, &mut params);
    let sql = format!("SELECT id FROM webhook_delivery_sagas WHERE id {list} AND status = 'InProgress'");
    let rows = tx.query(&sql, &params).await?;
    let fine = rows.iter().map(|row| row.int(0)).collect::<Result<HashSet<i64>>>()?;
    // Asked in two steps, and a job may have ended between them: only those whose job is still live count.
    let odd: Vec<i64> = ids.into_iter().filter(|id| !fine.contains(id)).collect();
    let mut left = Vec::new();
    for id in odd {
        let sql = "SELECT 1 FROM outbox WHERE lane = ? AND active_key = ?";
        if !tx.query_often(sql, &[LANE.into(), format!("saga:{id}").into()]).await?.is_empty() {
            left.push(id);
        }
    }
    Ok(left)
}

/// What a page has found, and where the next one begins.
type Page = (Vec<i64>, Option<i64>);

impl Webhooks {
    /// What is found page by page, each in a transaction of its own, until there is more than can be told.
    async fn all_pages<F>(&self, page: F) -> Result<Vec<i64>>
    where
        F: for<'a> Fn(&'a mut (dyn Tx + Send), i64) -> BoxFuture<'a, Result<Page>> + Copy + Send + Sync + 'static,
    {
        let (mut all, mut after) = (Vec::new(), 0);
        loop {
            let (found, next) = self.transact(Mode::Read, move |tx| page(tx, after)).await?;
            all.extend(found);
            match next {
                Some(next) if all.len() < MOST_CASES as usize => after = next,
                _ => return Ok(all),
            }
        }
    }

    async fn all_deferred_in_vain(&self, stood: Duration) -> Result<Vec<i64>> {
        let (mut all, mut before) = (Vec::new(), None);
        loop {
            let (keys, next) = self.deferred_in_vain(before, None, stood).await?;
            all.extend(keys.iter().filter_map(|key| key.strip_prefix("saga:")?.parse::<i64>().ok()));
            match next {
                Some(_) if all.len() < MOST_CASES as usize => before = next,
                _ => return Ok(all),
            }
        }
    }

    async fn unapplied_now(&self) -> Result<Vec<i64>> {
        self.transact(Mode::Read, |tx| Box::pin(async move { unapplied(tx, Timestamp::FAR_FUTURE).await })).await
    }

    /// Subscriptions whose secrets this process cannot open.
    async fn unreadable(&self) -> Result<Vec<i64>> {
        let rows = self
            .transact(Mode::Read, |tx| {
                Box::pin(async move {
                    let sql = "SELECT id, secrets, headers FROM subscriptions WHERE id > ? ORDER BY id LIMIT 1000";
                    let (mut all, mut after) = (Vec::new(), 0);
                    loop {
                        let rows = tx.query(sql, &[after.into()]).await?;
                        let Some(last) = rows.last().map(|row| row.int(0)).transpose()? else { return Ok(all) };
                        after = last;
                        all.extend(rows);
                    }
                })
            })
            .await?;
        let keys = self.0.keyring.look_again();
        let mut found = Vec::new();
        for row in rows {
            let id = row.int(0)?;
            let opens = |column: &str, sealed: Option<String>| {
                sealed.is_none_or(|sealed| keys.open(&place(column, id), &sealed).is_ok())
            };
            if !opens("secrets", row.opt_text(1)?) || !opens("headers", row.opt_text(2)?) {
                found.push(id);
            }
        }
        Ok(found)
    }
}
