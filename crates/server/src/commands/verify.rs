//! `postrider verify`: does an outage of OpenMemory really cost nothing? With `--full` it makes one and looks: stopped, a
//! memory is deferred; started again, it is flushed.

use std::process::Stdio;
use std::time::Duration;

use postrider::Outbox;
use postrider::clock::Tick;
use postrider::message::{hex, sha256};
use postrider_memories::gate::Verdict;
use postrider_memories::{Action, AuditFilter, LANE, Memories, NewMemory};
use serde_json::{Value, json};
use tokio::process::{Child, Command};

use super::worker::build;
use crate::cli;
use crate::config::{Config, VerifyCommands};
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::gate::Gate;
use crate::mcp::new_correlation_id;
use crate::output::Output;
use crate::parts::Parts;

/// How long OpenMemory may take to go and to come.
const PATIENCE: Duration = Duration::from_secs(30);
const SPACE: &str = "verify:degradation";

/// One thing that was looked at.
struct Step {
    name: &'static str,
    passed: bool,
    seen: String,
}

#[derive(Default)]
struct Report(Vec<Step>);

impl Report {
    /// Notes a step; `false` ends the run.
    fn note(&mut self, name: &'static str, seen: Result<String, String>) -> bool {
        let passed = seen.is_ok();
        let seen = seen.unwrap_or_else(|why| why);
        self.0.push(Step { name, passed, seen });
        passed
    }

    fn passed(&self) -> bool {
        self.0.iter().all(|step| step.passed)
    }

    fn as_json(&self) -> Value {
        let steps: Vec<Value> =
            self.0.iter().map(|s| json!({ "name": s.name, "passed": s.passed, "seen": s.seen })).collect();
        json!({ "passed": self.passed(), "steps": steps })
    }

    fn shown(&self) -> String {
        let mut text = String::new();
        for step in &self.0 {
            text.push_str(&format!("{} {}: {}\n", if step.passed { "ok    " } else { "FAILED" }, step.name, step.seen));
        }
        let failed = self.0.iter().find(|step| !step.passed);
        text.push_str(&failed.map_or("verified\n".to_owned(), |step| format!("not verified: {} failed\n", step.name)));
        text
    }
}

/// The OpenMemory that is stopped and started: a stand-in of our own as a process, or the operator's by commands.
enum Control {
    StandIn { child: Option<Child>, listen: String, data: tempfile::TempDir },
    Commands(VerifyCommands),
}

impl Control {
    async fn stop(&mut self) -> Result<String, String> {
        match self {
            Control::StandIn { child, .. } => {
                if let Some(mut child) = child.take() {
                    child.kill().await.map_err(|e| format!("the stand-in could not be stopped: {e}"))?;
                }
                Ok("the stand-in was killed".to_owned())
            }
            Control::Commands(commands) => shell(&commands.stop).await,
        }
    }

    async fn start(&mut self) -> Result<String, String> {
        match self {
            Control::StandIn { child, listen, data } => {
                let program = std::env::current_exe().map_err(|e| e.to_string())?;
                let mut command = Command::new(program);
                command
                    .args(["stand-in", "openmemory", "--listen", listen, "--data"])
                    .arg(data.path().join("memories"));
                command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true);
                *child = Some(command.spawn().map_err(|e| format!("the stand-in could not be started: {e}"))?);
                Ok(format!("the stand-in was started on {listen}"))
            }
            Control::Commands(commands) => shell(&commands.start).await,
        }
    }
}

