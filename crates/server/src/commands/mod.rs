//! The commands, one file each, and the way from the arguments to one of them.

mod enqueue;
mod migrate;
mod ndjson;
mod outbox;
mod worker;

use std::process::ExitCode;

use clap::{CommandFactory, Parser};

use crate::bench;
use crate::cli::{Cli, Command};
use crate::config::Config;
use crate::demo;
use crate::failure::{Ending, Failure, Result, exit_code};
use crate::logs;
use crate::output::{Output, print_bytes};

pub fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(message) => {
            // Help and version are answers, the rest is wrong usage; clap knows where each belongs.
            let _ = message.print();
            return ExitCode::from(if message.use_stderr() { 2 } else { 0 });
        }
    };
    exit_code(start(cli))
}

fn start(cli: Cli) -> Result<Ending> {
    let level = match cli.command {
        Command::Worker(_) => "info",
        // Its dead letter is part of the play.
        Command::Demo(_) => "error",
        _ => "warn",
    };
    logs::start(cli.log, level);
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build();
    let runtime = runtime.map_err(|e| Failure::failed(format!("cannot start: {e}")))?;
    let ending = runtime.block_on(run(cli));
    // A connection that hangs must not hold up the exit.
    runtime.shutdown_background();
    ending
}

async fn run(cli: Cli) -> Result<Ending> {
    let output = Output { json: cli.json };
    let config = || Config::load(cli.config.as_deref(), cli.database.clone());
    match cli.command {
        Command::Migrate(args) => migrate::run(&config()?, args, output).await,
        Command::Enqueue(args) => enqueue::run(&config()?, args, output).await,
        Command::Worker(args) => worker::run(&config()?, args, output).await,
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
        Command::Demo(args) => demo::run(args, output).await,
        Command::Completions { shell } => {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Cli::command(), "postrider", &mut script);
            print_bytes(&script).map(|()| Ending::Done)
        }
    }
}
