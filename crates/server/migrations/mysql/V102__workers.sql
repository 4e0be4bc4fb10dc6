-- Who works here: each process says so every few seconds, with what it holds. For people to look at; nothing relies on it.
CREATE TABLE workers (
    worker     VARBINARY(255) NOT NULL PRIMARY KEY,
    lanes_json TEXT NOT NULL,
    started_at DATETIME(6) NOT NULL,
    seen_at    DATETIME(6) NOT NULL
) ENGINE = InnoDB DEFAULT CHARACTER SET utf8mb4;
