//! `postrider mcp`: the tools over standard input and output, for a program that starts us as its server. Queued memories
//! are brought to OpenMemory meanwhile.

use postrider_memories::LANE;
use rmcp::ServiceExt;
use tokio::sync::watch;

use super::worker::{build, tend};
use crate::config::Config;
use crate::database;
use crate::failure::{Ending, Failure, Result};
use crate::gate::Gate;
use crate::http::Caller;
use crate::mcp::Server;
use crate::output::Output;
use crate::parts::Parts;
use crate::tools::Tools;

pub async fn run(config: &Config, _: Output) -> Result<Ending> {
    let outbox = database::open_ready(config).await?;
    let parts = Parts::open(config, &outbox).await?;
    let tools = Tools { outbox: outbox.clone(), memories: parts.memories.clone(), meters: None };
    let (stop, stopped) = watch::channel(false);
    let mut tending = None;
    if let (Some(memories), true) = (&parts.memories, config.enabled) {
        // Standard output is the protocol's: nothing else may print there.
        let quiet = Output { json: true };
        let worker = build(config, &outbox, &parts, &[(LANE, config.lane(LANE)?)], quiet, None).await?;
        let mut over = stopped.clone();
        let worker = tokio::spawn(worker.run(async move { drop(over.wait_for(|stop| *stop).await) }));
        tending = Some((worker, tend(memories, true, stopped)));
    }
    let gate = Gate::new(outbox.clone(), parts.memories.clone()).with_webhooks(parts.webhooks.clone());
    crate::gate::warn(&gate, &config.gate);
    let signal = crate::signals::stop_signal()?;
    let server = Server { tools, caller: Some(Caller::local()) };
    let conversation = async {
        let (lines, written) = crate::mcp_wire::stdio();
        let running = server.serve(lines).await;
        let running = running.map_err(|e| Failure::failed(format!("MCP could not be begun: {e}")))?;
        drop(running.waiting().await);
        drop(written.await);
        Ok::<(), Failure>(())
    };
    let ended = tokio::select! {
        ended = conversation => ended,
        () = signal => Ok(()),
    };
    let _ = stop.send(true);
    if let Some((worker, tending)) = tending {
        let _ = tending.await;
        let _ = worker.await;
    }
    outbox.flush().await;
    ended.map(|()| Ending::Done)
}
