-- What is past its time is found by `outbox_keys`, which expires with the entry: one index less for every order.
DROP INDEX idx_ledger_expiry;
