-- What became of each order, by its key: the source of truth.
CREATE TABLE idempo_ledger (
    idempotency_key       TEXT    NOT NULL PRIMARY KEY,
    request_digest        TEXT    NOT NULL,
    status                TEXT    NOT NULL CHECK (status IN ('in_progress', 'succeeded', 'failed')),
    http_status           INT,
    response_payload_json TEXT,
    result_digest         TEXT,
    broker_ref            TEXT,
    reason_code           TEXT,
    first_seen_at         INTEGER NOT NULL,
    last_seen_at          INTEGER NOT NULL,
    finished_at           INTEGER,
    replays               BIGINT  NOT NULL DEFAULT 0,
    expires_at            INTEGER,
    -- Nothing unfinished expires; what has ended has its answer.
    CHECK ((status = 'in_progress') = (expires_at IS NULL)),
    CHECK ((status = 'in_progress') = (response_payload_json IS NULL))
) WITHOUT ROWID;
CREATE INDEX idx_ledger_expiry ON idempo_ledger (expires_at) WHERE expires_at IS NOT NULL;

-- How entries moved, and by whom. Append-only.
CREATE TABLE ledger_events (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    key_hash    TEXT    NOT NULL,
    from_status TEXT,
    to_status   TEXT    NOT NULL,
    actor       TEXT    NOT NULL,
    reason      TEXT,
    at          INTEGER NOT NULL
);
CREATE INDEX idx_ledger_events_key ON ledger_events (key_hash, id);

-- The book of the paper broker: what it executed.
CREATE TABLE paper_executions (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    idempotency_key TEXT    NOT NULL,
    order_ref       TEXT    NOT NULL,
    instrument      TEXT    NOT NULL,
    side            TEXT    NOT NULL,
    executed_qty    TEXT    NOT NULL,
    execution_json  TEXT    NOT NULL,
    at              INTEGER NOT NULL
);
CREATE INDEX idx_paper_key ON paper_executions (idempotency_key);

CREATE TRIGGER idempo_ledger_no_update BEFORE UPDATE ON idempo_ledger
WHEN NOT (NEW.idempotency_key = OLD.idempotency_key AND NEW.request_digest = OLD.request_digest
          AND (OLD.status = 'in_progress' OR (OLD.status = 'failed' AND NEW.status = 'in_progress')
               OR (NEW.status = OLD.status AND NEW.response_payload_json = OLD.response_payload_json AND NEW.http_status = OLD.http_status))) BEGIN
    SELECT RAISE(ABORT, 'the ledger refuses this UPDATE');
END;
CREATE TRIGGER idempo_ledger_no_delete BEFORE DELETE ON idempo_ledger
WHEN OLD.status = 'in_progress' OR NOT EXISTS (SELECT 1 FROM postrider_permit WHERE permit = 'prune') BEGIN
    SELECT RAISE(ABORT, 'the ledger refuses this DELETE');
END;
-- REPLACE deletes without firing the trigger above.
CREATE TRIGGER idempo_ledger_no_replace BEFORE INSERT ON idempo_ledger WHEN EXISTS (SELECT 1 FROM idempo_ledger WHERE idempotency_key = NEW.idempotency_key) BEGIN
    SELECT RAISE(ABORT, 'the idempotency key is taken');
END;
CREATE TRIGGER ledger_events_no_update BEFORE UPDATE ON ledger_events BEGIN SELECT RAISE(ABORT, 'ledger_events is append-only and refuses UPDATE'); END;
CREATE TRIGGER ledger_events_no_delete BEFORE DELETE ON ledger_events WHEN NOT EXISTS (SELECT 1 FROM postrider_permit WHERE permit = 'prune') BEGIN
    SELECT RAISE(ABORT, 'ledger_events is append-only and refuses DELETE');
END;
CREATE TRIGGER ledger_events_no_replace BEFORE INSERT ON ledger_events WHEN EXISTS (SELECT 1 FROM ledger_events WHERE id = NEW.id) BEGIN
    SELECT RAISE(ABORT, 'ledger_events is append-only and refuses REPLACE');
END;
