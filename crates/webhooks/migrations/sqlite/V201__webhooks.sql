-- What happened. Append-only: guards below refuse changes, and deletes but by prune.
CREATE TABLE events (
    id             INTEGER PRIMARY KEY AUTOINCREMENT,
    event_type     TEXT        NOT NULL,
    external_id    TEXT        UNIQUE,
    payload        BLOB       NOT NULL,
    payload_sha    BLOB       NOT NULL,
    content_type   TEXT,
    correlation_id TEXT,
    created_at     INTEGER NOT NULL
);
CREATE INDEX idx_events_type ON events (event_type, id);
CREATE INDEX idx_events_created ON events (created_at, id);

-- Who wants to hear of it. `headers` and `secrets` are encrypted.
CREATE TABLE subscriptions (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    url             TEXT        NOT NULL,
    event_types     TEXT        NOT NULL,
    status          TEXT        NOT NULL CHECK (status IN ('active', 'paused', 'disabled')),
    description     TEXT,
    headers         TEXT,
    signature       TEXT        NOT NULL DEFAULT 'v1' CHECK (signature IN ('v1', 'v1a')),
    max_retry_limit INT,
    retry_schedule  TEXT,
    timeout_ms      INT,
    rate_per_sec    REAL,
    max_in_flight   INT,
    secrets         TEXT        NOT NULL,
    failing_since   INTEGER,
    disabled_reason TEXT,
    created_at      INTEGER NOT NULL,
    updated_at      INTEGER NOT NULL
);

-- What lets a subscription's deliveries through, shared by all processes and written by the orchestrator.
CREATE TABLE subscription_gates (
    subscription_id INTEGER PRIMARY KEY,
    held_until      INTEGER,
    tokens          REAL NOT NULL DEFAULT 0,
    tokens_at       INTEGER,
    in_flight       INT     NOT NULL DEFAULT 0,
    failures        BIGINT  NOT NULL DEFAULT 0,
    parked          INT     NOT NULL DEFAULT 0
);
CREATE INDEX idx_gates_parked ON subscription_gates (parked) WHERE parked = 1;

CREATE TABLE webhook_delivery_sagas (
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    event_id         BIGINT       NOT NULL,
    subscription_id  BIGINT       NOT NULL,
    status           TEXT         NOT NULL CHECK (status IN ('Pending', 'InProgress', 'PendingRetry', 'Completed', 'DeadLettered')),
    attempt_count    INT          NOT NULL DEFAULT 0,
    next_attempt_at  INTEGER,
    final_error_code TEXT,
    created_at       INTEGER  NOT NULL,
    updated_at       INTEGER  NOT NULL,
    generation       INT          NOT NULL DEFAULT 0,
    replay_id        BIGINT
);
CREATE INDEX idx_saga_event ON webhook_delivery_sagas (event_id, subscription_id);
CREATE INDEX idx_saga_status_retry ON webhook_delivery_sagas (status, next_attempt_at);
CREATE INDEX idx_saga_status ON webhook_delivery_sagas (status);
CREATE UNIQUE INDEX uniq_saga_event_subscription ON webhook_delivery_sagas (event_id, subscription_id, generation);
CREATE INDEX idx_saga_subscription ON webhook_delivery_sagas (subscription_id, status, next_attempt_at, id);
CREATE UNIQUE INDEX uniq_saga_replay ON webhook_delivery_sagas (replay_id, event_id, subscription_id) WHERE replay_id IS NOT NULL;

-- Every attempt, as it went. Append-only.
CREATE TABLE webhook_attempts (
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    job_id           BIGINT      NOT NULL UNIQUE,
    saga_id          BIGINT      NOT NULL,
    attempt          INT         NOT NULL,
    started_at       INTEGER NOT NULL,
    duration_ms      BIGINT      NOT NULL,
    error_class      TEXT CHECK (error_class IN ('never_sent', 'unknown', 'answered')),
    error_code       TEXT,
    response_status  INT,
    response_headers TEXT,
    response_body    BLOB,
    remote_address   TEXT
);
CREATE INDEX idx_webhook_attempts_saga ON webhook_attempts (saga_id, attempt);

-- The orchestrator's durable inbox: what workers report, deleted when it is applied.
CREATE TABLE webhook_results (
    job_id      INTEGER PRIMARY KEY,
    saga_id     BIGINT      NOT NULL,
    attempt     INT         NOT NULL,
    success     INT         NOT NULL,
    error_code  TEXT,
    retry_after BIGINT,
    at          INTEGER NOT NULL
);

