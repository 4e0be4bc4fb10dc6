//! `server-version URL` prints what a database server says it is.

use std::process::ExitCode;

use proving::kit::Session;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let Some(url) = std::env::args().nth(1) else {
        eprintln!("usage: server-version URL");
        return ExitCode::from(2);
    };
    let version = Session::to(&url).await.texts("SELECT version()").await.remove(0);
    // PostgreSQL goes on about its compiler.
    println!("{}", version.split(" on ").next().unwrap_or_default());
    ExitCode::SUCCESS
}
