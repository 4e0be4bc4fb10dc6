//! Which commits of a Git repository are new, parents before their children, in memory that does not grow with them: what
//! is known of the walk is kept in a nameless file that goes with it.

use std::collections::BTreeMap;

use git2::{ErrorCode, Oid, Repository};
use rusqlite::{Connection, OptionalExtension as _, params};

use super::Trouble;
use super::git::trouble;

/// Commits read before the repository is opened anew: the library keeps what it has read, and forgets it then.
const REOPEN_EVERY: u64 = 20_000;

/// The tables of a walk. `met` has every commit seen so far; `front` those whose parents were not looked at yet, by their
/// time; `stack` the way down to where the walk is; `found` what it was for.
const TABLES: &str = "
    PRAGMA journal_mode = OFF;
    PRAGMA synchronous = OFF;
    PRAGMA cache_size = -16384;
    CREATE TABLE met (id BLOB PRIMARY KEY, state INTEGER NOT NULL) WITHOUT ROWID;
    CREATE TABLE front (at INTEGER, id BLOB, PRIMARY KEY (at, id)) WITHOUT ROWID;
    CREATE TABLE stack (depth INTEGER PRIMARY KEY, id BLOB NOT NULL, ready INTEGER NOT NULL);
    CREATE TABLE found (n INTEGER PRIMARY KEY, id BLOB NOT NULL);
    BEGIN;";

/// What is known of a commit that was met.
const WANTED: i64 = 0;
const HIDDEN: i64 = 1;
const FOUND: i64 = 2;

/// A repository that forgets what was read of it.
pub(super) struct Forgetful {
    path: String,
    repository: Repository,
    read: u64,
}

impl Forgetful {
    pub(super) fn open(path: &str) -> Result<Self, Trouble> {
        let repository = Repository::open(path).map_err(|e| trouble(&e))?;
        Ok(Forgetful { path: path.to_owned(), repository, read: 0 })
    }

    /// For one more read.
    pub(super) fn get(&mut self) -> Result<&Repository, Trouble> {
        self.read += 1;
        if self.read.is_multiple_of(REOPEN_EVERY) {
            self.repository = Repository::open(&self.path).map_err(|e| trouble(&e))?;
        }
        Ok(&self.repository)
    }

    /// Its time and its parents; nothing if it is not there, as when it was rewritten and is gone. Where a shallow clone
    /// ends the library names no parents.
    fn commit(&mut self, id: Oid) -> Result<Option<(i64, Vec<Oid>)>, Trouble> {
        match self.get()?.find_commit(id) {
            Err(error) if error.code() == ErrorCode::NotFound => Ok(None),
            Err(error) => Err(trouble(&error)),
            Ok(commit) => Ok(Some((commit.time().seconds(), commit.parent_ids().collect()))),
        }
    }
}

fn kept(error: rusqlite::Error) -> Trouble {
    Trouble::Source(format!("the list of commits cannot be kept in a temporary file: {error}"))
}

fn id_of(row: &rusqlite::Row<'_>) -> rusqlite::Result<Oid> {
    let bytes = row.get_ref("id")?.as_blob()?;
    Oid::from_bytes(bytes)
        .map_err(|e| rusqlite::Error::FromSqlConversionFailure(0, rusqlite::types::Type::Blob, e.into()))
}

/// The new commits of a repository, and where they are kept.
pub(super) struct Walk(Connection);

impl Walk {
    /// Everything below `tips` that is not below `known`. Where clocks went backwards some of what is known may be among
    /// it; nothing new is ever left out.
    pub(super) fn new(path: &str, tips: &BTreeMap<String, String>, known: &[String]) -> Result<Self, Trouble> {
        // No name: a file of its own in the temporary directory, gone with the connection or the process.
        let walk = Walk(Connection::open("").map_err(kept)?);
        walk.0.execute_batch(TABLES).map_err(kept)?;
        let mut repository = Forgetful::open(path)?;
        let tips: Vec<Oid> = tips.values().filter_map(|tip| Oid::from_str(tip).ok()).collect();
        let known: Vec<Oid> = known.iter().filter_map(|tip| Oid::from_str(tip).ok()).collect();
        if !known.is_empty() {
            walk.hide(&mut repository, &tips, &known)?;
        }
        walk.find(&mut repository, &tips)?;
        Ok(walk)
    }

