-- Keys past their time are looked for lane by lane: one lane's backlog of them is nothing to another.
DROP INDEX idx_keys_expiry;
CREATE INDEX idx_keys_expiry ON outbox_keys (lane, expires_at);
