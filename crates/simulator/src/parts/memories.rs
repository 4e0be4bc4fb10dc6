//! Memories in the world: clients who store them until they are told, a gateway in every process, and an OpenMemory that is
//! away, slow, full, forgets to answer, and writes what it was sent a good while later. The part is the real one, in its two
//! halves; only the network and the service behind it are not.
//!
//! What a gateway has begun is a task. It runs until it waits for the world (an answer, a pause, or somebody else's who does),
//! and goes on when the world says so; if its process dies meanwhile, it never does.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use postrider::couriers::exchange::Answer;
use postrider::error::Result;
use postrider::outcome::{Outcome, Reach};
use postrider::store::{Mode, Store, transact};
use postrider::worker::core::Event;
use postrider::{Courier, Outbox};
use postrider_memories::{Action as Told, Memories, MemoryCourier, NewMemory, Settings, Settling, Stored, upstream};
use serde_json::json;
use tokio::sync::oneshot;

use super::openmemory::{Call, Calls, Held, OpenMemory, Wire, answered, unanswered};
use crate::checker::{End, Step};
use crate::delivering::Delivery;
use crate::dice::{Fate, dice};
use crate::plan::{LaneKind, Plan, SECOND};
use crate::store::Reply;
use crate::world::{Action, World};

/// For so long what was sent and not answered may still be written.
const UNDER_WAY: u64 = 20 * SECOND;
const TIMEOUT: Duration = Duration::from_secs(3);
/// Looks of whoever tends a gateway, at the latest, and how often it tidies up.
const LOOK: u64 = SECOND;
const TIDY: u64 = 10 * SECOND;
/// Spaces memories go to.
const SPACES: usize = 2;

/// What a process has of memories, as long as it lives.
#[derive(Clone)]
pub struct Gateway {
    memories: Memories,
    courier: Arc<MemoryCourier>,
}

/// Something a gateway has begun.
struct Flight {
    process: usize,
    life: u64,
    what: What,
    /// The memory it is about.
    content: Option<String>,
}

enum What {
    Store { memory: usize, round: u64 },
    Deliver(Box<Delivery>),
    Attend { round: u64 },
    Tidy { round: u64 },
}

/// How it ended.
enum Came {
    Stored(Box<Stored>),
    Delivered(Outcome),
    Attended(Option<Duration>),
    Tidied,
}

type Landed = Arc<Mutex<Vec<(u64, Came)>>>;

/// Those who store memories, the service, and the record of both halves.
pub struct Rememberers {
    pub service: OpenMemory,
    calls: Calls,
    landed: Landed,
    flights: BTreeMap<u64, Flight>,
    begun: u64,
    /// How often each thing was asked for: names the next one's fate.
    asked: BTreeMap<String, u64>,
    /// Memories whose client was told, and what.
    told: BTreeMap<usize, Told>,
    /// Our copies, and the audits that were begun and not ended.
    copies: BTreeMap<i64, (Held, String)>,
    pending: BTreeSet<i64>,
}

fn locked<T>(of: &Mutex<T>) -> MutexGuard<'_, T> {
    of.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Gateway {
    pub fn new(outbox: &Outbox, settling: &Settling, calls: Calls, process: usize, life: u64) -> Self {
        let upstream = upstream::Settings {
            url: Some("http://openmemory.example".parse().expect("a URL")),
            key: Arc::new(|| Ok(None)),
            timeout: TIMEOUT,
            resolver: None,
        };
        let settings = Settings {
            upstream: upstream.clone(),
            default_space: "team:a".to_owned(),
            max_bytes: 1 << 20,
            breaker_failures: 3,
            probe: Duration::from_secs(2),
            under_way: Duration::from_micros(UNDER_WAY),
            // It never forgets.
            recognise: false,
        };
        let network = Arc::new(Wire { process, life, calls });
        let client = upstream::OpenMemory::over(network, upstream).expect("a client");
        let memories = Memories::with(client, outbox.clone(), settings, settling, None);
        Gateway { courier: Arc::new(memories.courier()), memories }
    }
}

