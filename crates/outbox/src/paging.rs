//! Lists of any table, the newest first. A page looks at so many rows and no more, however many there are and wherever those
//! wanted lie: by an index if it says they are few, else among the newest ids. A page that is not full and has a next one
//! says how far it has looked.

use crate::error::Result;
use crate::settle::in_ids;
use crate::tx::{Row, Tx, Value};

/// Rows of a table that one page looks at, from its beginning.
const SEARCHED: i64 = 50_000;
/// Up to so many candidates are found by an index, whatever their ids.
const FEW: usize = 5_000;
/// Candidates fetched at a time.
const CHUNK: usize = 500;

/// A part of a list, the newest first.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Page<T> {
    pub items: Vec<T>,
    /// Where the page after this one begins: it has ids below this. `None` at the end of the list.
    pub next: Option<i64>,
}

impl<T> Page<T> {
    /// From what was asked for with one more than `limit`.
    pub fn of(mut items: Vec<T>, limit: usize, id: impl Fn(&T) -> i64) -> Self {
        let more = items.len() > limit;
        items.truncate(limit);
        let next = items.last().filter(|_| more).map(id);
        Page { items, next }
    }

    /// If it is not full: the list may go on below what was looked at.
    pub(crate) fn looked_down_to(mut self, down_to: i64) -> Self {
        self.next = self.next.or((down_to > 0).then_some(down_to + 1));
        self
    }

    /// The same page of what `read` makes of each.
    pub fn read<U>(&self, read: impl Fn(&T) -> Result<U>) -> Result<Page<U>> {
        Ok(Page { items: self.items.iter().map(read).collect::<Result<_>>()?, next: self.next })
    }
}

/// What is listed of a table. The id is the first column of its rows.
pub struct Rows<'a> {
    pub table: &'a str,
    pub id: &'a str,
    /// What follows SELECT, and its values.
    pub columns: String,
    pub bound: Vec<Value>,
    /// What is asked of a row, and its values.
    pub wanted: Wanted,
}

/// Conditions, each written so that no index is used for it: none of them knows the order of ids.
#[derive(Clone, Default)]
pub struct Wanted {
    sql: String,
    params: Vec<Value>,
}

impl Wanted {
    /// A column that has this value, if one is asked for.
    pub fn is(mut self, column: &str, value: Option<impl Into<Value>>) -> Self {
        if let Some(value) = value {
            self.sql.push_str(&format!(" AND COALESCE({column}, {column}) = ?"));
            self.params.push(value.into());
        }
        self
    }

    /// Any other condition; it must be one no index can be used for.
    pub fn and(mut self, condition: &str, params: impl IntoIterator<Item = Value>) -> Self {
        self.sql.push_str(&format!(" AND {condition}"));
        self.params.extend(params);
        self
    }
}

/// Ids in the order of an index, so that no other is as cheap: the statement without its LIMIT, and its values.
pub struct Candidates {
    sql: String,
    params: Vec<Value>,
}

impl Candidates {
    pub fn new(sql: impl Into<String>, params: impl Into<Vec<Value>>) -> Self {
        Candidates { sql: sql.into(), params: params.into() }
    }
}

/// All candidates, if there is an index that knows them and they are few.
pub async fn few(tx: &mut (dyn Tx + Send), candidates: &[Candidates]) -> Result<Option<Vec<i64>>> {
    if candidates.is_empty() {
        return Ok(None);
    }
    let mut ids = Vec::new();
    for Candidates { sql, params } in candidates {
        for row in tx.query(&format!("{sql} LIMIT {}", FEW + 1 - ids.len()), params).await? {
            ids.push(row.int(0)?);
        }
        if ids.len() > FEW {
            return Ok(None);
        }
    }
    Ok(Some(ids))
}

