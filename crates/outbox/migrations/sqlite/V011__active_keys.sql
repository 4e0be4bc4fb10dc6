-- Nothing to do: a partial unique index has entries for messages with an active key alone, and locks nothing beside them.
SELECT 1;
