-- Orders that came under the key of another: refused, and kept for people to see as long as that other order is remembered.
CREATE TABLE order_conflicts (
    id              BIGINT AUTO_INCREMENT PRIMARY KEY,
    idempotency_key VARBINARY(255) NOT NULL,
    request_digest  VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    instrument      VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    outbox_id       BIGINT,
    times           BIGINT      NOT NULL DEFAULT 1,
    first_seen_at   DATETIME(6) NOT NULL,
    last_seen_at    DATETIME(6) NOT NULL,
    UNIQUE KEY uniq_order_conflicts (idempotency_key, request_digest)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
