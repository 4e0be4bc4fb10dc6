//! Orders in the world: clients who place them until they are told, a broker that executes, refuses, forgets to answer and
//! answers nonsense, and a person who settles what nobody else can tell. The part is the real one; only its broker is not.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use postrider::outcome::{Outcome, Reach};
use postrider::store::{Mode, Store, transact};
use postrider::{Begin, Courier, Outbox, Result};
use postrider_orders::adapters::{Adapter, Answer, Found, Sending};
use postrider_orders::decide::{Event, Reason, Refusal};
use postrider_orders::result::Execution;
use postrider_orders::{Book, By, ByHand, Idempotency, LANE, NewOrder, Order, Orders, Placed, Settings, Status};

use crate::checker::Step;
use crate::delivering::Delivery;
use crate::dice::dice;
use crate::plan::{LaneKind, MAX_CRASHES, Plan, SECOND};
use crate::store::Reply;
use crate::world::{Action, World};

/// How long the broker may take to know of an order it was sent.
const SETTLING: u64 = 5 * SECOND;
const ORDER: &[u8] = br#"{"instrument":"SIM.A","side":"BUY","qty":1,"price":10,"time_in_force":"IOC"}"#;

/// What the broker does with the next order.
#[derive(Clone, Copy, Debug)]
enum Mood {
    Executes,
    Away,
    Busy,
    Rejects,
    /// It fails, or says nothing, and executes all the same, after a while, or does not.
    Fails(Option<u64>),
    Silent(Option<u64>),
    Babbles(Option<u64>),
}

#[derive(Default)]
struct Desk {
    now: u64,
    mood: Option<Mood>,
    /// When each key was executed, or will be.
    executed: BTreeMap<String, Vec<u64>>,
    rejected: BTreeSet<String>,
    /// Keys that were sent and whose sender does not know what came of it, and when.
    doubted: BTreeMap<String, u64>,
    /// Keys under which it said that it failed.
    failed: BTreeSet<String>,
    looked_up: bool,
    wrong: Vec<String>,
}

/// The one broker, whoever sends to it.
pub struct Broker {
    idempotency: Idempotency,
    desk: Mutex<Desk>,
}

impl Broker {
    fn desk(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Says what becomes of the next order.
    fn expect(&self, now: u64, mood: Mood) {
        let mut desk = self.desk();
        (desk.now, desk.mood, desk.looked_up) = (now, Some(mood), false);
    }

    /// A wait for it goes by the database's clock: set forward, it is over sooner, and the broker must know by then.
    pub fn hurry(&self, now: u64, by: u64) {
        let mut desk = self.desk();
        desk.doubted.values_mut().for_each(|since| *since = since.saturating_sub(by));
        desk.executed.values_mut().flatten().for_each(|at| *at = now.min(*at));
    }

    /// Where a key is executed once, a broker that says it fails is asked again until the budget ends that, as its client was
    /// told it may: then it is the client who must ask.
    fn may_end_by_budget(&self, key: &str) -> bool {
        self.idempotency == Idempotency::Key && self.desk().failed.contains(key)
    }

    /// Whether it has executed this, or will have.
    fn executes(&self, key: &str) -> bool {
        self.desk().executed.contains_key(key)
    }
}

fn refusal(reason: Reason, reach: Reach, retry_after: Option<Duration>) -> Refusal {
    Refusal { reason, message: "simulated".to_owned(), reach, retry_after }
}

fn execution(key: &str) -> Execution {
    Execution { order_ref: format!("b-{key}"), fills: vec![] }
}

impl Desk {
    /// Takes an order in, unless it knows the key and takes it once.
    fn execute(&mut self, idempotency: Idempotency, key: &str, after: u64) {
        let at = self.now + after;
        let known = self.executed.entry(key.to_owned()).or_default();
        if known.is_empty() || idempotency != Idempotency::Key {
            known.push(at);
        }
        if known.len() > 1 {
            self.wrong.push(format!("S16: {key} was executed {} times", known.len()));
        }
    }

