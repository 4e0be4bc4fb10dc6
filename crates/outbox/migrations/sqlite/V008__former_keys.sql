-- The keys that dead messages had: whoever brings one back must know whether its key belongs to another by now.
CREATE TABLE postrider_former_keys (
    outbox_id  INTEGER PRIMARY KEY,
    lane       TEXT    NOT NULL,
    key        TEXT    NOT NULL,
    digest     BLOB    NOT NULL,
    expires_at INTEGER NOT NULL
);
CREATE TRIGGER outbox_keys_taken AFTER UPDATE OF outbox_id ON outbox_keys
WHEN OLD.outbox_id <> 0 AND NEW.outbox_id <> OLD.outbox_id
BEGIN
    INSERT OR REPLACE INTO postrider_former_keys SELECT OLD.outbox_id, OLD.lane, OLD.key, OLD.digest, OLD.expires_at
    FROM outbox_done WHERE id = OLD.outbox_id AND status = 'dead'
      AND NOT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = OLD.lane AND owned_by IS NOT NULL);
END;
CREATE TRIGGER outbox_keys_gone AFTER DELETE ON outbox_keys WHEN OLD.outbox_id <> 0
BEGIN
    INSERT OR REPLACE INTO postrider_former_keys SELECT OLD.outbox_id, OLD.lane, OLD.key, OLD.digest, OLD.expires_at
    FROM outbox_done WHERE id = OLD.outbox_id AND status = 'dead'
      AND NOT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = OLD.lane AND owned_by IS NOT NULL);
END;