fn content(plan: &Plan, n: usize) -> String {
    let of = plan.memories.iter().find(|memory| memory.n == n).map_or(n, |memory| memory.content);
    format!("what is remembered as {of}")
}

fn space(plan: &Plan, n: usize) -> String {
    let of = plan.memories.iter().find(|memory| memory.n == n).map_or(0, |memory| memory.space);
    format!("team:{}", of % SPACES)
}

impl Rememberers {
    pub async fn new(plan: &Plan, store: &dyn Store) -> Self {
        install(store).await.expect("the journal of memories");
        Rememberers {
            service: OpenMemory::new(plan.merges),
            calls: Calls::default(),
            landed: Landed::default(),
            flights: BTreeMap::new(),
            begun: 0,
            asked: BTreeMap::new(),
            told: BTreeMap::new(),
            copies: BTreeMap::new(),
            pending: BTreeSet::new(),
        }
    }

    pub fn calls(&self) -> Calls {
        self.calls.clone()
    }

    /// Every client was told, and every memory and audit has ended.
    pub fn is_done(&self, plan: &Plan) -> bool {
        let ended = |(_, state): &(Held, String)| ["stored", "dead"].contains(&state.as_str());
        self.told.len() == plan.memories.len() && self.pending.is_empty() && self.copies.values().all(ended)
    }

    /// What is left to do, for a reader.
    pub fn left(&self, plan: &Plan) -> String {
        let open: Vec<_> = self
            .copies
            .iter()
            .filter(|(_, (_, state))| !["stored", "dead"].contains(&state.as_str()))
            .take(3)
            .collect();
        let untold = plan.memories.iter().filter(|memory| !self.told.contains_key(&memory.n)).count();
        format!("{untold} memories untold, audits {:?} pending, copies {open:?} open", self.pending)
    }

    /// Those under way in this process may rightly be written twice: whoever sends them does not know what time it is.
    fn excuse(&mut self, process: Option<usize>) {
        let of = |flight: &&Flight| process.is_none_or(|process| flight.process == process);
        self.service.excused.extend(self.flights.values().filter(of).filter_map(|flight| flight.content.clone()));
    }
}

