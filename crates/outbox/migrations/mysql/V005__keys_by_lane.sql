-- Keys past their time are looked for lane by lane: one lane's backlog of them is nothing to another.
ALTER TABLE outbox_keys DROP KEY idx_keys_expiry, ADD KEY idx_keys_expiry (lane, expires_at);
