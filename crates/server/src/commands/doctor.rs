//! `postrider doctor`: what is not as it should be, and with `--repair` what could be put right.

use crate::cli;
use crate::config::Config;
use crate::database;
use crate::doctor::{Doctor, Report};
use crate::failure::{Ending, Result};
use crate::output::Output;
use crate::parts::Parts;

pub async fn run(config: &Config, args: cli::Doctor, output: Output) -> Result<Ending> {
    let outbox = database::open_existing(config).await?;
    let parts = Parts::open(config, &outbox).await?;
    let report = Doctor::new(config, &outbox, &parts).round(args.repair).await?;
    output.show(&serde_json::json!(report), || shown(&report))?;
    Ok(Ending::failed_if(!report.ok))
}

fn shown(report: &Report) -> String {
    if report.findings.is_empty() {
        return "nothing is wrong\n".to_owned();
    }
    let mut text = String::new();
    for finding in &report.findings {
        let ids: Vec<String> = finding.ids.iter().map(ToString::to_string).collect();
        let more = if finding.count > ids.len() { ", …" } else { "" };
        let state = if finding.repaired { "repaired" } else { "LEFT" };
        text.push_str(&format!(
            "{state}  {} ({}): {}\n  {} of them: {}{more}\n",
            serde_json::json!(finding.check).as_str().unwrap_or_default(),
            finding.part,
            finding.message,
            finding.count,
            ids.join(", "),
        ));
        if !finding.repaired {
            text.push_str(&format!("  what to do: {}\n", finding.advice));
        }
    }
    text
}