async fn install(store: &dyn Store) -> Result<()> {
    let trigger = |table: &str, when: &str, into: &str, columns: &str| {
        let values: Vec<String> = columns.split(", ").map(|column| format!("NEW.{column}")).collect();
        format!(
            "CREATE TRIGGER sim_{into}_{when} AFTER {when} ON {table} BEGIN
                 INSERT INTO sim_{into} ({columns}) VALUES ({}); END",
            values.join(", ")
        )
    };
    let (copy, audit) = ("id, payload_md, target_space, payload_sha, state", "audit_id, status");
    let statements = [
        format!("CREATE TABLE sim_copies (seq INTEGER PRIMARY KEY, {copy})"),
        format!("CREATE TABLE sim_audits (seq INTEGER PRIMARY KEY, {audit})"),
        trigger("memory_writes", "INSERT", "copies", copy),
        trigger("memory_writes", "UPDATE", "copies", copy),
        trigger("write_audit", "INSERT", "audits", audit),
        trigger("write_audit", "UPDATE", "audits", audit),
    ];
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

type Moves = (Vec<(i64, Held, String)>, Vec<(i64, String)>);

/// What happened to copies and audits since the last look.
async fn moved(store: &dyn Store) -> Result<Moves> {
    transact(store, Mode::Write, |tx| {
        Box::pin(async move {
            let sql = "SELECT id, payload_md, target_space, payload_sha, state FROM sim_copies ORDER BY seq";
            let copies = tx.query(sql, &[]).await?;
            let copies = copies.iter().map(|row| {
                let held = Held { content: row.text(1)?, space: row.text(2)?, sha: row.text(3)? };
                Ok((row.int(0)?, held, row.text(4)?))
            });
            let copies = copies.collect::<Result<Vec<_>>>()?;
            let audits = tx.query("SELECT audit_id, status FROM sim_audits ORDER BY seq", &[]).await?;
            let audits = audits.iter().map(|row| Ok((row.int(0)?, row.text(1)?))).collect::<Result<Vec<_>>>()?;
            for (table, any) in [("sim_copies", !copies.is_empty()), ("sim_audits", !audits.is_empty())] {
                if any {
                    tx.execute(&format!("DELETE FROM {table}"), &[]).await?;
                }
            }
            Ok((copies, audits))
        })
    })
    .await
}

impl World {
    /// Lets everything that was begun go on until it waits for the world.
    async fn settle_down(&self) {
        /// Tasks wake each other; nobody who waits for the database counts as quiet.
        const QUIET: u32 = 12;
        let mut quiet = 0;
        while quiet < QUIET {
            tokio::task::yield_now().await;
            quiet = if self.activity.is_busy() { 0 } else { quiet + 1 };
            if quiet == 0 {
                self.activity.idle().await;
            }
        }
    }

    fn can_go_on(&mut self, process: usize, life: u64) -> std::result::Result<(), Option<u64>> {
        let now = self.now;
        match self.alive(process, life) {
            None => Err(None),
            Some(alive) if now < alive.frozen_until => Err(Some(alive.frozen_until)),
            Some(_) => Ok(()),
        }
    }

    /// Something of this process goes on, and its transactions fare as their fate will have it.
    async fn go_on(&mut self, process: usize, life: u64, fate: Fate) {
        let connected = self.is_connected(process);
        let replies = if connected { self.replies(fate ^ 0x3e3, 4) } else { vec![Reply::Refused; 40] };
        let store = self.processes[process].store.clone();
        store.expect(replies);
        self.settle_down().await;
        store.expect([]);
        self.checked(Step::Part).await;
        for sleeper in self.clock.sleepers() {
            self.mark("a memory waited for its twin");
            let at = self.now + sleeper.lasts.as_micros() as u64;
            self.at(at, Action::Wake { process, life, wake: sleeper.wake });
        }
        let Some(rememberers) = &mut self.rememberers else { return };
        let calls = std::mem::take(&mut *locked(&rememberers.calls));
        let landed = std::mem::take(&mut *locked(&rememberers.landed));
        for call in calls {
            let what = format!("{} {} {}", call.method, call.path, call.body["content"]);
            let times = self.times_asked(&what);
            let fate = self.fate(&what, [times, 0, 0]);
            let there = self.now + dice(fate ^ 0x7e11).u64(100..20_000);
            self.at(there, Action::Asked { call: Box::new(call), fate });
        }
        for (flight, came) in landed {
            self.land(flight, came);
        }
    }

    fn times_asked(&mut self, what: &str) -> u64 {
        let Some(rememberers) = &mut self.rememberers else { return 0 };
        let times = rememberers.asked.entry(what.to_owned()).or_default();
        *times += 1;
        *times
    }

    fn take_off(&mut self, process: usize, life: u64, what: What, content: Option<String>) -> Option<(u64, Landed)> {
        let rememberers = self.rememberers.as_mut()?;
        rememberers.begun += 1;
        let id = rememberers.begun;
        rememberers.flights.insert(id, Flight { process, life, what, content });
        Some((id, rememberers.landed.clone()))
    }

    /// A client stores a memory with one of the servers.
    pub async fn remember(&mut self, memory: usize, round: u64) {
        let planned = self.plan.memories[memory].clone();
        let fate = self.fate("remember", [planned.n as u64, round, 0]);
        let serving: Vec<usize> = (0..self.processes.len()).filter(|p| self.processes[*p].gateway.is_some()).collect();
        let process = serving.get(dice(fate).usize(0..serving.len().max(1))).copied();
        let there = process.and_then(|process| Some((process, self.processes[process].alive.as_ref()?.life)));
        let Some((process, life)) = there.filter(|(process, life)| self.can_go_on(*process, *life).is_ok()) else {
            return self.remember_again(memory, round, fate);
        };
        let Some(gateway) = self.processes[process].gateway.clone() else { return };
        let new = NewMemory {
            payload_md: content(&self.plan, planned.n),
            target_space: Some(space(&self.plan, planned.n)),
            correlation_id: format!("memory-{}", planned.n),
            skip_openmemory: planned.skips,
            ..NewMemory::default()
        };
        let content = Some(new.payload_md.clone());
        self.note(format_args!("memory {} is stored with w{process}", planned.n));
        let Some((id, landed)) = self.take_off(process, life, What::Store { memory, round }, content) else { return };
        tokio::spawn(async move {
            let stored = gateway.memories.store(new).await;
            locked(&landed).push((id, Came::Stored(Box::new(stored))));
        });
        self.go_on(process, life, fate).await;
    }

    fn remember_again(&mut self, memory: usize, round: u64, fate: Fate) {
        let again = self.now + dice(fate ^ 0xa9a1).u64(SECOND..5 * SECOND);
        self.last_fault = self.last_fault.max(again);
        self.at(again, Action::Remember { memory, round: round + 1 });
    }

    /// A queued memory is on its way.
    pub async fn arrive_memory(&mut self, delivery: Delivery) {
        let (process, life) = (delivery.process, delivery.life);
        let content = String::from_utf8_lossy(&delivery.message.payload).into_owned();
        match self.can_go_on(process, life) {
            Ok(()) => {}
            Err(None) => return,
            Err(Some(thaw)) => {
                // It was about to be sent when everything stood still.
                if let Some(rememberers) = &mut self.rememberers {
                    rememberers.service.excused.insert(content);
                }
                return self.at(thaw, Action::Arrive { delivery: Box::new(delivery) });
            }
        }
        let Some(gateway) = self.processes[process].gateway.clone() else { return };
        let (message, fate) = (delivery.message.clone(), delivery.fate);
        let what = What::Deliver(Box::new(delivery));
        let Some((id, landed)) = self.take_off(process, life, what, Some(content)) else { return };
        tokio::spawn(async move {
            let outcome = gateway.courier.deliver(&message).await;
            locked(&landed).push((id, Came::Delivered(outcome)));
        });
        self.go_on(process, life, fate).await;
    }

    /// Whoever tends the gateway of a process looks at it.
    pub async fn tend(&mut self, process: usize, life: u64, round: u64, tidy: bool) {
        let again = |at| {
            (at, if tidy { Action::Tidy { process, life, round } } else { Action::Attend { process, life, round } })
        };
        match self.can_go_on(process, life) {
            Ok(()) => {}
            Err(None) => return,
            Err(Some(thaw)) => {
                let (at, action) = again(thaw);
                return self.at(at, action);
            }
        }
        let Some(gateway) = self.processes[process].gateway.clone() else { return };
        let what = if tidy { What::Tidy { round } } else { What::Attend { round } };
        let Some((id, landed)) = self.take_off(process, life, what, None) else { return };
        let topic = if tidy { "tidy" } else { "attend" };
        let fate = self.fate(topic, [((process as u64) << 32) | life, round, 0]);
        tokio::spawn(async move {
            let came = match tidy {
                true => {
                    gateway.memories.tidy().await;
                    Came::Tidied
                }
                false => Came::Attended(gateway.memories.attend().await),
            };
            locked(&landed).push((id, came));
        });
        self.go_on(process, life, fate).await;
    }

    /// Something has come to its end.
    fn land(&mut self, id: u64, came: Came) {
        let flight = self.rememberers.as_mut().and_then(|rememberers| rememberers.flights.remove(&id));
        let Some(Flight { process, life, what, .. }) = flight else { return };
        match (what, came) {
            (What::Store { memory, round }, Came::Stored(stored)) => self.tell_client(memory, round, &stored),
            (What::Deliver(delivery), Came::Delivered(outcome)) => self.delivered_memory(&delivery, outcome),
            (What::Attend { round }, Came::Attended(pause)) => {
                let pause = pause.map_or(LOOK, |pause| (pause.as_micros() as u64).clamp(1000, LOOK));
                self.at(self.now + pause, Action::Attend { process, life, round: round + 1 });
            }
            (What::Tidy { round }, _) => {
                let pause = dice(self.fate("tidy", [process as u64, life, round])).u64(TIDY * 3 / 4..TIDY * 5 / 4);
                self.at(self.now + pause, Action::Tidy { process, life, round: round + 1 });
            }
            _ => {}
        }
    }

    fn tell_client(&mut self, memory: usize, round: u64, stored: &Stored) {
        let n = self.plan.memories[memory].n;
        let content = content(&self.plan, n);
        self.note(format_args!(
            "memory {n} is told: {:?} {:?} {:?}",
            stored.action, stored.memory_id, stored.outbox_id
        ));
        let Some(rememberers) = &mut self.rememberers else { return };
        let wrong = match stored.action {
            Told::Allow => {
                let id = stored.memory_id.as_deref().unwrap_or_default();
                (!rememberers.service.has(id, &content))
                    .then(|| format!("is told as stored under {id:?}, and is not there"))
            }
            Told::Deferred => {
                let known = stored.outbox_id.is_some_and(|id| self.checker.known.contains_key(&id));
                (!known).then(|| format!("is told as queued under {:?}, and is not there", stored.outbox_id))
            }
            Told::Reject => {
                (!rememberers.service.refused.contains(&content)).then(|| "is refused, and nobody did".to_owned())
            }
            Told::Error => {
                let fate = self.fate("remember", [n as u64, round, 1]);
                return self.remember_again(memory, round, fate);
            }
        };
        rememberers.told.insert(n, stored.action);
        self.mark(match stored.action {
            Told::Allow => "a memory stored at once",
            Told::Deferred => "a memory deferred",
            _ => "a memory refused",
        });
        if let Some(wrong) = wrong {
            self.violation(format!("S18: memory {n} {wrong}"));
        }
    }

    fn delivered_memory(&mut self, delivery: &Delivery, outcome: Outcome) {
        let (process, life, message) = (delivery.process, delivery.life, &delivery.message);
        let (id, token) = (message.id, message.lease_token);
        self.note(format_args!("the flush of {id}@{token} by {}: {outcome:?}", delivery.owner));
        match &outcome {
            Outcome::Defer { code, .. } if code == "OPENMEMORY_IN_DOUBT" => self.mark("a memory waited in doubt"),
            Outcome::Defer { .. } => self.mark("a memory put off"),
            _ => {
                self.received.entry(id).or_default().push(token);
                if let Outcome::Sent { result_ref } = &outcome {
                    self.accepted.insert(id);
                    let content = String::from_utf8_lossy(&message.payload).into_owned();
                    let memory_id = result_ref.clone().unwrap_or_default();
                    let there = self.rememberers.as_ref().is_some_and(|all| all.service.has(&memory_id, &content));
                    if !there {
                        self.violation(format!(
                            "S18: the flush of {id} says it is there as {memory_id:?}, and it is not"
                        ));
                    }
                    self.mark("a queued memory brought");
                }
            }
        }
        let event = Event::Delivered { id, outcome, begun: false };
        self.at(self.now, Action::Hear { process, life, event, era: None });
    }

    /// A request reaches OpenMemory.
    pub fn asked(&mut self, call: Call, fate: Fate) {
        let (process, life) = (call.process, call.life);
        let soon = dice(fate ^ 0xa45e).u64(100..20_000);
        let (answer, after) = self.answer(&call, fate, soon);
        self.at(self.now + after, Action::Answer { process, life, send: call.answer, answer: Box::new(answer), fate });
    }

    /// What it says, by the fate of the request, and after how long.
    fn answer(&mut self, call: &Call, fate: Fate, soon: u64) -> (Answer, u64) {
        let wrong = self.goes_wrong(fate);
        let timeout = call.timeout.as_micros() as u64;
        let now = self.now;
        let Some(rememberers) = &mut self.rememberers else {
            return (unanswered("TIMEOUT", Reach::NeverSent), timeout);
        };
        let service = &mut rememberers.service;
        let Some(mut rng) = wrong else {
            let answer = service.answer(call);
            return (answer, soon);
        };
        let written = call.written();
        let boom = json!({ "err": "boom" });
        // Applied at once, later, or never.
        let (at_once, later) = match rng.u8(0..3) {
            0 => (true, None),
            1 => (false, Some(rng.u64(0..UNDER_WAY))),
            _ => (false, None),
        };
        let (kind, answer, after, may_be_late) = match rng.u8(0..11) {
            0 => ("OpenMemory away", unanswered("CONNECT_REFUSED", Reach::NeverSent), soon, None),
            1 => ("OpenMemory's connection cut", unanswered("CONNECTION_RESET", Reach::Unknown), soon, Some(SECOND)),
            2..=4 => ("OpenMemory's answer lost", unanswered("TIMEOUT", Reach::Unknown), timeout, Some(UNDER_WAY)),
            5 => ("OpenMemory fails", answered(500, &boom), soon, Some(0)),
            6 => ("something before OpenMemory fails", answered(504, &json!(null)), soon, Some(UNDER_WAY)),
            7 => {
                let limited = json!({ "error": "rate_limit_exceeded", "retry_after": 3 });
                ("OpenMemory's limit", answered(429, &limited), soon, None)
            }
            8 if written.is_some() => {
                let refused = json!({ "error": "invalid_input" });
                service.refused.extend(written.as_ref().map(|held| held.content.clone()));
                ("OpenMemory's refusal", answered(400, &refused), soon, None)
            }
            9 if written.is_some() => {
                ("something else answers for OpenMemory", answered(404, &json!(null)), soon, None)
            }
            _ => {
                let answer = service.answer(call);
                self.fault("OpenMemory is slow", Some(fate), now + timeout);
                return (answer, timeout * 9 / 10);
            }
        };
        let mut applies = None;
        if let (Some(held), Some(latest)) = (written, may_be_late) {
            match later {
                _ if at_once => drop(service.apply(held)),
                Some(later) if latest > 0 => applies = Some((service.put_off(held), now + later.min(latest - 1))),
                _ => {}
            }
        }
        if let Some((number, at)) = applies {
            self.at(at, Action::Apply { number });
        }
        self.fault(kind, Some(fate), applies.map_or(0, |(_, at)| at).max(now + after));
        (answer, after)
    }

    pub fn apply_late(&mut self, number: u64) {
        let late = self.rememberers.as_mut().is_some_and(|all| all.service.apply_late(number));
        if late {
            self.note(format_args!("OpenMemory comes to what it was sent before"));
            self.mark("a memory applied late");
        }
    }

    /// An answer of OpenMemory comes to whoever asked, if that one still lives.
    pub async fn hear_openmemory(
        &mut self,
        process: usize,
        life: u64,
        send: oneshot::Sender<Answer>,
        answer: Answer,
        fate: Fate,
    ) {
        match self.can_go_on(process, life) {
            Ok(()) => {}
            Err(None) => return,
            Err(Some(thaw)) => {
                return self.at(thaw, Action::Answer { process, life, send, answer: Box::new(answer), fate });
            }
        }
        let _ = send.send(answer);
        self.go_on(process, life, fate ^ 0xa4).await;
    }

    /// A pause is over.
    pub async fn woken(&mut self, process: usize, life: u64, wake: oneshot::Sender<()>) {
        match self.can_go_on(process, life) {
            Ok(()) => {}
            Err(None) => return,
            Err(Some(thaw)) => return self.at(thaw, Action::Wake { process, life, wake }),
        }
        let _ = wake.send(());
        let fate = self.fate("woken", [((process as u64) << 32) | life, self.now, 0]);
        self.go_on(process, life, fate).await;
    }

    /// A process is gone, and what it had begun with it: its clients ask again.
    pub fn ground(&mut self, process: usize, life: u64) {
        let Some(rememberers) = &mut self.rememberers else { return };
        self.processes[process].gateway = None;
        let gone: Vec<u64> = (rememberers.flights.iter())
            .filter(|(_, flight)| (flight.process, flight.life) == (process, life))
            .map(|(id, _)| *id)
            .collect();
        let gone: Vec<Flight> = gone.iter().filter_map(|id| rememberers.flights.remove(id)).collect();
        for flight in gone {
            if let What::Store { memory, round } = flight.what {
                let n = self.plan.memories[memory].n;
                let fate = self.fate("remember", [n as u64, round, 2]);
                self.remember_again(memory, round, fate);
            }
        }
    }

    /// A worker gave a delivery up: whatever it asked is not heard any more.
    pub fn abort_memory(&mut self, process: usize, life: u64, id: i64) {
        let Some(rememberers) = &mut self.rememberers else { return };
        let of = |flight: &Flight| {
            let its = matches!(&flight.what, What::Deliver(delivery) if delivery.message.id == id);
            its && (flight.process, flight.life) == (process, life)
        };
        rememberers.flights.retain(|_, flight| !of(flight));
    }

    pub fn stands_still(&mut self, process: usize) {
        if let Some(rememberers) = &mut self.rememberers {
            rememberers.excuse(Some(process));
        }
    }

    /// The database's clock is set forward: what waits by it comes sooner.
    pub fn hurry_memories(&mut self) {
        if let Some(rememberers) = &mut self.rememberers {
            rememberers.excuse(None);
            rememberers.service.hurry();
        }
    }

    /// Holds every change of copies and audits against what may become of them.
    pub async fn check_memories(&mut self) {
        let Some(rememberers) = &mut self.rememberers else { return };
        let (copies, audits) = moved(&*self.store).await.expect("the journal of memories");
        let mut wrong = std::mem::take(&mut rememberers.service.wrong);
        let mut marks = Vec::new();
        for (id, held, state) in copies {
            let before = rememberers.copies.insert(id, (held.clone(), state.clone())).map(|(_, state)| state);
            let fits = match (before.as_deref(), state.as_str()) {
                (None, "writing") => true,
                (Some(before), state) if before == state => true,
                (Some("writing"), "stored" | "queued" | "dead") | (Some("queued"), "stored" | "dead") => true,
                (Some("dead"), "writing" | "queued") => true,
                // A write that was thought lost may end after all.
                (Some("dead"), "stored") => true,
                _ => false,
            };
            if !fits {
                wrong.push(format!("S18: memory {held:?} went from {before:?} to {state}"));
            }
            match (before.as_deref(), state.as_str()) {
                (Some("writing"), "queued") => marks.push("a write that failed, queued"),
                (Some("queued"), "dead") => marks.push("a queued memory given up"),
                _ => {}
            }
        }
        for (id, status) in audits {
            let known = rememberers.pending.remove(&id);
            if status == "pending" {
                rememberers.pending.insert(id);
            } else if known {
                marks.push("an audit ended");
            }
        }
        marks.into_iter().for_each(|mark| self.mark(mark));
        wrong.into_iter().for_each(|wrong| self.violation(wrong));
    }

    /// After the end: what a client was told is stored is there, and what was queued has ended as its message did.
    pub fn check_remembered(&mut self) {
        let Some(rememberers) = &self.rememberers else { return };
        let mut wrong = Vec::new();
        for (n, told) in &rememberers.told {
            let (content, space) = (content(&self.plan, *n), space(&self.plan, *n));
            let copy = rememberers.copies.values().find(|(held, _)| (&held.content, &held.space) == (&content, &space));
            let state = copy.map(|(_, state)| state.as_str());
            let given_up = || {
                let dead = |known: &crate::checker::Known| {
                    known.lane == LaneKind::Memories.name() && matches!(known.end, Some(End::Dead(_)))
                };
                self.checker.known.values().any(dead) || rememberers.service.refused.contains(&content)
            };
            let fits = match (told, state) {
                (Told::Allow | Told::Deferred, Some("stored")) => true,
                (Told::Deferred | Told::Reject, Some("dead")) => given_up(),
                (Told::Reject, _) => true,
                _ => false,
            };
            if !fits {
                wrong.push(format!("S18: memory {n} was told {told:?}, and its copy is {state:?}"));
            }
        }
        wrong.into_iter().for_each(|wrong| self.violation(wrong));
    }
}
