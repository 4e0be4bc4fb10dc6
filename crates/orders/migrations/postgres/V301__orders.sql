-- What became of each order, by its key: the source of truth.
CREATE TABLE idempo_ledger (
    idempotency_key       TEXT PRIMARY KEY,
    request_digest        TEXT        NOT NULL,
    status                TEXT        NOT NULL CHECK (status IN ('in_progress', 'succeeded', 'failed')),
    http_status           INT,
    response_payload_json TEXT,
    result_digest         TEXT,
    broker_ref            TEXT,
    reason_code           TEXT,
    first_seen_at         TIMESTAMPTZ NOT NULL,
    last_seen_at          TIMESTAMPTZ NOT NULL,
    finished_at           TIMESTAMPTZ,
    replays               BIGINT      NOT NULL DEFAULT 0,
    expires_at            TIMESTAMPTZ,
    -- Nothing unfinished expires; what has ended has its answer.
    CHECK ((status = 'in_progress') = (expires_at IS NULL)),
    CHECK ((status = 'in_progress') = (response_payload_json IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX idx_ledger_expiry ON idempo_ledger (expires_at) WHERE expires_at IS NOT NULL;

-- How entries moved, and by whom. Append-only.
CREATE TABLE ledger_events (
    id          BIGSERIAL PRIMARY KEY,
    key_hash    TEXT        NOT NULL,
    from_status TEXT,
    to_status   TEXT        NOT NULL,
    actor       TEXT        NOT NULL,
    reason      TEXT,
    at          TIMESTAMPTZ NOT NULL
);
CREATE INDEX idx_ledger_events_key ON ledger_events (key_hash, id);

-- The book of the paper broker: what it executed.
CREATE TABLE paper_executions (
    id              BIGSERIAL PRIMARY KEY,
    idempotency_key TEXT        NOT NULL,
    order_ref       TEXT        NOT NULL,
    instrument      TEXT        NOT NULL,
    side            TEXT        NOT NULL,
    executed_qty    TEXT        NOT NULL,
    execution_json  TEXT        NOT NULL,
    at              TIMESTAMPTZ NOT NULL
);
CREATE INDEX idx_paper_key ON paper_executions (idempotency_key);

CREATE FUNCTION orders_ledger_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('postrider.permit', TRUE) = 'prune' AND OLD.status <> 'in_progress' THEN
        RETURN OLD;
    END IF;
    IF TG_OP = 'UPDATE' AND NEW.idempotency_key = OLD.idempotency_key AND NEW.request_digest = OLD.request_digest
       AND (OLD.status = 'in_progress' OR (OLD.status = 'failed' AND NEW.status = 'in_progress')
            OR (NEW.status = OLD.status AND NEW.response_payload_json = OLD.response_payload_json AND NEW.http_status = OLD.http_status)) THEN
        RETURN NEW;
    END IF;
    RAISE EXCEPTION 'the ledger refuses this %', TG_OP;
END $$;
CREATE FUNCTION orders_events_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('postrider.permit', TRUE) = 'prune' THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION '% is append-only and refuses %', TG_TABLE_NAME, TG_OP;
END $$;
CREATE TRIGGER idempo_ledger_rows BEFORE UPDATE OR DELETE ON idempo_ledger FOR EACH ROW EXECUTE FUNCTION orders_ledger_guard();
CREATE TRIGGER idempo_ledger_truncate BEFORE TRUNCATE ON idempo_ledger FOR EACH STATEMENT EXECUTE FUNCTION orders_events_guard();
CREATE TRIGGER ledger_events_rows BEFORE UPDATE OR DELETE ON ledger_events FOR EACH ROW EXECUTE FUNCTION orders_events_guard();
CREATE TRIGGER ledger_events_truncate BEFORE TRUNCATE ON ledger_events FOR EACH STATEMENT EXECUTE FUNCTION orders_events_guard();
ALTER TABLE idempo_ledger ENABLE ALWAYS TRIGGER idempo_ledger_rows;
ALTER TABLE ledger_events ENABLE ALWAYS TRIGGER ledger_events_rows;
