-- Live work only. `due_at` says when a row may be tried and is indexed; `lease_until` says until when it is held and is
-- in no index. Names and keys are binary: case and trailing blanks count. Times are UTC.
CREATE TABLE outbox (
    id              BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    lane            VARBINARY(64) NOT NULL,
    shard_id        INT NOT NULL DEFAULT 0,
    due_at          DATETIME(6) NOT NULL,
    lease_until     DATETIME(6),
    attempts        INT NOT NULL DEFAULT 0,
    crashes         INT NOT NULL DEFAULT 0,
    maybe_sent      TINYINT(1) NOT NULL DEFAULT 0,
    lease_token     BIGINT NOT NULL DEFAULT 0,
    locked_by       VARBINARY(255),
    locked_at       DATETIME(6),
    target          VARBINARY(1024),
    active_key      VARBINARY(255),
    payload         LONGBLOB NOT NULL,
    content_type    VARBINARY(255),
    headers         BLOB,
    payload_sha     BINARY(32),
    last_error_code VARCHAR(100),
    last_error      VARCHAR(512),
    correlation_id  VARBINARY(255),
    created_at      DATETIME(6) NOT NULL,
    updated_at      DATETIME(6) NOT NULL,
    deliver_before  DATETIME(6),
    KEY idx_claim (lane, shard_id, due_at, id),
    UNIQUE KEY uniq_outbox_active_key (lane, active_key),
    CONSTRAINT outbox_lease_is_whole CHECK ((locked_by IS NULL) = (lease_until IS NULL))
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step: what has ended; refuses UPDATE always, and DELETE except by requeue and prune
CREATE TABLE outbox_done (
    id              BIGINT NOT NULL PRIMARY KEY,
    lane            VARBINARY(64) NOT NULL,
    shard_id        INT NOT NULL DEFAULT 0,
    due_at          DATETIME(6) NOT NULL,
    lease_until     DATETIME(6),
    attempts        INT NOT NULL DEFAULT 0,
    crashes         INT NOT NULL DEFAULT 0,
    maybe_sent      TINYINT(1) NOT NULL DEFAULT 0,
    lease_token     BIGINT NOT NULL DEFAULT 0,
    locked_by       VARBINARY(255),
    locked_at       DATETIME(6),
    target          VARBINARY(1024),
    active_key      VARBINARY(255),
    payload         LONGBLOB NOT NULL,
    content_type    VARBINARY(255),
    headers         BLOB,
    payload_sha     BINARY(32),
    last_error_code VARCHAR(100),
    last_error      VARCHAR(512),
    correlation_id  VARBINARY(255),
    created_at      DATETIME(6) NOT NULL,
    updated_at      DATETIME(6) NOT NULL,
    deliver_before  DATETIME(6),
    status          VARCHAR(8) CHARACTER SET ascii NOT NULL CHECK (status IN ('sent', 'dead')),
    result_ref      VARCHAR(512),
    finished_at     DATETIME(6) NOT NULL,
    KEY idx_done (lane, status, finished_at, id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step
CREATE TABLE outbox_keys (
    lane       VARBINARY(64)  NOT NULL,
    `key`      VARBINARY(255) NOT NULL,
    outbox_id  BIGINT         NOT NULL,
    digest     BINARY(32)     NOT NULL,
    expires_at DATETIME(6)    NOT NULL,
    PRIMARY KEY (lane, `key`),
    KEY idx_keys_outbox (outbox_id),
    KEY idx_keys_expiry (expires_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step: attempts that did not simply succeed
CREATE TABLE outbox_attempts (
    id          BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    outbox_id   BIGINT NOT NULL,
    lease_token BIGINT NOT NULL,
    kind        VARCHAR(16) CHARACTER SET ascii NOT NULL CHECK (kind IN ('retry', 'dead', 'takeover')),
    attempt     INT NOT NULL,
    code        VARCHAR(100),
    error       VARCHAR(512),
    worker      VARBINARY(255),
    at          DATETIME(6) NOT NULL,
    KEY idx_attempts_outbox (outbox_id, lease_token)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step: what was sent on lanes with dedup, by content
CREATE TABLE outbox_dedup (
    lane        VARBINARY(64) NOT NULL,
    payload_sha BINARY(32)    NOT NULL,
    target      VARBINARY(1024),
    outbox_id   BIGINT        NOT NULL,
    result_ref  VARCHAR(512),
    sent_at     DATETIME(6)   NOT NULL,
    PRIMARY KEY (lane, payload_sha, outbox_id),
    KEY idx_dedup_outbox (outbox_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step
CREATE TABLE outbox_lanes (
    lane              VARBINARY(64) NOT NULL PRIMARY KEY,
    shards            INT    NOT NULL,
    max_payload_bytes BIGINT NOT NULL,
    key_ttl_sec       BIGINT NOT NULL,
    owned_by          VARCHAR(255)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step
CREATE TABLE write_audit (
    audit_id           BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    created_at         DATETIME(6) NOT NULL,
    updated_at         DATETIME(6) NOT NULL,
    actor_user_id      VARCHAR(255),
    target_space       VARBINARY(1024),
    action             VARCHAR(16) NOT NULL CHECK (action IN ('allow', 'redirect', 'reject')),
    reason             VARCHAR(255) NOT NULL,
    status             VARCHAR(16) NOT NULL CHECK (status IN ('pending', 'success', 'redirected', 'failed')),
    payload_sha        VARCHAR(64),
    correlation_id     VARBINARY(255),
    outbox_id          BIGINT,
    evidence_refs_json LONGTEXT NOT NULL,
    KEY idx_audit_outbox (outbox_id),
    KEY idx_audit_correlation (correlation_id)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step: receivers remember here what they have handled
CREATE TABLE inbox (
    source      VARBINARY(255) NOT NULL,
    message_id  VARBINARY(255) NOT NULL,
    received_at DATETIME(6)    NOT NULL,
    PRIMARY KEY (source, message_id),
    KEY idx_inbox_received (received_at)
) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step
CREATE TABLE postrider_meta (name VARCHAR(64) NOT NULL PRIMARY KEY, value VARCHAR(255) NOT NULL) ENGINE = InnoDB DEFAULT CHARSET = utf8mb4;
-- step
INSERT IGNORE INTO postrider_meta VALUES ('store_id', SUBSTR(SHA2(CONCAT(UUID(), RAND(), CONNECTION_ID()), 256), 1, 16));
-- step
CREATE TRIGGER outbox_done_no_update BEFORE UPDATE ON outbox_done FOR EACH ROW
    SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'outbox_done holds what has ended and refuses UPDATE; requeue dead messages, purge old ones';
-- step
CREATE TRIGGER outbox_done_no_delete BEFORE DELETE ON outbox_done FOR EACH ROW
BEGIN
    IF COALESCE(@postrider_permit, '') NOT IN ('requeue', 'prune') THEN
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'outbox_done holds what has ended and refuses DELETE; requeue dead messages, purge old ones';
    END IF;
END;
