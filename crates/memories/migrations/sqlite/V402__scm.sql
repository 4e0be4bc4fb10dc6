-- Repositories whose history is kept here, and what is known of it. Synchronising writes these tables and its watermark in
-- `kv (scm.sync/…)`; turning rows into memories reads them by a cursor of its own, `kv (gateway.consume/…)`.
CREATE TABLE scm_repos (
    repo_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    kind         TEXT    NOT NULL CHECK (kind IN ('git', 'svn', 'gitlab')),
    url          TEXT    NOT NULL,
    name         TEXT    NOT NULL,
    target_space TEXT,
    created_at   INTEGER NOT NULL,
    UNIQUE (kind, url)
);
CREATE TABLE scm_git_commits (
    id           INTEGER PRIMARY KEY AUTOINCREMENT,
    repo_id      BIGINT  NOT NULL,
    sha          TEXT    NOT NULL,
    author       TEXT    NOT NULL,
    authored_at  INTEGER NOT NULL,
    committed_at INTEGER NOT NULL,
    message      TEXT    NOT NULL,
    parents      TEXT    NOT NULL,
    stats_json   TEXT,
    UNIQUE (repo_id, sha)
);
CREATE INDEX idx_scm_git_commits_order ON scm_git_commits (repo_id, id);
CREATE TABLE scm_svn_revisions (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    repo_id    BIGINT  NOT NULL,
    revision   BIGINT  NOT NULL,
    author     TEXT    NOT NULL,
    at         INTEGER NOT NULL,
    message    TEXT    NOT NULL,
    paths_json TEXT    NOT NULL,
    UNIQUE (repo_id, revision)
);
CREATE INDEX idx_scm_svn_revisions_order ON scm_svn_revisions (repo_id, id);
CREATE TABLE scm_merge_requests (
    id        INTEGER PRIMARY KEY AUTOINCREMENT,
    repo_id   BIGINT  NOT NULL,
    iid       BIGINT  NOT NULL,
    title     TEXT    NOT NULL,
    state     TEXT    NOT NULL,
    author    TEXT    NOT NULL,
    merged_at INTEGER,
    raw_json  TEXT    NOT NULL,
    UNIQUE (repo_id, iid)
);
CREATE INDEX idx_scm_merge_requests_order ON scm_merge_requests (repo_id, id);
-- What a change looks like is not kept: where it is, and its digest. An empty uri is still to be materialised.
CREATE TABLE scm_patch_blobs (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    source_type TEXT    NOT NULL CHECK (source_type IN ('git', 'svn', 'gitlab')),
    source_id   TEXT    NOT NULL,
    uri         TEXT    NOT NULL,
    sha256      TEXT,
    size        BIGINT,
    UNIQUE (source_type, source_id)
);
CREATE INDEX idx_scm_patch_blobs_open ON scm_patch_blobs (id) WHERE uri = '';
