-- Who has which active key, in a table of its own. A unique index among the messages made InnoDB lock more than the key of
-- whoever met one that was taken or only just free: the gap beside it, and with it other messages, keys and lanes, for as
-- long as the caller's transaction was open. A primary key locks its entry and nothing else.
CREATE TABLE outbox_active_keys (
    lane        VARBINARY(64)  NOT NULL,
    active_key  VARBINARY(255) NOT NULL,
    outbox_id   BIGINT         NOT NULL,
    payload_sha BINARY(32)     NOT NULL,
    PRIMARY KEY (lane, active_key)
) ENGINE = InnoDB;
-- step
INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha)
SELECT lane, active_key, id, COALESCE(payload_sha, UNHEX(SHA2(payload, 256))) FROM outbox WHERE active_key IS NOT NULL;
-- step
DROP PROCEDURE IF EXISTS postrider_enqueue;
-- step
CREATE PROCEDURE postrider_enqueue(
    IN p_lane VARBINARY(64), IN p_payload LONGBLOB, IN p_key VARBINARY(256), IN p_target VARBINARY(1025),
    IN p_active_key VARBINARY(256), IN p_delay_sec DOUBLE, OUT p_id BIGINT, OUT p_outcome VARCHAR(16)
)
BEGIN
    DECLARE v_shards INT;
    DECLARE v_max BIGINT;
    DECLARE v_ttl BIGINT;
    DECLARE v_owner VARCHAR(255);
    DECLARE v_sha BINARY(32) DEFAULT UNHEX(SHA2(p_payload, 256));
    DECLARE v_wanted BINARY(32) DEFAULT IF(p_target IS NULL, v_sha, UNHEX(SHA2(CONCAT(v_sha, p_target), 256)));
    DECLARE v_basis VARBINARY(1025) DEFAULT COALESCE(p_key, p_active_key, p_target);
    DECLARE v_shard INT DEFAULT 0;
    DECLARE v_looks INT DEFAULT 0;
    DECLARE v_took VARCHAR(4);
    DECLARE v_old_id BIGINT;
    DECLARE v_old_digest BINARY(32);
    DECLARE v_old_expires DATETIME(6);
    DECLARE v_live INT;
    DECLARE v_free INT;
    DECLARE v_other_sha BINARY(32);
    DECLARE v_message VARCHAR(255);
    DECLARE v_alone BOOLEAN DEFAULT FALSE;
    DECLARE EXIT HANDLER FOR SQLEXCEPTION BEGIN
        IF v_alone THEN
            ROLLBACK;
        END IF;
        RESIGNAL;
    END;
    -- In the caller's transaction where one is open. Else key and message would be two transactions, and a connection cut
    -- between them would leave the key without its message: so it begins and ends one of its own.
    BEGIN
        DECLARE CONTINUE HANDLER FOR 1305 SET v_alone = TRUE;
        SAVEPOINT postrider_enqueue_probe;
        RELEASE SAVEPOINT postrider_enqueue_probe;
    END;
    IF v_alone THEN
        SET TRANSACTION ISOLATION LEVEL READ COMMITTED;
        START TRANSACTION;
    END IF;
    body: BEGIN
        DECLARE CONTINUE HANDLER FOR NOT FOUND BEGIN END;
        SELECT shards, max_payload_bytes, key_ttl_sec, owned_by INTO v_shards, v_max, v_ttl, v_owner FROM outbox_lanes WHERE lane = p_lane;
        IF v_shards IS NULL THEN
            SET v_message = CONCAT('there is no lane "', CONVERT(p_lane USING utf8mb4), '"; add it to postrider.toml and run "postrider migrate"');
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
        END IF;
        IF v_owner IS NOT NULL THEN
            SET v_message = CONCAT('this lane is owned: use ', v_owner);
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = v_message;
        END IF;
        IF p_payload IS NULL OR LENGTH(p_payload) > v_max THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the payload is NULL or longer than the lane takes';
        END IF;
        IF LENGTH(p_key) > 255 OR LENGTH(p_active_key) > 255 OR LENGTH(p_target) > 1024 OR p_key = '' OR p_active_key = '' OR p_target = '' THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'key and active_key take 1 to 255 bytes, target 1 to 1024';
        END IF;
        IF p_delay_sec < 0 OR p_delay_sec > 315360000 THEN
            SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the delay must be from 0 seconds to ten years';
        END IF;
        IF v_basis IS NOT NULL AND v_shards > 1 THEN
            SET v_shard = CAST(CONV(SUBSTR(SHA2(v_basis, 256), 1, 8), 16, 10) AS UNSIGNED) % v_shards;
        END IF;
        WHILE v_looks < 16 DO
            SET v_looks = v_looks + 1, v_took = NULL, p_id = NULL;
            IF p_key IS NOT NULL THEN
                INSERT IGNORE INTO outbox_keys (lane, `key`, outbox_id, digest, expires_at)
                VALUES (p_lane, p_key, 0, v_wanted, UTC_TIMESTAMP(6) + INTERVAL v_ttl SECOND);
                IF ROW_COUNT() = 1 THEN
                    SET v_took = 'new';
                ELSE
                    SET v_old_id = NULL;
                    -- Shared, as the INSERT's own: it is the newest version whatever the isolation, and two who are told the
                    -- same do not wait for each other. The message itself is only looked at: a lock would stop its worker.
                    SELECT outbox_id, digest, expires_at INTO v_old_id, v_old_digest, v_old_expires
                      FROM outbox_keys WHERE lane = p_lane AND `key` = p_key LOCK IN SHARE MODE;
                    IF v_old_id IS NOT NULL THEN
                        SET v_live = 0;
                        IF v_old_expires <= UTC_TIMESTAMP(6) THEN
                            SELECT COUNT(*) INTO v_live FROM outbox WHERE id = v_old_id;
                        END IF;
                        IF v_old_expires > UTC_TIMESTAMP(6) OR v_live > 0 THEN
                            SET p_id = v_old_id, p_outcome = IF(v_old_digest = v_wanted, 'exists', 'differs');
                            LEAVE body;
                        END IF;
                        UPDATE outbox_keys SET outbox_id = 0, digest = v_wanted, expires_at = UTC_TIMESTAMP(6) + INTERVAL v_ttl SECOND
                         WHERE lane = p_lane AND `key` = p_key;
                        SET v_took = 'old';
                    END IF;
                END IF;
            END IF;
            IF p_key IS NULL OR v_took IS NOT NULL THEN
                SET v_free = 1;
                IF p_active_key IS NOT NULL THEN
                    INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha) VALUES (p_lane, p_active_key, 0, v_sha);
                    SET v_free = ROW_COUNT();
                END IF;
                IF v_free = 1 THEN
                    INSERT INTO outbox (lane, shard_id, due_at, target, active_key, payload, payload_sha, created_at, updated_at)
                    VALUES (p_lane, v_shard, UTC_TIMESTAMP(6) + INTERVAL CAST(COALESCE(p_delay_sec, 0) * 1000000 AS SIGNED) MICROSECOND,
                            p_target, p_active_key, p_payload, v_sha, UTC_TIMESTAMP(6), UTC_TIMESTAMP(6));
                    SET p_id = LAST_INSERT_ID(), p_outcome = 'created';
                    IF p_active_key IS NOT NULL THEN
                        UPDATE outbox_active_keys SET outbox_id = p_id WHERE lane = p_lane AND active_key = p_active_key;
                    END IF;
                    IF p_key IS NOT NULL THEN
                        UPDATE outbox_keys SET outbox_id = p_id WHERE lane = p_lane AND `key` = p_key;
                    END IF;
                    LEAVE body;
                END IF;
                IF v_took = 'new' THEN
                    DELETE FROM outbox_keys WHERE lane = p_lane AND `key` = p_key;
                ELSEIF v_took = 'old' THEN
                    UPDATE outbox_keys SET outbox_id = v_old_id, digest = v_old_digest, expires_at = v_old_expires WHERE lane = p_lane AND `key` = p_key;
                END IF;
                -- The INSERT has locked this entry already: the newest version whatever the isolation. The message
                -- is only looked at, unless it is newer than the caller's snapshot.
                SELECT outbox_id, payload_sha INTO p_id, v_other_sha
                  FROM outbox_active_keys WHERE lane = p_lane AND active_key = p_active_key LOCK IN SHARE MODE;
                IF p_id IS NOT NULL THEN
                    SELECT COUNT(*) INTO v_live FROM outbox WHERE id = p_id;
                    IF v_live = 0 THEN
                        SELECT COUNT(*) INTO v_live FROM outbox WHERE id = p_id LOCK IN SHARE MODE;
                    END IF;
                    IF v_live > 0 THEN
                        SET p_outcome = IF(v_other_sha = v_sha, 'exists', 'differs');
                        LEAVE body;
                    END IF;
                    -- Its message was taken away by hand: the key is free.
                    DELETE FROM outbox_active_keys WHERE lane = p_lane AND active_key = p_active_key AND outbox_id = p_id;
                END IF;
            END IF;
        END WHILE;
        SIGNAL SQLSTATE '45000' SET MESSAGE_TEXT = 'the active key kept changing hands; try again';
    END body;
    IF v_alone THEN
        COMMIT;
    END IF;
END;
-- step: whoever knows nothing of this table, as a process of the version before, meets it all the same: with `INSERT IGNORE`
-- its row is left out where the key is another's, with `INSERT` it is a duplicate, as by the unique index that goes now
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
CREATE TRIGGER outbox_names_active_key AFTER INSERT ON outbox FOR EACH ROW
BEGIN
    IF NEW.active_key IS NOT NULL THEN
        UPDATE outbox_active_keys SET outbox_id = NEW.id WHERE lane = NEW.lane AND active_key = NEW.active_key AND outbox_id = 0;
    END IF;
END;
-- step: messages are found by their active key as before
ALTER TABLE outbox DROP KEY uniq_outbox_active_key, ADD KEY idx_outbox_active_key (lane, active_key);
-- step: those that came in meanwhile
INSERT IGNORE INTO outbox_active_keys (lane, active_key, outbox_id, payload_sha)
SELECT lane, active_key, id, COALESCE(payload_sha, UNHEX(SHA2(payload, 256))) FROM outbox WHERE active_key IS NOT NULL;
