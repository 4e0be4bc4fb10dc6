-- SQLite takes any bytes for text, and then breaks whoever reads it. So payloads are walked through, one UTF-8 sequence at
-- a time; what is none, or holds a NUL, ends the walk early and shows as NULL.
-- Outbox Lease Protocol v1, §6.
CREATE VIEW outbox_memory AS
SELECT id AS outbox_id, 'pending' AS status, attempts AS retry_count, strftime('%Y-%m-%d %H:%M:%f', due_at / 1000000.0, 'unixepoch') AS next_attempt_at,
       strftime('%Y-%m-%d %H:%M:%f', locked_at / 1000000.0, 'unixepoch') AS locked_at, locked_by, last_error, lower(hex(payload_sha)) AS payload_sha, target AS target_space,
       CASE WHEN (WITH RECURSIVE sequence(at, next) AS (SELECT 1, hex(substr(payload, 1, 4)) UNION ALL
       SELECT at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), hex(substr(payload, at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), 4)) FROM sequence
        WHERE next GLOB '0[1-9A-F]*' OR next GLOB '[1-7]*' OR next GLOB 'C[2-9A-F][89AB]*' OR next GLOB 'D?[89AB]*' OR next GLOB 'E0[AB]?[89AB]*' OR next GLOB 'E[1-9ABCEF][89AB]?[89AB]*'
           OR next GLOB 'ED[89]?[89AB]*' OR next GLOB 'F0[9AB]?[89AB]?[89AB]*' OR next GLOB 'F[123][89AB]?[89AB]?[89AB]*' OR next GLOB 'F48?[89AB]?[89AB]*')
       SELECT max(at) FROM sequence) > length(payload) THEN CAST(payload AS TEXT) END AS payload_md, strftime('%Y-%m-%d %H:%M:%f', created_at / 1000000.0, 'unixepoch') AS created_at, strftime('%Y-%m-%d %H:%M:%f', updated_at / 1000000.0, 'unixepoch') AS updated_at
  FROM outbox WHERE lane = 'memory'
UNION ALL
SELECT id, status, attempts, strftime('%Y-%m-%d %H:%M:%f', due_at / 1000000.0, 'unixepoch'), NULL, NULL,
       CASE WHEN status = 'sent' THEN coalesce(result_ref, last_error) ELSE last_error END, lower(hex(payload_sha)), target,
       CASE WHEN (WITH RECURSIVE sequence(at, next) AS (SELECT 1, hex(substr(payload, 1, 4)) UNION ALL
       SELECT at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), hex(substr(payload, at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), 4)) FROM sequence
        WHERE next GLOB '0[1-9A-F]*' OR next GLOB '[1-7]*' OR next GLOB 'C[2-9A-F][89AB]*' OR next GLOB 'D?[89AB]*' OR next GLOB 'E0[AB]?[89AB]*' OR next GLOB 'E[1-9ABCEF][89AB]?[89AB]*'
           OR next GLOB 'ED[89]?[89AB]*' OR next GLOB 'F0[9AB]?[89AB]?[89AB]*' OR next GLOB 'F[123][89AB]?[89AB]?[89AB]*' OR next GLOB 'F48?[89AB]?[89AB]*')
       SELECT max(at) FROM sequence) > length(payload) THEN CAST(payload AS TEXT) END, strftime('%Y-%m-%d %H:%M:%f', created_at / 1000000.0, 'unixepoch'), strftime('%Y-%m-%d %H:%M:%f', finished_at / 1000000.0, 'unixepoch')
  FROM outbox_done WHERE lane = 'memory';
