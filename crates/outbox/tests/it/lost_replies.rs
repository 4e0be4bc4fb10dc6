//! What is asked of a server, or what it answers, is lost on the way: the rows 10 to 16 of the fault matrix, each by name,
//! through a proxy that does one thing wrong. The sweep in `proving` does the same to every message of every operation.

use std::time::{Duration, Instant};

use postrider::error::{Effect, Kind};
use postrider::outcome::{Settled, Settlement, Verdict};
use postrider::store::{From, Mode, Status, transact};
use postrider::tx::Dialect;
use postrider::{Enqueued, NewMessage, Options, Outbox};
use proving::kit::until;
use proving::proxy::{Action, At, Direction, Fault, Proxy};

use crate::harness::{Database, claim_of, lanes, secs};

macro_rules! on_every_server {
    ($($case:ident),* $(,)?) => {
        on_every_server!(@server postgres $($case)*);
        on_every_server!(@server mysql $($case)*);
    };
    (@server $server:ident $($case:ident)*) => {
        mod $server {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $case() {
                crate::harness::case(crate::harness::$server().await, super::$case).await
            })*
        }
    };
}

on_every_server!(
    row_10_commit_lost_before_the_server,
    row_11_commit_applied_and_its_reply_lost,
    row_12_reply_delayed_beyond_deadline_and_lease,
    row_13_half_open_connection,
    row_14_future_cancelled_during_begin,
    row_15_statement_error_swallowed_then_commit,
    row_16_backend_terminated_in_the_middle,
    a_repeated_enqueue_does_not_forget_that_the_first_may_have_been_applied,
);

const DEADLINE: Duration = secs(1);
const DELAY: Duration = Duration::from_millis(1500);
/// A third of it is how long a server bears a silent transaction of ours.
const LEASE: Duration = secs(6);

/// The same database, seen through a proxy by somebody with little patience.
struct Far {
    proxy: Proxy,
    outbox: Outbox,
    dialect: Dialect,
}

impl Far {
    async fn of(db: &Database) -> Far {
        let proxy = Proxy::start(&db.url).await.unwrap();
        let options =
            Options { connections: 2, deadline: DEADLINE, lease: LEASE, notifications: false, ..Options::default() };
        let outbox = Outbox::new(postrider::open(proxy.url(), lanes(), options).await.unwrap());
        Far { proxy, outbox, dialect: db.dialect }
    }

    /// At the COMMIT on its way to the server, or at its answer.
    fn arm_at_commit(&self, direction: Direction, action: Action) {
        let name = match (self.dialect, direction) {
            (Dialect::Mysql, Direction::ToServer) => "COM_QUERY COMMIT",
            (Dialect::Mysql, Direction::ToClient) => "OK, of COM_QUERY COMMIT",
            (_, Direction::ToServer) => "Query COMMIT",
            (_, Direction::ToClient) => "CommandComplete COMMIT",
        };
        self.proxy.arm(Some(Fault { direction, at: At::Named(name), action }));
    }

    /// The fault happened.
    fn struck(&self) -> String {
        self.proxy.fired().expect("the fault was reached").what
    }

    /// No session of ours is left in a transaction, nor at all where we have gone; the server ends what it was not told of
    /// within a third of the lease.
    async fn nothing_is_left(&self) {
        assert_eq!(self.proxy.left_behind(LEASE / 3 + secs(2)).await, []);
        assert_eq!(self.proxy.in_transaction().await, []);
    }
}

fn keyed() -> Vec<NewMessage> {
    vec![NewMessage::new("a", "keyed").key("k")]
}

async fn row_10_commit_lost_before_the_server(db: Database) {
    let far = Far::of(&db).await;
    far.arm_at_commit(Direction::ToServer, Action::CutBefore);
    let entries = far.outbox.enqueue(keyed()).await.expect("what has a key is asked for again");
    assert_eq!(entries[0].outcome, Enqueued::Created, "{}", far.struck());
    assert_eq!(db.counts().await, [1, 0, 1, 0], "exactly one effect");

    far.arm_at_commit(Direction::ToServer, Action::CutBefore);
    let error = far.outbox.enqueue(vec![NewMessage::new("b", "plain")]).await.unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
    assert_eq!(db.counts().await, [1, 0, 1, 0], "and it was not applied");

    far.arm_at_commit(Direction::ToServer, Action::CutBefore);
    let claim = claim_of("a", "w", 10, secs(60), From::Mark(None));
    let error = far.outbox.store().claim(&claim).await.unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
    let adopting = claim_of("a", "w", 10, secs(60), From::Adopt { mark: None, known: vec![] });
    // Until the server knows that the lost session is gone, its locks are passed by.
    let mut claimed = vec![];
    until("the lost claim's lock is gone", async || {
        claimed = far.outbox.store().claim(&adopting).await.unwrap().messages;
        !claimed.is_empty()
    })
    .await;
    assert_eq!(claimed.iter().map(|m| m.lease_token).collect::<Vec<_>>(), [1], "nobody had it yet");

    let mut entry = Settlement::new(claimed[0].lease(), Verdict::sent());
    far.arm_at_commit(Direction::ToServer, Action::CutBefore);
    let error = far.outbox.store().settle("a", "w", &[entry.clone()]).await.unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
    entry.again = true;
    let mut answers = vec![];
    until("the lost settle's lock is gone", async || {
        answers = far.outbox.store().settle("a", "w", std::slice::from_ref(&entry)).await.unwrap();
        answers != [Settled::Locked]
    })
    .await;
    assert_eq!(answers, [Settled::Applied]);
    assert_eq!(db.counts().await, [0, 1, 1, 0]);
    far.nothing_is_left().await;
}

