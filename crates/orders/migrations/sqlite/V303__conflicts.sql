-- Orders that came under the key of another: refused, and kept for people to see as long as that other order is remembered.
CREATE TABLE order_conflicts (
    id              INTEGER PRIMARY KEY AUTOINCREMENT,
    idempotency_key TEXT    NOT NULL,
    request_digest  TEXT    NOT NULL,
    instrument      TEXT,
    outbox_id       BIGINT,
    times           BIGINT  NOT NULL DEFAULT 1,
    first_seen_at   INTEGER NOT NULL,
    last_seen_at    INTEGER NOT NULL,
    UNIQUE (idempotency_key, request_digest)
);
