//! What may have been executed and what cannot be believed: nothing of it ends an order by itself, and none of it goes on
//! without end.

use std::sync::atomic::Ordering;
use std::time::Duration;

use postrider::outcome::{Certainty, Reach, Settled, Settlement, Verdict};
use postrider_orders::adapters::Found;
use postrider_orders::decide::{Reason, awaits_look_up};
use postrider_orders::{By, ByHand, Idempotency, Reopened, Settings, Status};

use crate::harness::{Act, Ground, on_every_store, wait_until};

const LOOK_UP: Idempotency = Idempotency::LookUp { settling: Duration::from_millis(50) };

on_every_store!(
    an_answer_nobody_can_read_is_for_a_person,
    fills_that_cannot_be_are_a_doubt,
    a_look_up_that_makes_no_sense_is_for_a_person,
    a_refusal_after_a_failure_is_not_believed,
    orders_of_one_instrument_go_side_by_side,
    a_burst_does_not_make_a_doubt_wait_anew,
    two_hands_on_one_order,
    a_hand_takes_nothing_from_a_worker,
    nothing_of_a_deferred_order_is_remembered,
    a_reopened_order_is_not_ended_by_an_older_answer,
    what_was_cut_off_is_never_recorded_as_failed,
);

fn by(actor: &str) -> By {
    By { actor: actor.to_owned(), reason: None }
}

async fn an_answer_nobody_can_read_is_for_a_person(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.broker.next(&vec![Act::Babble; 50]);
    let id = home.place("k").await;
    home.work_until("k", "NEEDS_RECONCILE").await;
    assert_eq!(home.broker.sends(), 3, "within its budget it is asked again, and then a person is");
    assert_eq!(home.entry("k").await.status, Status::InProgress);
    assert_eq!(home.told(&format!("order {id}")).await, 1, "who is told");

    // One unreadable answer is got over: the key makes asking again harmless.
    home.broker.forget_script();
    home.broker.next(&[Act::Babble]);
    home.place("once").await;
    home.work_until("once", "succeeded").await;
    assert_eq!(home.broker.executions("once"), 1);
}

async fn fills_that_cannot_be_are_a_doubt(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    for (key, act) in [
        ("too much", Act::Say(2, 10)),
        ("at less than nothing", Act::Say(1, -1)),
        ("less than nothing", Act::Say(-1, 10)),
    ] {
        home.broker.next(&[act]);
        home.place(key).await;
        home.work_until(key, "NEEDS_RECONCILE").await;
        assert_eq!(home.entry(key).await.status, Status::InProgress, "{key}");
        assert_eq!(home.broker.executions(key), 1, "{key}: never a blind resend");
    }
}

async fn a_look_up_that_makes_no_sense_is_for_a_person(ground: Ground) {
    let home = ground.open(LOOK_UP).await;
    home.broker.next(&[Act::LoseReply]);
    *home.broker.found.lock().unwrap() = Some(Found::Nonsense("<html>".to_owned()));
    home.place("k").await;
    home.work_until("k", "NEEDS_RECONCILE").await;
    assert_eq!((home.broker.sends(), home.entry("k").await.status), (1, Status::InProgress));
    let asked = *home.broker.look_ups.lock().unwrap();
    assert!((1..=3).contains(&asked), "{asked}");
}

/// A broker that failed half-way, and then refuses its own duplicate.
async fn a_refusal_after_a_failure_is_not_believed(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    for (n, reason) in [Reason::Rejected, Reason::BadRequest].into_iter().enumerate() {
        let key = format!("failed {n}");
        let failed = Act::Refuse(Reason::ServerError, Reach::Unknown);
        home.broker.next(&[failed, Act::Refuse(reason, Reach::Answered)]);
        home.place(&key).await;
        home.work_until(&key, "NEEDS_RECONCILE").await;
        assert_eq!(home.entry(&key).await.status, Status::InProgress, "it may have been executed");
    }
    // Who said when to come back had done nothing: then a refusal is one.
    let busy = Act::Refuse(Reason::ServerError, Reach::Answered);
    home.broker.next(&[busy, Act::Refuse(Reason::Rejected, Reach::Answered)]);
    home.place("busy").await;
    home.work_until("busy", "aborted").await;
    assert_eq!(home.entry("busy").await.status, Status::Failed);

    // Out of attempts it is given up, as ever; brought back, it is still in doubt, until a person says otherwise.
    let failed = Act::Refuse(Reason::ServerError, Reach::Unknown);
    home.broker.next(&[failed.clone(), failed.clone(), failed]);
    home.place("given up").await;
    home.work_until("given up", "aborted").await;
    assert!(matches!(home.orders.requeue("given up", by("a")).await.unwrap(), Reopened::Reopened { .. }));
    home.broker.next(&[Act::Refuse(Reason::Rejected, Reach::Answered)]);
    home.work_until("given up", "NEEDS_RECONCILE").await;
    assert!(matches!(home.orders.settle("given up", false, None, by("a")).await.unwrap(), ByHand::Done(_)));
    assert!(matches!(home.orders.requeue("given up", by("a")).await.unwrap(), Reopened::Reopened { .. }));
    home.broker.next(&[Act::Refuse(Reason::Rejected, Reach::Answered)]);
    home.work_until("given up", "aborted").await;
}

