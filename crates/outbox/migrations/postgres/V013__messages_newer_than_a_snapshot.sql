-- Nothing to do: active keys are found by an index here.
SELECT 1;
