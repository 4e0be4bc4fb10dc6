-- Our own copy of each memory, once for each content within a space: what was written, what waits, what was given up.
CREATE TABLE memory_writes (
    id                 INTEGER PRIMARY KEY AUTOINCREMENT,
    target_space       TEXT    NOT NULL,
    payload_sha        TEXT    NOT NULL,
    state              TEXT    NOT NULL CHECK (state IN ('writing', 'stored', 'queued', 'dead')),
    writing_until      INTEGER,
    payload_md         TEXT    NOT NULL,
    memory_id          TEXT,
    outbox_id          INTEGER,
    -- The audit of the write that is under way.
    audit_id           INTEGER,
    -- Whose write it is: a store whose answer was lost finds its own again.
    writer             TEXT    NOT NULL,
    kind               TEXT,
    meta_json          TEXT,
    evidence_refs_json TEXT    NOT NULL,
    created_at         INTEGER NOT NULL,
    updated_at         INTEGER NOT NULL,
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
    term         TEXT    NOT NULL,
    target_space TEXT    NOT NULL,
    source       TEXT    NOT NULL,
    ref_id       INTEGER NOT NULL,
    PRIMARY KEY (term, target_space, source, ref_id)
) WITHOUT ROWID;

-- What a project allows. No row: everything.
CREATE TABLE governance_settings (
    project_key        TEXT    NOT NULL PRIMARY KEY,
    team_write_enabled INT     NOT NULL DEFAULT 1,
    allowed_kinds_json TEXT,
    max_length         BIGINT,
    updated_by         TEXT,
    updated_at         INTEGER NOT NULL
) WITHOUT ROWID;

CREATE TABLE kv (
    namespace  TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    value_json TEXT    NOT NULL,
    updated_at INTEGER NOT NULL,
    PRIMARY KEY (namespace, key)
) WITHOUT ROWID;

-- Others may insert here too; what is new is taken into the index by and by.
CREATE TABLE logbook_events (
    event_id      INTEGER PRIMARY KEY AUTOINCREMENT,
    event_type    TEXT    NOT NULL,
    source        TEXT,
    actor_user_id TEXT,
    payload_json  TEXT    NOT NULL,
    target_space  TEXT,
    indexed       INT     NOT NULL DEFAULT 0,
    created_at    INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
);
CREATE INDEX idx_logbook_events_new ON logbook_events (event_id) WHERE indexed = 0;

CREATE TABLE knowledge_candidates (
    candidate_id       INTEGER PRIMARY KEY AUTOINCREMENT,
    kind               TEXT,
    title              TEXT    NOT NULL,
    content_md         TEXT    NOT NULL,
    confidence         REAL,
    evidence_refs_json TEXT    NOT NULL DEFAULT '[]',
    target_space       TEXT,
    content_sha        TEXT UNIQUE,
    indexed            INT     NOT NULL DEFAULT 0,
    created_at         INTEGER NOT NULL DEFAULT (CAST((julianday('now') - 2440587.5) * 86400000000 AS INTEGER))
);
CREATE INDEX idx_knowledge_candidates_new ON knowledge_candidates (candidate_id) WHERE indexed = 0;

-- Reconciliation asks for audits that were begun and not ended.
CREATE INDEX idx_audit_pending ON write_audit (created_at) WHERE status = 'pending';
