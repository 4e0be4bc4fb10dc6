-- What was last told of a trouble (it is kept when the trouble is over, so that one that comes and goes is not told each
-- time), and the deaths that were counted lately: a settle may commit later than it is stamped.
ALTER TABLE outbox_alerts ADD COLUMN resolved_at TIMESTAMPTZ;
ALTER TABLE outbox_alerts ADD COLUMN message_id BIGINT;
ALTER TABLE outbox_alerts ADD COLUMN recent_json TEXT;
