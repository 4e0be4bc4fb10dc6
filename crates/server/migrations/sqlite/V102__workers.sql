-- Who works here: each process says so every few seconds, with what it holds. For people to look at; nothing relies on it.
CREATE TABLE workers (
    worker     TEXT    PRIMARY KEY,
    lanes_json TEXT NOT NULL,
    started_at INTEGER NOT NULL,
    seen_at    INTEGER NOT NULL
) WITHOUT ROWID;