async fn row_11_commit_applied_and_its_reply_lost(db: Database) {
    let far = Far::of(&db).await;
    far.arm_at_commit(Direction::ToClient, Action::Swallow);
    let entries = far.outbox.enqueue(keyed()).await.expect("what has a key is asked for again");
    assert_eq!(entries[0].outcome, Enqueued::Exists, "{}", far.struck());
    assert_eq!(db.counts().await, [1, 0, 1, 0], "no second effect");

    far.arm_at_commit(Direction::ToClient, Action::Swallow);
    let claim = claim_of("a", "w", 10, secs(60), From::Mark(None));
    let error = far.outbox.store().claim(&claim).await.unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
    let adopting = claim_of("a", "w", 10, secs(60), From::Adopt { mark: None, known: vec![] });
    let claimed = far.outbox.store().claim(&adopting).await.unwrap().messages;
    assert_eq!(claimed[0].lease_token, 2, "the lost claim was committed");
    assert_eq!((claimed[0].crashes, claimed[0].maybe_sent), (0, false), "and was our own");

    let mut entry = Settlement::new(claimed[0].lease(), Verdict::sent());
    far.arm_at_commit(Direction::ToClient, Action::Swallow);
    let error = far.outbox.store().settle("a", "w", &[entry.clone()]).await.unwrap_err();
    assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
    entry.again = true;
    assert_eq!(far.outbox.store().settle("a", "w", &[entry]).await.unwrap(), [Settled::Applied], "it finds its proof");
    assert_eq!(db.counts().await, [0, 1, 1, 0]);
    far.nothing_is_left().await;
}

async fn row_12_reply_delayed_beyond_deadline_and_lease(db: Database) {
    let far = Far::of(&db).await;
    let id = db.put("a", "x").await;
    far.outbox.store_id().await.unwrap();
    far.arm_at_commit(Direction::ToClient, Action::Delay(DELAY));
    let brief = claim_of("a", "w", 10, Duration::from_millis(500), From::Mark(None));
    let begun = Instant::now();
    let error = far.outbox.store().claim(&brief).await.unwrap_err();
    assert_eq!((error.kind, error.effect), (Kind::Timeout, Effect::Unknown), "{}: {error}", far.struck());
    assert!(begun.elapsed() < DELAY, "given up at its deadline: {:?}", begun.elapsed());
    let slow = far.proxy.fired().unwrap().connection;
    far.proxy.arm(None);

    // The lease is over before its holder could have known that it had one.
    let taken = db.claim_one("a", "other").await;
    assert_eq!((taken.lease_token, taken.crashes), (2, 1));
    let late = Settlement::new(postrider::lease::Lease { id, token: 1 }, Verdict::sent());
    assert_eq!(far.outbox.store().settle("a", "w", &[late]).await.unwrap(), [Settled::LeaseLost]);
    far.proxy.quiet().await;
    far.outbox.store_id().await.expect("the late reply is nobody's");
    assert!(far.proxy.seen().iter().all(|seen| seen.connection != slow), "its connection is never used again");
    assert_eq!(db.settle("a", "other", taken.lease(), Verdict::sent()).await, Settled::Applied);
    far.nothing_is_left().await;
}

async fn row_13_half_open_connection(db: Database) {
    let far = Far::of(&db).await;
    let id = db.put("a", "x").await;
    let lease = db.claim_one("a", "w").await.lease();
    let entry = Settlement::new(lease, Verdict::sent());
    for direction in [Direction::ToServer, Direction::ToClient] {
        far.outbox.store_id().await.unwrap();
        far.proxy.arm(Some(Fault { direction, at: At::Nth(2), action: Action::HalfOpen }));
        let begun = Instant::now();
        let error = far.outbox.store().settle("a", "w", std::slice::from_ref(&entry)).await.unwrap_err();
        assert!(begun.elapsed() < DEADLINE * 2, "it never hangs: {:?}", begun.elapsed());
        assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck());
        far.outbox.store_id().await.expect("the next one gets a new connection");
        far.nothing_is_left().await;
        far.proxy.release();
    }
    let again = Settlement { again: true, ..entry };
    assert_eq!(far.outbox.store().settle("a", "w", &[again]).await.unwrap(), [Settled::Applied]);
    assert_eq!(db.status(id).await, Status::Sent);
}

