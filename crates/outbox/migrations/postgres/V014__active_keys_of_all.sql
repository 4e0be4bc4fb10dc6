-- Nothing to do: the unique index is everybody's.
SELECT 1;
