DROP VIEW IF EXISTS outbox_memory;
-- step
DROP VIEW IF EXISTS outbox_orders;
