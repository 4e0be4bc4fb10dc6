-- merged: OpenMemory takes it for another memory, whose id is memory_id, and keeps only that one: our copy is the only one.
-- doubt_until: a write got no clear answer and may be applied until then; it is looked for before it is written again.
-- refusal: why OpenMemory refused it, in its own words. lost_at: OpenMemory was asked for it and no longer has it.
ALTER TABLE memory_writes
    ADD COLUMN merged BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN doubt_until DATETIME(6),
    ADD COLUMN refusal TEXT CHARACTER SET utf8mb4 COLLATE utf8mb4_bin,
    ADD COLUMN lost_at DATETIME(6),
    ADD KEY idx_memory_writes_queued (state, updated_at),
    ADD KEY idx_memory_writes_lost (lost_at, id);