    /// Goes down from both sides, the newest first, until nothing that is wanted is left to look at.
    fn hide(&self, repository: &mut Forgetful, tips: &[Oid], known: &[Oid]) -> Result<(), Trouble> {
        let mut wanted = 0;
        for (ids, state) in [(tips, WANTED), (known, HIDDEN)] {
            for id in ids {
                self.meet(repository, *id, state, &mut wanted)?;
            }
        }
        while wanted > 0 {
            let Some((id, state)) = self.newest()? else { break };
            wanted -= u64::from(state == WANTED);
            for parent in repository.commit(id)?.map(|(_, parents)| parents).unwrap_or_default() {
                self.meet(repository, parent, state, &mut wanted)?;
            }
        }
        Ok(())
    }

    /// Notes a commit, and that its parents are to be looked at; `wanted` counts those in front that are.
    fn meet(&self, repository: &mut Forgetful, id: Oid, state: i64, wanted: &mut u64) -> Result<(), Trouble> {
        let before = self.state(id)?;
        if before.is_some_and(|before| before == HIDDEN || state == WANTED) {
            return Ok(());
        }
        // What is not there hides nothing, and has nothing to be found.
        let Some((at, _)) = repository.commit(id)? else { return Ok(()) };
        self.run("INSERT OR REPLACE INTO met (id, state) VALUES (?, ?)", params![id.as_bytes(), state])?;
        let fresh = self.run("INSERT OR IGNORE INTO front (at, id) VALUES (?, ?)", params![at, id.as_bytes()])?;
        match (state, before) {
            (WANTED, _) => *wanted += 1,
            // It was wanted until now, and waits still.
            (_, Some(_)) if fresh == 0 => *wanted -= 1,
            _ => {}
        }
        Ok(())
    }

    fn state(&self, id: Oid) -> Result<Option<i64>, Trouble> {
        let mut select = self.0.prepare_cached("SELECT state FROM met WHERE id = ?").map_err(kept)?;
        select.query_row([id.as_bytes()], |row| row.get(0)).optional().map_err(kept)
    }

    /// Takes the newest from the front.
    fn newest(&self) -> Result<Option<(Oid, i64)>, Trouble> {
        let sql = "SELECT front.id AS id, at, state FROM front JOIN met ON met.id = front.id ORDER BY at DESC, front.id DESC LIMIT 1";
        let mut select = self.0.prepare_cached(sql).map_err(kept)?;
        let newest = select.query_row([], |row| Ok((id_of(row)?, row.get::<_, i64>("at")?, row.get("state")?)));
        let Some((id, at, state)) = newest.optional().map_err(kept)? else { return Ok(None) };
        self.run("DELETE FROM front WHERE at = ? AND id = ?", params![at, id.as_bytes()])?;
        Ok(Some((id, state)))
    }

    /// From each tip down to what is hidden or was found before, and up again: a commit is found after its parents.
    fn find(&self, repository: &mut Forgetful, tips: &[Oid]) -> Result<(), Trouble> {
        let mut depth = 0_i64;
        for tip in tips {
            self.push(&mut depth, *tip, false)?;
            while depth > 0 {
                let (id, ready) = self.pop(&mut depth)?;
                if ready {
                    self.run("INSERT INTO found (id) VALUES (?)", [id.as_bytes()])?;
                    continue;
                }
                let sql = "INSERT INTO met (id, state) VALUES (?1, ?2) ON CONFLICT (id) DO UPDATE SET state = ?2 WHERE state = ?3";
                if self.run(sql, params![id.as_bytes(), FOUND, WANTED])? == 0 {
                    continue;
                }
                let Some((_, parents)) = repository.commit(id)? else {
                    return Err(Trouble::Source(format!("git: commit {id} is missing; the repository is damaged")));
                };
                self.push(&mut depth, id, true)?;
                // The first parent's side comes first.
                for parent in parents.into_iter().rev() {
                    self.push(&mut depth, parent, false)?;
                }
            }
        }
        Ok(())
    }

