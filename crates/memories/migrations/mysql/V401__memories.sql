-- Our own copy of each memory, once for each content within a space: what was written, what waits, what was given up.
CREATE TABLE memory_writes (
    id                 BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    target_space       VARBINARY(190) NOT NULL,
    payload_sha        VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    state              VARCHAR(16) CHARACTER SET ascii COLLATE ascii_bin NOT NULL CHECK (state IN ('writing', 'stored', 'queued', 'dead')),
    writing_until      DATETIME(6),
    payload_md         LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    memory_id          VARBINARY(512),
    outbox_id          BIGINT,
    audit_id           BIGINT,
    writer             VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    kind               VARCHAR(255) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    meta_json          LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    evidence_refs_json LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    created_at         DATETIME(6) NOT NULL,
    updated_at         DATETIME(6) NOT NULL,
    UNIQUE KEY uniq_memory_writes (target_space, payload_sha),
    KEY idx_memory_writes_memory (memory_id),
    KEY idx_memory_writes_outbox (outbox_id),
    KEY idx_memory_writes_writing (writing_until),
    CHECK ((state = 'writing') = (writing_until IS NOT NULL)),
    CHECK (state <> 'stored' OR memory_id IS NOT NULL),
    CHECK (state <> 'queued' OR outbox_id IS NOT NULL)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- The words of what can be found when the memory service cannot be asked. A space of '' is everybody's.
CREATE TABLE memory_terms (
    term         VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    target_space VARBINARY(190) NOT NULL,
    source       VARCHAR(32) CHARACTER SET ascii COLLATE ascii_bin NOT NULL,
    ref_id       BIGINT NOT NULL,
    PRIMARY KEY (term, target_space, source, ref_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- What a project allows. No row: everything.
CREATE TABLE governance_settings (
    project_key        VARBINARY(190) NOT NULL PRIMARY KEY,
    team_write_enabled TINYINT NOT NULL DEFAULT 1,
    allowed_kinds_json TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    max_length         BIGINT,
    updated_by         VARCHAR(255),
    updated_at         DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE kv (
    namespace  VARBINARY(190) NOT NULL,
    `key`      VARBINARY(255) NOT NULL,
    value_json LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    updated_at DATETIME(6) NOT NULL,
    PRIMARY KEY (namespace, `key`)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- Others may insert here too; what is new is taken into the index by and by.
CREATE TABLE logbook_events (
    event_id      BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    event_type    VARCHAR(255) NOT NULL,
    source        VARCHAR(255),
    actor_user_id VARCHAR(255),
    payload_json  LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    target_space  VARBINARY(190),
    indexed       TINYINT NOT NULL DEFAULT 0,
    created_at    DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    KEY idx_logbook_events_new (indexed, event_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
CREATE TABLE knowledge_candidates (
    candidate_id       BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
    kind               VARCHAR(255),
    title              TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    content_md         LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL,
    confidence         DOUBLE,
    evidence_refs_json LONGTEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin NOT NULL DEFAULT ('[]'),
    target_space       VARBINARY(190),
    content_sha        VARCHAR(64) CHARACTER SET ascii COLLATE ascii_bin,
    indexed            TINYINT NOT NULL DEFAULT 0,
    created_at         DATETIME(6) NOT NULL DEFAULT (UTC_TIMESTAMP(6)),
    UNIQUE KEY uniq_knowledge_candidates (content_sha),
    KEY idx_knowledge_candidates_new (indexed, candidate_id)
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
-- step
-- Reconciliation asks for audits that were begun and not ended.
CREATE INDEX idx_audit_pending ON write_audit (status, created_at);
