-- What became of each order, by its key: the source of truth.
CREATE TABLE idempo_ledger (
    idempotency_key       VARBINARY(255) NOT NULL PRIMARY KEY,
    request_digest        VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    status                VARCHAR(16) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL CHECK (status IN ('in_progress', 'succeeded', 'failed')),
    http_status           INT,
    response_payload_json LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    result_digest         VARCHAR(64),
    broker_ref            VARCHAR(255),
    reason_code           VARCHAR(100),
    first_seen_at         DATETIME(6) NOT NULL,
    last_seen_at          DATETIME(6) NOT NULL,
    finished_at           DATETIME(6),
    replays               BIGINT      NOT NULL DEFAULT 0,
    expires_at            DATETIME(6),
    -- Nothing unfinished expires; what has ended has its answer.
    CHECK ((status = 'in_progress') = (expires_at IS NULL)),
    CHECK ((status = 'in_progress') = (response_payload_json IS NULL)),
    KEY idx_ledger_expiry (expires_at)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- How entries moved, and by whom. Append-only.
CREATE TABLE ledger_events (
    id          BIGINT AUTO_INCREMENT PRIMARY KEY,
    key_hash    VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    from_status VARCHAR(16),
    to_status   VARCHAR(16)  NOT NULL,
    actor       VARCHAR(255) NOT NULL,
    reason      TEXT,
    at          DATETIME(6)  NOT NULL,
    KEY idx_ledger_events_key (key_hash, id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- The book of the paper broker: what it executed.
CREATE TABLE paper_executions (
    id              BIGINT AUTO_INCREMENT PRIMARY KEY,
    idempotency_key VARBINARY(255) NOT NULL,
    order_ref       VARCHAR(64)    NOT NULL,
    instrument      VARCHAR(20)    NOT NULL,
    side            VARCHAR(4)     NOT NULL,
    executed_qty    VARCHAR(64)    NOT NULL,
    execution_json  LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    at              DATETIME(6)    NOT NULL,
    KEY idx_paper_key (idempotency_key)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TRIGGER idempo_ledger_no_update BEFORE UPDATE ON idempo_ledger FOR EACH ROW IF NOT (NEW.idempotency_key = OLD.idempotency_key AND NEW.request_digest = OLD.request_digest AND (OLD.status = 'in_progress' OR (OLD.status = 'failed' AND NEW.status = 'in_progress') OR (NEW.status = OLD.status AND NEW.response_payload_json = OLD.response_payload_json AND NEW.http_status = OLD.http_status))) THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the ledger refuses this UPDATE'; END IF;
-- step
CREATE TRIGGER idempo_ledger_no_delete BEFORE DELETE ON idempo_ledger FOR EACH ROW IF OLD.status = 'in_progress' OR NOT (@postrider_permit <=> 'prune') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the ledger refuses this DELETE'; END IF;
-- step
CREATE TRIGGER ledger_events_no_update BEFORE UPDATE ON ledger_events FOR EACH ROW IF TRUE THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'ledger_events is append-only and refuses UPDATE'; END IF;
-- step
CREATE TRIGGER ledger_events_no_delete BEFORE DELETE ON ledger_events FOR EACH ROW IF NOT (@postrider_permit <=> 'prune') THEN SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'ledger_events is append-only and refuses DELETE'; END IF;
