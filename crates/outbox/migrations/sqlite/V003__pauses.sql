-- Lanes nobody claims from until they are resumed. What is live in them stays as it is.
CREATE TABLE outbox_pauses (
    lane      TEXT    PRIMARY KEY,
    paused_at INTEGER NOT NULL
) WITHOUT ROWID;
