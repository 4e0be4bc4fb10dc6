-- What happened. Append-only: guards below refuse changes, and deletes but by prune.
CREATE TABLE events (
    id             BIGINT AUTO_INCREMENT PRIMARY KEY,
    event_type     VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    external_id    VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin UNIQUE,
    payload        LONGBLOB       NOT NULL,
    payload_sha    VARBINARY(32)       NOT NULL,
    content_type   VARCHAR(255),
    correlation_id VARCHAR(255),
    created_at     DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_events_type ON events (event_type, id);
-- step
CREATE INDEX idx_events_created ON events (created_at, id);
-- step
-- Who wants to hear of it. `headers` and `secrets` are encrypted.
CREATE TABLE subscriptions (
    id              BIGINT AUTO_INCREMENT PRIMARY KEY,
    url             TEXT        NOT NULL,
    event_types     TEXT        NOT NULL,
    status          VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL CHECK (status IN ('active', 'paused', 'disabled')),
    description     TEXT,
    headers         TEXT,
    signature       VARCHAR(8)  NOT NULL DEFAULT 'v1' CHECK (signature IN ('v1', 'v1a')),
    max_retry_limit INT,
    retry_schedule  TEXT,
    timeout_ms      INT,
    rate_per_sec    DOUBLE,
    max_in_flight   INT,
    secrets         TEXT        NOT NULL,
    failing_since   DATETIME(6),
    disabled_reason TEXT,
    created_at      DATETIME(6) NOT NULL,
    updated_at      DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- What lets a subscription's deliveries through, shared by all processes and written by the orchestrator.
CREATE TABLE subscription_gates (
    subscription_id BIGINT PRIMARY KEY,
    held_until      DATETIME(6),
    tokens          DOUBLE NOT NULL DEFAULT 0,
    tokens_at       DATETIME(6),
    in_flight       INT     NOT NULL DEFAULT 0,
    failures        BIGINT  NOT NULL DEFAULT 0,
    parked          INT     NOT NULL DEFAULT 0
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_gates_parked ON subscription_gates (parked);
-- step
CREATE TABLE webhook_delivery_sagas (
    id               BIGINT AUTO_INCREMENT PRIMARY KEY,
    event_id         BIGINT       NOT NULL,
    subscription_id  BIGINT       NOT NULL,
    status           VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL CHECK (status IN ('Pending', 'InProgress', 'PendingRetry', 'Completed', 'DeadLettered')),
    attempt_count    INT          NOT NULL DEFAULT 0,
    next_attempt_at  DATETIME(6),
    final_error_code VARCHAR(100),
    created_at       DATETIME(6)  NOT NULL,
    updated_at       DATETIME(6)  NOT NULL,
    generation       INT          NOT NULL DEFAULT 0,
    replay_id        BIGINT
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_saga_event ON webhook_delivery_sagas (event_id, subscription_id);
-- step
CREATE INDEX idx_saga_status_retry ON webhook_delivery_sagas (status, next_attempt_at);
-- step
CREATE INDEX idx_saga_status ON webhook_delivery_sagas (status);
-- step
CREATE UNIQUE INDEX uniq_saga_event_subscription ON webhook_delivery_sagas (event_id, subscription_id, generation);
-- step
CREATE INDEX idx_saga_subscription ON webhook_delivery_sagas (subscription_id, status, next_attempt_at, id);
-- step
CREATE UNIQUE INDEX uniq_saga_replay ON webhook_delivery_sagas (replay_id, event_id, subscription_id);
-- step
-- Every attempt, as it went. Append-only.
CREATE TABLE webhook_attempts (
    id               BIGINT AUTO_INCREMENT PRIMARY KEY,
    job_id           BIGINT      NOT NULL UNIQUE,
    saga_id          BIGINT      NOT NULL,
    attempt          INT         NOT NULL,
    started_at       DATETIME(6) NOT NULL,
    duration_ms      BIGINT      NOT NULL,
    error_class      VARCHAR(16) CHECK (error_class IN ('never_sent', 'unknown', 'answered')),
    error_code       VARCHAR(100),
    response_status  INT,
    response_headers MEDIUMTEXT,
    response_body    LONGBLOB,
    remote_address   VARCHAR(64)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_webhook_attempts_saga ON webhook_attempts (saga_id, attempt);
-- step
-- The orchestrator's durable inbox: what workers report, deleted when it is applied.
CREATE TABLE webhook_results (
    job_id      BIGINT PRIMARY KEY,
    saga_id     BIGINT      NOT NULL,
    attempt     INT         NOT NULL,
    success     INT         NOT NULL,
    error_code  VARCHAR(100),
    retry_after BIGINT,
    at          DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE dead_letters (
    id               BIGINT AUTO_INCREMENT PRIMARY KEY,
    saga_id          BIGINT      NOT NULL UNIQUE,
    event_id         BIGINT      NOT NULL,
    subscription_id  BIGINT      NOT NULL,
    final_error_code VARCHAR(100),
    payload_snapshot LONGBLOB       NOT NULL,
    failed_at        DATETIME(6) NOT NULL,
    requeued_saga_id BIGINT
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_dead_letters_subscription ON dead_letters (subscription_id, id);
-- step
CREATE INDEX idx_dead_letters_failed ON dead_letters (failed_at, id);
-- step
CREATE TABLE replays (
    id              BIGINT AUTO_INCREMENT PRIMARY KEY,
    subscription_id BIGINT      NOT NULL,
    from_at         DATETIME(6) NOT NULL,
    to_at           DATETIME(6) NOT NULL,
    filter_json     TEXT        NOT NULL,
    status          VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL CHECK (status IN ('running', 'done', 'cancelled')),
    cursor_id       BIGINT      NOT NULL DEFAULT 0,
    `count`         BIGINT      NOT NULL DEFAULT 0,
    created_at      DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE INDEX idx_replays_status ON replays (status);
-- step
-- Raised whenever a subscription changes, so that every process notices.
CREATE TABLE webhook_state (name VARCHAR(64) PRIMARY KEY, value BIGINT NOT NULL) ENGINE = InnoDB;
-- step
INSERT INTO webhook_state VALUES ('subscriptions', 1);
-- step
CREATE TRIGGER events_no_update BEFORE UPDATE ON events FOR EACH ROW IF TRUE THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'events is append-only and refuses UPDATE'; END IF;
-- step
CREATE TRIGGER events_no_delete BEFORE DELETE ON events FOR EACH ROW IF NOT (@postrider_permit <=> 'prune') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'events is append-only and refuses DELETE'; END IF;
-- step
CREATE TRIGGER webhook_attempts_no_update BEFORE UPDATE ON webhook_attempts FOR EACH ROW IF TRUE THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'webhook_attempts is append-only and refuses UPDATE'; END IF;
-- step
CREATE TRIGGER webhook_attempts_no_delete BEFORE DELETE ON webhook_attempts FOR EACH ROW IF NOT (@postrider_permit <=> 'prune') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'webhook_attempts is append-only and refuses DELETE'; END IF;
-- step
CREATE TRIGGER webhook_sagas_no_update BEFORE UPDATE ON webhook_delivery_sagas FOR EACH ROW IF OLD.status IN ('Completed', 'DeadLettered') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a saga that has ended refuses UPDATE'; END IF;
-- step
CREATE TRIGGER webhook_sagas_no_delete BEFORE DELETE ON webhook_delivery_sagas FOR EACH ROW IF NOT (@postrider_permit <=> 'prune') OR OLD.status NOT IN ('Completed', 'DeadLettered') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'a saga refuses DELETE'; END IF;
-- step
-- Jobs as spec 001 knows them: live ones are messages of the outbox, ended ones are attempts.
CREATE VIEW webhook_jobs AS
SELECT o.id, CASE WHEN o.active_key LIKE 'saga:%' THEN CAST(SUBSTR(o.active_key, 6) AS SIGNED) END AS saga_id,
       CASE WHEN o.locked_by IS NULL THEN 'Pending' ELSE 'Leased' END AS status, o.lease_until,
       o.due_at AS attempt_at, NULL AS response_status, NULL AS error_code
FROM outbox o WHERE o.lane = 'webhooks'
UNION ALL
SELECT a.job_id, a.saga_id, CASE WHEN a.error_code IS NULL THEN 'Completed' ELSE 'Failed' END, NULL,
       a.started_at, a.response_status, a.error_code
FROM webhook_attempts a;
