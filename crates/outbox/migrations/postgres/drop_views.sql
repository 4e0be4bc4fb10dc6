DROP VIEW IF EXISTS logbook.outbox_memory;
DROP VIEW IF EXISTS governance.write_audit;
DROP VIEW IF EXISTS outbox_memory;
DROP VIEW IF EXISTS outbox_orders;
