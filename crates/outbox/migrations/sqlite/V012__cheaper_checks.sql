-- What a row is checked for stays the same, but each column by itself: SQLite evaluates a CHECK only if a column it names is
-- written, so that a claim pays for four of them instead of eleven, and a cast costs less than asking for a type's name.
-- A constraint is only text in the schema: nothing on disk changes, and rows that were there passed the former one.
PRAGMA writable_schema = ON;
UPDATE sqlite_master SET sql = replace(sql,
    'CHECK (typeof(due_at) = ''integer'' AND typeof(created_at) = ''integer'' AND typeof(updated_at) = ''integer''
           AND typeof(lease_until) IN (''integer'', ''null'') AND typeof(locked_at) IN (''integer'', ''null'')
           AND typeof(deliver_before) IN (''integer'', ''null'') AND typeof(shard_id) = ''integer'' AND typeof(attempts) = ''integer''
           AND typeof(crashes) = ''integer'' AND typeof(maybe_sent) = ''integer'' AND typeof(lease_token) = ''integer'')',
    'CHECK (due_at = CAST(due_at AS INTEGER)),
    CHECK (created_at = CAST(created_at AS INTEGER)),
    CHECK (updated_at = CAST(updated_at AS INTEGER)),
    CHECK (lease_until = CAST(lease_until AS INTEGER)),
    CHECK (locked_at = CAST(locked_at AS INTEGER)),
    CHECK (deliver_before = CAST(deliver_before AS INTEGER)),
    CHECK (shard_id = CAST(shard_id AS INTEGER)),
    CHECK (attempts = CAST(attempts AS INTEGER)),
    CHECK (crashes = CAST(crashes AS INTEGER)),
    CHECK (maybe_sent = CAST(maybe_sent AS INTEGER)),
    CHECK (lease_token = CAST(lease_token AS INTEGER))')
WHERE type = 'table' AND name = 'outbox';
PRAGMA writable_schema = RESET;
-- Other connections read the schema again when its version has changed.
CREATE TABLE outbox_checked (id INTEGER);
DROP TABLE outbox_checked;
