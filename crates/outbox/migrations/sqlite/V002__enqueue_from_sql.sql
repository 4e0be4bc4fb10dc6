-- SQLite has no stored functions: other languages INSERT into `outbox` and `outbox_keys` themselves (docs/sql.md). Nothing
-- to create here; the number is kept so that all databases have the same migrations.
SELECT 1;
