-- Hand-written inserts could put a fraction or a text where a time belongs, and such a row held up its whole lane. From now
-- on the table itself refuses it; rows that are there already are put right. SQLite adds a CHECK only to a new table.
CREATE TABLE outbox_checked (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    lane            TEXT    NOT NULL,
    shard_id        INTEGER NOT NULL DEFAULT 0,
    due_at          INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    lease_until     INTEGER,
    attempts        INTEGER NOT NULL DEFAULT 0,
    crashes         INTEGER NOT NULL DEFAULT 0,
    maybe_sent      INTEGER NOT NULL DEFAULT 0,
    lease_token     INTEGER NOT NULL DEFAULT 0,
    locked_by       TEXT,
    locked_at       INTEGER,
    target          TEXT,
    active_key      TEXT,
    content_type    TEXT,
    headers         TEXT,
    payload_sha     BLOB,
    last_error_code TEXT,
    last_error      TEXT,
    correlation_id  TEXT,
    created_at      INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    updated_at      INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    deliver_before  INTEGER,
    payload         BLOB    NOT NULL,
    CHECK ((locked_by IS NULL) = (lease_until IS NULL)),
    CHECK (typeof(due_at) = 'integer' AND typeof(created_at) = 'integer' AND typeof(updated_at) = 'integer'
           AND typeof(lease_until) IN ('integer', 'null') AND typeof(locked_at) IN ('integer', 'null')
           AND typeof(deliver_before) IN ('integer', 'null') AND typeof(shard_id) = 'integer' AND typeof(attempts) = 'integer'
           AND typeof(crashes) = 'integer' AND typeof(maybe_sent) = 'integer' AND typeof(lease_token) = 'integer')
);
INSERT INTO outbox_checked (
    id, lane, shard_id, due_at, lease_until, attempts, crashes, maybe_sent, lease_token, locked_by, locked_at, target, active_key,
    content_type, headers, payload_sha, last_error_code, last_error, correlation_id, created_at, updated_at, deliver_before, payload)
SELECT
    id,
    lane,
    CAST(shard_id AS INTEGER),
    CASE typeof(due_at) WHEN 'integer' THEN due_at WHEN 'real' THEN CAST(due_at AS INTEGER) ELSE COALESCE(CAST(strftime('%s', due_at) AS INTEGER) * 1000000, CAST(unixepoch('subsec') * 1000000 AS INTEGER)) END,
    CASE WHEN locked_by IS NULL THEN NULL ELSE COALESCE(CAST(lease_until AS INTEGER), 0) END,
    CAST(attempts AS INTEGER),
    CAST(crashes AS INTEGER),
    CAST(maybe_sent AS INTEGER),
    CAST(lease_token AS INTEGER),
    locked_by,
    CASE typeof(locked_at) WHEN 'integer' THEN locked_at WHEN 'real' THEN CAST(locked_at AS INTEGER) ELSE CAST(strftime('%s', locked_at) AS INTEGER) * 1000000 END,
    target,
    active_key,
    content_type,
    headers,
    payload_sha,
    last_error_code,
    last_error,
    correlation_id,
    CASE typeof(created_at) WHEN 'integer' THEN created_at WHEN 'real' THEN CAST(created_at AS INTEGER) ELSE COALESCE(CAST(strftime('%s', created_at) AS INTEGER) * 1000000, CAST(unixepoch('subsec') * 1000000 AS INTEGER)) END,
    CASE typeof(updated_at) WHEN 'integer' THEN updated_at WHEN 'real' THEN CAST(updated_at AS INTEGER) ELSE COALESCE(CAST(strftime('%s', updated_at) AS INTEGER) * 1000000, CAST(unixepoch('subsec') * 1000000 AS INTEGER)) END,
    CASE typeof(deliver_before) WHEN 'integer' THEN deliver_before WHEN 'real' THEN CAST(deliver_before AS INTEGER) ELSE CAST(strftime('%s', deliver_before) AS INTEGER) * 1000000 END,
    payload
FROM outbox;
-- Ids are never used twice.
DELETE FROM sqlite_sequence WHERE name = 'outbox_checked';
INSERT INTO sqlite_sequence (name, seq) SELECT 'outbox_checked', seq FROM sqlite_sequence WHERE name = 'outbox';
DROP TABLE outbox;
-- A view of the application's own that names the table does not stop the renaming.
PRAGMA legacy_alter_table = ON;
ALTER TABLE outbox_checked RENAME TO outbox;
PRAGMA legacy_alter_table = OFF;
CREATE INDEX idx_claim ON outbox (lane, shard_id, due_at, id);
CREATE UNIQUE INDEX uniq_outbox_active_key ON outbox (lane, active_key) WHERE active_key IS NOT NULL;
