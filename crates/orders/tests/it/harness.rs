//! A fresh database per test on each store, with orders on it and a broker that is scripted.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use postrider::alerts::Alerts;
use postrider::backoff::Backoff;
use postrider::outcome::Reach;
use postrider::store::{Claim, From, Mode, transact};
use postrider::tx::{Row, Value};
use postrider::{LaneRules, Lanes, Message, Options, Outbox, Worker, stores};
use postrider_orders::adapters::{Adapter, Answer, Found, Sending};
use postrider_orders::decide::{Reason, Refusal};
use postrider_orders::result::{Execution, Fill, Number};
use postrider_orders::{
    Book, Entry, Idempotency, LANE, MIGRATIONS, NewOrder, Order, Orders, Placed, Settings, lane_rules, lane_settings,
};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use proving::kit::scratch::{self, Scratch};

pub use proving::on_every_store;

/// Runs one case.
pub async fn case<F: Future<Output = ()>>(home: Ground, case: impl FnOnce(Ground) -> F) {
    case(home).await;
}

/// A database, not yet opened: each case has its own kind of broker.
pub struct Ground(Scratch);

pub async fn sqlite() -> Ground {
    Ground(scratch::sqlite())
}

pub async fn postgres() -> Ground {
    Ground(scratch::postgres().await)
}

pub async fn mysql() -> Ground {
    Ground(scratch::mysql().await)
}

/// What the broker does with the next order.
#[derive(Clone, Debug)]
pub enum Act {
    Fill,
    /// Executes, and its answer is lost.
    LoseReply,
    Refuse(Reason, Reach),
    /// Executes, and answers in words nobody understands.
    Babble,
    /// Executes, and says that it was this much, at this price.
    Say(i64, i64),
    /// The adapter itself fails, and does not say why.
    Panic,
}

/// A broker in memory: executes what it is sent, unless the script says otherwise.
pub struct Broker {
    idempotency: Idempotency,
    script: Mutex<VecDeque<Act>>,
    pub executed: Mutex<HashMap<String, u32>>,
    pub sends: Mutex<Vec<String>>,
    pub look_ups: Mutex<u32>,
    /// What it answers to look-ups instead of what it knows.
    pub found: Mutex<Option<Found>>,
    /// Orders are held here until there is room.
    pub room: tokio::sync::Semaphore,
    inside: AtomicUsize,
    /// The most orders it had at one time.
    pub most: AtomicUsize,
}

impl Broker {
    /// From now on it answers so many orders more, and holds the others.
    pub fn holds_after(&self, orders: usize) {
        let free = self.room.available_permits();
        self.room.forget_permits(free);
        self.room.add_permits(orders);
    }

    pub fn inside(&self) -> usize {
        self.inside.load(Ordering::SeqCst)
    }

    fn execute(&self, key: &str) -> bool {
        let mut executed = self.executed.lock().unwrap();
        let times = executed.entry(key.to_owned()).or_default();
        let again = *times > 0;
        if !again || self.idempotency != Idempotency::Key {
            *times += 1;
        }
        again
    }

    pub fn executions(&self, key: &str) -> u32 {
        self.executed.lock().unwrap().get(key).copied().unwrap_or(0)
    }

    pub fn sends(&self) -> usize {
        self.sends.lock().unwrap().len()
    }

    pub fn forget_script(&self) {
        self.script.lock().unwrap().clear();
    }

    pub fn next(&self, acts: &[Act]) {
        self.script.lock().unwrap().extend(acts.iter().cloned());
    }
}

fn execution(qty: rust_decimal::Decimal) -> Execution {
    let fill = Fill { px: Number(rust_decimal::Decimal::TEN), qty: Number(qty), ts: "2026-01-01T00:00:00Z".to_owned() };
    Execution { order_ref: "ref-1".to_owned(), fills: vec![fill] }
}

#[async_trait]
impl Adapter for Broker {
    fn name(&self) -> &str {
        "scripted"
    }

    fn idempotency(&self) -> Idempotency {
        self.idempotency
    }

