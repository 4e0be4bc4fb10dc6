//! `postrider`: the command. It reads arguments and configuration, calls the kernel and shows what came of it; no
//! decision about delivery is made here.

mod alerts;
mod bench;
mod cli;
mod commands;
mod config;
mod couriers;
mod database;
mod demo;
mod doctor;
mod failure;
mod gate;
mod http;
mod keyfile;
mod live;
mod logs;
mod loopback;
mod mcp;
mod mcp_wire;
mod metrics;
mod output;
mod parts;
mod roles;
mod roll;
mod schema;
mod secret;
mod sessions;
mod signals;
mod stand_in;
mod table;
mod tokens;
mod tools;
mod traces;
mod writes;

use std::process::ExitCode;

use mimalloc::MiMalloc;

/// Requests are many small allocations, freed by other threads than made them.
#[global_allocator]
static ALLOCATOR: MiMalloc = MiMalloc;

fn main() -> ExitCode {
    commands::main()
}
