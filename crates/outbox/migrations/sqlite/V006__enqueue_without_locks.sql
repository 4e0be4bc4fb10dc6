-- Nothing to do: SQLite has no functions, and one writer at a time.
SELECT 1;
