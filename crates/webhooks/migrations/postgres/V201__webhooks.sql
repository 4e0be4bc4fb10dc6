-- What happened. Append-only: guards below refuse changes, and deletes but by prune.
CREATE TABLE events (
    id             BIGSERIAL PRIMARY KEY,
    event_type     TEXT        NOT NULL,
    external_id    TEXT        UNIQUE,
    payload        BYTEA       NOT NULL,
    payload_sha    BYTEA       NOT NULL,
    content_type   TEXT,
    correlation_id TEXT,
    created_at     TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX idx_events_type ON events (event_type, id);
CREATE INDEX idx_events_created ON events (created_at, id);

-- Who wants to hear of it. `headers` and `secrets` are encrypted.
CREATE TABLE subscriptions (
    id              BIGSERIAL PRIMARY KEY,
    url             TEXT        NOT NULL,
    event_types     TEXT        NOT NULL,
    status          TEXT        NOT NULL CHECK (status IN ('active', 'paused', 'disabled')),
    description     TEXT,
    headers         TEXT,
    signature       TEXT        NOT NULL DEFAULT 'v1' CHECK (signature IN ('v1', 'v1a')),
    max_retry_limit INT,
    retry_schedule  TEXT,
    timeout_ms      INT,
    rate_per_sec    DOUBLE PRECISION,
    max_in_flight   INT,
    secrets         TEXT        NOT NULL,
    failing_since   TIMESTAMPTZ,
    disabled_reason TEXT,
    created_at      TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    updated_at      TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);

-- What lets a subscription's deliveries through, shared by all processes and written by the orchestrator.
CREATE TABLE subscription_gates (
    subscription_id BIGINT PRIMARY KEY,
    held_until      TIMESTAMPTZ,
    tokens          DOUBLE PRECISION NOT NULL DEFAULT 0,
    tokens_at       TIMESTAMPTZ,
    in_flight       INT     NOT NULL DEFAULT 0,
    failures        BIGINT  NOT NULL DEFAULT 0,
    parked          INT     NOT NULL DEFAULT 0
);
CREATE INDEX idx_gates_parked ON subscription_gates (parked) WHERE parked = 1;

CREATE TABLE webhook_delivery_sagas (
    id               BIGSERIAL PRIMARY KEY,
    event_id         BIGINT       NOT NULL,
    subscription_id  BIGINT       NOT NULL,
    status           TEXT         NOT NULL CHECK (status IN ('Pending', 'InProgress', 'PendingRetry', 'Completed', 'DeadLettered')),
    attempt_count    INT          NOT NULL DEFAULT 0,
    next_attempt_at  TIMESTAMPTZ,
    final_error_code VARCHAR(100),
    created_at       TIMESTAMPTZ  NOT NULL DEFAULT clock_timestamp(),
    updated_at       TIMESTAMPTZ  NOT NULL DEFAULT clock_timestamp(),
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
    id               BIGSERIAL PRIMARY KEY,
    job_id           BIGINT      NOT NULL UNIQUE,
    saga_id          BIGINT      NOT NULL,
    attempt          INT         NOT NULL,
    started_at       TIMESTAMPTZ NOT NULL,
    duration_ms      BIGINT      NOT NULL,
    error_class      TEXT CHECK (error_class IN ('never_sent', 'unknown', 'answered')),
    error_code       VARCHAR(100),
    response_status  INT,
    response_headers TEXT,
    response_body    BYTEA,
    remote_address   TEXT
);
CREATE INDEX idx_webhook_attempts_saga ON webhook_attempts (saga_id, attempt);

-- The orchestrator's durable inbox: what workers report, deleted when it is applied.
CREATE TABLE webhook_results (
    job_id      BIGINT PRIMARY KEY,
    saga_id     BIGINT      NOT NULL,
    attempt     INT         NOT NULL,
    success     INT         NOT NULL,
    error_code  VARCHAR(100),
    retry_after BIGINT,
    at          TIMESTAMPTZ NOT NULL
);

CREATE TABLE dead_letters (
    id               BIGSERIAL PRIMARY KEY,
    saga_id          BIGINT      NOT NULL UNIQUE,
    event_id         BIGINT      NOT NULL,
    subscription_id  BIGINT      NOT NULL,
    final_error_code VARCHAR(100),
    payload_snapshot BYTEA       NOT NULL,
    failed_at        TIMESTAMPTZ NOT NULL,
    requeued_saga_id BIGINT
);
CREATE INDEX idx_dead_letters_subscription ON dead_letters (subscription_id, id);
CREATE INDEX idx_dead_letters_failed ON dead_letters (failed_at, id);

CREATE TABLE replays (
    id              BIGSERIAL PRIMARY KEY,
    subscription_id BIGINT      NOT NULL,
    from_at         TIMESTAMPTZ NOT NULL,
    to_at           TIMESTAMPTZ NOT NULL,
    filter_json     TEXT        NOT NULL,
    status          TEXT        NOT NULL CHECK (status IN ('running', 'done', 'cancelled')),
    cursor_id       BIGINT      NOT NULL DEFAULT 0,
    count           BIGINT      NOT NULL DEFAULT 0,
    created_at      TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX idx_replays_status ON replays (status);

-- Raised whenever a subscription changes, so that every process notices.
CREATE TABLE webhook_state (name TEXT PRIMARY KEY, value BIGINT NOT NULL);
INSERT INTO webhook_state VALUES ('subscriptions', 1);

CREATE FUNCTION webhooks_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('postrider.permit', TRUE) = 'prune' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% is append-only and refuses %', TG_TABLE_NAME, TG_OP;
END $$;
CREATE FUNCTION webhooks_saga_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'UPDATE' AND OLD.status NOT IN ('Completed', 'DeadLettered') THEN
        RETURN NEW;
    END IF;
    IF TG_OP = 'DELETE' AND current_setting('postrider.permit', TRUE) = 'prune' AND OLD.status IN ('Completed', 'DeadLettered') THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'a saga that has ended refuses %', TG_OP;
END $$;
CREATE TRIGGER events_rows BEFORE UPDATE OR DELETE ON events FOR EACH ROW EXECUTE FUNCTION webhooks_guard();
CREATE TRIGGER events_truncate BEFORE TRUNCATE ON events FOR EACH STATEMENT EXECUTE FUNCTION webhooks_guard();
CREATE TRIGGER webhook_attempts_rows BEFORE UPDATE OR DELETE ON webhook_attempts FOR EACH ROW EXECUTE FUNCTION webhooks_guard();
CREATE TRIGGER webhook_attempts_truncate BEFORE TRUNCATE ON webhook_attempts FOR EACH STATEMENT EXECUTE FUNCTION webhooks_guard();
CREATE TRIGGER webhook_sagas_rows BEFORE UPDATE OR DELETE ON webhook_delivery_sagas FOR EACH ROW EXECUTE FUNCTION webhooks_saga_guard();
CREATE TRIGGER webhook_sagas_truncate BEFORE TRUNCATE ON webhook_delivery_sagas FOR EACH STATEMENT EXECUTE FUNCTION webhooks_guard();
ALTER TABLE events ENABLE ALWAYS TRIGGER events_rows;
ALTER TABLE webhook_attempts ENABLE ALWAYS TRIGGER webhook_attempts_rows;
ALTER TABLE webhook_delivery_sagas ENABLE ALWAYS TRIGGER webhook_sagas_rows;

-- Jobs as spec 001 knows them: live ones are messages of the outbox, ended ones are attempts.
CREATE VIEW webhook_jobs AS
SELECT o.id, CASE WHEN o.active_key LIKE 'saga:%' THEN substr(o.active_key, 6)::bigint END AS saga_id,
       CASE WHEN o.locked_by IS NULL THEN 'Pending' ELSE 'Leased' END AS status, o.lease_until,
       o.due_at AS attempt_at, NULL::int AS response_status, NULL::varchar AS error_code
FROM outbox o WHERE o.lane = 'webhooks'
UNION ALL
SELECT a.job_id, a.saga_id, CASE WHEN a.error_code IS NULL THEN 'Completed' ELSE 'Failed' END, NULL,
       a.started_at, a.response_status, a.error_code
FROM webhook_attempts a;