CREATE TABLE dead_letters (
    id               INTEGER PRIMARY KEY AUTOINCREMENT,
    saga_id          BIGINT      NOT NULL UNIQUE,
    event_id         BIGINT      NOT NULL,
    subscription_id  BIGINT      NOT NULL,
    final_error_code TEXT,
    payload_snapshot BLOB       NOT NULL,
    failed_at        INTEGER NOT NULL,
    requeued_saga_id BIGINT
);
CREATE INDEX idx_dead_letters_subscription ON dead_letters (subscription_id, id);
CREATE INDEX idx_dead_letters_failed ON dead_letters (failed_at, id);

CREATE TABLE replays (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    subscription_id BIGINT      NOT NULL,
    from_at         INTEGER NOT NULL,
    to_at           INTEGER NOT NULL,
    filter_json     TEXT        NOT NULL,
    status          TEXT        NOT NULL CHECK (status IN ('running', 'done', 'cancelled')),
    cursor_id       BIGINT      NOT NULL DEFAULT 0,
    count           BIGINT      NOT NULL DEFAULT 0,
    created_at      INTEGER NOT NULL
);
CREATE INDEX idx_replays_status ON replays (status);

-- Raised whenever a subscription changes, so that every process notices.
CREATE TABLE webhook_state (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
INSERT INTO webhook_state VALUES ('subscriptions', 1);

CREATE TRIGGER events_no_update BEFORE UPDATE ON events BEGIN SELECT RAISE(ABORT, 'events is append-only and refuses UPDATE'); END;
CREATE TRIGGER events_no_delete BEFORE DELETE ON events WHEN NOT EXISTS (SELECT 1 FROM postrider_permit WHERE permit = 'prune') BEGIN
    SELECT RAISE(ABORT, 'events is append-only and refuses DELETE');
END;
-- REPLACE deletes without firing the trigger above.
CREATE TRIGGER events_no_replace BEFORE INSERT ON events WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id OR external_id = NEW.external_id) BEGIN
    SELECT CASE WHEN EXISTS (SELECT 1 FROM events WHERE id = NEW.id) THEN RAISE(ABORT, 'events is append-only and refuses REPLACE') ELSE RAISE(ABORT, 'the external_id is taken') END;
END;
CREATE TRIGGER webhook_attempts_no_update BEFORE UPDATE ON webhook_attempts BEGIN SELECT RAISE(ABORT, 'webhook_attempts is append-only and refuses UPDATE'); END;
CREATE TRIGGER webhook_attempts_no_delete BEFORE DELETE ON webhook_attempts WHEN NOT EXISTS (SELECT 1 FROM postrider_permit WHERE permit = 'prune') BEGIN
    SELECT RAISE(ABORT, 'webhook_attempts is append-only and refuses DELETE');
END;
CREATE TRIGGER webhook_attempts_no_replace BEFORE INSERT ON webhook_attempts WHEN EXISTS (SELECT 1 FROM webhook_attempts WHERE id = NEW.id OR job_id = NEW.job_id) BEGIN
    SELECT RAISE(ABORT, 'webhook_attempts is append-only and refuses REPLACE');
END;
CREATE TRIGGER webhook_sagas_no_update BEFORE UPDATE ON webhook_delivery_sagas WHEN OLD.status IN ('Completed', 'DeadLettered') BEGIN
    SELECT RAISE(ABORT, 'a saga that has ended refuses UPDATE');
END;
CREATE TRIGGER webhook_sagas_no_delete BEFORE DELETE ON webhook_delivery_sagas
WHEN NOT EXISTS (SELECT 1 FROM postrider_permit WHERE permit = 'prune') OR OLD.status NOT IN ('Completed', 'DeadLettered') BEGIN
    SELECT RAISE(ABORT, 'a saga refuses DELETE');
END;
CREATE TRIGGER webhook_sagas_no_replace BEFORE INSERT ON webhook_delivery_sagas
WHEN EXISTS (SELECT 1 FROM webhook_delivery_sagas WHERE id = NEW.id OR (event_id = NEW.event_id AND subscription_id = NEW.subscription_id AND generation = NEW.generation)) BEGIN
    SELECT RAISE(ABORT, 'a saga refuses REPLACE');
END;

-- Jobs as spec 001 knows them: live ones are messages of the outbox, ended ones are attempts.
CREATE VIEW webhook_jobs AS
SELECT o.id, CASE WHEN o.active_key LIKE 'saga:%' THEN CAST(substr(o.active_key, 6) AS INTEGER) END AS saga_id,
       CASE WHEN o.locked_by IS NULL THEN 'Pending' ELSE 'Leased' END AS status, o.lease_until,
       o.due_at AS attempt_at, NULL AS response_status, NULL AS error_code
FROM outbox o WHERE o.lane = 'webhooks'
UNION ALL
SELECT a.job_id, a.saga_id, CASE WHEN a.error_code IS NULL THEN 'Completed' ELSE 'Failed' END, NULL,
       a.started_at, a.response_status, a.error_code
FROM webhook_attempts a;