    fn send(&mut self, idempotency: Idempotency, key: &str) -> Answer {
        let mood = self.mood.take().unwrap_or(Mood::Executes);
        if idempotency != Idempotency::Key
            && let Some(since) = self.doubted.get(key)
        {
            self.wrong.push(format!("S16: {key} is sent blindly again, in doubt since {since} us"));
        }
        let known = self.executed.contains_key(key);
        let after = match mood {
            Mood::Executes => Some(0),
            Mood::Fails(after) | Mood::Silent(after) | Mood::Babbles(after) => after,
            Mood::Away | Mood::Busy | Mood::Rejects => None,
        };
        if let Some(after) = after {
            self.execute(idempotency, key, after);
        }
        if matches!(mood, Mood::Fails(_) | Mood::Silent(_) | Mood::Babbles(_)) {
            self.doubted.insert(key.to_owned(), self.now);
        }
        if matches!(mood, Mood::Fails(_)) {
            self.failed.insert(key.to_owned());
        }
        match mood {
            Mood::Executes => Answer::Executed(execution(key), known.then_some(Reason::AlreadyProcessed)),
            Mood::Away => Answer::Refused(refusal(Reason::Unknown, Reach::NeverSent, None)),
            Mood::Busy => Answer::Refused(refusal(Reason::RateLimited, Reach::Answered, Some(Duration::from_secs(2)))),
            Mood::Rejects => {
                // A key it has executed it may call a duplicate.
                if !known {
                    self.rejected.insert(key.to_owned());
                }
                Answer::Refused(refusal(Reason::Rejected, Reach::Answered, None))
            }
            Mood::Fails(_) => Answer::Refused(refusal(Reason::ServerError, Reach::Unknown, None)),
            Mood::Silent(_) => Answer::Refused(refusal(Reason::Timeout, Reach::Unknown, None)),
            Mood::Babbles(_) => Answer::Nonsense("simulated".to_owned()),
        }
    }

    fn look_up(&mut self, key: &str) -> std::result::Result<Found, Refusal> {
        self.looked_up = true;
        if matches!(self.mood, Some(Mood::Away)) {
            return Err(refusal(Reason::Unknown, Reach::NeverSent, None));
        }
        if self.executed.get(key).is_some_and(|at| at.iter().any(|at| *at <= self.now)) {
            return Ok(Found::Executed(execution(key)));
        }
        if self.rejected.contains(key) {
            return Ok(Found::Rejected("simulated".to_owned()));
        }
        // Asked early, it may come to know of it later.
        if self.doubted.get(key).is_some_and(|since| self.now >= since + SETTLING) {
            self.doubted.remove(key);
        }
        Ok(Found::Nothing)
    }
}

#[async_trait]
impl Adapter for Broker {
    fn name(&self) -> &str {
        "simulated"
    }

    fn idempotency(&self) -> Idempotency {
        self.idempotency
    }

    async fn send(&self, sending: &Sending<'_>) -> Answer {
        self.desk().send(self.idempotency, sending.key)
    }

    async fn look_up(&self, key: &str) -> std::result::Result<Found, Refusal> {
        self.desk().look_up(key)
    }
}

/// Those who place orders, and the record of the ledger.
pub struct Traders {
    orders: Orders,
    pub broker: Arc<Broker>,
    /// Orders whose client was told.
    placed: HashSet<usize>,
    ledger: BTreeMap<String, Status>,
}

pub fn idempotency(plan: &Plan) -> Idempotency {
    let keyed = plan.lanes.iter().any(|lane| lane.kind == LaneKind::KeyedOrders);
    match plan.look_up {
        _ if keyed => Idempotency::Key,
        true => Idempotency::LookUp { settling: Duration::from_micros(SETTLING) },
        false => Idempotency::None,
    }
}

/// Orders as one life of a process has them.
pub async fn open(plan: &Plan, outbox: &Outbox, book: Book, broker: Arc<Broker>) -> Orders {
    let max_attempts = plan.lanes.iter().find(|lane| lane.kind.is_orders()).map_or(6, |lane| lane.max_attempts);
    let settings = Settings { max_crashes: MAX_CRASHES, max_attempts, ..Settings::default() };
    Orders::new(outbox.clone(), settings, book, broker, None).await.expect("orders")
}

impl Traders {
    pub async fn new(plan: &Plan, outbox: &Outbox, book: Book) -> Self {
        let broker = Arc::new(Broker { idempotency: idempotency(plan), desk: Mutex::default() });
        let orders = open(plan, outbox, book, broker.clone()).await;
        install(&**outbox.store()).await.expect("the journal of the ledger");
        Traders { orders, broker, placed: HashSet::new(), ledger: BTreeMap::new() }
    }

