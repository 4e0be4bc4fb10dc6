-- What changed is told row by row: `version` is the number of the change that touched the row last, `url_version` that of
-- the change that gave it its URL. Names of headers are no secret, so that showing a subscription needs no key.
ALTER TABLE subscriptions
    ADD COLUMN version BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN url_version BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN header_names TEXT,
    ADD COLUMN disabled_at DATETIME(6);
-- step
CREATE INDEX idx_subscriptions_version ON subscriptions (version);
-- step
-- Since when a receiver has only failed, when it did last, and in how many spells apart.
ALTER TABLE subscription_gates
    ADD COLUMN failing_from DATETIME(6),
    ADD COLUMN failed_at DATETIME(6),
    ADD COLUMN spell_at DATETIME(6),
    ADD COLUMN spells INT NOT NULL DEFAULT 0;
-- step
CREATE INDEX idx_gates_waiting ON subscription_gates (parked, subscription_id);
-- step
CREATE INDEX idx_gates_held ON subscription_gates (held_until);
-- step
CREATE INDEX idx_gates_failing ON subscription_gates (failures);
-- step
-- The version of the subscription a result was sent by.
ALTER TABLE webhook_results ADD COLUMN sent_version BIGINT;
-- step
ALTER TABLE webhook_attempts ADD COLUMN error_detail TEXT;
-- step
-- Which keys the secrets at rest are sealed with: their names and what they are recognised by, never the keys.
CREATE TABLE webhook_keys (
    key_id      VARCHAR(64) CHARACTER SET utf8mb4 COLLATE utf8mb4_bin PRIMARY KEY,
    fingerprint VARCHAR(64) NOT NULL,
    made_at     DATETIME(6) NOT NULL
) ENGINE = InnoDB;
-- step
-- `subscription_rows` counts the changes that set a row's version, `subscriptions_deleted` is the last of them that
-- deleted one, `keys` is what those who make a key lock.
INSERT INTO webhook_state VALUES ('subscription_rows', 1), ('subscriptions_deleted', 0), ('keys', 0);