/// Spec 003: `OUTBOX_CONCURRENCY` orders at a time, whatever they are for.
async fn orders_of_one_instrument_go_side_by_side(ground: Ground) {
    let home = ground.open(Idempotency::Key).await;
    home.broker.holds_after(0);
    for n in 0..40 {
        home.place(&format!("k{n}")).await;
    }
    let _working = home.work();
    wait_until("four are being sent at once", async || home.broker.inside() == 4).await;
    home.broker.room.add_permits(40);
    wait_until("all are sent", async || home.count("outbox").await == 0).await;
    assert_eq!(home.broker.most.load(Ordering::SeqCst), 4, "and never more");
    assert_eq!(home.broker.sends(), 40);
}

/// It waits for its look-up while others keep every slot, and is given back unsent on the way.
async fn a_burst_does_not_make_a_doubt_wait_anew(ground: Ground) {
    // Long enough for a slow machine to fill every slot meanwhile.
    const SETTLING: Duration = Duration::from_secs(4);
    let home = ground.open(Idempotency::LookUp { settling: SETTLING }).await;
    home.broker.next(&[Act::LoseReply]);
    let id = home.place("k").await;
    let waits = format!("outbox WHERE id = {id} AND last_error_code LIKE 'AWAITS_LOOK_UP%'");
    {
        let _working = home.work();
        wait_until("it waits for its look-up", async || home.count(&waits).await == 1).await;
        home.broker.holds_after(0);
        for n in 0..40 {
            home.place(&format!("other {n}")).await;
        }
        wait_until("others have every slot", async || home.broker.inside() == 4).await;
        let since = std::time::Instant::now();
        wait_until("its look-up is overdue", async || since.elapsed() > SETTLING + Duration::from_millis(200)).await;
        assert_eq!(home.count(&waits).await, 1, "whatever else happens, it knows what it waits for");
        assert_eq!(*home.broker.look_ups.lock().unwrap(), 0, "nobody had a slot for it");
        home.broker.room.add_permits(100);
        wait_until("it was asked about", async || *home.broker.look_ups.lock().unwrap() == 1).await;
        // The others, too: one of them would hear what the next one is to hear.
        wait_until("all have ended", async || home.count("outbox").await == 0).await;
    }
    assert_eq!(home.view("k").await.0, "succeeded");
    assert_eq!(home.broker.executions("k"), 1);

    // Claimed by a worker that gives it back unsent, as one that stops does: it has waited all the same.
    home.broker.next(&[Act::LoseReply]);
    let id = home.place("again").await;
    let waits = format!("outbox WHERE id = {id} AND last_error_code LIKE 'AWAITS_LOOK_UP%'");
    let working = home.work();
    wait_until("it waits for its look-up", async || home.count(&waits).await == 1).await;
    working.end().await;
    wait_until("it is due", async || match home.try_claim().await {
        None => false,
        Some(message) => {
            home.outbox
                .store()
                .defer("dead:1:1", &[message.lease()], &postrider::outcome::GiveBack::now())
                .await
                .unwrap();
            true
        }
    })
    .await;
    let token = home.rows(&format!("SELECT lease_token FROM outbox WHERE id = {id}")).await[0].int(0).unwrap();
    home.work_until("again", "succeeded").await;
    let ended = home.rows(&format!("SELECT lease_token FROM outbox_done WHERE id = {id}")).await[0].int(0).unwrap();
    assert_eq!(ended, token + 1, "the very next claim asked; its code was {}", awaits_look_up(token - 1));
}

