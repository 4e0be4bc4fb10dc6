-- Access tokens: only their digests are kept.
CREATE TABLE api_tokens (
    id         INTEGER PRIMARY KEY AUTOINCREMENT,
    name       TEXT    NOT NULL,
    token_sha  BLOB    NOT NULL,
    scopes     TEXT    NOT NULL,
    lane       TEXT,
    created_at INTEGER NOT NULL,
    expires_at INTEGER,
    revoked_at INTEGER
);
