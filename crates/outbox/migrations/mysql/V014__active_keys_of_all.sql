-- For those who had migration 011 before it brought these.
DROP TRIGGER IF EXISTS outbox_takes_active_key;
-- step
CREATE TRIGGER outbox_takes_active_key BEFORE INSERT ON outbox FOR EACH ROW
BEGIN
    DECLARE v_holder BIGINT;
    IF NEW.active_key IS NOT NULL THEN
        INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha)
        VALUES (NEW.lane, NEW.active_key, 0, COALESCE(NEW.payload_sha, UNHEX(SHA2(NEW.payload, 256))));
        SELECT outbox_id INTO v_holder FROM outbox_active_keys
         WHERE lane = NEW.lane AND active_key = NEW.active_key LOCK IN SHARE MODE;
        -- Without a message yet it is ours; a dead message that comes back has its own already.
        IF v_holder NOT IN (0, COALESCE(NEW.id, 0)) THEN
            IF EXISTS (SELECT 1 FROM outbox WHERE id = v_holder) OR NOT EXISTS (
                SELECT 1 FROM outbox_active_keys WHERE lane = NEW.lane AND active_key = NEW.active_key AND outbox_id = v_holder
            ) THEN
                SET NEW.id = v_holder;
            ELSE
                -- Its message was taken away by hand: the key is free.
                UPDATE outbox_active_keys SET outbox_id = 0, payload_sha = COALESCE(NEW.payload_sha, UNHEX(SHA2(NEW.payload, 256)))
                 WHERE lane = NEW.lane AND active_key = NEW.active_key;
            END IF;
        END IF;
    END IF;
END;
-- step
DROP TRIGGER IF EXISTS outbox_names_active_key;
-- step
CREATE TRIGGER outbox_names_active_key AFTER INSERT ON outbox FOR EACH ROW
BEGIN
    IF NEW.active_key IS NOT NULL THEN
        UPDATE outbox_active_keys SET outbox_id = NEW.id WHERE lane = NEW.lane AND active_key = NEW.active_key AND outbox_id = 0;
    END IF;
END;
-- step: those that came in meanwhile
INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha)
SELECT lane, active_key, id, COALESCE(payload_sha, UNHEX(SHA2(payload, 256))) FROM outbox WHERE active_key IS NOT NULL;