    fn push(&self, depth: &mut i64, id: Oid, ready: bool) -> Result<(), Trouble> {
        *depth += 1;
        self.run("INSERT INTO stack (depth, id, ready) VALUES (?, ?, ?)", params![*depth, id.as_bytes(), ready])?;
        Ok(())
    }

    fn pop(&self, depth: &mut i64) -> Result<(Oid, bool), Trouble> {
        let mut select = self.0.prepare_cached("SELECT id, ready FROM stack WHERE depth = ?").map_err(kept)?;
        let top = select.query_row([*depth], |row| Ok((id_of(row)?, row.get("ready")?))).map_err(kept)?;
        self.run("DELETE FROM stack WHERE depth = ?", [*depth])?;
        *depth -= 1;
        Ok(top)
    }

    fn run(&self, sql: &str, params: impl rusqlite::Params) -> Result<usize, Trouble> {
        self.0.prepare_cached(sql).and_then(|mut statement| statement.execute(params)).map_err(kept)
    }

    pub(super) fn total(&self) -> Result<u64, Trouble> {
        let count: i64 = self.0.query_row("SELECT COUNT(*) FROM found", [], |row| row.get(0)).map_err(kept)?;
        Ok(count as u64)
    }

    /// The commits found after the first `n`, at most so many.
    pub(super) fn after(&self, n: u64, limit: usize) -> Result<Vec<Oid>, Trouble> {
        let sql = "SELECT id FROM found WHERE n > ? ORDER BY n LIMIT ?";
        let mut select = self.0.prepare_cached(sql).map_err(kept)?;
        let ids = select.query_map(params![n as i64, limit as i64], id_of).map_err(kept)?;
        ids.collect::<rusqlite::Result<_>>().map_err(kept)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::error::Error;

    use git2::{Oid, Repository, Signature, Time};

    use super::Walk;

    /// A repository in which every commit is made at the time one wants.
    struct Made(tempfile::TempDir, Repository);

    impl Made {
        fn new() -> Result<Self, Box<dyn Error>> {
            let folder = tempfile::tempdir()?;
            let repository = Repository::init_bare(folder.path())?;
            Ok(Made(folder, repository))
        }

        fn commit(&self, at: i64, parents: &[Oid]) -> Result<Oid, Box<dyn Error>> {
            let tree = self.1.find_tree(self.1.treebuilder(None)?.write()?)?;
            let who = Signature::new("Ann", "ann@example.org", &Time::new(at, 0))?;
            let parents = parents.iter().map(|id| self.1.find_commit(*id)).collect::<Result<Vec<_>, _>>()?;
            let parents: Vec<_> = parents.iter().collect();
            let message = format!("at {at}, {} parents", parents.len());
            Ok(self.1.commit(None, &who, &who, &message, &tree, &parents)?)
        }

        fn walk(&self, tips: &[Oid], known: &[Oid]) -> Result<Vec<Oid>, Box<dyn Error>> {
            let tips: BTreeMap<String, String> =
                tips.iter().enumerate().map(|(n, id)| (n.to_string(), id.to_string())).collect();
            let known: Vec<String> = known.iter().map(Oid::to_string).collect();
            let path = self.0.path().to_str().ok_or("the path is no text")?;
            let walk = Walk::new(path, &tips, &known)?;
            let ids = walk.after(0, 1000)?;
            assert_eq!(walk.total()?, ids.len() as u64);
            Ok(ids)
        }
    }

    #[test]
    fn parents_come_before_their_children_and_nothing_twice() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let root = made.commit(100, &[])?;
        let (left, right) = (made.commit(110, &[root])?, made.commit(111, &[root])?);
        let merge = made.commit(120, &[left, right])?;
        let other = made.commit(130, &[right])?;
        assert_eq!(made.walk(&[merge, other], &[])?, [root, left, right, merge, other]);
        assert_eq!(made.walk(&[merge, merge], &[])?, [root, left, right, merge]);
        Ok(())
    }

