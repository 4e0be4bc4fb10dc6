//! Secrets are references, not values: `env:NAME`, `file:PATH` or `exec:COMMAND` (a secrets manager's own client).

use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};

/// How often it was said that secrets may have changed.
static TOLD: AtomicU64 = AtomicU64::new(0);

/// Secrets may have changed: whoever uses one reads it again before its next use.
pub fn read_again() {
    TOLD.fetch_add(1, Ordering::SeqCst);
    tracing::info!("secrets are read again");
}

/// Grows whenever secrets may have changed.
pub fn told() -> u64 {
    TOLD.load(Ordering::SeqCst)
}

/// Does this text refer to a secret kept elsewhere?
pub fn is_reference(text: &str) -> bool {
    ["env:", "file:", "exec:"].iter().any(|scheme| text.starts_with(scheme))
}

/// The value a reference stands for; any other text stands for itself. The error says what to do, never the value.
pub fn resolve(text: &str) -> Result<String, String> {
    if let Some(name) = text.strip_prefix("env:") {
        std::env::var(name).map_err(|_| format!("the environment has no variable {name}; set it"))
    } else if let Some(path) = text.strip_prefix("file:") {
        let value = std::fs::read_to_string(path).map_err(|e| format!("cannot read {path}: {e}"))?;
        Ok(value.trim_end().to_owned())
    } else if let Some(command) = text.strip_prefix("exec:") {
        run(command)
    } else {
        Ok(text.to_owned())
    }
}

fn run(command: &str) -> Result<String, String> {
    let output = Command::new("sh").args(["-c", command]).stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.map_err(|e| format!("cannot run `{command}`: {e}"))?;
    if !output.status.success() {
        return Err(format!("`{command}` failed with {}", output.status));
    }
    let value =
        String::from_utf8(output.stdout).map_err(|_| format!("`{command}` printed something that is no text"))?;
    Ok(value.trim_end().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_resolved_and_plain_text_is_itself() {
        assert_eq!(resolve("exec:echo hush"), Ok("hush".into()));
        assert_eq!(resolve("plain"), Ok("plain".into()));
        assert!(resolve("env:POSTRIDER_NO_SUCH_VARIABLE").unwrap_err().contains("POSTRIDER_NO_SUCH_VARIABLE"));
        assert!(resolve("file:/no/such/file").unwrap_err().contains("/no/such/file"));
        assert!(resolve("exec:exit 3").is_err());
    }
}
