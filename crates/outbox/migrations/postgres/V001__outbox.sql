-- Live work only. `due_at` says when a row may be tried and is indexed; `lease_until` says until when it is held and is
-- in no index, so that a claim is a HOT update (hence the fillfactor).
CREATE SEQUENCE outbox_id_seq AS BIGINT;
CREATE TABLE outbox (
    id              BIGINT PRIMARY KEY DEFAULT nextval('outbox_id_seq'),
    lane            TEXT        NOT NULL,
    shard_id        INT         NOT NULL DEFAULT 0,
    due_at          TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    lease_until     TIMESTAMPTZ,
    attempts        INT         NOT NULL DEFAULT 0,
    crashes         INT         NOT NULL DEFAULT 0,
    maybe_sent      BOOLEAN     NOT NULL DEFAULT FALSE,
    lease_token     BIGINT      NOT NULL DEFAULT 0,
    locked_by       TEXT,
    locked_at       TIMESTAMPTZ,
    target          TEXT,
    active_key      TEXT,
    payload         BYTEA       NOT NULL,
    content_type    TEXT,
    headers         TEXT,
    payload_sha     BYTEA,
    last_error_code TEXT,
    last_error      TEXT,
    correlation_id  TEXT,
    created_at      TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    updated_at      TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    deliver_before  TIMESTAMPTZ,
    CONSTRAINT outbox_lease_is_whole CHECK ((locked_by IS NULL) = (lease_until IS NULL))
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_cost_delay = 0);
ALTER SEQUENCE outbox_id_seq OWNED BY outbox.id;
ALTER TABLE outbox ALTER COLUMN payload SET STORAGE EXTERNAL;
CREATE INDEX idx_claim ON outbox (lane, shard_id, due_at, id);
CREATE UNIQUE INDEX uniq_outbox_active_key ON outbox (lane, active_key) WHERE active_key IS NOT NULL;

-- What has ended. It refuses UPDATE always, and DELETE except by requeue and prune.
CREATE TABLE outbox_done (
    id              BIGINT PRIMARY KEY,
    lane            TEXT        NOT NULL,
    shard_id        INT         NOT NULL,
    due_at          TIMESTAMPTZ NOT NULL,
    lease_until     TIMESTAMPTZ,
    attempts        INT         NOT NULL,
    crashes         INT         NOT NULL,
    maybe_sent      BOOLEAN     NOT NULL,
    lease_token     BIGINT      NOT NULL,
    locked_by       TEXT,
    locked_at       TIMESTAMPTZ,
    target          TEXT,
    active_key      TEXT,
    payload         BYTEA       NOT NULL,
    content_type    TEXT,
    headers         TEXT,
    payload_sha     BYTEA,
    last_error_code TEXT,
    last_error      TEXT,
    correlation_id  TEXT,
    created_at      TIMESTAMPTZ NOT NULL,
    updated_at      TIMESTAMPTZ NOT NULL,
    deliver_before  TIMESTAMPTZ,
    status          TEXT        NOT NULL CHECK (status IN ('sent', 'dead')),
    result_ref      TEXT,
    finished_at     TIMESTAMPTZ NOT NULL
);
ALTER TABLE outbox_done ALTER COLUMN payload SET STORAGE EXTERNAL;
CREATE INDEX idx_done ON outbox_done (lane, status, finished_at, id);

CREATE TABLE outbox_keys (
    lane       TEXT        NOT NULL,
    key        TEXT        NOT NULL,
    outbox_id  BIGINT      NOT NULL,
    digest     BYTEA       NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (lane, key)
);
CREATE INDEX idx_keys_outbox ON outbox_keys (outbox_id);
CREATE INDEX idx_keys_expiry ON outbox_keys (expires_at);

-- Attempts that did not simply succeed.
CREATE TABLE outbox_attempts (
    id          BIGSERIAL PRIMARY KEY,
    outbox_id   BIGINT      NOT NULL,
    lease_token BIGINT      NOT NULL,
    kind        TEXT        NOT NULL CHECK (kind IN ('retry', 'dead', 'takeover')),
    attempt     INT         NOT NULL,
    code        TEXT,
    error       TEXT,
    worker      TEXT,
    at          TIMESTAMPTZ NOT NULL
);
CREATE INDEX idx_attempts_outbox ON outbox_attempts (outbox_id, lease_token);

-- What was sent on lanes with dedup, by content.
CREATE TABLE outbox_dedup (
    lane        TEXT   NOT NULL,
    payload_sha BYTEA  NOT NULL,
    target      TEXT,
    outbox_id   BIGINT NOT NULL,
    result_ref  TEXT,
    sent_at     TIMESTAMPTZ NOT NULL,
    PRIMARY KEY (lane, payload_sha, outbox_id)
);
CREATE INDEX idx_dedup_outbox ON outbox_dedup (outbox_id);

CREATE TABLE outbox_lanes (
    lane              TEXT   PRIMARY KEY,
    shards            INT    NOT NULL,
    max_payload_bytes BIGINT NOT NULL,
    key_ttl_sec       BIGINT NOT NULL,
    owned_by          TEXT
);

CREATE TABLE write_audit (
    audit_id           BIGSERIAL PRIMARY KEY,
    created_at         TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    updated_at         TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    actor_user_id      TEXT,
    target_space       TEXT,
    action             TEXT NOT NULL CHECK (action IN ('allow', 'redirect', 'reject')),
    reason             TEXT NOT NULL,
    status             TEXT NOT NULL CHECK (status IN ('pending', 'success', 'redirected', 'failed')),
    payload_sha        TEXT,
    correlation_id     TEXT,
    outbox_id          BIGINT,
    evidence_refs_json JSONB NOT NULL
);
CREATE INDEX idx_audit_outbox ON write_audit (outbox_id);
CREATE INDEX idx_audit_correlation ON write_audit (correlation_id);

-- Receivers remember here what they have handled.
CREATE TABLE inbox (
    source      TEXT NOT NULL,
    message_id  TEXT NOT NULL,
    received_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (source, message_id)
);
CREATE INDEX idx_inbox_received ON inbox (received_at);

CREATE TABLE postrider_meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
INSERT INTO postrider_meta VALUES ('store_id', substr(md5(random()::text || clock_timestamp()::text || txid_current()::text), 1, 16));

CREATE FUNCTION outbox_done_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' AND current_setting('postrider.permit', TRUE) IN ('requeue', 'prune') THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'outbox_done holds what has ended and refuses %; requeue dead messages, purge old ones', TG_OP;
END $$;
CREATE TRIGGER outbox_done_rows BEFORE UPDATE OR DELETE ON outbox_done FOR EACH ROW EXECUTE FUNCTION outbox_done_guard();
CREATE TRIGGER outbox_done_truncate BEFORE TRUNCATE ON outbox_done FOR EACH STATEMENT EXECUTE FUNCTION outbox_done_guard();
ALTER TABLE outbox_done ENABLE ALWAYS TRIGGER outbox_done_rows;
ALTER TABLE outbox_done ENABLE ALWAYS TRIGGER outbox_done_truncate;

-- NULL for what is no text and no JSON, so that one bad row never breaks a view.
CREATE FUNCTION postrider_text(b BYTEA) RETURNS TEXT LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN RETURN convert_from(b, 'UTF8'); EXCEPTION WHEN OTHERS THEN RETURN NULL; END $$;
CREATE FUNCTION postrider_json(b BYTEA) RETURNS JSONB LANGUAGE plpgsql IMMUTABLE AS $$
BEGIN RETURN convert_from(b, 'UTF8')::jsonb; EXCEPTION WHEN OTHERS THEN RETURN NULL; END $$;
