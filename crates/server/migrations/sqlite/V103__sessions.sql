-- Browsers that signed in: of a session only its digest is kept. It stands for its token and ends with it.
CREATE TABLE postrider_sessions (
    id          INTEGER PRIMARY KEY AUTOINCREMENT,
    session_sha BLOB    NOT NULL UNIQUE,
    token_id    INTEGER NOT NULL,
    created_at  INTEGER NOT NULL,
    expires_at  INTEGER NOT NULL
);
CREATE INDEX postrider_sessions_token ON postrider_sessions (token_id);
CREATE INDEX postrider_sessions_end ON postrider_sessions (expires_at);
