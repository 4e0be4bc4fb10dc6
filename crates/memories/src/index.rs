//! The index that finds what we have of memories, knowledge candidates and the logbook, when the memory service cannot be
//! asked: one table of terms, the same on all three databases.

use std::collections::HashMap;

use postrider::tx::{Dialect, Tx, Value, in_ids};
use postrider::{Result, bulk};

use crate::spaces::Spaces;
use crate::terms::{Probe, probes, terms};

/// Of one word, the newest so many of each source are looked at.
const MOST_PER_TERM: usize = 1000;
/// Rows taken into the index in one transaction.
pub(crate) const BATCH: usize = 200;

/// Where something was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Source {
    Memory,
    Candidate,
    Event,
}

impl Source {
    const ALL: [Source; 3] = [Source::Memory, Source::Candidate, Source::Event];

    pub fn as_str(self) -> &'static str {
        match self {
            Source::Memory => "memory",
            Source::Candidate => "knowledge_candidates",
            Source::Event => "logbook_events",
        }
    }
}

/// Takes a text into the index. To be done once for each.
pub(crate) async fn write(
    tx: &mut (dyn Tx + Send),
    source: Source,
    ref_id: i64,
    space: &str,
    text: &str,
) -> Result<()> {
    let columns = [("term", "text"), ("target_space", "text"), ("source", "text"), ("ref_id", "bigint")];
    let rows: Vec<Vec<Value>> = terms(text)
        .into_iter()
        .map(|term| vec![term.into(), space.into(), source.as_str().into(), ref_id.into()])
        .collect();
    bulk::insert(tx, "memory_terms", &columns, &rows, false).await.map(drop)
}

/// Takes a text out of the index again.
pub(crate) async fn remove(
    tx: &mut (dyn Tx + Send),
    source: Source,
    ref_id: i64,
    space: &str,
    text: &str,
) -> Result<()> {
    for term in terms(text) {
        let key: [Value; 4] = [term.into(), space.into(), source.as_str().into(), ref_id.into()];
        let sql = "DELETE FROM memory_terms WHERE term = ? AND target_space = ? AND source = ? AND ref_id = ?";
        tx.execute(sql, &key).await?;
    }
    Ok(())
}

/// What a question finds, best first: rare words count more, and of equals the newest is first. A score of 1 has all of its
/// words.
pub(crate) async fn search(
    tx: &mut (dyn Tx + Send),
    question: &str,
    spaces: &Spaces,
    limit: usize,
) -> Result<Vec<(Source, i64, f64)>> {
    let probes = probes(question);
    let mut scores: HashMap<(Source, i64), f64> = HashMap::new();
    let mut most = f64::MIN_POSITIVE;
    for probe in &probes {
        let mut hits = Vec::new();
        for source in Source::ALL {
            for id in ids_of(tx, probe, source, spaces).await? {
                hits.push((source, id));
            }
        }
        let weight = (1.0 + 3.0 * MOST_PER_TERM as f64 / (1.0 + hits.len() as f64)).ln();
        most += weight;
        for hit in hits {
            *scores.entry(hit).or_default() += weight;
        }
    }
    let mut found: Vec<(Source, i64, f64)> =
        scores.into_iter().map(|((source, id), score)| (source, id, score / most)).collect();
    found.sort_by(|a, b| b.2.total_cmp(&a.2).then(a.0.cmp(&b.0)).then(b.1.cmp(&a.1)));
    found.truncate(limit);
    Ok(found)
}

/// What of one source has a word; each source has ids of its own, so each has its own newest.
async fn ids_of(tx: &mut (dyn Tx + Send), probe: &Probe, source: Source, spaces: &Spaces) -> Result<Vec<i64>> {
    let mut params: Vec<Value> = Vec::new();
    let mut condition = match probe {
        Probe::Exact(term) => {
            params.push(term.into());
            "term = ?".to_owned()
        }
        Probe::Prefix(prefix) => {
            // Terms that go on go on with a `u`.
            params.extend([prefix.into(), format!("{prefix}v").into()]);
            "term >= ? AND term < ?".to_owned()
        }
    };
    if let Some(of_spaces) = spaces.condition(tx.dialect(), "target_space", &mut params) {
        condition.push_str(&format!(" AND {of_spaces}"));
    }
    params.push(source.as_str().into());
    let sql = format!(
        "SELECT DISTINCT ref_id FROM memory_terms WHERE {condition} AND source = ? ORDER BY ref_id DESC LIMIT {MOST_PER_TERM}"
    );
    tx.query(&sql, &params).await?.iter().map(|row| row.int(0)).collect()
}

struct Table {
    source: Source,
    name: &'static str,
    id: &'static str,
    text: &'static str,
}

const TABLES: [Table; 2] = [
    Table {
        source: Source::Candidate,
        name: "knowledge_candidates",
        id: "candidate_id",
        text: "title, content_md, kind",
    },
    Table { source: Source::Event, name: "logbook_events", id: "event_id", text: "event_type, {payload}, source" },
];

/// Takes rows in that are new in the tables others write; answers how many.
pub(crate) async fn catch_up(tx: &mut (dyn Tx + Send)) -> Result<usize> {
    let dialect = tx.dialect();
    let (new, done) = if dialect == Dialect::Postgres { ("NOT indexed", "TRUE") } else { ("indexed = 0", "1") };
    let payload = if dialect == Dialect::Postgres { "payload_json::text" } else { "payload_json" };
    let skip = if dialect == Dialect::Sqlite { "" } else { " FOR UPDATE SKIP LOCKED" };
    let mut taken = 0;
    for Table { source, name, id, text } in TABLES {
        let text = text.replace("{payload}", payload);
        let sql =
            format!("SELECT {id}, target_space, {text} FROM {name} WHERE {new} ORDER BY {id} LIMIT {BATCH}{skip}");
        let rows = tx.query(&sql, &[]).await?;
        let mut ids = Vec::with_capacity(rows.len());
        for row in &rows {
            let parts = [row.opt_text(2)?, row.opt_text(3)?, row.opt_text(4)?];
            let text = parts.into_iter().flatten().collect::<Vec<_>>().join("\n");
            let space = row.opt_text(1)?.unwrap_or_default();
            write(tx, source, row.int(0)?, &space, &text).await?;
            ids.push(row.int(0)?);
        }
        if !ids.is_empty() {
            let mut params = Vec::new();
            let list = in_ids(dialect, &ids, &mut params);
            tx.execute(&format!("UPDATE {name} SET indexed = {done} WHERE {id} {list}"), &params).await?;
        }
        taken += ids.len();
    }
    Ok(taken)
}
