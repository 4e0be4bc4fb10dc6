-- A trouble that came back soon after it was over: told once `every` has passed, if it is still there.
ALTER TABLE outbox_alerts ADD COLUMN waiting_json TEXT;
