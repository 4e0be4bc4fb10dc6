//! What projects allow, as it is stored.

use postrider::store::Mode;
use postrider::tx::{Dialect, Tx, Value};
use postrider::{Error, Result};

use crate::Memories;
use crate::note::{Governance, check_project, project_of};

/// What a project says. One that says nothing yet gets a row that allows everything, for people to find and change.
pub(crate) async fn get_or_create(tx: &mut (dyn Tx + Send), space: &str) -> Result<Governance> {
    let project = project_of(space);
    let sql =
        "SELECT team_write_enabled, allowed_kinds_json, max_length FROM governance_settings WHERE project_key = ?";
    let rows = tx.query(sql, &[project.into()]).await?;
    let Some(row) = rows.first() else {
        let open = Governance::open(project);
        create(tx, &open).await?;
        return Ok(open);
    };
    let unreadable = |e| Error::database(format!("allowed_kinds_json of project `{project}` is no list: {e}"));
    let kinds = row.opt_text(1)?.map(|text| serde_json::from_str(&text)).transpose().map_err(unreadable)?;
    Ok(Governance {
        project_key: project.to_owned(),
        team_write_enabled: row.bool(0)?,
        allowed_kinds: kinds,
        max_length: row.opt_int(2)?.map(|n| n.max(0) as u64),
    })
}

/// Another store may do so at the same time: then its row stands, and says the same.
async fn create(tx: &mut (dyn Tx + Send), rules: &Governance) -> Result<()> {
    let mut params: Vec<Value> = vec![rules.project_key.as_str().into(), rules.team_write_enabled.into()];
    let now = tx.now().plus(0, &mut params);
    let (verb, tail) = match tx.dialect() {
        Dialect::Mysql => ("INSERT IGNORE", ""),
        _ => ("INSERT", " ON CONFLICT DO NOTHING"),
    };
    let sql = format!(
        "{verb} INTO governance_settings (project_key, team_write_enabled, updated_by, updated_at) VALUES (?, ?, 'default', {now}){tail}"
    );
    tx.execute(&sql, &params).await.map(drop)
}

async fn set(tx: &mut (dyn Tx + Send), rules: &Governance, by: &str) -> Result<()> {
    tx.execute("DELETE FROM governance_settings WHERE project_key = ?", &[rules.project_key.as_str().into()]).await?;
    let kinds = rules.allowed_kinds.as_ref().map(|kinds| serde_json::json!(kinds).to_string());
    let mut params: Vec<Value> = vec![
        rules.project_key.as_str().into(),
        rules.team_write_enabled.into(),
        kinds.into(),
        rules.max_length.map(|n| n as i64).into(),
        by.into(),
    ];
    let now = tx.now().plus(0, &mut params);
    let (text, bigint) = if tx.dialect() == Dialect::Postgres { ("?::text", "?::bigint") } else { ("?", "?") };
    let sql = format!(
        "INSERT INTO governance_settings (project_key, team_write_enabled, allowed_kinds_json, max_length, updated_by, updated_at)
         VALUES (?, ?, {text}, {bigint}, ?, {now})"
    );
    tx.execute(&sql, &params).await.map(drop)
}

impl Memories {
    /// What a project allows.
    pub async fn governance(&self, project: &str) -> Result<Governance> {
        check_project(project).map_err(Error::invalid)?;
        let space = format!("team:{project}");
        self.transact(Mode::Write, move |tx| {
            let space = space.clone();
            Box::pin(async move { get_or_create(tx, &space).await })
        })
        .await
    }

    /// Says what a project allows from now on.
    pub async fn govern(&self, rules: Governance, by: &str) -> Result<()> {
        rules.check().map_err(Error::invalid)?;
        let by = by.to_owned();
        self.transact(Mode::Write, move |tx| {
            let (rules, by) = (rules.clone(), by.clone());
            Box::pin(async move { set(tx, &rules, &by).await })
        })
        .await
    }
}