    #[test]
    fn what_is_below_a_known_tip_is_not_new() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let root = made.commit(100, &[])?;
        let (left, right) = (made.commit(110, &[root])?, made.commit(111, &[root])?);
        let merge = made.commit(120, &[left, right])?;
        assert_eq!(made.walk(&[merge], &[left])?, [right, merge]);
        assert_eq!(made.walk(&[merge], &[merge])?, []);
        assert_eq!(made.walk(&[root], &[merge])?, []);
        // A known tip that is gone hides nothing.
        let gone = Oid::from_str("1111111111111111111111111111111111111111")?;
        assert_eq!(made.walk(&[left], &[gone])?, [root, left]);
        Ok(())
    }

    /// A rewritten branch: what it left behind is known, what replaces it is new.
    #[test]
    fn a_rewritten_branch_gives_its_new_commits() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let root = made.commit(100, &[])?;
        let before = made.commit(110, &[root])?;
        let after = made.commit(111, &[root])?;
        let tip = made.commit(112, &[after])?;
        assert_eq!(made.walk(&[tip], &[before])?, [after, tip]);
        Ok(())
    }

    /// Whatever clocks say, nothing new is left out, and what is known may at worst come again.
    #[test]
    fn clocks_that_go_backwards_leave_nothing_out() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let root = made.commit(5000, &[])?;
        let mut line = vec![root];
        for at in [4000, 6000, 10, 7000, 1, 8000] {
            line.push(made.commit(at, &[*line.last().unwrap_or(&root)])?);
        }
        for (n, known) in line.iter().enumerate() {
            let side = made.commit(2, &[line[2]])?;
            let tip = made.commit(3, &[line[6], side])?;
            let found = made.walk(&[tip], &[*known])?;
            for new in line[n + 1..].iter().chain([&tip]) {
                assert!(found.contains(new), "a commit above {n} was left out");
            }
            let place = |id: &Oid| found.iter().position(|found| found == id);
            for pair in line.windows(2) {
                assert!(place(&pair[1]).is_none() || place(&pair[0]) < place(&pair[1]), "a parent came late");
            }
        }
        Ok(())
    }

    #[test]
    fn a_missing_commit_is_no_end_of_history() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let root = made.commit(100, &[])?;
        let tip = made.commit(110, &[root])?;
        let id = root.to_string();
        std::fs::remove_file(made.0.path().join("objects").join(&id[..2]).join(&id[2..]))?;
        let error = made.walk(&[tip], &[]).expect_err("its parent is gone").to_string();
        assert!(error.contains("damaged"), "{error}");
        Ok(())
    }

    /// Deterministic graphs with several parents and clocks of every kind, against the plain definition.
    #[test]
    fn as_the_definition_says_on_many_graphs() -> Result<(), Box<dyn Error>> {
        let made = Made::new()?;
        let mut seed = 42_u64;
        let mut next = move |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below.max(1)
        };
        for round in 0..30 {
            let mut graph: Vec<(Oid, Vec<usize>)> = Vec::new();
            for n in 0..24 {
                let mut parents: Vec<usize> = (0..next(4).min(n)).map(|_| next(n)).collect();
                parents.sort_unstable();
                parents.dedup();
                // Clocks run forward in every other round.
                let at = 1000 * round + if round % 2 == 0 { n as i64 } else { next(500) as i64 };
                let ids: Vec<Oid> = parents.iter().map(|parent| graph[*parent].0).collect();
                graph.push((made.commit(at, &ids)?, parents));
            }
            let below = |tips: &[usize]| {
                let (mut below, mut left) = (vec![false; graph.len()], tips.to_vec());
                while let Some(n) = left.pop() {
                    if !std::mem::replace(&mut below[n], true) {
                        left.extend(&graph[n].1);
                    }
                }
                below
            };
            let (tips, known) = ([next(24), 23], [next(24), next(24)]);
            let found = made.walk(&tips.map(|n| graph[n].0), &known.map(|n| graph[n].0))?;
            let (wanted, hidden) = (below(&tips), below(&known));
            for (n, (id, _)) in graph.iter().enumerate() {
                let times = found.iter().filter(|found| *found == id).count();
                match (wanted[n], hidden[n]) {
                    (true, false) => assert_eq!(times, 1, "commit {n} of round {round} is new"),
                    (true, true) if round % 2 == 1 => assert!(times <= 1),
                    _ => assert_eq!(times, 0, "commit {n} of round {round} is not new"),
                }
            }
        }
        Ok(())
    }
}
