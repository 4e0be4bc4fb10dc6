-- What changed is told row by row: `version` is the number of the change that touched the row last, `url_version` that of
-- the change that gave it its URL. Names of headers are no secret, so that showing a subscription needs no key.
ALTER TABLE subscriptions ADD COLUMN version BIGINT NOT NULL DEFAULT 0;
ALTER TABLE subscriptions ADD COLUMN url_version BIGINT NOT NULL DEFAULT 0;
ALTER TABLE subscriptions ADD COLUMN header_names TEXT;
ALTER TABLE subscriptions ADD COLUMN disabled_at TIMESTAMPTZ;
CREATE INDEX idx_subscriptions_version ON subscriptions (version);

-- Since when a receiver has only failed, when it did last, and in how many spells apart.
ALTER TABLE subscription_gates ADD COLUMN failing_from TIMESTAMPTZ;
ALTER TABLE subscription_gates ADD COLUMN failed_at TIMESTAMPTZ;
ALTER TABLE subscription_gates ADD COLUMN spell_at TIMESTAMPTZ;
ALTER TABLE subscription_gates ADD COLUMN spells INT NOT NULL DEFAULT 0;
CREATE INDEX idx_gates_waiting ON subscription_gates (subscription_id) WHERE parked = 1;
CREATE INDEX idx_gates_held ON subscription_gates (held_until) WHERE held_until IS NOT NULL;
CREATE INDEX idx_gates_failing ON subscription_gates (subscription_id) WHERE failures > 0;

-- The version of the subscription a result was sent by.
ALTER TABLE webhook_results ADD COLUMN sent_version BIGINT;
ALTER TABLE webhook_attempts ADD COLUMN error_detail TEXT;

-- Deliveries under way in the order of their ids: who of them has no job?
CREATE INDEX idx_saga_in_progress ON webhook_delivery_sagas (id) WHERE status = 'InProgress';

-- Which keys the secrets at rest are sealed with: their names and what they are recognised by, never the keys.
CREATE TABLE webhook_keys (
    key_id      TEXT PRIMARY KEY,
    fingerprint TEXT        NOT NULL,
    made_at     TIMESTAMPTZ NOT NULL
);

-- `subscription_rows` counts the changes that set a row's version, `subscriptions_deleted` is the last of them that
-- deleted one, `keys` is what those who make a key lock.
INSERT INTO webhook_state VALUES ('subscription_rows', 1), ('subscriptions_deleted', 0), ('keys', 0);
