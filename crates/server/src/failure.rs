//! How a command ends: the exit codes people script against, and errors that say what happened and what to do.

use std::fmt::Display;
use std::process::ExitCode;

use postrider::Error;
use postrider::error::Kind;

/// How a command that ran to its end came out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    Done,
    /// Done, but a message or a check failed; what is on stdout says which.
    SomethingFailed,
}

impl Ending {
    pub fn failed_if(failed: bool) -> Self {
        if failed { Ending::SomethingFailed } else { Ending::Done }
    }
}

/// Why a command could not do its work.
#[derive(Debug)]
pub struct Failure {
    code: u8,
    message: String,
}

pub type Result<T, E = Failure> = std::result::Result<T, E>;

impl Failure {
    /// A message or a check failed (1).
    pub fn failed(message: impl Into<String>) -> Self {
        Failure { code: 1, message: message.into() }
    }

    /// Wrong usage, configuration or input (2).
    pub fn usage(message: impl Into<String>) -> Self {
        Failure { code: 2, message: message.into() }
    }

    /// A needed service is unreachable (3).
    pub fn unreachable(message: impl Into<String>) -> Self {
        Failure { code: 3, message: message.into() }
    }

    /// Whoever read our output has gone; there is nobody to tell.
    pub fn nobody_listens() -> Self {
        Failure { code: 0, message: String::new() }
    }

    pub fn is_usage(&self) -> bool {
        self.code == 2
    }

    pub fn with(mut self, more: impl Display) -> Self {
        self.message.push_str(&more.to_string());
        self
    }

    #[cfg(test)]
    pub fn message(&self) -> &str {
        &self.message
    }
}

impl Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let code = match error.kind {
            Kind::Invalid | Kind::UnknownLane | Kind::Schema | Kind::Denied | Kind::KeyMissing => 2,
            Kind::Unreachable | Kind::Timeout | Kind::Busy | Kind::Locked | Kind::Overloaded | Kind::Unavailable => 3,
            Kind::Conflict | Kind::LaneOwned | Kind::Database => 1,
        };
        let mut message = error.to_string();
        if error.kind == Kind::Unreachable && !message.contains(';') {
            message.push_str("; is it running, and is --database right?");
        }
        if error.kind == Kind::Denied {
            message.push_str("; the database's user lacks a role: see Roles in docs/operating.md");
        }
        Failure { code, message }
    }
}

/// Tells the failure on stderr and turns the end into an exit code.
pub fn exit_code(ending: Result<Ending>) -> ExitCode {
    match ending {
        Ok(Ending::Done) => ExitCode::SUCCESS,
        Ok(Ending::SomethingFailed) => ExitCode::from(1),
        Err(failure) => {
            if !failure.message.is_empty() {
                complain(&failure.message);
            }
            ExitCode::from(failure.code)
        }
    }
}

/// One `error:` line on stderr. A closed stderr is no reason to panic, nor one that nobody reads to wait.
pub fn complain(message: &str) {
    crate::logs::say(&format!("error: {message}\n"));
}
