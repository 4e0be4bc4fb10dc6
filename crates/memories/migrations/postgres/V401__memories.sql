-- Our own copy of each memory, once for each content within a space: what was written, what waits, what was given up.
CREATE TABLE memory_writes (
    id                 BIGSERIAL PRIMARY KEY,
    target_space       TEXT        NOT NULL,
    payload_sha        TEXT        NOT NULL,
    state              TEXT        NOT NULL CHECK (state IN ('writing', 'stored', 'queued', 'dead')),
    writing_until      TIMESTAMPTZ,
    payload_md         TEXT        NOT NULL,
    memory_id          TEXT,
    outbox_id          BIGINT,
    -- The audit of the write that is under way.
    audit_id           BIGINT,
    -- Whose write it is: a store whose answer was lost finds its own again.
    writer             TEXT        NOT NULL,
    kind               TEXT,
    meta_json          TEXT,
    evidence_refs_json TEXT        NOT NULL,
    created_at         TIMESTAMPTZ NOT NULL,
    updated_at         TIMESTAMPTZ NOT NULL,
    UNIQUE (target_space, payload_sha),
    CHECK ((state = 'writing') = (writing_until IS NOT NULL)),
    CHECK (state <> 'stored' OR memory_id IS NOT NULL),
    CHECK (state <> 'queued' OR outbox_id IS NOT NULL)
);
CREATE INDEX idx_memory_writes_memory ON memory_writes (memory_id);
CREATE INDEX idx_memory_writes_outbox ON memory_writes (outbox_id);
CREATE INDEX idx_memory_writes_writing ON memory_writes (writing_until) WHERE state = 'writing';

-- The words of what can be found when the memory service cannot be asked. A space of '' is everybody's.
CREATE TABLE memory_terms (
    term         TEXT COLLATE "C" NOT NULL,
    target_space TEXT   NOT NULL,
    source       TEXT   NOT NULL,
    ref_id       BIGINT NOT NULL,
    PRIMARY KEY (term, target_space, source, ref_id)
);

-- What a project allows. No row: everything.
CREATE TABLE governance_settings (
    project_key        TEXT        NOT NULL PRIMARY KEY,
    team_write_enabled BOOLEAN     NOT NULL DEFAULT TRUE,
    allowed_kinds_json TEXT,
    max_length         BIGINT,
    updated_by         TEXT,
    updated_at         TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);

CREATE TABLE kv (
    namespace  TEXT        NOT NULL,
    key        TEXT        NOT NULL,
    value_json JSONB       NOT NULL,
    updated_at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),
    PRIMARY KEY (namespace, key)
);

-- Others may insert here too; what is new is taken into the index by and by.
CREATE TABLE logbook_events (
    event_id      BIGSERIAL PRIMARY KEY,
    event_type    TEXT        NOT NULL,
    source        TEXT,
    actor_user_id TEXT,
    payload_json  JSONB       NOT NULL,
    target_space  TEXT,
    indexed       BOOLEAN     NOT NULL DEFAULT FALSE,
    created_at    TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX idx_logbook_events_new ON logbook_events (event_id) WHERE NOT indexed;

CREATE TABLE knowledge_candidates (
    candidate_id       BIGSERIAL PRIMARY KEY,
    kind               TEXT,
    title              TEXT        NOT NULL,
    content_md         TEXT        NOT NULL,
    confidence         DOUBLE PRECISION,
    evidence_refs_json JSONB       NOT NULL DEFAULT '[]',
    target_space       TEXT,
    content_sha        TEXT UNIQUE,
    indexed            BOOLEAN     NOT NULL DEFAULT FALSE,
    created_at         TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp()
);
CREATE INDEX idx_knowledge_candidates_new ON knowledge_candidates (candidate_id) WHERE NOT indexed;

-- Reconciliation asks for audits that were begun and not ended.
CREATE INDEX idx_audit_pending ON write_audit (created_at) WHERE status = 'pending';

-- The specifications' own schema names, where this role may create schemas.
DO $$ BEGIN
    IF has_database_privilege(current_database(), 'CREATE') THEN
        CREATE SCHEMA IF NOT EXISTS logbook;
        CREATE SCHEMA IF NOT EXISTS analysis;
    END IF;
    IF to_regnamespace('logbook') IS NOT NULL AND has_schema_privilege('logbook', 'CREATE') THEN
        EXECUTE 'CREATE VIEW logbook.kv AS SELECT namespace, key, value_json, updated_at FROM kv OFFSET 0';
        EXECUTE 'CREATE VIEW logbook.events AS SELECT event_id, event_type, source, actor_user_id, payload_json, target_space, created_at FROM logbook_events OFFSET 0';
    END IF;
    IF to_regnamespace('analysis') IS NOT NULL AND has_schema_privilege('analysis', 'CREATE') THEN
        EXECUTE 'CREATE VIEW analysis.knowledge_candidates AS SELECT candidate_id, kind, title, content_md, confidence, evidence_refs_json, target_space, created_at FROM knowledge_candidates OFFSET 0';
    END IF;
END $$;