/// Both say what they know; whoever is recorded is recorded with what they said.
async fn two_hands_on_one_order(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    for round in 0..5 {
        let key = format!("k{round}");
        home.broker.next(&[Act::LoseReply]);
        home.place(&key).await;
        home.work_until(&key, "NEEDS_RECONCILE").await;
        let hand = |name: &'static str| {
            let (orders, key) = (home.orders.clone(), key.clone());
            tokio::spawn(
                async move { orders.settle(&key, true, Some(format!("ref of {name}")), by(name)).await.unwrap() },
            )
        };
        let hands = [hand("ann"), hand("bob"), hand("cid")];
        let mut done = 0;
        for hand in hands {
            done += usize::from(matches!(hand.await.unwrap(), ByHand::Done(_)));
        }
        assert!(done >= 1, "one of them");
        let entry = home.entry(&key).await;
        let event = home.orders.events(&key).await.unwrap().pop().unwrap();
        assert_eq!(entry.broker_ref, Some(format!("ref of {}", event.actor)), "{key}: who and what belong together");
    }
    assert_eq!(home.book.remembered(), 0);
}

async fn a_hand_takes_nothing_from_a_worker(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    home.broker.holds_after(0);
    home.place("k").await;
    let _working = home.work();
    wait_until("it is being sent", async || home.broker.inside() == 1).await;
    let settled = home.orders.settle("k", false, None, by("ann")).await.unwrap();
    assert!(matches!(settled, ByHand::Refused(_)), "whoever sends it will know: {settled:?}");
    home.broker.room.add_permits(1);
    wait_until("it has ended", async || home.count("outbox").await == 0).await;
    assert_eq!((home.entry("k").await.status, home.broker.executions("k")), (Status::Succeeded, 1));
}

async fn nothing_of_a_deferred_order_is_remembered(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    home.broker.next(&[Act::Refuse(Reason::Unauthorized, Reach::Answered)]);
    home.place("ours").await;
    home.work_until("ours", "BROKER_UNAUTHORIZED").await;
    home.broker.next(&[Act::LoseReply]);
    home.place("parked").await;
    home.work_until("parked", "NEEDS_RECONCILE").await;
    wait_until("nothing is remembered", async || home.book.remembered() == 0).await;
}

/// A message that is back, and a ledger that is too: the worker must not take the old answer for the new one.
async fn a_reopened_order_is_not_ended_by_an_older_answer(ground: Ground) {
    let settings = Settings { max_attempts: 3, ..Settings::default() };
    let home = ground.open_with(Idempotency::Key, settings).await;
    let _working = home.work();
    for round in 0..10 {
        let key = format!("k{round}");
        home.broker.next(&[Act::Refuse(Reason::Rejected, Reach::Answered)]);
        home.place(&key).await;
        wait_until("it failed", async || home.view(&key).await.0 == "aborted").await;
        assert!(matches!(home.orders.requeue(&key, by("a")).await.unwrap(), Reopened::Reopened { .. }));
        wait_until("it was sent again", async || home.view(&key).await.0 == "succeeded").await;
    }
}

/// The last wall, whatever a worker makes of an attempt it had to abort.
async fn what_was_cut_off_is_never_recorded_as_failed(ground: Ground) {
    let home = ground.open(Idempotency::None).await;
    let settle = async |key: &str, begun: bool, certainty: Certainty| {
        let id = home.place(key).await;
        let message = home.try_claim().await.expect("a message is due");
        if begun {
            home.said_that_it_begins(id).await;
        }
        let (code, error) = ("SHUTDOWN".to_owned(), "aborted".to_owned());
        let verdict = Verdict::Dead { code, error, certainty, counted: true };
        let entries = [Settlement::new(message.lease(), verdict)];
        let settled = home.outbox.store().settle("orders", "dead:1:1", &entries).await;
        (settled.is_ok_and(|settled| settled == [Settled::Applied]), home.entry(key).await.status)
    };
    assert_eq!(settle("never begun", false, Certainty::Unchanged).await, (true, Status::Failed));
    assert_eq!(settle("known", true, Certainty::Resolved).await, (true, Status::Failed));
    assert_eq!(settle("cut off", true, Certainty::Unchanged).await, (false, Status::InProgress));
    // Its lease is over: whoever takes it over finds it in doubt.
    home.work_until("cut off", "NEEDS_RECONCILE").await;
    assert_eq!(home.broker.sends(), 0);
}
