-- What was last told of a trouble (it is kept when the trouble is over, so that one that comes and goes is not told each
-- time), and the deaths that were counted lately: a settle may commit later than it is stamped.
ALTER TABLE outbox_alerts ADD COLUMN resolved_at DATETIME(6), ADD COLUMN message_id BIGINT, ADD COLUMN recent_json MEDIUMTEXT;