    async fn send(&self, sending: &Sending<'_>) -> Answer {
        self.sends.lock().unwrap().push(sending.key.to_owned());
        let inside = self.inside.fetch_add(1, Ordering::SeqCst) + 1;
        self.most.fetch_max(inside, Ordering::SeqCst);
        if let Ok(room) = self.room.acquire().await {
            room.forget();
        }
        self.inside.fetch_sub(1, Ordering::SeqCst);
        let act = self.script.lock().unwrap().pop_front().unwrap_or(Act::Fill);
        let refused = |reason, reach| {
            Answer::Refused(Refusal { reason, message: "as told".to_owned(), reach, retry_after: None })
        };
        match act {
            Act::Refuse(reason, reach) => refused(reason, reach),
            Act::Panic => panic!("as told"),
            Act::LoseReply => {
                self.execute(sending.key);
                refused(Reason::Timeout, Reach::Unknown)
            }
            Act::Babble => {
                self.execute(sending.key);
                Answer::Nonsense("as told".to_owned())
            }
            Act::Say(qty, px) => {
                self.execute(sending.key);
                let mut said = execution(qty.into());
                said.fills[0].px = Number(px.into());
                Answer::Executed(said, None)
            }
            Act::Fill => {
                let before = self.execute(sending.key) && self.idempotency == Idempotency::Key;
                Answer::Executed(execution(sending.order.qty), before.then_some(Reason::AlreadyProcessed))
            }
        }
    }

    async fn look_up(&self, key: &str) -> Result<Found, Refusal> {
        *self.look_ups.lock().unwrap() += 1;
        if let Some(found) = self.found.lock().unwrap().clone() {
            return Ok(found);
        }
        Ok(if self.executions(key) > 0 { Found::Executed(execution(1.into())) } else { Found::Nothing })
    }
}

pub struct Home {
    pub orders: Orders,
    pub outbox: Outbox,
    pub broker: Arc<Broker>,
    pub book: Book,
    _ground: Scratch,
}

impl Ground {
    pub fn url(&self) -> String {
        self.0.url.clone()
    }

    pub async fn open(self, idempotency: Idempotency) -> Home {
        self.open_with(idempotency, Settings { max_attempts: 3, ..Settings::default() }).await
    }

    pub async fn open_with(self, idempotency: Idempotency, settings: Settings) -> Home {
        migrate(&self.0.url).await;
        let (orders, outbox, broker, book) = open_at(&self.0.url, Options::default(), idempotency, settings).await;
        Home { orders, outbox, broker, book, _ground: self.0 }
    }
}

pub async fn migrate(url: &str) {
    outbox_at(url, Options::default(), &Book::default(), Idempotency::Key).await.migrate().await.unwrap();
}

async fn outbox_at(url: &str, options: Options, book: &Book, idempotency: Idempotency) -> Outbox {
    let lanes = Lanes::new().with(LANE, lane_rules(book, idempotency)).with("alerts", LaneRules::default());
    let options = Options { migrations: MIGRATIONS.to_vec(), ..options };
    Outbox::new(stores::open(url, lanes, options).await.unwrap())
}

/// Orders on a migrated database, as another process would have them.
pub async fn open_at(
    url: &str,
    options: Options,
    idempotency: Idempotency,
    settings: Settings,
) -> (Orders, Outbox, Arc<Broker>, Book) {
    let book = Book::default();
    let outbox = outbox_at(url, options, &book, idempotency).await;
    let broker = Arc::new(Broker {
        idempotency,
        script: Mutex::default(),
        executed: Mutex::default(),
        sends: Mutex::default(),
        look_ups: Mutex::default(),
        found: Mutex::default(),
        room: tokio::sync::Semaphore::new(1_000_000),
        inside: AtomicUsize::default(),
        most: AtomicUsize::default(),
    });
    let alerts = Alerts::new(outbox.clone(), "alerts", Duration::from_secs(300));
    let orders = Orders::new(outbox.clone(), settings, book.clone(), broker.clone(), Some(alerts)).await.unwrap();
    (orders, outbox, broker, book)
}

