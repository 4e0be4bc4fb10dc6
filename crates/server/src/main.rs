//! `postrider`: the command. It reads arguments and configuration, calls the kernel and shows what came of it; no
//! decision about delivery is made here.

mod bench;
mod cli;
mod commands;
mod config;
mod couriers;
mod database;
mod demo;
mod failure;
mod logs;
mod loopback;
mod output;
mod secret;
mod table;

use std::process::ExitCode;

fn main() -> ExitCode {
    commands::main()
}
