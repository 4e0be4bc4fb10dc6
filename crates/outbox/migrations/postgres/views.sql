-- Outbox Lease Protocol v1, §6.
CREATE VIEW outbox_memory AS
SELECT id AS outbox_id, 'pending'::text AS status, attempts AS retry_count, due_at AS next_attempt_at, locked_at, locked_by,
       last_error, encode(payload_sha, 'hex') AS payload_sha, target AS target_space, postrider_text(payload) AS payload_md, created_at, updated_at
  FROM outbox WHERE lane = 'memory'
UNION ALL
SELECT id, status, attempts, due_at, NULL, NULL, CASE WHEN status = 'sent' THEN coalesce(result_ref, last_error) ELSE last_error END,
       encode(payload_sha, 'hex'), target, postrider_text(payload), created_at, finished_at
  FROM outbox_done WHERE lane = 'memory';
-- Outbox Worker Protocol, §1.
CREATE VIEW outbox_orders AS
SELECT o.id, coalesce(k.key, o.active_key) AS idempotency_key, postrider_json(o.payload) AS order_request_json, encode(coalesce(k.digest, o.payload_sha), 'hex') AS request_digest,
       CASE WHEN o.locked_by IS NOT NULL THEN 'sending' WHEN o.attempts > 0 AND o.due_at > clock_timestamp() THEN 'failed' ELSE 'pending' END AS status,
       o.attempts, o.last_error_code, o.last_error AS last_error_msg, o.locked_by, o.locked_at, o.due_at AS next_run_at,
       o.created_at, o.updated_at, k.expires_at
  FROM outbox o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders'
UNION ALL
SELECT o.id, coalesce(k.key, o.active_key), postrider_json(o.payload), encode(coalesce(k.digest, o.payload_sha), 'hex'),
       CASE o.status WHEN 'sent' THEN 'succeeded' ELSE 'aborted' END,
       o.attempts, o.last_error_code, o.last_error, NULL, NULL, o.due_at, o.created_at, o.finished_at, k.expires_at
  FROM outbox_done o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders';
-- The specifications' own schema names, where this role may create schemas.
DO $$ BEGIN
    IF has_database_privilege(current_database(), 'CREATE') THEN
        CREATE SCHEMA IF NOT EXISTS logbook;
        CREATE SCHEMA IF NOT EXISTS governance;
    END IF;
    IF to_regnamespace('logbook') IS NOT NULL AND has_schema_privilege('logbook', 'CREATE') THEN
        EXECUTE 'CREATE VIEW logbook.outbox_memory AS SELECT * FROM outbox_memory';
    END IF;
    IF to_regnamespace('governance') IS NOT NULL AND has_schema_privilege('governance', 'CREATE') THEN
        EXECUTE 'CREATE VIEW governance.write_audit AS SELECT * FROM write_audit OFFSET 0';
    END IF;
END $$;