    /// Everything was placed, and every order has ended.
    pub fn is_done(&self, plan: &Plan) -> bool {
        self.placed.len() == plan.orders.len() && self.ledger.values().all(|status| *status != Status::InProgress)
    }
}

fn key(n: usize) -> String {
    format!("order-{n}")
}

async fn install(store: &dyn Store) -> Result<()> {
    let trigger = |when: &str| {
        format!(
            "CREATE TRIGGER sim_ledger_{when} AFTER {when} ON idempo_ledger BEGIN
                 INSERT INTO sim_ledger (key, status) VALUES (NEW.idempotency_key, NEW.status); END"
        )
    };
    let table = "CREATE TABLE sim_ledger (seq INTEGER PRIMARY KEY, key, status)".to_owned();
    let statements = [table, trigger("INSERT"), trigger("UPDATE")];
    transact(store, Mode::Write, move |tx| {
        let statements = statements.clone();
        Box::pin(async move {
            for statement in statements {
                tx.execute(&statement, &[]).await?;
            }
            Ok(())
        })
    })
    .await
}

/// What happened to the ledger since the last look.
async fn moved(store: &dyn Store) -> Result<Vec<(String, Status)>> {
    transact(store, Mode::Write, |tx| {
        Box::pin(async move {
            let rows = tx.query("SELECT key, status FROM sim_ledger ORDER BY seq", &[]).await?;
            if !rows.is_empty() {
                tx.execute("DELETE FROM sim_ledger", &[]).await?;
            }
            let moved = rows.iter().map(|row| Ok((row.text(0)?, Status::parse(&row.text(1)?))));
            let moved = moved.collect::<Result<Vec<_>>>()?;
            Ok(moved.into_iter().filter_map(|(key, status)| Some((key, status?))).collect())
        })
    })
    .await
}

impl World {
    pub async fn place(&mut self, order: usize, round: u64) {
        let n = self.plan.orders[order].n;
        let fate = self.fate("place", [n as u64, round, 0]);
        let again = self.now + dice(fate ^ 0xa9a1).u64(SECOND..5 * SECOND);
        let Some(orders) = self.traders.as_ref().map(|traders| traders.orders.clone()) else { return };
        if self.now < self.down_until {
            self.last_fault = self.last_fault.max(again);
            return self.at(again, Action::Place { order, round: round + 1 });
        }
        let new = NewOrder::new(key(n), Order::parse(ORDER).expect("an order"));
        let replies = self.replies(fate, 4);
        self.clients.expect(replies);
        let result = orders.place(vec![new]).await;
        self.clients.expect([]);
        self.checked(Step::Part).await;
        self.note(format_args!("order {n} is placed: {:?}", result.as_ref().map(|_| ()).map_err(|error| error.effect)));
        match result.as_deref() {
            Ok([Placed::Accepted { .. } | Placed::Replayed(_)]) => {
                if let Some(traders) = &mut self.traders {
                    traders.placed.insert(n);
                }
            }
            Ok(other) => self.violation(format!("order {n} was placed as {other:?}")),
            Err(_) => {
                self.last_fault = self.last_fault.max(again);
                self.at(again, Action::Place { order, round: round + 1 });
            }
        }
    }

    /// The mood of the broker, by the fate of a delivery, and after how long it answers.
    fn mood(&mut self, delivery: &Delivery) -> (Mood, u64) {
        let soon = dice(delivery.fate ^ 0xa45e).u64(100..20_000);
        let Some(mut rng) = self.goes_wrong(delivery.fate) else { return (Mood::Executes, soon) };
        let late = rng.bool().then(|| rng.u64(0..SECOND));
        let (kind, mood, after) = match rng.u8(0..10) {
            0 => ("a broker away", Mood::Away, soon),
            1 => ("a broker busy", Mood::Busy, soon),
            2 => ("a broker's rejection", Mood::Rejects, soon),
            3 | 4 => ("a broker that fails half-way", Mood::Fails(late), soon),
            5..=7 => ("a broker's answer lost", Mood::Silent(late), 5 * SECOND),
            8 => ("a broker's nonsense", Mood::Babbles(late), soon),
            _ => ("a slow broker", Mood::Executes, 25 * SECOND),
        };
        self.fault(kind, Some(delivery.fate), self.now + after);
        (mood, after)
    }

    /// The courier looks at its order, commits that it begins where that counts, and sends; the answer comes later.
    pub async fn arrive_order(&mut self, delivery: &mut Delivery) -> Option<(Outcome, bool, u64)> {
        let (process, life, now) = (delivery.process, delivery.life, self.now);
        let frozen_until = self.alive(process, life)?.frozen_until;
        if now < frozen_until {
            let later = Delivery { owner: delivery.owner.clone(), message: delivery.message.clone(), ..*delivery };
            self.at(frozen_until, Action::Arrive { delivery: Box::new(later) });
            return None;
        }
        let courier = self.processes[process].courier.clone()?;
        let broker = self.traders.as_ref()?.broker.clone();
        let (mood, after) = self.mood(delivery);
        let away = !self.is_connected(process) || self.locks.strong(delivery.message.id);
        let replies = if away { vec![Reply::Refused; 12] } else { self.replies(delivery.fate ^ 0x0bde, 4) };
        broker.expect(now, mood);
        let (store, outbox) = (self.processes[process].store.clone(), self.processes[process].outbox.clone());
        let lease = delivery.message.lease();
        let begin = Begin::new(outbox, delivery.owner.clone(), lease);
        store.expect(replies);
        let outcome = match delivery.kind.commits_begun() {
            true => courier.deliver_begun(&delivery.message, &begin).await,
            false => courier.deliver(&delivery.message).await,
        };
        store.expect([]);
        delivery.begun = begin.was_committed();
        if broker.desk().looked_up {
            self.mark("an order looked up");
        }
        if matches!(&outcome, Outcome::Defer { code, .. } if code == "NEEDS_RECONCILE") {
            self.mark("an order parked for a person");
        }
        self.checked(Step::Order { owner: &delivery.owner, lease }).await;
        let accepted = matches!(outcome, Outcome::Sent { .. });
        Some((outcome, accepted, after))
    }

