-- As before, but whoever is told that a key is taken locks nothing until the end of its transaction.
CREATE OR REPLACE FUNCTION postrider_enqueue(
    lane TEXT, payload BYTEA, key TEXT DEFAULT NULL, target TEXT DEFAULT NULL, active_key TEXT DEFAULT NULL,
    content_type TEXT DEFAULT NULL, headers JSONB DEFAULT NULL, delay INTERVAL DEFAULT '0', deliver_before TIMESTAMPTZ DEFAULT NULL,
    correlation_id TEXT DEFAULT NULL, OUT id BIGINT, OUT outcome TEXT
) LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
    rules    outbox_lanes%ROWTYPE;
    sha      BYTEA := sha256(postrider_enqueue.payload);
    wanted   BYTEA := CASE WHEN postrider_enqueue.target IS NULL THEN sha256(postrider_enqueue.payload)
                           ELSE sha256(sha256(postrider_enqueue.payload) || convert_to(postrider_enqueue.target, 'UTF8')) END;
    basis    TEXT := coalesce(postrider_enqueue.key, postrider_enqueue.active_key, postrider_enqueue.target);
    shard    INT := 0;
    held     RECORD;
    undo     RECORD;
    took     TEXT;
BEGIN
    SELECT * INTO rules FROM outbox_lanes l WHERE l.lane = postrider_enqueue.lane;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'there is no lane "%"; add [lane.%] to postrider.toml and run "postrider migrate"', postrider_enqueue.lane, postrider_enqueue.lane USING ERRCODE = '22023';
    END IF;
    IF rules.owned_by IS NOT NULL THEN
        RAISE EXCEPTION 'lane "%" is owned: use %', postrider_enqueue.lane, rules.owned_by USING ERRCODE = '22023';
    END IF;
    IF postrider_enqueue.payload IS NULL OR octet_length(postrider_enqueue.payload) > rules.max_payload_bytes THEN
        RAISE EXCEPTION 'the payload must have at most % bytes', rules.max_payload_bytes USING ERRCODE = '22023';
    END IF;
    IF octet_length(postrider_enqueue.key) > 255 OR octet_length(postrider_enqueue.active_key) > 255 OR octet_length(postrider_enqueue.target) > 1024
       OR postrider_enqueue.key = '' OR postrider_enqueue.active_key = '' OR postrider_enqueue.target = '' THEN
        RAISE EXCEPTION 'key and active_key take 1 to 255 bytes, target 1 to 1024' USING ERRCODE = '22023';
    END IF;
    IF octet_length(postrider_enqueue.content_type) > 255 OR octet_length(postrider_enqueue.correlation_id) > 255
       OR postrider_enqueue.content_type = '' OR postrider_enqueue.correlation_id = '' THEN
        RAISE EXCEPTION 'content_type and correlation_id take 1 to 255 bytes' USING ERRCODE = '22023';
    END IF;
    IF octet_length(postrider_enqueue.headers::text) > 16384 THEN
        RAISE EXCEPTION 'the headers take at most 16384 bytes' USING ERRCODE = '22023';
    END IF;
    IF postrider_enqueue.delay < INTERVAL '0' OR postrider_enqueue.delay > INTERVAL '3650 days' THEN
        RAISE EXCEPTION 'the delay must be from 0 seconds to ten years' USING ERRCODE = '22023';
    END IF;
    IF basis IS NOT NULL AND rules.shards > 1 THEN
        shard := (('x' || substr(encode(sha256(convert_to(basis, 'UTF8')), 'hex'), 1, 8))::bit(32)::bigint % rules.shards)::int;
    END IF;
    FOR look IN 1..16 LOOP
        id := NULL;
        took := NULL;
        IF postrider_enqueue.key IS NOT NULL THEN
            INSERT INTO outbox_keys (lane, key, outbox_id, digest, expires_at)
            VALUES (postrider_enqueue.lane, postrider_enqueue.key, nextval('outbox_id_seq'), wanted, clock_timestamp() + rules.key_ttl_sec * INTERVAL '1 second')
            ON CONFLICT ON CONSTRAINT outbox_keys_pkey DO NOTHING RETURNING outbox_id INTO id;
            took := 'new';
            IF id IS NULL THEN
                SELECT * INTO held FROM outbox_keys k WHERE k.lane = postrider_enqueue.lane AND k.key = postrider_enqueue.key;
                CONTINUE WHEN NOT FOUND;
                IF held.expires_at > clock_timestamp() OR EXISTS (SELECT 1 FROM outbox o WHERE o.id = held.outbox_id) THEN
                    id := held.outbox_id;
                    outcome := CASE WHEN held.digest = wanted THEN 'exists' ELSE 'differs' END;
                    RETURN;
                END IF;
                undo := held;
                took := 'old';
                id := nextval('outbox_id_seq');
                UPDATE outbox_keys k SET outbox_id = postrider_enqueue.id, digest = wanted, expires_at = clock_timestamp() + rules.key_ttl_sec * INTERVAL '1 second'
                 WHERE k.lane = postrider_enqueue.lane AND k.key = postrider_enqueue.key AND k.outbox_id = held.outbox_id
                   AND k.expires_at = held.expires_at;
                CONTINUE WHEN NOT FOUND; -- somebody else took it meanwhile: look again
                -- A requeue may have brought its message back before the row was ours.
                IF EXISTS (SELECT 1 FROM outbox o WHERE o.id = held.outbox_id) THEN
                    UPDATE outbox_keys k SET outbox_id = held.outbox_id, digest = held.digest, expires_at = held.expires_at
                     WHERE k.lane = postrider_enqueue.lane AND k.key = postrider_enqueue.key;
                    id := held.outbox_id;
                    outcome := CASE WHEN held.digest = wanted THEN 'exists' ELSE 'differs' END;
                    RETURN;
                END IF;
            END IF;
        ELSE
            id := nextval('outbox_id_seq');
        END IF;
        INSERT INTO outbox (id, lane, shard_id, due_at, target, active_key, payload, content_type, headers, payload_sha, correlation_id, deliver_before)
        VALUES (postrider_enqueue.id, postrider_enqueue.lane, shard, clock_timestamp() + postrider_enqueue.delay, postrider_enqueue.target,
                postrider_enqueue.active_key, postrider_enqueue.payload, postrider_enqueue.content_type,
                (SELECT jsonb_agg(jsonb_build_array(h.key, h.value)) FROM jsonb_each_text(postrider_enqueue.headers) h)::text,
                sha, postrider_enqueue.correlation_id, postrider_enqueue.deliver_before)
        ON CONFLICT (lane, active_key) WHERE active_key IS NOT NULL DO NOTHING;
        IF FOUND THEN
            outcome := 'created';
            RETURN;
        END IF;
        IF took = 'new' THEN
            DELETE FROM outbox_keys k WHERE k.lane = postrider_enqueue.lane AND k.key = postrider_enqueue.key;
        ELSIF took = 'old' THEN
            UPDATE outbox_keys k SET outbox_id = undo.outbox_id, digest = undo.digest, expires_at = undo.expires_at
             WHERE k.lane = postrider_enqueue.lane AND k.key = postrider_enqueue.key;
        END IF;
        SELECT o.id, CASE WHEN coalesce(o.payload_sha, sha256(o.payload)) = sha THEN 'exists' ELSE 'differs' END INTO id, outcome
          FROM outbox o WHERE o.lane = postrider_enqueue.lane AND o.active_key = postrider_enqueue.active_key;
        IF FOUND THEN
            RETURN;
        END IF;
    END LOOP;
    RAISE EXCEPTION 'the active key kept changing hands; try again' USING ERRCODE = '40001';
END $$;