/// A page of a table. `few` are all there can be, if that is known.
pub async fn page(
    tx: &mut (dyn Tx + Send),
    rows: &Rows<'_>,
    few: Option<Vec<i64>>,
    before: Option<i64>,
    limit: u32,
) -> Result<Page<Row>> {
    let (found, down_to) = part(tx, rows, few, before, limit.saturating_add(1)).await?;
    let page = Page::of(found, limit as usize, |row| row.int(0).unwrap_or_default());
    Ok(page.looked_down_to(down_to))
}

/// At most `limit` rows, and the id down to which they are all there are; 0 where nothing was left out for its place.
pub(crate) async fn part(
    tx: &mut (dyn Tx + Send),
    rows: &Rows<'_>,
    few: Option<Vec<i64>>,
    before: Option<i64>,
    limit: u32,
) -> Result<(Vec<Row>, i64)> {
    match few {
        Some(ids) => Ok((rows.among(tx, ids, before, limit as usize).await?, 0)),
        None => rows.newest(tx, before, limit as usize).await,
    }
}

impl Rows<'_> {
    /// Those with these ids.
    async fn among(
        &self,
        tx: &mut (dyn Tx + Send),
        mut ids: Vec<i64>,
        before: Option<i64>,
        limit: usize,
    ) -> Result<Vec<Row>> {
        ids.retain(|id| before.is_none_or(|before| *id < before));
        ids.sort_unstable_by(|a, b| b.cmp(a));
        let mut found = Vec::new();
        for chunk in ids.chunks(CHUNK.max(limit)) {
            let mut params = Vec::new();
            let condition = format!("{} {}", self.id, in_ids(tx.dialect(), chunk, &mut params));
            found.extend(self.select(tx, &condition, params, limit - found.len()).await?);
            if found.len() == limit {
                break;
            }
        }
        Ok(found)
    }

    /// The newest.
    async fn newest(&self, tx: &mut (dyn Tx + Send), before: Option<i64>, limit: usize) -> Result<(Vec<Row>, i64)> {
        let (table, id) = (self.table, self.id);
        let top = match before {
            Some(before) => before,
            None => {
                let rows = tx.query(&format!("SELECT MAX({id}) FROM {table}"), &[]).await?;
                rows.first().map(|row| row.opt_int(0)).transpose()?.flatten().unwrap_or(0).saturating_add(1)
            }
        };
        let near = top.saturating_sub(SEARCHED).max(0);
        let mut found = self.between(tx, near, top, limit).await?;
        let mut down_to = near;
        if found.len() < limit {
            // So many rows, not so many ids: of some only a few are left.
            let sql = format!("SELECT {id} FROM {table} WHERE {id} < ? ORDER BY {id} DESC LIMIT 1 OFFSET {SEARCHED}");
            let rows = tx.query(&sql, &[top.into()]).await?;
            down_to = rows.first().map(|row| row.int(0)).transpose()?.unwrap_or(0);
            if down_to < near {
                found.extend(self.between(tx, down_to, near + 1, limit - found.len()).await?);
            }
        }
        let last = found.last().filter(|_| found.len() == limit).map(|last| last.int(0)).transpose()?;
        Ok((found, last.map_or(down_to, |last| last - 1)))
    }

    /// Those with ids above `floor` and below `top`.
    async fn between(&self, tx: &mut (dyn Tx + Send), floor: i64, top: i64, limit: usize) -> Result<Vec<Row>> {
        let condition = format!("{id} > ? AND {id} < ?", id = self.id);
        self.select(tx, &condition, vec![floor.into(), top.into()], limit).await
    }

    async fn select(
        &self,
        tx: &mut (dyn Tx + Send),
        condition: &str,
        params: Vec<Value>,
        limit: usize,
    ) -> Result<Vec<Row>> {
        let Rows { table, id, columns, bound, wanted } = self;
        let sql =
            format!("SELECT {columns} FROM {table} WHERE {condition}{} ORDER BY {id} DESC LIMIT {limit}", wanted.sql);
        let params = [bound.clone(), params, wanted.params.clone()].concat();
        tx.query(&sql, &params).await
    }
}
