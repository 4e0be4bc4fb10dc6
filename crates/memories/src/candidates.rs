//! Knowledge candidates: what other programs found worth remembering, brought in as JSON lines.

use std::sync::Arc;

use postrider::message::{hex, sha256};
use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value};
use postrider::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::Memories;
use crate::note::{MAX_KIND_BYTES, check_space, holds_nul};

const MAX_TITLE_BYTES: usize = 1000;
const MAX_CONTENT_BYTES: usize = 1 << 20;

/// One candidate, as it comes in.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(deny_unknown_fields)]
pub struct NewCandidate {
    pub title: String,
    pub content_md: String,
    #[serde(default)]
    pub kind: Option<String>,
    /// From 0 to 1.
    #[serde(default)]
    pub confidence: Option<f64>,
    #[serde(default)]
    pub evidence_refs: Vec<serde_json::Value>,
    /// Left out: everybody finds it.
    #[serde(default)]
    pub target_space: Option<String>,
}

/// What an import did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Imported {
    pub imported: u64,
    /// There already, from an earlier import.
    pub known: u64,
}

impl std::ops::AddAssign for Imported {
    fn add_assign(&mut self, other: Imported) {
        self.imported += other.imported;
        self.known += other.known;
    }
}

impl NewCandidate {
    /// What is wrong with it, if anything.
    pub fn check(&self) -> Result<(), String> {
        let lengths = [
            ("title", self.title.trim().len(), self.title.len(), MAX_TITLE_BYTES),
            ("content_md", self.content_md.trim().len(), self.content_md.len(), MAX_CONTENT_BYTES),
            ("kind", 1, self.kind.as_ref().map_or(1, String::len), MAX_KIND_BYTES),
        ];
        for (name, least, bytes, most) in lengths {
            if least == 0 || !(1..=most).contains(&bytes) {
                return Err(format!("{name} has 1 to {most} bytes, not {bytes}"));
            }
        }
        if self.confidence.is_some_and(|confidence| !(0.0..=1.0).contains(&confidence)) {
            return Err("confidence is from 0 to 1".to_owned());
        }
        let texts = [Some(&self.title), Some(&self.content_md), self.kind.as_ref()];
        let refs = self.evidence_refs.iter().any(holds_nul);
        if refs || texts.into_iter().flatten().any(|text| text.contains('\0')) {
            return Err("the character U+0000 cannot be stored; take it out".to_owned());
        }
        self.target_space.as_deref().map_or(Ok(()), check_space)
    }

    fn sha(&self) -> String {
        hex(&sha256(serde_json::json!(self).to_string().as_bytes()))
    }
}

async fn insert(tx: &mut (dyn Tx + Send), candidate: &NewCandidate) -> Result<bool> {
    let mut params: Vec<Value> = vec![
        candidate.kind.as_deref().into(),
        candidate.title.as_str().into(),
        candidate.content_md.as_str().into(),
        candidate.confidence.into(),
        serde_json::json!(candidate.evidence_refs).to_string().into(),
        candidate.target_space.as_deref().into(),
        candidate.sha().into(),
    ];
    let created = tx.now().plus(0, &mut params);
    let (text, json, float) = match tx.dialect() {
        Dialect::Postgres => ("?::text", "?::text::jsonb", "?::float8"),
        _ => ("?", "?", "?"),
    };
    // Everything fits its column, so nothing else is ignored.
    let (verb, tail) = match tx.dialect() {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT (content_sha) DO NOTHING"),
    };
    let sql = format!(
        "{verb} INTO knowledge_candidates (kind, title, content_md, confidence, evidence_refs_json, target_space, content_sha, created_at)
         VALUES ({text}, ?, ?, {float}, {json}, {text}, ?, {created}){tail}"
    );
    Ok(tx.execute(&sql, &params).await? == 1)
}

impl Memories {
    /// Takes candidates in, in one transaction; one that is there already is left alone.
    pub async fn import(&self, candidates: Vec<NewCandidate>) -> Result<Imported> {
        for candidate in &candidates {
            candidate.check().map_err(Error::invalid)?;
        }
        let count = candidates.len() as u64;
        let candidates = Arc::new(candidates);
        let written = self.transact(Mode::Write, move |tx| {
            let candidates = candidates.clone();
            Box::pin(async move {
                let mut written = 0;
                for candidate in candidates.iter() {
                    written += u64::from(insert(tx, candidate).await?);
                }
                Ok(written)
            })
        });
        let imported = written.await?;
        self.catch_up(count as usize / crate::index::BATCH + 2).await?;
        Ok(Imported { imported, known: count - imported })
    }
}
