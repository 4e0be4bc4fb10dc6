//! The command as people and scripts use it: the real binary, real files, real servers.

// Processes take real time, and a deadline on them is read from a real clock.
#![allow(clippy::disallowed_methods)]

mod access;
mod api;
mod bad_input;
mod beside;
mod canaries;
mod clocks;
mod configuration;
mod crash_commands;
mod crash_points;
mod dashboard;
mod degrading;
mod demo;
mod disks;
mod documentation;
mod doors;
mod doubts;
mod failover;
mod fleet;
mod gate;
mod guarding;
mod home;
mod kill_loop;
mod looking;
mod mcp_edges;
mod memory;
mod observing;
mod on_every_database;
mod openmemory;
mod orders;
mod outage;
mod pooler;
mod readers;
mod receiver;
mod requeue;
mod roles;
mod scm;
mod scratch;
mod secrets;
mod serve;
mod sessions;
mod soak;
mod statuses;
mod telemetry;
mod terminal;
mod tls;
mod top;
mod webhook_fleet;
mod webhooks;
mod worker;
