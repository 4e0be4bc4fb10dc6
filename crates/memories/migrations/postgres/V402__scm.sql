-- Repositories whose history is kept here, and what is known of it. Synchronising writes these tables and its watermark in
-- `kv (scm.sync/…)`; turning rows into memories reads them by a cursor of its own, `kv (gateway.consume/…)`.
CREATE TABLE scm_repos (
    repo_id      BIGSERIAL PRIMARY KEY,
    kind         TEXT    NOT NULL CHECK (kind IN ('git', 'svn', 'gitlab')),
    url          TEXT    NOT NULL,
    name         TEXT    NOT NULL,
    target_space TEXT,
    created_at   TIMESTAMPTZ NOT NULL,
    UNIQUE (kind, url)
);
CREATE TABLE scm_git_commits (
    id           BIGSERIAL PRIMARY KEY,
    repo_id      BIGINT  NOT NULL,
    sha          TEXT    NOT NULL,
    author       TEXT    NOT NULL,
    authored_at  TIMESTAMPTZ NOT NULL,
    committed_at TIMESTAMPTZ NOT NULL,
    message      TEXT    NOT NULL,
    parents      TEXT    NOT NULL,
    stats_json   TEXT,
    UNIQUE (repo_id, sha)
);
CREATE INDEX idx_scm_git_commits_order ON scm_git_commits (repo_id, id);
CREATE TABLE scm_svn_revisions (
    id         BIGSERIAL PRIMARY KEY,
    repo_id    BIGINT  NOT NULL,
    revision   BIGINT  NOT NULL,
    author     TEXT    NOT NULL,
    at         TIMESTAMPTZ NOT NULL,
    message    TEXT    NOT NULL,
    paths_json TEXT    NOT NULL,
    UNIQUE (repo_id, revision)
);
CREATE INDEX idx_scm_svn_revisions_order ON scm_svn_revisions (repo_id, id);
CREATE TABLE scm_merge_requests (
    id        BIGSERIAL PRIMARY KEY,
    repo_id   BIGINT  NOT NULL,
    iid       BIGINT  NOT NULL,
    title     TEXT    NOT NULL,
    state     TEXT    NOT NULL,
    author    TEXT    NOT NULL,
    merged_at TIMESTAMPTZ,
    raw_json  TEXT    NOT NULL,
    UNIQUE (repo_id, iid)
);
CREATE INDEX idx_scm_merge_requests_order ON scm_merge_requests (repo_id, id);
-- What a change looks like is not kept: where it is, and its digest. An empty uri is still to be materialised.
CREATE TABLE scm_patch_blobs (
    id          BIGSERIAL PRIMARY KEY,
    source_type TEXT    NOT NULL CHECK (source_type IN ('git', 'svn', 'gitlab')),
    source_id   TEXT    NOT NULL,
    uri         TEXT    NOT NULL,
    sha256      TEXT,
    size        BIGINT,
    UNIQUE (source_type, source_id)
);
CREATE INDEX idx_scm_patch_blobs_open ON scm_patch_blobs (id) WHERE uri = '';

-- The specifications' own schema names, where this role may create schemas.
DO $$ BEGIN
    IF has_database_privilege(current_database(), 'CREATE') THEN
        CREATE SCHEMA IF NOT EXISTS scm;
    END IF;
    IF to_regnamespace('scm') IS NOT NULL AND has_schema_privilege('scm', 'CREATE') THEN
        EXECUTE 'CREATE VIEW scm.repos AS SELECT repo_id, kind, url, name FROM scm_repos OFFSET 0';
        EXECUTE 'CREATE VIEW scm.git_commits AS SELECT repo_id, sha, author, authored_at, committed_at, message, parents, stats_json FROM scm_git_commits OFFSET 0';
        EXECUTE 'CREATE VIEW scm.svn_revisions AS SELECT repo_id, revision, author, at, message, paths_json FROM scm_svn_revisions OFFSET 0';
        EXECUTE 'CREATE VIEW scm.merge_requests AS SELECT repo_id, iid, title, state, author, merged_at, raw_json FROM scm_merge_requests OFFSET 0';
        EXECUTE 'CREATE VIEW scm.patch_blobs AS SELECT source_type, source_id, uri, sha256, size FROM scm_patch_blobs OFFSET 0';
    END IF;
END $$;
