//! Tests of the proving ground, and what it proves.

mod servers;
mod sweep;