-- Outbox Worker Protocol, §1.
CREATE VIEW outbox_orders AS
SELECT o.id, coalesce(k.key, o.active_key) AS idempotency_key, CASE WHEN json_valid(CAST(o.payload AS TEXT)) THEN CASE WHEN (WITH RECURSIVE sequence(at, next) AS (SELECT 1, hex(substr(o.payload, 1, 4)) UNION ALL
       SELECT at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), hex(substr(o.payload, at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), 4)) FROM sequence
        WHERE next GLOB '0[1-9A-F]*' OR next GLOB '[1-7]*' OR next GLOB 'C[2-9A-F][89AB]*' OR next GLOB 'D?[89AB]*' OR next GLOB 'E0[AB]?[89AB]*' OR next GLOB 'E[1-9ABCEF][89AB]?[89AB]*'
           OR next GLOB 'ED[89]?[89AB]*' OR next GLOB 'F0[9AB]?[89AB]?[89AB]*' OR next GLOB 'F[123][89AB]?[89AB]?[89AB]*' OR next GLOB 'F48?[89AB]?[89AB]*')
       SELECT max(at) FROM sequence) > length(o.payload) THEN CAST(o.payload AS TEXT) END END AS order_request_json,
       lower(hex(coalesce(k.digest, o.payload_sha))) AS request_digest,
       CASE WHEN o.locked_by IS NOT NULL THEN 'sending'
            WHEN o.attempts > 0 AND o.due_at > (julianday('now') - 2440587.5) * 86400000000 THEN 'failed' ELSE 'pending' END AS status,
       o.attempts, o.last_error_code, o.last_error AS last_error_msg, o.locked_by, strftime('%Y-%m-%d %H:%M:%f', o.locked_at / 1000000.0, 'unixepoch') AS locked_at,
       strftime('%Y-%m-%d %H:%M:%f', o.due_at / 1000000.0, 'unixepoch') AS next_run_at, strftime('%Y-%m-%d %H:%M:%f', o.created_at / 1000000.0, 'unixepoch') AS created_at, strftime('%Y-%m-%d %H:%M:%f', o.updated_at / 1000000.0, 'unixepoch') AS updated_at, strftime('%Y-%m-%d %H:%M:%f', k.expires_at / 1000000.0, 'unixepoch') AS expires_at
  FROM outbox o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders'
UNION ALL
SELECT o.id, coalesce(k.key, o.active_key), CASE WHEN json_valid(CAST(o.payload AS TEXT)) THEN CASE WHEN (WITH RECURSIVE sequence(at, next) AS (SELECT 1, hex(substr(o.payload, 1, 4)) UNION ALL
       SELECT at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), hex(substr(o.payload, at + 1 + (next GLOB '[C-F]*') + (next GLOB '[EF]*') + (next GLOB 'F*'), 4)) FROM sequence
        WHERE next GLOB '0[1-9A-F]*' OR next GLOB '[1-7]*' OR next GLOB 'C[2-9A-F][89AB]*' OR next GLOB 'D?[89AB]*' OR next GLOB 'E0[AB]?[89AB]*' OR next GLOB 'E[1-9ABCEF][89AB]?[89AB]*'
           OR next GLOB 'ED[89]?[89AB]*' OR next GLOB 'F0[9AB]?[89AB]?[89AB]*' OR next GLOB 'F[123][89AB]?[89AB]?[89AB]*' OR next GLOB 'F48?[89AB]?[89AB]*')
       SELECT max(at) FROM sequence) > length(o.payload) THEN CAST(o.payload AS TEXT) END END, lower(hex(coalesce(k.digest, o.payload_sha))),
       CASE o.status WHEN 'sent' THEN 'succeeded' ELSE 'aborted' END, o.attempts, o.last_error_code, o.last_error, NULL, NULL,
       strftime('%Y-%m-%d %H:%M:%f', o.due_at / 1000000.0, 'unixepoch'), strftime('%Y-%m-%d %H:%M:%f', o.created_at / 1000000.0, 'unixepoch'), strftime('%Y-%m-%d %H:%M:%f', o.finished_at / 1000000.0, 'unixepoch'), strftime('%Y-%m-%d %H:%M:%f', k.expires_at / 1000000.0, 'unixepoch')
  FROM outbox_done o LEFT JOIN outbox_keys k ON k.outbox_id = o.id WHERE o.lane = 'orders';
