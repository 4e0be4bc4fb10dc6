//! The commands, one file each, and the way from the arguments to one of them.

mod config;
mod doctor;
mod enqueue;
mod gate;
mod mcp;
mod memory;
mod migrate;
mod ndjson;
mod orders;
mod outbox;
mod requeue;
mod scm;
mod serve;
mod token;
mod top;
mod verify;
mod webhooks;
mod worker;

use std::process::ExitCode;

pub use worker::{build, orchestrate, tend};

use clap::{CommandFactory, Parser};

use crate::bench;
use crate::cli::{Cli, Command, StandIn};
use crate::config::Config;
use crate::demo;
use crate::failure::{Ending, Failure, Result, exit_code};
use crate::logs;
use crate::output::{Output, print_bytes};
use crate::stand_in;

pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // Help and version are answers, the rest is wrong usage; clap knows where each belongs.
            let _ = message.print();
            return ExitCode::from(if message.use_stderr() { 2 } else { 0 });
        }
    };
    let code = exit_code(start(cli));
    logs::end();
    code
}

fn start(cli: Cli) -> Result<Ending> {
    let level = match cli.command {
        Command::Worker(_) | Command::Serve(_) => "info",
        Command::StandIn(_) => "off",
        // Its dead letter is part of the play.
        Command::Demo(_) => "error",
        _ => "warn",
    };
    let config = match cli.command {
        Command::Demo(_) | Command::StandIn(_) | Command::Completions { .. } | Command::Manual { .. } => None,
        _ => Some(Config::load(cli.config.as_deref(), cli.database.clone())?),
    };
    let format = cli.log.or(config.as_ref().and_then(|config| config.log)).unwrap_or_default();
    logs::start(format, level);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::failed(format!("cannot start: {e}")))?;
    let ending = runtime.block_on(run(cli, config));
    // A connection that hangs must not hold up the exit.
    runtime.shutdown_background();
    ending
}

async fn run(cli: Cli, config: Option<Config>) -> Result<Ending> {
    let output = Output { json: cli.json };
    let config = move || config.ok_or_else(|| Failure::failed("this command reads no configuration"));
    match cli.command {
        Command::Migrate(args) => migrate::run(&config()?, args, output).await,
        Command::Enqueue(args) => enqueue::run(&config()?, args, output).await,
        Command::Serve(args) => serve::run(&config()?, args, output).await,
        Command::Orders(args) => orders::run(&config()?, args, output).await,
        Command::Memory(args) => memory::run(&config()?, args, output).await,
        Command::Scm(args) => scm::run(&config()?, args, output).await,
        Command::Gate(args) => gate::run(&config()?, args, output).await,
        Command::Doctor(args) => doctor::run(&config()?, args, output).await,
        Command::Verify(args) => verify::run(&mut config()?, args, output).await,
        Command::Mcp => mcp::run(&config()?, output).await,
        Command::StandIn(StandIn::Openmemory(args)) => stand_in::run(args).await.map(|()| Ending::Done),
        Command::Webhooks(args) => webhooks::run(&config()?, args, output).await,
        Command::Token(args) => token::run(&config()?, args, output).await,
        Command::Config(args) => config::run(&config()?, &args, output),
        Command::Worker(args) => worker::run(&mut config()?, args, output).await,
        Command::Outbox(args) => outbox::run(&config()?, args, output).await,
        Command::Bench(args) => {
            let figures = bench::run(&args, &config()?.database).await?;
            if output.json {
                output.json(&figures)?
            } else {
                print_bytes(bench::show(&figures).as_bytes())?
            }
            Ok(Ending::Done)
        }
        Command::Top => top::run(&config()?, output).await,
        Command::Demo(args) => demo::run(args, output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "postrider", &mut script);
            print_bytes(&script).map(|()| Ending::Done)
        }
        Command::Manual { folder } => {
            let written = std::fs::create_dir_all(&folder)
                .and_then(|()| clap_mangen::generate_to(Cli::command().disable_help_subcommand(true), &folder));
            written.map_err(|e| Failure::failed(format!("cannot write to {}: {e}", folder.display())))?;
            Ok(Ending::Done)
        }
    }
}