pub fn order(qty: &str) -> Order {
    let body = format!(r#"{{"instrument":"AAPL","side":"BUY","qty":{qty},"price":10,"time_in_force":"IOC"}}"#);
    Order::parse(body.as_bytes()).unwrap()
}

impl Home {
    /// Places one; its message.
    pub async fn place(&self, key: &str) -> i64 {
        match self.place_as(key, "1").await {
            Placed::Accepted { outbox_id } => outbox_id,
            other => panic!("{other:?}"),
        }
    }

    pub async fn place_as(&self, key: &str, qty: &str) -> Placed {
        self.orders.place(vec![NewOrder::new(key, order(qty))]).await.unwrap().remove(0)
    }

    pub async fn entry(&self, key: &str) -> Entry {
        self.orders.entry(key).await.unwrap().expect("an entry")
    }

    pub async fn rows(&self, sql: &str) -> Vec<Row> {
        self.try_rows(sql).await.unwrap_or_else(|e| panic!("{sql}: {e}"))
    }

    pub async fn try_rows(&self, sql: &str) -> postrider::Result<Vec<Row>> {
        let sql: Arc<str> = sql.into();
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let sql = sql.clone();
            Box::pin(async move { tx.query(&sql, &[] as &[Value]).await })
        })
        .await
    }

    pub async fn execute(&self, sql: &str) -> postrider::Result<u64> {
        let sql: Arc<str> = sql.into();
        transact(&**self.outbox.store(), Mode::Write, move |tx| {
            let sql = sql.clone();
            Box::pin(async move { tx.execute(&sql, &[] as &[Value]).await })
        })
        .await
    }

    /// Alerts that were written: of this kind, or about this.
    pub async fn told(&self, kind_or_subject: &str) -> usize {
        let rows = self.rows("SELECT payload FROM outbox WHERE lane = 'alerts'").await;
        let body = |row: &Row| serde_json::from_slice::<serde_json::Value>(&row.bytes(0).unwrap()).unwrap();
        let is_it = |body: &serde_json::Value| body["kind"] == kind_or_subject || body["subject"] == kind_or_subject;
        rows.iter().map(body).filter(is_it).count()
    }

    pub async fn count(&self, what: &str) -> i64 {
        self.rows(&format!("SELECT COUNT(*) FROM {what}")).await[0].int(0).unwrap()
    }

    /// What the view of spec 003 says of a key.
    pub async fn view(&self, key: &str) -> (String, i64, Option<String>) {
        let sql =
            format!("SELECT status, attempts, last_error_code FROM outbox_orders WHERE idempotency_key = '{key}'");
        let rows = self.rows(&sql).await;
        assert_eq!(rows.len(), 1, "{rows:?}");
        (rows[0].text(0).unwrap(), rows[0].int(1).unwrap(), rows[0].opt_text(2).unwrap())
    }

    /// A claim by a worker that then dies: its lease is over at once.
    pub async fn claimed_by_one_who_dies(&self) -> Message {
        let message = self.try_claim().await.expect("a message is due");
        tokio::time::sleep(Duration::from_millis(5)).await;
        message
    }

    /// As a courier that is about to send commits it.
    pub async fn said_that_it_begins(&self, id: i64) {
        let truth = if self.outbox.store().dialect().name() == "postgres" { "TRUE" } else { "1" };
        self.execute(&format!("UPDATE outbox SET maybe_sent = {truth} WHERE id = {id}")).await.unwrap();
    }

    pub async fn try_claim(&self) -> Option<Message> {
        let idempotent = self.broker.idempotency();
        let claim = Claim {
            lane: LANE.to_owned(),
            shard: 0,
            limit: 1,
            lease: Duration::from_millis(1),
            owner: "dead:1:1".to_owned(),
            max_crashes: 5,
            send_begun: idempotent != Idempotency::Key,
            from: From::Mark(None),
        };
        let claimed = self.outbox.store().claim(&claim).await.unwrap();
        claimed.messages.into_iter().next()
    }

    /// A worker with quick retries, until it is dropped.
    pub fn work(&self) -> Working {
        let (stop, mut stopped) = watch::channel(false);
        let mut settings = lane_settings();
        (settings.poll, settings.budgets.max_attempts) = (Duration::from_millis(20), 3);
        settings.budgets.backoff = Backoff::Table(vec![Duration::from_millis(20)]);
        let worker = Worker::new(self.outbox.clone()).lane_with(settings, Arc::new(self.orders.courier()));
        let stopped = async move { drop(stopped.wait_for(|stop| *stop).await) };
        let task = tokio::spawn(async move { drop(worker.run(stopped).await.unwrap()) });
        Working { stop, task: Some(task) }
    }

    /// Works until the message of this key has ended or is parked, and no longer.
    pub async fn work_until(&self, key: &str, status: &str) {
        let working = self.work();
        wait_until(&format!("{key} is {status}"), async || {
            let code = self.view(key).await;
            code.0 == status || code.2.as_deref() == Some(status)
        })
        .await;
        working.end().await;
    }
}

pub struct Working {
    stop: watch::Sender<bool>,
    task: Option<JoinHandle<()>>,
}

impl Working {
    /// Stops it, and waits until it does nothing any more.
    pub async fn end(mut self) {
        let _ = self.stop.send(true);
        if let Some(task) = self.task.take() {
            task.await.unwrap();
        }
    }
}

impl Drop for Working {
    fn drop(&mut self) {
        let _ = self.stop.send(true);
    }
}

pub async fn wait_until(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let limit = tokio::time::Instant::now() + Duration::from_secs(30);
    while !holds().await {
        assert!(tokio::time::Instant::now() < limit, "waited in vain until {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