async fn shell(command: &str) -> Result<String, String> {
    let mut run = Command::new("sh");
    run.args(["-c", command]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
    match tokio::time::timeout(PATIENCE, run.status()).await {
        Err(_) => Err(format!("`{command}` did not end within {PATIENCE:?}")),
        Ok(Err(e)) => Err(format!("`{command}` could not be run: {e}")),
        Ok(Ok(status)) if !status.success() => Err(format!("`{command}` failed with {status}")),
        Ok(Ok(_)) => Ok(format!("`{command}` ended well")),
    }
}

pub async fn run(config: &mut Config, args: cli::Verify, output: Output) -> Result<Ending> {
    let mut report = Report::default();
    steps(config, args.full, &mut report).await?;
    output.show(&report.as_json(), || report.shown())?;
    Ok(Ending::failed_if(!report.passed()))
}

async fn steps(config: &mut Config, full: bool, report: &mut Report) -> Result<()> {
    let control = control(config)?;
    let (mut control, what) = match control {
        Ok((control, what)) => (control, Ok(what)),
        Err(why) => {
            report.note("precondition: control of OpenMemory", Err(why));
            return Ok(());
        }
    };
    report.note("precondition: control of OpenMemory", what);
    let outbox = match database::open_migrated(config).await {
        Ok(outbox) => outbox,
        Err(failure) => {
            report.note("precondition: database", Err(failure.to_string()));
            return Ok(());
        }
    };
    report.note("precondition: database", Ok(format!("{} answers, its schema is ready", database::shown(config))));
    if matches!(control, Control::StandIn { .. }) {
        // A stand-in keeps nothing: what waits for the real one must not go there.
        let waiting = outbox.depths().await?.get(LANE).map_or(0, |lane| lane.pending + lane.leased);
        let empty = match waiting {
            0 => Ok("no memory waits for another OpenMemory".to_owned()),
            n => Err(format!(
                "{n} memories of this database wait for another OpenMemory; verify on a database of its own"
            )),
        };
        if !report.note("precondition: empty queue", empty)
            || !report.note("precondition: stand-in", control.start().await)
        {
            return Ok(());
        }
    }
    let parts = Parts::open(config, &outbox).await?;
    let Some(memories) = parts.memories.clone() else {
        report.note("precondition: gateway", Err("there is no [memory] section".to_owned()));
        return Ok(());
    };
    if !report.note("precondition: OpenMemory answers", reached(&memories, true).await) {
        return Ok(());
    }
    let verdict = Gate::new(outbox.clone(), Some(memories.clone())).look(&config.gate).await;
    report.note("gate", gate_seen(&verdict));
    if full && report.passed() {
        degradation(config, &outbox, &parts, &memories, &mut control, report).await?;
    }
    Ok(())
}

fn gate_seen(verdict: &Verdict) -> Result<String, String> {
    let seen =
        format!("{} mode, {}", verdict.mode.as_str(), verdict.reason.as_deref().unwrap_or("all capabilities stand"));
    if verdict.passed { Ok(seen) } else { Err(seen) }
}

/// The four steps of the degradation check. Whatever happens, OpenMemory is started again at the end.
async fn degradation(
    config: &Config,
    outbox: &Outbox,
    parts: &Parts,
    memories: &Memories,
    control: &mut Control,
    report: &mut Report,
) -> Result<()> {
    let signal = crate::signals::end_signal()?;
    let text = format!("degradation check {}", new_correlation_id());
    let outage = async {
        let stopped = match control.stop().await {
            Ok(done) => reached(memories, false).await.map(|seen| format!("{done}; {seen}")),
            Err(why) => Err(why),
        };
        if !report.note("stop OpenMemory", stopped) {
            return None;
        }
        let stored = deferred(outbox, memories, &text).await;
        let outbox_id = stored.as_ref().ok().map(|(id, _)| *id);
        report.note("store is deferred", stored.map(|(_, seen)| seen));
        outbox_id
    };
    let outage = tokio::select! {
        outbox_id = outage => Ok(outbox_id),
        () = signal => Err("it was told to stop".to_owned()),
    };
    let interrupted = outage.is_err();
    let outbox_id = outage.ok().flatten();
    let started = match control.start().await {
        Ok(done) => reached(memories, true).await.map(|seen| format!("{done}; {seen}")),
        Err(why) => Err(why),
    };
    let back = report.note("start OpenMemory", started);
    if interrupted {
        report.note("interrupted", Err("it was told to stop; OpenMemory was started again".to_owned()));
    }
    if let (true, Some(id)) = (back, outbox_id) {
        memories.recovered();
        let flushed = flushed(config, outbox, parts, memories, id).await;
        if report.note("flush delivers", flushed) {
            // A trial leaves nothing behind.
            memories.forget(SPACE, &hex(&sha256(text.as_bytes()))).await?;
        }
    }
    Ok(())
}

/// Waits until OpenMemory answers, or no longer does.
async fn reached(memories: &Memories, wanted: bool) -> Result<String, String> {
    let began = Tick::now();
    loop {
        let seen = memories.check_health().await;
        match (&seen, wanted) {
            (Ok(()), true) => return Ok("it answers".to_owned()),
            (Err(why), false) => return Ok(format!("it does not answer: {why}")),
            _ if Tick::now().since(began) > PATIENCE => {
                return Err(seen.map_or_else(
                    |why| format!("it still does not answer after {PATIENCE:?}: {why}"),
                    |()| format!("it still answers after {PATIENCE:?}"),
                ));
            }
            _ => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

async fn deferred(outbox: &Outbox, memories: &Memories, text: &str) -> Result<(i64, String), String> {
    let correlation_id = new_correlation_id();
    let memory = NewMemory {
        payload_md: text.to_owned(),
        target_space: Some(SPACE.to_owned()),
        kind: Some("verify".to_owned()),
        correlation_id: correlation_id.clone(),
        ..NewMemory::default()
    };
    let stored = memories.store(memory).await;
    let (Action::Deferred, Some(id)) = (stored.action, stored.outbox_id) else {
        return Err(format!("the store was answered `{}`: {}", stored.action.as_str(), stored.message));
    };
    let shown = outbox.show(id).await.map_err(|e| e.to_string())?;
    let Some((message, _)) = shown else { return Err(format!("message {id} is not in the outbox")) };
    let filter = AuditFilter { correlation_id: Some(correlation_id), limit: 10, ..AuditFilter::default() };
    let audited = memories.audit(filter).await.map_err(|e| e.to_string())?.items;
    if !audited.iter().any(|row| row.action == "redirect" && row.outbox_id == Some(id)) {
        return Err(format!("no audit with action redirect names message {id}"));
    }
    Ok((id, format!("deferred as message {id} ({}), audited as redirect", message.status.as_str())))
}

async fn flushed(
    config: &Config,
    outbox: &Outbox,
    parts: &Parts,
    memories: &Memories,
    id: i64,
) -> Result<String, String> {
    let began = Tick::now();
    let message = loop {
        flush(config, outbox, parts, memories).await.map_err(|e| e.to_string())?;
        let shown = outbox.show(id).await.map_err(|e| e.to_string())?;
        let Some((message, _)) = shown else { return Err(format!("message {id} is gone")) };
        // Somebody else's worker may have it in hand.
        if message.status.as_str() != "leased" || Tick::now().since(began) > PATIENCE {
            break message;
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    };
    let Some(memory_id) = message.result_ref.filter(|_| message.status.as_str() == "sent") else {
        let error = message.last_error.or(message.last_error_code).unwrap_or_default();
        return Err(format!("message {id} is {} after the flush: {error}", message.status.as_str()));
    };
    let filter = AuditFilter { outbox_id: Some(id), limit: 100, ..AuditFilter::default() };
    let audited = memories.audit(filter).await.map_err(|e| e.to_string())?.items;
    if !audited.iter().any(|row| row.action == "allow" && row.status == "success") {
        return Err(format!("no audit with action allow names message {id}"));
    }
    Ok(format!("message {id} was written as {memory_id}, audited as allow"))
}

async fn flush(config: &Config, outbox: &Outbox, parts: &Parts, memories: &Memories) -> Result<()> {
    memories.wake_all().await?;
    let worker = build(config, outbox, parts, &[(LANE, config.lane(LANE)?)], Output { json: true }, None).await?;
    worker.once().run(std::future::pending()).await?;
    Ok(())
}

/// Who stops and starts OpenMemory, and what the gateway is to talk to.
fn control(config: &mut Config) -> Result<Result<(Control, String), String>> {
    if let Some(commands) = config.verify.clone() {
        if config.memory.is_none() {
            return Ok(Err(
                "[verify] has commands, but [memory] url does not say which OpenMemory they are for".to_owned()
            ));
        }
        return Ok(Ok((Control::Commands(commands), "by the commands of [verify]".to_owned())));
    }
    if config.memory.is_some() {
        let what = "[memory] names an OpenMemory of yours, but [verify] does not say how to stop and start it: write stop_command and start_command, or verify with a configuration and a database of their own";
        return Ok(Err(what.to_owned()));
    }
    let free = std::net::TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
    let listen = free.map_err(|e| Failure::failed(format!("no free port: {e}")))?.to_string();
    let data = tempfile::tempdir().map_err(|e| Failure::failed(format!("no temporary folder: {e}")))?;
    config.use_openmemory(&format!("http://{listen}"))?;
    let what = "a stand-in of our own, as [verify] names no commands".to_owned();
    Ok(Ok((Control::StandIn { child: None, listen, data }, what)))
}
