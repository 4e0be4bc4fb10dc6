-- The keys that dead messages had: whoever brings one back must know whether its key belongs to another by now.
CREATE TABLE postrider_former_keys (
    outbox_id  BIGINT      PRIMARY KEY,
    lane       TEXT        NOT NULL,
    key        TEXT        NOT NULL,
    digest     BYTEA       NOT NULL,
    expires_at TIMESTAMPTZ NOT NULL
);
-- With the rights of its owner: whoever enqueues needs none here.
CREATE FUNCTION postrider_remember_key() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER SET search_path FROM CURRENT AS $$
BEGIN
    INSERT INTO postrider_former_keys SELECT OLD.outbox_id, OLD.lane, OLD.key, OLD.digest, OLD.expires_at
    FROM outbox_done WHERE id = OLD.outbox_id AND status = 'dead'
      AND NOT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = OLD.lane AND owned_by IS NOT NULL)
    ON CONFLICT (outbox_id) DO UPDATE SET lane = EXCLUDED.lane, key = EXCLUDED.key, digest = EXCLUDED.digest, expires_at = EXCLUDED.expires_at;
    RETURN NULL;
END $$;
CREATE TRIGGER outbox_keys_taken AFTER UPDATE OF outbox_id ON outbox_keys FOR EACH ROW
    WHEN (OLD.outbox_id <> 0 AND NEW.outbox_id <> OLD.outbox_id) EXECUTE FUNCTION postrider_remember_key();
CREATE TRIGGER outbox_keys_gone AFTER DELETE ON outbox_keys FOR EACH ROW
    WHEN (OLD.outbox_id <> 0) EXECUTE FUNCTION postrider_remember_key();
