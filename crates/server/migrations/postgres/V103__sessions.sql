-- Browsers that signed in: of a session only its digest is kept. It stands for its token and ends with it.
CREATE TABLE postrider_sessions (
    id          BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    session_sha BYTEA       NOT NULL UNIQUE,
    token_id    BIGINT      NOT NULL,
    created_at  TIMESTAMPTZ NOT NULL,
    expires_at  TIMESTAMPTZ NOT NULL
);
CREATE INDEX postrider_sessions_token ON postrider_sessions (token_id);
CREATE INDEX postrider_sessions_end ON postrider_sessions (expires_at);
