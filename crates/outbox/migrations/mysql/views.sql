-- What is no UTF-8 becomes question marks in CONVERT, differs from its bytes then, and shows as NULL.
-- Outbox Lease Protocol v1, section 6
CREATE VIEW outbox_memory AS
SELECT id AS outbox_id, 'pending' AS status, attempts AS retry_count, due_at AS next_attempt_at, locked_at, CONVERT(locked_by USING utf8mb4) AS locked_by,
       last_error, LOWER(HEX(payload_sha)) AS payload_sha, CONVERT(target USING utf8mb4) AS target_space, IF(CAST(CONVERT(payload USING utf8mb4) AS BINARY) = payload, CONVERT(payload USING utf8mb4), NULL) AS payload_md, created_at, updated_at
  FROM outbox WHERE lane = 'memory'
UNION ALL
SELECT id, status, attempts, due_at, NULL, NULL, CASE WHEN status = 'sent' THEN COALESCE(result_ref, last_error) ELSE last_error END,
       LOWER(HEX(payload_sha)), CONVERT(target USING utf8mb4), IF(CAST(CONVERT(payload USING utf8mb4) AS BINARY) = payload, CONVERT(payload USING utf8mb4), NULL), created_at, finished_at
  FROM outbox_done WHERE lane = 'memory';
-- step: Outbox Worker Protocol, section 1
CREATE VIEW outbox_orders AS
SELECT o.id, CONVERT(COALESCE(k.`key`, o.active_key) USING utf8mb4) AS idempotency_key, IF(CAST(CONVERT(o.payload USING utf8mb4) AS BINARY) = o.payload AND JSON_VALID(CONVERT(o.payload USING utf8mb4)), CONVERT(o.payload USING utf8mb4), NULL) AS order_request_json,
       LOWER(HEX(COALESCE(k.digest, o.payload_sha))) AS request_digest,
       CASE WHEN o.locked_by IS NOT NULL THEN 'sending' WHEN o.attempts > 0 AND o.due_at > UTC_TIMESTAMP(6) THEN 'failed' ELSE 'pending' END AS status,
       o.attempts, o.last_error_code, o.last_error AS last_error_msg, CONVERT(o.locked_by USING utf8mb4) AS locked_by, o.locked_at, o.due_at AS next_run_at,
       o.created_at, o.updated_at, k.expires_at
  FROM outbox o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders'
UNION ALL
SELECT o.id, CONVERT(COALESCE(k.`key`, o.active_key) USING utf8mb4), IF(CAST(CONVERT(o.payload USING utf8mb4) AS BINARY) = o.payload AND JSON_VALID(CONVERT(o.payload USING utf8mb4)), CONVERT(o.payload USING utf8mb4), NULL), LOWER(HEX(COALESCE(k.digest, o.payload_sha))),
       CASE o.status WHEN 'sent' THEN 'succeeded' ELSE 'aborted' END, o.attempts, o.last_error_code, o.last_error, NULL, NULL, o.due_at,
       o.created_at, o.finished_at, k.expires_at
  FROM outbox_done o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders';
