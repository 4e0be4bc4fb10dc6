-- The keys that dead messages had: whoever brings one back must know whether its key belongs to another by now.
CREATE TABLE postrider_former_keys (
    outbox_id  BIGINT         NOT NULL PRIMARY KEY,
    lane       VARBINARY(64)  NOT NULL,
    `key`      VARBINARY(255) NOT NULL,
    digest     BINARY(32)     NOT NULL,
    expires_at DATETIME(6)    NOT NULL
) ENGINE = InnoDB;
-- step: looked at first and written then; INSERT … SELECT would lock what it reads, in the caller's own transaction
CREATE TRIGGER outbox_keys_taken AFTER UPDATE ON outbox_keys FOR EACH ROW
BEGIN
    DECLARE v_dead INT DEFAULT 0;
    IF OLD.outbox_id <> 0 AND NEW.outbox_id <> OLD.outbox_id THEN
        SELECT COUNT(*) INTO v_dead FROM outbox_done WHERE id = OLD.outbox_id AND status = 'dead'
           AND NOT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = OLD.lane AND owned_by IS NOT NULL);
        IF v_dead > 0 THEN
            REPLACE INTO postrider_former_keys (outbox_id, lane, `key`, digest, expires_at)
            VALUES (OLD.outbox_id, OLD.lane, OLD.`key`, OLD.digest, OLD.expires_at);
        END IF;
    END IF;
END;
-- step
CREATE TRIGGER outbox_keys_gone AFTER DELETE ON outbox_keys FOR EACH ROW
BEGIN
    DECLARE v_dead INT DEFAULT 0;
    IF OLD.outbox_id <> 0 THEN
        SELECT COUNT(*) INTO v_dead FROM outbox_done WHERE id = OLD.outbox_id AND status = 'dead'
           AND NOT EXISTS (SELECT 1 FROM outbox_lanes WHERE lane = OLD.lane AND owned_by IS NOT NULL);
        IF v_dead > 0 THEN
            REPLACE INTO postrider_former_keys (outbox_id, lane, `key`, digest, expires_at)
            VALUES (OLD.outbox_id, OLD.lane, OLD.`key`, OLD.digest, OLD.expires_at);
        END IF;
    END IF;
END;
