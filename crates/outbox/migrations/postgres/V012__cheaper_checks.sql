-- Nothing to do: columns have types here.
SELECT 1;
