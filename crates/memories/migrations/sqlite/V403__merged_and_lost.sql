-- OpenMemory takes it for another memory, whose id is memory_id, and keeps only that one: our copy is the only one.
ALTER TABLE memory_writes ADD COLUMN merged INTEGER NOT NULL DEFAULT 0;
-- A write got no clear answer and may be applied until then; it is looked for before it is written again.
ALTER TABLE memory_writes ADD COLUMN doubt_until INTEGER;
-- Why OpenMemory refused it, in its own words.
ALTER TABLE memory_writes ADD COLUMN refusal TEXT;
-- OpenMemory was asked for it and no longer has it.
ALTER TABLE memory_writes ADD COLUMN lost_at INTEGER;
CREATE INDEX idx_memory_writes_queued ON memory_writes (updated_at) WHERE state = 'queued';
CREATE INDEX idx_memory_writes_lost ON memory_writes (id) WHERE lost_at IS NOT NULL;