    /// A person asks the broker about what nobody can tell, and says so.
    pub async fn reconcile(&mut self, round: u64) {
        self.at(self.now + 5 * SECOND, Action::Reconcile { round: round + 1 });
        let Some(traders) = &self.traders else { return };
        let (orders, broker) = (traders.orders.clone(), traders.broker.clone());
        if self.now < self.down_until {
            return;
        }
        // One who died over it leaves it to the next.
        let now = self.db_now();
        let parked = transact(&*self.store, Mode::Read, move |tx| {
            Box::pin(async move {
                let sql = "SELECT id, active_key FROM outbox WHERE lane = ? AND last_error_code = 'NEEDS_RECONCILE' AND (lease_until IS NULL OR lease_until < ?) ORDER BY id";
                let rows = tx.query(sql, &[LANE.into(), now.into()]).await?;
                rows.iter().map(|row| Ok((row.int(0)?, row.text(1)?))).collect::<Result<Vec<_>>>()
            })
        });
        for (id, key) in parked.await.expect("what is parked") {
            if self.locks.any(id) {
                continue;
            }
            let executed = broker.executes(&key);
            let fate = self.fate("reconcile", [id as u64, round, 0]);
            let replies = self.replies(fate, 6);
            self.clients.expect(replies);
            let by = By { actor: "operator:sim".to_owned(), reason: None };
            let told = orders.settle(&key, executed, executed.then(|| execution(&key).order_ref), by).await;
            self.clients.expect([]);
            let done = matches!(told, Ok(ByHand::Done(_)));
            self.note(format_args!("a person settles {key} as executed: {executed}; done: {done}"));
            if done {
                self.mark("an order settled by hand");
            } else {
                // It may be theirs until their lease ends.
                self.last_fault = self.last_fault.max(self.now + 60 * SECOND);
            }
            self.checked(Step::ByHand { id }).await;
        }
    }

    /// Holds every change of the ledger against its state machine, and its ends against the broker's own book.
    pub async fn check_ledger(&mut self) {
        let Some(traders) = &mut self.traders else { return };
        let mut wrong = std::mem::take(&mut traders.broker.desk().wrong);
        let mut ended = Vec::new();
        for (key, status) in moved(&*self.store).await.expect("the journal of the ledger") {
            let before = traders.ledger.insert(key.clone(), status);
            let fits = match before {
                None => status == Status::InProgress,
                Some(before) if before == status => true,
                Some(before) => [Event::Executed, Event::Refused].iter().any(|edge| before.next(*edge) == Ok(status)),
            };
            if !fits {
                wrong.push(format!("S16: the ledger of {key} went from {before:?} to {status:?}"));
            }
            if before == Some(status) || status == Status::InProgress {
                continue;
            }
            let executed = traders.broker.executes(&key);
            let excused = status == Status::Failed && traders.broker.may_end_by_budget(&key);
            if executed != (status == Status::Succeeded) && !excused {
                wrong.push(format!("S16: {key} is {status:?} in the ledger; executed by the broker: {executed}"));
            }
            ended.push((key, status));
        }
        for (key, status) in ended {
            self.note(format_args!("the ledger says of {key}: {}", status.as_str()));
            self.mark(if status == Status::Succeeded { "an order executed" } else { "an order refused" });
        }
        wrong.into_iter().for_each(|wrong| self.violation(wrong));
    }

    /// After the end: what was answered has an end.
    pub fn check_orders(&mut self) {
        let Some(traders) = &self.traders else { return };
        let open = |n: &&usize| !matches!(traders.ledger.get(&key(**n)), Some(Status::Succeeded | Status::Failed));
        let open: Vec<usize> = traders.placed.iter().filter(open).copied().collect();
        if !open.is_empty() {
            self.violation(format!("L1: the orders {open:?} were taken in and have no end"));
        }
    }
}
