DROP VIEW IF EXISTS outbox_memory;
DROP VIEW IF EXISTS outbox_orders;
