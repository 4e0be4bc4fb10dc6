//! `postrider gate`: what works, and whether that is enough.

use postrider_memories::gate::Verdict;

use crate::cli;
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::gate::{Gate, GateRules, without_store};
use crate::output::Output;
use crate::parts;
use crate::table::Table;
use crate::writes;

pub async fn run(config: &Config, args: cli::Gate, output: Output) -> Result<Ending> {
    let mut rules = config.gate.with(&args.skip).map_err(Failure::usage)?;
    rules.mode = args.mode.map_or(rules.mode, |mode| mode.0);
    let verdict = look(config, &rules).await?;
    output.show(&verdict.as_json(), || shown(&verdict))?;
    Ok(Ending::failed_if(!verdict.passed))
}

async fn look(config: &Config, rules: &GateRules) -> Result<Verdict> {
    let outbox = match database::open_ready(config).await {
        Ok(outbox) => outbox,
        Err(failure) if failure.is_usage() => return Err(failure),
        Err(failure) => return Ok(without_store(rules, config.memory.is_some(), &failure.to_string())),
    };
    // What became of it is for the gate to tell.
    let _ = writes::probe(&outbox).await;
    let memories = config.memory.as_ref().map(|_| parts::memories(config, &outbox)).transpose()?;
    let webhooks = parts::webhooks(config, &outbox).await?;
    Ok(Gate::new(outbox, memories).with_webhooks(webhooks).look(rules).await)
}

fn shown(verdict: &Verdict) -> String {
    let mut table = Table::new(["capability", "status", "detail"]);
    for (name, standing) in &verdict.as_json()["capabilities"].as_object().cloned().unwrap_or_default() {
        let text = |key: &str| standing[key].as_str().unwrap_or_default().to_owned();
        let detail = [text("detail"), text("source")].into_iter().find(|text| !text.is_empty()).unwrap_or_default();
        table.row([name.clone(), text("status"), detail]);
    }
    let end = if verdict.passed { "passed" } else { "FAILED" };
    let reason = verdict.reason.as_ref().map_or(String::new(), |reason| format!(": {reason}"));
    format!("{}\n{} gate {end}{reason}\n", table.render(), verdict.mode.as_str())
}