async fn row_14_future_cancelled_during_begin(db: Database) {
    let far = Far::of(&db).await;
    far.outbox.store_id().await.unwrap();
    // Dropped while its BEGIN is on its way there, and on its way back.
    for direction in [Direction::ToServer, Direction::ToClient] {
        far.proxy.arm(Some(Fault { direction, at: At::Nth(1), action: Action::Delay(DEADLINE / 2) }));
        let cancelled = far.outbox.enqueue(vec![NewMessage::new("a", "dropped")]);
        assert!(tokio::time::timeout(DEADLINE / 3, cancelled).await.is_err());
        let borrower = far.proxy.fired().expect("the fault was reached").connection;
        far.proxy.arm(None);
        far.outbox.store_id().await.expect("the next borrower");
        assert!(far.proxy.seen().iter().all(|seen| seen.connection != borrower), "it inherits nothing");
        far.proxy.quiet().await;
        far.nothing_is_left().await;
    }
    assert_eq!(db.count("outbox").await, 0);
    // And at any other moment.
    for round in 0..40 {
        far.proxy.arm(None);
        let cancelled = far.outbox.enqueue(vec![NewMessage::new("a", "dropped").key(format!("k{round}"))]);
        let _ = tokio::time::timeout(Duration::from_micros(round * 150), cancelled).await;
        far.outbox.store_id().await.expect("the next borrower");
    }
    far.nothing_is_left().await;
    let whole = "SELECT COUNT(*) FROM outbox_keys k JOIN outbox o ON o.id = k.outbox_id";
    assert_eq!(db.sql(whole).await[0].int(0).unwrap(), db.count("outbox").await, "each with its key, or neither");
}

async fn row_15_statement_error_swallowed_then_commit(db: Database) {
    let far = Far::of(&db).await;
    let pauses = "SELECT COUNT(*) FROM outbox_pauses";
    let error = transact(&**far.outbox.store(), Mode::Write, |tx| {
        Box::pin(async move {
            tx.execute("INSERT INTO outbox_pauses (lane, paused_at) VALUES ('a', CURRENT_TIMESTAMP)", &[]).await?;
            let _ = tx.query("SELECT nonsense FROM nowhere", &[]).await;
            Ok(())
        })
    });
    let error = error.await.expect_err("its caller must not believe in it");
    assert_eq!(error.effect, Effect::NotApplied, "{error}");
    assert_eq!(db.sql(pauses).await[0].int(0).unwrap(), 0, "nothing was committed");
    far.outbox.store_id().await.expect("and nothing is left behind");
    assert_eq!(db.sql(pauses).await[0].int(0).unwrap(), 0, "nor does the next borrower commit it");
    far.nothing_is_left().await;
}

async fn row_16_backend_terminated_in_the_middle(db: Database) {
    let far = Far::of(&db).await;
    far.outbox.store_id().await.unwrap();
    // At each message of an enqueue with a key in turn, until there is none left.
    let mut reached = 0;
    for nth in 1.. {
        let before = db.counts().await;
        let message = NewMessage::new("a", "x").key(format!("k{nth}")).active_key(format!("t{nth}"));
        let fault = Fault { direction: Direction::ToServer, at: At::Nth(nth), action: Action::Terminate };
        far.proxy.arm(Some(fault));
        let answer = far.outbox.enqueue(vec![message.clone()]).await;
        let struck = far.proxy.fired();
        let whole = [before[0] + 1, before[1], before[2] + 1, before[3]];
        match &answer {
            Ok(_) => assert_eq!(db.counts().await, whole, "{struck:?}"),
            Err(e) if e.effect == Effect::NotApplied => assert_eq!(db.counts().await, before, "{struck:?}: {e}"),
            Err(e) => assert!([before, whole].contains(&db.counts().await), "{struck:?}: {e}"),
        }
        far.proxy.arm(None);
        far.outbox.enqueue(vec![message]).await.expect("asked again it succeeds");
        assert_eq!(db.counts().await, whole, "once");
        if struck.is_none() {
            break;
        }
        reached = nth;
    }
    assert!(reached >= 3, "BEGIN, at least one statement, COMMIT; only {reached}");
    far.nothing_is_left().await;
}

/// The first COMMIT is still on its way when the second try meets its locks: what the second tells of itself is not the
/// whole truth.
async fn a_repeated_enqueue_does_not_forget_that_the_first_may_have_been_applied(db: Database) {
    let far = Far::of(&db).await;
    far.outbox.store_id().await.unwrap();
    far.arm_at_commit(Direction::ToServer, Action::Delay(secs(2) - DEADLINE / 20));
    match far.outbox.enqueue(keyed()).await {
        Ok(_) => {}
        Err(error) => assert_eq!(error.effect, Effect::Unknown, "{}: {error}", far.struck()),
    }
    far.proxy.quiet().await;
    far.nothing_is_left().await;
    let entries = far.outbox.enqueue(keyed()).await.unwrap();
    assert_eq!(db.counts().await, [1, 0, 1, 0], "one effect: {entries:?}");
}
