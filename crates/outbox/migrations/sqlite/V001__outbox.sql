-- Live work only. Times are microseconds since 1970. `due_at` says when a row may be tried and is indexed; `lease_until`
-- says until when it is held and is in no index, so that a claim moves no index entry.
CREATE TABLE outbox (
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
    CHECK ((locked_by IS NULL) = (lease_until IS NULL))
);
CREATE INDEX idx_claim ON outbox (lane, shard_id, due_at, id);
CREATE UNIQUE INDEX uniq_outbox_active_key ON outbox (lane, active_key) WHERE active_key IS NOT NULL;

-- What has ended. It refuses UPDATE always, and DELETE except by requeue and prune.
CREATE TABLE outbox_done (
    id              INTEGER PRIMARY KEY,
    lane            TEXT    NOT NULL,
    shard_id        INTEGER NOT NULL DEFAULT 0,
    due_at          INTEGER NOT NULL,
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
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL,
    deliver_before  INTEGER,
    status          TEXT    NOT NULL CHECK (status IN ('sent', 'dead')),
    result_ref      TEXT,
    finished_at     INTEGER NOT NULL,
    payload         BLOB    NOT NULL
);
CREATE INDEX idx_done ON outbox_done (lane, status, finished_at, id);

CREATE TABLE outbox_keys (
    lane       TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    outbox_id  INTEGER NOT NULL,
    digest     BLOB    NOT NULL,
    expires_at INTEGER NOT NULL,
    PRIMARY KEY (lane, key)
) WITHOUT ROWID;
CREATE INDEX idx_keys_outbox ON outbox_keys (outbox_id);
CREATE INDEX idx_keys_expiry ON outbox_keys (expires_at);

-- Attempts that did not simply succeed.
CREATE TABLE outbox_attempts (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    outbox_id   INTEGER NOT NULL,
    lease_token INTEGER NOT NULL,
    kind        TEXT    NOT NULL CHECK (kind IN ('retry', 'dead', 'takeover')),
    attempt     INTEGER NOT NULL,
    code        TEXT,
    error       TEXT,
    worker      TEXT,
    at          INTEGER NOT NULL
);
CREATE INDEX idx_attempts_outbox ON outbox_attempts (outbox_id, lease_token);

-- What was sent on lanes with dedup, by content.
CREATE TABLE outbox_dedup (
    lane        TEXT    NOT NULL,
    payload_sha BLOB    NOT NULL,
    target      TEXT,
    outbox_id   INTEGER NOT NULL,
    result_ref  TEXT,
    sent_at     INTEGER NOT NULL,
    PRIMARY KEY (lane, payload_sha, outbox_id)
) WITHOUT ROWID;
CREATE INDEX idx_dedup_outbox ON outbox_dedup (outbox_id);

CREATE TABLE outbox_lanes (
    lane              TEXT    PRIMARY KEY,
    shards            INTEGER NOT NULL,
    max_payload_bytes INTEGER NOT NULL,
    key_ttl_sec       INTEGER NOT NULL,
    owned_by          TEXT
);

CREATE TABLE write_audit (
    audit_id           INTEGER PRIMARY KEY AUTOINCREMENT,
    created_at         INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    updated_at         INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    actor_user_id      TEXT,
    target_space       TEXT,
    action             TEXT NOT NULL CHECK (action IN ('allow', 'redirect', 'reject')),
    reason             TEXT NOT NULL,
    status             TEXT NOT NULL CHECK (status IN ('pending', 'success', 'redirected', 'failed')),
    payload_sha        TEXT,
    correlation_id     TEXT,
    outbox_id          INTEGER,
    evidence_refs_json TEXT NOT NULL
);
CREATE INDEX idx_audit_outbox ON write_audit (outbox_id);
CREATE INDEX idx_audit_correlation ON write_audit (correlation_id);

-- Receivers remember here what they have handled.
CREATE TABLE inbox (
    source      TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    received_at INTEGER NOT NULL DEFAULT (CAST(unixepoch('subsec') * 1000000 AS INTEGER)),
    PRIMARY KEY (source, message_id)
) WITHOUT ROWID;
CREATE INDEX idx_inbox_received ON inbox (received_at);

CREATE TABLE postrider_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO postrider_meta VALUES ('store_id', lower(hex(randomblob(8))));

-- A row here, in the same transaction, is the permit to delete what has ended.
CREATE TABLE postrider_permit (permit TEXT PRIMARY KEY CHECK (permit IN ('requeue', 'prune')));
CREATE TRIGGER outbox_done_no_update BEFORE UPDATE ON outbox_done BEGIN
    SELECT RAISE(ABORT, 'outbox_done holds what has ended and refuses UPDATE; requeue dead messages, purge old ones');
END;
CREATE TRIGGER outbox_done_no_delete BEFORE DELETE ON outbox_done WHEN NOT EXISTS (SELECT 1 FROM postrider_permit) BEGIN
    SELECT RAISE(ABORT, 'outbox_done holds what has ended and refuses DELETE; requeue dead messages, purge old ones');
END;
-- REPLACE deletes without firing the trigger above.
CREATE TRIGGER outbox_done_no_replace BEFORE INSERT ON outbox_done WHEN EXISTS (SELECT 1 FROM outbox_done WHERE id = NEW.id) BEGIN
    SELECT RAISE(ABORT, 'outbox_done holds what has ended and refuses REPLACE; requeue dead messages, purge old ones');
END;
