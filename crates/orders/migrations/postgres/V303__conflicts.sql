-- Orders that came under the key of another: refused, and kept for people to see as long as that other order is remembered.
CREATE TABLE order_conflicts (
    id              BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    idempotency_key TEXT        NOT NULL,
    request_digest  TEXT        NOT NULL,
    instrument      TEXT,
    outbox_id       BIGINT,
    times           BIGINT      NOT NULL DEFAULT 1,
    first_seen_at   TIMESTAMPTZ NOT NULL,
    last_seen_at    TIMESTAMPTZ NOT NULL,
    UNIQUE (idempotency_key, request_digest)
);
