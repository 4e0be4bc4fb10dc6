-- Nothing to do: the columns have types that refuse anything else.
SELECT 1;
